"""Trials of many methods and parameters on one gallery.

Also the share of the corrected answers that a number of candidates misses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.correction.banks.bank import QueryBank, Vectors
from milvus_hubness.correction.estimators import (
    CSLS,
    NNN,
    Blend,
    DistributionNormalization,
    DualBankSinkhorn,
    DualInvertedSoftmax,
    Estimator,
    InvertedSoftmax,
    RelativeNNN,
    Sinkhorn,
)
from milvus_hubness.correction.estimators.base import (
    UNLIKE_BY_CHANCE,
    FitInputs,
    FittedBias,
    known_to_halves,
    require_target_bank,
    score_spread,
    split_in_half,
)
from milvus_hubness.correction.estimators.sinkhorn import (
    NEIGHBORS,
    fit_together,
    neighbors_for,
)
from milvus_hubness.correction.estimators.steps import AllScores
from milvus_hubness.correction.kernels import topk
from milvus_hubness.correction.kernels.primitives import TopK
from milvus_hubness.correction.kernels.rows import with_column
from milvus_hubness.correction.kernels.scores import (
    as_array,
    as_scores,
    at_columns,
    largest,
    tiles_of_scores,
)
from milvus_hubness.correction.rerank import DynamicGate
from milvus_hubness.errors import InvalidInput
from milvus_hubness.quality.labelled import LabelledQueries
from milvus_hubness.quality.measures import DEPTH
from milvus_hubness.quality.outcomes import Outcome, assess
from milvus_hubness.quality.retrieval import R_AT_1, Measure
from milvus_hubness.quality.right_items import RightItems

LADDER = (50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 16_384)
"""Numbers of candidates to try. Milvus answers a search with at most the last of them."""


def raw_ranks(queries: Vectors, items: Vectors, biases: Vectors) -> npt.NDArray[np.int64]:
    """Return the raw rank, from 1, of each item of a query's exact corrected top 10, as (m, 10).

    Ties count in the item's favour. Memory: a tile of at least one row of scores.
    """
    depth = min(DEPTH, len(items))
    ranks = np.empty((len(queries), depth), np.int64)
    for rows, scores in tiles_of_scores(queries, items):
        _, best = largest(scores - as_scores(biases, scores), depth)
        raw_scores = at_columns(scores, best)

        # One column at a time: a comparison with all ten would need ten times the tile's memory.
        for nth, column in enumerate(raw_scores.T):
            higher_counts = (scores > column[:, None]).sum(1)
            ranks[rows, nth] = as_array(higher_counts + 1)
    return ranks


def missed_share(ranks: npt.ArrayLike, candidates: int) -> float:
    """Return the share of corrected answers whose raw rank is beyond that many candidates."""
    return float((np.asarray(ranks) > candidates).mean())


def enough_candidates(ranks: npt.ArrayLike, allowed: float, ladder: Sequence[int] = LADDER) -> int:
    """Return the least number of `ladder` that misses at most `allowed`; its last if none does."""
    return next((count for count in ladder if missed_share(ranks, count) <= allowed), ladder[-1])


METHODS = 6
"""Number of lists that `_by_method` yields, for the progress."""

KS = (2, 8, 32, 128, 512)
"""The k of NNN and CSLS."""
ALPHAS = tuple(step / 8 for step in range(1, 13))
"""The α of NNN; ½ is CSLS."""
RELATIVE_KS = (8, 32)
"""The k of RelativeNNN. The first is that of the default Blend."""
TEMPERATURES = (0.125, 0.25, 0.5, 1.0)
"""τ of InvertedSoftmax and Sinkhorn, as shares of the spread of scores."""
TARGET_TEMPERATURES = (0.5, 2.0, 8.0, 25.0)
"""τ of the target bank's side of DualInvertedSoftmax, as shares of the spread of scores."""
LAMS = (0.25, 0.5, 0.75, 1.0)
"""The λ of DistributionNormalization."""
BLENDED = 0.375
"""The temperature of Sinkhorn in the default Blend."""
STRENGTHS = (0.5, 0.75, 1.0)
"""Factors on biases that have no factor among their own parameters."""

