"""Devices, operands and kernels of the primitives on torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import import_module
from itertools import pairwise
from math import isqrt
from threading import Barrier, Lock
from typing import Any, TypeVar

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from milvus_hubness.correction.kernels.primitives import (
    ALL_DEVICES,
    POLICY,
    Array,
    Kernel,
    Matrix,
    import_faiss,
    is_tensor,
    kernel_on,
    resolve_device,
    screens_in_bfloat16,
    validate_operands,
)

T = TypeVar("T")

_SHARING = Lock()


def share_out(work: Callable[[T], None], tasks: Iterator[T], threads: int) -> None:
    """Run `work` on all `tasks` in threads, in which an operation of torch or NumPy uses one thread.

    With one thread, and while another call has threads, the work runs in the current thread, and the settings stay as
    they are. Raises errors of `work`.
    """
    if threads == 1 or not _SHARING.acquire(blocking=False):
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

    try:
        with threadpool_limits(1, "blas"), ThreadPoolExecutor(threads) as pool:
            running = [pool.submit(copy_context().run, worker) for _ in range(threads)]
            started.wait()
            torch.set_num_threads(outside)
            for future in running:
                future.result()
    finally:
        _SHARING.release()


@contextmanager
def faiss_with_own_threads() -> Iterator[Any]:
    """Yield FAISS, which within the block uses as many threads as torch does in this thread."""
    faiss = import_faiss()
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(torch.get_num_threads())
    try:
        yield faiss
    finally:
        faiss.omp_set_num_threads(before)


def cuda_devices() -> list[str]:
    """Return the names of all CUDA devices. Raises InvalidParameter if there is none."""
    resolve_device("cuda")
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Within the block, products have full precision: no TF32, no sums in bfloat16, no autocast; and no gradients."""
    matmul = torch.backends.cuda.matmul
    library: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    backend: Any = getattr(library, "matmul", None)
    full: tuple[str, ...] = ("highest",)
    read: Callable[[], str] = torch.get_float32_matmul_precision
    write: Callable[[str], None] = torch.set_float32_matmul_precision
    if hasattr(
        backend, "fp32_precision"
    ):  # Newer versions of torch have a setting for each backend.
        full, write = ("ieee", "none"), partial(setattr, backend, "fp32_precision")
        read = partial(getattr, backend, "fp32_precision")
    before, reduced = read(), matmul.allow_bf16_reduced_precision_reduction
    if before not in full:
        write(full[0])
    if reduced:
        matmul.allow_bf16_reduced_precision_reduction = False
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        if before not in full:
            write(before)
        if reduced:
            matmul.allow_bf16_reduced_precision_reduction = True


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a @ b, by NumPy on a CPU where its library multiplies float32 faster: torch's is slow on AMD's."""
    if (
        a.dtype == torch.float32
        and a.device.type == "cpu"
        and b.device.type == "cpu"
        and numpy_is_faster()
    ):
        return torch.from_numpy(
            np.matmul(a.numpy(), b.numpy(), out=None if out is None else out.numpy())
        )
    return torch.mm(a, b, out=out)


def multiplies_parts(bank: torch.Tensor) -> bool:
    """Return whether products with the bank are computed `in_parts`: on CUDA, where bfloat16 is native."""
    return bank.is_cuda and bank.dtype == torch.float32 and screens_in_bfloat16(bank.device)


def in_parts(rows: torch.Tensor, *, of_bank: bool) -> torch.Tensor:
    """Return float32 rows (n, d) in bfloat16, (n, 3 d), for one product x_h·b_h + x_h·b_l + x_l·b_h: each number is the
    sum of a high and a low part, but for 2^-16 of it. Except for the rounding of a float32 sum, a product is off by at
    most 3 · 2^-16 |x|·|b|. It takes a fraction of the time of one in float32."""
    high = rows.bfloat16()
    low = (rows - high).bfloat16()
    return torch.cat([high, low, high] if of_bank else [high, high, low], dim=1)


@cache
def numpy_is_faster() -> bool:
    """Return whether NumPy multiplies float32 faster than torch on this CPU, by three products of each in turns."""
    a, b, seconds = (
        np.ones((256, 512), np.float32),
        np.ones((512, 2048), np.float32),
        [math.inf, math.inf],
    )
    x, y = torch.from_numpy(a), torch.from_numpy(b)
    for by_numpy in (True, False) * 3:
        started = time.perf_counter()
        np.matmul(a, b) if by_numpy else torch.mm(x, y)
        seconds[by_numpy] = min(seconds[by_numpy], time.perf_counter() - started)
    return seconds[True] < seconds[False]


ROWS_TO_COPY = 1 << 14
"""Rows of a bank that are copied to a CUDA device at once, through pinned memory."""


@dataclass(frozen=True)
class Operands:
    """X (n, d) on the caller's device, B (m, d) on the kernel's in the dtype of the arithmetic, and its kernel."""

    X: Matrix
    bank: torch.Tensor
    kernel: Kernel = "dense"

    @classmethod
    def of(cls, X: Matrix, B: Matrix, device: str) -> Operands:
        """Prepare operands for a device; with "auto", tensors X on CUDA stay there.

        The dtype is float64 if both are float64, else float32. Raises as `validate_operands` and `resolve_device` do.
        """
        validate_operands(X, B)
        target = (
            X.device if device == "auto" and is_tensor(X) and X.is_cuda else resolve_device(device)
        )
        dtype = torch.float64 if _is_double(X) and _is_double(B) else torch.float32
        kernel: Kernel = "dense" if dtype == torch.float64 else kernel_on(target)
        if target.type != "cuda" or (is_tensor(B) and B.is_cuda):
            return cls(X, as_tensor(B, dtype, target), kernel)
        bank = torch.empty(tuple(B.shape), dtype=dtype, device=target)
        for part, tile in cls(B, bank).rows(ROWS_TO_COPY):
            bank[part] = tile
        return cls(X, bank, kernel)

    @property
    def device(self) -> torch.device:
        return self.bank.device

    @property
    def threads(self) -> int:
        """The number of threads that share the rows of X: those of torch, and one on CUDA."""
        return 1 if self.bank.is_cuda else torch.get_num_threads()

    def tile_shape(self, *, columns: int = 1, spare_columns: int = 0) -> tuple[int, int]:
        """Return rows of X and of B per tile: at least `columns` of B, with room for `spare_columns` more."""
        n, m = self.X.shape[0], self.bank.shape[0]
        size = POLICY.get().tile_size_of(self.device.type)
        wide = min(m, max(columns, size // max(1, min(n, isqrt(size)))))
        return max(1, size // (wide + spare_columns)), wide

    def rows(self, size: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield X in tiles of `size` rows, on the device."""
        parts = _slices(self.X.shape[0], size)
        if self.bank.is_cuda and not (is_tensor(self.X) and self.X.is_cuda):
            yield from self.copied_ahead(parts)
            return
        for part in parts:
            yield part, as_tensor(self.X[part], self.bank.dtype, self.device)

    def copied_ahead(self, parts: list[slice]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield tiles of X, each copied to the CUDA device from pinned memory while the one before is worked on."""
        copying: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        working = torch.cuda.current_stream(self.device)

        def copied(part: slice) -> torch.Tensor:
            pinned = as_tensor(self.X[part], self.bank.dtype, torch.device("cpu")).pin_memory()
            with torch.cuda.stream(copying):
                return pinned.to(self.device, non_blocking=True)

        ahead = [copied(part) for part in parts[:1]]
        for number, part in enumerate(parts, 1):
            tile = ahead.pop()
            working.wait_stream(copying)
            tile.record_stream(working)
            ahead += [copied(following) for following in parts[number : number + 1]]
            yield part, tile

    def scores(self, x: torch.Tensor, columns: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the products of rows x with `columns` rows of B at a time, in one tile of memory: each overwrites the
        one before."""
        room = x.new_empty(len(x) * min(columns, len(self.bank)))
        if self._bank_in_parts is not None:
            x = in_parts(x, of_bank=False)
        for part in _slices(len(self.bank), columns):
            bank = self.bank[part] if self._bank_in_parts is None else self._bank_in_parts[part]
            out = room[: len(x) * len(bank)].view(len(x), len(bank))
            if bank.dtype == room.dtype:
                yield part, product(x, bank.T, out=out)
            else:
                yield part, torch.mm(x, bank.T, room.dtype, out=out)

    @cached_property
    def _bank_in_parts(self) -> torch.Tensor | None:
        return in_parts(self.bank, of_bank=True) if multiplies_parts(self.bank) else None

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an empty result tensor on the device of X."""
        where = self.X.device if is_tensor(self.X) else "cpu"
        return torch.empty(shape, dtype=dtype or self.bank.dtype, device=where)

    def temperature(self, tau: float, weights: Matrix | None) -> tuple[float, torch.Tensor]:
        """Return tau, and the weights in the dtype of the result."""
        tau = max(tau, torch.finfo(self.bank.dtype).tiny)
        if weights is None:
            return tau, self.bank.new_zeros(len(self.bank))
        return tau, as_tensor(weights, self.bank.dtype, self.device)


def _slices(rows: int, size: int) -> list[slice]:
    """Return slices of rows of nearly the same size, at most `size`."""
    ends = np.linspace(0, rows, 1 + -(-rows // size), dtype=np.int64).tolist()
    return [slice(*pair) for pair in pairwise(ends)]


def as_tensor(M: Matrix, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return `M` on the device in `dtype`. It may share memory with M, so it must not be written to."""
    if is_tensor(M):
        return M.detach().to(device=device, dtype=dtype)
    native = np.ascontiguousarray(M, dtype=np.float64 if dtype == torch.float64 else np.float32)
    return torch.from_numpy(np.asarray(_Lent(native))).to(device)


class _Lent:
    """An array's memory, labelled writable: torch warns about read-only arrays, and these are only read."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _is_double(M: Matrix) -> bool:
    if is_tensor(M):
        return M.dtype == torch.float64
    return bool(M.dtype == np.float64)


SCREENED_SHARE = 32
"""How many times larger than k a tile of the bank must be: else the bound of a screen is loose."""


def compute(name: str, X: Matrix, B: Matrix, device: str, *arguments: Any) -> tuple[Any, ...]:
    """Return the result of the kernels' function `name`: arrays for an array X, tensors for a tensor. With "cuda:all",
    each device gets a share of X's rows and all of B."""
    places = (POLICY.get().devices or cuda_devices()) if device == ALL_DEVICES else [device]
    if len(places) < 2:
        return _on_one(name, B, arguments, X, places[0])
    size = max(1, -(-X.shape[0] // len(places)))
    shares = [X[start : start + size] for start in range(0, max(1, X.shape[0]), size)]
    runs = [copy_context().run for _ in places]
    # Settings of the whole process change once: a thread that ends must not restore them for the others.
    with full_precision(resolve_device(places[0])), ThreadPoolExecutor(len(places)) as pool:
        parts = list(
            pool.map(lambda run, *own: run(_on_one, name, B, arguments, *own), runs, shares, places)
        )
    join: Any = torch.cat if is_tensor(X) else np.concatenate
    return tuple(join(part) for part in zip(*parts, strict=True))


def _on_one(
    name: str, B: Matrix, arguments: tuple[Any, ...], X: Matrix, device: str
) -> tuple[Any, ...]:
    operands = Operands.of(X, B, device)
    if name == "logsumexp":
        arguments = operands.temperature(*arguments)
    kernel = import_module(
        f"milvus_hubness.correction.kernels.{_kernel(name, operands, arguments)}"
    )
    with full_precision(operands.device):
        results: tuple[torch.Tensor, ...] = getattr(kernel, name)(operands, *arguments)
    return results if is_tensor(X) else tuple(result.numpy() for result in results)


def _kernel(name: str, operands: Operands, arguments: tuple[Any, ...]) -> Kernel:
    """Return the device's kernel, or "dense" where the screen is not made for the call."""
    if operands.kernel != "screened":
        return operands.kernel
    from milvus_hubness.correction.kernels.screened import tiles_for

    n, (m, d), (rows, work) = operands.X.shape[0], operands.bank.shape, POLICY.get().least_screened
    is_small = n < rows or n * m * d < work
    if (
        name == "logsumexp"
        or is_small
        or min(m, tiles_for(d, operands.device).columns) < SCREENED_SHARE * arguments[0]
    ):
        return "dense"
    return "screened"
