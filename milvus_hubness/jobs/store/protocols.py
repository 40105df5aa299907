"""The protocols that a database implements for the
jobs: `Store`, its parts, and optional capabilities.

All reads except `scan` are strongly consistent. Every method may raise StoreError and its
subclasses. A store has a capability if it has its methods; `capability` returns the store as one
that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, Protocol, TypeVar, cast, runtime_checkable

from milvus_hubness.basics.bounds import FrozenModel
from milvus_hubness.correction.banks.stored import Key, StoredBank
from milvus_hubness.correction.codec.arrays import Floats, Metric
from milvus_hubness.correction.state import BankReference, CollectionState
from milvus_hubness.errors import InvalidInput, UnsupportedOperation, redacted
from milvus_hubness.jobs.store.generations import SPARE_SECONDS, Batch, Made
from milvus_hubness.jobs.store.ownership import CollectionId
from milvus_hubness.jobs.store.records import (
    CollectionInfo,
    ColumnNeeds,
    Fences,
    QuerySamples,
    Record,
    Sample,
    SamplesOf,
    VectorField,
)

T = TypeVar("T")


class Collections(Protocol):
    """Whole collections: their existence, aliases, properties and fences."""

    def close(self) -> None:
        """Close the connection to the database; for whoever opened the store by an address."""

    def server_version(self) -> str: ...

    def info(
        self, collection: str, *, counted: bool = True, checked: bool = True
    ) -> CollectionInfo:
        """Describe a collection.

        counted: if false, `rows` is 0, which costs less. checked: raise
        StateError if its properties name collections that are not its
        helpers; see `ownership`. Raises CollectionNotFound.
        """

    def exists(self, collection: str) -> bool:
        """Whether a collection or an alias of that name exists."""

    def validate_name(self, name: str) -> None:
        """Raise InvalidParameter for a name that no new collection or alias can have."""

    def collection_names(self) -> list[str]:
        """Return the names of all collections, without aliases."""

    def properties_of(self, collection: str) -> Mapping[str, Any]:
        """Return all properties of a collection."""

    def write_property(self, collection: str, name: str, record: FrozenModel | None) -> None:
        """Write a record as the collection's property of that name; None drops it.

        Other properties stay.
        """

    def drop(self, collection: str) -> None: ...

    def alias_target(self, alias: str) -> str | None:
        """Return the collection behind an alias; None if there is no such alias."""

    def point_alias(self, alias: str, collection: str) -> None:
        """Create or move the alias, in one step of the database."""

    def drop_alias(self, alias: str) -> None: ...

    def fenced(self, fences: Fences) -> Store:
        """Return this store with its writes through the aliases of
        `fences`; they raise LeaseLost if one is gone. A failed write
        that may still arrive is sent again only through another alias.
        """

    def fence(self, collection: str, alias: str) -> None:
        """Create a fencing alias in one request.

        If the request fails, the alias may still appear later.
        """

    def unfence(self, alias: str) -> None:
        """Drop a fencing alias, so that the database
        accepts no more writes through it, if it exists.
        """

    def fences_of(self, collection: str) -> list[str]:
        """Return the fencing aliases of a collection; none if it does not exist."""


class Schemas(Protocol):
    """Which collections can be copied or can hold biases, and the creation of copies."""

    def obstacles(self, source: CollectionInfo, field: str, suffix: str) -> list[str]:
        """Return the reasons why `source` cannot be copied; empty if it can.

        field: one to correct, or one that is corrected in its vectors and gets other biases.
        """

    def remarks(self, source: CollectionInfo, field: str) -> list[str]:
        """Return remarks for the user about changes that a copy brings."""

    def column_needs(self, source: CollectionInfo, field: str) -> ColumnNeeds:
        """Return what the index and the quantiser of a field, corrected or not, ask of the columns of
        its augmented vectors.
        """

    def validate_index(self, planned: VectorField, source: VectorField) -> None:
        """Raise InvalidParameter if a copy of the source's field cannot have the planned index."""

    def units_moved(self) -> int:
        """Return by how many units in the last place the database may change numbers of a COSINE
        vector, and their lengths at will; 0 if it keeps COSINE vectors as they are written.
        """

    def schema_facts(self, source: CollectionInfo) -> dict[str, Any]:
        """Return the parts of the schema that a copy depends on; equal schemas give equal data."""

    def named_partitions(self, source: CollectionInfo) -> list[str]:
        """Return the partitions that a user knows by name."""

    def fields_of_copy(self, hidden_fields: Sequence[str]) -> list[str]:
        """Return those of the hidden fields of a correction that rows of a copy store."""

    def create_copy(self, source: CollectionInfo, target: str, state: CollectionState) -> None:
        """Create an empty `target` like `source`, for augmented vectors, as far as an interrupted
        call has not. Raises CollectionExists if `target` is not an unfilled copy of `source`.
        """

    def beside_remarks(self, source: CollectionInfo) -> list[str]:
        """Return what a user should know of biases beside the rows.

        Raises CannotMigrate if the collection cannot have them.
        """

    def most_candidates(self, source: CollectionInfo) -> int:
        """Return the most rows for which a search of the collection may ask."""