Values = npt.NDArray[np.float64]


class Trial(NamedTuple):
    """An estimator at one strength, with the bias and the gate to search with."""

    estimator: Estimator
    strength: float

    bias: Vectors
    """(n_items,), already times the strength."""

    gate: int | None = None
    """The k of `DynamicGate`; None corrects every query."""

    activated: npt.NDArray[np.bool_] | None = None
    """(n_items,) whether the gate corrects queries with this raw best item; None without one."""


def sweep(
    bank: QueryBank,
    gallery: Vectors,
    target_bank: QueryBank | None = None,
    *,
    in_full: bool = False,
    progress: Progress = silent,
) -> list[Trial]:
    """Return the trials on a gallery (n, d): all with a gate, then all without one.

    Near copies of a bank with groups have the weight of one query, as in `Estimator.fit`.
    Those of Blend come last, with full strength at the very end. in_full: try Blend without the
    agreement of the bank's halves too, as `full_trial` finds it. NNN runs over `ALPHAS` and over
    `KS` up to |bank|; ½ of a mean is CSLS. Sinkhorn uses nearest pairs beyond `DENSE_SCORES`
    scores. Trials with a gate share the biases of those without. All share one top-k pass in each
    direction, and the trials of a method their passes over all scores. Raises InvalidInput if all
    items score alike.
    """
    queries = bank
    bank = queries.condensed
    unit = score_spread(bank, gallery)
    if not unit:
        raise InvalidInput("all gallery items score alike, so there is no ranking to correct")
    targets = None
    if target_bank is not None:
        targets = require_target_bank(bank, target_bank, "tune", as_queries=True)

    searched = _SearchedBank.of(bank, gallery)
    half_banks = searched.halves(queries, gallery)
    trials: list[Trial] = []
    methods = _by_method(searched, half_banks, gallery, target_bank, targets, unit, in_full=in_full)
    for done, of_method in enumerate(methods, 1):
        trials += of_method
        progress("trying methods", done, METHODS)

    activated = np.isin(np.arange(len(gallery)), searched.nearest_items.indices[:, 0])
    gated = [trial._replace(gate=1, activated=activated) for trial in trials]
    # `tune` takes the last trial as the default, which has no gate.
    return gated + trials


def search(
    trials: Sequence[Trial],
    queries: Vectors,
    gallery: Vectors,
    right: RightItems | None = None,
    measure: Measure = R_AT_1,
) -> Outcome:
    """Return the outcome of the raw search, then of each trial, as `assess` does."""
    # A gated trial has the very array of its trial without a gate, so identity finds most
    # duplicates, and each bias is searched once.
    distinct = {id(trial.bias): trial.bias for trial in trials}
    no_bias = np.zeros(len(gallery), np.float32)
    biases = [no_bias, *distinct.values()]
    of_distinct = assess(queries, gallery, biases, right, measure)

    row_of = {identity: row for row, identity in enumerate(distinct, 1)}
    rows = np.array([0, *(row_of[id(trial.bias)] for trial in trials)])
    return of_distinct.of_biases(rows).gated([trial.activated for trial in trials])


def search_labelled(
    trials: Sequence[Trial], labelled: LabelledQueries, gallery: Vectors
) -> Outcome:
    """Return the outcome of labelled queries, as `search` does."""
    return search(trials, labelled.queries, gallery, labelled.right, labelled.measure)


def merits_of(outcome: Outcome, measure: Measure) -> Values:
    """Return by what methods are picked, (n_biases, n_queries)."""
    # The mean reciprocal rank follows R@k with less noise.
    if measure.name == "R":
        return np.asarray(1 / outcome.ranks, np.float64)
    return outcome.values


