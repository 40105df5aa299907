"""The estimator and the fitted estimator: base classes, inputs, temperatures and dictionaries.

Vectors of twice the length score four times as high, so no tau suits every collection. An estimator
with a temperature gets its tau in the fit: temperature · spread. The fitted estimator has both; its
tau is stored with the biases, and the next fit measures the spread again. The agreement of a bank's
halves is measured, stored and measured again in the same way.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.estimator_names import INSTALLED, MEASURED, installed_estimators
from milvus_hubness.correction.banks.bank import BankLike, QueryBank, Vectors, as_vectors
from milvus_hubness.correction.estimators.products import MOST_PRODUCTS, Numbers
from milvus_hubness.correction.kernels import logsumexp
from milvus_hubness.correction.kernels.checks import finite_number, positive_number, whole_number
from milvus_hubness.correction.kernels.policy import prefer_torch
from milvus_hubness.correction.kernels.rows import all_scores, scored
from milvus_hubness.correction.kernels.token_rows import is_token_rows
from milvus_hubness.errors import InvalidInput, InvalidParameter

if TYPE_CHECKING:
    from typing import Self  # Python 3.10 does not have it.

TEMPERATURE_OF = {
    "tau": "temperature",
    "tau_query": "temperature_query",
    "tau_target": "temperature_target",
}
"""The parameter in units of the spread, by the parameter in units of the score."""

ESTIMATORS: dict[str, type[Estimator]] = {}
"""The classes by their names, as far as their modules are loaded: each registers itself."""

ALIASES: dict[str, str] = {}
"""The names of the classes by their names for users."""

_CONVERSIONS: dict[str, Callable[[str, Any], Any]] = {
    "int": whole_number,
    "int | None": whole_number,
    "float": finite_number,
    "float | None": finite_number,
}
"""What checks and converts a parameter, by its annotation."""

QUERIES = 1_000
"""Most bank queries from which the spread of scores is measured."""
ITEMS = 20_000
"""Most items from which a spread or an agreement is measured."""
ITEMS_OF_TOKENS = 2_000
"""Most documents of several vectors each from which a spread is measured."""

Strength: TypeAlias = float | Literal["agreement"]
"""Factor on the biases, or the name of the one that a fit measures."""


class FitInputs(NamedTuple):
    """The optional arguments of `Estimator.fit`."""

    gallery: npt.ArrayLike | None
    """(n, d), checked if the estimator needs it."""
    target_bank: BankLike | None
    """Checked by the estimators that need it."""
    start: npt.ArrayLike | None
    """(|bank|, p) potentials of an earlier fit, one row for each group."""
    queries: QueryBank
    """The bank before near copies were condensed."""


@dataclass(frozen=True, kw_only=True)
class Estimator(ABC):
    """One number per item, subtracted from its scores; a frozen dataclass of its parameters.

    alias, of a subclass: a further name for users; with it, collection states can hold the
    estimator.
    """

    strength: Strength = field(default=1.0, repr=False)
    """Factor on the biases; "agreement" stands for the value of `agreement`."""
    agreement: float | None = field(default=None, repr=False)
    """ρ, which a fit measures: the correlation of the biases from two random halves of the bank,
    without what only one half can know, see `known_to_halves`, and at least 0. What the halves do not
    agree on is noise, so ρ is the share of the bias to apply (as in empirical Bayes)."""

    def __init_subclass__(cls, alias: str | None = None) -> None:
        super().__init_subclass__()
        if alias is None:
            return

        # A class may take its own names again: a reloaded module defines it a second time.
        with_name = ESTIMATORS.get(cls.__name__)
        with_alias = ESTIMATORS.get(ALIASES.get(alias, ""))
        for name, former in ((cls.__name__, with_name), (alias, with_alias)):
            if former is not None and former.__module__ != cls.__module__:
                raise InvalidParameter(
                    f"the name {name!r} of the estimator {cls.__module__}.{cls.__name__} is taken "
                    f"by {former.__module__}.{former.__name__}: choose another one"
                )

        ESTIMATORS[cls.__name__] = cls
        ALIASES[alias] = cls.__name__

    def __post_init__(self) -> None:
        """Check and convert numbers by their annotations; None stays where it is the default."""
        # The annotations are text, since each module of an estimator postpones their evaluation.
        for parameter in fields(self):
            convert = _CONVERSIONS.get(str(parameter.type))
            value = getattr(self, parameter.name)
            if convert and (value is not None or parameter.default is not None):
                object.__setattr__(self, parameter.name, convert(parameter.name, value))

        if self.strength != "agreement":
            if not isinstance(self.strength, str):
                object.__setattr__(self, "strength", finite_number("strength", self.strength))
            if isinstance(self.strength, str) or self.strength < 0:
                raise InvalidParameter(
                    f'strength must be "agreement" or a number from 0 up, not {self.strength!r}'
                )

    @property
    def share(self) -> float:
        """The share of its formula that is subtracted, with those of the estimators that it consists of.

        Raises InvalidParameter if it is an agreement that no fit has measured yet.
        """
        return self.factor_on_formula

    @property
    def factor_on_formula(self) -> float:
        """The number that `strength` stands for. Raises as `share` does."""
        if self.strength != "agreement":
            return self.strength
        if self.agreement is None:
            raise InvalidParameter(
                f"{self!r} has no agreement yet: fit it, or take the estimator of the fit"
            )
        return self.agreement

    @property
    def needs_gallery(self) -> bool:
        """Whether `fit` raises InvalidInput without a gallery.

        Here, it does to measure the spread of its scores, or an agreement.
        """
        return self.has_temperature or self.strength == "agreement"

    @property
    def needs_target_bank(self) -> bool:
        """Whether `fit` raises InvalidInput without a target bank."""
        return False

    @property
    def potentials(self) -> int:
        """How many numbers per bank query `fit` finds by iterating over the gallery."""
        return 0

    @property
    def of_biases(self) -> Estimator:
        """The estimator without what it adds for demand: here, itself."""
        return self

    def in_full(self) -> Self:
        """Return the estimator at strength 1 if its strength is the agreement, else as it is."""
        return self._replaced({"strength": 1.0} if self.strength == "agreement" else {})

    def settled(self) -> Self:
        """Return the estimator of a fit with its agreement as a number, which no further fit measures.

        That of the estimators that it consists of, too. Raises as `share` does.
        """
        changes: dict[str, Any] = {}
        if self.strength == "agreement":
            changes["strength"] = self.factor_on_formula
        if members := getattr(self, "estimators", ()):
            changes["estimators"] = tuple(member.settled() for member in members)
        return self._replaced(changes)

    def gallery_scores(self, potentials: Vectors) -> Vectors | None:
        """Return the mean of the best scores of each bank query in the gallery, (m,) float32, by which
        the hub guard measures the reach of a row; None if the estimator does not keep them.

        potentials: (m, p), of the fit.
        """
        return None

    def fit(
        self,
        bank: BankLike,
        *,
        gallery: npt.ArrayLike | None = None,
        target_bank: BankLike | None = None,
        start: npt.ArrayLike | None = None,
    ) -> FittedBias:
        """Fit on the bank; gallery and target bank are used only if the estimator needs them.

        The near copies of a bank with groups have the weight of one query: the fit is on their mean,
        and `FittedBias.bank` has a row for each group.

        start: potentials (|bank|, p) of an earlier fit on this bank, as a starting point. Raises
        BankTooSmall, DimensionMismatch, NonFiniteVectors, and InvalidInput for a missing argument.
        """
        # A fit takes long enough to be worth the import of torch.
        prefer_torch()
        queries = QueryBank.of(bank)
        if start is not None and queries.groups is not None:
            start = queries.of_groups(check_potentials(queries, start, self.potentials))
        condensed = queries.condensed
        if not self.needs_gallery:
            return self._fit(condensed, FitInputs(gallery, target_bank, start, queries))

        items = require_gallery(condensed, gallery, type(self).__name__)
        # What follows reads the scores of all pairs several times.
        items = scored(items, condensed.vectors, getattr(self, "device", "auto"))

        # First the taus, which the fit needs; last the agreement, which is that of the fit.
        inputs = FitInputs(items, target_bank, start, queries)
        fitted = self.measured(condensed, items)._fit(condensed, inputs)
        return fitted.with_agreement(queries, items, target_bank)

    def gallery_biases(
        self, bank: BankLike, gallery: Vectors, target_bank: BankLike | None = None
    ) -> Vectors:
        """Return the biases (n,) of a gallery (n, d) by a fit on it, float32, as `fit` and `bias` do.

        An estimator that has them from its fit computes them once.
        """
        return self.fit(bank, gallery=gallery, target_bank=target_bank).bias(gallery)

    @abstractmethod
    def _fit(self, bank: QueryBank, inputs: FitInputs) -> FittedBias:
        """Fit with measured taus; the gallery is checked if the estimator needs it."""

    def restore(
        self, bank: BankLike, potentials: npt.ArrayLike, *, target_bank: BankLike | None = None
    ) -> FittedBias:
        """Return the fit that had these potentials (|bank|, p), without its gallery.

        The near copies of a group have the same potentials. Raises InvalidParameter for an estimator
        with a temperature and no tau yet, InvalidInput for potentials of another shape.
        """
        queries = QueryBank.of(bank)
        numbers = queries.of_groups(check_potentials(queries, potentials, self.potentials))
        return self._restore(queries.condensed, numbers, target_bank)

    def _restore(
        self, bank: QueryBank, potentials: Vectors, target_bank: BankLike | None
    ) -> FittedBias:
        """Restore a fit on a bank without groups, from checked potentials."""
        pairs = self._temperatures()
        for tau, _ in pairs:
            self.tau_of(tau)

        # Without temperatures, the fit needs no gallery to measure the spread on.
        absolute = self._replaced({temperature: None for _, temperature in pairs})
        fitted = absolute._fit(bank, FitInputs(None, target_bank, None, bank))
        return replace(fitted, estimator=self)

    def clamped(self, bank_size: int) -> Self:
        """Return the estimator with a k that a bank of this size has."""
        k: int | None = getattr(self, "k", None)
        return self if k is None or k <= bank_size else self._replaced({"k": bank_size})

    def _fitted(
        self,
        bank: QueryBank,
        of_vectors: Callable[[Vectors], Numbers],
        diagnostics: Any = None,
        *,
        of_products: Callable[[Numbers], Numbers] | None = None,
    ) -> FittedBias:
        """Return a fit that needs the bank alone. of_vectors, of_products: as of `Formula`."""
        return FittedBias(
            estimator=self,
            bank=bank,
            formula=Formula(of_vectors, of_products),
            diagnostics=diagnostics or BankDiagnostics(len(bank), bank.dim),
            potentials=np.empty((len(bank), 0), np.float32),
        )

    # -- temperatures -----------------------------------------------------------------------------

    @property
    def has_temperature(self) -> bool:
        """Whether a fit has to measure the spread."""
        return any(
            getattr(self, temperature) is not None for _, temperature in self._temperatures()
        )

    def tau_of(self, name: str = "tau") -> float:
        """Return that tau. Raises InvalidParameter if no fit has measured it yet."""
        tau: float | None = getattr(self, name)
        if tau is None:
            raise InvalidParameter(
                f"{self!r} has no {name} yet: fit it, or take the estimator of the fit"
            )
        return tau

    def measured(self, bank: QueryBank, items: Vectors) -> Self:
        """Return the estimator with the taus of its temperatures on this bank and items (n, d).

        If all items score alike, every tau ranks them alike: then the unit is the root mean square
        score, or 1 if all scores are 0.
        """
        if not self.has_temperature:
            return self

        unit = score_spread(bank, items)
        if not unit:
            scores = all_scores(bank.vectors[:QUERIES], items[:QUERIES])
            unit = float(np.sqrt(np.mean(scores**2))) or 1.0
        temperatures = {
            tau: getattr(self, temperature) for tau, temperature in self._temperatures()
        }
        return self._replaced(
            {tau: value * unit for tau, value in temperatures.items() if value is not None}
        )

    def unmeasured(self) -> Self:
        """Return the estimator as before its fit.

        It is without the number and the mean bias of its items, the agreement, and the measured
        taus.
        """
        # A tau without a temperature is the user's own, and stays.
        measured = {tau for tau, name in self._temperatures() if getattr(self, name) is not None}
        measured |= MEASURED
        return self._replaced(
            {name: None for name in measured if getattr(self, name, None) is not None}
        )

    def _set_temperatures(self, **defaults: float) -> None:
        """Check each tau and temperature under construction.

        Without either, set the default temperature.
        """
        for tau, temperature in self._temperatures():
            chosen = [name for name in (tau, temperature) if getattr(self, name) is not None]
            for name in chosen:
                positive_number(name, getattr(self, name))
            if not chosen:
                object.__setattr__(self, temperature, defaults[temperature])

    def _temperatures(self) -> list[tuple[str, str]]:
        """Return the names of each tau and its temperature."""
        return [pair for pair in TEMPERATURE_OF.items() if hasattr(self, pair[0])]

    def _replaced(self, changes: Mapping[str, Any]) -> Self:
        return replace(self, **changes) if changes else self


def score_spread(bank: QueryBank, gallery: Vectors) -> float:
    """Return the standard deviation of a bank query's scores over the items.

    It is the root mean square over up to 1,000 queries and 20,000 items of the gallery (n, d),
    spread evenly; 0 if all items score alike.
    """
    if is_token_rows(gallery) or is_token_rows(bank.vectors):
        return _spread_of_scores(bank.vectors, gallery)
    queries = _evenly(bank.vectors, QUERIES)
    items = _evenly(gallery, ITEMS)

    # The variance of q·r over the items is qᵀ C q, C their covariance: d × d numbers in place of
    # the products of all queries and items.
    centred = items - items.mean(0, dtype=np.float64).astype(np.float32)
    covariance = (centred.T @ centred).astype(np.float64) / len(items)
    spread = np.sqrt(np.mean((queries @ covariance) * queries, 0).sum())

    # Less than that is the rounding of equal scores in float32.
    largest = np.abs(queries @ items[:QUERIES].T).max()
    return float(spread) if spread > 1e-6 * largest else 0.0


def _spread_of_scores(queries: Any, items: Any) -> float:
    """Return the spread of scores that are no inner products, of fewer pairs."""
    scores = all_scores(queries[_places(queries, QUERIES)], items[_places(items, ITEMS_OF_TOKENS)])
    spread = float(np.sqrt(scores.var(1, dtype=np.float64).mean()))
    return spread if spread > 1e-6 * np.abs(scores).max() else 0.0


def _evenly(rows: Vectors, most: int) -> Vectors:
    return rows[_places(rows, most)]


def _places(rows: Vectors, most: int) -> npt.NDArray[np.int64]:
    """Return the numbers of at most `most` rows, spread evenly."""
    return np.linspace(0, len(rows) - 1, min(most, len(rows)), dtype=np.int64)


def split_in_half(size: int) -> list[npt.NDArray[np.int64]]:
    """Return the numbers of the queries in two random halves of a bank of this size."""
    # One seed for all: a bank has the same halves in each process, and so the same agreement.
    return np.split(np.random.default_rng(0).permutation(size), [size // 2])


DEMAND_TEMPERATURE = 0.2
"""Temperature by which a query is shared among the items, in units of the spread of scores. Chosen on
the tasks of the choice in `python -m benchmarks.demand`."""


def demand_for(
    queries: QueryBank, items: Vectors, biases: Vectors, tau: float, *, device: str = "auto"
) -> npt.NDArray[np.float64]:
    """Return how many queries of a condensed bank (m, d) ask for each of the items (n, d), (n,).

    Each query, as often as its count says, is shared among all items by the softmax of its scores less
    the biases (n,), at the temperature tau.
    """
    counts = np.ones(len(queries)) if queries.counts is None else queries.counts
    shares = logsumexp(queries.vectors, items, tau, -biases, device=device)
    of_queries = np.asarray(tau * np.log(counts) - shares, np.float32)
    sums = logsumexp(items, queries.vectors, tau, of_queries, device=device)
    demand: npt.NDArray[np.float64] = np.exp((sums.astype(np.float64) - biases) / tau)
    return demand


class Halves(NamedTuple):
    """What two halves of a bank both know of the biases (n,) of items."""

    biases: Sequence[npt.NDArray[np.float64]]
    """Those of each half, less their mean and without what only one half can know."""

    @property
    def agreement(self) -> float:
        """The correlation of the two, at least 0; 0 if one of them is constant."""
        first, second = self.biases
        scale = float(np.sqrt((first @ first) * (second @ second)))
        return max(0.0, float(first @ second) / scale) if scale else 0.0


UNLIKE_BY_CHANCE = 0.55
"""Up to this size, the f of `known_to_halves` says nothing: so large it is on banks of queries for items
that are not in the gallery (tests/correction/estimators/test_reference_on_real_data.py)."""


def known_to_halves(
    biases: Sequence[Vectors],
    halves: Sequence[Vectors],
    items: Vectors,
    *,
    device: str = "auto",
    by_chance: float = 0.0,
) -> Halves:
    """Return what two halves of a bank (m, d) both know of the biases (n,) of items (n, d).

    A query raises the bias of the very item that it asks for. If a log asks for each item about
    once, its halves ask for other items, and would disagree on this account alone, while the whole
    log raises all biases alike. So each half loses β·f·k of its biases: k is how many of its queries
    ask for an item, by `demand_for` under the biases of the other half; β ≥ 0 the slope of b₁ − b₂ on
    k₁ − k₂; and f, at least 0, the correlation of k₁ and k₂ with the opposite sign, of which what is
    above `by_chance` counts: under the biases of the other half, demands that have nothing to do with
    each other are unlike too. The strength of a fit leaves that out; a verdict, which only asks whether
    the halves agree at all, does not.
    """
    first, second = (_less_mean(values) for values in biases)
    spread = score_spread(QueryBank(halves[0]), items)
    if not spread:
        return Halves((first, second))

    tau = DEMAND_TEMPERATURE * spread
    demands = [
        _less_mean(demand_for(QueryBank(half), items, bias, tau, device=device))
        for half, bias in zip(halves, reversed(biases), strict=True)
    ]
    apart = demands[0] - demands[1]
    scale = float(np.sqrt((demands[0] @ demands[0]) * (demands[1] @ demands[1])))
    if not scale or not apart.any():
        return Halves((first, second))

    slope = max(0.0, float((first - second) @ apart) / float(apart @ apart))
    unlike = max(0.0, (-float(demands[0] @ demands[1]) / scale - by_chance) / (1 - by_chance))
    return Halves((first - slope * unlike * demands[0], second - slope * unlike * demands[1]))


def _less_mean(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return numbers (n,) less their mean."""
    doubles = values.astype(np.float64)
    return np.asarray(doubles - doubles.mean())


