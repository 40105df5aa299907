"""The operands of the primitives on torch: tiles of them, their products, and shared work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import isqrt
from threading import Barrier, Lock
from typing import Any, TypeVar

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from milvus_hubness.correction.kernels.checks import (
    Array,
    Matrix,
    is_tensor,
    validate_operands,
)
from milvus_hubness.correction.kernels.libraries import import_faiss
from milvus_hubness.correction.kernels.policy import (
    POLICY,
    Kernel,
    kernel_on,
    resolve_device,
)

T = TypeVar("T")

_SHARING = Lock()
"""Held by the one call of `share_out` that has threads."""


def share_out(work: Callable[[T], None], tasks: Iterator[T], threads: int) -> None:
    """Run `work` on all `tasks` in threads, in which an operation of torch or NumPy uses one
    thread.

    With one thread, and while another call has threads, the work runs in the current thread, and
    the settings stay as they are. Raises errors of `work`.
    """
    if threads == 1 or not _SHARING.acquire(blocking=False):
        for task in tasks:
            work(task)
        return

    drawing = Lock()
    started = Barrier(threads + 1)
    outside = torch.get_num_threads()

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

            # All workers have changed the count of new threads by now: it is put back.
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
    """Within the block, products have full precision, and nothing records gradients.

    That is: no TF32, no sums in bfloat16, no autocast. Only settings that differ are changed, and
    put back.
    """
    restore_float32 = _set_full_float32(device)
    matmul = torch.backends.cuda.matmul
    was_reduced = matmul.allow_bf16_reduced_precision_reduction
    if was_reduced:
        matmul.allow_bf16_reduced_precision_reduction = False
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        restore_float32()
        if was_reduced:
            matmul.allow_bf16_reduced_precision_reduction = True


def _set_full_float32(device: torch.device) -> Callable[[], None]:
    """Let products of float32 have full precision; return what puts the setting back."""
    library: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    backend: Any = getattr(library, "matmul", None)

    # Newer versions of torch have a setting for each backend.
    if hasattr(backend, "fp32_precision"):
        of_backend = backend.fp32_precision
        if of_backend in ("ieee", "none"):
            return lambda: None
        backend.fp32_precision = "ieee"
        return lambda: setattr(backend, "fp32_precision", of_backend)

    of_process = torch.get_float32_matmul_precision()
    if of_process == "highest":
        return lambda: None
    torch.set_float32_matmul_precision("highest")
    return lambda: torch.set_float32_matmul_precision(of_process)


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a @ b, on a CPU by NumPy where that is faster: torch's product is slow on AMD's."""
    is_on_cpu = a.device.type == "cpu" and b.device.type == "cpu"
    if is_on_cpu and a.dtype == torch.float32 and numpy_is_faster():
        array = np.matmul(a.numpy(), b.numpy(), out=None if out is None else out.numpy())
        return torch.from_numpy(array)
    return torch.mm(a, b, out=out)


@cache
def numpy_is_faster() -> bool:
    """Return whether NumPy multiplies float32 faster than torch on this CPU.

    Each computes one product three times, in turns, and its fastest counts.
    """
    a = np.ones((256, 512), np.float32)
    b = np.ones((512, 2048), np.float32)
    a_tensor = torch.from_numpy(a)
    b_tensor = torch.from_numpy(b)
    torch_seconds = math.inf
    numpy_seconds = math.inf
    for _ in range(3):
        started = time.perf_counter()
        np.matmul(a, b)
        numpy_seconds = min(numpy_seconds, time.perf_counter() - started)

        started = time.perf_counter()
        torch.mm(a_tensor, b_tensor)
        torch_seconds = min(torch_seconds, time.perf_counter() - started)
    return numpy_seconds < torch_seconds


ROWS_TO_COPY = 1 << 14
"""Rows of a bank that are copied to a CUDA device at once, through pinned memory."""