def activated_by(gate: int | None, bank: Vectors, items: Vectors) -> npt.NDArray[np.bool_] | None:
    """Return (n,) whether a gate with this k lets each item through; None without a gate.

    All vectors are reduced.
    """
    return None if gate is None else DynamicGate(gate).activated(bank, items)


class _SearchedBank(NamedTuple):
    """The bank, or one of its halves, and the items that its queries find."""

    bank: QueryBank

    nearest_items: TopK
    """(m, at most `NEIGHBORS`), best first."""

    @classmethod
    def of(cls, bank: QueryBank, gallery: Vectors) -> _SearchedBank:
        return cls(bank, topk(bank.vectors, gallery, min(NEIGHBORS, len(gallery))))

    def halves(self, queries: QueryBank, gallery: Vectors) -> list[_SearchedBank]:
        """Return the halves of the queries with which `FittedBias.with_agreement` measures the
        agreement of this bank, which is theirs without near copies; none of a single query.
        """
        if len(self.bank) == 1:
            return []
        halves = [(queries.take(numbers), numbers) for numbers in split_in_half(len(queries))]
        # Near copies may be in both halves, so that a group has another mean in each.
        if queries.groups is not None:
            return [_SearchedBank.of(half.condensed, gallery) for half, _ in halves]
        return [
            _SearchedBank(
                half,
                TopK(self.nearest_items.values[numbers], self.nearest_items.indices[numbers]),
            )
            for half, numbers in halves
        ]


class Agreeing(NamedTuple):
    """What decides how far two halves of a bank agree on biases."""

    halves: Sequence[Vectors]
    """Their queries (m, d), near copies as one; none of a single query."""

    gallery: Vectors

    def trials(
        self, estimator: Estimator, biases: Sequence[Vectors], strengths: Sequence[float]
    ) -> list[Trial]:
        """Return trials of biases times their agreement, as `FittedBias.with_agreement` has it.

        biases: of the whole bank, then of its halves.
        """
        # Without halves nothing shows how much of the biases is noise, so none is applied.
        agreement = 0.0
        if self.halves:
            # As in a fit: the strength of the method is this number.
            known = known_to_halves(
                biases[1:], self.halves, self.gallery, by_chance=UNLIKE_BY_CHANCE
            )
            agreement = known.agreement
        agreed = replace(estimator, agreement=agreement)
        return _at(agreed, np.float32(agreement) * biases[0], strengths)


def _by_method(
    whole: _SearchedBank,
    half_banks: Sequence[_SearchedBank],
    gallery: Vectors,
    target_bank: QueryBank | None,
    targets: Vectors | None,
    unit: float,
    *,
    in_full: bool,
) -> Iterator[list[Trial]]:
    """Yield the trials of each of `METHODS` methods.

    half_banks: of the whole bank. targets: the target bank as queries. unit: the spread of scores.
    """
    bank = whole.bank
    ks = [k for k in KS if k <= len(bank)] or [1]
    nearest_queries = topk(gallery, bank.vectors, min(max(ks[-1], NEIGHBORS), len(bank)))
    yield _mean_trials(ks, nearest_queries.values)

    # Both halves average as many scores, as many as the smaller one has.
    smallest = min((len(half.bank) for half in half_banks), default=0)
    relative = [
        _relative_biases(whole, gallery, len(bank)),
        *(_relative_biases(half, gallery, smallest) for half in half_banks),
    ]
    agreeing = Agreeing([half.bank.vectors for half in half_banks], gallery)
    yield _relative_trials(relative, len(bank), agreeing)

    yield _softmax_trials(gallery, bank.vectors, targets, unit)
    yield _normalization_trials(bank, gallery)

    # The first columns only: `_mean_trials` may need more neighbours than Sinkhorn reads.
    near_queries = TopK(*(columns[:, :NEIGHBORS] for columns in nearest_queries))
    neighbors = neighbors_for(len(bank) * len(gallery))
    fits, blended = _sinkhorn_fits(whole, gallery, near_queries, neighbors, unit)
    if target_bank is not None:
        duals = _dual_fits(bank, gallery, target_bank, unit)
        fits = [fit for pair in zip(fits, duals, strict=True) for fit in pair]
    yield [
        # A dual fit has biases of the target bank too, after those of the gallery.
        trial
        for fitted, bias in fits
        for trial in _at(fitted.estimator, bias[: len(gallery)], STRENGTHS)
    ]

    # The halves are fitted in the whole bank's way, so that all three are one method.
    of_half_banks = [_sinkhorn_of_half(half, gallery, neighbors) for half in half_banks]
    sinkhorns = [blended, *of_half_banks]
    yield _blend_trials(relative, sinkhorns, len(bank), agreeing, in_full=in_full)


