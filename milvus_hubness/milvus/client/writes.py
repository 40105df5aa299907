"""`insert`, `upsert`, `delete` and `create_collection`, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pymilvus import CollectionSchema
from pymilvus.exceptions import DataNotMatchException, ExceptionsMessage, MilvusException
from pymilvus.milvus_client.index import IndexParams

from milvus_hubness.correction.codec.arrays import Floats, unpacked, without_tensors
from milvus_hubness.correction.codec.base import Columns, with_columns
from milvus_hubness.correction.state import BankReference, CollectionState
from milvus_hubness.errors import (
    DimensionMismatch,
    InvalidInput,
    UnsupportedOperation,
    WriteIntentFailed,
)
from milvus_hubness.jobs.store.generations import Made
from milvus_hubness.jobs.store.helpers import list_bank
from milvus_hubness.jobs.store.protocols import undo_save_bank
from milvus_hubness.milvus.client import new_collections
from milvus_hubness.milvus.client.biases import Biases
from milvus_hubness.milvus.client.messages import Bias, Deletion, Write
from milvus_hubness.milvus.client.new_collections import CorrectionConfig
from milvus_hubness.milvus.client.parts import write_in_parts
from milvus_hubness.milvus.client.rewrite import Row, rounded_vectors
from milvus_hubness.milvus.client.state_cache import PERHAPS_OUTDATED, CachedState, StateCache
from milvus_hubness.milvus.client.steps import Ask, Compute, InStore, Operation, Pause
from milvus_hubness.milvus.client.write_intents import ROWS_PER_REQUEST, WriteIntents
from milvus_hubness.milvus.store import schema as milvus_schema

if TYPE_CHECKING:
    from milvus_hubness.milvus.store.milvus_store import MilvusStore

PUT_BACK_TRIES, PUT_BACK_PAUSE = 5, 0.2


class Writes:
    """Operations that change one collection."""

    def __init__(self, states: StateCache, biases: Biases, intents: WriteIntents) -> None:
        self._states = states
        self._biases = biases
        self._intents = intents

    def write(
        self, write: Write, *, valid: bool = True
    ) -> Operation[tuple[dict[str, Any], CachedState]]:
        """Insert or upsert rows, with a bias for each row that has a vector; return the answer and a collection state.

        valid: refuse invalid vectors instead of giving them bias 0. If a write to a side collection fails, the rows are
        stored without biases. Raises WriteIntentFailed if the write could not be noted; nothing is stored then.
        """
        collection, timeout = write.collection, write.timeout
        are_new = write.method == "insert"

        def put(write: Write, cached: CachedState) -> Operation[tuple[dict[str, Any], list[Any]]]:
            stored, side_columns = yield from self._encoded(
                cached, write, are_new=are_new, valid=valid
            )
            yield from self._intents.note_rows(cached, replace(write, data=stored))
            answer = yield from _put(cached, write, stored)
            upserts = []
            for side, columns in side_columns:
                keys = answer.get("ids") or [row[cached.key_field] for row in write.rows]
                upserts.append(
                    (side, with_columns([{cached.key_field: key} for key in keys], columns))
                )
            return answer, upserts

        def put_again(cached: CachedState) -> Operation[tuple[dict[str, Any], list[Any]]]:
            if write.adds:
                raise WriteIntentFailed(
                    f"the write to {collection!r} was so slow that a refresh, which began meanwhile, may have undone "
                    "it: read the rows again, and write the update again where it is missing"
                )
            return (
                yield from put(replace(write, method="upsert"), cached)
            )  # an insert would create duplicates

        (answer, _), (_, upserts), cached = yield from self._intents.noted(
            collection, timeout, partial(put, write), put_again
        )
        # The rows are stored at this point: a later failure must not write them again.
        try:
            for side, lines in upserts:
                yield from write_in_parts(
                    replace(write, collection=side), lines, partial(_upsert, side, timeout)
                )
        except PERHAPS_OUTDATED:
            self._states.forget(collection)
            raise
        return answer, cached

    def _encoded(
        self, cached: CachedState, write: Write, *, are_new: bool, valid: bool = True
    ) -> Operation[tuple[Any, list[tuple[str, Columns]]]]:
        """Return the rows as they are stored, and the columns of each side collection."""
        rows, bias = write.rows, write.bias
        stored = write.data
        side_columns: list[tuple[str, Columns]] = []
        for state in cached.states.values():
            if not _bring_vectors(rows, state.field):
                continue
            codec, vectors = state.codec, vectors_of(state, rows, valid=valid)
            biases = yield from self._biases.of_rows(
                write.collection, state, vectors, bias, are_new=are_new
            )
            columns = codec.pack(codec.encode_rows(vectors, biases))
            if codec.side_collection is None:
                rows = stored = with_columns(rows, columns)
            elif bias == "compute":
                yield from self._states.expect_sides(cached, write.timeout)
                side_columns.append((codec.side_collection, columns))
        return stored, side_columns

    def write_import_files(
        self,
        collection: str,
        rows: Iterable[dict[str, Any]],
        folder: Path,
        bias: Bias,
        timeout: float | None,
    ) -> Operation[list[str]]:
        """Write rows as the collection stores them to Parquet files, and return their paths."""
        self._states.forget(collection)
        cached = yield from self._states.cached_state(collection, timeout)
        _expect_importable(collection, cached)
        writer = yield InStore(lambda store: store.import_writer(collection, folder))
        source, number = iter(rows), 0
        while batch := list(islice(source, ROWS_PER_REQUEST)):
            for i, row in enumerate(batch, number):
                if lacking := [name for name in cached.states if name not in row]:
                    raise InvalidInput(f"row {i} lacks the vector field {lacking[0]!r}: add it")
            write = Write("insert", collection, batch, timeout, bias=bias)
            stored, _ = yield from self._encoded(cached, write, are_new=True)
            yield Compute(partial(writer.add, stored))
            number += len(batch)
        paths: list[str] = yield Compute(writer.commit)
        return paths

    def delete(self, deletion: Deletion, cached: CachedState) -> Operation[dict[str, int]]:
        """Delete rows, and their biases in a side collection if keys name them; otherwise the next refresh does."""
        keys = [*_listed(deletion.options.get("pks")), *_listed(deletion.ids)]
        answer: dict[str, int]
        yield from self._states.expect_sides(cached, deletion.timeout)
        if cached.intent_log is not None and deletion.filter and not keys:
            answer = yield from self._intents.delete_matching(cached, cached.intent_log, deletion)
        else:
            yield from self._intents.note_deletion(cached, deletion, keys)
            answer = yield deletion.ask()
        for state in cached.states.values():
            if deletion.ids and (side := state.codec.side_collection):
                yield Ask("delete", (side, deletion.ids, deletion.timeout))
        return answer

    def create_collection(
        self,
        collection: str,
        arguments: Mapping[str, Any],
        hubness: CorrectionConfig | Sequence[CorrectionConfig] | None,
    ) -> Operation[None]:
        """Create a collection, with banks and states for the fields of `hubness`. arguments: of pymilvus, by name."""
        if hubness is None:
            yield from self._states.forgetting(
                Ask("create_collection", (collection,), dict(arguments))
            )
            return
        schema, index, further = new_collections.schema_and_indexes(arguments)
        timeout = further["timeout"]
        corrected = new_collections.new_fields(collection, hubness, schema, index)
        saved: list[tuple[BankReference, Made]] = []
        created = False
        try:
            for new_field in corrected:
                saved.append((yield InStore(new_field.save_bank)))
            states = {
                new_field.name: new_field.state(reference)
                for new_field, (reference, _) in zip(corrected, saved, strict=True)
            }
            properties = {state.property_name: state.to_json() for state in states.values()}
            further["properties"] = {**(further.get("properties") or {}), **properties}
            stored = CollectionSchema.construct_from_dict(schema.to_dict())
            for state in states.values():
                milvus_schema.widen(stored, state)
            yield Ask("create_collection", (collection,), {"schema": stored, **further})
            created = True
            for reference, _ in saved:
                yield InStore(partial(_list_bank, collection, reference.collection))
            yield Ask(
                "create_index", (collection, new_collections.served_indexes(index, states), timeout)
            )
            yield Ask("load_collection", (collection, timeout))
        except Exception:
            if created:
                yield Ask("drop_collection", (collection, timeout))
            for reference, made in saved:
                yield InStore(partial(undo_save_bank, reference=reference, made=made))
            raise
        finally:
            self._states.forget()

    def create_index(
        self, collection: str, index: IndexParams, timeout: float | None, options: Mapping[str, Any]
    ) -> Operation[None]:
        cached = yield from self._states.cached_state(collection, timeout)
        served = new_collections.served_indexes(index, cached.states) if cached.states else index
        yield Ask("create_index", (collection, served, timeout), dict(options))


def _list_bank(collection: str, bank: str, store: MilvusStore) -> None:
    list_bank(store, store.info(collection, counted=False).collection_id, bank)


def _expect_importable(collection: str, cached: CachedState) -> None:
    if not cached.states:
        raise InvalidInput(
            f"collection {collection!r} is not corrected: use pymilvus's bulk writer"
        )
    for state in cached.states.values():
        if side := state.codec.side_collection:
            raise UnsupportedOperation(
                f"an import into {collection!r} would miss the biases in {side!r}: import "
                "the rows with pymilvus's bulk writer, and run `milvus-hubness refresh`"
            )
    if cached.dual_write or cached.intent_log:
        raise UnsupportedOperation(
            f"the job that works on {collection!r} would miss imported rows: wait until it ends"
        )


def vectors_of(state: CollectionState, rows: Sequence[Row], *, valid: bool = True) -> Floats:
    """Return the vectors (n, d) of rows that a user writes, float32. valid: require vectors that can have a bias."""
    hidden = state.codec.hidden_fields
    for i, row in enumerate(rows):
        if taken := [name for name in hidden if name in row]:
            raise InvalidInput(
                f"row {i} sets {taken[0]!r}, which is computed from the bank: leave it out"
            )
    vectors = without_tensors([unpacked(row[state.field], state.dtype) for row in rows])
    try:
        as_stored = state.layout.rows(rounded_vectors(vectors, state))
    except InvalidInput:
        for i, vector in enumerate(vectors):
            try:
                got = f"shape {np.shape(vector)}"
            except ValueError:
                got = "lists of several lengths"
            if got != f"shape {(state.dim,)}":
                message = (
                    f"row {i}: {state.field!r} must be a list of {state.dim} numbers, got {got}"
                )
                raise DimensionMismatch(message) from None
        raise
    return state.require_storable(as_stored) if valid else as_stored


def _put(cached: CachedState, write: Write, stored: Any) -> Operation[dict[str, Any]]:
    """Write rows, those of a corrected collection in parts if they exceed the server's limits together."""
    if cached.states and isinstance(stored, list):
        return (yield from write_in_parts(write, stored, partial(_put_at_once, cached, write)))
    return (yield from _put_at_once(cached, write, stored))


