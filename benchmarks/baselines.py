"""Reductions of hubness that need no query bank, for `benchmarks.quality`: centring, unit length and DisSimLocal."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from benchmarks.reference import unit
from milvus_hubness.correction.kernels import topk
from tests.support.real_data import Task

Floats = npt.NDArray[np.float32]


def centred(task: Task) -> Task:
    """Return queries and items less the mean of the items (CENT; Suzuki et al., EMNLP 2013)."""
    centre = task.gallery.mean(0)
    return task._replace(query=task.query - centre, gallery=task.gallery - centre)


def centred_apart(task: Task) -> Task:
    """Return queries less the mean of the bank, and items less their own mean."""
    return task._replace(
        query=task.query - task.bank.mean(0), gallery=task.gallery - task.gallery.mean(0)
    )


def unit_length(task: Task) -> Task:
    """Return queries and items of length 1 (L2N; Wang et al., SimpleShot, 2019)."""
    return task._replace(query=unit(task.query), gallery=unit(task.gallery))


def density(gallery: Floats, points: Floats, k: int = 10) -> Floats:
    """Return b(r) = ½ (‖r‖² − ‖r − c(r)‖²), c(r) the mean of the k points nearest to r (DisSimLocal; Hara et al., AAAI
    2016): ranking by q·r − b(r) is ranking by ‖q − r‖² − ‖r − c(r)‖². An item is not its own neighbour."""
    own = gallery is points
    lengths = np.hstack([points, -(points**2).sum(1, keepdims=True) / 2])
    nearest = topk(
        np.hstack([gallery, np.ones((len(gallery), 1), np.float32)]), lengths, k + own
    ).indices
    if own:
        others = nearest != np.arange(len(gallery))[:, None]
        others[others.all(1), -1] = False  # A copy of the item came first.
        nearest = nearest[others].reshape(len(gallery), k)
    centroids = points[nearest].mean(1)
    bias: Floats = ((gallery**2).sum(1) - ((gallery - centroids) ** 2).sum(1)) / 2
    return bias


Baseline = Callable[[Task], tuple[Task, Floats]]


def _without_bias(change: Callable[[Task], Task]) -> Baseline:
    return lambda task: (change(task), np.zeros(len(task.gallery), np.float32))


BASELINES: dict[str, Baseline] = {
    "CENT": _without_bias(centred),
    "L2N": _without_bias(unit_length),
    "CENT, L2N": _without_bias(lambda task: unit_length(centred(task))),
    "CENT by own means, L2N": _without_bias(lambda task: unit_length(centred_apart(task))),
    "DisSimLocal 10": lambda task: (task, density(task.gallery, task.gallery)),
    "DisSimLocal 10, bank": lambda task: (task, density(task.gallery, task.bank)),
}
