"""The one way in which a job rewrites rows of a collection that clients write to.

A job reads rows and writes them back with other biases. Whatever a client did to a row in between is undone
by that: an update is lost, a deleted row is there again. So clients note what they are about to write while
the collection tells them to (`write_intents`), and the job, for each batch of rows,

    1. records the keys and a digest of what each row holds, field by field;
    2. writes the rows, by the fencing alias of its lease;
    3. repairs: does again what clients noted, where the row still is what the job wrote.

A client's note comes before its write. If the write came before the job's, the note is there at step 3; if it
comes after, it stays. A repair is a write too, so the job looks once more, until it finds no newer note.
Rows that somebody else has changed since are left alone: their content has another digest.

Rows are compared by what their users wrote; biases do not count.

A job that is killed leaves its last record. The next holder of the lease first drops the alias of the former
one, so that none of its writes can arrive any more, and then repairs what the record names.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import BaseModel, ConfigDict

from milvus_hubness.banks.generations import Batch, Key
from milvus_hubness.errors import NotCaughtUp, name_some
from milvus_hubness.job_properties import WriteIntentLog
from milvus_hubness.operations.lease import Lease
from milvus_hubness.operations.lease_records import LEDGER
from milvus_hubness.state import CollectionState
from milvus_hubness.stores.protocols import Store
from milvus_hubness.stores.records import CollectionInfo, Note, Record

BATCHES = "batches"
HAS_BIAS = ""
VISIBLE_SECONDS, VISIBLE_PAUSE = 5.0, 0.05
"""How long a write may take after its note, and the time between two looks at it."""
REPAIR_ROUNDS = 20
COMPACT_SECONDS = 60.0
"""Between two compactions of the log; a noted row is dropped if neither found it in use."""
LONGEST_RECORD = 50_000
"""Characters; a ledger takes 60,000."""


class RowContent(BaseModel):
    """What of a row its user wrote: the first `dim` numbers of the vector `field`, and all fields but those
    in `hidden`. A job that rewrites biases changes none of that. epoch: the field that is 0 or missing in
    rows without a bias."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    field: str
    dim: int
    hidden: tuple[str, ...]
    epoch: str

    @classmethod
    def of(cls, info: CollectionInfo, state: CollectionState) -> RowContent:
        """Return what users write to `info`, whose biases of the state's field are rewritten."""
        hidden = {name for each in (*info.states.values(), state) for name in each.hidden_fields}
        return cls(field=state.field, dim=state.dim, hidden=tuple(sorted(hidden)), epoch=state.epoch_field)

    def digests(self, batch: Batch) -> list[Digest]:
        """Return the digest of each row."""
        found = []
        for vector, row in zip(batch.vectors, batch.rows, strict=True):
            parts = {name: _hash(_canonical(row[name])) for name in row if name not in self.hidden}
            parts[self.field] = _hash(vector[: self.dim].tobytes())
            parts[HAS_BIAS] = "1" if row.get(self.epoch) else "0"
            found.append(Digest(parts))
        return found


class Digest(dict[str, str]):
    """A short hash of each field of a row, by name; under HAS_BIAS whether it has a bias. Empty: no row."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def without(self, names: Iterable[str]) -> Digest:
        """The digest of all other fields."""
        left_out = set(names)
        return Digest({name: each for name, each in self.items() if name not in left_out})


ABSENT = Digest()
"""Of a row that is not there."""


class BatchRecord(BaseModel):
    """Rows that a job may have rewritten. rows: for each key the digests of what the job may have left there,
    each as the hashes of these fields, in their order and with an empty one for a field that is missing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: int
    partition: str | None
    content: RowContent
    fields: list[str]
    rows: list[tuple[Key, list[str]]]

    def digests(self) -> dict[Key, set[Digest]]:
        """Return the rows as `record` took them."""
        return {key: {self._digest(each) for each in texts} for key, texts in self.rows}

    def _digest(self, text: str) -> Digest:
        return Digest({n: h for n, h in zip(self.fields, text.split(","), strict=False) if h})


