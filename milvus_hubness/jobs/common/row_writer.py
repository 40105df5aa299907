"""The row writer: every job uses it to rewrite rows of a live collection, and to repair the writes
that this undoes.

A job reads rows and writes them back with other biases, which would undo a client's change in
between. `rewriting` therefore asks all clients to note their writes in the write-intent log before
they make them. For each batch, the job records the keys and a digest of each row's content, field
by field and without biases; writes the rows by the fencing alias of its lease; and repairs them: it
replays the noted writes of rows that still have the content that it wrote.

If a client writes before the job, its note exists at the repair; if it writes after the job, its
write stays. A repair is a write too, so the job reads the log until there is no newer note. It
leaves rows alone that another client has changed since: their digest differs. A job that is killed
leaves its last batch record; the next holder of the lease first drops the former holder's alias,
and then repairs the rows that the record names.

The log protects writes of HubnessClient and AsyncHubnessClient if they have
the same rights on the log as on the collection. A write of another client
between the job's read and write is undone. A repair may also replay the
note of a failed write: the database may have applied such a write anyway.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from milvus_hubness.basics.bounds import FrozenModel
from milvus_hubness.basics.waiting import wait_seconds
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.errors import Cancelled, LeaseLost, NotCaughtUp, name_some
from milvus_hubness.jobs.common.lease import Lease
from milvus_hubness.jobs.common.lease_records import read_ledger
from milvus_hubness.jobs.store.generations import Batch
from milvus_hubness.jobs.store.ownership import LEDGER, CollectionId
from milvus_hubness.jobs.store.protocols import Ledger, Store, WholeRows, capability
from milvus_hubness.jobs.store.records import (
    WRITE_INTENTS_PROPERTY,
    CollectionInfo,
    Note,
    Record,
    WriteIntentLog,
)

BATCHES = "batches"
"""The first part of the group of a collection's batch records in the ledger."""

HAS_BIAS = ""
"""Takes the place of a field's name in a digest; no field of a row has an empty name."""

VISIBLE_PAUSE = 0.05
"""Seconds between two looks whether a noted write has arrived."""

REPAIR_ROUNDS = 20

LONGEST_RECORD = 50_000
"""Maximum length of a record, in characters; a ledger takes 60,000."""

Digest = frozenset[tuple[str, str]]
"""The name and a short hash of each field of a row; HAS_BIAS maps to whether the row has a bias."""
ABSENT = Digest()
"""The digest of a row that does not exist."""
Rows = dict[Key, set[Digest]]
"""For each key, the digests of the contents that the job may have left."""


class RowContent(FrozenModel):
    """The part of a row that its user wrote."""

    field: str
    """The vector field."""
    dim: int
    """How many numbers of the vector, or of each of several, from the first on, are the user's."""
    hidden: tuple[str, ...]
    """The fields that are not the user's."""
    epoch: str
    """The name of the field that is 0 or missing in rows without a bias."""

    @classmethod
    def of(cls, info: CollectionInfo, state: CollectionState) -> RowContent:
        """Return the row content of `info`, for a job
        that rewrites the biases of the state's field.
        """
        states = (*info.states.values(), state)
        hidden = {name for other in states for name in other.codec.hidden_fields}
        return cls(
            field=state.field,
            dim=state.dim,
            hidden=tuple(sorted(hidden)),
            epoch=state.codec.epoch_field,
        )

    def digests(self, batch: Batch) -> list[Digest]:
        """Return the digest of each row."""
        digests: list[Digest] = []
        for vector, row in zip(batch.vectors, batch.rows, strict=True):
            hashes = {name: _hash(_canonical(row[name])) for name in row if name not in self.hidden}
            hashes[self.field] = _hash(vector[..., : self.dim].tobytes())
            hashes[HAS_BIAS] = "1" if row.get(self.epoch) else "0"
            digests.append(Digest(hashes.items()))
        return digests


def _hash(value: Any) -> str:
    data = value if isinstance(value, bytes) else repr(value).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=4).hexdigest()


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return sorted((str(name), repr(_canonical(item))) for name, item in value.items())
    return [_canonical(item) for item in value] if isinstance(value, list) else value