def _mean_trials(ks: Sequence[int], nearest_scores: Vectors) -> list[Trial]:
    """Return NNN of every k and α: α times the mean of an item's k largest scores.

    nearest_scores: (n_items, ≥ k), best first.
    """
    sums = nearest_scores.cumsum(1, dtype=np.float64)
    trials = []
    for k in ks:
        mean = sums[:, k - 1] / k
        for alpha in ALPHAS:
            estimator = CSLS(k) if alpha == 0.5 else NNN(k, alpha)
            trials.append(Trial(estimator, 1.0, (alpha * mean).astype(np.float32)))
    return trials


def _relative_biases(searched: _SearchedBank, gallery: Vectors, largest_k: int) -> list[Vectors]:
    """Return the biases of RelativeNNN for each of `RELATIVE_KS`, at most with `largest_k`."""
    estimator = RelativeNNN()
    best_scores = searched.nearest_items.values[:, : estimator.finds]
    potentials = (-estimator.discount * best_scores.mean(1, dtype=np.float64)).astype(np.float32)

    # One more column, of ones, adds the query's potential to its score: top-k sees one product.
    relative = with_column(searched.bank.vectors, potentials)
    values = topk(with_column(gallery, 1), relative, min(max(RELATIVE_KS), largest_k)).values
    return [values[:, :k].mean(1, dtype=np.float64).astype(np.float32) for k in RELATIVE_KS]


def _relative_trials(
    relative: Sequence[list[Vectors]], bank_size: int, agreeing: Agreeing
) -> list[Trial]:
    """Return RelativeNNN of every k. relative: its biases, of the whole bank and of its halves."""
    trials = []
    for k, *biases in zip(RELATIVE_KS, *relative, strict=True):
        estimator = RelativeNNN(k).clamped(bank_size)
        agreed = replace(estimator, strength="agreement")
        trials += agreeing.trials(agreed, biases, (1.0,))
    return trials


def _softmax_trials(
    gallery: Vectors, bank: Vectors, targets: Vectors | None, unit: float
) -> list[Trial]:
    """Return InvertedSoftmax and, with targets, DualInvertedSoftmax, at every temperature."""
    by_bank = _logsumexps(gallery, bank, TEMPERATURES, unit)
    trials = []
    for temperature, bias in by_bank.items():
        softmax = InvertedSoftmax(temperature * unit, temperature=temperature)
        trials += _at(softmax, bias, STRENGTHS)
    if targets is None:
        return trials

    # The dual bias is a mean of both sides, weighted by the temperature of the other side.
    by_targets = _logsumexps(gallery, targets, TARGET_TEMPERATURES, unit)
    for target_temperature, target_bias in by_targets.items():
        for temperature, bias in by_bank.items():
            share = np.float32(target_temperature / (temperature + target_temperature))
            dual = DualInvertedSoftmax(
                temperature * unit, target_temperature * unit, temperature, target_temperature
            )
            trials.append(Trial(dual, 1.0, share * bias + (1 - share) * target_bias))
    return trials


