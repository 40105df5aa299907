"""Bank collections: generations of stored banks, named by the digests of their content.

A generation never changes: another bank, or the same bank with other potentials,
has another name and other row ids. Two writers of one generation write the same
rows under the same ids, so writes may come twice, overlap or arrive late. The
rows are written first and named in a collection state afterwards.

A generation goes when no collection state names it, those of former copies among them: at once where
a job knows that it has just replaced it, and otherwise, as after a killed job, with a later refresh that
finds its rows a day old. Who saves a bank that is there already writes old rows again, so that
nobody drops what is about to be named.
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.bounds import shown
from milvus_hubness.basics.logs import audit, log
from milvus_hubness.basics.words import expect_word
from milvus_hubness.correction.banks.bank import QueryBank, are_numbered
from milvus_hubness.correction.banks.stored import Key, StoredBank
from milvus_hubness.correction.codec.arrays import Floats, Metric
from milvus_hubness.correction.codec.base import with_columns
from milvus_hubness.correction.items import Items
from milvus_hubness.correction.kernels.multi_vectors import MultiVectors, is_multi, joined
from milvus_hubness.correction.kernels.token_rows import is_token_rows
from milvus_hubness.correction.prior import problem_of
from milvus_hubness.correction.state import BankReference, read_states
from milvus_hubness.errors import (
    CollectionExists,
    CollectionNotFound,
    DimensionMismatch,
    EmptyBank,
    HubnessError,
    StateError,
    StoreError,
)
from milvus_hubness.jobs.store.records import BANK_PROPERTY

Row = dict[str, Any]
Made = Literal["collection", "generation", "nothing"]
"""Kind of object that `save_bank` created in the database."""


@dataclass(frozen=True)
class Batch:
    """Rows in the order of `keys`."""

    keys: list[Key]
    vectors: Floats
    """(n, width) float32 of one field, as stored; `MultiVectors` of a field of several vectors."""
    rows: list[Row]
    """The other fields."""

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def items(self) -> Items:
        """The rows for a prior."""
        return Items(self.keys, self.rows)

    @classmethod
    def joined(cls, batches: Sequence[Batch]) -> Batch:
        """Return the rows of one or more batches in one."""
        if len(batches) == 1:
            return batches[0]
        return cls(
            keys=[key for batch in batches for key in batch.keys],
            vectors=joined([batch.vectors for batch in batches]),
            rows=[row for batch in batches for row in batch.rows],
        )

    def take(self, positions: Sequence[int]) -> Batch:
        """Return the rows at these positions."""
        # All rows in their order are taken often, and need no copy.
        if len(positions) == len(self) and all(map(int.__eq__, positions, range(len(self)))):
            return self

        return Batch(
            keys=[self.keys[i] for i in positions],
            vectors=self.vectors[positions],
            rows=[self.rows[i] for i in positions],
        )

    def with_columns(self, columns: Mapping[str, Sequence[Any]]) -> Batch:
        """Return the rows with these fields, in place of those of the same names."""
        return Batch(self.keys, self.vectors, with_columns(self.rows, columns))


QUERIES = "queries"
TARGETS = "targets"
CLICKS = "clicks"
"""The parts of a generation: the third has the clicks of a prior; one more may hold lists of nearest
items.
"""

OWN_PARTS = (QUERIES, TARGETS, CLICKS)
"""The parts that `generation_of` covers."""

TOKEN = "token"
"""The field of a bank's rows with the place of a vector among those of its query."""

KEYS_PER_ROW = 500
LONGEST_KEYS = 20_000
"""Clicks in one row of a bank: at most so many keys, of so many characters together. A row for each
key would store a vector with it; Milvus takes 65,536 bytes of JSON in a row.
"""

LONGEST_SOURCE = 512
"""Most bytes of the name of a bank's source: the field for it is no longer."""

ROWS_PER_WRITE = 2_000
"""Rows of a bank in one request."""

MOST_TIMES = 10
FEW_ROWS = 1_000
"""Most rows of a generation that are read: so many times those of its bank, or of so small a one."""

SPARE_SECONDS = 24 * 3600
"""A generation that no collection state names is dropped so long after it was written. Who saves it
names it within half of that time.
"""

