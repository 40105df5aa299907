"""Matrices as the kernels take them, arrays or tensors, and checks of arguments."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from milvus_hubness.errors import (
    BankTooSmall,
    DimensionMismatch,
    EmptyBank,
    InvalidInput,
    InvalidParameter,
)

Array: TypeAlias = npt.NDArray[Any]
if TYPE_CHECKING:
    import torch

    Matrix: TypeAlias = Array | torch.Tensor
else:
    Matrix = Any


def is_tensor(M: object) -> TypeGuard[torch.Tensor]:
    """Return whether `M` is a tensor of torch, without importing it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(M, torch.Tensor)


def is_array(M: object) -> TypeGuard[Array]:
    """Return whether `M` is an array of NumPy."""
    return isinstance(M, np.ndarray)


def whole_number(name: str, value: Any, *, at_least: int = 1, at_most: int | None = None) -> int:
    """Return `value` as an int.

    Raises InvalidParameter if it is not an integer (True is not) or out of range.
    """
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole or value < at_least or (at_most is not None and value > at_most):
        upper = "" if at_most is None else f" and at most {at_most}"
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
    number = finite_number(name, value)
    if number <= 0:
        raise InvalidParameter(f"{name} must be above 0, not {value!r}")
    return number


def convert_fields(
    options: object, convert: Callable[..., Any], *names: str, **limits: int
) -> None:
    """Convert these fields of a frozen dataclass by `whole_number` or the like.

    Raises InvalidParameter.
    """
    for name in names:
        value = convert(name, getattr(options, name), **limits)
        object.__setattr__(options, name, value)


def validate_operands(X: Matrix, B: Matrix) -> None:
    """Check that both are matrices of real numbers whose rows have a product.

    Raises InvalidInput unless both are 2-D arrays or tensors of real numbers, DimensionMismatch if
    they differ in width, and EmptyBank if B has no rows.
    """
    _validate_matrix("X", X)
    _validate_matrix("B", B)
    if X.shape[1] != B.shape[1]:
        raise DimensionMismatch(f"X has {X.shape[1]} columns and B has {B.shape[1]}")
    if B.shape[0] == 0:
        raise EmptyBank("B has no rows")


def _validate_matrix(name: str, matrix: Matrix) -> None:
    if is_tensor(matrix):
        is_real = not matrix.is_complex() and str(matrix.dtype) != "torch.bool"
    elif isinstance(matrix, np.ndarray):
        is_real = matrix.dtype.kind in "fiu"
    else:
        raise InvalidInput(
            f"{name} must be a numpy array or a torch tensor, not {type(matrix).__name__}"
        )

    if not is_real:
        raise InvalidInput(f"{name} must hold real numbers, not {matrix.dtype}")
    if matrix.ndim != 2:
        raise InvalidInput(
            f"{name} must be 2-D, one vector a row, but has shape {tuple(matrix.shape)}"
        )


def validate_k(k: int, bank: Matrix) -> int:
    """Return `k` as an int.

    Raises InvalidParameter below 1 and BankTooSmall above the bank's rows.
    """
    k = whole_number("k", k)
    if k > len(bank):
        raise BankTooSmall(
            f"k = {k} but the bank has {len(bank)} rows: use a smaller k or a larger bank"
        )
    return k
