"""The primitives on torch: the choice among the dense and the screening kernels, and of devices."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from typing import Any, TypeAlias

import numpy as np
import torch

from milvus_hubness.correction.kernels import buffered, dense, screened
from milvus_hubness.correction.kernels.checks import Matrix, is_tensor
from milvus_hubness.correction.kernels.operands import Operands, cuda_devices, full_precision
from milvus_hubness.correction.kernels.policy import (
    ALL_DEVICES,
    POLICY,
    Kernel,
    resolve_device,
)

Compute: TypeAlias = Callable[[Operands], tuple[torch.Tensor, ...]]
"""One primitive with its arguments: the results, (n, …), of prepared operands."""

SCREENED_SHARE = 32
"""How many times larger than k a tile of the bank must be: else the bound of a screen is loose."""


def topk_mean(X: Matrix, B: Matrix, k: int, device: str) -> Any:
    """Return means of the k largest products, (n,): an array for an array X, else a tensor."""

    def compute(operands: Operands) -> tuple[torch.Tensor, ...]:
        by_kernel = {
            "dense": dense.topk_mean,
            "screened": screened.topk_mean,
            "buffered": buffered.topk_mean,
        }
        return by_kernel[_kernel_of(operands, k)](operands, k)

    [means] = _on_devices(compute, X, B, device)
    return means


def topk(X: Matrix, B: Matrix, k: int, device: str) -> tuple[Any, Any]:
    """Return values and indices of the k largest products, both (n, k), of the type of X."""

    def compute(operands: Operands) -> tuple[torch.Tensor, ...]:
        by_kernel = {"dense": dense.topk, "screened": screened.topk, "buffered": buffered.topk}
        return by_kernel[_kernel_of(operands, k)](operands, k)

    values, indices = _on_devices(compute, X, B, device)
    return values, indices


def logsumexp(X: Matrix, B: Matrix, tau: float, weights: Matrix | None, device: str) -> Any:
    """Return tau · log Σ_i exp((x·b_i + w_i) / tau), (n,): an array for an array X, else a tensor.

    All terms count, so there is nothing that a screen could leave out.
    """

    def compute(operands: Operands) -> tuple[torch.Tensor, ...]:
        return dense.logsumexp(operands, *operands.temperature(tau, weights))

    [sums] = _on_devices(compute, X, B, device)
    return sums


def _kernel_of(operands: Operands, k: int) -> Kernel:
    """Return the kernel for the k largest products: "dense" where a screen would be slower."""
    if operands.kernel == "dense":
        return "dense"

    row_count = operands.X.shape[0]
    bank_size, dim = operands.bank.shape
    least_rows, least_products = POLICY.get().least_screened
    if row_count < least_rows or row_count * bank_size * dim < least_products:
        return "dense"

    columns = screened.tiles_for(dim, operands.device).columns
    return operands.kernel if min(bank_size, columns) >= SCREENED_SHARE * k else "dense"


def _on_devices(compute: Compute, X: Matrix, B: Matrix, device: str) -> tuple[Any, ...]:
    """Return the results for all rows of X: arrays for an array, tensors for a tensor.

    With "cuda:all", each device gets a share of X's rows and all of B.
    """
    if device != ALL_DEVICES:
        return _on_one_device(compute, X, B, device)

    devices = POLICY.get().devices or cuda_devices()
    if len(devices) == 1:
        return _on_one_device(compute, X, B, devices[0])

    share_size = max(1, -(-X.shape[0] // len(devices)))
    shares = [X[start : start + share_size] for start in range(0, max(1, X.shape[0]), share_size)]

    def work(context: Context, share: Matrix, of_share: str) -> tuple[Any, ...]:
        return context.run(_on_one_device, compute, share, B, of_share)

    # A thread has no policy but that of the context in which it runs.
    contexts = [copy_context() for _ in devices]
    # Settings of the whole process change once: a thread that ends must not restore them for the
    # others.
    with full_precision(resolve_device(devices[0])), ThreadPoolExecutor(len(devices)) as pool:
        results_by_share = list(pool.map(work, contexts, shares, devices))

    join: Any = torch.cat if is_tensor(X) else np.concatenate
    return tuple(join(results) for results in zip(*results_by_share, strict=True))


def _on_one_device(compute: Compute, X: Matrix, B: Matrix, device: str) -> tuple[Any, ...]:
    operands = Operands.of(X, B, device)
    with full_precision(operands.device):
        results = compute(operands)
    return results if is_tensor(X) else tuple(result.numpy() for result in results)
