"""Trials of many methods and parameters on one gallery, and the corrected answers that candidates miss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks.bank import QueryBank, Vectors
from milvus_hubness.errors import InvalidInput
from milvus_hubness.estimators import (
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
from milvus_hubness.estimators.base import FittedBias, require_target_bank, score_spread
from milvus_hubness.kernels import logsumexp, topk
from milvus_hubness.operations.progress import Progress, silent
from milvus_hubness.quality.measures import DEPTH, Outcome, assess, score_tiles
from milvus_hubness.rerank import DynamicGate

LADDER = (50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 16_384)
"""Numbers of candidates to try. Milvus answers a search with at most the last of them."""


def raw_places(queries: Vectors, items: Vectors, biases: Vectors) -> npt.NDArray[np.int64]:
    """Return (m, 10) the raw rank, from 1, of each item of a query's exact corrected top 10; ties count in its favour.
    Memory: a tile of at least one row of scores."""
    depth = min(DEPTH, len(items))
    places = np.empty((len(queries), depth), np.int64)
    for part, scores in score_tiles(queries, items):
        corrected = scores - scores.new_tensor(biases)
        own = scores.gather(1, corrected.topk(depth, dim=1).indices)
        for rank, column in enumerate(own.T):
            places[part, rank] = ((scores > column[:, None]).sum(1) + 1).cpu().numpy()
    return places


def missed_share(places: npt.ArrayLike, candidates: int) -> float:
    """Return the share of places beyond that many candidates."""
    return float((np.asarray(places) > candidates).mean())


def enough_candidates(places: npt.ArrayLike, allowed: float) -> int:
    """Return the least number of LADDER that misses at most `allowed`; its last if none does."""
    return next((count for count in LADDER if missed_share(places, count) <= allowed), LADDER[-1])


ALPHAS = tuple(step / 8 for step in range(1, 13))
KS = (2, 8, 32, 128, 512)
TEMPERATURES = (0.125, 0.25, 0.5, 1.0)
TARGET_TEMPERATURES = (0.5, 2.0, 8.0, 25.0)
LAMS = (0.25, 0.5, 0.75, 1.0)
STRENGTHS = (0.5, 0.75, 1.0)
DENSE_SCORES = 20_000_000
NEIGHBORS = 64
ITEMS_AT_ONCE = 16_384

Answers = Sequence[npt.NDArray[np.int64]]
"""The numbers of the positives of each query."""


class Trial(NamedTuple):
    """An estimator, the strength of its bias, and the bias (n_items,) times that strength.

    gate, gate_targets: as the k and k_targets of `DynamicGate`. activated: (n_items,) of that gate; None without one.
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
    bank: QueryBank, gallery: Vectors, target_bank: QueryBank | None = None, *, progress: Progress = silent
) -> list[Trial]:
    """Return the trials on a gallery (n, d): all with each gate, which share their biases, then all without a gate.
    Those of Blend come last, with full strength at the very end. NNN runs over `ALPHAS` and over `KS` up to |bank|; ½
    of a mean is CSLS. Sinkhorn uses nearest pairs beyond `DENSE_SCORES` scores. Raises InvalidInput if all items score
    alike."""
    unit, targets = score_spread(bank, gallery), None
    if not unit:
        raise InvalidInput("all gallery items score alike, so there is no ranking to correct")
    if target_bank is not None:
        targets = require_target_bank(bank, target_bank, "tune", as_queries=True)
    best = topk(bank.vectors, gallery, min(RelativeNNN().finds, len(gallery)))
    finds = best.values.mean(1, dtype=np.float64)
    trials = list(_from_one_pass(bank, gallery))
    for k in (8, 32):
        relative = RelativeNNN(k, strength="agreement").clamped(len(bank))
        trials += _at(relative.with_finds(bank, finds, unit).with_agreement(gallery, None), gallery, (1.0,))
    trials += _from_sums(bank, gallery, targets, unit)
    others = list(_fitted_one_by_one(bank, gallery, target_bank))
    for done, (estimator, strengths) in enumerate(others, 1):
        trials += _at(estimator.fit(bank, gallery=gallery, target_bank=target_bank), gallery, strengths)
        progress("trying methods", done, len(others))
    activated = np.isin(np.arange(len(gallery)), best.indices[:, 0])
    gated = [trial._replace(gate=1, activated=activated) for trial in trials]
    if targets is not None:
        either = activated | DynamicGate().activated(targets, gallery)
        gated += [trial._replace(gate=1, gate_targets=1, activated=either) for trial in trials]
    return gated + trials


