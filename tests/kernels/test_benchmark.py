"""The benchmark for CUDA devices runs on a CPU too."""

from __future__ import annotations

import pytest
import torch

from benchmarks import kernels_gpu
from milvus_hubness.kernels import screened


def run():
    sizes = {"--rows": 70, "--bank": 3000, "--dim": 16, "--k": 4}
    return kernels_gpu.main(["--device", "cpu", *(str(part) for pair in sizes.items() for part in pair)])


def test_every_kernel_is_compared_on_a_cpu(capsys):
    assert run() == 0
    lines = capsys.readouterr().out.splitlines()
    by = ["screened", "dense", "torch.topk over tiles", "product alone", "FAISS flat"]
    for vectors in ("float32", "bfloat16", "cosine 0.8", "L2"):
        cells = [line.strip("| ").split(" | ") for line in lines if line.startswith(f"| {vectors} | 4 |")]
        assert [cell[2] for cell in cells] == by
        assert all(float(cell[4]) > 0 for cell in cells)


def test_it_fails_where_the_kernel_is_wrong(monkeypatch, capsys):
    real = screened.topk_mean
    monkeypatch.setattr(screened, "topk_mean", lambda operands, k: (real(operands, k)[0] + 1e-3,))
    assert run() == 1


def test_a_device_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        kernels_gpu.main(["--device", "cuda"])
    assert "pass --device cpu" in capsys.readouterr().err
