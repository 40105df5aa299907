"""The policy by which a kernel, its tile sizes and its device are chosen.

NumPy computes small products, and all of them where torch is not installed and in a process that
neither runs a job nor has imported torch, such as a search service. In other processes torch
computes: where the device multiplies bfloat16 natively by the screened kernel, and elsewhere by the
dense one.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from milvus_hubness.basics.words import expect_word
from milvus_hubness.errors import InvalidParameter

if TYPE_CHECKING:
    import torch

Kernel: TypeAlias = Literal["numpy", "screened", "buffered", "dense"]
Screen: TypeAlias = Literal["auto", "bfloat16", "float32"]

WAIT_POLICY_VARIABLE = "OMP_WAIT_POLICY"
"""The environment variable that says what threads of OpenMP do while they wait."""
SCREEN_VARIABLE = "MILVUS_HUBNESS_KERNEL"
"""The environment variable with the default of `KernelPolicy.screen`."""
INTERPRETER_VARIABLE = "TRITON_INTERPRET"
"""The environment variable that lets Triton interpret its kernels, for tests without a GPU."""
ALL_DEVICES = "cuda:all"
TILE_SIZES = {"numpy": 1 << 20, "cpu": 1 << 21, "cuda": 1 << 26, "screened": 1 << 29}
"""Default number of scores in memory at once: on NumPy, by torch on a CPU and on a CUDA device, and
by the screened kernel on a CUDA device."""


@dataclass(frozen=True)
class KernelPolicy:
    """What decides between kernels and between their sizes. Raises InvalidParameter."""

    kernel: Kernel | None = None
    """The kernel of all calls, where "numpy" holds for those on arrays; None chooses by device.

    It never chooses "buffered", which no GPU has run yet, and which is "screened" where Triton does
    not run."""

    screen: Screen = field(
        default_factory=lambda: cast(Screen, os.environ.get(SCREEN_VARIABLE) or "auto")
    )
    """Whether to screen in bfloat16; "auto" does so where the device multiplies it natively."""

    devices: tuple[str, ...] | None = None
    """The devices of "cuda:all"; None for all CUDA devices."""

    numpy_below: int = 1 << 28
    """Products of numbers below which NumPy is as fast as torch."""

    least_screened: tuple[int, int] = (128, 1 << 32)
    """Rows, and products of numbers, from which a screen is faster than the dense kernel."""

    tile_size: int | None = None
    """Scores in memory at once; None takes them from `TILE_SIZES`."""

    screened_tile: tuple[int, int] | None = None
    """Rows and columns of a tile of the screened kernel; None chooses by dimension and device."""

    sinkhorn_limits: tuple[int, float] = (1 << 30, 2e10)
    """Bytes of scores that a Sinkhorn fit stores on a CPU, and pairs that it recomputes."""

    def __post_init__(self) -> None:
        if self.kernel is not None:
            expect_word("kernel", self.kernel, Kernel)
        # A policy is made for each write, and nearly all have the default.
        if self.screen != "auto":
            expect_word(f"screen or ${SCREEN_VARIABLE}", self.screen, Screen)

    def tile_size_of(self, use: str) -> int:
        """Return the scores in memory at once for a use, a key of `TILE_SIZES`."""
        return self.tile_size or TILE_SIZES[use]


POLICY: ContextVar[KernelPolicy] = ContextVar("kernel_policy", default=KernelPolicy())  # noqa: B039
"""The policy of this thread, and of the threads that its kernels start."""


@contextmanager
def kernel_policy(base: KernelPolicy | None = None, **changes: Any) -> Iterator[None]:
    """Within the block, change the policy, as `decimal.localcontext` does its context.

    base: the policy to change; by default the one before the block.
    """
    token = POLICY.set(replace(base or POLICY.get(), **changes))
    try:
        yield
    finally:
        POLICY.reset(token)


_preferred: set[str] = set()
"""Has "torch" after a call of `prefer_torch` in this process."""


def prefer_torch() -> None:
    """Let torch compute all large products of this process, if it is installed.

    Jobs call this; clients do not.
    """
    _preferred.add("torch")
    # NumPy, torch and FAISS have threads of their own, and take turns. Threads of OpenMP keep their cores
    # busy while they wait, and so take them from the others (`benchmarks.check_time`). OpenMP reads
    # this when torch is imported.
    if "torch" not in sys.modules:
        os.environ.setdefault(WAIT_POLICY_VARIABLE, "passive")


def has_torch() -> bool:
    """Return whether torch is installed. Nothing else decides what runs without it."""
    return _is_installed("torch")


def uses_numpy(products: int, device: str = "auto") -> bool:
    """Return whether NumPy computes so many products of numbers of arrays.

    It does if they are few, and in a process that has neither imported torch nor called
    `prefer_torch`, unless the policy names a kernel; but never with the name of a CUDA device.
    Raises InvalidParameter for the device.
    """
    validate_device(device)
    if device.startswith("cuda"):
        return False

    policy = POLICY.get()
    if policy.kernel:
        return policy.kernel == "numpy"
    if device == "auto" and products < policy.numpy_below:
        return True

    is_torch_wanted = "torch" in sys.modules or bool(_preferred)
    return not (is_torch_wanted and has_torch())


def kernel_on(device: torch.device) -> Kernel:
    """Return the kernel of a torch device: the policy's, or "screened" where that is fast."""
    kernel = POLICY.get().kernel
    if kernel == "buffered" and not runs_triton(device):
        return "screened"
    if kernel and kernel != "numpy":
        return kernel
    return "screened" if screens_in_bfloat16(device) else "dense"


def runs_triton(device: torch.device) -> bool:
    """Return whether Triton is installed, and compiles for the device or interprets."""
    is_interpreted = os.environ.get(INTERPRETER_VARIABLE) == "1"
    return (device.type == "cuda" or is_interpreted) and _is_installed("triton")


def screens_in_bfloat16(device: torch.device) -> bool:
    """Return what the policy says, or whether the device multiplies bfloat16 natively."""
    import torch

    screen = POLICY.get().screen
    if screen != "auto":
        return screen == "bfloat16"
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def validate_device(device: str) -> None:
    """Raise InvalidParameter unless `device` is the name of a device."""
    if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:all|:[0-9]+)?", device):
        raise InvalidParameter(
            f'device is "auto", "cpu", "cuda", "cuda:<number>" or "{ALL_DEVICES}", not {device!r}'
        )


def resolve_device(device: str = "auto") -> torch.device:
    """Return the torch device for "auto", "cpu", "cuda" or "cuda:1".

    "auto" is CUDA if there is a CUDA device. "cuda:all", over which the primitives spread their
    rows, gives the current CUDA device. Raises InvalidParameter for any other name, and for a CUDA
    device that this machine does not have.
    """
    import torch

    validate_device(device)
    device_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if device_count else "cpu"
    if device != "cpu" and not device_count:
        raise InvalidParameter(f'device {device!r}: torch sees no CUDA device, use "cpu"')

    index = device.partition(":")[2]
    if index.isdigit() and int(index) >= device_count:
        raise InvalidParameter(f"device {device!r}: torch sees {device_count} CUDA device(s)")
    return torch.device("cuda" if device == ALL_DEVICES else device)


def _is_installed(module: str) -> bool:
    # A module that a process has banned is None there.
    if module in sys.modules:
        return sys.modules[module] is not None
    return find_spec(module) is not None
