"""The two primitives, the k largest inner products and their log-sum-exp, by the fastest kernel for the call.

`on_numpy` computes small products, and all of a process that neither runs a job nor has imported torch, such as a
search service. In other processes torch computes: where the device multiplies bfloat16 natively by `screened`, and
elsewhere, for float64, and for shapes that it is not made for, by `dense`. All are exact up to the rounding of float32.
"""

from __future__ import annotations

import math
import numbers
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    TypeGuard,
    TypeVar,
    cast,
    get_args,
)

import numpy as np
import numpy.typing as npt

from milvus_hubness.errors import (
    BankTooSmall,
    DimensionMismatch,
    EmptyBank,
    FaissConflict,
    InvalidInput,
    InvalidParameter,
)

Array: TypeAlias = npt.NDArray[Any]
if TYPE_CHECKING:
    import torch

    Matrix: TypeAlias = Array | torch.Tensor
else:
    Matrix = Any


@cache
def import_faiss() -> Any:
    """Return the faiss module. Raises FaissConflict if two distributions have overwritten each other."""
    from importlib.metadata import distributions

    installed = {
        str(distribution.name).lower().replace("_", "-") for distribution in distributions()
    }
    gpu = sorted(name for name in installed if name.startswith("faiss-gpu"))
    if gpu and "faiss-cpu" in installed:
        raise FaissConflict(
            f"faiss-cpu and {gpu[0]} are both installed, one over the other's files; to keep the GPU build: "
            f"pip uninstall -y faiss-cpu && pip install --force-reinstall --no-deps {gpu[0]}"
        )
    import faiss

    return faiss


def whole_number(name: str, value: Any, *, at_least: int = 1, at_most: int | None = None) -> int:
    """Return `value` as an int. Raises InvalidParameter if it is not an integer (True is not) or out of range."""
    upper = "" if at_most is None else f" and at most {at_most}"
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or value < at_least or (at_most is not None and value > at_most):
        raise InvalidParameter(
            f"{name} must be a whole number of at least {at_least}{upper}, not {value!r}"
        )
    return int(value)


def finite_number(name: str, value: Any) -> float:
    """Return `value` as a float. Raises InvalidParameter if it is not a number, NaN or infinite."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        number = float(value) if is_number else math.nan
    except OverflowError:  # Python's integers have no largest one.
        number = math.inf
    if not math.isfinite(number):
        raise InvalidParameter(f"{name} must be a finite number, not {value!r}")
    return number


def positive_number(name: str, value: Any) -> float:
    """Return `value` as a float. Raises InvalidParameter if it is not a finite number above 0."""
    if finite_number(name, value) <= 0:
        raise InvalidParameter(f"{name} must be above 0, not {value!r}")
    return float(value)


def convert_fields(
    options: object, convert: Callable[..., Any], *names: str, **limits: int
) -> None:
    """Convert these fields of a frozen dataclass by `whole_number` or the like. Raises InvalidParameter."""
    for name in names:
        object.__setattr__(options, name, convert(name, getattr(options, name), **limits))


Kernel: TypeAlias = Literal["numpy", "screened", "dense"]
Screen: TypeAlias = Literal["auto", "bfloat16", "float32"]
SCREEN_VARIABLE = "MILVUS_HUBNESS_KERNEL"
ALL_DEVICES = "cuda:all"
TILE_SIZES = {"numpy": 1 << 20, "cpu": 1 << 21, "cuda": 1 << 26, "screened": 1 << 28}


@dataclass(frozen=True)
class KernelPolicy:
    """What decides between kernels and between their sizes. None: by device, use, dimension or dtype.

    kernel: for all calls; "numpy" for those on arrays. screen: whether to screen in bfloat16; "auto" does so where that
    is native; by default the value of the environment variable MILVUS_HUBNESS_KERNEL. devices: those of "cuda:all".
    numpy_below: products of numbers below which NumPy is as fast as torch. least_screened: rows, and products of
    numbers, from which a screen is faster than the dense kernel. tile_size: scores in memory at once. screened_tile:
    rows and columns. sinkhorn_limits: bytes of scores that a CPU stores, and pairs that it recomputes.
    Raises InvalidParameter.
    """

    kernel: Kernel | None = None
    screen: Screen = field(
        default_factory=lambda: cast(Screen, os.environ.get(SCREEN_VARIABLE, "auto"))
    )
    devices: tuple[str, ...] | None = None
    numpy_below: int = 1 << 28
    least_screened: tuple[int, int] = (128, 1 << 32)
    tile_size: int | None = None
    screened_tile: tuple[int, int] | None = None
    sinkhorn_limits: tuple[int, float] = (1 << 30, 2e10)

    def __post_init__(self) -> None:
        if self.screen not in get_args(Screen):
            choices = ", ".join(get_args(Screen))
            raise InvalidParameter(
                f"{SCREEN_VARIABLE} must be one of {choices}, not {self.screen!r}"
            )

    def tile_size_of(self, use: str) -> int:
        return self.tile_size or TILE_SIZES[use]


POLICY: ContextVar[KernelPolicy] = ContextVar("kernel_policy", default=KernelPolicy())  # noqa: B039
"""The policy of this thread, and of the threads that its kernels start."""


@contextmanager
def kernel_policy(base: KernelPolicy | None = None, **changes: Any) -> Iterator[None]:
    """Within the block, the policy is `base`, or the one before, with these changes, as in `decimal.localcontext`."""
    token = POLICY.set(replace(base or POLICY.get(), **changes))
    try:
        yield
    finally:
        POLICY.reset(token)


_preferred: set[str] = set()


def is_tensor(M: object) -> TypeGuard[torch.Tensor]:
    """Return whether `M` is a tensor of torch, without importing it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(M, torch.Tensor)


