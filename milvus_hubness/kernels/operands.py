"""The two matrices of a kernel: checked, on the device, handed out tile by tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from milvus_hubness.errors import DimensionMismatch, EmptyBank, InvalidInput
from milvus_hubness.kernels.devices import Kernel, kernel_on, resolve_device

Array: TypeAlias = npt.NDArray[Any]
Matrix: TypeAlias = Array | torch.Tensor

HALVES = (torch.bfloat16, torch.float16)
TILE_SIZE = {"cpu": 1 << 21, "cuda": 1 << 26}


@dataclass(frozen=True)
class Operands:
    """X (n, d), still where the caller has it, and B (m, d) on the device in the dtype of the arithmetic.

    kernel: the module that is to compute with them.
    """

    X: Matrix
    bank: torch.Tensor
    kernel: Kernel = "dense"

    @classmethod
    def of(cls, X: Matrix, B: Matrix, device: str) -> Operands:
        """Float64 if both are, else float32; for the fused kernel bfloat16 or float16 where both are tensors
        of it, whose products it adds up in float32. On CUDA if X is there already and `device` is "auto".

        Raises InvalidInput unless both are 2-D arrays or tensors of real numbers, DimensionMismatch if
        they differ in width, and EmptyBank if B has no rows.
        """
        _check_matrix("X", X)
        _check_matrix("B", B)
        if X.shape[1] != B.shape[1]:
            raise DimensionMismatch(f"X has {X.shape[1]} columns and B has {B.shape[1]}")
        if B.shape[0] == 0:
            raise EmptyBank("B has no rows")
        if device == "auto" and isinstance(X, torch.Tensor) and X.is_cuda:
            target = X.device
        else:
            target = resolve_device(device)
        if _is_double(X) and _is_double(B):
            return cls(X, as_tensor(B, torch.float64, target))
        kernel = kernel_on(target)
        tensors = isinstance(X, torch.Tensor) and isinstance(B, torch.Tensor)
        halves = [half for half in HALVES if tensors and X.dtype == B.dtype == half]
        dtype = halves[0] if halves and kernel == "fused" else torch.float32
        return cls(X, as_tensor(B, dtype, target), kernel)

    @property
    def device(self) -> torch.device:
        return self.bank.device

    def tile_shape(self, *, columns: int = 1, spare_columns: int = 0) -> tuple[int, int]:
        """Rows of X and of B per tile: at least `columns` of B, beside room for `spare_columns` more."""
        n, m = self.X.shape[0], self.bank.shape[0]
        size = TILE_SIZE[self.device.type]
        wide = min(m, max(columns, size // max(1, min(n, isqrt(size)))))
        return max(1, size // (wide + spare_columns)), wide

    def rows(self, size: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """X in tiles of `size` rows, on the device."""
        for start in range(0, self.X.shape[0], size):
            part = slice(start, start + size)
            yield part, as_tensor(self.X[part], self.bank.dtype, self.device)

    def columns(self, size: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """B transposed, in tiles of `size` columns."""
        for start in range(0, self.bank.shape[0], size):
            part = slice(start, start + size)
            yield part, self.bank[part].T

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Room for a result, where X is."""
        where = self.X.device if isinstance(self.X, torch.Tensor) else "cpu"
        result = torch.float32 if self.bank.dtype in HALVES else self.bank.dtype
        return torch.empty(shape, dtype=dtype or result, device=where)

    def in_full(self, rows: Matrix | None = None) -> Operands:
        """For the dense kernel, in float32 at least: X or these rows of it, and the bank."""
        bank = self.bank.float() if self.bank.dtype in HALVES else self.bank
        return Operands(self.X if rows is None else rows, bank)

    def as_given(self, result: torch.Tensor) -> Matrix:
        """`result` as what X came as: an array or a tensor."""
        return result if isinstance(self.X, torch.Tensor) else result.numpy()


def as_tensor(M: Matrix, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`M` on the device in `dtype`; it shares memory with M where it can, so it must not be written to."""
    if isinstance(M, torch.Tensor):
        return M.detach().to(device=device, dtype=dtype)
    native = np.ascontiguousarray(M, dtype=np.float64 if dtype == torch.float64 else np.float32)
    return torch.from_numpy(np.asarray(_Lent(native))).to(device)


class _Lent:
    """An array's memory with a writable label: torch warns of read-only arrays, and these are only read."""

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