SPARE_LIST_SECONDS = 3600
"""A list of nearest items that another one has replaced is dropped so long after it was written."""

MOST_FIRST_ROWS = 10_000
"""Most first rows of generations that are looked at: a bank collection has a few, unless somebody
adds rows to it.
"""

MOST_WRITES = 3
"""How often `save_bank` writes a generation of which it then reads back only a part."""


def generation_of(bank: StoredBank) -> str:
    """Return a digest of queries, potentials and targets, of the counts and groups of queries, if
    they have some, and of the clicks of a prior.
    """
    arrays = [*_arrays_of(bank.queries), bank.potentials]
    if bank.targets is not None:
        arrays += _arrays_of(bank.targets)

    for numbers in (bank.queries.counts, bank.queries.groups):
        if numbers is not None:
            arrays.append(numbers)

    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.kind}{'x'.join(map(str, array.shape))}:".encode())
        # 0 is added because not every database stores the sign of -0.0.
        unsigned_zeros = array + array.dtype.type(0)
        little_endian = array.dtype.newbyteorder("<")
        digest.update(np.ascontiguousarray(unsigned_zeros, little_endian).tobytes())

    if bank.clicks:
        clicks = sorted((repr(key), float(count)) for key, count in bank.clicks.items())
        digest.update(f"clicks{clicks!r}".encode())
    return digest.hexdigest()[:32]