def _hash(value: Any) -> str:
    data = value if isinstance(value, bytes) else repr(value).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=4).hexdigest()


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return sorted((str(name), repr(_canonical(each))) for name, each in value.items())
    return [_canonical(each) for each in value] if isinstance(value, list) else value


class RowWriter:
    """Rewrites rows of the collection `info`. state: of the field whose biases are written. intent_log: where
    clients note what they write; None if no row of the collection itself is rewritten."""

    def __init__(
        self, lease: Lease, info: CollectionInfo, state: CollectionState, intent_log: WriteIntentLog | None
    ) -> None:
        self._lease, self._info, self._intent_log = lease, info, intent_log
        self._content = RowContent.of(info, state)
        self._parts = 0
        self._compacted_at = time.monotonic()
        self._unused: frozenset[str] = frozenset()
        self._applied: set[Note] = set()
        self.repaired = 0
        """Rows that had to be repaired."""

    def rewrite(self, batch: Batch, changed: Sequence[str], partition: str | None) -> None:
        """As Store.rewrite, of rows as they were read, but for their biases. Raises LeaseLost, and
        NotCaughtUp for rows that change faster than they can be repaired."""
        self._write("rewrite", batch, changed, partition)

    def update(self, batch: Batch, changed: Sequence[str], partition: str | None) -> None:
        """As Store.update, otherwise as `rewrite`."""
        self._write("update", batch, changed, partition)

    def read(self, keys: Sequence[Key], partition: str | None) -> Batch:
        """As Store.fetch, of rows that are rewritten then: whatever was noted and written before is in what
        is read, and is not replayed over it. A client may be between its note and its write: it is waited
        for, but no longer than VISIBLE_SECONDS. Then somebody else has written the row since."""
        store = self._lease.store

        def fetch() -> Batch:
            return store.get(self._info.name, keys, self._content.field, partition=partition)

        if self._intent_log is None or not store.replaces_rows():
            return fetch()
        # A strongly consistent read mostly waits, so the rows are read beside the notes, and again if there
        # were any.
        with ThreadPoolExecutor(1, "rows") as pool:
            reading = pool.submit(fetch)
            noted = self._wait_applied(keys, partition)
        return fetch() if noted else reading.result()

    def _wait_applied(self, keys: Sequence[Key], partition: str | None) -> bool:
        """Wait until the rows show what was noted of them. Return whether anything new was noted."""
        assert self._intent_log is not None
        repair = _Repair(self._lease.store, self._info.name, self._intent_log, self._content, self._applied)
        before = len(self._applied)
        until = time.monotonic() + VISIBLE_SECONDS
        while unapplied := repair.unapplied(keys, partition):
            if time.monotonic() > until:
                self._applied.update(unapplied)
            else:
                time.sleep(VISIBLE_PAUSE)
        return len(self._applied) > before

    def close(self) -> None:
        """Remove the record of the last batch."""
        if self._parts:
            keys = [self._key(part) for part in range(self._parts)]
            self._lease.store.drop_records(LEDGER, batch_group(self._info.name), keys)
            self._parts = 0

    def _write(self, method: str, batch: Batch, changed: Sequence[str], partition: str | None) -> None:
        if not len(batch):
            return
        store = self._lease.store
        rows: dict[Key, set[Digest]] = {key: {ABSENT} for key in batch.keys}
        if store.replaces_rows():
            digests = self._content.digests(batch)
            rows = {key: {digest} for key, digest in zip(batch.keys, digests, strict=True)}
        self._record(rows, partition)
        getattr(store, method)(self._info.name, batch, self._content.field, changed, partition=partition)
        if self._intent_log is not None:
            repair = _Repair(store, self._info.name, self._intent_log, self._content, self._applied)
            self.repaired += repair.run(rows, partition, lambda: self._record(rows, partition))
            self._compact(self._intent_log)

    def _compact(self, intent_log: WriteIntentLog) -> None:
        """Drop noted rows that later notes have replaced, once they were unused for a while: a client may be
        between its note and its write."""
        if time.monotonic() - self._compacted_at >= COMPACT_SECONDS:
            self._unused = self._lease.store.compact_notes(intent_log, self._unused)
            self._compacted_at = time.monotonic()

    def _record(self, rows: dict[Key, set[Digest]], partition: str | None) -> None:
        if self._intent_log is None:
            return
        fields = sorted({name for digests in rows.values() for digest in digests for name in digest})
        records = []
        for part, some in enumerate(_in_parts(rows, fields)):
            record = BatchRecord(
                token=self._lease.token,
                partition=partition,
                content=self._content,
                fields=fields,
                rows=some,
            )
            records.append(Record(self._key(part), batch_group(self._info.name), record.model_dump_json()))
        stale = [self._key(part) for part in range(len(records), self._parts)]
        self._lease.store.put_records(LEDGER, records)
        self._parts = max(self._parts, len(records))
        if stale:
            self._lease.store.drop_records(LEDGER, batch_group(self._info.name), stale)
            self._parts = len(records)

    def _key(self, part: int) -> str:
        return f"{BATCHES}/{self._info.name}/{self._lease.token:012}/{part:04}"


