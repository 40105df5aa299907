"""Means of the k largest without the k, near the exact ones; rows whose tail is not seen say so."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from milvus_hubness.kernels import routed, topk, topk_mean
from milvus_hubness.kernels.approximate import ApproximateBank
from milvus_hubness.kernels.primitives import kernel_policy
from milvus_hubness.kernels.routed import RoutedBank


@pytest.fixture(scope="module")
def vectors():
    """Gallery and bank in clusters, on two sides of a gap."""
    rng = np.random.default_rng(0)
    centroids = rng.standard_normal((30, 16))
    X = centroids[rng.integers(0, 30, 900)] + 0.5 * rng.standard_normal((900, 16)) + 1
    B = centroids[rng.integers(0, 30, 4000)] + 0.5 * rng.standard_normal((4000, 16)) - 1
    return tuple(torch.from_numpy((M / np.linalg.norm(M, axis=1, keepdims=True)).astype(np.float32)) for M in (X, B))


def learned(vectors, k, *shares, dtype=None):
    X, B = vectors
    bank = RoutedBank(B, dtype)
    nearest = topk(X[:400], B, k, device="cpu").values
    return bank, [routing for _, routing in bank.routings(X[:400], k, nearest, shares)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [16, 100])
def test_the_means_are_near_the_exact_ones(vectors, dtype, k):
    """On rows that nothing was learned from; nearer the more is looked at, and not to one side on average."""
    X, B = vectors
    bank, routings = learned(vectors, k, 0.05, 0.3, 1.0, dtype=dtype)
    exact = topk_mean(X[400:], B, k, device="cpu").double().numpy()
    errors = []
    for routing in routings:
        means, sure = bank.means(X[400:], routing)
        assert sure.mean() > 0.9
        errors.append(np.abs(means - exact)[sure].mean() / exact.std())
        assert abs((means - exact)[sure].mean()) < 0.02 * exact.std()
    assert errors[2] < 0.02
    assert errors[2] <= 1.1 * errors[1] <= 1.2 * errors[0] < 0.12


def test_how_much_is_looked_at(vectors):
    X, B = vectors
    bank, routings = learned(vectors, 20, 0.1, 1.0)
    nearest = topk(X[400:], B, 20, device="cpu").indices
    for routing, share, least in ((routings[0], 0.1, 0.5), (routings[1], 1.0, 1.0)):
        looked = bank.reads(X[400:], routing)
        assert looked.float().mean() == pytest.approx(share, rel=0.25)
        assert looked.gather(1, nearest).float().mean() >= least


def test_rows_whose_tail_is_not_seen_say_so_and_are_computed_exactly(vectors):
    """Ones that resemble none of the sample: their scores are far from what is expected of them."""
    X, B = vectors
    odd = torch.cat([X[400:600], 30 * X[600:610]])
    bank, [routing] = learned(vectors, 20, 0.1)
    sure = bank.means(odd, routing)[1]
    assert sure[:200].mean() > 0.9
    assert not sure[200:].any()
    near = ApproximateBank(B, X, 20)
    near._index, near._setting = bank, routing
    unsure = odd[~torch.from_numpy(sure)]
    np.testing.assert_allclose(near.values(unsure), topk_mean(unsure, B, 20, device="cpu"), rtol=0, atol=1e-5)


def test_threads_and_tiles_change_no_mean(vectors):
    X, _ = vectors
    bank, [routing] = learned(vectors, 20, 0.1)
    means, sure = bank.means(X, routing)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with kernel_policy(tile_size=300 * 100):
            again, sure_again = bank.means(X, routing)
    finally:
        torch.set_num_threads(before)
    assert (sure == sure_again).mean() > 0.99
    both = sure & sure_again
    np.testing.assert_allclose(again[both], means[both], rtol=0, atol=2e-3)


def test_the_least_of_an_exponential_fall_is_found_exactly():
    """A(t) = n·w·exp(−t/w): the k-th largest lies at w·ln(n/k), and the mean of the k largest w above."""
    n, k, w = 500.0, 20, 0.3
    steps = (-0.5, 0.2, 0.7, 1.4)
    above = torch.tensor([[n * w * np.exp(-step / w) for step in steps]], dtype=torch.float64)
    nothing = routed.Pass(0.0, (), torch.zeros(4))
    place, width, inside = routed._fall(above, steps, routed.Routing(k, torch.zeros(1), 0.1, nothing, nothing))
    assert place.item() == pytest.approx(w * np.log(n / k))
    assert width.item() == pytest.approx(w)
    assert inside.item()
