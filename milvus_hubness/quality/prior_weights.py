"""The weight of a prior, chosen on labelled queries together with the method.

    score(q, r) = s(q, r) − b(r) + λ · log p(r)

With a prior, another bias may be the best one: b(r) alone pays for pushing popular items down, and
with λ·log p(r) it does not. So both are chosen in turns, and judged on queries that chose neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.banks.bank import Vectors
from milvus_hubness.correction.prior import Prior, Values
from milvus_hubness.quality.labelled import LabelledQueries
from milvus_hubness.quality.outcomes import Outcome
from milvus_hubness.quality.trials import Trial, merits_of, search_labelled

WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4)
"""The λ that are tried, in units of the spread of scores."""

ROUNDS = 2
"""How often the method and the weight are chosen in turns."""

Pick = Callable[[Values, Values], Trial]
"""Returns the method for the merits (n_trials, n_queries), as `merits_of` has them, and the weights
(n_queries,) of the queries."""


class Preference(NamedTuple):
    """The values of a prior for the items that methods are tried on."""

    prior: Prior
    """With the parameters of the whole gallery."""
    values: Values
    """(n_items,)."""
    counts_pairs: bool = False
    """Whether the labelled queries are among the clicks that were counted."""

    def take(self, items: npt.NDArray[np.int64]) -> Preference:
        """Return the values of some items."""
        return self._replace(values=self.values[items])


class Choice(NamedTuple):
    """A method with the weight of the prior."""

    method: Trial
    weight: float


class PriorTrials:
    """Searches with a prior, each query without the click that it is itself.

    A log of clicks may hold the labelled queries too: the prior would then know their answers. So
    the clicks of a fold are left out of the prior with which the fold is searched.

    trials: the methods to choose from. unit: the spread of scores. fold: (n_queries,) the number of
    each query's fold.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        gallery: Vectors,
        pairs: LabelledQueries,
        preference: Preference,
        unit: float,
        fold: npt.NDArray[np.int64],
    ) -> None:
        self._trials = trials
        self._gallery = gallery
        self._pairs = pairs
        self._preference = preference
        self._unit = unit
        self._fold = fold
        self._merits: dict[float, Values] = {}
        """The merits of all trials by weight: several choices need the same ones."""

    def choose(self, pick: Pick, merits: Values, chosen: npt.NDArray[np.bool_]) -> Choice:
        """Return the method and the weight that are best for some queries.

        pick: chooses the method. merits: of all trials without a prior.
        """
        weights = self._pairs.weights[chosen]
        method = pick(merits[:, chosen], weights)
        weight = 0.0
        for _ in range(ROUNDS):
            by_weight = self._merits_of([([method], tried) for tried in WEIGHTS])
            best = _best_weight(by_weight[:, chosen], weights)
            if best == weight:
                break

            weight = best
            if weight not in self._merits:
                self._merits[weight] = self._merits_of([(self._trials, weight)])
            method = pick(self._merits[weight][:, chosen], weights)
        return Choice(method, weight)

    def values(self, choices: Sequence[Choice]) -> Values:
        """Return the measure of each query, (n_queries,), with the choice of its fold."""
        outcome = self._searched([([choice.method], choice.weight) for choice in choices])
        return outcome.values[self._fold, np.arange(len(self._fold))]

    def _merits_of(self, settings: Sequence[tuple[Sequence[Trial], float]]) -> Values:
        return merits_of(self._searched(settings), self._pairs.measure)

    def _searched(self, settings: Sequence[tuple[Sequence[Trial], float]]) -> Outcome:
        """Return the outcome (n_trials, n_queries) of all trials, each at its weight."""
        queries: list[npt.NDArray[np.int64]] = []
        outcomes: list[Outcome] = []
        for number in np.unique(self._fold).tolist():
            in_fold = np.flatnonzero(self._fold == number)
            logs = self._logs(in_fold)
            shifted = [
                trial
                for trials, weight in settings
                for trial in _shifted(trials, weight * self._unit * logs)
            ]
            queries.append(in_fold)
            pairs = self._pairs.take(in_fold)
            outcomes.append(search_labelled(shifted, pairs, self._gallery))

        # The first row is the raw search.
        order = np.argsort(np.concatenate(queries))
        joined = [np.concatenate(parts, axis=1)[1:, order] for parts in zip(*outcomes, strict=True)]
        return Outcome(*joined)

    def _logs(self, left_out: npt.NDArray[np.int64]) -> Values:
        """Return log p(r) (n_items,), centred, without the clicks of these queries."""
        values = self._preference.values
        if self._preference.counts_pairs:
            right = self._pairs.right.take(left_out)
            # A query with several right rows has at least one click on each, however they were
            # counted; a weight is how many clicks there are, which they share.
            shares = np.maximum(self._pairs.weights[left_out] / right.counts, 1)
            own = np.bincount(right.items, np.repeat(shares, right.counts), minlength=len(values))
            values = np.maximum(values - own, 0)
        logs = np.log1p(values / self._preference.prior.added)
        return np.asarray(logs - logs.mean())


def _best_weight(merits: Values, weights: Values) -> float:
    """Return the best of WEIGHTS by the merits (n_weights, n_queries) that they give.

    weights: (n_queries,).
    """
    shares = weights / weights.sum()
    best = int((merits @ shares).argmax())
    # No weight is 0 by chance, so the best one has to lead that of no prior by a standard error.
    gains = merits[best] - merits[0]
    mean = float(shares @ gains)
    error = float(shares**2 @ (gains - mean) ** 2) ** 0.5
    return WEIGHTS[best] if mean > error else 0.0


def _shifted(trials: Sequence[Trial], numbers: Values) -> list[Trial]:
    """Return trials whose biases have these numbers (n_items,) subtracted."""
    # Trials with a gate share the biases of those without, by which `search` knows duplicates.
    distinct = {id(trial.bias): trial.bias for trial in trials}
    moved = {
        identity: np.asarray(bias - numbers, np.float32) for identity, bias in distinct.items()
    }
    return [trial._replace(bias=moved[id(trial.bias)]) for trial in trials]
