"""The screen in bfloat16 loses nothing: the k largest are those of float64, whatever the rows look like."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from milvus_hubness.kernels import dense, screened, topk, topk_mean
from milvus_hubness.kernels.primitives import KernelPolicy, kernel_policy

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def always():
    """Small tiles, and no size too small."""
    with kernel_policy(kernel="screened", least_screened=(0, 0), screened_tile=(40, 1024)):
        yield


@pytest.fixture
def dense_rows(monkeypatch):
    """How many rows were left to the dense kernel."""
    rows = []
    for name in ("topk_mean", "topk"):
        real = getattr(dense, name)
        monkeypatch.setattr(dense, name, lambda o, *rest, real=real: rows.append(len(o.X)) or real(o, *rest))
    return rows


def unit(n, d):
    rows = RNG.standard_normal((n, d)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def check(X, B, k, atol=1e-6):
    exact = -np.sort(-(X.astype(np.float64) @ B.astype(np.float64).T), axis=1)[:, :k]
    np.testing.assert_allclose(topk_mean(X, B, k, device="cpu"), exact.mean(1), rtol=0, atol=atol)
    values, indices = topk(X, B, k, device="cpu")
    np.testing.assert_allclose(values, exact, rtol=0, atol=atol)
    assert (np.diff(values, axis=1) <= 0).all()
    found = np.take_along_axis(X.astype(np.float64) @ B.astype(np.float64).T, indices, 1)
    np.testing.assert_allclose(found, exact, rtol=0, atol=atol)
    assert all(len(set(row)) == k for row in indices.tolist())


@pytest.mark.parametrize("m", [3001, 3072, 2999])
@pytest.mark.parametrize("k", [1, 7, 20])
def test_random_rows(dense_rows, m, k):
    check(unit(97, 64), unit(m, 64), k)
    assert sum(dense_rows) <= 20


def test_a_few_rows_are_left_over_and_done_again(dense_rows):
    """Zero rows tie with everything; rows on the far side of the bank have no score above 0."""
    B = unit(3000, 32) + np.float32(0.5)
    X = unit(50, 32)
    X[:2] = 0
    X[2:9] = -np.abs(X[2:9]) - 1
    check(X, B, 5, atol=1e-5)
    assert 2 <= dense_rows[0] < 50


def test_scores_closer_than_bfloat16_can_tell(dense_rows):
    """A thousand copies of a row, each moved by less than the screen sees: which are the largest is told by
    the exact products alone."""
    base = unit(1, 64)
    B = np.concatenate([unit(4000, 64), base + 1e-5 * RNG.standard_normal((60, 64)).astype(np.float32)])
    X = base + 0.02 * unit(30, 64)
    check(X, B, 20)
    assert sum(dense_rows) == 0


def test_rows_of_very_different_length(dense_rows):
    """The error grows with the longest row of the bank; where it leaves too much, the dense kernel has it."""
    B = unit(3000, 32) * RNG.lognormal(0, 1.5, (3000, 1)).astype(np.float32)
    check(unit(60, 32), B, 9, atol=1e-4)
    B[5] *= 1e4
    dense_rows.clear()
    check(unit(60, 32), B, 9, atol=1e-1)
    assert dense_rows == [60, 60]


def test_an_adversarial_order_of_the_bank(dense_rows):
    """All near neighbours in one tile."""
    X = unit(45, 16)
    B = unit(5000, 16)
    B = B[np.argsort(-(B @ X[0]))]
    check(X, np.ascontiguousarray(B), 30)


def test_any_layout_and_kind(dense_rows):
    X, B = unit(90, 64)[::2, ::2], np.asfortranarray(unit(3000, 32))
    check(X, B, 3)
    found = topk_mean(torch.from_numpy(X.copy()).half(), torch.from_numpy(B), 3, device="cpu")
    assert found.dtype == torch.float32
    exact = np.sort(X.astype(np.float16).astype(np.float64) @ B.T, axis=1)[:, -3:].mean(1)
    np.testing.assert_allclose(found, exact, atol=1e-6)


def test_small_work_and_large_k_are_left_to_the_dense_kernel(dense_rows):
    X, B = unit(20, 32), unit(1000, 32)
    check(X, B, 600)
    for least in ((21, 0), (0, 20 * 1000 * 32 + 1)):
        with kernel_policy(least_screened=least):
            check(X, B, 2)
    assert dense_rows == [20] * 6


def test_no_tile_holds_all_scores(monkeypatch):
    X, B = unit(400, 32), unit(6000, 32)
    largest = 0
    real = torch.mm

    def mm(a, b, *, out):
        nonlocal largest
        largest = max(largest, out.numel())
        return real(a, b, out=out)

    monkeypatch.setattr(torch, "mm", mm)
    topk_mean(X, B, 4, device="cpu")
    assert largest == 40 * 1024


@pytest.mark.parametrize(
    ("dim", "tiles"), [(1024, (256, 65_536)), (512, (512, 32_768)), (300, (768, 21_824)), (64, (1024, 16_384))]
)
def test_tiles_fill_the_caches(dim, tiles):
    with kernel_policy(KernelPolicy()):
        assert screened.tiles_for(dim) == tiles
