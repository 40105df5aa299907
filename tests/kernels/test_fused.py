"""The Triton kernels against float64: compiled where there is a CUDA device, else in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from milvus_hubness.estimators import NNN, Sinkhorn
from milvus_hubness.kernels import dense, fused, logsumexp, topk, topk_mean
from milvus_hubness.kernels.fused import Threshold, threshold_for
from milvus_hubness.kernels.primitives import KernelPolicy, kernel_policy

INTERPRETED = not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
"""The interpreter multiplies the bits of bfloat16 as if they were integers."""


@pytest.fixture(autouse=True)
def small_tiles():
    """So that a few hundred rows take many tiles, several splits and several parts."""
    with kernel_policy(kernel="fused", fused_tile=(16, 16, 16, 4, 1), sample=64):
        yield


@pytest.fixture
def dense_rows(monkeypatch):
    """How many rows were left to the dense kernel."""
    rows = []
    for name in ("topk_mean", "topk", "logsumexp"):
        real = getattr(dense, name)
        monkeypatch.setattr(dense, name, lambda o, *rest, real=real: rows.append(len(o.X)) or real(o, *rest))
    return rows


def unit(n, d, seed, dtype=torch.float32):
    rows = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(rows, dim=1).to(DEVICE, dtype)


def scores_of(X, B):
    return (X.double() @ B.double().T).cpu()


def soft_of(scores, tau, weights=0.0):
    return tau * torch.logsumexp((scores + weights) / tau, 1)


def test_it_is_the_interpreter_or_a_device():
    assert ("Interpreted" in type(fused.keep_survivors).__name__) == INTERPRETED


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "m", "d"), [(17, 150, 24), (1, 700, 16), (33, 16, 40)])
def test_logsumexp_over_ragged_tiles(dense_rows, n, m, d, dtype):
    X, B = unit(n, d, 0, dtype), unit(m, d, 1, dtype)
    weights = torch.randn(m, generator=torch.Generator().manual_seed(2)).double()
    weights[m // 2] = -torch.inf
    soft = logsumexp(X, B, 0.05, weights)
    assert soft.dtype == torch.float32
    torch.testing.assert_close(soft.cpu().double(), soft_of(scores_of(X, B), 0.05, weights.float()), rtol=0, atol=2e-6)
    assert not dense_rows


@pytest.mark.parametrize("tau", [1e-30, 1e-4, 0.003, 1.0, 1e6])
def test_sums_that_underflow_are_taken_under_their_maximum(tau):
    """At τ = 0.003 scores of −1, of which there is one row's worth, lie 480 powers of 2 under the bound."""
    B = unit(140, 16, 1)
    X = torch.cat([unit(3, 16, 0), -B.mean(0, keepdim=True), torch.zeros(1, 16, device=DEVICE)])
    B[0] = 30 * B[0]
    exact = soft_of(scores_of(X, B), tau)
    torch.testing.assert_close(logsumexp(X, B, tau).cpu().double(), exact, rtol=1e-6, atol=5e-6)


def test_a_bank_that_is_left_out_has_no_sum():
    X, B = unit(3, 16, 0), unit(40, 16, 1)
    assert (logsumexp(X, B, 0.1, torch.full((40,), -torch.inf)) == -torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 5])
def test_the_k_largest_and_where_they_are(dense_rows, dtype, k):
    X, B = unit(19, 24, 0, dtype), unit(500, 24, 1, dtype)
    exact = scores_of(X, B).topk(k)
    torch.testing.assert_close(topk_mean(X, B, k).cpu().double(), exact.values.mean(1), rtol=0, atol=1e-6)
    values, indices = topk(X, B, k)
    torch.testing.assert_close(values.cpu().double(), exact.values, rtol=0, atol=1e-6)
    found = scores_of(X, B).gather(1, indices.cpu())
    torch.testing.assert_close(found, exact.values, rtol=0, atol=1e-6)
    assert not dense_rows