@dataclass(frozen=True)
class Formula:
    """The biases (n,) of items at strength 1."""

    of_vectors: Callable[[Vectors], Numbers]
    """Computes them from the items' vectors (n, d), by kernels that never hold all products."""

    of_products: Callable[[Numbers], Numbers] | None = None
    """Computes them from the items' inner products (n, |bank|) with the whole bank; None if these
    are not enough. Where the products are at hand, the biases need no other product."""


@dataclass(frozen=True, eq=False)
class FittedBias:
    """An estimator after its fit: b(r) for any vector r, of the gallery or new."""

    estimator: Estimator
    """With the tau that follows from a temperature, and its agreement."""

    bank: QueryBank
    """The bank of the fit, with one query for each group of near copies."""

    formula: Formula = field(repr=False)
    """Of the items of the fit."""

    diagnostics: Any
    """The estimator's named tuple."""

    potentials: Vectors = field(repr=False)
    """(|bank|, p) float32, stored with the bank to restore the fit without the gallery; p = 0 if
    the bank alone is enough."""

    new_formula: Formula | None = field(default=None, repr=False)
    """Of items that were added together after the fit; None if it is the same."""

    def bias(self, vectors: npt.ArrayLike) -> Vectors:
        """Return biases of vectors (n, d) in the bank's dimension, to be subtracted, float32 (n,).

        Raises InvalidInput (not 2-D, not numbers), DimensionMismatch and NonFiniteVectors.
        """
        return self._evaluated(self.formula.of_vectors, vectors)

    def new_bias(self, vectors: npt.ArrayLike) -> Vectors:
        """Return biases as `bias` does, of items that were added together after the fit.

        Their order does not matter. For an estimator that balances the bank against its items, the
        new items leave room for each other, as many at a time as have MOST_PRODUCTS with the bank.
        """
        return self._evaluated(self._formula(are_new=True).of_vectors, vectors)

    @property
    def takes_products(self) -> bool:
        """Whether `bias_of_products` can compute the biases."""
        return self.formula.of_products is not None

    def bias_of_products(self, products: Numbers, *, are_new: bool) -> Numbers:
        """Return what `bias` or `new_bias` returns, not rounded to float32.

        products: inner products (n, |bank|) of the items and the whole bank.
        """
        of_products = self._formula(are_new=are_new).of_products
        if of_products is None:
            raise InvalidInput(
                f"the products with the bank are not enough for {self.estimator!r}: pass vectors"
            )
        return self.estimator.factor_on_formula * of_products(products)

    @cached_property
    def gallery_scores(self) -> Vectors | None:
        """Those that the estimator has kept, (|bank|,) float32; None if it keeps none."""
        return self.estimator.gallery_scores(self.potentials)

    def _formula(self, *, are_new: bool) -> Formula:
        return self.new_formula if are_new and self.new_formula else self.formula

    def _evaluated(self, formula: Callable[[Vectors], Numbers], vectors: npt.ArrayLike) -> Vectors:
        items = as_vectors(vectors, "the vectors")
        self.bank.expect_dim(items.shape[1], "a vector")
        # Kernels need a row.
        if not len(items):
            return np.empty(0, np.float32)
        share = self.estimator.factor_on_formula
        if not is_token_rows(items):
            return (share * formula(items)).astype(np.float32, copy=False)

        # Some documents at a time, whose scores are computed once for all that reads them.
        biases = np.empty(len(items), np.float32)
        count = math.ceil(len(items) * len(self.bank) / MOST_PRODUCTS)
        for first in range(count):
            block = slice(first, None, count)
            device = getattr(self.estimator, "device", "auto")
            biases[block] = share * formula(scored(items[block], self.bank.vectors, device))
        return biases

    def with_agreement(
        self, queries: QueryBank, items: Vectors, target_bank: BankLike | None
    ) -> FittedBias:
        """Return the fit with the agreement of the bank's halves, if its strength is one.

        queries: of the bank, with their groups; near copies may be in both halves, as they will be
        among the queries to come. items: (n, d); both halves are fitted on up to 20,000 of them. The
        agreement is 0 for a bank of one query.
        """
        if self.estimator.strength != "agreement":
            return self

        agreement = 0.0
        if len(self.bank) > 1:
            sample = items[_places(items, ITEMS)]
            halves = [queries.take(numbers) for numbers in split_in_half(len(queries))]
            smallest = min(len(half.condensed) for half in halves)

            # At strength 1: otherwise each half would measure an agreement of its own halves.
            estimator = replace(self.estimator, strength=1.0).clamped(smallest)
            device = getattr(self.estimator, "device", "auto")
            biases = [estimator.gallery_biases(half, sample, target_bank) for half in halves]
            of_halves = [half.condensed.vectors for half in halves]
            known = known_to_halves(
                biases, of_halves, sample, device=device, by_chance=UNLIKE_BY_CHANCE
            )
            agreement = known.agreement
        return replace(self, estimator=replace(self.estimator, agreement=agreement))