class BatchRecord(FrozenModel):
    """Rows that a job may have rewritten."""

    token: int
    """The token of the job's lease."""
    partition: str | None
    content: RowContent
    fields: list[str]
    """The names of the fields that have hashes in `rows`."""
    rows: list[tuple[Key, list[str]]]
    """`Rows`; a digest is the hashes of `fields`, joined by commas, empty for a missing field."""

    def digests(self) -> Rows:
        """Return the digests of each row."""

        def digest(text: str) -> Digest:
            return Digest(
                (name, value)
                for name, value in zip(self.fields, text.split(","), strict=False)
                if value
            )

        return {key: set(map(digest, texts)) for key, texts in self.rows}


class RowWriter:
    """Rewrites rows of the collection `info`.

    intent_log: None if the job rewrites no row of the collection itself.
    """

    def __init__(
        self,
        lease: Lease,
        info: CollectionInfo,
        state: CollectionState,
        intent_log: WriteIntentLog | None,
    ) -> None:
        self._lease = lease
        self._info = info
        self._intent_log = intent_log
        self._content = RowContent.of(info, state)

        # The number of ledger records that the last batch took.
        self._record_count = 0
        # Notes whose writes precede the job's read, so that the repair leaves them out.
        self._applied: set[Note] = set()

        self._compacted_at = time.monotonic()
        # Noted rows that the last compaction of the log found unused.
        self._unused: frozenset[str] = frozenset()

        self.repaired = 0
        """The number of rows repaired so far."""

    def read(self, keys: Sequence[Key], partition: str | None) -> Batch:
        """Read rows that the job will rewrite, with all writes that were noted and made before,
        which the repair does not replay. This waits up to `policy.visible` seconds for a client
        between its note and its write.
        """
        store = self._lease.store

        def rows() -> Batch:
            return store.get(self._info.name, keys, self._content.field, partition=partition)

        if self._intent_log is None or not isinstance(store, WholeRows):
            return rows()

        # A strongly consistent read mostly waits, so the rows and the notes are read in parallel;
        # the rows are read again if there were notes. A job rewrites only rows that it has just
        # read, so the notes of all others can be forgotten.
        keys_to_rewrite = set(keys)
        self._applied = {note for note in self._applied if note.key in keys_to_rewrite}
        repair = _Repair(store, self._info.name, self._intent_log, self._content, self._applied)
        with ThreadPoolExecutor(1, "rows") as pool:
            reading = pool.submit(rows)
            are_noted = repair.wait_applied(keys, partition, self._lease.policy.visible)

        return rows() if are_noted else reading.result()

    def rewrite(self, batch: Batch, changed: Sequence[str], partition: str | None) -> int:
        """Write rows with new biases and their content as read, as Store.rewrite does.

        Return how many the database acknowledged. Raises LeaseLost, and NotCaughtUp for rows that
        change faster than the writer can repair them.
        """
        if not len(batch):
            return 0

        # A killed job must find the record of whatever it may have written, so that comes first.
        store = self._lease.store
        digests = [ABSENT] * len(batch)
        if isinstance(store, WholeRows):
            digests = self._content.digests(batch)
        rows: Rows = {key: {digest} for key, digest in zip(batch.keys, digests, strict=True)}
        self._record(rows, partition)

        field = self._content.field
        count = store.rewrite(self._info.name, batch, field, changed, partition=partition)
        if self._intent_log is None:
            return count

        repair = _Repair(store, self._info.name, self._intent_log, self._content, self._applied)
        self.repaired += repair.run(rows, partition, lambda: self._record(rows, partition))

        is_due = time.monotonic() - self._compacted_at >= self._lease.policy.compact
        if isinstance(store, WholeRows) and is_due:
            # A client may be between its note and its write: noted rows are dropped once they were
            # unused for a while.
            self._unused = store.compact_notes(self._intent_log, self._unused)
            self._compacted_at = time.monotonic()

        return count

    def close(self) -> None:
        """Remove the record of the last batch, which is repaired."""
        self._drop_records(from_number=0)

    def _record(self, rows: Rows, partition: str | None) -> None:
        if self._intent_log is None:
            return

        fields = sorted(
            {name for digests in rows.values() for digest in digests for name, _ in digest}
        )
        records = []
        for number, digests in enumerate(_in_records(rows, fields)):
            record = BatchRecord(
                token=self._lease.token,
                partition=partition,
                content=self._content,
                fields=fields,
                rows=digests,
            )
            records.append(
                Record(self._key(number), _group(self._info.name), record.model_dump_json())
            )

        # The records of a batch have the keys of the last batch's records, and replace them. The
        # last batch is repaired by now, so what is left of its records may go.
        self._lease.store.put_records(LEDGER, records)
        self._record_count = max(self._record_count, len(records))
        self._drop_records(from_number=len(records))

    def _drop_records(self, *, from_number: int) -> None:
        if self._record_count > from_number:
            keys = [self._key(number) for number in range(from_number, self._record_count)]
            self._lease.store.drop_records(LEDGER, _group(self._info.name), keys)
            self._record_count = from_number

    def _key(self, number: int) -> str:
        return f"{_group(self._info.name)}/{self._lease.token:012}/{number:04}"


