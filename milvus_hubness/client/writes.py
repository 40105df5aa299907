"""`insert`, `upsert` and `create_collection`, without I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from pymilvus.exceptions import DataNotMatchException, ExceptionsMessage, MilvusException
from pymilvus.milvus_client.index import IndexParams

from milvus_hubness.banks.generations import Made
from milvus_hubness.client import new_collections
from milvus_hubness.client.biases import Bias, Biasing
from milvus_hubness.client.new_collections import CorrectionConfig, NewCollection
from milvus_hubness.client.other_locations import RerankingRewrite, rewrite_of
from milvus_hubness.client.state_cache import PERHAPS_OUTDATED, CachedState
from milvus_hubness.client.steps import Ask, Compute, InStore, Operation, Pause
from milvus_hubness.client.write_intents import ROWS_PER_REQUEST, NotesWrites
from milvus_hubness.codec.arrays import Floats
from milvus_hubness.codec.base import PENDING
from milvus_hubness.errors import InvalidInput, UnsupportedOperation, WriteIntentFailed
from milvus_hubness.state import BankReference
from milvus_hubness.stores.protocols import undo_save_bank

T = TypeVar("T")
PUT_BACK_TRIES, PUT_BACK_PAUSE = 5, 0.2


class Writing(Biasing, NotesWrites):
    """Operations that change a collection."""

    def _written(
        self,
        method: str,
        collection: str,
        data: Any,
        timeout: float | None,
        partition_name: str | None,
        bias: Bias,
        options: Mapping[str, Any],
        *,
        valid: bool = True,
    ) -> Operation[tuple[dict[str, Any], CachedState]]:
        """Insert or upsert rows, with a bias for each row that has a vector.

        Returns the answer, and the collection state that the write used, or a newer one. valid: refuse rows
        without a direction under COSINE or with NaN, instead of giving them bias 0. If a write to a side
        collection fails, the rows are written, their biases are not, and the error is raised. Raises
        WriteIntentFailed if the write could not be noted; nothing is written then.
        """

        inserted = method == "insert"

        def by(method: str) -> Callable[[CachedState], Operation[tuple[dict[str, Any], list[Any]]]]:
            def call(cached: CachedState) -> Operation[tuple[dict[str, Any], list[Any]]]:
                rows = [data] if isinstance(data, dict) else data
                stored, side_biases = yield from self._encoded(
                    cached, collection, data, bias, timeout, are_new=inserted, valid=valid
                )
                if cached.intent_log is not None:
                    noted = [stored] if isinstance(stored, dict) else stored
                    yield from self._note_rows(
                        cached, collection, method, noted, partition_name, timeout, options
                    )
                written = yield from _put(
                    cached, Ask(method, (collection, stored, timeout, partition_name), dict(options))
                )
                upserts = []
                for rewrite, biases, epoch in side_biases:
                    keys = written.get("ids") or [row[cached.key_field] for row in rows]
                    lines = rewrite.side_rows(cached.key_field, list(keys), biases, epoch)
                    upserts.append((rewrite.side, lines))
                return written, upserts

            return call

        # The rows are written at this point: a later failure must not write them again.
        (written, _), (_, upserts), cached = yield from self._noted(
            collection, timeout, by(method), self._repeating(collection, method, by, options)
        )
        try:
            for side, lines in upserts:
                yield Ask("upsert", (side, lines, timeout))
        except PERHAPS_OUTDATED:
            self.forget(collection)
            raise
        return written, cached

    def _encoded(
        self,
        cached: CachedState,
        collection: str,
        data: Any,
        bias: Bias,
        timeout: float | None,
        *,
        are_new: bool,
        valid: bool = True,
    ) -> Operation[tuple[Any, list[tuple[RerankingRewrite, dict[int, Floats], int]]]]:
        """Return the rows as they are stored, and the entries of side collections.

        The entries have their biases and epoch.
        """
        rows = [data] if isinstance(data, dict) else data
        stored = data
        side_biases: list[tuple[RerankingRewrite, dict[int, Floats], int]] = []
        for state in cached.states.values():
            if not _bring_vectors(rows, state.field):
                continue
            rewrite = rewrite_of(state, cached.reading)
            vectors = rewrite.vectors_of(rows, valid=valid)
            biases = yield from self._biases(collection, state, vectors, bias, timeout, are_new=are_new)
            locality_hints = yield from self._locality_hints(collection, state, vectors, bias)
            epoch = PENDING if bias == "pending" else state.profile.epoch
            taken = rows if stored is data else stored
            stored = rewrite.rows_in(taken, vectors, biases, epoch, locality_hints)
            if isinstance(rewrite, RerankingRewrite) and rewrite.side and bias == "compute":
                side_biases.append((rewrite, biases, epoch))
        return stored, side_biases

    def write_import_files(
        self,
        collection: str,
        rows: Iterable[dict[str, Any]],
        folder: Path,
        bias: Bias,
        timeout: float | None,
    ) -> Operation[list[str]]:
        """Write rows as the collection stores them to Parquet files, and return their paths.

        Raises UnsupportedOperation if an import would miss a side collection, a copy or the write-intent log;
        InvalidInput for a collection that is not corrected and for rows without a corrected vector.
        """
        self.forget(collection)
        cached = yield from self.cached_state(collection, timeout)
        self._expect_importable(collection, cached)
        writer = yield InStore(lambda store: store.import_writer(collection, folder))
        batch: list[dict[str, Any]] = []
        source, number = iter(rows), 0
        while batch := list(islice(source, ROWS_PER_REQUEST)):
            for i, row in enumerate(batch, number):
                if lacking := [name for name in cached.states if name not in row]:
                    raise InvalidInput(f"row {i} lacks the vector field {lacking[0]!r}: add it")
            stored, _ = yield from self._encoded(cached, collection, batch, bias, timeout, are_new=True)
            yield Compute(partial(writer.append, stored))
            number += len(batch)
        paths: list[str] = yield Compute(writer.commit)
        return paths

    def _expect_importable(self, collection: str, cached: CachedState) -> None:
        if not cached.states:
            raise InvalidInput(f"collection {collection!r} is not corrected: use pymilvus's bulk writer")
        for state in cached.states.values():
            if state.reranking and state.reranking.side:
                raise UnsupportedOperation(
                    f"an import into {collection!r} would miss the biases in {state.reranking.side!r}: "
                    "import "
                    "the rows with pymilvus's bulk writer, and run `milvus-hubness refresh`"
                )
        if cached.dual_write or cached.intent_log:
            raise UnsupportedOperation(
                f"an import into {collection!r} would be missed by the job at work on it: wait until it ends"
            )

    def _repeating(
        self,
        collection: str,
        method: str,
        by: Callable[[str], Callable[[CachedState], Operation[T]]],
        options: Mapping[str, Any],
    ) -> Callable[[CachedState], Operation[T]]:
        """Return the same write for a repetition, which creates no duplicate row.

        The repetition raises WriteIntentFailed if it would add to a value twice.
        """
        if not options.get("field_ops"):
            return by("upsert" if method == "insert" else method)

        def refuse(cached: CachedState) -> Operation[T]:
            yield from ()
            raise WriteIntentFailed(
                f"written to {collection!r} so slowly that a refresh, which began meanwhile, may have undone "
                "it: read the rows again, and repeat the update where it is missing"
            )

        return refuse

    def _deleted(
        self,
        collection: str,
        ids: Any,
        timeout: float | None,
        filter: str | None,
        partition_name: str | None,
        options: Mapping[str, Any],
    ) -> Callable[[CachedState], Operation[dict[str, int]]]:
        """Delete rows. Biases in a side collection are deleted too if the rows are named by key.

        Otherwise the next refresh removes these biases.
        """

        def call(cached: CachedState) -> Operation[dict[str, int]]:
            keys = [*_listed(options.get("pks")), *_listed(ids)]
            done: dict[str, int]
            if cached.intent_log is not None and filter and not keys:
                done = yield from self._delete_matching(
                    cached, collection, cached.intent_log, filter, timeout, partition_name, options
                )
            else:
                yield from self._note_gone(cached, collection, keys, timeout, partition_name)
                args = (collection, ids, timeout, filter, partition_name)
                done = yield Ask("delete", args, dict(options))
            for state in cached.states.values():
                if ids and state.reranking and state.reranking.side:
                    yield Ask("delete", (state.reranking.side, ids, timeout))
            return done

        return call

    def create_collection(
        self,
        collection: str,
        new: NewCollection,
        hubness: CorrectionConfig | Sequence[CorrectionConfig] | None,
        timeout: float | None,
        options: Mapping[str, Any],
    ) -> Operation[None]:
        """Create a collection, with banks and states for the fields of `hubness`."""
        if hubness is None:
            arguments = {**new.as_given(), "timeout": timeout, **options}
            yield from self.forgetting(Ask("create_collection", (collection,), arguments))
            return
        further = dict(options)
        schema, index = new.in_full(further)
        made = new_collections.planned(collection, hubness, schema, index)
        saved: list[tuple[BankReference, Made]] = []
        created = False
        try:
            for each in made:
                saved.append((yield InStore(each.save_bank)))
            states = {
                each.name: each.state(collection, reference)
                for each, (reference, _) in zip(made, saved, strict=True)
            }
            properties = {state.property_name: state.to_json() for state in states.values()}
            further["properties"] = {**(further.get("properties") or {}), **properties}
            stored = new_collections.stored_schema(schema, states.values())
            yield Ask("create_collection", (collection,), {"schema": stored, "timeout": timeout, **further})
            created = True
            yield Ask("create_index", (collection, new_collections.served_indexes(index, states), timeout))
            yield Ask("load_collection", (collection, timeout))
        except Exception:
            if created:
                yield Ask("drop_collection", (collection, timeout))
            for reference, kind in saved:
                yield InStore(partial(undo_save_bank, reference=reference, made=kind))
            raise
        finally:
            self.forget()

    def create_index(
        self, collection: str, index: IndexParams, timeout: float | None, options: Mapping[str, Any]
    ) -> Operation[None]:
        """Create indexes; on corrected fields with the metric of the augmented vectors."""
        cached = yield from self.cached_state(collection, timeout)
        served = new_collections.served_indexes(index, cached.states) if cached.states else index
        yield Ask("create_index", (collection, served, timeout), dict(options))


def _put(cached: CachedState, write: Ask) -> Operation[dict[str, Any]]:
    """Write rows; repeat a partial update several times while a job rewrites rows.

    The job may be replaying an outdated deletion: until it sees the later note, the row of the update is
    missing.
    """
    in_part = write.options.get("partial_update") or write.options.get("field_ops")
    for _ in range(PUT_BACK_TRIES if in_part and cached.intent_log is not None else 0):
        try:
            written: dict[str, Any] = yield write
        except MilvusException:
            yield Pause(PUT_BACK_PAUSE)
        else:
            return written
    written = yield write
    return written


def _listed(keys: Any) -> list[Any]:
    """Return keys as a list; an empty list for invalid keys, which pymilvus refuses."""
    if isinstance(keys, int | str):
        return [keys]
    return keys if isinstance(keys, list) and all(isinstance(key, int | str) for key in keys) else []


def _bring_vectors(rows: Any, field: str) -> bool:
    """Whether these are rows that have a vector of this field. Milvus judges values that are not rows.

    Raises DataNotMatchException, as pymilvus does, if only some rows have the vector.
    """
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return False
    bring = [field in row for row in rows]
    if any(bring) and not all(bring):
        raise DataNotMatchException(message=ExceptionsMessage.InsertMissedField % field)
    return any(bring)