def _logsumexps(
    gallery: Vectors, queries: Vectors, temperatures: Sequence[float], unit: float
) -> dict[float, Vectors]:
    """Return the log-sum-exp of each item's scores for each temperature, in one pass."""
    steps = AllScores(gallery, queries, scores="recomputed")
    no_potentials = np.zeros((len(temperatures), len(queries)))
    biases = -steps.from_items(no_potentials, unit * np.array(temperatures))
    return dict(zip(temperatures, biases, strict=True))


def _normalization_trials(bank: QueryBank, gallery: Vectors) -> list[Trial]:
    trials = []
    for lam in LAMS:
        fitted = DistributionNormalization(lam).fit(bank)
        trials.append(Trial(fitted.estimator, 1.0, fitted.bias(gallery)))
    return trials


Fit = tuple[FittedBias, Vectors]
"""A fit, and its biases of the items."""


def _sinkhorn_fits(
    searched: _SearchedBank,
    gallery: Vectors,
    near_queries: TopK,
    neighbors: int | None,
    unit: float,
) -> tuple[list[Fit], Fit]:
    """Return the fits at every temperature, and that of the default Blend."""
    # The blend's fit goes along with the others: a further temperature costs no pass over scores.
    sinkhorns = [
        Sinkhorn(temperature * unit, temperature=temperature, neighbors=neighbors)
        for temperature in (*TEMPERATURES, BLENDED)
    ]
    inputs = FitInputs(gallery, None, None, searched.bank)
    nearest = (near_queries, searched.nearest_items)
    *fits, of_blend = fit_together(sinkhorns, searched.bank, inputs, nearest)
    return fits, of_blend


def _dual_fits(bank: QueryBank, gallery: Vectors, target_bank: QueryBank, unit: float) -> list[Fit]:
    neighbors = neighbors_for(len(bank) * (len(gallery) + len(target_bank)))
    duals = [
        DualBankSinkhorn(temperature * unit, temperature=temperature, neighbors=neighbors)
        for temperature in TEMPERATURES
    ]
    return fit_together(duals, bank, FitInputs(gallery, target_bank, None, bank))


def _sinkhorn_of_half(half: _SearchedBank, gallery: Vectors, neighbors: int | None) -> Fit:
    """Return the fit of the default Blend's Sinkhorn on a half of the bank."""
    near_queries = topk(gallery, half.bank.vectors, min(NEIGHBORS, len(half.bank)))
    # Measured on the half: its scores have a spread of their own, and with it a τ.
    sinkhorn = Sinkhorn(temperature=BLENDED, neighbors=neighbors).measured(half.bank, gallery)
    inputs = FitInputs(gallery, None, None, half.bank)
    [fit] = fit_together([sinkhorn], half.bank, inputs, (near_queries, half.nearest_items))
    return fit


def _blend_trials(
    relative: Sequence[list[Vectors]],
    sinkhorns: Sequence[Fit],
    bank_size: int,
    agreeing: Agreeing,
    *,
    in_full: bool,
) -> list[Trial]:
    """Return the default Blend at every strength, before it also without the agreement if `in_full`.

    relative: the biases of RelativeNNN, and sinkhorns:
    the fits, of the whole bank and of its halves.
    """
    mixes = [
        np.float32(0.5) * (of_relative[0] + of_sinkhorn)
        for of_relative, (_, of_sinkhorn) in zip(relative, sinkhorns, strict=True)
    ]
    relative_nnn = RelativeNNN(RELATIVE_KS[0]).clamped(bank_size)
    blend = Blend((relative_nnn, sinkhorns[0][0].estimator))
    full = _at(replace(blend, strength=1.0), mixes[0], STRENGTHS) if in_full else []
    return full + agreeing.trials(blend, mixes, STRENGTHS)


def full_trial(trials: Sequence[Trial]) -> Trial:
    """Return the default Blend without the agreement, of a sweep in full."""
    # It comes just before the three that have it.
    return trials[-1 - len(STRENGTHS)]


def _at(estimator: Estimator, bias: Vectors, strengths: Sequence[float]) -> list[Trial]:
    return [Trial(estimator, strength, np.float32(strength) * bias) for strength in strengths]
