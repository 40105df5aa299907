"""The two primitives: the k largest inner products and their log-sum-exp, by the fastest kernel.

On CUDA that is `fused` (Triton), on a CPU that multiplies bfloat16 natively `screened`. Elsewhere, for float64, and for
shapes that these are not made for, it is `dense` (torch). All are exact up to the rounding of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from milvus_hubness.errors import BankTooSmall, DimensionMismatch
from milvus_hubness.kernels.operands import (
    ALL_DEVICES,
    Kernel,
    Matrix,
    Operands,
    as_tensor,
    cuda_devices,
    full_precision,
    positive_number,
    whole_number,
)
from milvus_hubness.kernels.screened import tiles_for

Rows = TypeVar("Rows", bound=Matrix)

LEAST_SCREENED_ROWS, LEAST_SCREENED_WORK = 128, 1 << 32
"""Smallest number of rows, and of products of numbers, for which a screen is faster than the dense kernel."""
SCREENED_SHARE = 32
"""How many times larger than k a tile of the bank must be: else the bound of a screen is loose."""


class TopK(NamedTuple):
    """The k largest inner products of each row.

    values: (n, k), falling along each row. indices: (n, k) int64, the rows of B. Both are of X's type.
    """

    values: Any
    indices: Any


def topk_mean(X: Rows, B: Matrix, k: int, *, device: str = "auto") -> Rows:
    """Return the mean of the k largest inner products of each row of X with the rows of B.

    X (n, d) and B (m, d): arrays or tensors of finite numbers; 1 ≤ k ≤ m. Returns (n,), an array for an array and a
    tensor on X's device for a tensor, float64 if X and B both are, else float32. Never holds more of the n × m products
    than a tile; the k values are summed in float64.

    Raises InvalidInput (not 2-D), DimensionMismatch, EmptyBank, BankTooSmall (k > m), InvalidParameter.
    """
    means: Rows = _spread("topk_mean", X, B, device, lambda bank: (check_k(k, bank),))[0]
    return means


def topk(X: Matrix, B: Matrix, k: int, *, device: str = "auto") -> TopK:
    """Return the k largest inner products of each row of X (n, d) with the rows of B (m, d), 1 ≤ k ≤ m.

    The result includes that of every smaller k: the mean for k' ≤ k is that of the first k' values. Inputs,
    types of result, memory and errors are those of `topk_mean`; equal values come in no particular order.
    """
    return TopK(*_spread("topk", X, B, device, lambda bank: (check_k(k, bank),)))


def logsumexp(X: Rows, B: Matrix, tau: float, weights: Matrix | None = None, *, device: str = "auto") -> Rows:
    """Return tau · log Σ_i exp((x·b_i + w_i) / tau) for each row x of X.

    It tends to the largest x·b_i + w_i as tau goes to 0. X (n, d) and B (m, d): arrays or tensors of finite numbers;
    tau > 0; weights (m,), 0 by default; −inf leaves a row of B out. Returns (n,) of the type and dtype that `topk_mean`
    returns, in the same memory. Raises as `topk_mean` does; DimensionMismatch also for weights of another length.
    """
    soft: Rows = _spread("logsumexp", X, B, device, partial(_check_logsumexp, tau, weights))[0]
    return soft


def check_k(k: int, bank: torch.Tensor) -> int:
    """Return `k` as an int. Raises InvalidParameter below 1 and BankTooSmall above the bank's rows."""
    k = whole_number("k", k)
    if k > len(bank):
        raise BankTooSmall(f"k = {k} but the bank has {len(bank)} rows: use a smaller k or a larger bank")
    return k


def _check_logsumexp(tau: float, weights: Matrix | None, bank: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Return tau, and the weights in the dtype of the result."""
    dtype = torch.float64 if bank.dtype == torch.float64 else torch.float32
    tau = max(positive_number("tau", tau), torch.finfo(dtype).tiny)
    if weights is None:
        return tau, bank.new_zeros(len(bank), dtype=dtype)
    if tuple(weights.shape) != (len(bank),):
        raise DimensionMismatch(f"weights must have shape ({len(bank)},) and have {tuple(weights.shape)}")
    return tau, as_tensor(weights, dtype, bank.device)


def _spread(
    name: str, X: Matrix, B: Matrix, device: str, check: Callable[[torch.Tensor], tuple[Any, ...]]
) -> tuple[Any, ...]:
    """Return the result of the kernels' function `name` for X, B and the arguments that `check` returns.

    With "cuda:all", each device gets a share of X's rows and all of B.
    """
    places = cuda_devices() if device == ALL_DEVICES else [device]
    if len(places) < 2:
        return _on_one(name, X, B, places[0], check)
    size = max(1, -(-X.shape[0] // len(places)))
    shares = [X[start : start + size] for start in range(0, max(1, X.shape[0]), size)]
    with ThreadPoolExecutor(len(places)) as pool:
        parts = list(pool.map(lambda x, place: _on_one(name, x, B, place, check), shares, places))
    join: Any = torch.cat if isinstance(X, torch.Tensor) else np.concatenate
    return tuple(join(part) for part in zip(*parts, strict=True))


def _on_one(
    name: str, X: Matrix, B: Matrix, device: str, check: Callable[[torch.Tensor], tuple[Any, ...]]
) -> tuple[Any, ...]:
    operands = Operands.of(X, B, device)
    arguments = check(operands.bank)
    kernel = import_module(f"milvus_hubness.kernels.{_kernel(name, operands, arguments)}")
    with full_precision(operands.device):
        results: tuple[torch.Tensor, ...] = getattr(kernel, name)(operands, *arguments)
    return results if isinstance(X, torch.Tensor) else tuple(result.numpy() for result in results)


def _kernel(name: str, operands: Operands, arguments: tuple[Any, ...]) -> Kernel:
    """Return the device's kernel, or "dense" where the screen is not made for the call."""
    if operands.kernel != "screened":
        return operands.kernel
    n, (m, d) = operands.X.shape[0], operands.bank.shape
    is_small = n < LEAST_SCREENED_ROWS or n * m * d < LEAST_SCREENED_WORK
    if name == "logsumexp" or is_small or min(m, tiles_for(d).columns) < SCREENED_SHARE * arguments[0]:
        return "dense"
    return "screened"
