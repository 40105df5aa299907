from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from milvus_hubness.correction.kernels import topk_mean
from milvus_hubness.correction.kernels.policy import (
    KernelPolicy,
    kernel_on,
    kernel_policy,
    resolve_device,
)
from milvus_hubness.errors import InvalidParameter


def test_auto_is_cuda_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device() == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda")
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    assert resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(InvalidParameter, match=r"cuda:2.*2 CUDA"):
        resolve_device("cuda:2")


def test_cuda_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "cuda:0"):
        with pytest.raises(InvalidParameter, match="sees no CUDA device"):
            resolve_device(name)


@pytest.mark.parametrize(
    "name", ["gpu", "mps", "cuda:", "cuda:x", "cuda:-1", "CPU", "cpu:0", "", None, 0]
)
def test_unknown_devices(name):
    with pytest.raises(InvalidParameter, match="device is"):
        resolve_device(name)


def test_buffers_are_used_only_where_the_policy_names_them_and_triton_runs(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with kernel_policy(KernelPolicy(kernel="buffered")):
        assert (kernel_on(cuda), kernel_on(cpu)) == ("buffered", "screened")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert kernel_on(cpu) == "buffered"

        monkeypatch.setitem(sys.modules, "triton", None)
        assert (kernel_on(cuda), kernel_on(cpu)) == ("screened", "screened")

    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with kernel_policy(KernelPolicy(screen="auto")):
        assert kernel_on(cuda) == "screened"


def test_without_triton_the_results_are_those_of_the_screen_with_groups(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    rows = np.random.default_rng(0).standard_normal((1200, 16)).astype(np.float32)
    means = {}
    for kernel in ("screened", "buffered"):
        with kernel_policy(kernel=kernel, least_screened=(0, 0)):
            means[kernel] = topk_mean(rows[:150], rows, 5, device="cpu")
    np.testing.assert_array_equal(means["buffered"], means["screened"])
