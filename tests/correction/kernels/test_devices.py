from __future__ import annotations

import pytest
import torch

from milvus_hubness.correction.kernels.primitives import resolve_device
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
