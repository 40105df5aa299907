"""`insert`, `upsert`, `delete` and `create_collection`, without I/O.

A write goes from the cached collection state to the biases of its rows, to the augmented vectors,
to the server. What more it needs while a job copies the collection is in `dual_write`; the
collection state says that a job is running.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from pymilvus import CollectionSchema
from pymilvus.client.types import OmitZeroDict
from pymilvus.exceptions import DataNotMatchException, ExceptionsMessage, MilvusException
from pymilvus.milvus_client.index import IndexParams

from milvus_hubness.clients.steps import Ask, Compute
from milvus_hubness.correction.codec.arrays import Floats, unpacked, without_tensors
from milvus_hubness.correction.codec.base import Columns, with_columns
from milvus_hubness.correction.items import Items
from milvus_hubness.correction.state import (
    BankReference,
    CollectionState,
)
from milvus_hubness.errors import (
    DimensionMismatch,
    DualWriteFailed,
    HubnessError,
    InvalidInput,
    PartialWrite,
    StoreError,
    UnsupportedOperation,
)
from milvus_hubness.jobs.store.generations import Made
from milvus_hubness.jobs.store.helpers import list_bank
from milvus_hubness.jobs.store.ownership import CollectionId
from milvus_hubness.jobs.store.protocols import undo_save_bank
from milvus_hubness.jobs.store.records import Verdicts
from milvus_hubness.milvus.client import new_collections
from milvus_hubness.milvus.client.biases import Biases
from milvus_hubness.milvus.client.messages import Bias, Deletion, Write
from milvus_hubness.milvus.client.new_collections import CorrectionConfig
from milvus_hubness.milvus.client.rewrite import Row, rounded_vectors
from milvus_hubness.milvus.client.rights import SideRights
from milvus_hubness.milvus.client.side_memory import SideBiases
from milvus_hubness.milvus.client.state_cache import PERHAPS_OUTDATED, CachedState, StateCache
from milvus_hubness.milvus.client.steps import InStore, Operation
from milvus_hubness.milvus.store import schema as milvus_schema
from milvus_hubness.milvus.store.server import message_of

if TYPE_CHECKING:
    from milvus_hubness.milvus.store.milvus_store import MilvusStore

SIDE_ROUNDS = 5
"""How often biases are written again to side collections of which the state has changed meanwhile."""
ROWS_PER_REQUEST = 1_000
"""Rows that one request of several carries."""

SideRows = tuple[SideBiases, list[dict[str, Any]]]
"""Biases of a side collection, and the rows with them."""


@dataclass(frozen=True)
class SentWrite:
    """A write that the server has taken, but for the biases in side collections."""

    write: Write
    """The rows that it has taken: the first ones, if a later part of them failed."""
    answer: dict[str, Any]
    cached: CachedState
    """The collection state by which the rows were encoded."""
    side_rows: Sequence[SideRows]
    """Rows that are still to be written to side collections."""
    failure: PartialWrite | None = None
    """The error of a later part."""


class Writes:
    """Operations that change one collection."""

    def __init__(self, states: StateCache, biases: Biases) -> None:
        self._states = states
        self._biases = biases
        self._rights = SideRights(states)

    def write(
        self, write: Write, *, valid: bool = True
    ) -> Operation[tuple[dict[str, Any], CachedState]]:
        """Insert or upsert rows, with a bias for each row that has a vector.

        valid: refuse invalid vectors instead of giving them bias 0. Returns the answer and the
        collection state that says whether a copy gets the rows, too. Raises StoreError if a write
        to a side collection fails; the rows are stored then, with the biases that they had before,
        and whoever writes them again gives them theirs. Raises it too if the client may not write
        to a side collection; nothing is stored then. Raises PartialWrite if a later part of the rows
        fails, once the first ones have their biases.
        """
        sent, cached = yield from self.sent(write, valid=valid)
        if sent.failure is not None:
            raise sent.failure
        return sent.answer, cached

    def sent(self, write: Write, *, valid: bool = True) -> Operation[tuple[SentWrite, CachedState]]:
        """Write rows as `write` does, and return what the server has taken, which is not all of them
        after a failure.
        """
        are_new = write.method == "insert"
        put = partial(self._put, write, are_new, valid)
        put_again = partial(self._put_again, write, are_new, valid)
        sent, cached = yield from self._states.written(
            write.collection, write.timeout, put, put_again
        )

        # The rows are stored at this point: a later failure must not write them again. Where there was
        # no correction when they were encoded, `enable` may have read them before they were stored.
        if sent.side_rows or cached is not sent.cached:
            try:
                yield from self._put_biases(sent.write, sent, are_new, valid)
            except (MilvusException, HubnessError, grpc.RpcError) as error:
                # Of a class after which no caller repeats the call, which would store them twice.
                raise StoreError(
                    f"the rows are stored in {write.collection!r}, their biases are not: "
                    f"{message_of(error)}. Write them again by upsert, or refresh"
                ) from error
        return sent, cached

    def _put(
        self, write: Write, are_new: bool, valid: bool, cached: CachedState
    ) -> Operation[SentWrite]:
        """Encode the rows by this collection state, and send them."""
        stored, side_columns = yield from self._encoded(cached, write, are_new, valid)
        if not (cached.states and isinstance(stored, list)):
            answer = yield from _send(cached, write, stored)
            return SentWrite(write, answer, cached, _side_rows(cached, write, answer, side_columns))

        # Augmented vectors are longer than the user's: together they may exceed a limit.
        send = partial(_send, cached, write)
        stopped = partial(_stopped_at, write, len(stored))
        failure: PartialWrite | None = None
        try:
            answers = yield from self._states.in_parts(write.collection, [stored], send, stopped)
            answer = _joined(answers)
        except PartialWrite as error:
            # The caller is to write the other rows alone: these get all that belongs to them.
            failure = error
            answer = error.answer
            write = replace(write, data=write.rows[: error.row_count])
            side_columns = [
                (side, {name: values[: error.row_count] for name, values in columns.items()})
                for side, columns in side_columns
            ]

        side_rows = _side_rows(cached, write, answer, side_columns)
        return SentWrite(write, answer, cached, side_rows, failure)

    def _put_again(
        self, write: Write, are_new: bool, valid: bool, cached: CachedState
    ) -> Operation[SentWrite]:
        """Write rows again that a copy may lack which has taken the name meanwhile."""
        upsert = repeated_write(write, cached)
        return (yield from self._put(upsert, are_new, valid, cached))

    def _put_biases(
        self, write: Write, sent: SentWrite, are_new: bool, valid: bool
    ) -> Operation[None]:
        """Write the biases of stored rows to their side collections.

        If the state has become too old meanwhile, a refresh may have begun after it was read, and may
        have read the rows before they were written: its generation then gets their biases, too.
        """
        cached = sent.cached
        side_rows = sent.side_rows
        for _ in range(SIDE_ROUNDS):
            failure = yield from self._sent_biases(write, cached.key_field, side_rows)
            newest = yield from self._states.cached_state(write.collection, write.timeout)
            if newest.side_biases == cached.side_biases:
                if failure is not None:
                    raise failure
                return

            cached = newest
            _, side_columns = yield from self._encoded(cached, write, are_new, valid)
            side_rows = _side_rows(cached, write, sent.answer, side_columns)

        raise failure or StoreError(f"its correction changed {SIDE_ROUNDS} times meanwhile")

    def _sent_biases(
        self, write: Write, key_field: str, side_rows: Iterable[SideRows]
    ) -> Operation[Exception | None]:
        """Write rows to side collections; return the error of one that may be gone."""
        try:
            for of, rows in side_rows:
                upsert = partial(_upsert, of.collection, write.timeout)
                stopped = partial(_stopped_at, replace(write, collection=of.collection), len(rows))
                send = self._states.in_parts(of.collection, [rows], upsert, stopped)
                biases = {row[key_field]: of.bias_in(row) for row in rows}
                yield from self._states.side_memory.write(of, biases, send)
        except (*PERHAPS_OUTDATED, grpc.RpcError) as error:
            self._states.forget(write.collection)
            self._rights.forget()
            return error

        return None

    def _encoded(
        self, cached: CachedState, write: Write, are_new: bool, valid: bool
    ) -> Operation[tuple[Any, list[tuple[SideBiases, Columns]]]]:
        """Return the rows as they are stored, and the columns of each side collection."""
        given = write.rows
        rows = given
        stored = write.data
        side_columns: list[tuple[SideBiases, Columns]] = []
        for state in cached.states.values():
            if _are_rows(rows):
                # Of a partial update without a vector, too: what is decoded by them would change.
                _expect_no_hidden_fields(state, rows)
            if not _bring_vectors(rows, state.field):
                if _are_rows(rows):
                    state.expect_values(rows)
                continue

            vectors = vectors_of(state, rows, valid=valid)
            items = yield from self._items(cached, state, write, rows)
            biases = yield from self._biases.of_rows(
                write.collection,
                state,
                vectors,
                items,
                write.bias,
                are_new=are_new,
                key_at=partial(_name_of, given, cached.key_field),
            )
            codec = state.codec
            columns = codec.pack(codec.encode_rows(vectors, biases))

            if not codec.sides:
                rows = stored = with_columns(rows, columns)
            else:
                # Pending ones too: what is left of a former vector must not stay.
                yield from self._rights.expect(cached, "upsert", write.timeout)
                for side in SideBiases.written(state):
                    side_columns.append((side, codec.side_columns(columns, side.slot)))

        return stored, side_columns

    def _items(
        self, cached: CachedState, state: CollectionState, write: Write, rows: Sequence[Row]
    ) -> Operation[Items]:
        """Return the rows for a prior and for kinds, with the values that they keep in a partial
        update.
        """
        if not state.needs_rows:
            return Items([], [])

        keys = [row.get(cached.key_field) for row in rows]
        names = state.fields_read
        lacking = [i for i, row in enumerate(rows) if not names <= row.keys()]
        if not (write.in_part and lacking):
            return Items(keys, rows)

        # Such a row is not sent whole: the server has the rest of it.
        kept_keys = [keys[i] for i in lacking]
        options = {
            "output_fields": [cached.key_field, *sorted(names)],
            "timeout": write.timeout,
            "partition_names": [write.partition_name] if write.partition_name else None,
            # Of what the caller has just written, too.
            "consistency_level": "Strong",
        }
        name = cached.real_name or write.collection
        kept = yield Ask("get", (name, kept_keys), options)
        values = {row[cached.key_field]: row for row in kept}
        merged = [{**values.get(key, {}), **row} for key, row in zip(keys, rows, strict=True)]
        return Items(keys, merged)

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
        source = iter(rows)
        row_count = 0
        while batch := list(islice(source, ROWS_PER_REQUEST)):
            for i, row in enumerate(batch, row_count):
                if not isinstance(row, dict):
                    raise InvalidInput(f"row {i} is a {type(row).__name__}: pass a list of dicts")
                if lacking := [name for name in cached.states if name not in row]:
                    raise InvalidInput(f"row {i} lacks the vector field {lacking[0]!r}: add it")

            write = Write("insert", collection, batch, timeout, bias=bias)
            stored, _ = yield from self._encoded(cached, write, are_new=True, valid=True)
            yield Compute(partial(writer.add, stored))
            row_count += len(batch)

        paths: list[str] = yield Compute(writer.commit)
        return paths

    def delete(self, deletion: Deletion, cached: CachedState) -> Operation[dict[str, int]]:
        """Delete rows, and their biases in a side collection if keys alone name them.

        After a deletion by a filter, or in one partition, the next refresh removes these biases: rows
        of these keys in other partitions stay, and need theirs.
        """
        deletion = replace(deletion, collection=cached.real_name or deletion.collection)
        are_gone = bool(deletion.ids) and not deletion.partition_name
        if are_gone:
            yield from self._rights.expect(cached, "delete", deletion.timeout)
        answer: dict[str, int] = yield deletion.ask()

        for side in cached.side_biases if are_gone else ():
            send = _delete(side.collection, deletion)
            gone = dict.fromkeys(_listed(deletion.ids))
            yield from self._states.side_memory.write(side, gone, send)
        return answer

    def create_collection(
        self,
        collection: str,
        arguments: Mapping[str, Any],
        hubness: CorrectionConfig | Sequence[CorrectionConfig] | None,
    ) -> Operation[None]:
        """Create a collection, with banks and states for the fields of `hubness`.

        arguments: of pymilvus, by name. After an error nothing of it is left.
        """
        if hubness is None:
            call = Ask("create_collection", (collection,), dict(arguments))
            yield from self._states.forgetting(call)
            return

        schema, index, further = new_collections.schema_and_indexes(arguments)
        timeout = further["timeout"]
        corrected = new_collections.new_fields(collection, hubness, schema, index)
        saved: list[tuple[BankReference, Made]] = []
        created = False
        try:
            states: dict[str, CollectionState] = {}
            for new_field in corrected:
                reference, made = yield InStore(new_field.save_bank)
                saved.append((reference, made))
                states[new_field.name] = new_field.state(reference)

            properties = {state.property_name: state.to_json() for state in states.values()}
            verdicts = Verdicts()
            for new_field in corrected:
                if new_field.verdict is not None:
                    verdicts = verdicts.with_record(new_field.verdict)
            if verdicts.records:
                properties[verdicts.property_name] = verdicts.to_json()
            further["properties"] = {**(further.get("properties") or {}), **properties}
            stored = CollectionSchema.construct_from_dict(schema.to_dict())
            for state in states.values():
                milvus_schema.widen(stored, state)
            # Before the collection exists, which nobody may read without them; then with its number.
            banks = [reference.collection for reference, _ in saved]
            yield InStore(partial(_list_banks, CollectionId(name=collection), banks))
            yield Ask("create_collection", (collection,), {"schema": stored, **further})
            created = True

            # Until a state named it, another job may have dropped the bank, which is whole else.
            for new_field in corrected:
                yield InStore(new_field.save_bank)
            yield InStore(partial(_list_banks_of, collection, banks))
            served = new_collections.served_indexes(index, states)
            yield Ask("create_index", (collection, served, timeout))
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


def repeated_write(write: Write, cached: CachedState) -> Write:
    """Return the write that repeats a write which a copy may lack that has taken the name meanwhile.

    Raises DualWriteFailed for one that changes fields by their present values.
    """
    if write.adds:
        raise DualWriteFailed(
            f"the write to {write.collection!r} was so slow that a copy has taken its name "
            "meanwhile, which may lack it: read the rows again, and write the update again where it "
            "is missing"
        )

    # Another insert would create duplicates.
    return write.as_upsert(cached.key_field)


def _list_banks_of(collection: str, banks: Sequence[str], store: MilvusStore) -> None:
    _list_banks(store.info(collection, counted=False).collection_id, banks, store)


def _list_banks(owner: CollectionId, banks: Sequence[str], store: MilvusStore) -> None:
    for bank in banks:
        list_bank(store, owner, bank)


def _expect_importable(collection: str, cached: CachedState) -> None:
    """Raises InvalidInput, and UnsupportedOperation if imported rows would lack something."""
    if not cached.states:
        raise InvalidInput(
            f"collection {collection!r} is not corrected: use pymilvus's bulk writer"
        )

    for state in cached.states.values():
        for side in state.codec.sides:
            raise UnsupportedOperation(
                f"an import into {collection!r} would miss the biases in {side!r}: import "
                "the rows with pymilvus's bulk writer, and run `milvus-hubness refresh`"
            )

    if cached.dual_write:
        raise UnsupportedOperation(
            f"the job that works on {collection!r} would miss imported rows: wait until it ends"
        )


def vectors_of(state: CollectionState, rows: Sequence[Row], *, valid: bool = True) -> Floats:
    """Return the vectors (n, d) of rows that a user writes, float32.

    valid: require vectors that can have a bias. This is the only check of a user's vectors.
    """
    vectors: Any = [row[state.field] for row in rows]
    if state.dtype != "float32":
        vectors = [unpacked(vector, state.dtype) for vector in vectors]
    vectors = without_tensors(vectors)
    rounded = rounded_vectors(vectors, state)
    try:
        return state.require_storable(rounded) if valid else state.layout.rows(rounded)
    except InvalidInput:
        # The message of a vector of another shape is to name its row.
        _expect_shapes(state, vectors)
        raise


def _expect_no_hidden_fields(state: CollectionState, rows: Sequence[Row]) -> None:
    """Raise InvalidInput for the first row that sets a hidden field."""
    hidden = state.codec.hidden_fields
    for i, row in enumerate(rows):
        if taken := [name for name in hidden if name in row]:
            raise InvalidInput(
                f"row {i} sets {taken[0]!r}, which is computed from the bank: leave it out"
            )


def _expect_shapes(state: CollectionState, vectors: Sequence[Any]) -> None:
    """Raise DimensionMismatch for the first vector of another shape than (d,)."""
    for i, vector in enumerate(vectors):
        try:
            shape = np.shape(vector)
        except ValueError:
            got = "lists of several lengths"
        else:
            if shape == (state.dim,):
                continue

            got = f"shape {shape}"

        raise DimensionMismatch(
            f"row {i}: {state.field!r} must be a list of {state.dim} numbers, got {got}"
        ) from None


def _name_of(rows: Sequence[Row], key_field: str, position: int) -> Any:
    """Return the key of a row, its position where the server makes keys."""
    return rows[position].get(key_field, position)


def _side_rows(
    cached: CachedState,
    write: Write,
    answer: Mapping[str, Any],
    side_columns: Iterable[tuple[SideBiases, Columns]],
) -> list[SideRows]:
    """Return the rows of side collections for the keys of an answer."""
    side_rows: list[SideRows] = []
    for side, columns in side_columns:
        keys = answer.get("ids") or [row[cached.key_field] for row in write.rows]
        keyed = [{cached.key_field: key} for key in keys]
        rows = with_columns(keyed, columns)
        # An insert may have a key twice, but an upsert accepts it once: its last row stays.
        last_of_key = {row[cached.key_field]: row for row in rows}
        side_rows.append((side, list(last_of_key.values())))
    return side_rows


def _send(cached: CachedState, write: Write, stored: Any) -> Operation[dict[str, Any]]:
    """Write rows by one request."""
    name = cached.real_name or write.collection
    args = (name, stored, write.timeout, write.partition_name)
    answer: dict[str, Any] = yield Ask(write.method, args, dict(write.options))
    return answer


def _stopped_at(
    write: Write, total: int, row_count: int, answers: Sequence[dict[str, Any]], error: Exception
) -> PartialWrite:
    """Return the error of a write of `total` rows in parts, after the first `row_count` of them."""
    again = "upsert" if write.method == "insert" else write.method
    failed = PartialWrite(
        f"the first {row_count:,} of {total:,} rows were written to {write.collection!r}; the rows "
        "with their biases exceed what the server takes at once, so they were sent in parts, and "
        f"the next part failed: {error}. Write the rows from number {row_count} on again, by "
        f"{again}, as some of them may have arrived"
    )
    failed.row_count = row_count
    failed.answer = _joined(answers)
    return failed


def _joined(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the answers to the parts of a write as one, with the sums of counts and all keys."""
    if len(answers) == 1:
        return answers[0]

    joined: dict[str, Any] = OmitZeroDict(answers[0])
    for answer in answers[1:]:
        for name, value in answer.items():
            so_far = joined.get(name)
            joined[name] = value if so_far is None else _added(so_far, value)

    return joined


