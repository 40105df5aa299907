"""Writes: with biases, and sent to the copy too during a migration. No I/O.

A dual write reads the points from the collection after the write to
it, writes them to the copy, and reads them once more. So the copy is
right, whichever of two clients that write the same point comes last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
from qdrant_client import models
from qdrant_client._pydantic_compat import construct
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse

from milvus_hubness import (
    DimensionMismatch,
    DualWriteFailed,
    HubnessError,
    InvalidInput,
    MultiVectors,
    PartialWrite,
)
from milvus_hubness.extending import (
    Ask,
    CollectionState,
    DualWrite,
    Floats,
    Items,
    Key,
    Operation,
    Pause,
    log,
    name_some,
    packed_vectors,
)
from qdrant_hubness.client.cached_state import CachedState
from qdrant_hubness.client.points import (
    SELECTORS,
    Call,
    by_name,
    calls_of,
    filter_of,
    ids_of,
    key_of,
    merged,
    parts,
    structs,
)
from qdrant_hubness.client.rewrite import as_tokens, as_vector
from qdrant_hubness.client.state_cache import IDS_PER_REQUEST, StateCache
from qdrant_hubness.store.requests import FAILURES, error_text, lacks_points
from qdrant_hubness.store.rows import vector_words
from qdrant_hubness.store.sizes import in_parts

DUAL_WRITE_ROUNDS = 20
"""Attempts to copy points that other clients change meanwhile."""

GENERATION_ROUNDS = 5
"""How often biases are written again while one refresh follows the other."""

REQUEST_BYTES = 24_000_000
"""Bytes of a request, rather over- than underestimated; a server takes 32 MB by default."""

UPLOAD_RETRIES = 3
"""How often a batch of an upload is sent again after failures, by default: as QdrantClient does."""

_NOT_OF_UPSERT = ("parallel", "method", "max_retries")
"""Options of an upload that an upsert does not have: about processes, which a client with caches
does not start, and about retries.
"""

Columns = dict[str, Any]
"""Fields of a payload that hold biases."""

NOTHING_TO_DO = models.UpdateResult(operation_id=0, status=models.UpdateStatus.COMPLETED)
"""The answer to a call that changes no point."""


class Writing(StateCache):
    """The methods that change points."""

    def write(self, collection: str, calls: Sequence[Call]) -> Operation[list[Any]]:
        """Run the calls one after the other, and return their results."""

        def attempt(cached: CachedState) -> Operation[list[Any]]:
            results = []
            for call in calls:
                result = yield from self._write(collection, cached, call)
                results.append(result)
            return results

        return self.retrying(collection, None, attempt, attempt)

    def batch_update(
        self, collection: str, operations: Sequence[Any], options: dict[str, Any]
    ) -> Operation[list[Any]]:
        """As QdrantClient.batch_update_points; one request per operation if biases or a copy need it."""

        def attempt(cached: CachedState) -> Operation[list[Any]]:
            if not (cached.states or cached.dual_write):
                ask = Ask("batch_update_points", (collection, operations), options)
                answered: list[Any] = yield ask
                return answered

            results = []
            for call in calls_of(operations, options):
                result = yield from self._write(collection, cached, call)
                results.append(result)
            return results

        return self.retrying(collection, None, attempt, attempt)

    def write_one(self, collection: str, call: Call) -> Operation[Any]:
        return (yield from self.write(collection, [call]))[0]

    def upload(
        self, collection: str, points: Iterable[Any], batch_size: int, options: dict[str, Any]
    ) -> Operation[None]:
        """As QdrantClient.upload_points, but the options about parallel work have no effect.

        Each batch is a write of its own: an upload may begin before a migration, and end after it.
        """
        if batch_size < 1:
            raise InvalidInput(f"batch_size must be at least 1, not {batch_size}")

        max_retries = options.get("max_retries", UPLOAD_RETRIES)
        upsert_options = {
            name: value for name, value in options.items() if name not in _NOT_OF_UPSERT
        }

        remaining = iter(points)
        while batch := list(islice(remaining, batch_size)):
            cached = yield from self.cached_state(collection)
            # A corrected point may have to be read back for its bias, so it must be there.
            defaults = {"wait": bool(cached.states)}
            call = Call("upsert", {"points": structs(batch), **defaults, **upsert_options})
            yield from self._upload_batch(collection, call, max_retries)

    def _upload_batch(self, collection: str, call: Call, max_retries: int) -> Operation[None]:
        """Write a batch of an upload; again after a failure, which may have been of the connection,
        and as often as a rate of strict mode demands.
        """
        retries = 0
        while True:
            try:
                yield from self.write(collection, [call])
                return
            except ResourceExhaustedResponse as error:
                yield Pause(float(max(1, error.retry_after_s)))
            except FAILURES as error:
                # Errors of this package are not about the connection.
                if isinstance(error, HubnessError) or retries >= max_retries:
                    raise

                retries += 1

    def _write(self, collection: str, cached: CachedState, call: Call) -> Operation[Any]:
        requested = collection
        written = call
        collection = cached.real_name or collection
        if cached.dual_write is not None:
            # A copy gets points by their ids, after the write was carried out.
            collection = cached.name
            call = yield from self._with_ids(collection, call)
            call = call.having(wait=True)
            if not self._ids(call):
                return NOTHING_TO_DO

        # A payload that no prior can use would make the next refresh fail.
        if (payload := call.options.get("payload")) is not None:
            for state in cached.states.values():
                state.expect_values([payload])

        if cached.former:
            # A failure is logged: the call itself says whether it can be done, and only those who have
            # not heard of the switch would read it there, for some seconds.
            send = partial(self._send_to_former, call)
            yield from self.reach_copy(cached.name, cached, None, send)

        payloads: list[tuple[Key, Columns]] = []
        if call.brings_vectors and cached.states:
            if call.method != "upsert":
                # Their biases are set apart from the vectors, and only where these change.
                call = yield from self._with_ids(collection, call)
                if not self._ids(call):
                    return NOTHING_TO_DO
            call, payloads = yield from self._encode_call(collection, cached, call)

        try:
            result = yield from self._send(collection, cached, call)
        except (PartialWrite, *FAILURES) as error:
            # A failed request may have been carried out, or a part of it: the caller sees the
            # error, and what the collection now holds gets its biases, and goes to the copy.
            yield from self._complete(collection, cached, call, dict(payloads), error)
            raise

        yield from self._set_biases(collection, payloads)
        if written.brings_vectors:
            yield from self._renew_biases(requested, cached, written)
        if cached.dual_write is not None and not cached.former:
            yield from self._write_to_copy(cached, self._ids(call))
        return result

    def _send_to_former(
        self, call: Call, cached: CachedState, dual_write: DualWrite
    ) -> Operation[None]:
        """Send a call to the former copy, before this collection gets it.

        Clients that have not heard of the switch write to the former copy, and then take over to
        this one what they read there, until they read it twice. What they have not read of this call
        comes to this collection after that, and so nothing of either is lost. Points that were read
        here and written there would undo the calls of others.
        """
        former = dual_write.collection
        state = yield from self.cached_state(former)
        payloads: list[tuple[Key, Columns]] = []
        if call.brings_vectors and state.states:
            # What a collection without a correction takes, its former copy takes with bias 0.
            call, payloads = yield from self._encode_call(
                former, state, call, valid=bool(cached.states)
            )
        yield from self._send(former, state, call)
        yield from self._set_biases(former, payloads)

    def _send(
        self, collection: str, cached: CachedState, call: Call, *, is_added: bool = False
    ) -> Operation[Any]:
        """Send a call; in parts if it has become larger than QdrantClient's: augmented vectors have
        more digits, and the ids of a filter may be many. Raises PartialWrite if a later part fails.

        is_added: whether it is no call of the user's, see `divided`.
        """
        items = call.items if is_added or cached.states or cached.dual_write else []
        if not items:
            return (yield Ask(call.method, (collection,), call.options))

        def request(some_items: list[Any]) -> Ask:
            part = call if len(some_items) == len(items) else call.about(some_items)
            return Ask(part.method, (collection,), part.options)

        def stopped(done: int, _: list[Any], error: Exception) -> PartialWrite:
            failed = PartialWrite(
                f"{call.method} wrote {done:,} of {len(items):,} points of {collection!r}, and "
                f"then failed: {error_text(error)}: write the others again"
            )
            failed.row_count = done
            return failed

        # Sizes are estimates: a part that is too large all the same is halved. The first request is
        # the user's own, and fails as such.
        results = yield from self.divided(
            collection,
            in_parts(items, rows=cached.limits.rows_per_write, most_bytes=REQUEST_BYTES),
            request,
            stopped,
            is_added=is_added,
        )
        return results[-1]

    def _set_biases(
        self, collection: str, payloads: Iterable[tuple[Key, Columns]]
    ) -> Operation[None]:
        for key, columns in payloads:
            try:
                ask = Ask("set_payload", (collection, columns, [key]), {"wait": True})
                yield from self.patiently(ask)
            except FAILURES as error:
                # A request about one point is carried out whole
                # or not at all: the point was deleted meanwhile.
                if not lacks_points(error):
                    raise

    def _renew_biases(self, collection: str, cached: CachedState, call: Call) -> Operation[None]:
        """Write the biases of points again if the state has become too old since they were encoded.

        A refresh may have begun after it was read, and may have read the points before they were
        written: its generation then gets their biases, too.
        """
        for _ in range(GENERATION_ROUNDS):
            newest = yield from self.cached_state(collection)
            if newest.generations == cached.generations:
                return

            cached = newest
            yield from self._bias_again(cached.real_name or collection, cached, call)

    def _bias_again(self, collection: str, cached: CachedState, call: Call) -> Operation[None]:
        """Write the biases of the points of a call again, of the vectors that they have now: a
        condition may have left some as they were, and another client may have changed some since.
        """
        ids = [key_of(point.id) for point in _points_of(call)]
        records = yield from self.retrieved(collection, ids, with_payload=True, with_vectors=True)
        # Augmented vectors have their biases in them.
        beside = {field for field, state in cached.states.items() if state.codec.leaves_vectors}
        vectors = [
            {field: vector for field, vector in by_name(record.vector).items() if field in beside}
            for record in records
        ]
        points = [
            record.model_copy(update={"vector": plain})
            for record, plain in zip(records, vectors, strict=True)
        ]
        update = Call("update_vectors", {"points": points})
        _, payloads = yield from self._encode_call(collection, cached, update, valid=False)
        yield from self._set_biases(collection, payloads)

    def _complete(
        self,
        collection: str,
        cached: CachedState,
        call: Call,
        payloads: dict[Key, Columns],
        error: Exception,
    ) -> Operation[None]:
        """Make a request that failed leave no point half written: neither a vector without its bias
        nor a difference between the collection and its copy.
        """
        if payloads and lacks_points(error.__cause__ or error):
            keys = yield from self._update_existing(collection, cached, call)
            yield from self._set_biases(collection, [(key, payloads[key]) for key in keys])
        elif payloads and isinstance(error, PartialWrite):
            keys = self._ids(call)[: error.row_count]
            yield from self._set_biases(
                collection, [(key, payloads[key]) for key in keys if key in payloads]
            )
        elif payloads:
            # Whether it was carried out is unknown.
            with suppress(HubnessError, *FAILURES):
                yield from self._bias_again(collection, cached, call)

        if cached.dual_write is None or cached.former:
            return

        try:
            yield from self._write_to_copy(cached, self._ids(call))
        except HubnessError as copy_error:
            message = "%r may have taken over a part of a failed write that its copy lacks: %s"
            log.warning(message, cached.name, copy_error)

    def _update_existing(
        self, collection: str, cached: CachedState, call: Call
    ) -> Operation[list[Key]]:
        """Send a request for new vectors again, for the points that exist, until it is
        acknowledged; return their ids. A point of the first request that counts as written may not
        be: see PointsMissing.
        """
        points = {key_of(point.id): point for point in call.options["points"]}
        while points:
            records = yield from self.retrieved(collection, list(points), with_payload=False)
            points = {record.id: points[record.id] for record in records}
            if not points:
                break

            try:
                yield from self._send(collection, cached, call.having(points=list(points.values())))
            except (PartialWrite, *FAILURES) as error:
                if not lacks_points(error.__cause__ or error):
                    raise

                continue

            break

        return list(points)

    # -- the ids of points -------------------------------------------------------------------------

    def _with_ids(self, collection: str, call: Call) -> Operation[Call]:
        """Return the call with the ids that its filter or its condition selects now."""
        if not call.brings_vectors:
            where = filter_of(call.selector)
            if where is None:
                return call

            ids = yield from self._matching(collection, where)
            return call.having(**{SELECTORS[call.method]: models.PointIdsList(points=list(ids))})

        if not call.is_conditional:
            return call

        points = _points_of(call)
        ids = [key_of(point.id) for point in points]
        records = yield from self.retrieved(collection, ids, with_payload=False)
        existing = {record.id for record in records}

        # The condition is about points that exist; an upsert also makes the others.
        mode = call.options.get("update_mode")
        where = call.options.get("update_filter")
        if mode == models.UpdateMode.INSERT_ONLY:
            selected = set()
        elif where is not None:
            among = models.Filter(must=[models.HasIdCondition(has_id=list(ids)), where])
            matching = yield from self._matching(collection, among)
            selected = set(matching)
        else:
            selected = existing

        if call.method == "upsert" and mode != models.UpdateMode.UPDATE_ONLY:
            selected = selected | (set(ids) - existing)

        selected_points = [point for point, id in zip(points, ids, strict=True) if id in selected]
        return call.having(points=selected_points)

    def _matching(self, collection: str, where: models.Filter) -> Operation[list[Key]]:
        cached = yield from self.cached_state(collection)
        size = min(IDS_PER_REQUEST, cached.limits.rows_per_read)
        records = yield from self.scrolled(collection, where, size, with_payload=False)
        return [record.id for record in records]

    @staticmethod
    def _ids(call: Call) -> list[Key]:
        if call.brings_vectors:
            return [key_of(point.id) for point in _points_of(call)]
        return ids_of(call.selector)

    # -- encoding ----------------------------------------------------------------------------------

    def _encode_call(
        self, collection: str, cached: CachedState, call: Call, *, valid: bool = True
    ) -> Operation[tuple[Call, list[tuple[Key, Columns]]]]:
        """Return the call with augmented vectors, and the payloads to set after a call without
        payloads. valid: as in `_encode`.
        """
        points = _points_of(call)
        vectors = [by_name(point.vector) for point in points]
        columns = yield from self._encode(collection, cached, points, vectors, valid=valid)

        encoded: list[Any] = []
        if call.method == "upsert":
            for point, augmented, biases in zip(points, vectors, columns, strict=True):
                payload = {**(point.payload or {}), **biases}
                encoded.append(
                    construct(
                        models.PointStruct, id=point.id, vector=merged(augmented), payload=payload
                    )
                )

            return call.having(points=encoded), []

        payloads = []
        for point, augmented, biases in zip(points, vectors, columns, strict=True):
            encoded.append(construct(models.PointVectors, id=point.id, vector=merged(augmented)))
            if biases:
                payloads.append((key_of(point.id), biases))

        return call.having(points=encoded), payloads

    def _encode(
        self,
        collection: str,
        cached: CachedState,
        points: Sequence[Any],
        vectors: Sequence[dict[str, Any]],
        *,
        valid: bool,
    ) -> Operation[list[Columns]]:
        """Replace vectors by augmented vectors, in place,
        and return the bias fields for each point's payload.

        valid: refuse points with NaN, or of length 0 under Cosine; else their bias is 0.
        """
        columns: list[Columns] = [{} for _ in points]
        for field, state in cached.states.items():
            # A point need not have all vectors of the collection.
            having = [i for i, by_field in enumerate(vectors) if by_field.get(field) is not None]
            if not having:
                continue

            present_points = [points[i] for i in having]
            rows = _rows(collection, state, present_points, [vectors[i][field] for i in having])
            rows = state.require_storable(rows, "point") if valid else state.layout.rows(rows)

            items = yield from self._items(collection, state, present_points)
            biases, _ = yield from self._biases.of_vectors(collection, state, rows, items)
            encoded = state.codec.encode_rows(rows, biases)
            stored = state.codec.form.split(encoded.pop(field, rows)).tolist()
            # Where the vectors are augmented, Qdrant stores no further field.
            in_payloads = encoded if state.codec.leaves_vectors else {}
            payloads = _payloads(in_payloads, len(having))
            for i, stored_vector, payload in zip(having, stored, payloads, strict=True):
                vectors[i][field] = stored_vector
                columns[i] |= payload

        return columns

    def _items(
        self, collection: str, state: CollectionState, points: Sequence[Any]
    ) -> Operation[Items]:
        """Return points as rows for a prior and for kinds, with the payloads that they have if the
        call brings vectors only.
        """
        if not state.needs_rows:
            return Items([], [])

        keys = [key_of(point.id) for point in points]
        payloads = {
            key: point.payload or {}
            for key, point in zip(keys, points, strict=True)
            if hasattr(point, "payload")
        }
        names = sorted(state.fields_read)
        lacking = [key for key in keys if key not in payloads]
        if names:
            records = yield from self.retrieved(collection, lacking, with_payload=names)
            payloads |= {record.id: record.payload or {} for record in records}
        return Items(keys, [payloads.get(key, {}) for key in keys])

    # -- the copy ----------------------------------------------------------------------------------

    def _write_to_copy(self, cached: CachedState, ids: list[Key]) -> Operation[None]:
        """Write these points of the collection to its copy; delete those it no longer has.

        Raises DualWriteFailed.
        """
        if ids:
            work = partial(self._copy_points, ids)
            yield from self.reach_copy(cached.name, cached, None, work)

    def _copy_points(
        self, ids: list[Key], cached: CachedState, dual_write: DualWrite
    ) -> Operation[None]:
        copy = dual_write.collection
        target = yield from self.cached_state(copy)
        size = min(IDS_PER_REQUEST, cached.limits.rows_per_read)
        for some_ids in parts(list(dict.fromkeys(ids)), size):
            copied: dict[Key, Any] | None = None
            for _ in range(DUAL_WRITE_ROUNDS):
                read = yield from self.retrieved(
                    cached.name, some_ids, with_payload=True, with_vectors=True
                )
                now = {record.id: record for record in read}
                # Two equal reads: nobody changed the points while they were copied.
                if now == copied:
                    break

                copied = now
                yield from self._put(cached, target, copy, list(now.values()))

                missing = [id for id in some_ids if id not in now]
                if missing:
                    selector = models.PointIdsList(points=missing)
                    yield from self.patiently(Ask("delete", (copy, selector), {"wait": True}))
            else:
                raise DualWriteFailed(
                    f"points of {cached.name!r} changed in each of {DUAL_WRITE_ROUNDS} attempts to "
                    f"write them to its copy {copy!r}: fewer clients at once must write the same "
                    "points"
                )

    def _put(
        self, cached: CachedState, target: CachedState, copy: str, records: list[Any]
    ) -> Operation[None]:
        if not records:
            return

        points = [
            construct(models.PointStruct, id=shown.id, vector=shown.vector, payload=shown.payload)
            for shown in map(cached.shown, records)
        ]
        call = Call("upsert", {"points": points, "wait": True})
        call, _ = yield from self._encode_call(copy, target, call, valid=False)
        yield from self._send(copy, target, call, is_added=True)


def _points_of(call: Call) -> list[Any]:
    """Return the points of a call that brings vectors."""
    points = call.options["points"]
    return structs(points) if call.method == "upsert" else list(points)


def _rows(
    collection: str, state: CollectionState, points: Sequence[Any], vectors: list[Any]
) -> Floats:
    """Return the vectors (n, d) of these points, or several of each.

    Raises DimensionMismatch and InvalidInput, which name points.
    """
    if state.layout.multi_vectors:
        return _token_rows(collection, state, points, vectors)
    rows = packed_vectors(vectors, state.dim)
    if rows is not None:
        return rows

    # Arrays and other sequences, one by one.
    listed = [as_vector(vector) for vector in vectors]
    odd = [
        point.id for point, vector in zip(points, listed, strict=True) if len(vector) != state.dim
    ]
    if odd:
        raise _other_dimension(collection, state, odd)

    return np.array(listed, np.float32)


def _token_rows(
    collection: str, state: CollectionState, points: Sequence[Any], vectors: list[Any]
) -> Floats:
    """Return the several vectors of these points. Raises as `_rows`."""
    rows = [as_tokens(vector) for vector in vectors]
    empty = [point.id for point, row in zip(points, rows, strict=True) if not len(row)]
    if empty:
        raise InvalidInput(
            f"points {name_some(empty)} of {collection!r} have an empty list as "
            f"{vector_words(state.field)}: give each at least one vector, or leave the multivector out"
        )

    odd = [
        point.id
        for point, row in zip(points, rows, strict=True)
        if any(len(token) != state.dim for token in row)
    ]
    if odd:
        raise _other_dimension(collection, state, odd)
    return cast(Floats, MultiVectors.stored(rows, state.dim))


def _other_dimension(
    collection: str, state: CollectionState, keys: Sequence[Key]
) -> DimensionMismatch:
    return DimensionMismatch(
        f"the vectors of points {name_some(keys)} do not have {state.dim} dimensions, as "
        f"{collection!r} has"
    )


def _payloads(columns: Columns, count: int) -> list[dict[str, Any]]:
    """Return a payload for each of `count` points, from the values of each key."""
    return [{key: values[i] for key, values in columns.items()} for i in range(count)]
