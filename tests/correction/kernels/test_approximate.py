from __future__ import annotations

import importlib.metadata
import textwrap
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import NNN, from_dict, to_dict
from milvus_hubness.correction.kernels import topk_mean
from milvus_hubness.correction.kernels.approximate import (
    ApproximateBank,
    BankIndex,
    flat_is_faster,
    index_types,
)
from milvus_hubness.correction.kernels.libraries import faiss_runs_on_gpus, import_faiss
from milvus_hubness.errors import (
    BankTooSmall,
    DimensionMismatch,
    EmptyBank,
    FaissConflict,
    InvalidInput,
    InvalidParameter,
)


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
    monkeypatch.setattr(
        "milvus_hubness.correction.kernels.approximate.topk_mean", delayed(topk_mean, 2.5e-4)
    )


def delayed(function, seconds_per_row):
    def call(rows, *arguments, **options):
        time.sleep(len(rows) * seconds_per_row)
        return function(rows, *arguments, **options)

    return call


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


class GpuFaiss:
    """The installed FAISS with the classes of a GPU build, which compute on the CPU.

    delays: seconds that a search with an index of this name takes more. off: added to the scores of a flat index.
    searches: (name, k, parameters) of each.
    """

    StandardGpuResources = object

    def __init__(self, *names, delays=(), off=0.0):
        self.delays, self.off, self.searches, self.SearchParametersCagra = (
            dict(delays),
            off,
            [],
            SimpleNamespace,
        )
        for name in names:
            setattr(self, f"{name}Config", SimpleNamespace)
            setattr(self, name, partial(GpuIndex, self, name))

    def __getattr__(self, name):
        return getattr(import_faiss(), name)


class GpuIndex:
    def __init__(self, faiss, name, resources, d, *lists_and_metric_and_config):
        *lists, metric, config = lists_and_metric_and_config
        assert config.device == 0
        flat = faiss.IndexFlat(d, metric)
        self.faiss, self.name = faiss, name
        self.index = (
            faiss.IndexIVFFlat(flat, d, *lists, metric) if name == "GpuIndexIVFFlat" else flat
        )
        self.cp = getattr(self.index, "cp", None)

    def train_c(self, m, bank):
        self.index.train_c(m, bank)
        if (
            self.name == "GpuIndexCagra"
        ):  # It holds the bank once it is trained, and refuses to add to it.
            self.index.add_c(m, bank)

    def add_c(self, m, bank):
        assert self.name != "GpuIndexCagra"
        self.index.add_c(m, bank)

    def search_c(self, n, x, k, scores, rows, params):
        assert k <= 2048
        self.faiss.searches.append((self.name, k, params))
        time.sleep(self.faiss.delays.get(self.name, 0))
        if self.name == "GpuIndexIVFFlat":
            assert params.nprobe <= 2048
            self.index.search_c(n, x, k, scores, rows, params)
        else:
            assert self.name == "GpuIndexFlat" or k <= params.itopk_size <= 512
            self.index.search_c(n, x, k, scores, rows)
        if self.name == "GpuIndexFlat":
            faiss = import_faiss()
            faiss.rev_swig_ptr(scores, n * k)[:] += self.faiss.off


FLAT, LISTS, GRAPH = "GpuIndexFlat", "GpuIndexIVFFlat", "GpuIndexCagra"


@pytest.fixture
def on_gpu(monkeypatch):
    """Let ApproximateBank take this machine for one with a GPU and this FAISS."""

    def use(faiss, *, flat=False):
        module = "milvus_hubness.correction.kernels.approximate"
        monkeypatch.setattr(f"{module}.resolve_device", lambda device: SimpleNamespace(type="cuda"))
        monkeypatch.setattr(f"{module}.import_faiss", lambda: faiss)
        monkeypatch.setattr(
            f"{module}.faiss_runs_on_gpus", lambda: hasattr(faiss, "StandardGpuResources")
        )
        monkeypatch.setattr(f"{module}.flat_is_faster", lambda *arguments: flat)
        return faiss

    return use


@pytest.mark.parametrize(
    ("names", "k", "kinds"),
    [
        ([FLAT, LISTS], 2048, ["ivf"]),
        ([FLAT, LISTS], 2049, []),
        ([FLAT, LISTS, GRAPH], 512, ["cagra", "ivf"]),
        ([FLAT, LISTS, GRAPH], 513, ["ivf"]),
    ],
)
def test_a_gpu_has_the_indexes_that_its_faiss_has_for_k(on_gpu, names, k, kinds):
    on_gpu(GpuFaiss(*names))
    assert index_types(k, on_gpu=True) == kinds
    assert index_types(k, on_gpu=False) == ["ivf"]


def test_an_index_on_a_gpu_is_searched_within_the_limits_of_faiss(on_gpu, monkeypatch):
    faiss = on_gpu(GpuFaiss(LISTS, GRAPH))
    for step in ("train_c", "add_c", "search_c"):
        monkeypatch.setattr(GpuIndex, step, lambda *arguments: None)
    bank = torch.zeros(100_000, 2)
    widths = list(BankIndex("ivf", bank, 8, on_gpu=True).widths())
    assert widths[:4] == [1, 2, 3, 4]
    assert widths[-1] == max(widths) == 2048
    assert [list(BankIndex("cagra", bank, k, on_gpu=True).widths()) for k in (8, 128, 300)] == [
        [64, 128, 256, 512], [128, 256, 512], [512]
    ]  # fmt: skip
    assert faiss.searches == []


