"""The protocol that a database implements for the jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from milvus_hubness.banks.bank import QueryBank
from milvus_hubness.banks.generations import Batch, Key, Made, StoredBank
from milvus_hubness.codec.arrays import Floats, Metric
from milvus_hubness.job_properties import DualWrite, OnlineBank, TuningRecord, WriteIntentLog
from milvus_hubness.state import BankReference, CollectionState
from milvus_hubness.stores.records import (
    CollectionInfo,
    Fences,
    ImportJob,
    Note,
    QuerySamples,
    Record,
    VectorField,
)


class Store(Protocol):
    """Reads are strongly consistent, but for `scan`. Every method may raise StoreError and its kinds."""

    def server_version(self) -> str:
        """The database's own words."""
        ...

    def info(self, collection: str, *, counted: bool = True) -> CollectionInfo:
        """counted: else `rows` is 0, and the database has less to do. Raises CollectionNotFound."""
        ...

    def exists(self, collection: str) -> bool:
        """Whether a collection or an alias of that name is there."""
        ...

    def fenced(self, fences: Fences) -> Store:
        """This store, its writes sent by these aliases. A write that failed and may yet arrive is sent again
        only by another alias.

        Writes are those of rows, records and properties. Once an alias is gone, they raise LeaseLost."""
        ...

    def fence(self, collection: str, alias: str) -> None:
        """Create a fencing alias in one request. If it fails, the alias may be there later all the same."""
        ...

    def unfence(self, alias: str) -> None:
        """Drop a fencing alias, so that no write by it is accepted any more; a missing one is no error."""
        ...

    def replaces_rows(self) -> bool:
        """Whether `rewrite` replaces whole rows, so that it can undo any write and bring back a deleted row;
        else it changes only the fields that it names of rows that are still there."""
        ...

    def obstacles(self, source: CollectionInfo, field: str, suffix: str) -> list[str]:
        """Why `source` cannot be carried over; empty where it can."""
        ...

    def remarks(self, source: CollectionInfo, field: str) -> list[str]:
        """What the user should know that a copy changes."""
        ...

    def width_multiple(self, field: VectorField) -> int:
        """What the stored width must divide by for the field's index."""
        ...

    def validate_index(self, planned: VectorField, source: VectorField) -> None:
        """Raise InvalidParameter if a copy of the source's field cannot have the index that is planned."""
        ...

    def takes_graph_hint(self, source: CollectionInfo, field: str) -> bool:
        """Whether a graph hint column, whose numbers lie apart from those of the vector, costs the field's
        index nothing. See Layout."""
        ...

    def takes_locality_hints(self, source: CollectionInfo, field: str) -> bool:
        """Whether the field's index divides rows into cells or links them, and locality hint columns cost it
        nothing. See Layout."""
        ...

    def units_moved(self) -> int:
        """By how many units in the last place the database may change numbers of vectors under COSINE, which
        it brings to length 1 by itself; 0 where it leaves them as they are."""
        ...

    def renames(self) -> bool:
        """Whether a collection can be given another name."""
        ...

    def schema_facts(self, source: CollectionInfo) -> dict[str, Any]:
        """What of the schema a copy depends on, as plain data that two looks at the same schema agree on."""
        ...

    def create_copy(self, source: CollectionInfo, target: str, state: CollectionState) -> None:
        """An empty `target` with the fields, indexes, partitions and properties of `source`, its vector field
        in augmented form, the hidden fields beside it. Of one that an interrupted call left, what is missing
        is made. Raises CollectionExists where `target` is no copy of `source` still to be filled."""
        ...

    def bias_fields(self, source: CollectionInfo, suffix: str) -> Literal["there", "can be added", "none"]:
        """Whether fields of the collection itself can hold biases beside its vectors."""
        ...

    def bias_remarks(self, source: CollectionInfo, suffix: str) -> list[str]:
        """What the user should know of the fields that the collection has for biases."""
        ...

    def add_bias_fields(self, collection: str, suffix: str) -> None:
        """The fields that hold biases beside vectors, 0 in every row and pending."""
        ...

    def second_vector_field(
        self, source: CollectionInfo, field: str, suffix: str, width: int
    ) -> Literal["there", "can be added"]:
        """Whether `source` has a second vector field that can hold the augmented form of `field`, with the
        fields that go with it. Raises CannotMigrate with the reason where it has not and cannot be given it.
        """
        ...

    def second_vector_remarks(self, source: CollectionInfo, suffix: str) -> list[str]:
        """What the user should know of a second vector field."""
        ...

    def add_second_vector(self, source: CollectionInfo, field: str, suffix: str, width: int) -> None:
        """The second vector field and those that go with it, as far as they are missing."""
        ...

    def load_second_vector(self, source: CollectionInfo, state: CollectionState) -> None:
        """The second field indexed as the first is, but by inner product, and loaded."""
        ...

    def drop_second_vector(self, collection: str, state: CollectionState) -> bool:
        """Take the second field and those that go with it away. Whether the database can."""
        ...

    def update(
        self, collection: str, batch: Batch, field: str, changed: Sequence[str], *, partition: str | None
    ) -> None:
        """Replace the fields named `changed` of rows that are there, acknowledged on return; where the
        database replaces whole rows only, by the others of the batch, its vectors those of `field`."""
        ...

    def rewrite(
        self, collection: str, batch: Batch, field: str, changed: Sequence[str], *, partition: str | None
    ) -> None:
        """Rows that were read, with other biases, acknowledged on return: as `write`, where the database
        replaces whole rows only. Elsewhere no more than the fields named `changed`, of rows that are still
        there; `field` stands for the vectors."""
        ...

    def is_left_side(self, source: CollectionInfo, side: str) -> bool:
        """Whether there is a side collection of that name that an unfinished `enable` of `source` left.
        Raises CollectionExists if another collection has the name."""
        ...

    def create_side(self, source: CollectionInfo, side: str) -> None:
        """An empty collection for the biases of `source` under its keys."""
        ...

    def keys(self, collection: str, *, partition: str | None = None, pending: str | None = None) -> list[Key]:
        """All distinct keys in ascending order. pending: the name of an epoch field, for the rows only whose
        bias is not computed yet."""
        ...

    def scan(
        self,
        collection: str,
        field: str,
        *,
        after: Key | None = None,
        upto: Key | None = None,
        limit: int | None = None,
        partition: str | None = None,
    ) -> Batch:
        """The rows with after < key ≤ upto in key order, one of each key; with a limit the first of them, up
        to so many, and none only where there is none. Shows what had been written when `count` was last
        asked, perhaps more."""
        ...

    def scan_keys(
        self, collection: str, *, after: Key | None = None, limit: int, partition: str | None = None
    ) -> list[Key]:
        """The keys alone, as `scan` does."""
        ...

    def above(self, key: Key, step: int) -> Key | None:
        """A key in whose direction greater ones go on: `key` itself at step 0, farther away at each further
        one; None where no key can be greater."""
        ...

    def get(self, collection: str, keys: Sequence[Key], field: str, *, partition: str | None = None) -> Batch:
        """The rows that are still there, in the order of `keys`."""
        ...

    def upsert(self, collection: str, batch: Batch, field: str, *, partition: str | None = None) -> None:
        """Insert or replace, acknowledged on return."""
        ...

    def insert(self, collection: str, batch: Batch, field: str, *, partition: str | None = None) -> None:
        """As `write`, of rows whose keys the collection has never held: that costs the database less."""
        ...

    def delete(self, collection: str, keys: Sequence[Key], *, partition: str | None = None) -> None:
        """Rows that are not there are no error. partition: the only one to look in."""
        ...

    def import_obstacles(self, source: CollectionInfo) -> list[str]:
        """Why rows of `source` cannot be written to files that the database imports; empty where they can."""
        ...

    def write_import_file(
        self, collection: str, batches: Iterable[Batch], field: str, folder: Path
    ) -> str | None:
        """A file somewhere in `folder`, which is made, that holds these rows as `collection` is to hold them.
        Its path from there; None where there are no rows."""
        ...

    def bulk_import(self, collection: str, file: str, *, partition: str | None = None) -> str:
        """Ask the database to insert the rows of a file, as it calls that, beside what it holds. The id of
        the job, which may still run on return."""
        ...

    def import_job(self, job: str) -> ImportJob: ...

    def import_jobs(self, collection: str) -> list[ImportJob]:
        """All that the database remembers of this collection."""
        ...

    def show_imported(self, collection: str) -> None:
        """Rows of jobs that are done are indexed and seen by every read on return."""
        ...

    def chunk_rows(self, source: CollectionInfo) -> int:
        """How many rows of this collection make a chunk of comfortable size."""
        ...

    def count(self, collection: str) -> int:
        """Rows as the database counts them, duplicates and all."""
        ...

    def flush(self, collection: str) -> None:
        """Everything written is durable, indexed and loaded on return."""
        ...

    def load(self, collection: str) -> None:
        """What is durable is indexed and loaded on return."""
        ...

    def wait_visible(self, collection: str) -> None:
        """Everything written is seen by every search on return."""
        ...

    def write_state(self, collection: str, state: CollectionState) -> None: ...

    def drop_state(self, collection: str, state: CollectionState) -> None: ...

    def write_dual_write(self, collection: str, dual_write: DualWrite | None) -> None:
        """Have the collection's writers write to another too, or no more."""
        ...

    def create_intent_log(self, source: CollectionInfo) -> WriteIntentLog:
        """A write-intent log that takes whatever rows `source` takes, with no notes in it for its job. Where
        one lies beside the collection that still fits, it is that one."""
        ...

    def write_intent_log(self, collection: str, intent_log: WriteIntentLog | None) -> None:
        """Have the collection's writers note what they write there first, or no more."""
        ...

    def end_intent_log(self, collection: str, intent_log: WriteIntentLog) -> None:
        """Have the collection's writers note no more, and forget what they noted for this job and those
        before it. Where to make a write-intent log takes long, it stays for the next."""
        ...

    def intent_logs(self, collection: str) -> list[WriteIntentLog]:
        """All that were made for this collection and are there, in whole or in part. Good for dropping."""
        ...

    def notes(
        self, intent_log: WriteIntentLog, keys: Sequence[Key] | None = None, *, partition: str | None = None
    ) -> list[Note]:
        """The last note of each of these keys that there is one of, in that partition; without keys, of all
        in all partitions."""
        ...

    def noted(
        self, collection: str, intent_log: WriteIntentLog, keys: Sequence[Key], field: str
    ) -> tuple[list[str], Batch]:
        """All rows that clients noted of these keys, the last one of each and earlier ones, as `fetch` would
        return them, and the name of each. Only where `replaces_rows`."""
        ...

    def compact_notes(self, intent_log: WriteIntentLog, unused: frozenset[str]) -> frozenset[str]:
        """Drop the noted rows of these names, unless a note names them by now; return the names of all others
        that no note names."""
        ...

    def count_notes(self, intent_log: WriteIntentLog) -> int:
        """How many rows the log of write intents holds in memory."""
        ...

    def replay(self, collection: str, intent_log: WriteIntentLog, notes: Sequence[Note]) -> list[Note]:
        """Do again what notes say, where the collection does not hold it; acknowledged on return. Returns the
        notes of which that was so, without those that another note has replaced meanwhile."""
        ...

    def drop_intent_log(self, intent_log: WriteIntentLog, check: Callable[[], None]) -> None:
        """check: raises LeaseLost; called when no other job takes this write-intent log any more. Raises
        CollectionExists where something else has its name."""
        ...

    def write_tuning(self, collection: str, tuning: TuningRecord) -> None: ...

    def write_online_banks(self, collection: str, online_banks: Sequence[OnlineBank]) -> None:
        """Have the collection say that these banks live, and no others."""
        ...

    def create_query_samples(self, samples_collection: str, dim: int) -> None:
        """A collection for samples of live queries, unless it is there. Raises CollectionExists where the
        name is taken, DimensionMismatch where it holds others."""
        ...

    def read_query_samples(self, samples_collection: str, profile: str) -> QuerySamples:
        """The samples of one profile; none where there is no such collection."""
        ...

    def drop_samples(self, samples_collection: str, numbers: Sequence[int]) -> None:
        """Samples of these numbers; those that are not there are no error."""
        ...

    def drop(self, collection: str) -> None: ...

    def rename(self, collection: str, name: str) -> None:
        """Only where the database `renames`."""
        ...

    def alias_target(self, alias: str) -> str | None:
        """The collection behind an alias; None where there is no such alias."""
        ...

    def point_alias(self, alias: str, collection: str) -> None:
        """Create the alias or move it, in one step of the database."""
        ...

    def drop_alias(self, alias: str) -> None: ...

    def put_records(self, ledger: str, records: Sequence[Record]) -> None:
        """Keep or replace these entries, acknowledged on return. The ledger is made where there is none."""
        ...

    def record(self, ledger: str, key: str) -> Record | None:
        """The entry of that key; None where there is none, or no ledger."""
        ...

    def records(self, ledger: str, group: str) -> list[Record]:
        """The entries of a group in the order of their keys; none where there is no ledger."""
        ...

    def drop_records(self, ledger: str, group: str, keys: Sequence[str] | None = None) -> None:
        """Forget these entries of a group, all of them without `keys`, which are of the group."""
        ...

    def save_bank(self, collection: str, bank: StoredBank, metric: Metric) -> tuple[BankReference, Made]:
        """Save `bank` as a generation of the bank collection, and return the reference to it and what was
        created. A generation is named by its content: the same bank with the same potentials is one, however
        often and by whoever it is saved. Its rows are read back before this returns.

        Raises CollectionExists where the name is taken, DimensionMismatch, and StateError where another
        process keeps changing the rows."""
        ...

    def load_bank(self, reference: BankReference, *, checked: bool = True) -> StoredBank:
        """Return the bank of a generation. checked: raise StateError where its rows are not those that the
        reference names; else return them as they are. Raises EmptyBank where there are none."""
        ...

    def save_nearest(
        self, reference: BankReference, collection: str, nearest: Sequence[Sequence[Key]]
    ) -> BankReference:
        """Save the keys of the nearest items in `collection` of each query, then of each target. The rows
        that `reference` names stay as they are; the returned reference names the new ones."""
        ...

    def nearest(self, collection: str, field: str, query_vectors: Floats, k: int) -> list[list[Key]]:
        """The keys of the k rows with the largest inner products with each of `search_request` (m, width), by
        the database's own search."""
        ...

    def bank_scores(self, reference: BankReference, query_vectors: Floats, k: int) -> Floats:
        """(m, k) inner products, falling, or −½ the squared distances under L2, of `search_request` (m, d)
        with the nearest queries of a bank, by the database's own search and the index that the bank has
        there.

        Raises BankTooSmall where it finds fewer."""
        ...

    def drop_bank_generation(self, reference: BankReference) -> None:
        """Delete the rows of a generation, unless some collection state names it.

        A job that has saved a generation and names it in a state while it is dropped here gets the rows back,
        or finds them gone when it loads the bank after it wrote the state."""
        ...

    def read_vectors(self, collection: str, field: str | None = None) -> QueryBank:
        """The vectors of any collection as a query bank."""
        ...


def undo_save_bank(store: Store, reference: BankReference, made: Made) -> None:
    """Drop what `save_bank` created, except a generation that a collection state names and a bank collection
    that holds other rows."""
    if made != "nothing":
        store.drop_bank_generation(reference)
    if made == "collection" and not store.count(reference.collection):
        store.drop(reference.collection)
