"""The screen with buffers finds what the screen with groups finds, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is not installed: make test-triton")

from benchmarks import kernels_gpu
from milvus_hubness.correction.kernels import buffered, screened, topk, topk_mean
from milvus_hubness.correction.kernels.policy import POLICY, kernel_policy
from tests.support.storeys import ROOT

HAS_GPU = torch.cuda.is_available()
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(HAS_GPU, reason="compiled for the GPU instead")),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not HAS_GPU, reason="torch sees no CUDA device"),
        ],
    ),
]
RNG = np.random.default_rng(0)


@pytest.fixture(params=DEVICES)
def device(request):
    """The device, with one thread: Triton's interpreter has the kernel that it runs in a global."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield request.param
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def small_tiles():
    with kernel_policy(
        kernel="buffered", screen="bfloat16", least_screened=(0, 0), screened_tile=(40, 1024)
    ):
        yield


@pytest.fixture
def rows_left_over(monkeypatch):
    """How many rows were left to the screen with groups, by each call that left some."""
    rows = []

    def counted(real):
        def run(operands, k):
            if POLICY.get().kernel == "buffered":
                rows.append(len(operands.X))
            return real(operands, k)

        return run

    for name in ("topk_mean", "topk"):
        monkeypatch.setattr(screened, name, counted(getattr(screened, name)))
    return rows


