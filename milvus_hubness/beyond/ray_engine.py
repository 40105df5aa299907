"""Ray workers as the engine of one process's fits and biases, for jobs that read and write a collection."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks import BankLike, QueryBank, Vectors
from milvus_hubness.beyond import shard_steps
from milvus_hubness.beyond.ray_gallery import RETRIES, RayGallery
from milvus_hubness.errors import MissingExtra
from milvus_hubness.estimators import Estimator, FittedBias


def connected() -> Any:
    """The module ray, connected: to the cluster that this process is connected to already, else to that of
    $RAY_ADDRESS, else to one of this machine's cores, which ends with the process. Raises MissingExtra."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtra('needs Ray: pip install "milvus-hubness[ray]"') from error
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    return ray


def fit_on_ray(
    estimator: Estimator,
    bank: BankLike,
    *,
    gallery: npt.NDArray[np.float32] | None = None,
    target_bank: BankLike | None = None,
    start: npt.ArrayLike | None = None,
) -> FittedBias:
    """As the estimator's own `fit`, up to rounding, a shard of the gallery (n, d) for each core of the
    cluster. Raises what that raises."""
    cores = _cores(connected())
    if gallery is None:
        return estimator.fit(bank, target_bank=target_bank)
    shards = np.array_split(gallery, min(cores, len(gallery)))
    return RayGallery(shards).fit(estimator, bank, target_bank=target_bank, start=start)


class RayBiases:
    """The biases of a fit, told by Ray workers; bank and potentials are sent to them once.

    target_bank: that of the fit, for estimators that compare with it. A task whose worker dies is done again,
    up to three times. Raises MissingExtra.
    """

    def __init__(self, fitted: FittedBias, *, target_bank: QueryBank | None = None) -> None:
        self._ray = connected()
        self._run = self._ray.remote(num_cpus=1, max_retries=RETRIES)(shard_steps.biases)
        whole = fitted.bank, fitted.estimator, fitted.potentials, target_bank
        self._fit = [self._ray.put(each) for each in whole]

    def __call__(self, items: Vectors) -> Vectors:
        """(n,) float32 of items (n, d), n ≥ 1, a part of them for each core of the cluster."""
        shards = np.array_split(items, min(_cores(self._ray), len(items)))
        found = self._ray.get([self._run.remote(shard, *self._fit) for shard in shards])
        return np.concatenate(found)


def _cores(ray: Any) -> int:
    return max(1, int(ray.cluster_resources().get("CPU", 1)))
