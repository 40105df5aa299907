"""Trials of many methods and parameters on one gallery, and the corrected answers that candidates miss."""

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
    FitInputs,
    correlation,
    require_target_bank,
    score_spread,
    split_in_half,
)
from milvus_hubness.correction.estimators.sinkhorn import fit_together
from milvus_hubness.correction.estimators.steps import AllScores
from milvus_hubness.correction.kernels import topk
from milvus_hubness.correction.kernels.primitives import TopK
from milvus_hubness.correction.rerank import DynamicGate
from milvus_hubness.errors import InvalidInput
from milvus_hubness.quality.measures import DEPTH, Outcome, assess, score_tensors

LADDER = (50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 16_384)
"""Numbers of candidates to try. Milvus answers a search with at most the last of them."""


def raw_places(queries: Vectors, items: Vectors, biases: Vectors) -> npt.NDArray[np.int64]:
    """Return (m, 10) the raw rank, from 1, of each item of a query's exact corrected top 10; ties count in its favour.
    Memory: a tile of at least one row of scores.
    """
    depth = min(DEPTH, len(items))
    places = np.empty((len(queries), depth), np.int64)
    for part, scores in score_tensors(queries, items):
        corrected = scores - scores.new_tensor(biases)
        own = scores.gather(1, corrected.topk(depth, dim=1).indices)
        for rank, column in enumerate(own.T):
            places[part, rank] = ((scores > column[:, None]).sum(1) + 1).cpu().numpy()
    return places


def missed_share(places: npt.ArrayLike, candidates: int) -> float:
    """Return the share of places beyond that many candidates."""
    return float((np.asarray(places) > candidates).mean())


def enough_candidates(places: npt.ArrayLike, allowed: float, ladder: Sequence[int] = LADDER) -> int:
    """Return the least number of `ladder` that misses at most `allowed`; its last if none does."""
    return next((count for count in ladder if missed_share(places, count) <= allowed), ladder[-1])


ALPHAS = tuple(step / 8 for step in range(1, 13))
KS = (2, 8, 32, 128, 512)
TEMPERATURES = (0.125, 0.25, 0.5, 1.0)
BLENDED = 0.375
TARGET_TEMPERATURES = (0.5, 2.0, 8.0, 25.0)
LAMS = (0.25, 0.5, 0.75, 1.0)
STRENGTHS = (0.5, 0.75, 1.0)
RELATIVE_KS = (8, 32)
METHODS = 6
DENSE_SCORES = 20_000_000
NEIGHBORS = 64

Answers = Sequence[npt.NDArray[np.int64]]
"""The numbers of the positives of each query."""


class Trial(NamedTuple):
    """An estimator, the strength of its bias, and the bias (n_items,) times that strength.

    gate, gate_targets: as the k and k_targets of `DynamicGate`. activated: (n_items,) of that gate;
    None without one.
    """

    estimator: Estimator
    strength: float
    bias: Vectors
    gate: int | None = None
    gate_targets: int | None = None
    activated: npt.NDArray[np.bool_] | None = None

    @property
    def form(self) -> tuple[int | None, int | None]:
        return self.gate, self.gate_targets


def sweep(
    bank: QueryBank,
    gallery: Vectors,
    target_bank: QueryBank | None = None,
    *,
    progress: Progress = silent,
) -> list[Trial]:
    """Return the trials on a gallery (n, d): all with each gate, which share their biases, then all
    without a gate. Those of Blend come last, with full strength at the very end. NNN runs over
    `ALPHAS` and over `KS` up to |bank|; ½ of a mean is CSLS. Sinkhorn uses nearest pairs beyond
    `DENSE_SCORES` scores. All share one top-k pass in each direction, and the trials of a method
    their passes over all scores. Raises InvalidInput if all items score alike.
    """
    unit = score_spread(bank, gallery)
    if not unit:
        raise InvalidInput("all gallery items score alike, so there is no ranking to correct")
    best = topk(bank.vectors, gallery, min(NEIGHBORS, len(gallery)))
    trials: list[Trial] = []
    for done, of_method in enumerate(_by_method(bank, gallery, target_bank, best, unit), 1):
        trials += of_method
        progress("trying methods", done, METHODS)
    activated = np.isin(np.arange(len(gallery)), best.indices[:, 0])
    gated = [trial._replace(gate=1, activated=activated) for trial in trials]
    if target_bank is not None:
        targets = require_target_bank(bank, target_bank, "tune", as_queries=True)
        either = activated | DynamicGate().activated(targets, gallery)
        gated += [trial._replace(gate=1, gate_targets=1, activated=either) for trial in trials]
    return gated + trials


