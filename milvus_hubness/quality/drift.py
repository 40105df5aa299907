"""Whether recent queries still come from where the bank does: a two-sample test with an effect size.

The statistic is the unbiased estimate of the squared maximum mean discrepancy under a Gaussian kernel whose
width is the median distance, its p-value that of permuting the two samples' rows (Gretton et al., JMLR 2012,
eq. 3 and section 8). As any shift becomes significant with enough queries, it must also be large: of the
variance of both samples in the kernel's space, weighed alike, so large a share must lie between them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks import Vectors, as_vectors
from milvus_hubness.errors import DimensionMismatch, InvalidParameter
from milvus_hubness.kernels.arguments import whole_number

THRESHOLD = 0.002
"""Banks this far from the queries cost one point of R@1 on real sets, see benchmarks/living_bank.py."""
LEVEL = 0.001
AT_LEAST = 50
AT_MOST = 1_000
PERMUTATIONS = 1_999

Squares = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Drift:
    """statistic: the share of the variance that lies between bank and recent queries, 0 for the same
    distribution in the mean, up to 1; threshold: from which on it counts. p: how often as much is seen of two
    halves of one distribution; level: up to which it counts. mmd2: the unbiased squared discrepancy. fired:
    whether both count. bank, recent: how many queries were compared."""

    statistic: float
    threshold: float
    p: float
    level: float
    mmd2: float
    fired: bool
    reason: str
    bank: int
    recent: int

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, for people and for --json."""
        return asdict(self)


def drift_between(
    bank: npt.ArrayLike,
    recent: npt.ArrayLike,
    *,
    threshold: float = THRESHOLD,
    level: float = LEVEL,
    at_most: int = AT_MOST,
    permutations: int = PERMUTATIONS,
    seed: int = 0,
) -> Drift:
    """Compare recent queries (m, d) with the bank's (n, d), `at_most` of each, drawn at random.

    Fewer than 50 of either decide nothing. Raises DimensionMismatch, InvalidInput, NonFiniteVectors,
    InvalidParameter.
    """
    if not 0 <= threshold < 1:
        raise InvalidParameter(f"threshold is a share of variance from 0 to below 1, got {threshold}")
    if not 0 < level < 1:
        raise InvalidParameter(f"level is between 0 and 1, got {level}")
    at_most = whole_number("at_most", at_most)
    permutations = whole_number("permutations", permutations)
    rng = np.random.default_rng(seed)
    first, second = (
        _some(rows, what, at_most, rng) for rows, what in ((bank, "the bank"), (recent, "queries"))
    )
    if min(len(first), len(second)) < AT_LEAST:
        few = f"{len(second)} recent queries and {len(first)} in the bank; {AT_LEAST} of each are needed"
        return Drift(0.0, threshold, 1.0, level, 0.0, False, few, len(first), len(second))
    if first.shape[1] != second.shape[1]:
        raise DimensionMismatch(
            f"{second.shape[1]}-d queries cannot be held against a {first.shape[1]}-d bank"
        )
    mmd2, statistic, p = _compared(first, second, permutations, rng)
    fired = statistic >= threshold and p <= level
    between = f"{statistic:.2%} of the variance lies between bank and recent queries (p {p:.2g})"
    limits = f"{threshold:.2%} and p {level:.2g} count"
    return Drift(statistic, threshold, p, level, mmd2, fired, f"{between}; {limits}", len(first), len(second))


def _some(rows: npt.ArrayLike, what: str, at_most: int, rng: np.random.Generator) -> Vectors:
    vectors = as_vectors(rows, what)
    return vectors[rng.permutation(len(vectors))[:at_most]]


def _compared(
    first: Vectors, second: Vectors, permutations: int, rng: np.random.Generator
) -> tuple[float, float, float]:
    """MMD², the share of the variance, and the p-value."""
    n, m = len(first), len(second)
    kernel = _kernel(np.concatenate([first, second]))
    own = np.zeros((n + m, 1 + permutations), np.float32)
    own[:n, 0] = 1
    for column in range(1, 1 + permutations):
        own[rng.permutation(n + m)[:n], column] = 1
    within, across, others = _sums(kernel, own)
    means = within / (n * (n - 1)), others / (m * (m - 1)), across / (n * m)
    mmd2 = means[0] + means[1] - 2 * means[2]
    inside = (2 - means[0][0] - means[1][0]) / 2
    between = mmd2[0] / 4
    p = float((mmd2 >= mmd2[0]).mean())
    total = inside + between
    return float(mmd2[0]), float(between / total) if total > 0 else 0.0, p


def _kernel(rows: Vectors) -> Squares:
    """(N, N) exp(−‖x−y‖² / 2σ²), σ the median distance; 0 on the diagonal."""
    centred = rows.astype(np.float64) - rows.mean(0, dtype=np.float64)
    lengths = (centred**2).sum(1)
    squares: Squares = np.maximum(lengths[:, None] + lengths[None, :] - 2 * centred @ centred.T, 0)
    width = float(np.median(squares[np.triu_indices(len(rows), 1)]))
    kernel: Squares = np.exp(-squares / (2 * width)) if width > 0 else (squares == 0).astype(np.float64)
    np.fill_diagonal(kernel, 0)
    return kernel


def _sums(kernel: Squares, own: npt.NDArray[np.float32]) -> tuple[Squares, Squares, Squares]:
    """For each column of `own`, which says whose rows are the first sample's: the sum of the kernel within
    that, across, and within the other."""
    within = (own * (kernel.astype(np.float32) @ own)).sum(0, dtype=np.float64)
    touching = own.T.astype(np.float64) @ kernel.sum(1)
    across = touching - within
    return within, across, kernel.sum() - within - 2 * across