def test_inverted_lists_on_a_gpu_are_tuned_until_they_are_near_enough(vectors, slow_exact, on_gpu):
    X, B = vectors
    on_gpu(GpuFaiss(FLAT, LISTS))
    near = ApproximateBank(B, X, 8)
    exact = topk_mean(X, B, 8)
    off = np.abs(near.values(X) - exact)
    assert near.tuned.kind == "ivf"
    assert near.tuned.width > 0
    assert off.mean() <= 0.012 * exact.std()
    assert 0.8 < near.tuned.recall <= 1


@pytest.mark.parametrize(("slow", "kind"), [(LISTS, "cagra"), (GRAPH, "ivf")])
def test_the_faster_of_lists_and_graph_is_taken(vectors, slow_exact, on_gpu, slow, kind):
    X, B = vectors
    faiss = on_gpu(GpuFaiss(FLAT, LISTS, GRAPH, delays={slow: 0.05}))
    near = ApproximateBank(B, X, 8)
    assert near.tuned.kind == kind
    assert near.tuned.width == (64 if kind == "cagra" else near.tuned.width)
    faiss.searches.clear()
    exact = topk_mean(X, B, 8)
    assert np.abs(near.values(X) - exact).mean() <= 0.012 * exact.std()
    assert [(name, k) for name, k, _ in faiss.searches] == [
        ({"cagra": GRAPH, "ivf": LISTS}[kind], 8)
    ]


def test_a_k_above_the_limit_of_a_gpu_is_exact(vectors, on_gpu):
    X, B = vectors
    faiss = on_gpu(GpuFaiss(FLAT, LISTS, GRAPH), flat=True)
    near = ApproximateBank(B, X, 2049)
    assert near.tuned.kind == "exact"
    np.testing.assert_allclose(near.values(X[:20]), topk_mean(X[:20], B, 2049), rtol=0, atol=1e-6)
    assert faiss.searches == []


def test_the_flat_index_of_a_gpu_is_the_exact_path_where_it_is_faster(vectors, on_gpu):
    X, B = vectors
    exact = topk_mean(X, B, 8)
    for flat in (True, False):
        faiss = on_gpu(GpuFaiss(FLAT, LISTS, delays={LISTS: 0.1}), flat=flat)
        near = ApproximateBank(B, X, 8, error=1e3)
        assert near.tuned.kind == "exact"
        faiss.searches.clear()
        np.testing.assert_allclose(near.values(X), exact, rtol=0, atol=1e-6)
        assert [name for name, *_ in faiss.searches] == [FLAT] * flat


@pytest.mark.parametrize(
    ("delays", "off", "seconds_per_row", "faster"),
    [({}, 0.0, 1e-3, True), ({FLAT: 0.3}, 0.0, 0.0, False), ({}, 0.01, 1e-3, False)],
    ids=["faster", "slower", "not exact"],
)
def test_the_flat_index_of_a_gpu_is_timed_and_compared(
    on_gpu, monkeypatch, delays, off, seconds_per_row, faster
):
    on_gpu(GpuFaiss(FLAT, delays=delays, off=off))
    monkeypatch.setattr(
        "milvus_hubness.correction.kernels.approximate.topk_mean",
        delayed(topk_mean, seconds_per_row),
    )
    timed = flat_is_faster.__wrapped__  # Without the cache.
    assert timed("cpu", torch.device("cpu"), 16, 4, (100, 2000)) == faster


def test_all_inverted_lists_hold_the_nearest(vectors):
    X, B = vectors
    lists = BankIndex("ivf", torch.from_numpy(B), 8, on_gpu=False)
    assert list(lists.widths())[-1] == 120
    means, reliable = lists.means(torch.from_numpy(X[:50]), 120)
    assert reliable.all()
    np.testing.assert_allclose(means, topk_mean(X[:50], B, 8), rtol=0, atol=1e-6)


def test_rows_whose_lists_hold_too_few_are_exact(vectors, slow_exact):
    X, B = vectors
    near = ApproximateBank(B, X, 30, error=1e3)
    lists = BankIndex("ivf", torch.from_numpy(B), 30, on_gpu=False)
    reliable = lists.means(torch.from_numpy(X), 1)[1].numpy()
    assert (near.tuned.kind, near.tuned.width) == ("ivf", 1)
    assert reliable.any()
    assert not reliable.all()
    exact = topk_mean(X[~reliable], B, 30)
    np.testing.assert_allclose(near.values(X)[~reliable], exact, rtol=0, atol=1e-6)


def test_on_a_gpu_without_faiss_gpu_the_exact_kernel_is_taken(vectors, slow_exact, on_gpu):
    X, B = vectors
    on_gpu(import_faiss())
    assert ApproximateBank(B, X, 8).tuned.kind == "exact"