def _upsert(collection: str, timeout: float | None, rows: Any) -> Operation[dict[str, Any]]:
    answer: dict[str, Any] = yield Ask("upsert", (collection, rows, timeout))
    return answer


def _put_at_once(cached: CachedState, write: Write, stored: Any) -> Operation[dict[str, Any]]:
    """Write rows by one request.

    A partial update is tried again while a job that replays an outdated deletion may hide its row.
    """
    args = (write.collection, stored, write.timeout, write.partition_name)
    request = Ask(write.method, args, dict(write.options))
    answer: dict[str, Any]
    for _ in range(PUT_BACK_TRIES if write.in_part and cached.intent_log is not None else 0):
        try:
            answer = yield request
        except MilvusException:
            yield Pause(PUT_BACK_PAUSE)
        else:
            return answer
    answer = yield request
    return answer


def _listed(keys: Any) -> list[Any]:
    """Return keys as a list; an empty list for invalid keys, which pymilvus refuses."""
    if isinstance(keys, int | str):
        return [keys]
    return (
        keys if isinstance(keys, list) and all(isinstance(key, int | str) for key in keys) else []
    )


def _bring_vectors(rows: Any, field: str) -> bool:
    """Whether these are rows with a vector of this field. Raises DataNotMatchException if only some have it."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return False
    bring = [field in row for row in rows]
    if any(bring) and not all(bring):
        raise DataNotMatchException(message=ExceptionsMessage.InsertMissedField % field)
    return any(bring)