class BankDiagnostics(NamedTuple):
    """Diagnostics of an estimator that needs only its bank, or its bank and a target bank."""

    bank_size: int
    dim: int
    target_bank_size: int = 0
    """0 without a target bank."""


@cache
def load_installed() -> None:
    """Load the estimators of other packages, which register themselves.

    Raises InvalidParameter, which names the package, if one cannot be loaded or is none.
    """
    for entry_point in installed_estimators():
        package = entry_point.dist.name if entry_point.dist else entry_point.value
        what = f"the estimator {entry_point.name!r} of the installed package {package!r}"
        try:
            loaded = entry_point.load()
        # The code of another package may raise anything.
        except Exception as error:
            raise InvalidParameter(
                f"{what} cannot be loaded: {error}: repair or remove the package"
            ) from error

        if loaded is not ESTIMATORS.get(ALIASES.get(entry_point.name, "")):
            raise InvalidParameter(
                f"{what} is no Estimator with alias={entry_point.name!r}: its entry point in "
                f"{INSTALLED} must have the alias as its name"
            )


def class_name(method: str) -> str:
    """Return the name in ESTIMATORS of a method as users write it; case does not matter.

    Raises InvalidParameter.
    """
    name = _methods().get(method.lower())
    # Other packages take time to import, so they are loaded for names that nobody here has.
    if name is None:
        load_installed()
        name = _methods().get(method.lower())
    if name is None:
        raise InvalidParameter(f"no method {method!r}: use one of {', '.join(sorted(ALIASES))}")
    return name


