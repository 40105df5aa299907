"""The two primitives, exact, on torch: the k largest inner products and the log-sum-exp of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, overload

import torch

from milvus_hubness.errors import BankTooSmall, DimensionMismatch
from milvus_hubness.kernels.arguments import positive_number, whole_number
from milvus_hubness.kernels.devices import full_precision
from milvus_hubness.kernels.operands import Array, Matrix, Operands, as_tensor


class TopK(NamedTuple):
    """values (n, k), falling along each row, and indices (n, k), int64, of the rows of B they belong to.

    Both are arrays where X is an array and tensors where X is a tensor.
    """

    values: Any
    indices: Any


@overload
def topk_mean(X: torch.Tensor, B: Matrix, k: int, *, device: str = ...) -> torch.Tensor: ...
@overload
def topk_mean(X: Array, B: Matrix, k: int, *, device: str = ...) -> Array: ...
def topk_mean(X: Matrix, B: Matrix, k: int, *, device: str = "auto") -> Matrix:
    """Mean of the k largest inner products of each row of X with the rows of B.

    X (n, d) and B (m, d): arrays or tensors of finite numbers; 1 ≤ k ≤ m. Returns (n,), an array for an
    array and a tensor on X's device for a tensor, float64 if X and B both are, else float32. Never holds
    more of the n × m products than a tile; the k values are summed in float64.

    Raises InvalidInput (not 2-D), DimensionMismatch, EmptyBank, BankTooSmall (k > m), InvalidParameter.
    """
    operands = Operands.of(X, B, device)
    k = check_k(k, operands.bank)
    means = operands.empty(X.shape[0])
    with full_precision(operands.device):
        if k == len(operands.bank):
            center = operands.bank.mean(0, dtype=torch.float64)
            for part, x in operands.rows(operands.tile_shape()[0]):
                means[part] = x.double() @ center
        else:
            rows, columns = operands.tile_shape(columns=k, spare_columns=k)
            for part, x in operands.rows(rows):
                means[part] = (
                    _running_topk(x, operands.columns(columns), k)[0].sum(1, dtype=torch.float64) / k
                )
    return operands.as_given(means)


def topk(X: Matrix, B: Matrix, k: int, *, device: str = "auto") -> TopK:
    """The k largest inner products of each row of X (n, d) with the rows of B (m, d), 1 ≤ k ≤ m.

    Every smaller k is in it too: the mean for k' ≤ k is that of the first k' values. Inputs, kinds of
    result, memory and errors are those of `topk_mean`; equal values come in no particular order.
    """
    operands = Operands.of(X, B, device)
    k = check_k(k, operands.bank)
    values = operands.empty(X.shape[0], k)
    indices = operands.empty(X.shape[0], k, dtype=torch.int64)
    with full_precision(operands.device):
        rows, columns = operands.tile_shape(columns=k, spare_columns=k)
        for part, x in operands.rows(rows):
            best, places = _running_topk(x, operands.columns(columns), k)
            values[part], order = best.sort(1, descending=True)
            indices[part] = places.gather(1, order)
    return TopK(operands.as_given(values), operands.as_given(indices))


@overload
def logsumexp(
    X: torch.Tensor, B: Matrix, tau: float, weights: Matrix | None = ..., *, device: str = ...
) -> torch.Tensor: ...
@overload
def logsumexp(
    X: Array, B: Matrix, tau: float, weights: Matrix | None = ..., *, device: str = ...
) -> Array: ...
def logsumexp(
    X: Matrix, B: Matrix, tau: float, weights: Matrix | None = None, *, device: str = "auto"
) -> Matrix:
    """tau · log Σ_i exp((x·b_i + w_i) / tau) for each row x of X; the largest x·b_i + w_i as tau goes to 0.

    X (n, d) and B (m, d): arrays or tensors of finite numbers; tau > 0; weights (m,), 0 unless given, −inf
    leaves a row of B out. Returns (n,) of the kind and dtype that `topk_mean` returns, in the same memory.

    Raises what `topk_mean` raises; DimensionMismatch also for weights of another length.
    """
    operands = Operands.of(X, B, device)
    bank = operands.bank
    tau = max(positive_number("tau", tau), torch.finfo(bank.dtype).tiny)
    if weights is None:
        added = bank.new_zeros(len(bank))
    elif tuple(weights.shape) == (len(bank),):
        added = as_tensor(weights, bank.dtype, bank.device)
    else:
        raise DimensionMismatch(f"weights must have shape ({len(bank)},) and have {tuple(weights.shape)}")
    result = operands.empty(X.shape[0])
    with full_precision(operands.device):
        rows, columns = operands.tile_shape()
        for part, x in operands.rows(rows):
            largest = x.new_full((len(x), 1), torch.finfo(bank.dtype).min)
            total = x.new_zeros((len(x), 1), dtype=torch.float64)
            for span, tile in operands.columns(columns):
                scores = torch.addmm(added[span], x, tile)
                above = torch.maximum(largest, scores.amax(1, keepdim=True))
                rescale = ((largest - above) / tau).exp_()
                total = total * rescale + scores.sub_(above).div_(tau).exp_().sum(1, keepdim=True)
                largest = above
            result[part] = (largest + tau * total.log_()).squeeze(1)
    return operands.as_given(result)


def check_k(k: int, bank: torch.Tensor) -> int:
    """`k` as an int; raises InvalidParameter below 1 and BankTooSmall above the bank's rows."""
    k = whole_number("k", k)
    if k > len(bank):
        raise BankTooSmall(f"k = {k} nearest were asked for and the bank has {len(bank)}")
    return k


def _running_topk(
    x: torch.Tensor, columns: Iterable[tuple[slice, torch.Tensor]], k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of x @ tile over all tiles (d, p) and their places, both (len(x), k), unsorted."""
    best = x.new_empty(len(x), 0)
    places = best.long()
    for part, tile in columns:
        scores = x @ tile
        fresh, where = scores.topk(min(k, scores.shape[1]), dim=1, sorted=False)
        best = torch.cat([best, fresh], 1)
        places = torch.cat([places, where + part.start], 1)
        if best.shape[1] > k:
            best, kept = best.topk(k, dim=1, sorted=False)
            places = places.gather(1, kept)
    return best, places
