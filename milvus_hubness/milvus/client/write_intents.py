"""The write-intent log: writes noted before they are made, while a job rewrites rows. No I/O.

A job reads a row and upserts it with another bias, which undoes a client's write in between. So clients note their
writes before they make them. After the job's upsert it reads the notes of that row and replays them
(`operations.row_writer`). Because a note precedes its write, either the job reads the note, or the client's write comes
after the job's upsert and stays.

Notes under one key are replaced in one step, so a key has one last note, of a row or of its deletion. If clients write
the same row at the same instant, either of their writes may remain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
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
from milvus_hubness.milvus.store.server import COLLECTION_NOT_FOUND, in_parts
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

KEYS_PER_PAGE = 16_384
KEYS_PER_REQUEST = 8_000
ROWS_PER_REQUEST = 1_000
STRONG = {"consistency_level": "Strong"}
_IN_KEY_ORDER = {"iterator": "True", "reduce_stop_for_best": "True"}
NOTING_SECONDS = 30.0
"""Slower notes are made again: half the time after which a job drops a row that no note names."""
Row = dict[str, Any]


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

        If a log was announced meanwhile, run again(cached), because a job may have started. Returns the results of the
        first and the last run, and the state that the last run used or, if that has no copy, the newest.
        """

        def run(
            call: Callable[[CachedState], Operation[T]], cached: CachedState
        ) -> Operation[tuple[T, CachedState]]:
            return (yield from call(cached)), cached

        first, cached = yield from self._states.retrying(collection, timeout, partial(run, write))
        last = first
        while True:
            now = yield from self._cached_after(collection, cached, timeout)
            if now.intent_log in (None, cached.intent_log):
                return first, last, cached if cached.dual_write else now
            last, cached = yield from self._states.retrying(
                collection, timeout, partial(run, again)
            )

    def _cached_after(
        self, collection: str, cached: CachedState, timeout: float | None
    ) -> Operation[CachedState]:
        """Return the state after a write that used `cached`; `cached` if it cannot be read or names a copy."""
        if now := self._states.remembered(collection):
            return now
        if cached.dual_write is not None:
            return cached
        try:
            return (yield from self._states.cached_state(collection, timeout))
        except PERHAPS_OUTDATED:
            return cached

    def note_rows(self, cached: CachedState, write: Write) -> Operation[None]:
        """Note the rows of a write, as they are to be stored. Raises WriteIntentFailed. Rows whose keys the server
        creates need no note, because no job can have read them before."""
        intent_log, rows, timeout = cached.intent_log, write.rows, write.timeout
        if intent_log is None or (intent_log.auto_id and write.method == "insert"):
            return
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            return
        if not rows or not all(cached.key_field in row for row in rows):
            return

        def note() -> Operation[None]:
            keys = [row[cached.key_field] for row in rows]
            while True:
                began = time.monotonic()
                names = [new_row_name(intent_log) for _ in rows]
                named = [{NAME_FIELD: name, **row} for name, row in zip(names, rows, strict=True)]
                changed: dict[Key, set[str]] = {}
                if write.method == "upsert" and write.in_part:
                    changed = yield from self._note_in_part(cached, intent_log, write, named)
                else:
                    yield from self._insert_rows(intent_log, named, timeout)
                places = dict(zip(keys, names, strict=True))
                yield from self._point(intent_log, places, write.partition_name, timeout, changed)
                # A job drops rows that no note names after a while; these may have been among them.
                if time.monotonic() - began < NOTING_SECONDS:
                    return

        yield from self._states.expect_log(cached, timeout)
        yield from self._noting(write.collection, intent_log, note())

    def _note_in_part(
        self, cached: CachedState, intent_log: WriteIntentLog, write: Write, named: Sequence[Row]
    ) -> Operation[dict[Key, set[str]]]:
        """Note the whole rows that a partial update produces, and return the fields that it changes, by key. Each row
        is based on the last noted one, or else on that of the collection, which no job has then read before a client
        wrote it. The collection is read first, so that the writer of that row has noted it. The fields include those of
        the partial updates noted just before."""
        changes: dict[Key, set[str]] = {}
        key_field, timeout, partition_name = cached.key_field, write.timeout, write.partition_name
        within = partition_of(intent_log, partition_name) or partition_name
        for part in in_parts(named, ROWS_PER_REQUEST):
            keys = [row[key_field] for row in part]
            in_collection = yield from self._whole_rows(
                write.collection, key_field, keys, within, timeout
            )
            options = {
                "output_fields": [NOTE_KEY_FIELD, "name", "changed"],
                "timeout": timeout,
                **STRONG,
            }
            args = (intent_log.collection, notes_filter(intent_log, keys, partition_name))
            notes = yield Ask("query", args, options)
            last = row_names_in(intent_log, notes, keys, partition_name)
            names = [name for name in last.values() if name]
            changed_before = {noted["name"]: changed_in(noted) for noted in notes if noted["name"]}
            for row in part:
                key = row[key_field]
                changes[key] = {*row, *changed_before.get(last.get(key, ""), ())} - {
                    NAME_FIELD,
                    key_field,
                }
            noted_rows = yield from self._whole_rows(
                intent_log.rows, NAME_FIELD, names, None, timeout
            )
            before = {
                key: noted_rows.get(last[key]) if key in last else in_collection.get(key)
                for key in keys
            }
            bases = [
                {**base, NAME_FIELD: row[NAME_FIELD]}
                for row in part
                if (base := before[row[key_field]])
            ]
            yield from self._insert_rows(intent_log, bases, timeout)
            if changed := [row for row in part if before[row[key_field]]]:
                yield Ask("upsert", (intent_log.rows, changed, timeout), dict(write.options))
            without_base = [row for row in part if not before[row[key_field]]]
            yield from self._insert_rows(intent_log, without_base, timeout)
        return changes

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

    def note_deletion(
        self, cached: CachedState, deletion: Deletion, keys: Sequence[Key]
    ) -> Operation[None]:
        """Note that the rows of these keys are to be deleted. Raises WriteIntentFailed."""
        intent_log = cached.intent_log
        if intent_log is None:
            return
        yield from self._states.expect_log(cached, deletion.timeout)
        partitions = yield from self._partitions(intent_log, deletion)
        for partition in partitions:
            for part in in_parts(keys, KEYS_PER_REQUEST):
                keys_here = part
                if len(partitions) > 1:
                    where = is_one_of(cached.key_field, part)
                    within = Deletion(deletion.collection, None, deletion.timeout, where, partition)
                    keys_here = yield from self.matching(cached.key_field, within)
                yield from self._note_keys(intent_log, deletion, partition, keys_here)

    def delete_matching(
        self, cached: CachedState, intent_log: WriteIntentLog, deletion: Deletion
    ) -> Operation[Any]:
        """Delete the rows that a filter matches now, by their keys. Raises WriteIntentFailed."""
        further = {
            name: value
            for name, value in deletion.options.items()
            if name not in ("filter_params", "pks")
        }
        answers: list[Any] = []
        yield from self._states.expect_log(cached, deletion.timeout)
        for partition in (yield from self._partitions(intent_log, deletion)):
            within = replace(deletion, partition_name=partition)
            for part in in_parts(
                (yield from self.matching(cached.key_field, within)), KEYS_PER_REQUEST
            ):
                yield from self._note_keys(intent_log, deletion, partition, part)
                where = is_one_of(cached.key_field, part)
                by_key = replace(within, ids=None, filter=where, options=further)
                answers.append((yield by_key.ask()))
        return _together(answers)

    def _note_keys(
        self,
        intent_log: WriteIntentLog,
        deletion: Deletion,
        partition: str | None,
        keys: Sequence[Key],
    ) -> Operation[None]:
        note = self._point(intent_log, dict.fromkeys(keys, ""), partition, deletion.timeout)
        yield from self._noting(deletion.collection, intent_log, note)

    def matching(self, key_field: str, deletion: Deletion) -> Operation[list[Key]]:
        """Return the keys of the rows that a deletion's filter matches, in key order. Raises StoreError."""
        collection, where = deletion.collection, deletion.filter
        partitions = [deletion.partition_name] if deletion.partition_name else None
        template = {
            name: deletion.options[name] for name in ("filter_params",) if name in deletion.options
        }

        def ask(filter: str, limit: int, how: Mapping[str, Any]) -> Ask:
            args = (collection, filter, [key_field], deletion.timeout, None, partitions)
            return Ask("query", args, {**template, **how, "limit": limit})

        # Pages have the consistency level of the collection, not of the request; they show what this strongly
        # consistent query has shown.
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
        for part in in_parts(named, ROWS_PER_REQUEST):
            yield Ask("insert", (intent_log.rows, part, timeout))

    def _point(
        self,
        intent_log: WriteIntentLog,
        names: Mapping[Key, str],
        partition_name: str | None,
        timeout: float | None,
        changed: Mapping[Key, Collection[str]] = MappingProxyType({}),
    ) -> Operation[None]:
        """Note the names of the rows that keys refer to; an empty one notes a deletion. changed: by partial updates."""
        notes = [
            stored_note(intent_log, key, partition_name, name, changed.get(key, ()))
            for key, name in names.items()
        ]
        for part in in_parts(notes, ROWS_PER_REQUEST):
            yield Ask("upsert", (intent_log.collection, part, timeout))

    def _noting(
        self, collection: str, intent_log: WriteIntentLog, note: Operation[None]
    ) -> Operation[None]:
        """Run a note. Raises WriteIntentFailed, or the error of pymilvus for rows that it refuses itself."""
        try:
            yield from note
        except (MilvusException, grpc.RpcError) as error:
            of_pymilvus = isinstance(error, MilvusException) and type(error) is not MilvusException
            if of_pymilvus and getattr(error, "code", None) != COLLECTION_NOT_FOUND:
                raise
            raise WriteIntentFailed(
                f"nothing was written to {collection!r}: a refresh rewrites its rows, a write must be noted first in "
                f"{intent_log.collection!r}, which failed: {error}. "
                "Write again; the client needs the right to write to that collection"
            ) from error


def _together(answers: Sequence[Any]) -> Any:
    """Combine the answers of several deletions: the number of deleted rows or, from old servers, their keys."""
    if any(isinstance(answer, list) for answer in answers):
        return [key for answer in answers for key in answer]
    if len(answers) == 1:
        return answers[0]
    return OmitZeroDict(
        {name: sum(answer.get(name, 0) for answer in answers) for name in ("delete_count", "cost")}
    )