def _in_records(rows: Rows, fields: Sequence[str]) -> Iterator[list[tuple[Key, list[str]]]]:
    """Split the rows, with their digests as texts, so that each part fits into a batch record."""
    fitting: list[tuple[Key, list[str]]] = []
    # As if the record were full: the first row begins one.
    size = LONGEST_RECORD
    for key, digests in rows.items():
        hashes = map(dict, digests)
        texts = sorted(",".join(by_field.get(name, "") for name in fields) for by_field in hashes)
        # Quotes, commas and brackets of JSON count as well.
        length = len(json.dumps(key)) + sum(map(len, texts)) + 4 * len(texts) + 4
        if size + length > LONGEST_RECORD:
            if fitting:
                yield fitting
            fitting = []
            size = sum(map(len, fields)) + 4 * len(fields)

        fitting.append((key, texts))
        size += length

    if fitting:
        yield fitting


def _group(collection: str) -> str:
    return f"{BATCHES}/{collection}"


def open_batches(store: Ledger, collection: str) -> list[BatchRecord]:
    """Return the batch records of a job that is running or was killed.

    Raises StateError for a broken one.
    """
    stored = store.records(LEDGER, _group(collection))
    return [read_ledger(BatchRecord.model_validate_json, record) for record in stored]


@dataclass
class _Repair:
    """Replays client writes that were noted for rewritten rows."""

    store: Store
    collection: str
    intent_log: WriteIntentLog
    content: RowContent
    applied: set[Note]
    """Notes whose writes precede the job's read."""

    def wait_applied(self, keys: Sequence[Key], partition: str | None, seconds: float) -> bool:
        """Wait at most `seconds` until the rows show their noted writes.

        Return whether there were new notes.
        """
        applied_count = len(self.applied)
        until = time.monotonic() + seconds
        while notes := self._notes(keys, partition, self.applied):
            current, noted = self._contents(notes, partition)
            # The write of a note may have failed, so that the row never shows it.
            is_over = time.monotonic() > until
            applied = [
                note
                for note in notes
                if is_over
                or _shows(
                    current.get(note.key, ABSENT),
                    noted.get(note.key, {}).get(note.row or "", ABSENT),
                )
            ]
            self.applied.update(applied)
            if len(applied) == len(notes):
                break

            time.sleep(VISIBLE_PAUSE)

        return len(self.applied) > applied_count

    def run(self, rows: Rows, partition: str | None, record: Callable[[], None]) -> int:
        """Repair the rows, and return the number of repaired rows.

        record: stores `rows`, with the digests of the rows
        to replay, before the replay. Raises NotCaughtUp.
        """
        keys = list(rows)
        seen = set(self.applied)
        repaired: set[Key] = set()
        for _ in range(REPAIR_ROUNDS):
            notes = self._notes(keys, partition, seen)
            if not notes:
                return len(repaired)

            chosen, judged = self._chosen(notes, rows, partition, record)
            seen |= judged
            if chosen:
                replayed = self.store.replay(self.collection, self.intent_log, chosen)
                repaired |= {note.key for note in replayed}
                self.applied.update(chosen)

            # The job wrote none of the other rows, so it cannot have undone their clients' writes.
            keys = [note.key for note in notes if note in chosen or note not in judged]
            if not keys:
                return len(repaired)

        raise NotCaughtUp(
            f"rows {name_some(keys)} of {self.collection!r} change faster than they can be "
            "repaired: run it again when there are fewer writes"
        )

    def _notes(self, keys: Sequence[Key], partition: str | None, seen: set[Note]) -> list[Note]:
        notes = self.store.notes(self.intent_log, keys, partition=partition)
        return [note for note in notes if note not in seen]

    def _chosen(
        self, notes: Sequence[Note], rows: Rows, partition: str | None, record: Callable[[], None]
    ) -> tuple[list[Note], set[Note]]:
        """Return the notes to replay, and the notes that this round could judge."""
        if not isinstance(self.store, WholeRows):
            return list(notes), set(notes)

        digests, noted = self._contents(notes, partition)
        judged = [note for note in notes if note.row is None or note.row in noted.get(note.key, {})]
        chosen = []
        for note in judged:
            current = digests.get(note.key, ABSENT)
            earlier = dict(noted.get(note.key, {}))
            content = ABSENT if note.row is None else earlier.pop(note.row)
            is_stale = _is_stale(current, rows[note.key], earlier.values(), note)
            if is_stale and _without(current, [HAS_BIAS]) != _without(content, [HAS_BIAS]):
                rows[note.key].add(content)
                chosen.append(note)

        # A replayed row counts as the job's from now on, also if the job is killed in between.
        if chosen:
            record()
        return chosen, set(judged)

    def _contents(
        self, notes: Sequence[Note], partition: str | None
    ) -> tuple[dict[Key, Digest], dict[Key, dict[str, Digest]]]:
        """Return the current digests of the noted rows; and for each key, those of its noted rows,
        by their names.
        """
        field = self.content.field
        keys = [note.key for note in notes]
        batch = self.store.get(self.collection, keys, field, partition=partition)
        current = dict(zip(batch.keys, self.content.digests(batch), strict=True))

        whole_rows = capability(self.store, WholeRows)
        names, batch = whole_rows.noted(self.collection, self.intent_log, keys, field)
        noted: dict[Key, dict[str, Digest]] = {}
        for key, name, digest in zip(batch.keys, names, self.content.digests(batch), strict=True):
            noted.setdefault(key, {})[name] = digest
        return current, noted


