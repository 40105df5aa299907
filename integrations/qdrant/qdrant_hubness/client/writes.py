"""Writes: each point with its bias, noted while a refresh is at work, and carried on while a migration is.
No I/O: see milvus_hubness.client.steps.

What is carried to a copy is read from the collection after the write, and read again after it was carried:
whichever of two clients that write the same point carries last, it carries what the collection holds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
from qdrant_client import models

from milvus_hubness.banks.generations import Key
from milvus_hubness.client.steps import Ask
from milvus_hubness.codec.arrays import Floats
from milvus_hubness.codec.base import RowBiases, with_columns
from milvus_hubness.errors import DimensionMismatch, DualWriteFailed, HubnessError, WriteIntentFailed, name_some
from milvus_hubness.state import CollectionState
from qdrant_hubness.client.cached_state import CachedState
from qdrant_hubness.client.points import SELECTORS, Call, by_name, filter_of, ids_of, key_of, merged, parts, structs
from qdrant_hubness.client.rewrite import as_vector
from qdrant_hubness.client.state_cache import Operation, StateCache
from qdrant_hubness.store.requests import FAILURES
from qdrant_hubness.store.write_intents import line

CARRYING_ROUNDS = 20
IDS_PER_REQUEST = 1_000
_IN_PARALLEL = ("parallel", "method", "max_retries")
Columns = dict[str, Any]

_log = logging.getLogger("qdrant_hubness")


class Writing(StateCache):
    """What changes points."""

    def write(self, collection: str, calls: Sequence[Call]) -> Operation[list[Any]]:
        """The calls one after the other, and what each returned."""

        def attempt(cached: CachedState) -> Operation[list[Any]]:
            results = []
            for call in calls:
                results.append((yield from self._written(collection, cached, call)))
            return results

        return self.as_it_is(collection, attempt)

    def write_one(self, collection: str, call: Call) -> Operation[Any]:
        """The call, and what it returned."""
        return (yield from self.write(collection, [call]))[0]

    def upload(
        self, collection: str, points: Iterable[Any], batch_size: int, options: dict[str, Any]
    ) -> Operation[None]:
        """As QdrantClient.upload_points, whose options are: those of how it works in parallel are for plain
        collections."""
        cached = yield from self.cached_state(collection)
        if not (cached.states or cached.dual_write):
            yield Ask("upload_points", (collection, points), {"batch_size": batch_size, **options})
            return
        result = {name: each for name, each in options.items() if name not in _IN_PARALLEL}
        left = iter(points)
        while part := list(islice(left, batch_size)):
            yield from self.write(collection, [Call("upsert", {"points": part, **result})])

    def _written(self, collection: str, cached: CachedState, call: Call) -> Operation[Any]:
        watched = cached.dual_write is not None or (cached.intent_log is not None and call.brings_vectors)
        if watched:
            collection = cached.name
            call = (yield from self._settled(collection, call)).having(wait=True)
            if not self._ids(call):
                return models.UpdateResult(operation_id=0, status=models.UpdateStatus.COMPLETED)
        after: list[tuple[Key, Columns]] = []
        if call.brings_vectors and cached.states:
            call, notes, after = yield from self._stored(collection, cached, call)
            if cached.intent_log is not None:
                yield from self._note(cached, notes)
        result = yield Ask(call.method, (collection,), call.options)
        for key, columns in after:
            yield Ask("set_payload", (collection, columns, [key]), {"wait": True})
        if cached.dual_write is not None:
            yield from self._reach(cached, self._ids(call))
        return result

    # -- which points -------------------------------------------------------------------------------------

    def _settled(self, collection: str, call: Call) -> Operation[Call]:
        """The call about points that are named one by one, whatever it left open."""
        if not call.brings_vectors:
            where = filter_of(call.selector)
            if where is None:
                return call
            ids = yield from self._matching(collection, where)
            return call.having(**{SELECTORS[call.method]: models.PointIdsList(points=list(ids))})
        if not call.is_conditional:
            return call
        points = structs(call.options["points"]) if call.method == "upsert" else list(call.options["points"])
        ids = [key_of(each.id) for each in points]
        there = {r.id for r in (yield Ask("retrieve", (collection, ids), {"with_payload": False}))}
        mode, where = call.options.get("update_mode"), call.options.get("update_filter")
        written = there
        if where is not None:
            among = models.Filter(must=[models.HasIdCondition(has_id=ids), where])
            written = set((yield from self._matching(collection, among)))
        if mode == models.UpdateMode.INSERT_ONLY:
            written = set()
        if call.method == "upsert" and mode != models.UpdateMode.UPDATE_ONLY:
            written = written | (set(ids) - there)
        return call.having(points=[p for p, id in zip(points, ids, strict=True) if id in written])

    def _matching(self, collection: str, where: models.Filter) -> Operation[list[Key]]:
        found: list[Key] = []
        offset: Any = None
        while True:
            options = {"scroll_filter": where, "limit": IDS_PER_REQUEST, "offset": offset}
            page, offset = yield Ask("scroll", (collection,), {**options, "with_payload": False})
            found += [record.id for record in page]
            if offset is None:
                return found

    @staticmethod
    def _ids(call: Call) -> list[Key]:
        if call.brings_vectors:
            return [key_of(each.id) for each in call.options["points"]]
        return ids_of(call.selector)

    # -- in augmented form ---------------------------------------------------------------------------------

    def _stored(
        self, collection: str, cached: CachedState, call: Call
    ) -> Operation[tuple[Call, list[Any], list[tuple[Key, Columns]]]]:
        """The call with its points as they are stored, the notes of that, and what payloads are to be told
        afterwards, where the call brings none."""
        upserts = call.method == "upsert"
        points = structs(call.options["points"]) if upserts else list(call.options["points"])
        vectors = [by_name(point.vector) for point in points]
        columns = yield from self._convert(collection, cached, points, vectors, valid=True)
        notes = [
            line(field, key_of(point.id), own[field], {n: result[n] for n in _fields_of(state) if n in result})
            for point, own, result in zip(points, vectors, columns, strict=True)
            for field, state in cached.states.items()
            if field in own
        ]
        kind = models.PointStruct if upserts else models.PointVectors
        made = [
            kind.model_construct(
                id=point.id, vector=merged(own), **({"payload": {**(point.payload or {}), **result}} if upserts else {})
            )
            for point, own, result in zip(points, vectors, columns, strict=True)
        ]
        after = [] if upserts else [(key_of(p.id), c) for p, c in zip(points, columns, strict=True) if c]
        return call.having(points=made), notes, after

    def _convert(
        self,
        collection: str,
        cached: CachedState,
        points: Sequence[Any],
        vectors: Sequence[dict[str, Any]],
        *,
        valid: bool,
    ) -> Operation[list[Columns]]:
        """Vectors by name are brought into the augmented form, in place. Returns what each payload is to say
        of biases. valid: refuse points without a direction under Cosine or with NaN, instead of bias 0."""
        columns: list[Columns] = [{} for _ in points]
        for field, state in cached.states.items():
            places = [i for i, own in enumerate(vectors) if own.get(field) is not None]
            if not places:
                continue
            given = [as_vector(vectors[i][field]) for i in places]
            if odd := [points[i].id for i, own in zip(places, given, strict=True) if len(own) != state.dim]:
                raise DimensionMismatch(f"vectors of points {name_some(odd)} have not {state.dim} dimensions")
            rows = np.array(given, np.float32)
            rows = state.require_storable(rows, "point") if valid else state.layout.rows(rows)
            slots: Floats = yield from self.slots(collection, state, rows)
            locality_hints: Floats = yield from self.cells(collection, state, rows)
            biases = RowBiases(dict(enumerate(slots.T)), state.profile.epoch, locality_hints)
            encoded = state.codec.encode_rows(rows, biases)
            stored = state.codec.form.split(encoded.pop(field, rows)).tolist()
            payloads = with_columns([{} for _ in places], encoded if state.codec.leaves_vectors else {})
            for i, own, payload in zip(places, stored, payloads, strict=True):
                vectors[i][field] = own
                columns[i] |= payload
        return columns

    def _note(self, cached: CachedState, notes: list[Any]) -> Operation[None]:
        """Raises WriteIntentFailed where a write cannot be noted."""
        intent_log = cached.intent_log
        if intent_log is None or not notes:
            return
        try:
            for part in parts(notes, IDS_PER_REQUEST):
                yield Ask("upsert", (intent_log.collection, part), {"wait": True})
        except FAILURES as error:
            raise WriteIntentFailed(
                f"nothing was written: it could not be noted in {intent_log.collection!r}: {error}"
            ) from error

    # -- the copy -----------------------------------------------------------------------------------------

    def _reach(self, cached: CachedState, ids: list[Key]) -> Operation[None]:
        """What the collection holds of these points, its copy holds too. Raises DualWriteFailed."""
        dual_write = cached.dual_write
        if dual_write is None or not ids:
            return
        try:
            yield from self._carry(cached, dual_write.collection, ids)
            return
        except (HubnessError, *FAILURES) as error:
            if not dual_write.required:
                _log.warning(
                    "written to %r, but not to %r, which is being made of it and is repaired later: %s",
                    cached.name,
                    dual_write.collection,
                    error,
                )
                return
        for name in (cached.name, dual_write.collection):
            self.forget(name)
        now = yield from self.cached_state(cached.name)
        if now.dual_write is None:
            return
        try:
            yield from self._carry(now, now.dual_write.collection, ids)
        except (HubnessError, *FAILURES) as error:
            raise DualWriteFailed(
                f"written to {cached.name!r}, but not to {now.dual_write.collection!r}, where its points are "
                f"carried: {error}. Repeat the write"
            ) from error

    def _carry(self, cached: CachedState, dual_write: str, ids: list[Key]) -> Operation[None]:
        target = yield from self.cached_state(dual_write)
        for part in parts(list(dict.fromkeys(ids)), IDS_PER_REQUEST):
            before: dict[Key, Any] | None = None
            for _ in range(CARRYING_ROUNDS):
                read = yield Ask("retrieve", (cached.name, part), {"with_payload": True, "with_vectors": True})
                now = {record.id: record for record in read}
                if now == before:
                    break
                before = now
                yield from self._put(cached, target, dual_write, list(now.values()))
                if gone := [id for id in part if id not in now]:
                    selector = models.PointIdsList(points=gone)
                    yield Ask("delete", (dual_write, selector), {"wait": True})
            else:
                raise DualWriteFailed(f"points of {cached.name!r} change faster than they can be carried")

    def _put(self, cached: CachedState, target: CachedState, dual_write: str, records: list[Any]) -> Operation[None]:
        if not records:
            return
        shown = [cached.shown(record) for record in records]
        vectors = [by_name(record.vector) for record in shown]
        columns = yield from self._convert(dual_write, target, shown, vectors, valid=False)
        points = [
            models.PointStruct.model_construct(
                id=record.id, vector=merged(own), payload={**(record.payload or {}), **result}
            )
            for record, own, result in zip(shown, vectors, columns, strict=True)
        ]
        yield Ask("upsert", (dual_write, points), {"wait": True})


def _fields_of(state: CollectionState) -> tuple[str, ...]:
    """What of the payload tells of a field's biases, where they lie there."""
    return state.codec.hidden_fields if state.codec.leaves_vectors else ()