def _methods() -> dict[str, str]:
    return {name.lower(): name for name in ESTIMATORS} | ALIASES


def class_of(name: object) -> type[Estimator]:
    """Return the class of this name.

    Raises InvalidParameter if there is none, here or in an installed package.
    """
    if isinstance(name, str) and name not in ESTIMATORS:
        load_installed()
    if not isinstance(name, str) or name not in ESTIMATORS:
        raise InvalidParameter(
            f"no estimator is named {name!r}: use one of {', '.join(ESTIMATORS)}"
        )
    return ESTIMATORS[name]


def to_dict(estimator: Estimator) -> dict[str, Any]:
    """Return {"name": "NNN", "k": 128, …}: the class and its parameters, fit for JSON.

    The device is left out, and so is the default strength, and each tau, temperature or measured
    value that is not set. Raises InvalidParameter for an estimator that has no alias.
    """
    name = type(estimator).__name__
    if ESTIMATORS.get(name) is not type(estimator):
        raise InvalidParameter(
            f"{name} cannot be stored with a collection: use one of {', '.join(ESTIMATORS)}"
        )

    values = {
        parameter: getattr(estimator, parameter) for parameter in _parameters(type(estimator))
    }
    # A collection state has little room, and most estimators have none of these.
    optional = {*TEMPERATURE_OF, *TEMPERATURE_OF.values(), *MEASURED}
    if estimator.strength == type(estimator).strength:
        del values["strength"]
    return {"name": name} | {
        parameter: _plain(value)
        for parameter, value in values.items()
        if value is not None or parameter not in optional
    }