def search(
    trials: Sequence[Trial], queries: Vectors, gallery: Vectors, positives: Answers | None = None
) -> Outcome:
    """Return the outcome of the raw search, then of each trial, as `assess` does, which sees equal
    biases once.
    """
    distinct = {id(trial.bias): trial.bias for trial in trials}
    plain = assess(
        queries, gallery, [np.zeros(len(gallery), np.float32), *distinct.values()], positives
    )
    row_of = {key: row for row, key in enumerate(distinct, 1)}
    rows = np.array([0, *(row_of[id(trial.bias)] for trial in trials)])
    return Outcome(plain.ranks[rows], plain.retrieved[rows]).gated(
        [trial.activated for trial in trials]
    )


def activated_by(
    gates: tuple[int | None, int | None], bank: Vectors, items: Vectors, targets: Vectors | None
) -> npt.NDArray[np.bool_] | None:
    """Return (n,) whether a gate lets each item through; None without a gate.

    All vectors are reduced; targets (t, d) to queries.
    """
    gate, gate_targets = gates
    if gate is None:
        return None
    return DynamicGate(gate, gate_targets).activated(bank, items, targets)


def _by_method(
    bank: QueryBank, gallery: Vectors, target_bank: QueryBank | None, best: TopK, unit: float
) -> Iterator[list[Trial]]:
    """Yield the trials of each of `METHODS` kinds.

    best: the nearest items of each bank query. unit: the spread of scores. An agreement is that of
    the biases from two halves of the bank, as `FittedBias.with_agreement` has it.
    """
    m = len(bank)
    ks = [k for k in KS if k <= len(bank)] or [1]
    nearest = topk(gallery, bank.vectors, min(max(ks[-1], NEIGHBORS), m))
    means = (
        nearest.values.cumsum(1, dtype=np.float64)[:, np.array(ks) - 1].T / np.array(ks)[:, None]
    )
    kinds = [(CSLS(k) if alpha == 0.5 else NNN(k, alpha), alpha * mean)
             for k, mean in zip(ks, means, strict=True) for alpha in ALPHAS]  # fmt: skip
    yield [Trial(kind, 1.0, bias.astype(np.float32)) for kind, bias in kinds]

    parts = split_in_half(m) if m > 1 else []
    banks = [bank, *(QueryBank(bank.vectors[part]) for part in parts)]
    bests = [best, *(TopK(best.values[part], best.indices[part]) for part in parts)]
    relative = [_relative_biases(*part, gallery) for part in zip(banks, bests, strict=True)]
    own = [RelativeNNN(k).clamped(m) for k in RELATIVE_KS]
    several = zip(own, *relative, strict=True)
    yield [
        _agreed(replace(one, strength="agreement"), biases, (1.0,))[0] for one, *biases in several
    ]

    sums = _logsumexps(gallery, bank.vectors, TEMPERATURES, unit)
    softmaxes = [(InvertedSoftmax(one * unit, temperature=one), bias) for one, bias in sums.items()]
    trials = [trial for softmax, bias in softmaxes for trial in _at(softmax, bias, STRENGTHS)]
    if target_bank is not None:
        targets = require_target_bank(bank, target_bank, "tune", as_queries=True)
        for other, of_targets in _logsumexps(gallery, targets, TARGET_TEMPERATURES, unit).items():
            for one, of_queries in sums.items():
                share = np.float32(other / (one + other))
                dual = DualInvertedSoftmax(one * unit, other * unit, one, other)
                trials.append(Trial(dual, 1.0, share * of_queries + (1 - share) * of_targets))
    yield trials
    flat = [DistributionNormalization(lam).fit(bank) for lam in LAMS]
    yield [Trial(fitted.estimator, 1.0, fitted.bias(gallery)) for fitted in flat]

    blended = Sinkhorn(temperature=BLENDED, neighbors=_neighbors(m * len(gallery)))
    inputs = FitInputs(gallery, target_bank, None)
    near = TopK(*(part[:, :NEIGHBORS] for part in nearest))
    sinkhorns = [
        replace(blended, tau=one * unit, temperature=one) for one in (*TEMPERATURES, BLENDED)
    ]
    *fits, whole = fit_together(sinkhorns, bank, inputs, (near, best))
    if target_bank is not None:
        neighbors = _neighbors(m * (len(gallery) + len(target_bank)))
        duals = [
            DualBankSinkhorn(one * unit, temperature=one, neighbors=neighbors)
            for one in TEMPERATURES
        ]
        fits = [
            fit
            for pair in zip(fits, fit_together(duals, bank, inputs), strict=True)
            for fit in pair
        ]
    yield [
        trial for fit, bias in fits for trial in _at(fit.estimator, bias[: len(gallery)], STRENGTHS)
    ]
    fits = [whole]
    for half, its_best in zip(banks[1:], bests[1:], strict=True):
        near = topk(gallery, half.vectors, min(NEIGHBORS, len(half)))
        fits += fit_together([blended.measured(half, gallery)], half, inputs, (near, its_best))
    mixes = [
        np.float32(0.5) * (biases[0] + bias)
        for biases, (_, bias) in zip(relative, fits, strict=True)
    ]
    yield _agreed(Blend((own[0], whole[0].estimator)), mixes, STRENGTHS)


