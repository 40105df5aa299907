"""Where the arithmetic runs, and that it runs at full precision there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias

import torch

from milvus_hubness.errors import InvalidParameter

Kernel: TypeAlias = Literal["fused", "screened", "dense"]

ALL_DEVICES = "cuda:all"


def kernel_on(device: torch.device) -> Kernel:
    """What computes the primitives there: "fused" on CUDA from capability 8.0 on where Triton is installed,
    "screened" on a CPU that multiplies bfloat16 natively where FAISS is, else "dense"."""
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
    """The names of all CUDA devices; raises InvalidParameter where there is none."""
    resolve_device("cuda")
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def resolve_device(device: str = "auto") -> torch.device:
    """The torch device that "auto", "cpu", "cuda" or "cuda:1" stands for; "auto" is CUDA where there is one.

    "cuda:all", which the primitives spread their rows over, stands for the current one of them.

    Raises InvalidParameter for any other name, and for a CUDA device that this machine does not have.
    """
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return torch.device("cuda" if devices else "cpu")
    if device == "cpu":
        return torch.device("cpu")
    if device == ALL_DEVICES:
        device = "cuda"
    kind, _, index = device.partition(":") if isinstance(device, str) else ("", "", "")
    if kind != "cuda" or not (device == "cuda" or (index.isascii() and index.isdecimal())):
        raise InvalidParameter(
            f'device is "auto", "cpu", "cuda", "cuda:<number>" or "{ALL_DEVICES}", not {device!r}'
        )
    if not devices:
        raise InvalidParameter(f'device {device!r} was asked for but torch sees no CUDA device; use "cpu"')
    if index and int(index) >= devices:
        raise InvalidParameter(f"device {device!r} was asked for but torch sees {devices} CUDA device(s)")
    return torch.device(device)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Inside, float32 products are float32 products: no TF32, no bfloat16, no autocast; and no gradients."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), _without_shortcuts(device):
        yield


_Setting: TypeAlias = tuple[Callable[[], str], Callable[[str], None], tuple[str, ...]]


@contextmanager
def _without_shortcuts(device: torch.device) -> Iterator[None]:
    read, write, full = _precision_setting(device)
    before = read()
    if before in full:
        yield
        return
    write(full[0])
    try:
        yield
    finally:
        write(before)


def _precision_setting(device: torch.device) -> _Setting:
    """How to read and write the precision of float32 products, and the values that mean all of it."""
    library: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    backend: Any = getattr(library, "matmul", None)
    if hasattr(backend, "fp32_precision"):
        write = partial(setattr, backend, "fp32_precision")
        return lambda: backend.fp32_precision, write, ("ieee", "none")
    return torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, ("highest",)