def prefer_torch() -> None:
    """Let torch compute all large products of this process, if it is installed. Jobs call this; clients do not."""
    _preferred.add("torch")


def validate_device(device: str) -> None:
    """Raise InvalidParameter unless `device` is the name of a device."""
    if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:all|:[0-9]+)?", device):
        raise InvalidParameter(
            f'device is "auto", "cpu", "cuda", "cuda:<number>" or "{ALL_DEVICES}", not {device!r}'
        )


def uses_numpy(products: int, device: str = "auto") -> bool:
    """Return whether NumPy computes so many products of numbers of arrays. Raises InvalidParameter for the device.

    It does if they are few, and in a process that has neither imported torch nor called `prefer_torch`, unless the
    policy names a kernel; but never with the name of a CUDA device.
    """
    validate_device(device)
    policy = POLICY.get()
    if device.startswith("cuda") or policy.kernel:
        return policy.kernel == "numpy" and not device.startswith("cuda")
    if device == "auto" and products < policy.numpy_below:
        return True
    return "torch" not in sys.modules and not (_preferred and find_spec("torch"))


def kernel_for(device: str = "auto") -> Kernel:
    """Return the kernel for large products on a device: "numpy", "screened" or "dense"."""
    if uses_numpy(POLICY.get().numpy_below, device):
        return "numpy"
    return kernel_on(resolve_device(device))


def resolve_device(device: str = "auto") -> torch.device:
    """Return the torch device for "auto", "cpu", "cuda" or "cuda:1"; "auto" is CUDA if there is a CUDA device.

    "cuda:all", over which the primitives spread their rows, gives the current CUDA device. Raises InvalidParameter for
    any other name, and for a CUDA device that this machine does not have.
    """
    import torch

    validate_device(device)
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if devices else "cpu"
    if device != "cpu" and not devices:
        raise InvalidParameter(f'device {device!r}: torch sees no CUDA device, use "cpu"')
    index = device.partition(":")[2]
    if index.isdigit() and int(index) >= devices:
        raise InvalidParameter(f"device {device!r}: torch sees {devices} CUDA device(s)")
    return torch.device("cuda" if device == ALL_DEVICES else device)


def kernel_on(device: torch.device) -> Kernel:
    """Return the policy's kernel, or "screened" on a device with native bfloat16, or as the policy says, and otherwise
    "dense"."""
    if (kernel := POLICY.get().kernel) and kernel != "numpy":
        return kernel
    return "screened" if screens_in_bfloat16(device) else "dense"


def screens_in_bfloat16(device: torch.device) -> bool:
    """Return what the policy says, or whether the device multiplies bfloat16 natively, as CUDA from capability 8.0."""
    import torch

    if (screen := POLICY.get().screen) != "auto":
        return screen == "bfloat16"
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def validate_operands(X: Matrix, B: Matrix) -> None:
    """Raise InvalidInput unless both are 2-D arrays or tensors of real numbers, DimensionMismatch if they differ in
    width, and EmptyBank if B has no rows."""
    for name, matrix in (("X", X), ("B", B)):
        if is_tensor(matrix):
            real = not matrix.is_complex() and str(matrix.dtype) != "torch.bool"
        elif isinstance(matrix, np.ndarray):
            real = matrix.dtype.kind in "fiu"
        else:
            raise InvalidInput(
                f"{name} must be a numpy array or a torch tensor, not {type(matrix).__name__}"
            )
        if not real:
            raise InvalidInput(f"{name} must hold real numbers, not {matrix.dtype}")
        if matrix.ndim != 2:
            raise InvalidInput(
                f"{name} must be 2-D, one vector a row, but has shape {tuple(matrix.shape)}"
            )
    if X.shape[1] != B.shape[1]:
        raise DimensionMismatch(f"X has {X.shape[1]} columns and B has {B.shape[1]}")
    if B.shape[0] == 0:
        raise EmptyBank("B has no rows")