@dataclass(frozen=True)
class Operands:
    """What a kernel of torch multiplies."""

    X: Matrix
    """(n, d), on the caller's device."""

    bank: torch.Tensor
    """B (m, d), on the kernel's device and in the dtype of the arithmetic."""

    kernel: Kernel = "dense"
    """The kernel of the device, which may yet be slow for the call: see `on_torch`."""

    @classmethod
    def of(cls, X: Matrix, B: Matrix, device: str) -> Operands:
        """Prepare operands for a device; with "auto", tensors X on CUDA stay there.

        The dtype is float64 if both are float64, else float32. Raises as `validate_operands` and
        `resolve_device` do.
        """
        validate_operands(X, B)
        target = _device_for(X, device)

        if _is_double(X) and _is_double(B):
            dtype = torch.float64
            kernel: Kernel = "dense"
        else:
            dtype = torch.float32
            kernel = kernel_on(target)

        if target.type != "cuda" or (is_tensor(B) and B.is_cuda):
            return cls(X, as_tensor(B, dtype, target), kernel)

        # A bank on the host is copied in tiles, for which it takes the place of X.
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
        """Return how many rows of X and of B make a tile.

        columns: the least number of rows of B. spare_columns: further scores of each row of X that
        are in memory with the tile.
        """
        row_count = self.X.shape[0]
        bank_size = self.bank.shape[0]
        tile_size = POLICY.get().tile_size_of(self.device.type)

        # A square tile, or one as wide as a few rows of X leave room for.
        fitting = tile_size // max(1, min(row_count, isqrt(tile_size)))
        width = min(bank_size, max(columns, fitting))
        height = max(1, tile_size // (width + spare_columns))
        return height, width

    def rows(self, size: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield X in tiles of `size` rows, on the device."""
        parts = _slices(self.X.shape[0], size)
        if self.bank.is_cuda and not (is_tensor(self.X) and self.X.is_cuda):
            yield from self.copied_ahead(parts)
            return
        for part in parts:
            yield part, as_tensor(self.X[part], self.bank.dtype, self.device)

    def copied_ahead(self, parts: list[slice]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield tiles of X, each copied to the CUDA device from pinned memory while the one before
        is worked on.
        """
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
            # Its memory must not be given to another copy while it is worked on.
            tile.record_stream(working)
            ahead += [copied(following) for following in parts[number : number + 1]]
            yield part, tile

    def scores(self, x: torch.Tensor, columns: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the products of rows x with `columns` rows of B at a time.

        All tiles are in the same memory: each overwrites the one before.
        """
        memory = x.new_empty(len(x) * min(columns, len(self.bank)))
        for span in _slices(len(self.bank), columns):
            width = span.stop - span.start
            out = memory[: len(x) * width].view(len(x), width)
            yield span, product(x, self.bank[span].T, out=out)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an empty result tensor on the device of X."""
        device = self.X.device if is_tensor(self.X) else "cpu"
        return torch.empty(shape, dtype=dtype or self.bank.dtype, device=device)

    def temperature(self, tau: float, weights: Matrix | None) -> tuple[float, torch.Tensor]:
        """Return tau, and the weights (m,) in the dtype of the result."""
        # A smaller tau would divide by a number that the dtype rounds to 0.
        tau = max(tau, torch.finfo(self.bank.dtype).tiny)
        if weights is None:
            return tau, self.bank.new_zeros(len(self.bank))
        return tau, as_tensor(weights, self.bank.dtype, self.device)


def _device_for(X: Matrix, device: str) -> torch.device:
    if device == "auto" and is_tensor(X) and X.is_cuda:
        return X.device
    return resolve_device(device)


def _slices(rows: int, size: int) -> list[slice]:
    """Return slices of rows of nearly the same size, at most `size`."""
    ends = np.linspace(0, rows, 1 + -(-rows // size), dtype=np.int64).tolist()
    return [slice(*pair) for pair in pairwise(ends)]


def as_tensor(M: Matrix, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return `M` on the device in `dtype`.

    It may share memory with M, so it must not be written to.
    """
    if is_tensor(M):
        return M.detach().to(device=device, dtype=dtype)

    native = np.ascontiguousarray(M, dtype=np.float64 if dtype == torch.float64 else np.float32)
    return torch.from_numpy(np.asarray(_Lent(native))).to(device)


class _Lent:
    """An array's memory, labelled writable: torch warns about read-only arrays, and these are only
    read.
    """

    def __init__(self, array: Array) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _is_double(M: Matrix) -> bool:
    if is_tensor(M):
        return M.dtype == torch.float64
    return bool(M.dtype == np.float64)
