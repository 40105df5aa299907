"""The estimator and the fitted estimator: their base classes, inputs and temperatures.

Vectors of twice the length score four times as high, so no tau suits every collection. An estimator with a
temperature gets its tau in the fit: temperature · spread. The fitted estimator has both; its tau is stored
with the biases, and the next fit measures the spread again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks.bank import BankLike, QueryBank, Vectors, as_vectors
from milvus_hubness.errors import InvalidInput, InvalidParameter
from milvus_hubness.estimators.nearest import Bounded, Nearest, Needs
from milvus_hubness.kernels.operands import positive_number

TEMPERATURE_OF = {
    "tau": "temperature",
    "tau_query": "temperature_query",
    "tau_target": "temperature_target",
}
"""The parameter in units of the spread, by the parameter in units of the score."""

QUERIES, ITEMS = 1_000, 20_000
"""Largest numbers of queries and items that the spread is measured on."""

Kind = TypeVar("Kind")


def score_spread(bank: QueryBank, gallery: Vectors) -> float:
    """Return the standard deviation of a bank query's scores over the items.

    It is the root mean square over up to 1,000 queries and 20,000 items of the gallery (n, d), spread evenly;
    0 if all items score alike.
    """
    queries, items = _evenly(bank.vectors, QUERIES), _evenly(gallery, ITEMS)
    centred = items - items.mean(0)
    spread = np.sqrt(np.mean((queries @ (centred.T @ centred / len(items))) * queries, 0).sum())
    largest = np.abs(queries @ items[:QUERIES].T).max()
    return float(spread) if spread > 1e-6 * largest else 0.0


def set_temperatures(estimator: Any, defaults: Mapping[str, float]) -> None:
    """Check each tau and temperature of a dataclass under construction.

    If neither is set, set the default of that temperature. Raises InvalidParameter.
    """
    for tau, temperature in _pairs(estimator):
        given = [name for name in (tau, temperature) if getattr(estimator, name) is not None]
        for name in given:
            object.__setattr__(estimator, name, positive_number(name, getattr(estimator, name)))
        if not given:
            object.__setattr__(estimator, temperature, defaults[temperature])


def has_temperature(estimator: Any) -> bool:
    """Return whether a fit has to measure the spread."""
    return any(getattr(estimator, temperature) is not None for _, temperature in _pairs(estimator))


def measured(estimator: Kind, bank: QueryBank, gallery: npt.ArrayLike | None) -> Kind:
    """Return the estimator with the taus of its temperatures on this bank and gallery (n, d).

    If all items score alike, every tau ranks them alike: then the unit is the root mean square score, or 1 if
    all scores are 0. Raises InvalidInput if there is a temperature but no gallery.
    """
    if not has_temperature(estimator):
        return estimator
    if gallery is None:
        raise InvalidInput(
            f"{type(estimator).__name__} with a temperature measures the gallery's scores: "
            "pass gallery=…, or an absolute tau"
        )
    items = as_vectors(gallery, "the gallery")
    bank.expect_dim(items.shape[1], "the gallery")
    unit = score_spread(bank, items)
    unit = unit or float(np.sqrt(np.mean((bank.vectors[:QUERIES] @ items[:QUERIES].T) ** 2))) or 1.0
    return _replaced(
        estimator,
        {
            tau: value * unit
            for tau, temperature in _pairs(estimator)
            if (value := getattr(estimator, temperature))
        },
    )


def unmeasured(estimator: Kind) -> Kind:
    """Return the estimator as before its fit: without the number of items and the taus that follow from
    temperatures.
    """
    pairs, counted = _pairs(estimator), getattr(estimator, "items", None) is not None
    changes = {tau: None for tau, name in pairs if getattr(estimator, name) is not None}
    return _replaced(estimator, changes | ({"items": None} if counted else {}))


def at_its_tau(estimator: Kind) -> Kind:
    """Return the estimator without its temperatures. Raises InvalidParameter if one has no tau yet."""
    for tau, _ in _pairs(estimator):
        tau_of(estimator, tau)
    return _replaced(estimator, {temperature: None for _, temperature in _pairs(estimator)})


def tau_of(estimator: Any, name: str = "tau") -> float:
    """Return that tau. Raises InvalidParameter if no fit has measured it yet."""
    tau: float | None = getattr(estimator, name)
    if tau is None:
        raise InvalidParameter(f"{estimator!r} has no {name} yet: fit it, or take the estimator of the fit")
    return tau


def _pairs(estimator: Any) -> list[tuple[str, str]]:
    """Return the names of each tau and its temperature."""
    names = {field.name for field in fields(estimator)}
    return [pair for pair in TEMPERATURE_OF.items() if pair[0] in names]


def _replaced(estimator: Kind, changes: Mapping[str, float | None]) -> Kind:
    changed: Any = estimator
    return cast(Kind, replace(changed, **changes) if changes else estimator)


def _evenly(rows: Vectors, most: int) -> npt.NDArray[np.float64]:
    places = np.linspace(0, len(rows) - 1, min(most, len(rows)), dtype=np.int64)
    return rows[places].astype(np.float64)


@runtime_checkable
class Estimator(Protocol):
    """One number per item, subtracted from its scores; a frozen dataclass of its parameters.

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
        """Fit the estimator.

        Raises BankTooSmall, DimensionMismatch or NonFiniteVectors for invalid arguments.
        """
        ...


