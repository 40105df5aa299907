"""topk_mean, topk and logsumexp, on torch and on NumPy, against their definitions in float64, over many small tiles."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from milvus_hubness.correction.kernels import dense, logsumexp, operands, topk, topk_mean
from milvus_hubness.correction.kernels.operands import share_out
from milvus_hubness.correction.kernels.policy import (
    POLICY,
    KernelPolicy,
    kernel_on,
    kernel_policy,
    resolve_device,
    uses_numpy,
)
from milvus_hubness.correction.kernels.primitives import kernel_for
from milvus_hubness.errors import (
    BankTooSmall,
    DimensionMismatch,
    EmptyBank,
    InvalidInput,
    InvalidParameter,
)

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    ],
)


@pytest.fixture(params=["cpu", CUDA])
def device(request):
    return request.param


@pytest.fixture(params=["auto", "cpu", CUDA])
def any_device(request):
    """A device; NumPy computes small products with "auto"."""
    return request.param


@pytest.fixture(params=["numpy", "torch"])
def library(request):
    """The library that computes where the test names no device."""
    with kernel_policy(numpy_below=1 << 62 if request.param == "numpy" else 0):
        yield request.param


on_both = pytest.mark.usefixtures("library")


def matrices(n, m, d=5, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, d)).astype(dtype), rng.standard_normal((m, d)).astype(dtype)


def sorted_scores(X, B):
    return -np.sort(-(X.astype(np.float64) @ B.astype(np.float64).T), axis=1)


def exact_logsumexp(X, B, tau, weights=0.0):
    scaled = (X.astype(np.float64) @ B.astype(np.float64).T + weights) / tau
    largest = scaled.max(1)
    return tau * (largest + np.log(np.exp(scaled - largest[:, None]).sum(1)))


@st.composite
def sizes(draw):
    """n, m, k and a tile of so few products that n × m takes up to hundreds of tiles."""
    m = draw(st.integers(1, 40))
    return draw(st.integers(0, 30)), m, draw(st.integers(1, m)), draw(st.integers(1, 64))


@given(sizes(), st.integers(0, 10_000), st.sampled_from(["auto", "cpu"]))
def test_every_tiling_gives_the_same_as_float64(size, seed, device):
    n, m, k, tile = size
    X, B = matrices(n, m, seed=seed)
    with kernel_policy(tile_size=tile):
        means = topk_mean(X, B, k, device=device)
        values, indices = topk(X, B, k, device=device)
        soft = logsumexp(X, B, 0.1, device=device)
    exact = sorted_scores(X, B)
    np.testing.assert_allclose(means, exact[:, :k].mean(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(values, exact[:, :k], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        np.take_along_axis(X @ B.T, indices, 1), values, rtol=1e-5, atol=1e-5
    )
    assert all(len(set(row)) == k for row in indices.tolist())
    if n:
        np.testing.assert_allclose(soft, exact_logsumexp(X, B, 0.1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [31, 32, 33])
@pytest.mark.parametrize("m", [63, 64, 65, 128])
def test_sizes_at_the_edge_of_a_tile(device, n, m):
    X, B = matrices(n, m)
    with kernel_policy(tile_size=32 * 64):
        means = {k: topk_mean(X, B, k, device=device) for k in (1, 32, m - 1, m)}
        soft = logsumexp(X, B, 0.05, device=device)
    for k, mean in means.items():
        np.testing.assert_allclose(mean, sorted_scores(X, B)[:, :k].mean(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(soft, exact_logsumexp(X, B, 0.05), rtol=1e-5, atol=1e-5)


@on_both
def test_real_size_parity():
    X, B = matrices(3000, 5000, d=64)
    X, B = (
        X / np.linalg.norm(X, axis=1, keepdims=True),
        B / np.linalg.norm(B, axis=1, keepdims=True),
    )
    exact = sorted_scores(X, B)
    for k in (1, 128, 5000):
        np.testing.assert_allclose(topk_mean(X, B, k), exact[:, :k].mean(1), atol=1e-6)
    for tau in (0.001, 0.05, 1.0):
        np.testing.assert_allclose(
            logsumexp(X, B, tau), exact_logsumexp(X, B, tau), rtol=1e-6, atol=1e-6
        )


def test_numpy_equals_torch():
    """Biases of a client without torch and of a job are the same to 1e-6."""
    X, B = matrices(300, 5000, d=64)
    X, B = (
        X / np.linalg.norm(X, axis=1, keepdims=True),
        B / np.linalg.norm(B, axis=1, keepdims=True),
    )
    weights = np.random.default_rng(1).standard_normal(5000).astype(np.float32) / 10
    for k in (1, 16, 4999, 5000):
        np.testing.assert_allclose(topk_mean(X, B, k), topk_mean(X, B, k, device="cpu"), atol=1e-6)
        np.testing.assert_allclose(
            topk(X, B, k).values, topk(X, B, k, device="cpu").values, atol=1e-6
        )
    for tau in (0.001, 0.05, 1.0):
        on_torch = logsumexp(X, B, tau, weights, device="cpu")
        np.testing.assert_allclose(logsumexp(X, B, tau, weights), on_torch, rtol=1e-6, atol=1e-6)


def test_numpy_computes_small_products():
    small = KernelPolicy().numpy_below
    assert uses_numpy(small - 1)
    assert not uses_numpy(small)
    assert not uses_numpy(1, "cpu")
    assert kernel_for() == kernel_on(resolve_device())


def test_numpy_computes_all_in_a_process_without_torch():
    script = """