def _plain(value: Any) -> Any:
    """Return a parameter fit for JSON."""
    if isinstance(value, tuple):
        return [_plain(element) for element in value]
    return to_dict(value) if isinstance(value, Estimator) else value


def names_in(values: Mapping[str, Any]) -> set[str]:
    """Return the names of the estimators in a description: its own, and those of a Blend's.

    Raises InvalidParameter for a description without a name.
    """
    name = values.get("name")
    if not isinstance(name, str) or not name.isidentifier():
        raise InvalidParameter(f"an estimator has a name, not {name!r}")

    # Whether these are estimators is for `from_dict` to say: here only their names count.
    inner = values.get("estimators", ())
    if not isinstance(inner, list | tuple):
        return {name}
    return {name}.union(*(names_in(value) for value in inner if isinstance(value, Mapping)))


def from_dict(values: Mapping[str, Any]) -> Estimator:
    """Return the estimator that `to_dict` described.

    Missing parameters have their defaults. Raises InvalidParameter for an unknown name, an unknown
    parameter or a value out of range.
    """
    if not isinstance(values, Mapping):
        raise InvalidParameter(f"an estimator is described by a dictionary, not by {values!r}")
    parameters = dict(values)
    name = parameters.pop("name", None)
    estimator_class = class_of(name)
    allowed = _parameters(estimator_class)
    unknown = [parameter for parameter in parameters if parameter not in allowed]
    if unknown:
        raise InvalidParameter(
            f"{name} has no parameter {unknown[0]!r}: use one of {', '.join(allowed)}"
        )

    if "estimators" in parameters:
        if not isinstance(parameters["estimators"], list | tuple):
            raise InvalidParameter(
                f"estimators are a list of dictionaries, not {parameters['estimators']!r}"
            )
        parameters["estimators"] = tuple(map(from_dict, parameters["estimators"]))
    return estimator_class(**parameters)