@runtime_checkable
class Transport(Estimator, Protocol):
    """An estimator that computes `potentials` numbers per bank query by iterating over the gallery."""

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
        """Fit as any estimator does.

        start: potentials (|bank|, p) of an earlier fit on this bank, as a starting point.
        """
        ...

    def restore(
        self,
        bank: BankLike,
        potentials: npt.ArrayLike,
        *,
        target_bank: BankLike | None = None,
    ) -> FittedBias:
        """Restore the fit that had these potentials, without its gallery."""
        ...


@runtime_checkable
class FromNearest(Estimator, Protocol):
    """An estimator whose bias follows, up to a known error, from an item's nearest bank rows."""

    @property
    def needs(self) -> Needs: ...

    def from_nearest(self, queries: Nearest, targets: Nearest | None = None) -> Bounded:
        """Return biases (m,) of items from their nearest queries and nearest targets, with error bounds.

        The bounds say by how much the biases may be too small; they are 0 if all rows were seen. Raises
        BankTooSmall if there are fewer nearest rows than the formula takes, InvalidInput without targets if
        `needs` asks for some.
        """
        ...


@dataclass(frozen=True, eq=False)
class FittedBias:
    """An estimator after its fit: b(r) for any vector r, of the gallery or new.

    estimator: with the tau that follows from a temperature. diagnostics: the estimator's named tuple.
    potentials: (|bank|, p) float32, the numbers stored with the bank to restore the fit without the gallery;
    p = 0 if the bank alone is enough.
    """

    estimator: Estimator
    bank: QueryBank
    formula: Callable[[Vectors], npt.NDArray[Any]] = field(repr=False)
    diagnostics: Any
    potentials: Vectors = field(repr=False)
    new_formula: Callable[[Vectors], npt.NDArray[Any]] | None = field(default=None, repr=False)

    def bias(self, vectors: npt.ArrayLike) -> Vectors:
        """Return biases of vectors (n, d) in the bank's dimension, to be subtracted, float32 (n,).

        Raises InvalidInput (not 2-D, not numbers), DimensionMismatch and NonFiniteVectors.
        """
        return self._told(self.formula, vectors)

    def new_bias(self, vectors: npt.ArrayLike) -> Vectors:
        """Return biases as `bias` does, of items that were added together after the fit.

        For an estimator that balances the bank against its items, the new items leave room for each other, in
        any order.
        """
        return self._told(self.new_formula or self.formula, vectors)

    def _told(self, formula: Callable[[Vectors], npt.NDArray[Any]], vectors: npt.ArrayLike) -> Vectors:
        items = as_vectors(vectors, "the vectors")
        self.bank.expect_dim(items.shape[1], "a vector")
        if not len(items):
            return np.empty(0, np.float32)
        return formula(items).astype(np.float32, copy=False)


class BankDiagnostics(NamedTuple):
    """Diagnostics of an estimator that needs only its bank."""

    bank_size: int
    dim: int


class TwoBankDiagnostics(NamedTuple):
    """Diagnostics of an estimator that needs a target bank and its bank."""

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
    """Return the `FittedBias` of an earlier fit, from its bank and its potentials, without the gallery.

    estimator: that of the fit. Raises InvalidParameter for an estimator with a temperature and no tau yet.
    """
    if isinstance(estimator, Transport):
        return estimator.restore(bank, potentials, target_bank=target_bank)
    return replace(at_its_tau(estimator).fit(bank, target_bank=target_bank), estimator=estimator)


@dataclass(frozen=True, eq=False)
class TargetBank(QueryBank):
    """Items under a metric that reduces items and queries to different vectors, as L2 is reduced to IP.

    vectors: (t, d) as items, to be balanced against the bank. asking: (t, d) float32 as queries, whose inner
    products with items are similarities.
    """

    asking: Vectors = field(default_factory=lambda: np.empty((0, 0), np.float32), repr=False)


def check_potentials(bank: QueryBank, potentials: npt.ArrayLike, columns: int) -> Vectors:
    """Return `potentials` as float32 (|bank|, columns).

    Raises InvalidInput for another shape, NonFiniteVectors.
    """
    shape = np.shape(potentials)
    if shape != (len(bank), columns):
        raise InvalidInput(f"potentials must have shape ({len(bank)}, {columns}), not {shape}")
    return as_vectors(potentials, "the potentials") if columns else no_potentials(bank)


def require_gallery(bank: QueryBank, gallery: npt.ArrayLike | None, who: str) -> Vectors:
    """Return the gallery as float32 (n, d), n ≥ 1. Raises InvalidInput without one, DimensionMismatch."""
    if gallery is None:
        raise InvalidInput(f"{who} is fitted on the gallery: pass gallery=…")
    return _beside(bank, as_vectors(gallery, "the gallery"), "the gallery")


def require_target_bank(bank: QueryBank, target_bank: BankLike | None, who: str) -> Vectors:
    """Return the target bank as float32 (n, d), n ≥ 1. Raises InvalidInput without one, DimensionMismatch."""
    if target_bank is None:
        raise InvalidInput(f"{who} needs a bank of items beside that of queries: pass target_bank=…")
    if isinstance(target_bank, QueryBank):
        target_bank = target_bank.vectors
    return _beside(bank, as_vectors(target_bank, "the target bank"), "the target bank")


def require_asking_targets(bank: QueryBank, target_bank: BankLike | None, who: str) -> Vectors:
    """Return the targets as queries; otherwise as `require_target_bank`."""
    items = require_target_bank(bank, target_bank, who)
    return target_bank.asking if isinstance(target_bank, TargetBank) else items


def _beside(bank: QueryBank, vectors: Vectors, what: str) -> Vectors:
    bank.expect_dim(vectors.shape[1], what)
    if len(vectors) == 0:
        raise InvalidInput(f"{what} is empty")
    return vectors