import sys
from milvus_hubness.correction.kernels.policy import prefer_torch, uses_numpy
from milvus_hubness.correction.kernels.primitives import kernel_for
assert uses_numpy(1 << 62) and uses_numpy(1 << 62, "cpu") and not uses_numpy(1, "cuda") and kernel_for() == "numpy"
prefer_torch()
assert uses_numpy(1) and not uses_numpy(1 << 62)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_policy_names_the_kernel_and_ends_with_its_block():
    """Whatever the sizes; arrays alone can be computed by NumPy."""
    X, B = matrices(5, 9)
    with kernel_policy(kernel="numpy"):
        assert kernel_for("cpu") == "numpy"
        assert uses_numpy(1 << 62)
        assert topk_mean(torch.from_numpy(X), B, 2).dtype == torch.float32
        with kernel_policy(kernel="dense"):
            assert kernel_for() == "dense"
            assert not uses_numpy(1)
        with kernel_policy(KernelPolicy()):
            assert uses_numpy(1)
            assert not uses_numpy(1, "cpu")
        assert kernel_for("cpu") == "numpy"
    assert not uses_numpy(1 << 62)


def test_a_policy_holds_in_the_threads_of_the_kernels(monkeypatch):
    seen, real = [], dense.topk_mean
    monkeypatch.setattr(
        dense, "topk_mean", lambda *given: seen.append(POLICY.get().tile_size) or real(*given)
    )
    with kernel_policy(kernel="dense", tile_size=77, devices=("cpu", "cpu")):
        topk_mean(*matrices(8, 9), 2, device="cuda:all")
        share_out(lambda task: seen.append(POLICY.get().tile_size), iter(range(8)), 2)
    assert seen == [77] * 10


