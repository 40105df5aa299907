"""The row writer: every job uses it to rewrite rows of a live collection.

A job reads rows and writes them back with other biases. This would undo a client's change in between: an
update would be lost, and a deleted row would return. Clients therefore note their writes in the write-intent
log while the collection asks for it (`write_intents`), and for each batch of rows the job does three things:

    1. It records the keys and a digest of each row's content, field by field.
    2. It writes the rows by the fencing alias of its lease.
    3. It repairs them: it replays the noted writes of rows that still have the content that the job wrote.

A client's note precedes its write. If the client writes before the job, the note exists at step 3; if it writes after
the job, its write stays. A repair is a write too, so the job reads the log again until it finds no newer note. The
repair leaves rows alone that another client has changed since: their content has another digest.

Digests cover the content that users wrote, and no biases.

A job that is killed leaves its last batch record. The next holder of the lease first drops the former holder's alias,
so that none of its writes can arrive any more, and then repairs the rows that the record names.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from milvus_hubness.banks.generations import Batch, Key
from milvus_hubness.errors import NotCaughtUp, name_some
from milvus_hubness.job_properties import WriteIntentLog
from milvus_hubness.operations.lease import Lease
from milvus_hubness.operations.lease_records import LEDGER
from milvus_hubness.state import CollectionState, FrozenModel
from milvus_hubness.stores.protocols import Ledger, Store, WholeRows, capability
from milvus_hubness.stores.records import CollectionInfo, Note, Record

BATCHES = "batches"
HAS_BIAS = ""
VISIBLE_SECONDS, VISIBLE_PAUSE = 5.0, 0.05
"""Maximum time between a note and its write, and the time between two reads, in seconds."""
REPAIR_ROUNDS = 20
COMPACT_SECONDS = 60.0
"""Time between two compactions of the log, in seconds; a noted row is dropped if both find it unused."""
LONGEST_RECORD = 50_000
"""Maximum length of a record, in characters; a ledger takes 60,000."""


class RowContent(FrozenModel):
    """The part of a row that its user wrote: the first `dim` numbers of the vector `field`, and all fields
    except those in `hidden`. A job that rewrites biases changes none of it. epoch: the name of the field that
    is 0 or missing in rows without a bias."""

    field: str
    dim: int
    hidden: tuple[str, ...]
    epoch: str

    @classmethod
    def of(cls, info: CollectionInfo, state: CollectionState) -> RowContent:
        """Return the row content of `info`, for a job that rewrites the biases of the state's field."""
        hidden = {name for each in (*info.states.values(), state) for name in each.codec.hidden_fields}
        return cls(field=state.field, dim=state.dim, hidden=tuple(sorted(hidden)), epoch=state.codec.epoch_field)

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
    """Short hashes of a row's fields, by field name; HAS_BIAS maps to whether the row has a bias. An empty
    digest stands for a missing row."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def without(self, names: Iterable[str]) -> Digest:
        """Return the digest without the fields in `names`."""
        left_out = set(names)
        return Digest({name: each for name, each in self.items() if name not in left_out})


ABSENT = Digest()
"""The digest of a row that does not exist."""


class BatchRecord(FrozenModel):
    """Rows that a job may have rewritten.

    rows: for each key, the digests of the contents that the job may have left. A digest is a list of the
    hashes of `fields`, in their order; a missing field has an empty hash.
    """

    token: int
    partition: str | None
    content: RowContent
    fields: list[str]
    rows: list[tuple[Key, list[str]]]

    def digests(self) -> dict[Key, set[Digest]]:
        """Return the digests of each row, in the form that `RowWriter` recorded."""
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
    """Rewrites rows of the collection `info`.

    state: the state of the field whose biases are written. intent_log: the log in which clients note their
    writes; None if the job rewrites no row of the collection itself.
    """

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
        """Number of rows that the writer repaired."""

    def rewrite(self, batch: Batch, changed: Sequence[str], partition: str | None) -> None:
        """Write rows with new biases and their content as read, as Store.rewrite does. Raises LeaseLost, and
        NotCaughtUp for rows that change faster than the writer can repair them."""
        self._write("rewrite", batch, changed, partition)

    def update(self, batch: Batch, changed: Sequence[str], partition: str | None) -> None:
        """Write rows as Store.update does, and otherwise as `rewrite`."""
        self._write("update", batch, changed, partition)

    def read(self, keys: Sequence[Key], partition: str | None) -> Batch:
        """Read rows that the job will rewrite, as Store.get does.

        The rows include all writes that were noted and made before, and the repair does not replay those. If
        a client is between its note and its write, this waits for the write up to VISIBLE_SECONDS. After that
        time another client must have written the row since.
        """
        store = self._lease.store

        def fetch() -> Batch:
            return store.get(self._info.name, keys, self._content.field, partition=partition)

        if self._intent_log is None or not isinstance(store, WholeRows):
            return fetch()
        # A strongly consistent read mostly waits, so the rows and the notes are read in parallel; the rows
        # are read again if there were notes.
        with ThreadPoolExecutor(1, "rows") as pool:
            reading = pool.submit(fetch)
            noted = self._wait_applied(keys, partition)
        return fetch() if noted else reading.result()

    def _wait_applied(self, keys: Sequence[Key], partition: str | None) -> bool:
        """Wait until the rows show their noted writes. Return whether there were new notes."""
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
        if isinstance(store, WholeRows):
            digests = self._content.digests(batch)
            rows = {key: {digest} for key, digest in zip(batch.keys, digests, strict=True)}
        self._record(rows, partition)
        getattr(store, method)(self._info.name, batch, self._content.field, changed, partition=partition)
        if self._intent_log is not None:
            repair = _Repair(store, self._info.name, self._intent_log, self._content, self._applied)
            self.repaired += repair.run(rows, partition, lambda: self._record(rows, partition))
            self._compact(self._intent_log)

    def _compact(self, intent_log: WriteIntentLog) -> None:
        """Drop noted rows that later notes have replaced, once they were unused for a while: a client may
        still be between its note and its write."""
        store = self._lease.store
        if isinstance(store, WholeRows) and time.monotonic() - self._compacted_at >= COMPACT_SECONDS:
            self._unused = store.compact_notes(intent_log, self._unused)
            self._compacted_at = time.monotonic()

    def _record(self, rows: dict[Key, set[Digest]], partition: str | None) -> None:
        if self._intent_log is None:
            return
        fields = sorted({name for digests in rows.values() for digest in digests for name in digest})
        records = []
        for part, some in enumerate(_in_parts(rows, fields)):
            record = BatchRecord(
                token=self._lease.token, partition=partition, content=self._content, fields=fields, rows=some
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


def open_batches(store: Ledger, collection: str) -> list[BatchRecord]:
    """Return the batch records of a collection, including those that killed jobs left."""
    found = store.records(LEDGER, batch_group(collection))
    return [BatchRecord.model_validate_json(each.body) for each in found]


def repair_left(store: Store, collection: str, intent_log: WriteIntentLog) -> int:
    """Repair the batches that killed jobs left, and remove their records. Return the number of repaired rows.
    store: the store of the lease, which has fenced the former holders."""
    repaired = 0
    for record in open_batches(store, collection):
        rows = record.digests()
        repair = _Repair(store, collection, intent_log, record.content, set())
        # Replayed rows need no new record: the record stays until all rows are repaired.
        repaired += repair.run(rows, record.partition, lambda: None)
    drop_batches(store, collection)
    return repaired


def drop_batches(store: Ledger, collection: str) -> None:
    """Remove all batch records of a collection."""
    store.drop_records(LEDGER, batch_group(collection))


class _Repair:
    """Replays client writes that were noted for rows that a job has rewritten. applied: notes whose writes
    precede the job's read of the rows."""

    def __init__(
        self, store: Store, collection: str, intent_log: WriteIntentLog, content: RowContent, applied: set[Note]
    ) -> None:
        self._store, self._collection, self._intent_log = store, collection, intent_log
        self._content, self._applied = content, applied

    def unapplied(self, keys: Sequence[Key], partition: str | None) -> list[Note]:
        """Return the notes of these keys that the rows do not show, and add the others to the applied notes."""
        notes = [
            note for note in self._store.notes(self._intent_log, keys, partition=partition) if note not in self._applied
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
        """Repair the rows, and return the number of repaired rows.

        rows: for each key, the digests of the contents that the job may have left; digests of replayed rows
        are added to it. record: stores `rows` before the replay. Raises NotCaughtUp.
        """
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
            # The job wrote none of the other rows, so it cannot have undone their clients' writes.
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
        """Return the notes to replay, and the notes that this round could judge."""
        if not isinstance(self._store, WholeRows):
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
        """Return the current digests of the noted rows, and the digests of all contents noted for them."""
        field, keys = self._content.field, [note.key for note in notes]
        held = self._store.get(self._collection, keys, field, partition=partition)
        return dict(zip(held.keys, self._content.digests(held), strict=True)), self._noted(keys)

    def _noted(self, keys: Sequence[Key]) -> dict[Key, dict[str, Digest]]:
        """Return, for each key, the digests of all noted rows, by the name of the noted row."""
        names, batch = capability(self._store, WholeRows).noted(
            self._collection, self._intent_log, keys, self._content.field
        )
        found: dict[Key, dict[str, Digest]] = {}
        for key, name, digest in zip(batch.keys, names, self._content.digests(batch), strict=True):
            found.setdefault(key, {})[name] = digest
        return found


def _is_stale(found: Digest, written: set[Digest], earlier: Iterable[Digest], note: Note) -> bool:
    """Return whether a row still has the job's content: exactly, or an earlier content that a client noted,
    or the job's content apart from the fields of later partial updates."""
    if found in written or (found and found in earlier):
        return True
    if not (found and note.changed):
        return False
    return found.without(note.changed) in {each.without(note.changed) for each in written}


def _shows(found: Digest, wanted: Digest) -> bool:
    """Return whether a row has all noted fields; Milvus Lite keeps further fields of the replaced row."""
    if not wanted:
        return not found
    return all(found.get(name) == each for name, each in wanted.items() if name != HAS_BIAS)


def _differ(found: Digest, wanted: Digest) -> bool:
    return found.without([HAS_BIAS]) != wanted.without([HAS_BIAS])


def _in_parts(rows: dict[Key, set[Digest]], fields: Sequence[str]) -> Iterator[list[tuple[Key, list[str]]]]:
    """Split the rows into parts that each fit into one batch record."""
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