def _without(digest: Digest, names: Iterable[str]) -> Digest:
    left_out = set(names)
    return Digest(pair for pair in digest if pair[0] not in left_out)


def _is_stale(current: Digest, by_job: set[Digest], earlier: Iterable[Digest], note: Note) -> bool:
    """Return whether a row still has the job's content, or
    an earlier noted one, apart from later partial updates.
    """
    if current in by_job or (current and current in earlier):
        return True
    if not (current and note.changed):
        return False
    return _without(current, note.changed) in {_without(digest, note.changed) for digest in by_job}


def _shows(current: Digest, noted: Digest) -> bool:
    """Return whether a row has all noted fields; Milvus
    Lite keeps further fields of the replaced row.
    """
    return _without(noted, [HAS_BIAS]) <= current if noted else not current


@contextmanager
def rewriting(
    lease: Lease,
    info: CollectionInfo,
    state: CollectionState,
    *,
    client_ttl: float,
    stop: threading.Event | None = None,
) -> Iterator[RowWriter]:
    """Have all clients note their writes to `info`
    within the block, and yield the writer of its rows.

    state: of the field whose biases are written; new biases must be announced before this call.
    client_ttl: the longest state_ttl of a client that writes, in seconds; this waits that long.
    stop: ends the wait with Cancelled.

    If the block fails or is stopped, this repairs the last batch before clients stop noting; after
    a job is killed, they continue, and the next job repairs it. If all biases are in side
    collections, clients note nothing.
    """
    store = lease.store
    if not any(other.codec.writes_rows for other in (state, *info.states.values())):
        _wait(client_ttl, stop)
        yield RowWriter(lease, info, state, None)
        return

    intent_log = _begin_notes(lease, info, state, client_ttl, stop)
    writer = RowWriter(lease, info, state, intent_log)
    try:
        yield writer
    except (LeaseLost, GeneratorExit):
        # The next holder of the lease repairs; this process may write nothing more.
        raise
    except BaseException:
        # An interrupted write may still arrive; with new fences it cannot arrive after the repair.
        lease.renew_fences()
        _repair_left(store, info, intent_log)
        store.end_intent_log(info.name, intent_log)
        raise

    # The record goes before the notes: nothing could be repaired without them.
    lease.check()
    writer.close()
    store.end_intent_log(info.name, intent_log)