@pytest.mark.parametrize("kernel", ["dense", "screened"])
def test_all_devices_share_the_rows(device, kernel):
    X, B = matrices(7, 300, d=16)
    with kernel_policy(kernel=kernel, least_screened=(0, 0), devices=(device,) * 3):
        for rows in (torch.from_numpy(X).to(device), X, X[:1], X[:0]):
            apart, together = topk(rows, B, 3, device="cuda:all"), topk(rows, B, 3, device=device)
            for one, other in zip(apart, together, strict=True):
                assert type(one) is type(other) is type(rows)
                one, other = torch.as_tensor(one), torch.as_tensor(other)
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
            apart, together = (
                logsumexp(rows, B, 0.1, device=name) for name in ("cuda:all", device)
            )
            torch.testing.assert_close(
                torch.as_tensor(apart), torch.as_tensor(together), rtol=1e-6, atol=1e-6
            )
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_cuda_equals_cpu():
    X, B = matrices(2000, 3000, d=256)
    torch.set_float32_matmul_precision("high")
    try:
        for k in (1, 32, 1500, 3000):
            np.testing.assert_allclose(
                topk_mean(X, B, k, device="cuda"),
                topk_mean(X, B, k, device="cpu"),
                rtol=1e-5,
                atol=1e-4,
            )
        np.testing.assert_allclose(
            logsumexp(X, B, 0.05, device="cuda"),
            logsumexp(X, B, 0.05, device="cpu"),
            rtol=1e-5,
            atol=1e-4,
        )
    finally:
        torch.set_float32_matmul_precision("highest")


@on_both
def test_float64_in_float64_out():
    X, B = matrices(20, 30, dtype=np.float64)
    means = topk_mean(X, B, 7)
    assert means.dtype == np.float64
    np.testing.assert_allclose(means, sorted_scores(X, B)[:, :7].mean(1), rtol=1e-14)
    soft = logsumexp(X, B, 0.01)
    assert soft.dtype == np.float64
    np.testing.assert_allclose(soft, exact_logsumexp(X, B, 0.01), rtol=1e-13)
    assert topk_mean(X, B.astype(np.float32), 7).dtype == np.float32


@on_both
@pytest.mark.parametrize("dtype", [np.float16, ">f4", np.int64, np.uint16])
def test_other_numbers_are_computed_in_float32(dtype):
    X, B = (np.abs(M * 10).astype(dtype) for M in matrices(20, 30))
    means = topk_mean(X, B, 3)
    assert means.dtype == np.float32
    np.testing.assert_allclose(means, sorted_scores(X, B)[:, :3].mean(1), rtol=1e-5)


@on_both
@pytest.mark.parametrize(
    "change", [lambda M: M[::-1], lambda M: M[:1][::-1], np.asfortranarray, lambda M: M[:, ::2]]
)
def test_any_memory_layout(change):
    X, B = (change(M) for M in matrices(20, 30, d=6))
    np.testing.assert_allclose(topk_mean(X, B, 1), sorted_scores(X, B)[:, 0], rtol=1e-5)


@on_both
def test_read_only_arrays_are_neither_written_to_nor_warned_about():
    X, B = matrices(20, 30)
    X.flags.writeable = B.flags.writeable = False
    before = X.copy(), B.copy()
    topk_mean(X, B, 3)
    logsumexp(X, B, 0.1, np.zeros(30))
    np.testing.assert_array_equal(X, before[0])
    np.testing.assert_array_equal(B, before[1])


def test_tensors_come_back_as_tensors(device):
    X, B = matrices(20, 30)
    x = torch.from_numpy(X).to(device).requires_grad_()
    means, soft, nearest = topk_mean(x, B, 3), logsumexp(x, B, 0.1), topk(x, torch.from_numpy(B), 3)
    for result in (means, soft, nearest.values, nearest.indices):
        assert isinstance(result, torch.Tensor)
        assert result.device == x.device
        assert not result.requires_grad
    np.testing.assert_allclose(means.cpu(), topk_mean(X, torch.from_numpy(B), 3), rtol=1e-6)
    assert topk_mean(torch.from_numpy(X).bfloat16(), B, 3).dtype == torch.float32


def test_reduced_precision_settings_are_put_aside_and_back():
    X, B = matrices(50, 60, d=256)
    exact = sorted_scores(X, B)[:, 0]
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu"):
            np.testing.assert_allclose(topk_mean(X, B, 1, device="cpu"), exact, rtol=1e-5)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@on_both