class Rows(Protocol):
    """Rows of one collection."""

    def chunk_rows(self, source: CollectionInfo) -> int:
        """Return how many rows of this collection make a chunk of suitable size."""

    def count(self, collection: str) -> int:
        """Return the number of rows as the database counts them, including duplicates."""

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
        """Return the first `limit` rows with after < key ≤ upto in key order; all written before
        the last `count`.
        """

    def scan_keys(
        self,
        collection: str,
        *,
        limit: int,
        after: Key | None = None,
        partition: str | None = None,
        pending: str = "",
    ) -> list[Key]:
        """Return the first keys, at most `limit`, as `scan` does for rows; if `pending` names an
        epoch field, of rows without a bias. Without `after`, the read is strongly consistent, and
        later ones show what it has seen.
        """

    def above(self, key: Key, step: int) -> Key | None:
        """Return a key to page on from: `key` at step 0, then farther and farther ones; None if no
        key is greater.
        """

    def get(
        self, collection: str, keys: Sequence[Key], field: str, *, partition: str | None = None
    ) -> Batch:
        """Return the rows that exist, in the order of `keys`."""

    def values(
        self,
        collection: str,
        name: str,
        keys: Sequence[Key],
        *,
        partition: str | None = None,
        are_numbers: bool = True,
    ) -> dict[Key, Any]:
        """Return this scalar field of the rows that exist, None where it is missing.

        are_numbers: whether its values are to be numbers; else they are names. Raises InvalidInput if
        no row of the collection can have such a field.
        """

    def insert(
        self, collection: str, batch: Batch, field: str, *, partition: str | None = None
    ) -> None:
        """Insert rows whose keys the collection has never had, for less than an `upsert` costs."""

    def upsert(
        self, collection: str, batch: Batch, field: str, *, partition: str | None = None
    ) -> None:
        """Insert or replace rows, acknowledged on return."""

    def delete(self, collection: str, keys: Sequence[Key], *, partition: str | None = None) -> None:
        """Delete rows, of this partition if it is set; missing rows are no error."""

    def flush(self, collection: str) -> None:
        """Make all written rows durable, indexed and loaded on return."""

    def load(self, collection: str) -> None:
        """Make all durable rows indexed and loaded on return."""

    def wait_visible(self, collection: str) -> None:
        """Wait until every search sees all written rows."""

    def read_back(self, collection: str, read: Callable[[], T], is_whole: Callable[[T], bool]) -> T:
        """Return what `read` returns of a collection that this package made.

        is_whole: whether it has what the caller wrote, or what is bound to be there. If not, a
        database that may hide acknowledged rows is made to show them, within a bound, and is read
        again. The answer may still not be whole: what that means is for the caller to say.
        """

    def nearest(
        self, collection: str, field: str, query_vectors: Floats, k: int
    ) -> list[list[Key]]:
        """Return for each query (m, width) the keys of the k rows that a search finds."""