def expect_estimator(estimator: object) -> None:
    """Raise InvalidInput, which says how to make one, if this is no estimator and not None."""
    if estimator is None or isinstance(estimator, Estimator):
        return
    if isinstance(estimator, type) and issubclass(estimator, Estimator):
        raise InvalidInput(f"an estimator is needed, not its class: pass {estimator.__name__}()")
    if isinstance(estimator, str):
        name = class_name(estimator)
        raise InvalidInput(f"an estimator is needed, not the text {estimator!r}: pass {name}()")
    raise InvalidInput(f"an estimator is needed, such as NNN(k=16), not {estimator!r}")


def is_same(estimator: Estimator, values: Mapping[str, Any]) -> bool:
    """Return whether `to_dict` described this estimator, apart from values measured in a fit."""
    return estimator.unmeasured() == from_dict(values).unmeasured()


def with_parameters(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dictionary of an estimator with some parameters changed.

    A tau replaces its temperature, and a temperature replaces its tau. Raises InvalidParameter if
    both are in `changes`.
    """
    changed = dict(values)
    for tau, temperature in TEMPERATURE_OF.items():
        if tau in changes and temperature in changes:
            raise InvalidParameter(
                f"both {tau} and {temperature} are given: choose {tau}, in units of the score, or "
                f"{temperature}, in units of the spread of scores"
            )
        if tau in changes or temperature in changes:
            changed.pop(tau, None)
            changed.pop(temperature, None)
    return changed | dict(changes)


def _parameters(estimator_class: type[Any]) -> list[str]:
    """Return the parameters but the device; those of all estimators come last."""
    names = [field.name for field in fields(estimator_class) if field.name != "device"]
    return sorted(names, key=lambda name: name in Estimator.__annotations__)


@dataclass(frozen=True, eq=False)
class TargetBank(QueryBank):
    """Items under a metric that reduces items and queries to different vectors.

    L2 does, as it is reduced to IP. `vectors`, (t, d), are the items as items, to be balanced
    against the bank.
    """

    asking: Vectors = field(default_factory=lambda: np.empty((0, 0), np.float32), repr=False)
    """(t, d) float32, the items as queries, whose inner products with items are similarities."""


def check_potentials(bank: QueryBank, potentials: npt.ArrayLike, columns: int) -> Vectors:
    """Return `potentials` as float32 (|bank|, columns).

    Raises InvalidInput for another shape, NonFiniteVectors.
    """
    shape = np.shape(potentials)
    if shape != (len(bank), columns):
        raise InvalidInput(f"potentials must have shape ({len(bank)}, {columns}), not {shape}")
    # `as_vectors` refuses rows without a number, but an estimator may have no potentials.
    return as_vectors(potentials, "the potentials") if columns else np.empty(shape, np.float32)


def require_gallery(bank: QueryBank, gallery: npt.ArrayLike | None, who: str) -> Vectors:
    """Return the gallery as float32 (n, d), n ≥ 1.

    Raises InvalidInput without one, DimensionMismatch.
    """
    if gallery is None:
        raise InvalidInput(
            f"{who} is fitted on the gallery, or takes its scale from it: pass gallery=…"
        )
    return _checked(bank, as_vectors(gallery, "the gallery"), "the gallery")


def require_target_bank(
    bank: QueryBank, target_bank: BankLike | None, who: str, *, as_queries: bool = False
) -> Vectors:
    """Return the target bank as float32 (n, d), n ≥ 1, as items or as queries.

    Raises InvalidInput without one, DimensionMismatch.
    """
    if target_bank is None:
        raise InvalidInput(f"{who} needs reference items: pass target_bank= (--target-bank)")

    if as_queries and isinstance(target_bank, TargetBank):
        target_bank = target_bank.asking
    elif isinstance(target_bank, QueryBank | str | os.PathLike):
        target_bank = QueryBank.of(target_bank).vectors
    targets = _checked(bank, as_vectors(target_bank, "the target bank"), "the target bank")
    if is_token_rows(targets):
        return cast(Vectors, targets.as_queries() if as_queries else targets.as_documents())
    return targets


def _checked(bank: QueryBank, vectors: Vectors, what: str) -> Vectors:
    bank.expect_dim(vectors.shape[1], what)
    if len(vectors) == 0:
        raise InvalidInput(f"{what} is empty")
    return vectors