@pytest.mark.parametrize("tau", [1e-300, 1e-30, 0.001, 1.0, 1000.0])
def test_logsumexp_is_finite_and_right_at_every_tau(tau):
    X, B = matrices(40, 50)
    X *= 30
    np.testing.assert_allclose(
        logsumexp(X, B, tau), exact_logsumexp(X, B, tau), rtol=1e-5, atol=1e-4
    )


@on_both
def test_logsumexp_becomes_the_maximum():
    X, B = matrices(40, 50)
    weights = np.random.default_rng(1).standard_normal(50).astype(np.float32)
    np.testing.assert_allclose(
        logsumexp(X, B, 1e-9, weights), (X @ B.T + weights).max(1), rtol=1e-5
    )


def test_logsumexp_weights(any_device):
    X, B = matrices(40, 50)
    weights = np.random.default_rng(1).standard_normal(50)
    some = np.where(np.arange(50) < 45, -np.inf, weights)
    none = np.full(50, -np.inf)
    with kernel_policy(tile_size=100):
        soft, of_some, of_none = (
            logsumexp(X, B, 0.1, own, device=any_device) for own in (weights, some, none)
        )
    np.testing.assert_allclose(soft, exact_logsumexp(X, B, 0.1, weights), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        of_some, exact_logsumexp(X, B[45:], 0.1, weights[45:]), rtol=1e-5, atol=1e-5
    )
    assert (of_none == -np.inf).all()


@on_both
def test_zero_rows():
    X, B = np.zeros((3, 4), np.float32), np.zeros((5, 4), np.float32)
    np.testing.assert_array_equal(topk_mean(X, B, 2), 0)
    np.testing.assert_allclose(logsumexp(X, B, 0.5), 0.5 * np.log(5), rtol=1e-6)


@pytest.mark.parametrize("k", [0, -1, 2.0, True, "3", None, np.nan])
def test_k_must_be_a_whole_number(k):
    for kernel in (topk_mean, topk):
        with pytest.raises(InvalidParameter, match="k must be a whole number"):
            kernel(*matrices(3, 4), k)


@on_both
def test_numpy_whole_numbers_will_do():
    assert topk_mean(*matrices(3, 4), np.int32(2)).shape == (3,)


@pytest.mark.parametrize("tau", [0, -0.1, np.nan, np.inf, "warm", None, True])
def test_tau_must_be_positive(tau):
    with pytest.raises(InvalidParameter, match="tau must be"):
        logsumexp(*matrices(3, 4), tau)


def call_topk_mean(X, B):
    return topk_mean(X, B, 1)


def call_topk(X, B):
    return topk(X, B, 1)


def call_logsumexp(X, B):
    return logsumexp(X, B, 0.1)


@on_both
@pytest.mark.parametrize("call", [call_topk_mean, call_topk, call_logsumexp])
def test_bad_matrices(call):
    X, B = matrices(3, 4)
    with pytest.raises(DimensionMismatch, match="X has 5 columns and B has 4"):
        call(X, B[:, :4])
    with pytest.raises(EmptyBank):
        call(X, B[:0])
    with pytest.raises(InvalidInput, match=r"X must be 2-D.*\(5,\)"):
        call(X[0], B)
    with pytest.raises(InvalidInput, match="B must be 2-D"):
        call(X, B[None])
    with pytest.raises(InvalidInput, match="not list"):
        call(X.tolist(), B)
    with pytest.raises(InvalidInput, match="real numbers, not complex64"):
        call(X.astype(np.complex64), B)
    with pytest.raises(InvalidInput, match="real numbers"):
        call(X, B > 0)
    with pytest.raises(InvalidParameter, match="device"):
        topk_mean(X, B, 1, device="tpu")


def test_bank_too_small():
    for kernel in (topk_mean, topk):
        with pytest.raises(BankTooSmall, match=r"k = 5 .* bank has 4"):
            kernel(*matrices(3, 4), 5)