def test_rows_whose_memory_is_short_are_done_in_parts(dense_rows):
    X, B = unit(23, 16, 0), unit(300, 16, 1)
    with kernel_policy(tile_size=1000):
        means = topk_mean(X.cpu().numpy(), B, 2)
    np.testing.assert_allclose(means, scores_of(X, B).topk(2).values.mean(1), rtol=0, atol=1e-6)
    assert not dense_rows


@pytest.mark.parametrize("k", [299, 300])
def test_k_near_the_bank_is_left_to_the_dense_kernel(dense_rows, k):
    X, B = unit(5, 16, 0), unit(300, 16, 1)
    torch.testing.assert_close(
        topk_mean(X, B, k).cpu().double(), scores_of(X, B).topk(k).values.mean(1), rtol=0, atol=1e-6
    )
    assert dense_rows == [5]


def test_ties_that_overflow_are_done_again(dense_rows):
    """All scores of the last row are equal, so that all survive; the others are none the worse for it."""
    X, B = unit(4, 16, 0), unit(300, 16, 1)
    X[3] = 0
    exact = scores_of(X, B).topk(3)
    torch.testing.assert_close(topk_mean(X, B, 3).cpu().double(), exact.values.mean(1), rtol=0, atol=1e-6)
    assert dense_rows == [1]
    values, indices = topk(X, B, 3)
    torch.testing.assert_close(values.cpu().double(), exact.values, rtol=0, atol=1e-6)
    assert len(set(indices[3].tolist())) == 3


@pytest.mark.parametrize("is_near", [False, True])
def test_a_misleading_sample_costs_time_and_no_exactness(dense_rows, is_near):
    """If the sample is far from all rows, all other queries survive; if it alone is near, it has fewer than k above its
    threshold."""
    k, sample = 60, 128
    X, B = unit(9, 16, 0) / 4, unit(1000, 16, 1)
    X[:, 0] = 1
    drawn = torch.randperm(len(B), generator=torch.Generator().manual_seed(0))[:sample]
    B[drawn, 0] += 5 if is_near else -5
    exact = scores_of(X, B).topk(k)
    with kernel_policy(sample=sample):
        assert threshold_for(k, len(B), sample).rank < k
        torch.testing.assert_close(topk_mean(X, B, k).cpu().double(), exact.values.mean(1), rtol=0, atol=1e-5)
        torch.testing.assert_close(topk(X, B, k).values.cpu().double(), exact.values, rtol=0, atol=1e-5)
    assert dense_rows == [9, 9]


def test_a_threshold_just_at_the_kth_score_is_enough(dense_rows):
    """Of ties at the threshold as many are taken as make k. The sample has a third of them."""
    X = torch.ones(2, 16, device=DEVICE)
    B = torch.zeros(300, 16, device=DEVICE)
    B[:2], B[2:100], B[100:] = 0.5, 0.25, -0.125
    assert topk_mean(X, B, 5).tolist() == pytest.approx([(2 * 8 + 3 * 4) / 5] * 2)
    assert not dense_rows


