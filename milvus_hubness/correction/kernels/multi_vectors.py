"""Rows of several vectors each, as one ragged array."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias, TypeGuard, TypeVar, overload

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.kernels.checks import is_tensor
from milvus_hubness.errors import DimensionMismatch, InvalidInput, NonFiniteVectors, name_some

Tokens: TypeAlias = npt.NDArray[np.float32]
Offsets: TypeAlias = npt.NDArray[np.int64]
Which: TypeAlias = "slice | Sequence[int] | npt.NDArray[Any]"

MULTI_VECTOR_ARRAYS = ("tokens", "offsets")
"""The arrays of a file of multi-vectors: (total, d), and (n + 1,) where each row begins."""

SQUARE_OF_UNIT = 1e-6
"""How far the squared length of a token of length 1 may be from 1."""

Rows = TypeVar("Rows", bound="MultiVectors")


@dataclass(frozen=True, eq=False)
class MultiVectors:
    """Documents or queries of several vectors each, their tokens.

    Row i has tokens[offsets[i]:offsets[i + 1]], at least one: a row without tokens has no score, and
    is refused. A token of zeros is allowed, and has the product 0 with every other. Raises
    InvalidInput, DimensionMismatch and NonFiniteVectors, which name the rows.
    """

    tokens: Tokens
    """(total, d) float32, finite."""

    offsets: Offsets
    """(n + 1,) int64, rising from 0 to total."""

    what: str = field(default="the multi-vectors", repr=False, kw_only=True)
    """The name of the rows in error messages."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _as_tokens(self.tokens, self.what))
        object.__setattr__(self, "offsets", self._valid_offsets())

        broken = np.flatnonzero(~np.isfinite(self.tokens).all(1))
        if len(broken):
            rows = np.unique(self.row_of_token[broken]).tolist()
            raise NonFiniteVectors(
                f"{self.what} has NaN, infinity or a number beyond float32 in tokens: correct or "
                f"remove row {name_some(rows)}"
            )

    @classmethod
    def from_list(cls, rows: Iterable[Any], *, what: str = "the multi-vectors") -> MultiVectors:
        """Return the rows of arrays, tensors or lists (t_i, d), t_i ≥ 1.

        Raises InvalidInput for no rows and for rows without tokens, see `usable`, DimensionMismatch
        for tokens of several dimensions, and NonFiniteVectors.
        """
        arrays = []
        for number, row in enumerate(rows):
            # An empty list is an array without a dimension, but no other mistake.
            is_empty = hasattr(row, "__len__") and len(row) == 0
            arrays.append(None if is_empty else _as_tokens(row, f"row {number} of {what}"))
        if not arrays:
            raise InvalidInput(f"{what} has no row; at least 1 is needed")

        with_tokens = [array for array in arrays if array is not None]
        if len(with_tokens) < len(arrays):
            raise _without_tokens(what, [i for i, array in enumerate(arrays) if array is None])
        _expect_one_dimension(with_tokens, what)

        lengths = [len(array) for array in with_tokens]
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        return cls(np.concatenate(with_tokens), offsets, what=what)

    @classmethod
    def of(cls, rows: Any, *, what: str = "the multi-vectors") -> MultiVectors:
        """Return multi-vectors themselves, or those of an array (n, t, d) or a list of (t_i, d)."""
        return rows if isinstance(rows, MultiVectors) else cls.from_list(rows, what=what)

    @classmethod
    def _trusted(cls: type[Rows], tokens: Tokens, offsets: Offsets, what: str) -> Rows:
        """Return rows whose tokens and offsets are valid, without another check of them."""
        rows = object.__new__(cls)
        object.__setattr__(rows, "tokens", tokens)
        object.__setattr__(rows, "offsets", offsets)
        object.__setattr__(rows, "what", what)
        return rows

    @classmethod
    def stored(
        cls, rows: Sequence[Any], dim: int, *, what: str = "the multi-vectors"
    ) -> MultiVectors:
        """Return rows as a database returns them: arrays or lists (t_i, dim), or None for a row
        without a vector, which becomes one token of NaN.

        Unlike `from_list`, it takes NaN, and no rows at all. Raises InvalidInput and
        DimensionMismatch.
        """
        arrays = [_missing(dim)] * len(rows)
        for number, row in enumerate(rows):
            if row is not None and len(row):
                arrays[number] = _as_tokens(row, f"row {number} of {what}")
        _expect_one_dimension([_missing(dim), *arrays], what)
        lengths = [len(array) for array in arrays]
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        tokens = np.concatenate([np.empty((0, dim), np.float32), *arrays])
        return cls._trusted(tokens, offsets, what)

    @classmethod
    def joined(cls, parts: Sequence[MultiVectors], dim: int) -> MultiVectors:
        """Return the rows of all parts, one after the other.

        dim: the dimension of tokens, for no parts. Raises DimensionMismatch.
        """
        if not parts:
            return cls.stored([], dim)
        first = parts[0]
        for part in parts[1:]:
            first.expect_dim(part.dim, part.what)
        lengths = np.concatenate([part.lengths for part in parts])
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        tokens = np.concatenate([part.tokens for part in parts])
        return cls._trusted(tokens, offsets, first.what)

    def with_tokens(self: Rows, tokens: Tokens) -> Rows:
        """Return rows of the same lengths with other tokens (total, d′) float32, which may be NaN."""
        return self._trusted(tokens, self.offsets, self.what)

    def of_tokens(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return numbers of rows (n, …) for each of their tokens, (total, …)."""
        return np.repeat(numbers, self.lengths, axis=0)

    @property
    def first_tokens(self) -> Tokens:
        """(n, d): the first token of each row."""
        return self.tokens[self.offsets[:-1]]

    def all_of_row(self, flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return whether flags of tokens (total,) are true for all tokens of a row, (n,)."""
        if not len(self):
            return np.zeros(0, np.bool_)
        return np.asarray(np.logical_and.reduceat(flags, self.offsets[:-1]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rows to an .npz file, from which `QueryBank.load` and --bank read them."""
        name = os.fspath(path)
        if not name.endswith(".npz"):
            raise InvalidInput(f"{name!r} is no name of an .npz file: let it end in .npz")
        np.savez(name, tokens=self.tokens, offsets=self.offsets)

    def tolist(self) -> list[list[list[float]]]:
        """Return the tokens of each row as lists of numbers."""
        return [tokens.tolist() for tokens in self]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Tokens:
        # NumPy would read rows of equal length as three dimensions, and all others row by row.
        raise TypeError(f"{self.what} are several vectors a row, which is no array: take .tokens")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and the dimension of a token, (n, d)."""
        return len(self), self.dim

    @property
    def dim(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def lengths(self) -> Offsets:
        """(n,): how many tokens each row has."""
        return np.diff(self.offsets)

    @property
    def row_of_token(self) -> Offsets:
        """(total,): the number of each token's row."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @property
    def nbytes(self) -> int:
        return int(self.tokens.nbytes + self.offsets.nbytes)

    @overload
    def __getitem__(self, which: int | np.integer[Any]) -> Tokens: ...
    @overload
    def __getitem__(self: Rows, which: Which) -> Rows: ...
    def __getitem__(self: Rows, which: Any) -> Tokens | Rows:
        """Return the tokens (t, d) of one row, or the rows of a slice, a mask (n,) or numbers."""
        if isinstance(which, int | np.integer):
            number = range(len(self))[int(which)]
            return self.tokens[self.offsets[number] : self.offsets[number + 1]]

        if isinstance(which, slice) and which.step in (None, 1):
            start, stop, _ = which.indices(len(self))
            offsets = self.offsets[start : max(start, stop) + 1]
            tokens = self.tokens[offsets[0] : offsets[-1]]
            return self._trusted(tokens, offsets - offsets[0], self.what)

        numbers = np.arange(len(self))[which]
        lengths = self.lengths[numbers]
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        moved = np.repeat(self.offsets[numbers] - offsets[:-1], lengths)
        token_numbers = np.arange(offsets[-1]) + moved
        return self._trusted(self.tokens[token_numbers], offsets, self.what)

    def __iter__(self) -> Iterator[Tokens]:
        """Yield the tokens (t, d) of each row."""
        for start, end in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True):
            yield self.tokens[start:end]

    def normalised(self: Rows) -> Rows:
        """Return the rows with tokens of length 1, for cosine; a token of zeros stays one."""
        # In float64: the squares of a long float32 vector overflow.
        lengths = np.sqrt(np.einsum("td,td->t", self.tokens, self.tokens, dtype=np.float64))
        scale = np.divide(1, lengths, out=np.zeros_like(lengths), where=lengths > 0)
        tokens = (self.tokens * scale[:, None]).astype(np.float32)
        return self._trusted(tokens, self.offsets, self.what)

    @cached_property
    def is_normalised(self) -> bool:
        """Whether all tokens have length 1 up to rounding, or are zeros."""
        squares = np.einsum("td,td->t", self.tokens, self.tokens, dtype=np.float64)
        return bool(((np.abs(squares - 1) <= SQUARE_OF_UNIT) | (squares == 0)).all())

    def means(self) -> Tokens:
        """Return the mean of each row's tokens, float32 (n, d): one vector in place of many."""
        sums = np.add.reduceat(self.tokens, self.offsets[:-1], axis=0, dtype=np.float64)
        return np.asarray(sums / self.lengths[:, None], np.float32)

    def expect_dim(self, dim: int, what: str) -> None:
        """Raise DimensionMismatch if `what`, with tokens of width `dim`, does not fit."""
        if dim != self.dim:
            raise DimensionMismatch(
                f"{what} has tokens of dimension {dim} and {self.what} of {self.dim}: "
                "embed both with one model"
            )

    def _valid_offsets(self) -> Offsets:
        offsets = np.asarray(self.offsets)
        total = len(self.tokens)
        is_valid = (
            offsets.dtype.kind in "iu"
            and offsets.ndim == 1
            and len(offsets) > 0
            and offsets[0] == 0
            and offsets[-1] == total
            and bool((np.diff(offsets.astype(np.int64)) >= 0).all())
        )
        if not is_valid:
            raise InvalidInput(
                f"the offsets of {self.what} must be whole numbers that rise from 0 to {total}, "
                f"the number of tokens, not {offsets.dtype} of shape {offsets.shape}"
            )
        offsets = np.ascontiguousarray(offsets, np.int64)
        missing = np.flatnonzero(np.diff(offsets) == 0).tolist()
        if missing:
            raise _without_tokens(self.what, missing)
        return offsets


def is_multi(rows: object) -> TypeGuard[MultiVectors]:
    """Return whether rows have several vectors each."""
    return isinstance(rows, MultiVectors)


def stacked(parts: Iterable[Any], dim: int, *, are_multi: bool) -> Any:
    """Return the rows of all parts in one: float32 (n, dim), or multi-vectors.

    Arrays are read one after the other, so that their rows are in memory once.
    """
    if are_multi:
        return MultiVectors.joined(list(parts), dim)
    return np.fromiter(chain.from_iterable(parts), np.dtype((np.float32, dim)))


def joined(parts: Sequence[Any]) -> Any:
    """Return the rows of one or more arrays (n, d), or of one or more multi-vectors, in one."""
    if is_multi(parts[0]):
        return MultiVectors.joined(parts, parts[0].dim)
    return np.concatenate(parts)


def usable(rows: Iterable[Any]) -> npt.NDArray[np.bool_]:
    """Return which rows, arrays or lists (t_i, d) or None, have tokens, all of them finite, (n,).

    Rows of a database may lack them: these have no score, and get no bias.
    """
    return np.array([_is_usable(row) for row in rows], np.bool_)


def _is_usable(row: Any) -> bool:
    if row is None:
        return False
    if is_tensor(row):
        row = row.detach().cpu().float().numpy()
    try:
        with np.errstate(over="ignore"):
            tokens = np.asarray(row, np.float32)
    # Tokens of unequal length, or no numbers.
    except (TypeError, ValueError):
        return False
    return tokens.ndim == 2 and tokens.size > 0 and bool(np.isfinite(tokens).all())


def _as_tokens(tokens: Any, what: str) -> Tokens:
    """Return tokens as C-contiguous float32 (t, d). Raises InvalidInput."""
    if is_tensor(tokens):
        tokens = tokens.detach().cpu().float().numpy()
    try:
        array = np.asarray(tokens)
    # Tokens of unequal length.
    except ValueError:
        array = np.empty(0, object)
    if array.dtype.kind not in "fiu":
        raise InvalidInput(f"{what} must hold tokens of real numbers, all of one dimension")
    if array.ndim != 2 or array.shape[1] == 0:
        raise InvalidInput(
            f"{what} must be an array (tokens, dimension), but has shape {array.shape}: for a list of "
            "rows there is MultiVectors.from_list"
        )
    # A float64 beyond float32 becomes infinity, and is then refused with its row.
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array, np.float32)


def _missing(dim: int) -> Tokens:
    """Return what stands for a row without a vector: one token of NaN."""
    return np.full((1, dim), np.nan, np.float32)


def _expect_one_dimension(arrays: Sequence[Tokens], what: str) -> None:
    first = arrays[0].shape[1]
    others = [number for number, array in enumerate(arrays) if array.shape[1] != first]
    if others:
        raise DimensionMismatch(
            f"{what} has tokens of {first} numbers in row 0 and of {arrays[others[0]].shape[1]} in "
            f"row {name_some(others)}: embed all rows with one model"
        )


def _without_tokens(what: str, rows: Sequence[int]) -> InvalidInput:
    return InvalidInput(f"{what} has rows without a token: remove row {name_some(rows)}")
