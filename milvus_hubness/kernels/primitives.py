"""The two primitives, the k largest inner products and their log-sum-exp, by the fastest kernel; and their operands.

On CUDA that is `fused` (Triton), on a CPU that multiplies bfloat16 natively `screened`. Elsewhere, for float64, and for
shapes that these are not made for, it is `dense` (torch). All are exact up to the rounding of float32.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.metadata import distributions
from importlib.util import find_spec
from math import isqrt
from threading import Barrier, Lock
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from milvus_hubness.errors import (
    BankTooSmall,
    DimensionMismatch,
    EmptyBank,
    FaissConflict,
    InvalidInput,
    InvalidParameter,
)

T = TypeVar("T")

_STARTING = Lock()


def share_out(work: Callable[[T], None], tasks: Iterator[T], threads: int) -> None:
    """Run `work` on all `tasks` in threads, in which an operation of torch uses one thread.

    With one thread, the work runs in the current thread, with torch's settings unchanged. Raises errors of `work`.
    """
    if threads == 1:
        for task in tasks:
            work(task)
        return
    drawing, started, outside = Lock(), Barrier(threads + 1), torch.get_num_threads()

    def worker() -> None:
        torch.get_num_threads()  # The first call in a thread sets the count of new threads.
        torch.set_num_threads(1)  # This changes that count too.
        started.wait()
        while True:
            with drawing:
                task = next(tasks, None)
            if task is None:
                return
            work(task)

    with ThreadPoolExecutor(threads) as pool:
        with _STARTING:
            running = [pool.submit(worker) for _ in range(threads)]
            started.wait()
            torch.set_num_threads(outside)
        for future in running:
            future.result()


@cache
def import_faiss() -> Any:
    """Return the faiss module. Raises FaissConflict if two distributions have overwritten each other."""
    installed = {str(distribution.name).lower().replace("_", "-") for distribution in distributions()}
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
        raise InvalidParameter(f"{name} must be a whole number of at least {at_least}{upper}, not {value!r}")
    return int(value)


def finite_number(name: str, value: Any) -> float:
    """Return `value` as a float. Raises InvalidParameter if it is not a number, NaN or infinite."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise InvalidParameter(f"{name} must be a finite number, not {value!r}")
    return float(value)


def positive_number(name: str, value: Any) -> float:
    """Return `value` as a float. Raises InvalidParameter if it is not a finite number above 0."""
    if finite_number(name, value) <= 0:
        raise InvalidParameter(f"{name} must be above 0, not {value!r}")
    return float(value)


def convert_fields(options: object, convert: Callable[..., Any], *names: str, **limits: int) -> None:
    """Convert these fields of a frozen dataclass by `whole_number` or the like. Raises InvalidParameter."""
    for name in names:
        object.__setattr__(options, name, convert(name, getattr(options, name), **limits))


Kernel: TypeAlias = Literal["fused", "screened", "dense"]

ALL_DEVICES = "cuda:all"


def kernel_on(device: torch.device) -> Kernel:
    """Return "fused" on CUDA from capability 8.0 on if Triton is installed, "screened" on a CPU that multiplies
    bfloat16 natively if FAISS is installed, and otherwise "dense".
    """
    if device.type == "cuda":
        capable = torch.cuda.get_device_capability(device) >= (8, 0)
        return "fused" if capable and _is_installed("triton") else "dense"
    return "screened" if multiplies_bfloat16() and _is_installed("faiss") else "dense"


@cache
def _is_installed(module: str) -> bool:
    return find_spec(module) is not None