def _digest_of(value: Any) -> str:
    """Return a digest of lists, texts and numbers."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:24]


def _arrays_of(bank: QueryBank) -> list[npt.NDArray[Any]]:
    """Return the numbers of a bank's vectors, and where each query's tokens begin if it has some."""
    vectors = rows_of_bank(bank)
    return [vectors.tokens, vectors.offsets] if is_multi(vectors) else [vectors]


def rows_of_bank(bank: QueryBank) -> Floats:
    """Return the vectors of a bank as rows of a database: (n, d), or multi-vectors."""
    vectors: Any = bank.vectors
    return cast(Floats, vectors.taken() if is_token_rows(vectors) else vectors)


def reference_to(collection: str, bank: StoredBank) -> BankReference:
    """Return the reference that `save_bank` would return."""
    return BankReference(
        collection=collection,
        generation=generation_of(bank),
        fingerprint=bank.fingerprint,
        count=len(bank.queries),
        size=_size_of(bank),
    )


def _size_of(bank: StoredBank) -> int:
    """Return how many rows of a database hold the queries, targets and clicks of a bank."""
    banks = [bank.queries, *([bank.targets] if bank.targets is not None else [])]
    vectors = [rows_of_bank(part) for part in banks]
    count = sum(len(each.tokens) if is_multi(each) else len(each) for each in vectors)
    return count + len(_click_rows(bank.clicks))


def holds(reference: BankReference, bank: StoredBank) -> bool:
    """Whether the reference names this bank."""
    return generation_of(bank) == reference.generation


def validated(reference: BankReference, bank: StoredBank) -> StoredBank:
    """Return the bank read from the rows that the reference names.

    Raises StateError if it is another bank.
    """
    if not holds(reference, bank):
        raise StateError(
            f"bank {reference.collection!r} holds other rows than the collection state names "
            f"(fingerprint {generation_of(bank)[:12]}… instead of {reference.generation[:12]}…): "
            "run refresh with --bank FILE to replace them, or run refresh to use them as they are"
        )
    return bank


def parts_of(reference: BankReference) -> list[str]:
    """Return the parts that the rows of a generation may have."""
    if reference.nearest:
        return [*OWN_PARTS, reference.nearest]
    return list(OWN_PARTS)


def fitted_bank(
    reference: BankReference, database: str, vectors: Floats, rows: Sequence[Row]
) -> StoredBank:
    """Return the bank in the rows of `parts_of(reference)`, in any order.

    Raises EmptyBank without queries, and StateError for rows that are none of a bank.
    """
    try:
        return _bank_of_rows(reference, database, vectors, rows)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, HubnessError):
            raise

        raise StateError(
            f"bank {reference.collection!r} has rows that no version of milvus-hubness writes "
            f"({type(error).__name__}: {shown(error)}): run refresh with --bank FILE to replace "
            "them"
        ) from None


def _bank_of_rows(
    reference: BankReference, database: str, vectors: Floats, rows: Sequence[Row]
) -> StoredBank:
    ordered = sorted(range(len(rows)), key=lambda i: (rows[i]["number"], rows[i].get(TOKEN, 0)))
    positions_of = {
        part: [i for i in ordered if rows[i]["part"] == part] for part in parts_of(reference)
    }
    queries = [rows[i] for i in positions_of[QUERIES] if not rows[i].get(TOKEN)]
    targets = positions_of[TARGETS]
    nearest = positions_of.get(reference.nearest, [])
    if not queries:
        raise EmptyBank(
            f"bank {reference.collection!r} has no queries of generation "
            f"{reference.generation[:12]}…: run refresh with --bank FILE"
        )

    # Unless every query has potentials, the estimator starts without them.
    potentials = [row.get("potentials", []) for row in queries]
    lengths = {len(numbers) for numbers in potentials}
    if len(lengths) != 1:
        potentials = [[]] * len(queries)

    source = f"{database}:{reference.collection}"
    return StoredBank(
        QueryBank(
            _bank_vectors(vectors, rows, positions_of[QUERIES]),
            source=source,
            counts=_counts_in(queries),
            groups=_groups_in(queries),
        ),
        _finite_matrix(potentials),
        QueryBank(_bank_vectors(vectors, rows, targets), source=source) if targets else None,
        [_keys_in(rows[i].get("nearest", [])) for i in nearest],
        _clicks_in([rows[i] for i in positions_of[CLICKS]]),
    )


def _of_all(rows: Sequence[Row], field: str) -> npt.NDArray[Any] | None:
    """Return the numbers (n,) of a field that all rows have; None unless they all have it."""
    values = [row.get(field) for row in rows]
    return None if None in values else np.array(values)


def _counts_in(rows: Sequence[Row]) -> npt.NDArray[Any] | None:
    """Return how often users sent each query (n,); None if some do not say.

    Raises ValueError unless these are numbers above 0.
    """
    counts = _of_all(rows, "count")
    if counts is None:
        return None
    if counts.dtype.kind not in "if" or not (np.isfinite(counts) & (counts > 0)).all():
        raise ValueError("counts are not numbers above 0")
    return counts


def _groups_in(rows: Sequence[Row]) -> npt.NDArray[Any] | None:
    """Return the groups of queries (n,); None if they have none, or not all of them.

    Raises ValueError unless they are whole numbers.
    """
    groups = _of_all(rows, "group")
    if groups is None:
        return None
    if groups.dtype.kind != "i":
        raise ValueError("groups are not whole numbers")

    # Who adds or removes queries by hand leaves gaps, which the next fit closes.
    return groups if are_numbered(groups) else None


def _added_at(row: Mapping[str, Any]) -> int:
    """Return the Unix time at which a row was written; 0 for one that does not say so, as nobody of
    this package wrote it.
    """
    seconds = row.get("added_at")
    return seconds if isinstance(seconds, int) else 0


def _finite_matrix(potentials: Sequence[Any]) -> Floats:
    """Return the potentials as float32 (n, p).

    Raises ValueError unless they are rows of finite numbers.
    """
    with np.errstate(over="ignore"):
        matrix = np.asarray(potentials, np.float32)
    if matrix.ndim != 2 or not np.isfinite(matrix).all():
        raise ValueError("potentials are not rows of finite numbers")
    return matrix


def _bank_rows(bank: QueryBank, potentials: Sequence[Sequence[float]]) -> list[Row]:
    """Return the fields of a row for each vector of `bank`, without those that place the row."""
    source = bank.source.encode()[:LONGEST_SOURCE].decode(errors="ignore")
    added_at = int(time.time())
    rows: list[Row] = []
    for number, numbers in enumerate(potentials):
        row: Row = {"source": source, "added_at": added_at}
        if bank.counts is not None:
            row["count"] = float(bank.counts[number])
        if bank.groups is not None:
            row["group"] = int(bank.groups[number])
        # Most estimators have none; the rows of their banks lack the field.
        if numbers:
            row["potentials"] = numbers
        rows.append(row)
    return rows


def _rows_of_tokens(rows: Sequence[Row], vectors: MultiVectors) -> list[Row]:
    """Return a row for each vector of a query that has several.

    The first has all fields of the query; the others those that the database demands.
    """
    of_tokens: list[Row] = []
    for row, count in zip(rows, vectors.lengths.tolist(), strict=True):
        of_tokens.append({**row, TOKEN: 0})
        further = {name: row[name] for name in ("number", "source", "added_at")}
        of_tokens += [{**further, TOKEN: token} for token in range(1, count)]
    return of_tokens


def _bank_vectors(vectors: Floats, rows: Sequence[Row], positions: Sequence[int]) -> Floats:
    """Return the vectors of a part of a bank from those of its rows, in order: (n, d), or
    multi-vectors where rows are tokens.
    """
    if not any(TOKEN in rows[i] for i in positions):
        return vectors[list(positions)]
    starts = [place for place, i in enumerate(positions) if not rows[i].get(TOKEN)]
    if starts[:1] != [0]:
        raise ValueError("a query lacks its first vector")
    tokens = MultiVectors(vectors[list(positions)], np.array([*starts, len(positions)]))
    return cast(Floats, tokens)


def _keys_in(value: Any) -> list[Key]:
    if not isinstance(value, list) or not all(isinstance(key, int | str) for key in value):
        raise ValueError("nearest items are not a list of keys")
    return value


def _click_rows(clicks: Mapping[Key, float]) -> list[Row]:
    """Return the fields of the rows that hold the clicks of a prior."""
    rows: list[Row] = []
    length = LONGEST_KEYS
    for key, count in clicks.items():
        length += len(repr(key))
        if length > LONGEST_KEYS or len(rows[-1]["keys"]) == KEYS_PER_ROW:
            rows.append({"source": "", "added_at": int(time.time()), "keys": [], "clicks": []})
            length = len(repr(key))
        rows[-1]["keys"].append(key)
        rows[-1]["clicks"].append(count)
    return rows


def _clicks_in(rows: Sequence[Row]) -> dict[Key, float]:
    """Return the clicks in such rows. Raises ValueError, TypeError, KeyError."""
    clicks: dict[Key, float] = {}
    for row in rows:
        clicks.update(zip(_keys_in(row["keys"]), row["clicks"], strict=True))
    if any(problem_of(count) for count in clicks.values()):
        raise ValueError("clicks are not numbers from 0 up")
    return {key: float(count) for key, count in clicks.items()}


class BankGenerations(ABC):
    """The methods of `protocols.Banks`, except what differs between databases.

    A row has an id, a vector and the fields `generation`, `part` ("queries", "targets", "clicks",
    or the name of a list of nearest items), `number` within the part, `source` and `added_at`. A
    query of several vectors has a row for each, with its place in `token`, so that every database can
    hold it; all else is in the first.
    Queries also have `sample`, `count` and `group`, if the bank has these, and, if the estimator
    needs them, `potentials`. Rows of nearest items have a zero vector and the keys in `nearest`;
    rows of clicks have one too, and `keys` with their `clicks`.
    """

    marker = BANK_PROPERTY
    """The property of a collection of banks; its value is "1"."""
    database: str
    """The name of the database, for messages."""
    bank_field: str
    """The vector field of bank collections."""

    _warned: set[str]
    """Problems of collections that are in the log already: a long job asks many times."""

    @staticmethod
    def parts_of(reference: BankReference) -> list[str]:
        """Return the parts whose rows `restored` takes."""
        return parts_of(reference)

    @staticmethod
    def expect_bounded(reference: BankReference, count: int) -> None:
        """Raise StateError if `count` rows of a generation are more than anybody needs to read.

        Whoever may write to a bank collection could otherwise fill the memory of its readers.
        """
        # Each list of nearest items has a row for each query and target. A user may add rows by hand,
        # which a refresh takes as they are.
        if count > MOST_TIMES * max(reference.size, FEW_ROWS):
            raise StateError(
                f"bank {reference.collection!r} holds more than {count - 1:,} rows of generation "
                f"{reference.generation[:12]}…, which has {reference.size:,}: somebody adds rows to it; "
                "drop it, and run refresh with --bank FILE"
            )

    @staticmethod
    def restored(
        reference: BankReference, database: str, vectors: Floats, rows: Sequence[Row]
    ) -> StoredBank:
        """Return the bank in the rows of the parts of a generation, in any order.

        database: its name, for messages. Raises EmptyBank, and StateError for rows of another bank.
        """
        return validated(reference, fitted_bank(reference, database, vectors, rows))

    # Methods of `protocols.Collections` and `protocols.Rows`.
    read_back: Callable[..., Any]
    exists: Callable[[str], bool]
    count: Callable[[str], int]
    upsert: Callable[..., None]
    delete: Callable[..., None]
    _expect_lease: Callable[[], None]

    def drop(self, collection: str) -> None:
        """Drop a collection of any kind, with a line in the audit log."""
        self._expect_lease()
        self._drop(collection)
        audit("dropped", collection)

    @abstractmethod
    def _drop(self, collection: str) -> None:
        """Drop a collection."""

    @abstractmethod
    def _make_bank(self, collection: str, dim: int) -> None:
        """Create an empty bank collection. Raises StoreError if the name is taken."""

    def _serve_bank(self, collection: str, metric: Metric) -> None:  # noqa: B027
        """Make an existing bank collection ready for reads and writes, if that is needed."""

    @abstractmethod
    def _describe_bank(self, collection: str) -> tuple[int, bool]:
        """Return the dimension of the collection's vectors and whether it is a bank collection."""

    def _bank_key(self, row_id: str) -> Key:
        return row_id

    @abstractmethod
    def _read_bank_rows(self, reference: BankReference, parts: Sequence[str] = ()) -> Batch:
        """Return the rows of these parts of a generation; of all parts without `parts`."""

    @abstractmethod
    def _delete_bank_rows(
        self,
        collection: str,
        generation: str,
        *,
        part: str | None = None,
        before: int | None = None,
    ) -> None:
        """Delete rows of a generation in one request: those of one part, and those that were added
        before this Unix time; without these, all.
        """

    @abstractmethod
    def _first_rows(self, collection: str) -> Iterator[Mapping[str, Any]]:
        """Yield `generation`, `part` and `added_at` of the first row of each part of each generation.

        A row that lacks one of them was not written by this package.
        """

    @abstractmethod
    def _all_properties(self) -> Iterable[tuple[str, Mapping[str, str]]]:
        """Yield the name and the properties of each collection."""

    def save_bank(
        self, collection: str, bank: StoredBank, metric: Metric, *, in_use: bool = False
    ) -> tuple[BankReference, Made]:
        expect_word("metric", metric, Metric)
        created = self._ensure_bank(collection, bank.queries.dim, metric)
        reference = reference_to(collection, bank)
        renewed_since = 0.0 if in_use else time.time() - SPARE_SECONDS / 2
        writes = 0
        try:
            # A collection that this call has created is empty.
            stored = [] if created else self._keys_unless_whole(reference, renewed_since)
            while stored is not None:
                if writes == MOST_WRITES:
                    raise StateError(
                        f"bank {collection!r} loses rows while they are written: another process "
                        "changes them; run this command again"
                    )

                writes += 1
                self._write_generation(reference, bank, stored)
                stored = self._keys_unless_whole(reference)
                if stored is not None and writes == MOST_WRITES:
                    stored = self._keys_unless_shown(reference)
        except BaseException:
            if writes:
                self.drop_bank_generations([reference])
            if created and not self.count(collection):
                self.drop(collection)
            raise

        if created:
            return reference, "collection"
        return reference, "generation" if writes else "nothing"

    def load_bank(self, reference: BankReference, *, checked: bool = True) -> StoredBank:
        try:
            batch: Batch = self.read_back(
                reference.collection,
                lambda: self._read_bank_rows(reference, parts_of(reference)),
                lambda read: any(row.get("part") == QUERIES for row in read.rows),
            )
        except CollectionNotFound:
            raise EmptyBank(
                f"the bank collection {reference.collection!r} is gone: run refresh with --bank FILE"
            ) from None
        bank = fitted_bank(reference, self.database, batch.vectors, batch.rows)
        return validated(reference, bank) if checked else bank

    def save_nearest(
        self, reference: BankReference, owner: Sequence[str], nearest: Sequence[Sequence[Key]]
    ) -> BankReference:
        # Searches read the present list until a collection state names the new one. A job that was held
        # up writes under another name than the one that took over, unless the lists are the same.
        lists_of_owner = f"nearest_{_digest_of(owner)}_"
        part = lists_of_owner + _digest_of([list(keys) for keys in nearest])
        dim, _ = self._describe_bank(reference.collection)
        rows = [
            {"source": "", "added_at": int(time.time()), "nearest": list(keys)} for keys in nearest
        ]
        self._write_part(reference, part, np.zeros((len(rows), dim), np.float32), rows)
        self._drop_lists(reference, lists_of_owner, {part, reference.nearest})
        return reference.model_copy(update={"nearest": part})

    def _drop_lists(self, reference: BankReference, lists_of_owner: str, kept: set[str]) -> None:
        """Delete lists of nearest items that no client reads any more: those of this owner that are an
        hour old, but for these.
        """
        before = int(time.time() - SPARE_LIST_SECONDS)
        first_rows = islice(self._first_rows(reference.collection), MOST_FIRST_ROWS)
        old = {
            str(row.get("part"))
            for row in first_rows
            if row.get("generation") == reference.generation and _added_at(row) < before
        }
        for part in sorted(old - kept):
            if part.startswith(lists_of_owner):
                self._delete_bank_rows(
                    reference.collection, reference.generation, part=part, before=before
                )

    def drop_bank_generations(self, references: Sequence[BankReference]) -> None:
        named = {bank.collection for bank in references}
        collections = {collection for collection in named if self.exists(collection)}
        for collection in collections:
            self._expect_bank(collection)

        existing = [bank for bank in references if bank.collection in collections]
        spare = self._unused(existing)
        rows_of_spare = [self._read_bank_rows(bank) for bank in spare]
        for bank in spare:
            self._delete_bank_rows(bank.collection, bank.generation)

        # A job may have named a generation in a collection state between the check and the
        # deletion. A job that does so later finds that the rows are gone.
        unused = self._unused(spare)
        for bank, rows in zip(spare, rows_of_spare, strict=True):
            if bank not in unused:
                self._write_rows(bank.collection, rows)

    def drop_spare_generations(
        self,
        collection: str,
        used_by_jobs: Callable[[], set[tuple[str, str]] | None],
        older_than: float = SPARE_SECONDS,
    ) -> None:
        if not self.exists(collection):
            return
        added_at: dict[str, int] = {}
        for row in islice(self._first_rows(collection), MOST_FIRST_ROWS):
            generation = row.get("generation")
            if isinstance(generation, str):
                added_at[generation] = max(_added_at(row), added_at.get(generation, 0))

        before = int(time.time() - older_than)
        old = [generation for generation, seconds in added_at.items() if seconds < before]
        if not old:
            return

        by_jobs = used_by_jobs()
        by_states = self._used_generations()
        if by_jobs is None or by_states is None:
            return
        for generation in old:
            if (collection, generation) not in by_jobs | by_states:
                self._delete_bank_rows(collection, generation, before=before)

    def _ensure_bank(self, collection: str, dim: int, metric: Metric) -> bool:
        """Create the bank collection if it does not exist, and return whether it was created."""
        created = not self.exists(collection)
        if created:
            try:
                self._make_bank(collection, dim)
            except StoreError:
                # Another process may have created it meanwhile.
                if not self.exists(collection):
                    raise

                created = False

        if not created:
            self._expect_bank(collection, dim)
        self._serve_bank(collection, metric)
        return created

    def _expect_bank(self, collection: str, dim: int | None = None) -> None:
        """Raise CollectionExists if the collection is no bank, DimensionMismatch if its vectors
        have another width.
        """
        width, is_bank = self._describe_bank(collection)
        if not is_bank:
            raise CollectionExists(
                f"collection {collection!r} exists and is not a query bank: choose another name "
                "with --bank-name"
            )

        if dim is not None and width != dim:
            raise DimensionMismatch(
                f"bank {collection!r} has {width} dimensions, the queries have {dim}"
            )

    def _keys_unless_whole(
        self, reference: BankReference, renewed_since: float = 0.0
    ) -> list[Key] | None:
        """Return the keys of the stored queries, targets and clicks; None if they are all that the
        reference names, and none was added before this Unix time.
        """
        stored = self._read_bank_rows(reference, OWN_PARTS)
        try:
            bank = fitted_bank(reference, self.database, stored.vectors, stored.rows)
        except EmptyBank:
            return stored.keys
        is_whole = holds(reference, bank) and all(
            _added_at(row) >= renewed_since for row in stored.rows
        )
        return None if is_whole else stored.keys

    def _keys_unless_shown(self, reference: BankReference) -> list[Key] | None:
        """Return what `_keys_unless_whole` returns of rows that were written, and which the
        database may hide.
        """
        stored: list[Key] | None = self.read_back(
            reference.collection,
            lambda: self._keys_unless_whole(reference),
            lambda keys: keys is None or len(keys) >= reference.count,
        )
        return stored

    def _unused(self, references: list[BankReference]) -> list[BankReference]:
        """Return the references to generations that surely no collection state names."""
        # To look for uses describes each collection.
        used = self._used_generations() if references else None
        return [] if used is None else [bank for bank in references if bank.rows not in used]

    def _used_generations(self) -> set[tuple[str, str]] | None:
        """Return the collection and the name of each generation that a collection state names; None if
        a state cannot be read, which may name any. It describes each collection.
        """
        used: set[tuple[str, str]] = set()
        is_certain = True
        for name, properties in self._all_properties():
            try:
                used.update(
                    bank.rows
                    for state in read_states(properties, name).values()
                    for bank in state.banks
                )
            except StateError as error:
                is_certain = False
                if str(error) not in self._warned:
                    self._warned.add(str(error))
                    log.warning(
                        "no bank generation is dropped, as a collection may use any of them: %s",
                        error,
                    )
        return used if is_certain else None

    def _write_generation(
        self, reference: BankReference, bank: StoredBank, stored: Sequence[Key]
    ) -> None:
        """Write the queries, targets and clicks, and delete the other `stored` rows."""
        queries = bank.queries
        rows = _bank_rows(queries, bank.potentials.tolist())
        current = set(self._write_part(reference, QUERIES, rows_of_bank(queries), rows))

        targets = bank.targets
        if targets is not None:
            rows = _bank_rows(targets, [[]] * len(targets))
            current.update(self._write_part(reference, TARGETS, rows_of_bank(targets), rows))

        rows = _click_rows(bank.clicks)
        no_vectors = np.zeros((len(rows), queries.dim), np.float32)
        current.update(self._write_part(reference, CLICKS, no_vectors, rows))

        if excess := [key for key in stored if key not in current]:
            self.delete(reference.collection, excess)

    def _write_part(
        self, reference: BankReference, part: str, vectors: Floats, fields: Sequence[Row]
    ) -> list[Key]:
        rows = [{**row, "number": number} for number, row in enumerate(fields)]
        if is_multi(vectors):
            rows = _rows_of_tokens(rows, vectors)
            vectors = vectors.tokens

        for row in rows:
            place = f"{row['number']:010}"
            if row.get(TOKEN):
                place += f"/{row[TOKEN]:06}"
            row["id"] = f"{reference.generation}/{part}/{place}"
            row["generation"] = reference.generation
            row["part"] = part
        keys = [self._bank_key(row["id"]) for row in rows]
        self._write_rows(reference.collection, Batch(keys, vectors, rows))
        return keys

    def _write_rows(self, collection: str, batch: Batch) -> None:
        for start in range(0, len(batch), ROWS_PER_WRITE):
            page = batch.take(range(start, min(start + ROWS_PER_WRITE, len(batch))))
            self.upsert(collection, page, self.bank_field)
