"""Query banks: the reference queries that biases are estimated from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.files.columns import ONLY, Columns, expect_one_width, open_columns
from milvus_hubness.basics.files.names import (
    COUNT_NAMES,
    KEY_NAMES,
    QUERY_NAMES,
    named_so,
    vectors_named,
)
from milvus_hubness.correction.codec.arrays import without_tensors
from milvus_hubness.correction.kernels.checks import is_tensor
from milvus_hubness.correction.kernels.multi_vectors import MULTI_VECTOR_ARRAYS, MultiVectors
from milvus_hubness.correction.kernels.rows import numbers_of, row_keys
from milvus_hubness.correction.kernels.token_rows import TokenRows, is_token_rows
from milvus_hubness.errors import (
    BankTooSmall,
    DimensionMismatch,
    EmptyBank,
    InvalidInput,
    NonFiniteVectors,
    name_some,
)

Vectors: TypeAlias = npt.NDArray[np.float32]
if TYPE_CHECKING:
    import torch

    BankLike: TypeAlias = "QueryBank | npt.ArrayLike | torch.Tensor | os.PathLike[str]"
else:
    # Pydantic models with a field of this type evaluate it.
    BankLike = Any
"""Type of the banks that `QueryBank.of` and every public function with a bank accept."""


@dataclass(frozen=True, eq=False)
class QueryBank:
    """Reference queries, one vector per row.

    The bank has its own copy of them.

    Raises EmptyBank and, as `as_vectors`, NonFiniteVectors, DimensionMismatch and InvalidInput.
    """

    vectors: Vectors = field(repr=False)
    """(n, d) numbers, n and d at least 1; stored as float32, C-contiguous and read-only. All-zero
    rows are allowed."""
    source: str = "array"
    """Where they came from, for people."""
    counts: npt.NDArray[Any] | None = field(default=None, repr=False)
    """(n,): how often users sent each query, above 0; stored as float64. None: once each."""
    groups: npt.NDArray[Any] | None = field(default=None, repr=False)
    """(n,): the number of each query's group of near copies, 0 … g − 1, which share the weight of
    one query. None: nobody has looked for near copies, and each query has the weight 1."""
    stands_for: int | None = field(default=None, repr=False)
    """The number of queries whose means these are, of a condensed bank."""

    def __post_init__(self) -> None:
        rows: Any = self.vectors
        # A single number has no length, and is no array without rows either.
        if isinstance(rows, np.ndarray) and not rows.ndim:
            raise InvalidInput(
                f"the bank from {self.source} must be 2-D, one vector a row, but is one number"
            )
        has_length = isinstance(rows, Sequence | np.ndarray | MultiVectors) or is_tensor(rows)
        if has_length and len(rows) == 0:
            raise EmptyBank(f"the bank from {self.source} has no query; at least 1 is needed")

        # `as_vectors` may return the caller's own array, which must stay writable.
        vectors: Any = as_vectors(rows, f"the bank from {self.source}")
        if is_token_rows(vectors):
            vectors = vectors.as_queries()
        else:
            vectors = np.array(vectors)
            vectors.flags.writeable = False
        # The only way to set a field of a frozen dataclass.
        object.__setattr__(self, "vectors", vectors)

        if self.counts is not None:
            object.__setattr__(self, "counts", self._valid_counts(self.counts))
        if self.groups is not None:
            object.__setattr__(self, "groups", self._valid_groups(self.groups))

    @classmethod
    def of(cls, bank: BankLike) -> QueryBank:
        """Return the bank itself, or a bank of a file, an array, a tensor, a list of lists, or a
        column of lists, as pandas, Polars and pyarrow have it.

        A path is read as `load` does. Raises as `load` and `QueryBank` do.
        """
        if isinstance(bank, QueryBank):
            return bank
        if isinstance(bank, str | os.PathLike):
            return cls.load(bank)
        return cls(as_vectors(bank, "the bank"))

    @classmethod
    def load(cls, path: str | os.PathLike[str], column: str | None = None) -> QueryBank:
        """Load a bank from a .npy, .npz, .parquet, .arrow, .feather, .ipc, .csv or .jsonl file.

        column: the array of an .npz file or the column of vectors of any other one; needed if it has
        several, none of which has a usual name such as `query` or `embedding`. A column `count` has
        the counts of the queries. CSV and JSON lines may be compressed, as .csv.gz and .jsonl.gz.
        Queries of several vectors are an .npz file as `MultiVectors.save` writes it.
        Raises UnreadableFile, InvalidInput for a missing column, MissingExtra, and the errors of
        `QueryBank`.
        """
        with open_columns(path, "a bank") as columns:
            if column is None and set(MULTI_VECTOR_ARRAYS) <= set(columns.names):
                return cls(
                    _multi_vectors_in(columns), str(path), counts=_counts_in(columns, "tokens")
                )
            name = vectors_in(columns, QUERY_NAMES, column)
            counts = _counts_in(columns, name)
            return cls(columns.vectors(name), str(path), counts=counts)

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def dim(self) -> int:
        return int(self.vectors.shape[1])

    def take(self, which: npt.NDArray[Any]) -> QueryBank:
        """Return the bank of some queries, by their numbers or by a mask (n,).

        What is left of a group keeps the weight of one query.
        """
        groups = None
        if self.groups is not None:
            _, groups = np.unique(self.groups[which], return_inverse=True)
        return QueryBank(
            self.vectors[which],
            self.source,
            None if self.counts is None else self.counts[which],
            groups,
        )

    def without(self, queries: Vectors) -> QueryBank | None:
        """Return the bank before these queries (m, d) were last sent; None if that leaves nothing.

        Each takes away one that is equal to it, or 1 from its count: what users sent before stays.
        However often one is among them, it was last sent once.
        """
        rows_of: dict[bytes, list[int]] = {}
        for row, key in enumerate(row_keys(self.vectors)):
            rows_of.setdefault(key, []).append(row)

        counts = np.ones(len(self)) if self.counts is None else self.counts
        remaining = counts.copy()
        for query in set(row_keys(queries)):
            # Of equal rows, the first gives what it has, then the next.
            missing = 1.0
            for row in rows_of.get(query, ()):
                taken = min(missing, remaining[row])
                remaining[row] -= taken
                missing -= taken

        if np.array_equal(remaining, counts):
            return self
        stays = remaining > 0
        if not stays.any():
            return None
        bank = self.take(stays)
        return bank if self.counts is None else replace(bank, counts=remaining[stays])

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """(n,): the share of one query that each has: near copies divide it among themselves."""
        if self.groups is None:
            return np.ones(len(self))
        weights: npt.NDArray[np.float64] = 1 / np.bincount(self.groups)[self.groups]
        return weights

    @cached_property
    def condensed(self) -> QueryBank:
        """The bank of one query for each group, the mean of its queries; the bank itself without
        groups.

        An estimator that is fitted on it gives all near copies together the weight of one query: the
        mean score of a group is the score of its mean. A count is that of the whole group.
        """
        if self.groups is None:
            return self
        order = np.argsort(self.groups, kind="stable")
        sizes = np.bincount(self.groups)
        starts = np.cumsum(sizes) - sizes

        # The score of several vectors is no inner product, of which a mean would have the mean: the
        # first query of a group stands for it.
        if is_token_rows(self.vectors):
            return QueryBank(
                self.of_groups(cast(Any, self.vectors)),
                self.source,
                counts=sizes if self.counts is None else np.bincount(self.groups, self.counts),
                stands_for=len(self),
            )

        # In float64: a popular query may have been repeated a million times.
        sums = np.add.reduceat(self.vectors[order], starts, axis=0, dtype=np.float64)
        counts = sizes if self.counts is None else np.bincount(self.groups, self.counts)
        means = np.asarray(sums / sizes[:, None], np.float32)
        return QueryBank(means, self.source, counts=counts, stands_for=len(self))

    def of_groups(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the rows (g, …) of the groups from those of the queries, (n, …)."""
        if self.groups is None:
            return rows
        _, first = np.unique(self.groups, return_index=True)
        return rows[first]

    def of_queries(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return rows (n, …), one for each query, from those of the groups, (g, …)."""
        return rows if self.groups is None else rows[self.groups]

    def _valid_counts(self, counts: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the counts of the queries. Raises InvalidInput."""
        values = np.asarray(counts)
        if values.dtype.kind not in "fiu" or values.shape != (len(self),):
            raise InvalidInput(
                f"the counts of the bank from {self.source} must be {len(self)} numbers, one for "
                f"each query, not {values.dtype} of shape {values.shape}"
            )
        wrong = np.flatnonzero(~(np.isfinite(values) & (values > 0))).tolist()
        if wrong:
            raise InvalidInput(
                f"the counts of the bank from {self.source} must be above 0, which they are not in "
                f"row {name_some(wrong)}: remove these queries"
            )
        return values.astype(np.float64)

    def _valid_groups(self, groups: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the groups of the queries. Raises InvalidInput."""
        numbers = np.asarray(groups)
        if numbers.dtype.kind not in "iu" or numbers.shape != (len(self),):
            raise InvalidInput(
                f"{len(self)} queries have groups {numbers.dtype} of shape {numbers.shape}"
            )
        if not are_numbered(numbers):
            raise InvalidInput("the numbers of groups must be 0, 1, 2, … without a gap")
        return numbers.astype(np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """Digest "sha256:…" of the shape and the values.

        It is equal for equal banks on every machine.
        """
        # Without the shape, a bank of 2 × 3 numbers would equal one of 3 × 2. Bytes are those of a
        # little-endian machine.
        digest = hashlib.sha256(f"{len(self)}x{self.dim}:".encode())
        for numbers in numbers_of(self.vectors):
            digest.update(numbers)
        return f"sha256:{digest.hexdigest()}"

    def nearest_of(self, k: int) -> int:
        """Return how many of the nearest queries count where an estimator takes k: all of a condensed
        bank with fewer. Raises BankTooSmall for a bank that never had so many.
        """
        self.require(k)
        return min(k, len(self))

    def require(self, at_least: int) -> None:
        count = self.stands_for or len(self)
        if count < at_least:
            noun = "query" if count == 1 else "queries"
            raise BankTooSmall(
                f"the bank from {self.source} has {count} {noun}; at least {at_least} are needed"
            )

    def expect_dim(self, dim: int, what: str) -> None:
        """Raise DimensionMismatch if `what`, of width `dim`, does not fit the bank."""
        if dim != self.dim:
            raise DimensionMismatch(
                f"{what} has dimension {dim}; the bank from {self.source} has {self.dim}: "
                "embed both with one model"
            )

    def expect_rows(self, are_multi: bool, what: str) -> None:
        """Raise InvalidInput if rows of `what` have several vectors and queries one, or the other way
        round.
        """
        if are_multi == is_token_rows(self.vectors):
            return
        if are_multi:
            raise InvalidInput(
                f"{what} has several vectors a row, and the bank from {self.source} one a query: embed "
                "queries as the model does for late interaction, as MultiVectors (in a file: by its save)"
            )
        raise InvalidInput(
            f"{what} has one vector a row, and the bank from {self.source} several a query: pass one "
            "vector a query"
        )


def optional_bank(bank: BankLike | None) -> QueryBank | None:
    """Return `QueryBank.of(bank)`, or None for None."""
    return None if bank is None else QueryBank.of(bank)


def are_numbered(groups: npt.NDArray[Any]) -> bool:
    """Whether whole numbers (n,) are 0, 1, 2, … in any order, without a gap."""
    # First whether they are small, as counting takes memory up to the largest one.
    is_small = groups.min() >= 0 and groups.max() < len(groups)
    return bool(is_small and np.bincount(groups).all())


def not_among(rows: Vectors, *others: Vectors) -> npt.NDArray[np.bool_]:
    """Return which rows (n, d) float32 are equal to no row of the others, (n,)."""
    among = {key for matrix in others for key in row_keys(matrix)}
    return np.array([key not in among for key in row_keys(rows)], np.bool_)


def as_vectors(rows: npt.ArrayLike | torch.Tensor, what: str) -> Vectors:
    """Return `rows` as a C-contiguous float32 array (n, d), d ≥ 1, with finite numbers only.

    what: the name of the rows in error messages. Raises InvalidInput (not 2-D, no columns, not
    numbers), DimensionMismatch (rows of unequal length) and NonFiniteVectors, each naming the rows.
    """
    if isinstance(rows, MultiVectors):
        return cast(Vectors, TokenRows.documents(rows))
    if is_token_rows(rows):
        return cast(Vectors, rows)
    if is_tensor(rows):
        if rows.is_complex():
            raise InvalidInput(f"{what} must hold real numbers, not {rows.dtype}")
        rows = rows.detach().cpu().float().numpy()
    elif isinstance(rows, str | os.PathLike):
        raise InvalidInput(
            f"{what} must hold real numbers, not a path: pass QueryBank.load({str(rows)!r})"
        )
    elif isinstance(rows, Sequence):
        # NumPy's own message for rows of unequal length names no row.
        expect_one_width([len(row) if hasattr(row, "__len__") else 1 for row in rows], what)
        rows = without_tensors(rows)

    array = np.asarray(rows)
    if array.ndim == 1 and array.dtype == object:
        array = _stacked(array, what)
    # NumPy makes an empty list an array of floats, and an empty array may be of any type.
    if array.dtype.kind not in "fiu" and array.size:
        raise InvalidInput(f"{what} must hold real numbers, not {array.dtype}")
    if array.ndim != 2:
        raise InvalidInput(f"{what} must be 2-D, one vector a row, but has shape {array.shape}")
    if array.shape[1] == 0:
        raise InvalidInput(f"{what} has vectors without a single number")

    # A float64 beyond float32 becomes infinity, and is then refused with its row.
    with np.errstate(over="ignore"):
        vectors = np.ascontiguousarray(array, np.float32)
    broken = np.flatnonzero(~np.isfinite(vectors).all(1)).tolist()
    if broken:
        raise NonFiniteVectors(
            f"{what} has NaN, infinity or a number beyond float32: remove row {name_some(broken)}"
        )
    return vectors


def _multi_vectors_in(columns: Columns) -> Vectors:
    """Return the rows in an archive of tokens and offsets. Raises as `MultiVectors` does."""
    tokens, offsets = MULTI_VECTOR_ARRAYS
    what = f"the bank from {columns.source}"
    rows: Any = MultiVectors(columns.vectors(tokens), np.array(columns.values(offsets)), what=what)
    return cast(Vectors, rows)


def _counts_in(columns: Columns, of_vectors: str) -> npt.NDArray[Any] | None:
    """Return the counts of the queries of a file; None without any. Raises InvalidInput."""
    names = [name for name in named_so(columns.names, COUNT_NAMES) if name != of_vectors]
    if not names:
        return None
    counts = columns.numbers(names[0])
    empty = [row for row, count in enumerate(counts) if count is None]
    if empty:
        raise InvalidInput(f"{columns.source}: {names[0]!r} is null in row {name_some(empty)}")
    return np.asarray(counts)


def _stacked(column: npt.NDArray[Any], what: str) -> npt.NDArray[Any]:
    """Return a column of rows (n,), as a table has it, as an array (n, d).

    Raises InvalidInput and DimensionMismatch, which name the row.
    """
    rows = column.tolist()
    empty = [number for number, row in enumerate(rows) if not hasattr(row, "__len__")]
    if empty:
        value = rows[empty[0]]
        raise InvalidInput(f"{what} has {value!r} in place of a vector: see row {name_some(empty)}")
    expect_one_width([len(row) for row in rows], what)
    # A row may be an array of objects itself.
    try:
        return np.array([np.asarray(row, np.float64) for row in rows])
    except (TypeError, ValueError, OverflowError):
        raise InvalidInput(f"{what} must hold real numbers, but has other values") from None


def vectors_in(columns: Columns, usual: Sequence[str], column: str | None = None) -> str:
    """Return the column of vectors of a file: the one that is named, the only one, or else the one
    with a usual name.

    Raises InvalidInput.
    """
    if columns.names == [ONLY]:
        if column is not None:
            columns.values(column)
        return ONLY

    names = columns.vector_names
    if column in names:
        return str(column)
    # Keys of several right rows for each query look like vectors too.
    keys = named_so(names, KEY_NAMES)
    candidates = [name for name in names if name not in keys] or names
    if column is None:
        by_name = vectors_named(candidates, usual, candidates.__contains__)
        if by_name is not None:
            return by_name
        if len(candidates) == 1:
            return candidates[0]

    noun = columns.vector_noun
    if not candidates:
        # An array that is no list of vectors is the fault to name.
        if len(columns.names) == 1 and column is None and noun == columns.noun:
            return columns.names[0]
        problem = columns.why_no_vectors()
        if column is not None:
            problem = f"has no {noun} {column!r}: add one"
        raise InvalidInput(f"{columns.source} {problem}")

    # The option is of --bank alone: files of other options have the usual names.
    listed = name_some(list(map(repr, candidates)))
    if column is not None:
        raise InvalidInput(
            f"{columns.source} has no {noun} {column!r}, only {listed}: add it, or, of a bank, choose "
            "one of these with --bank-column"
        )
    raise InvalidInput(
        f"{columns.source} has several {noun}s: choose one of {listed}, of a bank with --bank-column, "
        f"or name it {usual[0]!r}"
    )