def _added(so_far: Any, value: Any) -> Any:
    if isinstance(value, int | float):
        return so_far + value
    return [*so_far, *value]


def _upsert(collection: str, timeout: float | None, rows: Any) -> Operation[dict[str, Any]]:
    answer: dict[str, Any] = yield Ask("upsert", (collection, rows, timeout))
    return answer


def _delete(collection: str, deletion: Deletion) -> Operation[None]:
    yield Ask("delete", (collection, deletion.ids, deletion.timeout))


def _listed(keys: Any) -> list[Any]:
    """Return keys as a list; an empty list for invalid keys, which pymilvus refuses."""
    if isinstance(keys, int | str):
        return [keys]
    if isinstance(keys, list) and all(isinstance(key, int | str) for key in keys):
        return keys
    return []


def _are_rows(rows: Any) -> bool:
    """Whether these are rows; pymilvus refuses other data."""
    return isinstance(rows, list) and all(isinstance(row, dict) for row in rows)


def _bring_vectors(rows: Any, field: str) -> bool:
    """Whether these are rows with a vector of this field.

    Raises DataNotMatchException, as pymilvus does, if only some have it.
    """
    if not _are_rows(rows):
        return False

    bring = [field in row for row in rows]
    if any(bring) and not all(bring):
        raise DataNotMatchException(message=ExceptionsMessage.InsertMissedField % field)
    return any(bring)
