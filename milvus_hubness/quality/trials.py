"""Trials of many methods and parameters on one gallery, and the corrected answers that candidates miss."""

from __future__ import annotations

from collections.abc import Iterator
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
from milvus_hubness.estimators.base import score_spread
from milvus_hubness.kernels import topk
from milvus_hubness.operations.progress import Progress, silent
from milvus_hubness.quality.measures import DEPTH, score_tiles

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


ALPHAS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
DEEPEST_K = 512
TEMPERATURES = (0.125, 0.25, 0.5, 1.0)
LAMS = (0.25, 0.5, 0.75, 1.0)
TARGET_SHARE = 50
"""Temperature of the target bank, as a multiple of the bank's."""
STRENGTHS = (0.5, 0.75, 1.0)
DENSE_SCORES = 20_000_000
NEIGHBORS = 64
ITEMS_AT_ONCE = 16_384


class Trial(NamedTuple):
    """An estimator, the strength of its bias, and the bias (n_items,) times that strength."""

    estimator: Estimator
    strength: float
    bias: Vectors


def sweep(
    bank: QueryBank, gallery: Vectors, target_bank: QueryBank | None = None, *, progress: Progress = silent
) -> list[Trial]:
    """Return the trials on a gallery (n, d): those of Blend come last, with full strength at the very end. NNN runs
    over `ALPHAS` and, for k, over the powers of two up to 512 and |bank|; ½ of a mean is CSLS. Sinkhorn uses nearest
    pairs beyond `DENSE_SCORES` scores. Raises InvalidInput if all items score alike."""
    if not score_spread(bank, gallery):
        raise InvalidInput("all gallery items score alike, so there is no ranking to correct")
    others = list(_fitted_one_by_one(bank, gallery, target_bank))
    trials = list(_from_one_pass(bank, gallery))
    for done, (estimator, strengths) in enumerate(others, 1):
        fitted = estimator.fit(bank, gallery=gallery, target_bank=target_bank)
        bias = fitted.bias(gallery)
        trials += [Trial(fitted.estimator, strength, np.float32(strength) * bias) for strength in strengths]
        progress("trying methods", done, len(others))
    return trials


def _from_one_pass(bank: QueryBank, gallery: Vectors) -> Iterator[Trial]:
    deepest = min(DEEPEST_K, len(bank))
    ks = 2 ** np.arange(int(np.log2(deepest)) + 1)
    means: npt.NDArray[np.float64] = np.empty((len(ks), len(gallery)))
    for start in range(0, len(gallery), ITEMS_AT_ONCE):
        part = slice(start, start + ITEMS_AT_ONCE)
        values = topk(gallery[part], bank.vectors, deepest).values
        means[:, part] = values.cumsum(1, dtype=np.float64)[:, ks - 1].T / ks[:, None]
    for k, mean in zip(ks.tolist(), means, strict=True):
        for alpha in ALPHAS:
            same: Estimator = CSLS(k) if alpha == 0.5 else NNN(k, alpha)
            yield Trial(same, 1.0, (alpha * mean).astype(np.float32))


def _fitted_one_by_one(
    bank: QueryBank, gallery: Vectors, target_bank: QueryBank | None
) -> Iterator[tuple[Estimator, tuple[float, ...]]]:
    neighbors = _neighbors(len(bank) * len(gallery))
    for lam in LAMS:
        yield DistributionNormalization(lam), (1.0,)
    for k in (8, 32):
        yield RelativeNNN(k, strength="agreement").clamped(len(bank)), (1.0,)
    for temperature in TEMPERATURES:
        yield InvertedSoftmax(temperature=temperature), STRENGTHS
        yield Sinkhorn(temperature=temperature, neighbors=neighbors), STRENGTHS
        if target_bank is not None:
            dual = _neighbors(len(bank) * (len(gallery) + len(target_bank)))
            of_targets = TARGET_SHARE * temperature
            yield DualInvertedSoftmax(temperature_query=temperature, temperature_target=of_targets), STRENGTHS
            yield DualBankSinkhorn(temperature=temperature, neighbors=dual), STRENGTHS
    blend = Blend((RelativeNNN(8), Sinkhorn(temperature=0.375, neighbors=neighbors)))
    yield blend.clamped(len(bank)), STRENGTHS


def _neighbors(scores: int) -> int | None:
    return None if scores <= DENSE_SCORES else NEIGHBORS