def batch_group(collection: str) -> str:
    """Return the group of a collection's batch records in the ledger."""
    return f"{BATCHES}/{collection}"


def open_batches(store: Store, collection: str) -> list[BatchRecord]:
    """Return the batch records of a collection. Those of other jobs were left by jobs that were killed."""
    found = store.records(LEDGER, batch_group(collection))
    return [BatchRecord.model_validate_json(each.body) for each in found]


def repair_left(store: Store, collection: str, intent_log: WriteIntentLog) -> int:
    """Repair the batches that killed jobs left, and remove their records. Returns how many rows had to be
    repaired. store: that of the lease, whose former holders are fenced."""
    repaired = 0
    for record in open_batches(store, collection):
        rows = record.digests()
        repair = _Repair(store, collection, intent_log, record.content, set())
        # Replayed rows need not be recorded again: the record stays until all are repaired.
        repaired += repair.run(rows, record.partition, lambda: None)
    drop_batches(store, collection)
    return repaired


def drop_batches(store: Store, collection: str) -> None:
    """Remove all batch records of a collection."""
    store.drop_records(LEDGER, batch_group(collection))


class _Repair:
    """Does again what clients noted of rows that a job has rewritten. applied: notes whose writes were made
    before the job read the rows."""

    def __init__(
        self,
        store: Store,
        collection: str,
        intent_log: WriteIntentLog,
        content: RowContent,
        applied: set[Note],
    ) -> None:
        self._store, self._collection, self._intent_log = store, collection, intent_log
        self._content, self._applied = content, applied

    def unapplied(self, keys: Sequence[Key], partition: str | None) -> list[Note]:
        """Return the notes of these keys that the rows do not show, and take the others as settled."""
        notes = [
            note
            for note in self._store.notes(self._intent_log, keys, partition=partition)
            if note not in self._applied
        ]
        if not notes:
            return []
        held, noted = self._contents(notes, partition)
        shown = {
            note
            for note in notes
            if _shows(held.get(note.key, ABSENT), noted.get(note.key, {}).get(note.row or "", ABSENT))
        }
        self._applied |= shown
        return [note for note in notes if note not in shown]

    def run(self, rows: dict[Key, set[Digest]], partition: str | None, record: Any) -> int:
        """rows: for each key the digests of what the job may have left there; those of replayed rows are
        added. record: keeps them, before they are written."""
        keys: Iterable[Key] = rows
        seen = set(self._applied)
        repaired: set[Key] = set()
        for _ in range(REPAIR_ROUNDS):
            notes = self._store.notes(self._intent_log, list(keys), partition=partition)
            notes = [note for note in notes if note not in seen]
            if not notes:
                return len(repaired)
            chosen, seen_now = self._chosen(notes, rows, partition, record)
            seen |= seen_now
            if chosen:
                done = self._store.replay(self._collection, self._intent_log, chosen)
                repaired |= {note.key for note in done}
                self._applied.update(chosen)
            # Of the other rows none was written, so none of their clients' writes can have been undone.
            keys = [note.key for note in notes if note in chosen or note not in seen_now]
            if not keys:
                return len(repaired)
        raise NotCaughtUp(
            f"rows {name_some(list(keys))} of {self._collection!r} change faster than they can be repaired: "
            "run it again when there are fewer writes"
        )

    def _chosen(
        self, notes: Sequence[Note], rows: dict[Key, set[Digest]], partition: str | None, record: Any
    ) -> tuple[list[Note], set[Note]]:
        """Those of the notes that are to be replayed, and those that could be judged."""
        if not self._store.replaces_rows():
            return list(notes), set(notes)
        digests, noted = self._contents(notes, partition)
        judged = [note for note in notes if note.row is None or note.row in noted.get(note.key, {})]
        chosen = []
        for note in judged:
            found = digests.get(note.key, ABSENT)
            earlier = dict(noted.get(note.key, {}))
            wanted = ABSENT if note.row is None else earlier.pop(note.row)
            if _is_stale(found, rows[note.key], earlier.values(), note) and _differ(found, wanted):
                rows[note.key].add(wanted)
                chosen.append(note)
        if chosen:
            record()
        return chosen, set(judged)

    def _contents(
        self, notes: Sequence[Note], partition: str | None
    ) -> tuple[dict[Key, Digest], dict[Key, dict[str, Digest]]]:
        """The digests of the rows that notes are of, and of all rows that were noted of them."""
        field, keys = self._content.field, [note.key for note in notes]
        held = self._store.get(self._collection, keys, field, partition=partition)
        return dict(zip(held.keys, self._content.digests(held), strict=True)), self._noted(keys)

    def _noted(self, keys: Sequence[Key]) -> dict[Key, dict[str, Digest]]:
        """For each key the digests of all rows that were noted of it, by the names of these."""
        names, batch = self._store.noted(self._collection, self._intent_log, keys, self._content.field)
        found: dict[Key, dict[str, Digest]] = {}
        for key, name, digest in zip(batch.keys, names, self._content.digests(batch), strict=True):
            found.setdefault(key, {})[name] = digest
        return found