def search(trials: Sequence[Trial], queries: Vectors, gallery: Vectors, positives: Answers | None = None) -> Outcome:
    """Return the outcome of the raw search, then of each trial, as `assess` does, which sees equal biases once."""
    distinct = {id(trial.bias): trial.bias for trial in trials}
    plain = assess(queries, gallery, [np.zeros(len(gallery), np.float32), *distinct.values()], positives)
    row_of = {key: row for row, key in enumerate(distinct, 1)}
    rows = np.array([0, *(row_of[id(trial.bias)] for trial in trials)])
    return Outcome(plain.ranks[rows], plain.retrieved[rows]).gated([trial.activated for trial in trials])


def activated_by(
    gates: tuple[int | None, int | None], bank: Vectors, items: Vectors, targets: Vectors | None
) -> npt.NDArray[np.bool_] | None:
    """Return (n,) whether a gate lets each item through; None without a gate. All vectors are reduced; targets (t, d)
    to queries."""
    gate, gate_targets = gates
    if gate is None:
        return None
    return DynamicGate(gate, gate_targets).activated(bank, items, targets)


def _at(fitted: FittedBias, gallery: Vectors, strengths: Sequence[float]) -> Iterator[Trial]:
    bias = fitted.bias(gallery)
    return (Trial(fitted.estimator, strength, np.float32(strength) * bias) for strength in strengths)


def _from_one_pass(bank: QueryBank, gallery: Vectors) -> Iterator[Trial]:
    ks = np.array([k for k in KS if k <= len(bank)] or [1])
    means: npt.NDArray[np.float64] = np.empty((len(ks), len(gallery)))
    for start in range(0, len(gallery), ITEMS_AT_ONCE):
        part = slice(start, start + ITEMS_AT_ONCE)
        values = topk(gallery[part], bank.vectors, int(ks[-1])).values
        means[:, part] = values.cumsum(1, dtype=np.float64)[:, ks - 1].T / ks[:, None]
    for k, mean in zip(ks.tolist(), means, strict=True):
        for alpha in ALPHAS:
            same: Estimator = CSLS(k) if alpha == 0.5 else NNN(k, alpha)
            yield Trial(same, 1.0, (alpha * mean).astype(np.float32))


def _from_sums(bank: QueryBank, gallery: Vectors, targets: Vectors | None, unit: float) -> Iterator[Trial]:
    """Yield the inverted softmaxes from one log-sum-exp for each temperature. unit: the spread of scores."""
    sums = {one: logsumexp(gallery, bank.vectors, one * unit) for one in TEMPERATURES}
    for one, bias in sums.items():
        estimator = InvertedSoftmax(one * unit, temperature=one)
        yield from (Trial(estimator, strength, np.float32(strength) * bias) for strength in STRENGTHS)
    if targets is None:
        return
    for other in TARGET_TEMPERATURES:
        of_targets = logsumexp(gallery, targets, other * unit)
        for one, of_queries in sums.items():
            share = np.float32(other / (one + other))
            dual = DualInvertedSoftmax(one * unit, other * unit, one, other)
            yield Trial(dual, 1.0, share * of_queries + (1 - share) * of_targets)


def _fitted_one_by_one(
    bank: QueryBank, gallery: Vectors, target_bank: QueryBank | None
) -> Iterator[tuple[Estimator, tuple[float, ...]]]:
    neighbors = _neighbors(len(bank) * len(gallery))
    for lam in LAMS:
        yield DistributionNormalization(lam), (1.0,)
    for temperature in TEMPERATURES:
        yield Sinkhorn(temperature=temperature, neighbors=neighbors), STRENGTHS
        if target_bank is not None:
            dual = _neighbors(len(bank) * (len(gallery) + len(target_bank)))
            yield DualBankSinkhorn(temperature=temperature, neighbors=dual), STRENGTHS
    blend = Blend((RelativeNNN(8), Sinkhorn(temperature=0.375, neighbors=neighbors)))
    yield blend.clamped(len(bank)), STRENGTHS


def _neighbors(scores: int) -> int | None:
    return None if scores <= DENSE_SCORES else NEIGHBORS