Rows = TypeVar("Rows", bound=Matrix)


class TopK(NamedTuple):
    """The k largest inner products of each row. values: (n, k), falling along each row. indices: (n, k) int64, the rows
    of B. Both are of X's type."""

    values: Any
    indices: Any


def topk_mean(X: Rows, B: Matrix, k: int, *, device: str = "auto") -> Rows:
    """Return the mean of the k largest inner products of each row of X with the rows of B.

    X (n, d) and B (m, d): arrays or tensors of finite numbers; 1 ≤ k ≤ m. Returns (n,), an array for an array and a
    tensor on X's device for a tensor, float64 if X and B both are, else float32. Never holds more of the n × m products
    than a tile; the k values are summed in float64.

    Raises InvalidInput (not 2-D), DimensionMismatch, EmptyBank, BankTooSmall (k > m), InvalidParameter.
    """
    validate_operands(X, B)
    means: Rows = _computed("topk_mean", X, B, device, validate_k(k, B))[0]
    return means


def topk(X: Matrix, B: Matrix, k: int, *, device: str = "auto") -> TopK:
    """Return the k largest inner products of each row of X (n, d) with the rows of B (m, d), 1 ≤ k ≤ m.

    The result includes that of every smaller k: the mean for k' ≤ k is that of the first k' values. Inputs,
    types of result, memory and errors are those of `topk_mean`; equal values come in no particular order.
    """
    validate_operands(X, B)
    return TopK(*_computed("topk", X, B, device, validate_k(k, B)))


def logsumexp(
    X: Rows, B: Matrix, tau: float, weights: Matrix | None = None, *, device: str = "auto"
) -> Rows:
    """Return tau · log Σ_i exp((x·b_i + w_i) / tau) for each row x of X.

    It tends to the largest x·b_i + w_i as tau goes to 0. X (n, d) and B (m, d): arrays or tensors of finite numbers;
    tau > 0; weights (m,), 0 by default; −inf leaves a row of B out. Returns (n,) of the type and dtype that `topk_mean`
    returns, in the same memory. Raises as `topk_mean` does; DimensionMismatch also for weights of another length.
    """
    validate_operands(X, B)
    if weights is not None and tuple(weights.shape) != (len(B),):
        raise DimensionMismatch(
            f"weights must have shape ({len(B)},) and have {tuple(weights.shape)}"
        )
    soft: Rows = _computed("logsumexp", X, B, device, positive_number("tau", tau), weights)[0]
    return soft


def validate_k(k: int, bank: Matrix) -> int:
    """Return `k` as an int. Raises InvalidParameter below 1 and BankTooSmall above the bank's rows."""
    k = whole_number("k", k)
    if k > len(bank):
        raise BankTooSmall(
            f"k = {k} but the bank has {len(bank)} rows: use a smaller k or a larger bank"
        )
    return k


def _computed(name: str, X: Matrix, B: Matrix, device: str, *arguments: Any) -> tuple[Any, ...]:
    """Return the result of the kernels' function `name`."""
    on_numpy = not any(map(is_tensor, (X, B, *arguments))) and uses_numpy(
        X.shape[0] * B.shape[0] * B.shape[1], device
    )
    if on_numpy:
        kernel = import_module("milvus_hubness.correction.kernels.on_numpy")
        result: tuple[Any, ...] = getattr(kernel, name)(X, B, *arguments)
        return result
    from milvus_hubness.correction.kernels import operands

    return operands.compute(name, X, B, device, *arguments)


def score_tiles(rows: Array, columns: Array, device: str = "auto") -> Iterator[tuple[slice, Any]]:
    """Yield the inner products of rows (n, d) with all columns (m, d), in tiles of whole rows: arrays or tensors."""
    if uses_numpy(rows.size * len(columns), device):
        size = max(1, POLICY.get().tile_size_of("numpy") // len(columns))
        for start in range(0, len(rows), size):
            yield slice(start, start + size), rows[start : start + size] @ columns.T
        return
    from milvus_hubness.correction.kernels.operands import Operands, full_precision

    operands = Operands.of(rows, columns, device)
    with full_precision(operands.device):
        for part, tile in operands.rows(operands.tile_shape(columns=len(columns))[0]):
            yield from ((part, scores) for _, scores in operands.scores(tile, len(columns)))
