"""Every method at every parameter worth trying: the biases of one gallery, from as few passes as can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks import QueryBank, Vectors
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
    Sinkhorn,
)
from milvus_hubness.estimators.temperature import score_spread
from milvus_hubness.kernels import topk

ALPHAS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
DEEPEST_K = 512
TEMPERATURES = (0.125, 0.25, 0.5, 1.0)
LAMS = (0.25, 0.5, 0.75, 1.0)
TARGET_SHARE = 50
"""How many times the temperature of the bank that of the target bank is."""
STRENGTHS = (0.5, 0.75, 1.0)
DENSE_SCORES = 20_000_000
NEIGHBORS = 64
ITEMS_AT_ONCE = 16_384


class Trial(NamedTuple):
    """An estimator, the share of its bias that is subtracted, and that share (n_items,) of it."""

    estimator: Estimator
    strength: float
    bias: Vectors


Progress = Callable[[str, int, int], None]


def sweep(
    bank: QueryBank,
    gallery: Vectors,
    target_bank: QueryBank | None = None,
    *,
    progress: Progress | None = None,
    device: str = "auto",
) -> list[Trial]:
    """The trials on a gallery (n, d), those of `default_blend` last and the one of full strength last of all.

    NNN over `ALPHAS` and all powers of two up to 512 and |bank| for k, all from one top-k pass; ½ of a mean
    is CSLS. Inverted Softmax, Sinkhorn and, with a target bank, their dual forms over `TEMPERATURES`, in
    units of `score_spread`; these and Blend at `STRENGTHS`. Sinkhorn runs on nearest pairs where there are
    more than `DENSE_SCORES` scores. progress: called with what is done, estimators fitted, their number.

    Raises InvalidInput where all items score alike.
    """
    if not score_spread(bank, gallery):
        raise InvalidInput("all gallery items score alike, so there is no ranking to correct")
    others = list(_fitted_one_by_one(bank, gallery, target_bank, device))
    trials = list(_from_one_pass(bank, gallery, device))
    for done, (estimator, strengths) in enumerate(others, 1):
        fitted = estimator.fit(bank, gallery=gallery, target_bank=target_bank)
        bias = fitted.bias(gallery)
        trials += [Trial(fitted.estimator, strength, np.float32(strength) * bias) for strength in strengths]
        if progress:
            progress("trying methods", done, len(others))
    return trials


def default_blend(bank: QueryBank, n_items: int, device: str = "auto") -> Blend:
    """`Blend()`, fitted to the sizes: k at most |bank|, and nearest pairs where there are too many."""
    neighbors = _neighbors(len(bank) * n_items)
    return Blend(
        (
            NNN(min(16, len(bank)), 0.85, device=device),
            Sinkhorn(neighbors=neighbors, device=device),
        )
    )


def _from_one_pass(bank: QueryBank, gallery: Vectors, device: str) -> Iterator[Trial]:
    deepest = min(DEEPEST_K, len(bank))
    ks = 2 ** np.arange(int(np.log2(deepest)) + 1)
    means: npt.NDArray[np.float64] = np.empty((len(ks), len(gallery)))
    for start in range(0, len(gallery), ITEMS_AT_ONCE):
        part = slice(start, start + ITEMS_AT_ONCE)
        values = topk(gallery[part], bank.vectors, deepest, device=device).values
        means[:, part] = values.cumsum(1, dtype=np.float64)[:, ks - 1].T / ks[:, None]
    for k, mean in zip(ks.tolist(), means, strict=True):
        for alpha in ALPHAS:
            same: Estimator = CSLS(k, device=device) if alpha == 0.5 else NNN(k, alpha, device=device)
            yield Trial(same, 1.0, (alpha * mean).astype(np.float32))


def _fitted_one_by_one(
    bank: QueryBank, gallery: Vectors, target_bank: QueryBank | None, device: str
) -> Iterator[tuple[Estimator, tuple[float, ...]]]:
    n = len(gallery)
    for lam in LAMS:
        yield DistributionNormalization(lam), (1.0,)
    for temperature in TEMPERATURES:
        yield InvertedSoftmax(temperature=temperature, device=device), STRENGTHS
        yield Sinkhorn(temperature=temperature, neighbors=_neighbors(len(bank) * n), device=device), STRENGTHS
        if target_bank is not None:
            dual = _neighbors(len(bank) * (n + len(target_bank)))
            yield (
                DualInvertedSoftmax(
                    temperature_query=temperature,
                    temperature_target=TARGET_SHARE * temperature,
                    device=device,
                ),
                STRENGTHS,
            )
            yield DualBankSinkhorn(temperature=temperature, neighbors=dual, device=device), STRENGTHS
    yield default_blend(bank, n, device), STRENGTHS


def _neighbors(scores: int) -> int | None:
    return None if scores <= DENSE_SCORES else NEIGHBORS
