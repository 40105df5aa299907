"""R@1 and skewness of N_10 of every method by its plain formula, in NumPy and apart from the product."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def unit(rows: npt.ArrayLike) -> Floats:
    """Return the rows (n, d) with length 1 as float32; rows of zeros stay as they are."""
    vectors = np.asarray(rows, np.float32)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(norms > 0, norms, 1)


def log_sum_exp(scores: Floats, axis: int) -> Floats:
    largest = scores.max(axis=axis, keepdims=True)
    total = np.exp(scores - largest).sum(axis=axis)
    return np.log(total) + largest.squeeze(axis)


def mean_of_largest(scores: Floats, k: int) -> Floats:
    """Return the mean (n,) of the k largest scores of each column of (m, n)."""
    return np.partition(scores, len(scores) - k, axis=0)[-k:].mean(axis=0)


def sinkhorn(scores: Floats, tau: float, iterations: int = 10) -> Floats:
    """Return −τ log β (n,) after that many Sinkhorn iterations on scores (m, n), from zero, to uniform marginals."""
    rows, columns = scores.shape
    g = np.zeros(columns, np.float32)
    for _ in range(iterations):
        f = -tau * (log_sum_exp((scores + g) / tau, 1) + np.log(np.float32(rows)))
        g = -tau * (log_sum_exp((scores + f[:, None]) / tau, 0) + np.log(np.float32(columns)))
    return -g


def measures(scores: Floats) -> list[float]:
    """Return R@1 in percent and the skewness of N_10 of scores (n, n), where item i is the answer to query i. A tie, up
    to the rounding of float32, counts for the query."""
    recall = 100 * np.mean(scores.diagonal() >= scores.max(1) - 1e-6)
    answers = np.argpartition(-scores, 10, axis=1)[:, :10]
    counts = np.bincount(answers.ravel(), minlength=scores.shape[1]).astype(np.float64)
    spread = counts.std()
    skewness = np.mean(((counts - counts.mean()) / spread) ** 3) if spread else 0.0
    return [round(float(recall), 2), round(float(skewness), 2)]


def reference_row(
    query: Floats, gallery: Floats, bank: Floats, target_bank: Floats
) -> dict[str, list[float]]:
    """Return [R@1 in percent, skewness of N_10] by the names of reference.json. All arrays: (n, d)."""
    scores, by_bank, by_targets = query @ gallery.T, bank @ gallery.T, target_bank @ gallery.T

    def softmax(values: Floats, tau: float) -> Floats:
        return tau * log_sum_exp(values / tau, 0)

    biases: dict[str, Callable[[], Floats]] = {
        "nnn k=32 a=.75": lambda: 0.75 * mean_of_largest(by_bank, 32),
        "nnn k=128 a=.75": lambda: 0.75 * mean_of_largest(by_bank, 128),
        "csls k=10": lambda: 0.5 * mean_of_largest(by_bank, 10),
        "is tau=.05": lambda: softmax(by_bank, 0.05),
        "is tau=.02": lambda: softmax(by_bank, 0.02),
        "dn l=.5": lambda: 0.5 * by_bank.mean(0),
        "dualis t1=t2=.05": lambda: (softmax(by_bank, 0.05) + softmax(by_targets, 0.05)) / 2,
        "sn tau=.02 T=10": lambda: sinkhorn(by_bank, 0.02),
        "dbsn tau=.02 T=10": lambda: sinkhorn(np.hstack([by_bank, bank @ target_bank.T]), 0.02)[
            : len(gallery)
        ],
    }
    row = {"raw": measures(scores)} | {
        name: measures(scores - bias()) for name, bias in biases.items()
    }
    activated = np.isin(np.arange(len(gallery)), by_bank.argmax(1))[scores.argmax(1)]
    gated = np.where(activated[:, None], scores - biases["is tau=.05"](), scores)
    return row | {"dis k=1 tau=.05": measures(gated)}