def unit(n, d):
    rows = RNG.standard_normal((n, d)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def with_mean_cosine(n, m, d, cosine):
    common = unit(1, d)
    return [
        (np.sqrt(1 - cosine) * unit(rows, d) + np.sqrt(cosine) * common).astype(np.float32)
        for rows in (n, m)
    ]


def check(X, B, k, device, atol=1e-6):
    """The results are those of float64, and the means those of the screen with groups: to 1e-6 of their standard
    deviation, and two roundings to float32."""
    exact = -np.sort(-(X.astype(np.float64) @ B.astype(np.float64).T), axis=1)[:, :k]
    means = topk_mean(X, B, k, device=device)
    values, indices = topk(X, B, k, device=device)
    with kernel_policy(kernel="screened"):
        expected = topk_mean(X, B, k, device=device)

    np.testing.assert_allclose(means, expected, rtol=2**-22, atol=1e-6 * exact.mean(1).std())
    np.testing.assert_allclose(values, exact, rtol=0, atol=atol)
    found = np.take_along_axis(X.astype(np.float64) @ B.astype(np.float64).T, indices, 1)
    np.testing.assert_allclose(found, exact, rtol=0, atol=atol)
    assert all(len(set(row)) == k for row in indices.tolist())


@pytest.mark.parametrize(
    ("m", "k"), [(700, 20), (1025, 1), (3001, 20), (9999, 7)], ids=lambda value: str(value)
)
def test_tiles_of_any_number_and_end(rows_left_over, device, m, k):
    """One tile that is not full, two of which one is shorter, three, and ten. The last row of the bank, whose score
    shorter tiles keep beyond their end, is near all rows."""
    B = unit(m, 100)
    check(unit(41, 100) + B[-1], B, k, device)
    assert rows_left_over == []


def test_no_row_is_left_over_at_a_mean_cosine_of_0_95(rows_left_over, device):
    X, B = with_mean_cosine(20, 4000, 514, 0.95)
    means = topk_mean(X, B, 16, device=device)
    exact = np.sort(X.astype(np.float64) @ B.astype(np.float64).T, axis=1)[:, -16:].mean(1)
    np.testing.assert_allclose(means, exact, rtol=0, atol=3e-6)
    assert rows_left_over == []


def test_a_sorted_bank(rows_left_over, device):
    """From the farthest to the nearest, all tiles but the last would have no candidate, and it too many."""
    X, B = unit(1, 32) + 0.1 * unit(20, 32), unit(6000, 32)
    B = B[np.argsort(B @ X.mean(0))]
    check(X, B, 30, device)
    assert rows_left_over == []


def test_equal_scores_are_left_to_the_screen_with_groups(rows_left_over, device):
    """Zero rows tie with the whole bank, and the others with twice as many rows as a buffer has places."""
    X, B = unit(12, 32), unit(3000, 32)
    X[:2] = 0
    B[::2] = B[0]
    X[2:] += B[0]
    check(X, B, 5, device)
    assert rows_left_over == [12] * 2

    rows_left_over.clear()
    check(X, unit(3000, 32), 5, device)
    assert rows_left_over == [2] * 2


def test_scores_closer_than_bfloat16_can_tell(rows_left_over, device):
    """Which of the copies are nearest is seen in float32 alone."""
    base = unit(1, 64)
    copies = base + 1e-5 * RNG.standard_normal((60, 64)).astype(np.float32)
    check(base + 0.02 * unit(10, 64), np.concatenate([unit(4000, 64), copies]), 20, device)
    assert rows_left_over == []


def test_a_k_near_the_size_of_the_bank_is_left_to_the_dense_kernel(
    rows_left_over, device, monkeypatch
):
    monkeypatch.setattr(buffered, "topk_mean", None)
    X, B = unit(10, 32), unit(1000, 32)
    for k in (600, 999, 1000):
        exact = np.sort(X.astype(np.float64) @ B.T, axis=1)[:, -k:].mean(1)
        np.testing.assert_allclose(topk_mean(X, B, k, device=device), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("number", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("operand", ["X", "B"])
def test_numbers_without_a_bound_give_what_the_screen_with_groups_gives(device, operand, number):
    X, B = unit(12, 32), unit(2100, 32)
    {"X": X, "B": B}[operand][3, 5] = number
    means = topk_mean(X, B, 5, device=device)
    values, _ = topk(X, B, 5, device=device)
    with kernel_policy(kernel="screened"):
        expected = topk(X, B, 5, device=device).values
        np.testing.assert_allclose(means, topk_mean(X, B, 5, device=device), rtol=2**-22)
        np.testing.assert_allclose(values, expected, rtol=2**-22, atol=1e-7)


class Awaited(TorchDispatchMode):
    """Counts the operations of torch that wait for a number of the device."""

    NAMES = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "masked_select", "unique")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += any(name in str(func) for name in self.NAMES)
        return func(*args, **(kwargs or {}))


def test_no_number_is_awaited_in_the_loops(device):
    """Neither for more tiles of the bank nor for more rows."""
    counts = []
    for n, m in ((10, 1000), (10, 8000), (90, 1000)):
        X, B = (torch.from_numpy(unit(rows, 32)).to(device) for rows in (n, m))
        with Awaited() as awaited:
            topk_mean(X, B, 4, device=device)
        counts.append(awaited.count)
    assert counts == [counts[0]] * 3
    assert 0 < counts[0] < 10


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="torch sees no CUDA device")
@pytest.mark.parametrize("cosine", [0, 0.8, 0.95])
def test_real_sizes_on_cuda(rows_left_over, cosine):
    X, B = (
        torch.from_numpy(rows).to("cuda") for rows in with_mean_cosine(3000, 300_000, 512, cosine)
    )
    exact = (X.double() @ B.double().T).topk(512).values
    with kernel_policy(screened_tile=None):
        for k in (16, 128, 512):
            means = topk_mean(X, B, k).double()
            torch.testing.assert_close(means, exact[:, :k].mean(1), rtol=0, atol=5e-6)
            torch.testing.assert_close(
                topk(X, B, k).values.double(), exact[:, :k], rtol=0, atol=5e-6
            )
    assert rows_left_over == []


def test_the_benchmark_compares_it(device, monkeypatch, capsys):
    all_inputs = kernels_gpu.inputs
    monkeypatch.setattr(kernels_gpu, "inputs", lambda *sizes: islice(all_inputs(*sizes), 1))
    sizes = ["--rows", "10", "--bank", "1000", "--dim", "16", "--k", "8"]
    assert kernels_gpu.main(["--device", device, *sizes]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if "| 8 | buffered |" in line]
    assert row.split("|")[-2].strip() == "0"


def test_compiled_for_an_h100_no_register_is_spilled():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    compiled = subprocess.run(
        [sys.executable, "-m", "benchmarks.compiled_kernels"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert compiled.returncode == 0, compiled.stdout + compiled.stderr
    assert compiled.stdout.count(" 0 bytes of stack") == 4
