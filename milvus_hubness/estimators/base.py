"""What every estimator is, and what comes out when one is fitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks import BankLike, QueryBank, Vectors, as_vectors
from milvus_hubness.estimators.nearest import Bounded, Nearest, Needs
from milvus_hubness.estimators.temperature import at_its_tau


@runtime_checkable
class Estimator(Protocol):
    """One number per item, to be subtracted from its scores; a frozen dataclass of its parameters.

    needs_gallery, needs_target_bank: whether `fit` raises InvalidInput without one.
    """

    @property
    def needs_gallery(self) -> bool: ...
    @property
    def needs_target_bank(self) -> bool: ...

    def fit(
        self,
        bank: BankLike,
        *,
        gallery: npt.ArrayLike | None = None,
        target_bank: BankLike | None = None,
    ) -> FittedBias:
        """Raises BankTooSmall, DimensionMismatch or NonFiniteVectors for what it is given."""
        ...


@runtime_checkable
class Transport(Estimator, Protocol):
    """An estimator that finds `potentials` numbers per bank query by iterating over the gallery."""

    @property
    def potentials(self) -> int: ...

    def fit(
        self,
        bank: BankLike,
        *,
        gallery: npt.ArrayLike | None = None,
        target_bank: BankLike | None = None,
        start: npt.ArrayLike | None = None,
    ) -> FittedBias:
        """As any estimator; start: potentials (|bank|, p) of an earlier fit on this bank, to begin from."""
        ...

    def restore(
        self,
        bank: BankLike,
        potentials: npt.ArrayLike,
        *,
        target_bank: BankLike | None = None,
    ) -> FittedBias:
        """The fit that had these potentials, without its gallery."""
        ...


@runtime_checkable
class FromNearest(Estimator, Protocol):
    """An estimator whose bias follows, up to a known error, from an item's nearest bank rows."""

    @property
    def needs(self) -> Needs: ...

    def from_nearest(self, queries: Nearest, targets: Nearest | None = None) -> Bounded:
        """Biases (m,) of the items of which these are the nearest queries and the nearest targets, and by how
        much they may be too small.

        The error is 0 where all rows were seen. Raises BankTooSmall for fewer nearest than the formula takes,
        InvalidInput without targets where `needs` asks for some.
        """
        ...


@dataclass(frozen=True, eq=False)
class FittedBias:
    """An estimator that has seen its bank: b(r) for any vector r, a new one or one of the gallery.

    estimator: with the tau that a temperature led to. diagnostics: the estimator's named tuple. potentials:
    (|bank|, p) float32, what has to be kept beside the bank to restore the fit without the gallery; p = 0
    where the bank alone is enough.
    """

    estimator: Estimator
    bank: QueryBank
    formula: Callable[[Vectors], npt.NDArray[Any]] = field(repr=False)
    diagnostics: Any
    potentials: Vectors = field(repr=False)
    new_formula: Callable[[Vectors], npt.NDArray[Any]] | None = field(default=None, repr=False)

    def bias(self, vectors: npt.ArrayLike) -> Vectors:
        """(n,) float32 biases, to be subtracted, of vectors (n, d) in the bank's dimension.

        Raises InvalidInput (not 2-D, not numbers), DimensionMismatch and NonFiniteVectors.
        """
        return self._told(self.formula, vectors)

    def new_bias(self, vectors: npt.ArrayLike) -> Vectors:
        """As `bias`, of items that join those of the fit together: for an estimator that balances the bank
        against its items, they leave room for each other, in whatever order they come."""
        return self._told(self.new_formula or self.formula, vectors)

    def _told(self, formula: Callable[[Vectors], npt.NDArray[Any]], vectors: npt.ArrayLike) -> Vectors:
        items = as_vectors(vectors, "the vectors")
        self.bank.expect_dim(items.shape[1], "a vector")
        if not len(items):
            return np.empty(0, np.float32)
        return formula(items).astype(np.float32, copy=False)


class BankDiagnostics(NamedTuple):
    """Of an estimator that needs only its bank."""

    bank_size: int
    dim: int


class TwoBankDiagnostics(NamedTuple):
    """Of an estimator that needs a target bank beside its bank."""

    bank_size: int
    target_bank_size: int
    dim: int


def no_potentials(bank: QueryBank) -> Vectors:
    return np.empty((len(bank), 0), np.float32)


def restore(
    estimator: Estimator,
    bank: BankLike,
    potentials: npt.ArrayLike,
    *,
    target_bank: BankLike | None = None,
) -> FittedBias:
    """The `FittedBias` of an earlier fit, from its bank and its potentials, without the gallery.

    estimator: that of the fit. Raises InvalidParameter for one with a temperature and no tau yet.
    """
    if isinstance(estimator, Transport):
        return estimator.restore(bank, potentials, target_bank=target_bank)
    return replace(at_its_tau(estimator).fit(bank, target_bank=target_bank), estimator=estimator)
