"""The write-intent log: writes noted before they are made, while a job rewrites rows. No I/O.

A job reads a row and upserts it with another bias, which undoes a client's write in between. So
clients note their writes before they make them. After the job's upsert it reads the notes of that
row and replays them (`jobs.common.row_writer`). Because a note precedes its write, either the job
reads the note, or the client's write comes after the job's upsert and stays.

Notes under one key are replaced in one step, so a key has one last note, of a row or of its
deletion. If clients write the same row at the same instant, either of their writes may remain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import grpc
from pymilvus.client.types import OmitZeroDict
from pymilvus.exceptions import MilvusException

from milvus_hubness.errors import StoreError, WriteIntentFailed
from milvus_hubness.jobs.store.records import WriteIntentLog
from milvus_hubness.milvus.client.messages import Deletion, Write
from milvus_hubness.milvus.client.state_cache import PERHAPS_OUTDATED, CachedState, StateCache
from milvus_hubness.milvus.client.steps import Ask, Operation
from milvus_hubness.milvus.filters import is_one_of, literal
from milvus_hubness.milvus.store.server import in_parts, is_missing
from milvus_hubness.milvus.store.write_intents import (
    NAME_FIELD,
    NOTE_KEY_FIELD,
    changed_in,
    new_row_name,
    notes_filter,
    partition_of,
    row_names_in,
    stored_note,
)

T = TypeVar("T")
Key = int | str

Row = dict[str, Any]

KEYS_PER_PAGE = 16_384
"""Keys that one request of a search for matching rows returns: the most that Milvus allows."""

KEYS_PER_REQUEST = 8_000
"""Keys in the filter of one request."""

ROWS_PER_REQUEST = 1_000

STRONG = {"consistency_level": "Strong"}
_IN_KEY_ORDER = {"iterator": "True", "reduce_stop_for_best": "True"}
NOTING_SECONDS = 30.0
"""Slower notes are made again: half the time after which a job drops a row that no note names."""


class WriteIntents:
    """Notes of writes. A collection without a write-intent log costs no further request."""

    def __init__(self, states: StateCache) -> None:
        self._states = states

    def noted(
        self,
        collection: str,
        timeout: float | None,
        write: Callable[[CachedState], Operation[T]],
        again: Callable[[CachedState], Operation[T]],
    ) -> Operation[tuple[T, T, CachedState]]:
        """Run write(cached), which notes its changes if `cached` has a write-intent log.

        If a log was announced meanwhile, run again(cached), because a job may have started. Returns
        the results of the first and the last run, and the state as `repeated` does.
        """
        first, cached = yield from self._states.retrying(
            collection, timeout, partial(_with_state, write), partial(_with_state, again)
        )
        last, newest = yield from self.repeated(collection, timeout, cached, first, again)
        return first, last, newest

    def repeated(
        self,
        collection: str,
        timeout: float | None,
        cached: CachedState,
        result: T,
        again: Callable[[CachedState], Operation[T]],
    ) -> Operation[tuple[T, CachedState]]:
        """Repeat a write by again(cached) until it has used the newest write-intent log.

        A job may have announced its log after the write had read the state `cached`, and may then
        have undone the write. Returns the last result, at first `result`, and the state that the
        last run used or, if that has no copy, the newest.
        """
        while True:
            # No log, or the one in which this write is noted: no job can have undone it.
            now = yield from self._cached_after(collection, cached, timeout)
            if now.intent_log in (None, cached.intent_log):
                return result, cached if cached.dual_write else now

            result, cached = yield from self._states.retrying(
                collection, timeout, partial(_with_state, again)
            )

    def _cached_after(
        self, collection: str, cached: CachedState, timeout: float | None
    ) -> Operation[CachedState]:
        """Return the state after a write that used `cached`.

        It is `cached` if that names a copy, or if the state cannot be read.
        """
        if now := self._states.remembered(collection):
            return now
        if cached.dual_write is not None:
            return cached

        try:
            return (yield from self._states.cached_state(collection, timeout))
        except PERHAPS_OUTDATED:
            return cached

    # -- rows --------------------------------------------------------------------------------------

    def note_rows(
        self, cached: CachedState, intent_log: WriteIntentLog, write: Write
    ) -> Operation[None]:
        """Note the rows of a write, as they are to be stored. Raises WriteIntentFailed."""
        rows = write.rows

        # No job can have read rows before whose keys the server creates.
        if intent_log.auto_id and write.method == "insert":
            return
        # pymilvus refuses such a write, which changes nothing.
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            return
        if not rows or not all(cached.key_field in row for row in rows):
            return

        yield from self._states.expect_log(cached, write.timeout)
        with _refusing_write(write.collection, intent_log):
            noted_in_time = False
            while not noted_in_time:
                began = time.monotonic()
                yield from self._note_rows_once(cached, intent_log, write)
                # A job drops noted rows that no note names
                # after a while; these may have been among them.
                noted_in_time = time.monotonic() - began < NOTING_SECONDS

    def _note_rows_once(
        self, cached: CachedState, intent_log: WriteIntentLog, write: Write
    ) -> Operation[None]:
        """Store the rows under new names, then notes that point to these names."""
        rows = write.rows
        names = [new_row_name(intent_log) for _ in rows]
        named = [{NAME_FIELD: name, **row} for name, row in zip(names, rows, strict=True)]

        changed: dict[Key, set[str]] = {}
        if write.method == "upsert" and write.in_part:
            changed = yield from self._note_updates(cached, intent_log, write, named)
        else:
            yield from self._insert_rows(intent_log, named, write.timeout)

        # Only now: a note names rows that are stored. A client that is killed before this leaves
        # rows without a note, which the job drops.
        keys = [row[cached.key_field] for row in rows]
        name_of_key = dict(zip(keys, names, strict=True))
        yield from self._point(
            intent_log, name_of_key, write.partition_name, write.timeout, changed
        )

    def _note_updates(
        self, cached: CachedState, intent_log: WriteIntentLog, write: Write, named: Sequence[Row]
    ) -> Operation[dict[Key, set[str]]]:
        """Store the whole rows that a partial update produces, under the names of `named`.

        Returns the changed fields by key, with those of the updates noted just before.
        """
        changes: dict[Key, set[str]] = {}
        for rows in in_parts(named, ROWS_PER_REQUEST):
            changes |= yield from self._note_part_of_updates(cached, intent_log, write, rows)
        return changes

    def _note_part_of_updates(
        self, cached: CachedState, intent_log: WriteIntentLog, write: Write, updates: Sequence[Row]
    ) -> Operation[dict[Key, set[str]]]:
        """Do as `_note_updates` does, for as many rows as one request may have."""
        key_field = cached.key_field
        timeout = write.timeout
        keys = [row[key_field] for row in updates]
        bases, changed_before = yield from self._bases(cached, intent_log, write, keys)

        with_base = [row for row in updates if bases[row[key_field]]]
        without_base = [row for row in updates if not bases[row[key_field]]]
        named_bases = [
            {**(bases[row[key_field]] or {}), NAME_FIELD: row[NAME_FIELD]} for row in with_base
        ]
        # The server merges the update into a copy of the base, as it does in the collection.
        yield from self._insert_rows(intent_log, named_bases, timeout)
        if with_base:
            yield Ask("upsert", (intent_log.rows, with_base, timeout), dict(write.options))
        yield from self._insert_rows(intent_log, without_base, timeout)

        changes: dict[Key, set[str]] = {}
        for row in updates:
            earlier = changed_before.get(row[key_field], ())
            changes[row[key_field]] = {*row, *earlier} - {NAME_FIELD, key_field}
        return changes

    def _bases(
        self, cached: CachedState, intent_log: WriteIntentLog, write: Write, keys: Sequence[Key]
    ) -> Operation[tuple[dict[Key, Row | None], dict[Key, tuple[str, ...]]]]:
        """Return the rows that partial updates of these keys start from, and the fields that the
        updates noted just before change.
        """
        partition = write.partition_name
        timeout = write.timeout

        # The collection is read before the notes: the client that wrote a row read here has noted
        # it before, so the notes below show it.
        within = partition_of(intent_log, partition) or partition
        stored_rows = yield from self._whole_rows(
            write.collection, cached.key_field, keys, within, timeout
        )
        notes = yield Ask(
            "query",
            (intent_log.collection, notes_filter(intent_log, keys, partition)),
            {"output_fields": [NOTE_KEY_FIELD, "name", "changed"], "timeout": timeout, **STRONG},
        )
        last_names = row_names_in(intent_log, notes, keys, partition)
        names = [name for name in last_names.values() if name]
        noted_rows = yield from self._whole_rows(intent_log.rows, NAME_FIELD, names, None, timeout)

        # An update starts from the last noted row. Without a note no job has read the stored row
        # before a client wrote it, so that one is the base. A deleted row has none.
        bases: dict[Key, Row | None] = {}
        for key in keys:
            if key in last_names:
                bases[key] = noted_rows.get(last_names[key])
            else:
                bases[key] = stored_rows.get(key)

        changed_in_note = {note["name"]: changed_in(note) for note in notes if note["name"]}
        changed_before = {key: changed_in_note.get(name, ()) for key, name in last_names.items()}
        return bases, changed_before

    def _whole_rows(
        self,
        collection: str,
        field: str,
        values: Sequence[Key],
        partition_name: str | None,
        timeout: float | None,
    ) -> Operation[dict[Key, Row]]:
        """Return rows as they are stored, by a field with unique values."""
        if not values:
            return {}

        description = yield Ask("describe_collection", (collection, timeout))
        partitions = [partition_name] if partition_name else None
        args = (collection, is_one_of(field, values), ["*"], timeout, None, partitions)
        rows = yield Ask("query", args, dict(STRONG))
        return {row[field]: row for row in (yield from self._states.insertable(rows, description))}

    # -- deletions ---------------------------------------------------------------------------------

    def note_deletion(
        self,
        cached: CachedState,
        intent_log: WriteIntentLog,
        deletion: Deletion,
        keys: Sequence[Key],
    ) -> Operation[None]:
        """Note that the rows of these keys are to be deleted. Raises WriteIntentFailed."""
        yield from self._states.expect_log(cached, deletion.timeout)
        partitions = yield from self._partitions(intent_log, deletion)
        for partition in partitions:
            for some_keys in in_parts(keys, KEYS_PER_REQUEST):
                keys_here = some_keys
                # A note says in which partition its row is, and a deletion by keys does not.
                if len(partitions) > 1:
                    where = is_one_of(cached.key_field, some_keys)
                    within = Deletion(deletion.collection, None, deletion.timeout, where, partition)
                    keys_here = yield from self.matching(cached.key_field, within)
                yield from self._note_keys(intent_log, deletion, partition, keys_here)

    def delete_matching(
        self, cached: CachedState, intent_log: WriteIntentLog, deletion: Deletion
    ) -> Operation[Any]:
        """Delete the rows that a filter matches now, by their keys. Raises WriteIntentFailed."""
        # The keys replace the filter, its parameters and "pks".
        options = dict(deletion.options)
        options.pop("filter_params", None)
        options.pop("pks", None)

        answers: list[Any] = []
        yield from self._states.expect_log(cached, deletion.timeout)
        for partition in (yield from self._partitions(intent_log, deletion)):
            within = replace(deletion, partition_name=partition)
            keys = yield from self.matching(cached.key_field, within)
            # By the keys that were noted: a row that matches the filter only now has no note.
            for some_keys in in_parts(keys, KEYS_PER_REQUEST):
                yield from self._note_keys(intent_log, deletion, partition, some_keys)
                where = is_one_of(cached.key_field, some_keys)
                by_key = replace(within, ids=None, filter=where, options=options)
                answers.append((yield by_key.ask()))

        return _together(answers)

    def _note_keys(
        self,
        intent_log: WriteIntentLog,
        deletion: Deletion,
        partition: str | None,
        keys: Sequence[Key],
    ) -> Operation[None]:
        with _refusing_write(deletion.collection, intent_log):
            no_names = dict.fromkeys(keys, "")
            yield from self._point(intent_log, no_names, partition, deletion.timeout)

    def matching(self, key_field: str, deletion: Deletion) -> Operation[list[Key]]:
        """Return the keys of the rows that a filter matches, in key order. Raises StoreError."""
        collection = deletion.collection
        where = deletion.filter
        partitions = [deletion.partition_name] if deletion.partition_name else None
        template = {
            name: deletion.options[name] for name in ("filter_params",) if name in deletion.options
        }

        def ask(filter: str, limit: int, options: Mapping[str, Any]) -> Ask:
            args = (collection, filter, [key_field], deletion.timeout, None, partitions)
            return Ask("query", args, {**template, **options, "limit": limit})

        # Pages have the consistency level of the collection, not of the request; they show what
        # this strongly consistent query has shown.
        yield ask(str(where), 1, STRONG)

        keys: list[Key] = []
        while True:
            cursor = f"{key_field} > {literal(keys[-1])} and " if keys else ""
            page = yield ask(f"{cursor}({where})", KEYS_PER_PAGE, _IN_KEY_ORDER)
            page_keys = sorted({row[key_field] for row in page})
            if not page_keys:
                return keys
            if keys and page_keys[0] <= keys[-1]:
                raise StoreError(f"the server did not page {collection!r} in key order")

            keys += page_keys

    def _partitions(
        self, intent_log: WriteIntentLog, deletion: Deletion
    ) -> Operation[list[str | None]]:
        if deletion.partition_name or not intent_log.by_partition:
            return [deletion.partition_name]
        return list((yield Ask("list_partitions", (deletion.collection, deletion.timeout))))

    def _insert_rows(
        self, intent_log: WriteIntentLog, named: Sequence[Row], timeout: float | None
    ) -> Operation[None]:
        for some_rows in in_parts(named, ROWS_PER_REQUEST):
            yield Ask("insert", (intent_log.rows, some_rows, timeout))

    def _point(
        self,
        intent_log: WriteIntentLog,
        names: Mapping[Key, str],
        partition_name: str | None,
        timeout: float | None,
        changed: Mapping[Key, Collection[str]] = MappingProxyType({}),
    ) -> Operation[None]:
        """Note the names of the rows that keys refer to; an empty name notes a deletion.

        changed: the fields that partial updates change, by key.
        """
        notes = [
            stored_note(intent_log, key, partition_name, name, changed.get(key, ()))
            for key, name in names.items()
        ]
        for some_notes in in_parts(notes, ROWS_PER_REQUEST):
            yield Ask("upsert", (intent_log.collection, some_notes, timeout))


def _with_state(
    call: Callable[[CachedState], Operation[T]], cached: CachedState
) -> Operation[tuple[T, CachedState]]:
    """Run call(cached); return its result and the state, which `StateCache.retrying` chooses."""
    return (yield from call(cached)), cached


@contextmanager
def _refusing_write(collection: str, intent_log: WriteIntentLog) -> Iterator[None]:
    """Convert errors of a note to WriteIntentFailed, except pymilvus's own about the rows."""
    try:
        yield
    except (MilvusException, grpc.RpcError) as error:
        # pymilvus raises its own refusals as subclasses, a server's as the class itself.
        is_of_pymilvus = isinstance(error, MilvusException) and type(error) is not MilvusException
        if is_of_pymilvus and not is_missing(error):
            raise

        raise WriteIntentFailed(
            f"nothing was written to {collection!r}: a refresh rewrites its rows, a write must be "
            f"noted first in {intent_log.collection!r}, which failed: {error}. "
            "Write again; the client needs the right to write to that collection"
        ) from error


def _together(answers: Sequence[Any]) -> Any:
    """Combine the answers of deletions: the number of deleted rows or, from old servers, keys."""
    if any(isinstance(answer, list) for answer in answers):
        return [key for answer in answers for key in answer]
    if len(answers) == 1:
        return answers[0]

    sums = {}
    for name in ("delete_count", "cost"):
        sums[name] = sum(answer.get(name, 0) for answer in answers)
    return OmitZeroDict(sums)