def _begin_notes(
    lease: Lease,
    info: CollectionInfo,
    state: CollectionState,
    client_ttl: float,
    stop: threading.Event | None,
) -> WriteIntentLog:
    """Have all clients note their writes from now on, and return the log. Arguments of `rewriting`.

    First, the rows that a killed job left are repaired from the log that it used.
    """
    store = lease.store
    lease.check()
    announced = store.info(info.name, counted=False)
    if announced.intent_log is not None and store.exists(announced.intent_log.collection):
        # The job may have been killed before all clients had read the new collection state.
        _wait(client_ttl, stop)
        _repair_left(store, announced)

    # Clients note writes of all fields that are corrected
    # now or will be while they note: that of `state`, too.
    lease.check()
    corrected = {**announced.states, state.field: state}
    intent_log = store.create_intent_log(replace(announced, states=corrected))

    # The log exists before the property names it, so that no client meets a log that is not there.
    lease.check()
    store.write_property(info.name, WRITE_INTENTS_PROPERTY, intent_log)
    try:
        for former in store.intent_logs(info.collection_id):
            if former.collection != intent_log.collection:
                store.drop_intent_log(former, lease.check_now)

        # A client with an older cached state writes without a note until its cache expires.
        _wait(client_ttl, stop)
    except BaseException:
        store.end_intent_log(info.name, intent_log)
        raise

    return intent_log


def _repair_left(
    store: Store, info: CollectionInfo, intent_log: WriteIntentLog | None = None
) -> int:
    """Repair the batches that killed jobs left, and remove their records.

    Return the number of repaired rows. store: of the lease, which has fenced the former holders.
    intent_log: None for that of `info`.
    """
    intent_log = intent_log or info.intent_log
    if intent_log is None or not store.exists(intent_log.collection):
        return 0

    repaired = 0
    for record in open_batches(store, info.name):
        repair = _Repair(store, info.name, intent_log, record.content, set())
        # Replayed rows need no new record: the record stays until all rows are repaired.
        repaired += repair.run(record.digests(), record.partition, lambda: None)

    store.drop_records(LEDGER, _group(info.name))
    return repaired


def repair_rows(lease: Lease, collection: str, *, client_ttl: float) -> int:
    """Repair the rows that killed jobs left, and end the noting of writes.

    Return the number of repaired rows.
    """
    store = lease.store
    info = store.info(collection, counted=False)
    if info.intent_log is None:
        return 0

    _wait(client_ttl, None)
    repaired = _repair_left(store, info)
    lease.check()
    store.end_intent_log(info.name, info.intent_log)
    return repaired


def drop_intents(lease: Lease, info: CollectionInfo) -> None:
    """Repair the last batch of a killed job, and drop the log of a collection whose rows no job
    rewrites any more.
    """
    if info.intent_log is not None:
        _repair_left(lease.store, info)
        lease.store.write_property(info.name, WRITE_INTENTS_PROPERTY, None)
    drop_log(lease, info.collection_id)


def drop_log(lease: Lease, owner: CollectionId) -> None:
    """Drop the log and the batch records of a leased collection, which may no longer exist.

    Read no row.
    """
    lease.store.drop_records(LEDGER, _group(owner.name))
    for intent_log in lease.store.intent_logs(owner):
        lease.store.drop_intent_log(intent_log, lease.check_now)


def _wait(seconds: float, stop: threading.Event | None) -> None:
    if wait_seconds("all clients to read the announcement of this job", seconds, stop):
        raise Cancelled("stopped while clients were reading the announcement of the job")