def test_weights_of_another_length():
    with pytest.raises(DimensionMismatch, match=r"\(4,\)"):
        logsumexp(*matrices(3, 4), 0.1, np.zeros(3))


class LargestTensor(TorchDispatchMode):
    """Sees every tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else [result]:
            if isinstance(made, torch.Tensor):
                self.elements = max(self.elements, made.numel())
        return result


@pytest.fixture
def own_thread():
    """The kernels run in the thread of the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("k", [1, 10, 100, 499, 500])
def test_no_tensor_is_larger_than_inputs_or_a_tile(own_thread, k):
    n, m, d, tile = 400, 500, 4, 4096
    X, B = matrices(n, m, d=d)
    with kernel_policy(tile_size=tile), LargestTensor() as seen:
        topk_mean(X, B, k, device="cpu")
        logsumexp(X, B, 0.1, device="cpu")
    assert tile / 2 < seen.elements <= tile
    with kernel_policy(tile_size=tile), LargestTensor() as seen:
        topk(X, B, k, device="cpu")
    assert seen.elements <= max(tile, n * k)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_process_memory_stays_far_below_the_matrix_of_scores(library):
    """10,000 × 10,000 scores would be 400 MB; measured in a process of its own."""
    script = (
        f"import {library}"
        + """
import resource, sys, numpy as np
from milvus_hubness.correction.kernels import topk, topk_mean, logsumexp
X, B = (np.random.default_rng(seed).standard_normal((10_000, 4), np.float32) for seed in (0, 1))
topk_mean(X[:100], B[:100], 1); logsumexp(X[:100], B[:100], 0.1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
topk_mean(X, B, 16); logsumexp(X, B, 0.1); topk(X[:5000], B, 16)
assert ("torch" in sys.modules) == ("LIBRARY" == "torch")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    )
    done = subprocess.run(
        [sys.executable, "-c", script.replace("LIBRARY", library)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout) < 150


def test_tiles_are_copied_one_ahead_in_order(monkeypatch):
    """With streams and pinned memory of CUDA put in by hand."""
    events = []

    class Stream:
        def wait_stream(self, other):
            events.append("wait")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(
        torch.Tensor,
        "pin_memory",
        lambda tensor: events.append(f"copy {int(tensor[0, 0])}") or tensor,
    )
    X, B = np.arange(7, dtype=np.float32)[:, None], np.ones((3, 1), np.float32)
    tiles = []
    for part, tile in operands.Operands.of(X, B, "cpu").copied_ahead(
        [slice(0, 3), slice(3, 6), slice(6, 7)]
    ):
        events.append(f"work {part.start}")
        tiles.append(tile)
    assert torch.cat(tiles)[:, 0].tolist() == X[:, 0].tolist()
    assert events == [
        "copy 0",
        "wait",
        "copy 3",
        "work 0",
        "wait",
        "copy 6",
        "work 3",
        "wait",
        "work 6",
    ]
    assert list(operands.Operands.of(X[:0], B, "cpu").copied_ahead([])) == []


@pytest.mark.parametrize("k", [1, 30, 128])
def test_faiss_finds_the_largest_of_many_rows(own_thread, monkeypatch, k):
    X, B = matrices(700, 900, d=24)
    import faiss

    rows, real = [], faiss.knn
    monkeypatch.setattr(
        faiss, "knn", lambda x, *rest, **named: rows.append(len(x)) or real(x, *rest, **named)
    )
    before = faiss.omp_get_max_threads()
    with kernel_policy(kernel="dense"):
        means, (values, indices) = topk_mean(X, B, k, device="cpu"), topk(X, B, k, device="cpu")
    exact = sorted_scores(X, B)[:, :k]
    np.testing.assert_allclose(means, exact.mean(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(values, exact, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        np.take_along_axis(X @ B.T, indices, 1), values, rtol=1e-5, atol=1e-5
    )
    assert rows == 2 * [350, 350]
    assert faiss.omp_get_max_threads() == before