def _at(estimator: Estimator, bias: Vectors, strengths: Sequence[float]) -> list[Trial]:
    return [Trial(estimator, strength, np.float32(strength) * bias) for strength in strengths]


def _agreed(
    estimator: Estimator, biases: Sequence[Vectors], strengths: Sequence[float]
) -> list[Trial]:
    """Return trials of biases times their agreement.

    biases: of the whole bank, then of its halves if it has any.
    """
    agreement = correlation(*biases[1:]) if len(biases) > 1 else 0.0
    return _at(
        replace(estimator, agreement=agreement), np.float32(agreement) * biases[0], strengths
    )


def _relative_biases(bank: QueryBank, best: TopK, gallery: Vectors) -> list[Vectors]:
    """Return the biases of RelativeNNN for each of `RELATIVE_KS`, from the nearest items of each
    bank query.
    """
    one = RelativeNNN()
    f = (-one.discount * best.values[:, : one.finds].mean(1, dtype=np.float64)).astype(np.float32)
    rows = np.pad(gallery, ((0, 0), (0, 1)), constant_values=1)
    relative = np.hstack([bank.vectors, f[:, None]])
    values = topk(rows, relative, min(max(RELATIVE_KS), len(bank))).values
    return [values[:, :k].mean(1, dtype=np.float64).astype(np.float32) for k in RELATIVE_KS]


def _logsumexps(
    gallery: Vectors, queries: Vectors, temperatures: Sequence[float], unit: float
) -> dict[float, Vectors]:
    """Return the log-sum-exp of each item's scores for each temperature, in one pass over the
    scores.
    """
    steps = AllScores(gallery, queries, scores="recomputed")
    weights = np.zeros((len(temperatures), len(queries)))
    return dict(
        zip(temperatures, -steps.from_items(weights, unit * np.array(temperatures)), strict=True)
    )


def _neighbors(scores: int) -> int | None:
    return None if scores <= DENSE_SCORES else NEIGHBORS