class Ledger(Protocol):
    """Records of jobs in the database."""

    def put_records(self, ledger: str, records: Sequence[Record]) -> None:
        """Insert or replace these records, acknowledged
        on return; creates the ledger if it is missing.
        """

    def record(self, ledger: str, key: str) -> Record | None:
        """Return the record of that key; None if there is none, or no ledger."""

    def records(self, ledger: str, *groups: str) -> list[Record]:
        """Return the records of these groups in key order; none if there is no ledger."""

    def drop_records(self, ledger: str, group: str, keys: Sequence[str] | None = None) -> None:
        """Delete these records of a group; all of them without `keys`.

        All keys must belong to the group.
        """

    def listed_helpers(self, owner: CollectionId) -> frozenset[str]:
        """Return the helpers that the ledger lists for a
        collection from whose name theirs are not derived.
        """

    def list_helpers(self, owner: CollectionId, helpers: Iterable[str]) -> None:
        """Add helpers to that list."""

    def unlist_helper(self, owner: CollectionId, helper: str) -> None:
        """Remove a helper from the list of a collection."""

    def forget_helpers(self, owner: str) -> None:
        """Remove the list of a collection that is gone."""


class Banks(Protocol):
    """Query banks; `generations.BankGenerations` implements this for any database."""

    def save_bank(
        self, collection: str, bank: StoredBank, metric: Metric, *, in_use: bool = False
    ) -> tuple[BankReference, Made]:
        """Save `bank` as a generation, read it back, and return its reference and what was created.

        in_use: a state that only the caller writes names the generation already.

        Raises CollectionExists, DimensionMismatch, and StateError if another process keeps changing
        the rows.
        """

    def load_bank(self, reference: BankReference, *, checked: bool = True) -> StoredBank:
        """Return the bank.

        Raises EmptyBank and, if `checked`, StateError for rows other than the reference names.
        """

    def save_nearest(
        self, reference: BankReference, owner: Sequence[str], nearest: Sequence[Sequence[Key]]
    ) -> BankReference:
        """Save the keys of the items nearest to the queries, then to the targets; return a
        reference that names them. The rows that `reference` names stay as they are.

        owner: whose items they are, such as a collection, a field and a profile of it.
        """

    def drop_bank_generations(self, references: Sequence[BankReference]) -> None:
        """Delete the rows of generations that no collection state names.

        If a job does so meanwhile, the rows come back, or the job finds them missing when it loads
        the bank. All stay if the state of some collection cannot be read; a warning names that
        collection.
        """

    def drop_spare_generations(
        self,
        collection: str,
        used_by_jobs: Callable[[], set[tuple[str, str]] | None],
        older_than: float = SPARE_SECONDS,
    ) -> None:
        """Delete the generations of a bank collection that no collection state names and whose rows
        are older than so many seconds: those that killed jobs have left.

        used_by_jobs: returns collection and name of those that unfinished jobs use; None if nobody
        knows. It is called where there are old ones.
        """


class Store(Collections, Schemas, Rows, Ledger, Banks, Protocol):
    """A database for the jobs. The protocols below are its optional capabilities."""


def expect_store(store: object) -> None:
    """Raise InvalidInput, which says how to make a store, for a client or an address."""
    if isinstance(store, str | PathLike):
        address = redacted(repr(str(store)))
        raise InvalidInput(
            f"a store is needed, not the address {address}: pass MilvusStore(connect({address}))"
        )

    # By their names: this module imports no client.
    names = {base.__name__ for base in type(store).__mro__}
    remedies = {
        "MilvusClient": "MilvusStore(client)",
        "AsyncMilvusClient": "a MilvusClient, or the URI",
        "QdrantClient": "QdrantStore(client)",
        "AsyncQdrantClient": "QdrantStore(connect(uri))",
    }
    for name, remedy in remedies.items():
        if name in names:
            raise InvalidInput(
                f"a store is needed, not the client {type(store).__name__}: pass {remedy}"
            )

    # A store inherits from nothing: one method of the protocol stands for all.
    if not hasattr(store, "info"):
        raise InvalidInput(
            f"a store is needed, not {type(store).__name__}: pass MilvusStore(connect(uri))"
        )


@runtime_checkable
class Renaming(Protocol):
    def rename(self, collection: str, name: str) -> None: ...


@runtime_checkable
class SideCollections(Protocol):
    """Side collections, which hold the biases of another collection's rows."""

    def can_hold_side(self, source: CollectionInfo, side: str) -> bool:
        """Whether the name is free, or that of one that an unfinished `enable` of `source` left."""

    def create_side(self, source: CollectionInfo, side: str) -> None:
        """Create an empty side collection with the keys of `source`."""


