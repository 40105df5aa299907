from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from milvus_hubness.banks.bank import QueryBank
from milvus_hubness.errors import (
    BankTooSmall,
    DimensionMismatch,
    EmptyBank,
    FaissConflict,
    InvalidInput,
    InvalidParameter,
)
from milvus_hubness.estimators import NNN, from_dict, to_dict
from milvus_hubness.kernels import topk_mean
from milvus_hubness.kernels.approximate import ApproximateBank, InvertedLists
from milvus_hubness.kernels.primitives import import_faiss


@pytest.fixture(scope="module")
def vectors():
    """Gallery and bank in clusters, on two sides of a gap."""
    rng = np.random.default_rng(0)
    centroids = rng.standard_normal((30, 16))
    X = centroids[rng.integers(0, 30, 400)] + 0.3 * rng.standard_normal((400, 16)) + 1
    B = centroids[rng.integers(0, 30, 3000)] + 0.3 * rng.standard_normal((3000, 16)) - 1
    return tuple((M / np.linalg.norm(M, axis=1, keepdims=True)).astype(np.float32) for M in (X, B))


@pytest.fixture
def slow_exact(monkeypatch):
    """So slow that any index is faster."""
    real = ApproximateBank._seconds
    monkeypatch.setattr(ApproximateBank, "_seconds", lambda self, rows: real(self, rows) + 5 * (self._index is None))


def test_it_is_tuned_until_it_is_near_enough(vectors, slow_exact):
    X, B = vectors
    near = ApproximateBank(B, X, 8)
    exact = topk_mean(X, B, 8)
    off = np.abs(near.values(X) - exact)
    assert near.tuned.kind == "ivf"
    assert near.tuned.width > 0
    assert off.mean() <= 0.012 * exact.std()
    assert near.tuned.share == pytest.approx(off.mean() / exact.std(), abs=0.01)
    assert off.max() >= near.tuned.max_error - 1e-6
    assert 0.8 < near.tuned.recall <= 1
    assert near.measured == 200


def test_a_stricter_error_takes_a_wider_search(vectors, slow_exact):
    X, B = vectors
    loose, strict = (ApproximateBank(B, X, 8, error=error).tuned for error in (0.2, 0.01))
    assert loose.width < strict.width
    assert strict.mean_error < loose.mean_error


@pytest.fixture
def gpu_lists(monkeypatch):
    """The inverted lists of a CUDA device, held by the CPU's FAISS."""
    place = torch.device("cpu")
    monkeypatch.setattr(
        "milvus_hubness.kernels.approximate.InvertedLists", lambda bank, k, device: InvertedLists(bank, k, place)
    )
    monkeypatch.setattr(
        "milvus_hubness.kernels.approximate.resolve_device", lambda device: SimpleNamespace(type="cuda")
    )
    monkeypatch.setattr(import_faiss(), "StandardGpuResources", object, raising=False)


def test_inverted_lists_on_a_gpu_are_tuned_until_they_are_near_enough(vectors, slow_exact, gpu_lists):
    X, B = vectors
    near = ApproximateBank(B, X, 8)
    exact = topk_mean(X, B, 8)
    off = np.abs(near.values(X) - exact)
    assert near.tuned.kind == "ivf"
    assert near.tuned.width > 0
    assert off.mean() <= 0.012 * exact.std()
    assert 0.8 < near.tuned.recall <= 1


def test_all_inverted_lists_hold_the_nearest(vectors):
    X, B = vectors
    lists = InvertedLists(torch.from_numpy(B), 8, torch.device("cpu"))
    means, reliable = lists.means(torch.from_numpy(X[:50]), list(lists.widths())[-1])
    assert reliable.all()
    np.testing.assert_allclose(means, topk_mean(X[:50], B, 8), rtol=0, atol=1e-6)


def test_rows_whose_lists_hold_too_few_are_exact(vectors, slow_exact, gpu_lists):
    X, B = vectors
    near = ApproximateBank(B, X, 200, error=1e3)
    _, reliable = near._index.means(torch.from_numpy(X), 1)
    assert near.tuned.width == 1
    assert not reliable.all()
    exact = topk_mean(X[~reliable], B, 200)
    np.testing.assert_allclose(near.values(X)[~reliable], exact, rtol=0, atol=1e-6)