def _is_stale(found: Digest, written: set[Digest], earlier: Iterable[Digest], note: Note) -> bool:
    """Whether a row is as the job left it, or has an earlier content that a client noted, or is as the job
    left it but for what partial updates have changed since."""
    if found in written or (found and found in earlier):
        return True
    if not (found and note.changed):
        return False
    return found.without(note.changed) in {each.without(note.changed) for each in written}


def _shows(found: Digest, wanted: Digest) -> bool:
    """Whether a row has all that was noted; Milvus Lite keeps further fields of the row that was replaced."""
    if not wanted:
        return not found
    return all(found.get(name) == each for name, each in wanted.items() if name != HAS_BIAS)


def _differ(found: Digest, wanted: Digest) -> bool:
    return found.without([HAS_BIAS]) != wanted.without([HAS_BIAS])


def _in_parts(rows: dict[Key, set[Digest]], fields: Sequence[str]) -> Iterator[list[tuple[Key, list[str]]]]:
    """The rows as a record has them, so many at once as one takes."""
    part: list[tuple[Key, list[str]]] = []
    size = LONGEST_RECORD
    for key, digests in rows.items():
        texts = sorted(",".join(digest.get(name, "") for name in fields) for digest in digests)
        length = len(json.dumps(key)) + sum(map(len, texts)) + 4 * len(texts) + 4
        if size + length > LONGEST_RECORD:
            if part:
                yield part
            part, size = [], sum(map(len, fields)) + 4 * len(fields)
        part.append((key, texts))
        size += length
    if part:
        yield part
