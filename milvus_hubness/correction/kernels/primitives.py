"""The two primitives, the k largest inner products and their log-sum-exp, by the fastest kernel.

`on_numpy` computes what `policy.uses_numpy` says, and `on_torch` everything else. `on_token_rows` has
rows of several vectors each, whose products are MaxSim. All kernels are exact up to the rounding of
float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar, cast

from milvus_hubness.correction.kernels import on_numpy, on_token_rows
from milvus_hubness.correction.kernels.checks import (
    Array,
    Matrix,
    is_array,
    positive_number,
    validate_k,
    validate_operands,
)
from milvus_hubness.correction.kernels.policy import (
    POLICY,
    Kernel,
    kernel_on,
    resolve_device,
    uses_numpy,
)
from milvus_hubness.correction.kernels.token_rows import (
    TokenRows,
    is_token_rows,
    score_rows,
    validate_token_rows,
)
from milvus_hubness.errors import DimensionMismatch, EmptyBank

Rows = TypeVar("Rows", bound=Matrix)


class TopK(NamedTuple):
    """The k largest inner products of each row, both of the type of X."""

    values: Any
    """(n, k), falling along each row."""

    indices: Any
    """(n, k) int64, the rows of B."""


def topk_mean(X: Rows, B: Matrix, k: int, *, device: str = "auto") -> Rows:
    """Return the mean of the k largest inner products of each row of X with the rows of B.

    X (n, d) and B (m, d): arrays or tensors of finite numbers; 1 ≤ k ≤ m. Returns (n,), an array
    for an array and a tensor on X's device for a tensor, float64 if X and B both are, else float32.
    Never holds more of the n × m products than a tile; the k values are summed in float64.

    Raises InvalidInput (not 2-D), DimensionMismatch, EmptyBank, BankTooSmall (k > m),
    InvalidParameter.
    """
    are_tokens = _are_tokens(X, B)
    k = validate_k(k, B)
    means: Any
    if are_tokens:
        means = on_token_rows.topk_mean(cast(Any, X), cast(Any, B), k, device)
    elif is_array(X) and is_array(B) and uses_numpy(_products(X, B), device):
        means = on_numpy.topk_mean(X, B, k)
    else:
        # torch takes a second to import, which a search service does without.
        from milvus_hubness.correction.kernels import on_torch

        means = on_torch.topk_mean(X, B, k, device)
    return cast(Rows, means)


def topk(X: Matrix, B: Matrix, k: int, *, device: str = "auto") -> TopK:
    """Return the k largest inner products of each row of X (n, d) with the rows of B (m, d).

    1 ≤ k ≤ m. The result includes that of every smaller k: the mean for k' ≤ k is that of the first
    k' values. Inputs, types of result, memory and errors are those of `topk_mean`; equal values are
    in no particular order.
    """
    are_tokens = _are_tokens(X, B)
    k = validate_k(k, B)
    if are_tokens:
        return TopK(*on_token_rows.topk(cast(Any, X), cast(Any, B), k, device))
    if is_array(X) and is_array(B) and uses_numpy(_products(X, B), device):
        return TopK(*on_numpy.topk(X, B, k))

    from milvus_hubness.correction.kernels import on_torch

    return TopK(*on_torch.topk(X, B, k, device))


def logsumexp(
    X: Rows, B: Matrix, tau: float, weights: Matrix | None = None, *, device: str = "auto"
) -> Rows:
    """Return tau · log Σ_i exp((x·b_i + w_i) / tau) for each row x of X.

    It tends to the largest x·b_i + w_i as tau goes to 0. X (n, d) and B (m, d): arrays or tensors
    of finite numbers; tau > 0; weights (m,), 0 by default; −inf leaves a row of B out. Returns (n,)
    of the type and dtype that `topk_mean` returns, in the same memory. Raises as `topk_mean` does;
    DimensionMismatch also for weights of another length.
    """
    are_tokens = _are_tokens(X, B)
    if weights is not None and tuple(weights.shape) != (len(B),):
        raise DimensionMismatch(
            f"weights must have shape ({len(B)},) and have {tuple(weights.shape)}"
        )
    tau = positive_number("tau", tau)

    sums: Any
    if are_tokens:
        sums = on_token_rows.logsumexp(cast(Any, X), cast(Any, B), tau, cast(Any, weights), device)
    elif (
        is_array(X)
        and is_array(B)
        and (weights is None or is_array(weights))
        and uses_numpy(_products(X, B), device)
    ):
        sums = on_numpy.logsumexp(X, B, tau, weights)
    else:
        from milvus_hubness.correction.kernels import on_torch

        sums = on_torch.logsumexp(X, B, tau, weights, device)
    return cast(Rows, sums)


def _are_tokens(X: Matrix | TokenRows, B: Matrix | TokenRows) -> bool:
    """Return whether valid operands are rows of tokens. Raises as `topk_mean` does."""
    if not (is_token_rows(X) or is_token_rows(B)):
        validate_operands(cast(Matrix, X), cast(Matrix, B))
        return False
    validate_token_rows(X, B)
    if not len(B):
        raise EmptyBank("B has no rows")
    return True


def _products(X: Matrix, B: Matrix) -> int:
    """Return how many products of numbers all inner products take."""
    return int(X.shape[0]) * int(B.shape[0]) * int(B.shape[1])


def kernel_for(device: str = "auto") -> Kernel:
    """Return the kernel for large products on a device: "numpy", "screened" or "dense".

    "buffered" only where the policy names it.
    """
    if uses_numpy(POLICY.get().numpy_below, device):
        return "numpy"
    return kernel_on(resolve_device(device))


def score_tiles(rows: Array, columns: Array, device: str = "auto") -> Iterator[tuple[slice, Any]]:
    """Yield the inner products of rows (n, d) with all columns (m, d), in tiles of whole rows.

    The tiles are arrays or tensors. Rows of tokens have their MaxSim.
    """
    if is_token_rows(rows) or is_token_rows(columns):
        yield from score_rows(rows, columns, device)
        return
    if uses_numpy(rows.size * len(columns), device):
        row_count = max(1, POLICY.get().tile_size_of("numpy") // len(columns))
        for start in range(0, len(rows), row_count):
            part = slice(start, start + row_count)
            yield part, rows[part] @ columns.T
        return

    from milvus_hubness.correction.kernels.operands import Operands, full_precision

    operands = Operands.of(rows, columns, device)
    row_count, _ = operands.tile_shape(columns=len(columns))
    with full_precision(operands.device):
        for part, tile in operands.rows(row_count):
            for _, scores in operands.scores(tile, len(columns)):
                yield part, scores