@cache
def multiplies_bfloat16() -> bool:
    cpu: Any = torch.cpu
    checks = (getattr(cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check is not None and check() for check in checks)


def cuda_devices() -> list[str]:
    """Return the names of all CUDA devices. Raises InvalidParameter if there is none."""
    resolve_device("cuda")
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def resolve_device(device: str = "auto") -> torch.device:
    """Return the torch device for "auto", "cpu", "cuda" or "cuda:1"; "auto" is CUDA if there is a CUDA device.

    "cuda:all", over which the primitives spread their rows, gives the current CUDA device. Raises InvalidParameter for
    any other name, and for a CUDA device that this machine does not have.
    """
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if devices else "cpu"
    name = re.fullmatch(r"cpu|cuda(:all|:(?P<index>[0-9]+))?", device) if isinstance(device, str) else None
    if name is None:
        raise InvalidParameter(f'device is "auto", "cpu", "cuda", "cuda:<number>" or "{ALL_DEVICES}", not {device!r}')
    if device != "cpu" and not devices:
        raise InvalidParameter(f'device {device!r}: torch sees no CUDA device, use "cpu"')
    if name["index"] and int(name["index"]) >= devices:
        raise InvalidParameter(f"device {device!r}: torch sees {devices} CUDA device(s)")
    return torch.device("cuda" if device == ALL_DEVICES else device)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Within the block, float32 products have full precision: no TF32, no bfloat16, no autocast; and no gradients."""
    library: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    backend: Any = getattr(library, "matmul", None)
    full: tuple[str, ...] = ("highest",)
    read: Callable[[], str] = torch.get_float32_matmul_precision
    write: Callable[[str], None] = torch.set_float32_matmul_precision
    if hasattr(backend, "fp32_precision"):  # Newer versions of torch have a setting for each backend.
        full, write = ("ieee", "none"), partial(setattr, backend, "fp32_precision")
        read = partial(getattr, backend, "fp32_precision")
    before = read()
    if before not in full:
        write(full[0])
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        if before not in full:
            write(before)


Array: TypeAlias = npt.NDArray[Any]
Matrix: TypeAlias = Array | torch.Tensor

HALF_PRECISION = (torch.bfloat16, torch.float16)
TILE_SIZE = {"cpu": 1 << 21, "cuda": 1 << 26}


@dataclass(frozen=True)
class Operands:
    """X (n, d) on the caller's device, B (m, d) on the kernel's in the dtype of the arithmetic, and its kernel."""

    X: Matrix
    bank: torch.Tensor
    kernel: Kernel = "dense"

    @classmethod
    def of(cls, X: Matrix, B: Matrix, device: str) -> Operands:
        """Prepare operands for a device; with "auto", tensors X on CUDA stay there.

        The dtype is float64 if both are float64, else float32; the fused kernel takes bfloat16 or float16 if both are
        tensors of it, and accumulates products in float32. Raises InvalidInput unless both are 2-D arrays or tensors of
        real numbers, DimensionMismatch if they differ in width, and EmptyBank if B has no rows.
        """
        _check_matrix("X", X)
        _check_matrix("B", B)
        if X.shape[1] != B.shape[1]:
            raise DimensionMismatch(f"X has {X.shape[1]} columns and B has {B.shape[1]}")
        if B.shape[0] == 0:
            raise EmptyBank("B has no rows")
        target = X.device if device == "auto" and isinstance(X, torch.Tensor) and X.is_cuda else resolve_device(device)
        if _is_double(X) and _is_double(B):
            return cls(X, as_tensor(B, torch.float64, target))
        kernel = kernel_on(target)
        dtype = torch.float32
        if kernel == "fused" and isinstance(B, torch.Tensor) and X.dtype == B.dtype and B.dtype in HALF_PRECISION:
            dtype = B.dtype
        return cls(X, as_tensor(B, dtype, target), kernel)

    @property
    def device(self) -> torch.device:
        return self.bank.device

    def tile_shape(self, *, columns: int = 1, spare_columns: int = 0) -> tuple[int, int]:
        """Return rows of X and of B per tile: at least `columns` of B, with room for `spare_columns` more."""
        n, m = self.X.shape[0], self.bank.shape[0]
        size = TILE_SIZE[self.device.type]
        wide = min(m, max(columns, size // max(1, min(n, isqrt(size)))))
        return max(1, size // (wide + spare_columns)), wide

    def rows(self, size: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield X in tiles of `size` rows, on the device."""
        for start in range(0, self.X.shape[0], size):
            part = slice(start, start + size)
            yield part, as_tensor(self.X[part], self.bank.dtype, self.device)

    def columns(self, size: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield B transposed, in tiles of `size` columns."""
        for start in range(0, self.bank.shape[0], size):
            part = slice(start, start + size)
            yield part, self.bank[part].T

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an empty result tensor on the device of X."""
        where = self.X.device if isinstance(self.X, torch.Tensor) else "cpu"
        result = torch.float32 if self.bank.dtype in HALF_PRECISION else self.bank.dtype
        return torch.empty(shape, dtype=dtype or result, device=where)

    def in_full(self, rows: Matrix | None = None) -> Operands:
        """Return operands for the dense kernel, in at least float32, with these rows in place of X."""
        bank = self.bank.float() if self.bank.dtype in HALF_PRECISION else self.bank
        return Operands(self.X if rows is None else rows, bank)


def as_tensor(M: Matrix, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return `M` on the device in `dtype`. It may share memory with M, so it must not be written to."""
    if isinstance(M, torch.Tensor):
        return M.detach().to(device=device, dtype=dtype)
    native = np.ascontiguousarray(M, dtype=np.float64 if dtype == torch.float64 else np.float32)
    return torch.from_numpy(np.asarray(_Lent(native))).to(device)


class _Lent:
    """An array's memory, labelled writable: torch warns about read-only arrays, and these are only read."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _is_double(M: Matrix) -> bool:
    if isinstance(M, torch.Tensor):
        return M.dtype == torch.float64
    return M.dtype.kind == "f" and M.dtype.itemsize == 8


def _check_matrix(name: str, M: object) -> None:
    if isinstance(M, torch.Tensor):
        real = not M.is_complex() and M.dtype != torch.bool
    elif isinstance(M, np.ndarray):
        real = M.dtype.kind in "fiu"
    else:
        raise InvalidInput(f"{name} must be a numpy array or a torch tensor, not {type(M).__name__}")
    if not real:
        raise InvalidInput(f"{name} must hold real numbers, not {M.dtype}")
    if M.ndim != 2:
        raise InvalidInput(f"{name} must be 2-D, one vector a row, but has shape {tuple(M.shape)}")


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
    from milvus_hubness.kernels.screened import tiles_for

    n, (m, d) = operands.X.shape[0], operands.bank.shape
    is_small = n < LEAST_SCREENED_ROWS or n * m * d < LEAST_SCREENED_WORK
    if name == "logsumexp" or is_small or min(m, tiles_for(d).columns) < SCREENED_SHARE * arguments[0]:
        return "dense"
    return "screened"