def test_on_a_gpu_without_faiss_gpu_the_exact_kernel_is_taken(vectors, slow_exact, monkeypatch):
    X, B = vectors
    monkeypatch.setattr(
        "milvus_hubness.kernels.approximate.resolve_device", lambda device: SimpleNamespace(type="cuda")
    )
    assert ApproximateBank(B, X, 8).tuned.kind == "exact"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_inverted_lists_live_on_the_device(vectors, slow_exact):
    if not hasattr(import_faiss(), "StandardGpuResources"):
        pytest.skip("faiss-gpu is not installed")
    X, B = vectors
    near = ApproximateBank(B, X, 8, device="cuda")
    exact = topk_mean(X, B, 8)
    assert near.tuned.kind == "ivf"
    assert np.abs(near.values(X) - exact).mean() <= 0.012 * exact.std()


def test_where_no_index_is_faster_the_exact_kernel_is_taken(vectors, monkeypatch):
    X, B = vectors
    real = ApproximateBank._seconds
    monkeypatch.setattr(
        ApproximateBank, "_seconds", lambda self, rows: real(self, rows) + 5 * (self._index is not None)
    )
    near = ApproximateBank(B, X[:40], 8, error=1.0)
    assert near.tuned == ("exact", 0, 1.0, 0.0, 0.0, 0.0, 1.0)
    np.testing.assert_allclose(near.values(X), topk_mean(X, B, 8), rtol=0, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.5, -2.0])
def test_nnn_says_what_it_cost(vectors, slow_exact, alpha):
    X, B = vectors
    fitted = NNN(8, alpha, kernel="approximate").fit(QueryBank.of(B), gallery=X)
    assert fitted.diagnostics.kernel == "ivf"
    assert fitted.diagnostics.sampled == 200
    exact = alpha * topk_mean(X, B, 8)
    off = np.abs(fitted.bias(X) - exact)
    assert off.mean() <= 0.012 * exact.std()
    assert fitted.diagnostics.mean_error == pytest.approx(off.mean(), rel=0.5, abs=1e-6)
    assert off.mean() <= fitted.diagnostics.max_error <= off.max() + 1e-6
    assert 0.5 < fitted.diagnostics.recall <= 1


def test_nnn_is_the_same_however_rows_come(vectors, slow_exact):
    X, B = vectors
    estimator = NNN(8, kernel="approximate")
    assert from_dict(to_dict(estimator)) == estimator
    fitted = estimator.fit(QueryBank.of(B), gallery=X)
    bias = fitted.bias(X)
    assert (bias.shape, bias.dtype) == ((400,), np.float32)
    for same in (X.tolist(), torch.from_numpy(X), X.astype(np.float64)):
        np.testing.assert_allclose(fitted.bias(same), bias, atol=1e-6)
    np.testing.assert_allclose([fitted.bias(row[None])[0] for row in X[:20]], bias[:20], atol=1e-6)
    assert fitted.bias(X[:0]).shape == (0,)


def test_bad_input(vectors):
    X, B = vectors
    with pytest.raises(InvalidInput, match="at least 32 items to tune on, not 31"):
        ApproximateBank(B, X[:31], 8)
    with pytest.raises(BankTooSmall):
        ApproximateBank(B[:7], X, 8)
    with pytest.raises(EmptyBank):
        ApproximateBank(B[:0], X, 8)
    with pytest.raises(InvalidParameter, match="k must be"):
        ApproximateBank(B, X, 0)
    with pytest.raises(DimensionMismatch):
        ApproximateBank(B, X[:, :3], 8)
    with pytest.raises(InvalidParameter, match="error"):
        ApproximateBank(B, X, 8, error=0)


@pytest.mark.parametrize("gpu", ["faiss-gpu", "faiss_gpu_cu12"])
def test_two_faiss_distributions_conflict(monkeypatch, vectors, gpu):
    X, B = vectors
    installed = [SimpleNamespace(name=name) for name in ("numpy", "faiss-cpu", gpu)]
    monkeypatch.setattr("importlib.metadata.distributions", lambda: installed)
    import_faiss.cache_clear()
    with pytest.raises(FaissConflict, match="pip uninstall -y faiss-cpu && pip install --force-reinstall"):
        ApproximateBank(B, X, 8)


def test_this_environment_has_no_conflict():
    names = {each.name.lower() for each in importlib.metadata.distributions() if each.name}
    if any(name.startswith("faiss-gpu") for name in names):
        pytest.skip("a GPU build of faiss is installed")
    assert import_faiss().IndexFlatIP(4).d == 4
