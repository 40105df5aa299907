from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from milvus_hubness.errors import BankTooSmall, DimensionMismatch, EmptyBank, FaissConflict, InvalidParameter
from milvus_hubness.kernels import IvfIndex, topk_mean, topk_mean_ivf
from milvus_hubness.kernels.faiss_module import import_faiss


@pytest.fixture(scope="module")
def vectors():
    rng = np.random.default_rng(0)
    X, B = rng.standard_normal((400, 16), np.float32), rng.standard_normal((4000, 16), np.float32)
    return X, B


def test_the_reported_errors_are_the_real_ones(vectors):
    """With no more rows than the sample takes, every row's error is in the report."""
    X, B = vectors
    approximate = topk_mean_ivf(X, B, 20, nlist=50, nprobe=5)
    errors = np.abs(approximate.values - topk_mean(X, B, 20))
    assert approximate.sampled == 400
    assert approximate.max_error == pytest.approx(errors.max(), rel=1e-5)
    assert approximate.mean_error == pytest.approx(errors.mean(), rel=1e-5)
    assert 0 < approximate.mean_error < approximate.max_error


def test_a_sample_is_drawn_from_many_rows(vectors):
    X, B = vectors
    many = np.tile(X, (3, 1))
    approximate = topk_mean_ivf(many, B, 20, nlist=50, nprobe=5)
    errors = np.abs(approximate.values - topk_mean(many, B, 20))
    assert approximate.sampled == 512
    assert 0.8 < approximate.mean_error / errors.mean() < 1.25
    assert approximate.max_error <= errors.max() + 1e-6


def test_more_probes_less_error(vectors):
    X, B = vectors
    index = [IvfIndex(B, nlist=50, nprobe=nprobe).topk_mean(X, 20).mean_error for nprobe in (1, 5, 20, 50)]
    assert index == sorted(index, reverse=True)
    assert index[-1] < 1e-6


def test_rows_that_find_too_few_are_exact(vectors):
    X, B = vectors
    approximate = topk_mean_ivf(X, B, 2000, nlist=50, nprobe=1)
    np.testing.assert_allclose(approximate.values, topk_mean(X, B, 2000), rtol=1e-6)


@pytest.mark.parametrize(("m", "k"), [(1, 1), (2, 1), (30, 30), (100, 99)])
def test_small_banks(vectors, m, k):
    X, B = vectors
    approximate = topk_mean_ivf(X, B[:m], k)
    assert approximate.values.shape == (400,)
    assert approximate.values.dtype == np.float32
    np.testing.assert_allclose(approximate.values, topk_mean(X, B[:m], k), atol=1.0)


def test_one_index_serves_many_calls_and_kinds(vectors):
    X, B = vectors
    index = IvfIndex(B, seed=3)
    values = index.topk_mean(X, 20).values
    np.testing.assert_array_equal(values, IvfIndex(B, seed=3).topk_mean(X, 20).values)
    np.testing.assert_array_equal(values, index.topk_mean(torch.from_numpy(X), 20).values)
    np.testing.assert_array_equal(values, index.values(X, 20))
    assert index.topk_mean(X[:0], 20) == (pytest.approx(np.empty(0)), 0.0, 0.0, 0)


def test_bad_input(vectors):
    X, B = vectors
    with pytest.raises(EmptyBank):
        IvfIndex(B[:0])
    with pytest.raises(InvalidParameter, match=r"nlist must be .* at most 10"):
        IvfIndex(B[:10], nlist=11)
    with pytest.raises(InvalidParameter, match="nprobe"):
        IvfIndex(B, nprobe=0)
    index = IvfIndex(B)
    with pytest.raises(BankTooSmall):
        index.topk_mean(X, 4001)
    with pytest.raises(InvalidParameter, match="k must be"):
        index.topk_mean(X, 0)
    with pytest.raises(DimensionMismatch):
        index.topk_mean(X[:, :3], 1)


@pytest.mark.parametrize("gpu", ["faiss-gpu", "faiss_gpu_cu12"])
def test_two_faiss_distributions_conflict(monkeypatch, vectors, gpu):
    installed = [SimpleNamespace(name=name) for name in ("numpy", "faiss-cpu", gpu)]
    monkeypatch.setattr("milvus_hubness.kernels.faiss_module.distributions", lambda: installed)
    import_faiss.cache_clear()
    with pytest.raises(FaissConflict, match="pip uninstall -y faiss-cpu && pip install --force-reinstall"):
        IvfIndex(vectors[1])


def test_this_environment_has_no_conflict():
    names = {each.name.lower() for each in importlib.metadata.distributions() if each.name}
    if any(name.startswith("faiss-gpu") for name in names):
        pytest.skip("a GPU build of faiss is installed")
    assert IvfIndex(np.eye(4, dtype=np.float32)).nlist == 1