on_a_real_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA device"
)


@pytest.mark.gpu
@on_a_real_gpu
@pytest.mark.parametrize("kind", ["ivf", "cagra"])
@pytest.mark.parametrize("dim", [16, 15])
def test_an_index_on_a_device_holds_the_nearest(vectors, kind, dim):
    if kind not in index_types(8, on_gpu=True):
        pytest.skip(f"this FAISS has no {kind} on a GPU")
    X, B = (torch.from_numpy(M[:, :dim].copy()).cuda() for M in vectors)
    index = BankIndex(kind, B, 8, on_gpu=True)
    means, reliable = index.means(X, list(index.widths())[-1])
    exact = topk_mean(X, B, 8)
    assert reliable.all()
    assert (means - exact).abs().mean() <= 0.01 * exact.std()


@pytest.mark.gpu
@on_a_real_gpu
def test_the_flat_index_on_a_device_is_exact(vectors):
    if not index_types(2048, on_gpu=True):
        pytest.skip("faiss-gpu is not installed")
    X, B = (torch.from_numpy(M).cuda() for M in vectors)
    means = BankIndex("flat", B, 2048, on_gpu=True).means(X)[0]
    np.testing.assert_allclose(means.cpu(), topk_mean(*vectors, 2048), rtol=0, atol=1e-6)


@pytest.mark.gpu
@on_a_real_gpu
def test_an_approximate_bank_is_tuned_on_the_device_by_default(vectors, slow_exact):
    if not index_types(8, on_gpu=True):
        pytest.skip("faiss-gpu is not installed")
    X, B = vectors
    near = ApproximateBank(B, X, 8)
    exact = topk_mean(X, B, 8)
    assert np.abs(near.values(X) - exact).mean() <= 0.012 * exact.std()
    np.testing.assert_array_equal(near.values(torch.from_numpy(X).cuda()), near.values(X))


def test_where_no_index_is_faster_the_exact_kernel_is_taken(vectors, monkeypatch):
    X, B = vectors
    means = BankIndex.means
    monkeypatch.setattr(
        BankIndex, "means", lambda index, x, width: time.sleep(0.05) or means(index, x, width)
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


@pytest.fixture
def faiss_for_gpus(monkeypatch, tmp_path):
    """A faiss for GPUs, in this process and those that it starts, whose search runs some lines."""

    def make(search):
        lines = textwrap.indent(search, " " * 8)
        (tmp_path / "faiss.py").write_text(
            "import os, sys\n"
            "import numpy as np\n"
            "StandardGpuResources = IndexFlatIP = lambda *sizes: None\n"
            "def get_num_gpus(): return 1\n"
            "def index_cpu_to_gpu(resources, device, index): return Index()\n"
            f"class Index:\n    def add(self, rows): pass\n    def search(self, x, k):\n{lines}\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        module = SimpleNamespace(StandardGpuResources=object, __version__="1.14.1")
        monkeypatch.setattr(
            "milvus_hubness.correction.kernels.libraries.import_faiss", lambda: module
        )

    faiss_runs_on_gpus.cache_clear()
    yield make
    faiss_runs_on_gpus.cache_clear()


def test_a_faiss_that_aborts_on_this_gpu_is_not_used(faiss_for_gpus):
    """As one without code for the GPU does: on an H100, faiss-gpu-cu12 1.14 ended the job."""
    faiss_for_gpus("sys.stderr.write('CUDA error 209 no kernel image is available')\nos.abort()")
    with pytest.warns(RuntimeWarning, match="FAISS 1.14.1 .* install faiss-gpu .* error 209"):
        assert index_types(8, on_gpu=True) == []


def test_a_faiss_that_finds_the_wrong_rows_on_this_gpu_is_not_used(faiss_for_gpus):
    faiss_for_gpus("return None, np.zeros((len(x), k), int)")
    with pytest.warns(RuntimeWarning, match="AssertionError"):
        assert index_types(8, on_gpu=True) == []


def test_a_faiss_that_searches_on_this_gpu_is_used(faiss_for_gpus):
    faiss_for_gpus("return None, (x @ np.eye(8)).argmax(1)[:, None]")
    assert index_types(8, on_gpu=True) == ["ivf"]


@pytest.mark.parametrize("gpu", ["faiss-gpu", "faiss_gpu_cu12"])
def test_two_faiss_distributions_conflict(monkeypatch, vectors, gpu):
    X, B = vectors
    installed = [SimpleNamespace(name=name) for name in ("numpy", "faiss-cpu", gpu)]
    monkeypatch.setattr("importlib.metadata.distributions", lambda: installed)
    import_faiss.cache_clear()
    with pytest.raises(
        FaissConflict, match="pip uninstall -y faiss-cpu && pip install --force-reinstall"
    ):
        ApproximateBank(B, X, 8)


def test_this_environment_has_no_conflict():
    names = {each.name.lower() for each in importlib.metadata.distributions() if each.name}
    if any(name.startswith("faiss-gpu") for name in names):
        pytest.skip("a GPU build of faiss is installed")
    assert import_faiss().IndexFlatIP(4).d == 4