ClientFeature = Literal["gate", "hub guard"]
"""What clients may do: correct only the queries whose raw best item the bank knows, and stop new rows
that look like planted hubs.
"""


@runtime_checkable
class ClientFeatures(Protocol):
    """Clients that do more than corrected searches and writes."""

    def client_features(self) -> frozenset[ClientFeature]:
        """Return what all clients of this database do."""


@runtime_checkable
class QuerySampling(Protocol):
    """Samples of live queries."""

    def create_query_samples(self, samples_collection: str, owner: CollectionId, dim: int) -> None:
        """Create a collection for samples of `owner`, unless it exists, and list it in the ledger.

        Raises CollectionExists, DimensionMismatch.
        """

    def read_query_samples(self, samples_collection: str, places: int) -> QuerySamples:
        """Return the samples in the first places that `QuerySamples.counting` keeps; none if the
        collection does not exist.
        """

    def put_query_samples(self, target: SamplesOf, samples: Sequence[Sample]) -> None:
        """Write samples, each into its place. Raises StateError if another collection is named."""

    def drop_samples(self, samples_collection: str, places: int) -> None:
        """Drop the samples that are not in the first places; without any it is no error."""


@runtime_checkable
class BiasKeys(Protocol):
    """Biases in keys of payloads, which stay when the correction ends."""

    def add_bias_keys(self, collection: str, suffix: str) -> None:
        """Have clients hide the keys of biases; a row without them has bias 0 and is pending."""

    def put_bias_keys(self, collection: str, batch: Batch, keys: Sequence[str]) -> int:
        """Set these keys of the rows that still exist, and nothing else of them; return how many
        rows were acknowledged.
        """

    def left_keys(self, collection: str) -> dict[str, int]:
        """Return the number of rows with each key that
        jobs have written, without keys that no row has.
        """

    def delete_keys(self, collection: str) -> None:
        """Delete these keys from all rows."""


_MISSING: dict[Any, str] = {
    Renaming: "cannot rename collections: let applications read the collection by an alias",
    SideCollections: "has no side collections",
    QuerySampling: "keeps no query samples: pass the reference queries as a file",
    BiasKeys: "keeps no biases beside its rows: migrate the collection",
}
Capability = TypeVar("Capability")


def capability(store: Store, kind: Callable[..., Capability]) -> Capability:
    """Return the store as one with an optional capability.

    Raises UnsupportedOperation if it lacks it.
    """
    if not isinstance(store, cast(type, kind)):
        raise UnsupportedOperation(f"this database {_MISSING[kind]}")
    return cast(Capability, store)


_WITHOUT: dict[ClientFeature, str] = {
    "gate": "has no clients that gate searches: leave gate out",
    "hub guard": "has no clients that watch their writes for hubs: leave on_hub off",
}


def has_feature(store: Store, feature: ClientFeature) -> bool:
    return isinstance(store, ClientFeatures) and feature in store.client_features()


def expect_feature(store: Store, feature: ClientFeature) -> None:
    """Raise UnsupportedOperation if clients of this database lack a feature."""
    if not has_feature(store, feature):
        raise UnsupportedOperation(f"this database {_WITHOUT[feature]}")


def validate_new_names(store: Store, *names: str | None) -> None:
    """Raise InvalidParameter for a name that a caller gives and that no new collection or alias can
    have. None counts as no name.
    """
    for name in names:
        if name is not None and not (name and store.exists(name)):
            store.validate_name(name)


def confirm_bank(store: Store, reference: BankReference, bank: StoredBank, metric: Metric) -> None:
    """Write a bank again, now that a collection state names it, as far as its rows are gone.

    Until the state named it, another job, which knew of no use, may have dropped it.
    """
    store.save_bank(reference.collection, bank, metric, in_use=True)


def undo_save_bank(store: Store, reference: BankReference, made: Made) -> None:
    """Drop what `save_bank` created, except a generation that a state names and a bank collection
    with other rows.
    """
    if made != "nothing":
        store.drop_bank_generations([reference])
    if made == "collection" and not store.count(reference.collection):
        store.drop(reference.collection)