def test_means_of_negative_and_zero_values():
    values = torch.tensor([[-3.0, -0.5, -torch.inf, -0.5, 0.0], [5e-40, -2.0, 1e30, -1e-30, -0.0]])
    values = values.to(DEVICE)
    for k in (1, 2, 3, 4):
        means = torch.empty(2, dtype=torch.float64, device=DEVICE)
        fused.mean_of_largest[(2,)](values, means, 5, k, WIDTH=8)
        torch.testing.assert_close(means, values.double().topk(k).values.mean(1))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_sums_over_scores_kept_in_memory(turned, dtype):
    scores = torch.rand(70, 45, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    scores = scores.T if turned else scores
    weights = torch.randn(scores.shape[1], generator=torch.Generator().manual_seed(1)).to(DEVICE)
    soft = fused.cached_logsumexp(scores, 0.05, weights)
    exact = soft_of(scores.double(), 0.05, weights.double())
    torch.testing.assert_close(soft.double(), exact, rtol=0, atol=1e-6)


def test_estimators_run_on_it(dense_rows):
    from milvus_hubness.banks.bank import QueryBank

    bank, gallery = QueryBank.of(unit(300, 16, 1).cpu().numpy()), unit(40, 16, 0).cpu().numpy()
    bias = NNN(4).fit(bank).bias(gallery)
    np.testing.assert_allclose(bias, 0.75 * np.sort(gallery @ bank.vectors.T)[:, -4:].mean(1), rtol=0, atol=1e-6)
    assert NNN(4).fit(bank).diagnostics.kernel == "fused"
    balanced = Sinkhorn(0.1, iterations=2, device=DEVICE).fit(bank, gallery=gallery)
    assert not dense_rows
    with kernel_policy(kernel="dense"):
        again = Sinkhorn(0.1, iterations=2, device=DEVICE).fit(bank, gallery=gallery)
    np.testing.assert_allclose(balanced.potentials, again.potentials, rtol=0, atol=1e-6)


@pytest.fixture
def three_devices():
    """They are one device; the interpreter runs one kernel at a time."""
    with kernel_policy(kernel="dense" if INTERPRETED else "fused", devices=(DEVICE,) * 3):
        yield


@pytest.mark.usefixtures("three_devices")
def test_all_devices_share_the_rows():
    X, B = unit(7, 16, 0), unit(300, 16, 1)
    for rows in (X, X.cpu().numpy(), X[:1], X[:0]):
        apart, together = topk(rows, B, 3, device="cuda:all"), topk(rows, B, 3, device=DEVICE)
        for one, other in zip(apart, together, strict=True):
            assert type(one) is type(other)
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
        np.testing.assert_allclose(
            logsumexp(rows, B, 0.1, device="cuda:all"), logsumexp(rows, B, 0.1, device=DEVICE), atol=1e-6
        )


@pytest.mark.parametrize(("k", "m"), [(16, 10**6), (128, 113_000), (512, 10**6)])
def test_survivors_hardly_depend_on_k(k, m):
    """In 2,000 rows of independent scores none has fewer than k survivors, or more than there is room for."""
    threshold = threshold_for(k, m, 8192)
    rng = np.random.default_rng(0)
    # The rank-th largest of a sample of uniform numbers, and how many of all exceed it.
    at = rng.beta(8192 - threshold.rank + 1, threshold.rank, 2000)
    reached = rng.binomial(m - 8192, 1 - at) + threshold.rank
    assert k <= reached.min()
    assert reached.max() <= threshold.room < 8192


def test_where_a_threshold_is_of_no_use():
    assert threshold_for(5, 64, 64) is None
    assert threshold_for(60, 200, 64) is None
    assert threshold_for(128, 10**7, 8192, most=4096) is None
    assert isinstance(threshold_for(1, 10**5, 4096), Threshold)


def test_the_kernels_compile_for_the_h200():
    """Without a device, in a process without the interpreter: on tensor cores, within its shared memory, and
    without spilling a register."""
    script = Path(__file__).with_name("compiled.py")
    environment = {"PYTHONPATH": str(script.parents[2]), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def real_sizes():
    with kernel_policy(KernelPolicy()):
        yield


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="torch sees no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_real_sizes_on_the_device(real_sizes, dtype):
    X, B = unit(3000, 512, 0, dtype), unit(200_000, 512, 1, dtype)
    scores = X.double() @ B.double().T
    exact = scores.topk(512).values
    for k in (16, 128, 512):
        torch.testing.assert_close(topk_mean(X, B, k).double(), exact[:, :k].mean(1), rtol=0, atol=5e-6)
        torch.testing.assert_close(topk(X, B, k).values.double(), exact[:, :k], rtol=0, atol=5e-6)
    for tau in (0.005, 0.05):
        torch.testing.assert_close(logsumexp(X, B, tau).double(), soft_of(scores, tau), rtol=0, atol=5e-6)
