"""The screen loses nothing: the k largest are those of float64, whatever the rows look like."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from milvus_hubness.correction.kernels import dense, logsumexp, operands, screened, topk, topk_mean
from milvus_hubness.correction.kernels.operands import full_precision
from milvus_hubness.correction.kernels.policy import (
    KernelPolicy,
    kernel_policy,
    screens_in_bfloat16,
)
from milvus_hubness.errors import InvalidParameter

RNG = np.random.default_rng(0)
CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    ],
)


@pytest.fixture(autouse=True)
def always():
    """Small tiles, no size too small, and bfloat16 on any processor."""
    with kernel_policy(
        kernel="screened", screen="bfloat16", least_screened=(0, 0), screened_tile=(40, 1024)
    ):
        yield


@pytest.fixture(params=["FAISS", "torch", CUDA])
def device(request, monkeypatch):
    """The device. On a CPU, FAISS computes the exact products, or torch where FAISS is not installed."""
    if request.param == "torch":
        monkeypatch.setitem(sys.modules, "faiss", None)
    return "cuda" if request.param == "cuda" else "cpu"


@pytest.fixture
def dense_rows(monkeypatch):
    """How many rows were left to the dense kernel."""
    rows = []
    for name in ("topk_mean", "topk"):
        real = getattr(dense, name)
        monkeypatch.setattr(
            dense, name, lambda o, *rest, real=real: rows.append(len(o.X)) or real(o, *rest)
        )
    return rows


def unit(n, d):
    rows = RNG.standard_normal((n, d)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def with_common_part(n, m, d, cosine, l2=False):
    """Rows and a bank with a mean cosine. l2: with two more columns, of rows 1 and 0, of the bank −½‖b‖² and 0."""
    common = unit(1, d)
    X, B = (np.sqrt(1 - cosine) * unit(rows, d) + np.sqrt(cosine) * common for rows in (n, m))
    if l2:
        B *= RNG.uniform(0.9, 1.1, (m, 1))
        B = np.hstack([B, -0.5 * (B**2).sum(1, keepdims=True), np.zeros((m, 1))])
        X = np.hstack([X, np.ones((n, 1)), np.zeros((n, 1))])
    return X.astype(np.float32), B.astype(np.float32)


def check(X, B, k, atol=1e-6, device="cpu"):
    exact = -np.sort(-(X.astype(np.float64) @ B.astype(np.float64).T), axis=1)[:, :k]
    np.testing.assert_allclose(topk_mean(X, B, k, device=device), exact.mean(1), rtol=0, atol=atol)
    values, indices = topk(X, B, k, device=device)
    np.testing.assert_allclose(values, exact, rtol=0, atol=atol)
    assert (np.diff(values, axis=1) <= 0).all()
    found = np.take_along_axis(X.astype(np.float64) @ B.astype(np.float64).T, indices, 1)
    np.testing.assert_allclose(found, exact, rtol=0, atol=atol)
    assert all(len(set(row)) == k for row in indices.tolist())


@pytest.mark.parametrize("m", [3001, 3072, 2999])
@pytest.mark.parametrize("k", [1, 7, 20])
def test_random_rows(dense_rows, device, m, k):
    check(unit(97, 64), unit(m, 64), k, device=device)
    assert sum(dense_rows) <= 20


@pytest.mark.parametrize("cosine", [0, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("dim", [100, 384, 512, 514])
def test_no_row_is_left_over_however_much_the_vectors_have_in_common(
    dense_rows, device, dim, cosine
):
    """514 is L2 at 512."""
    l2 = dim == 514
    X, B = with_common_part(40, 4000, dim - 2 * l2, cosine, l2)
    check(X, B, 16, atol=3e-6, device=device)
    assert dense_rows == []


@pytest.mark.long
@pytest.mark.parametrize("l2", [False, True])
@pytest.mark.parametrize("k", [16, 128])
@pytest.mark.parametrize("cosine", [0, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("dim", [100, 384, 512, 768, 1000])
def test_no_row_of_a_large_bank_is_left_over(dense_rows, dim, cosine, k, l2):
    X, B = with_common_part(512, 50_000, dim, cosine, l2)
    with kernel_policy(kernel="screened", least_screened=(0, 0), screened_tile=None):
        topk_mean(X, B, k, device="cpu")
    assert sum(dense_rows) == 0


def test_vectors_with_a_large_common_part(dense_rows, device):
    """The scores differ by less than bfloat16 tells apart, and their float32 sums by a millionth of their size."""
    X, B = unit(60, 64) + np.float32(8), unit(4000, 64)
    B += 8 - B.mean(1, keepdims=True)
    check(X, B, 9, atol=5e-3, device=device)
    assert dense_rows == []


def test_a_few_rows_are_left_over_and_done_again(dense_rows, device):
    """Zero rows tie with everything."""
    B = unit(3000, 32) + np.float32(0.5)
    X = unit(50, 32)
    X[:2] = 0
    X[2:9] = -np.abs(X[2:9]) - 1
    check(X, B, 5, atol=1e-5, device=device)
    assert 2 <= dense_rows[0] < 50


def test_scores_closer_than_bfloat16_can_tell(dense_rows):
    """A thousand copies of a row, each moved by less than the screen sees: which are the largest is told by
    the exact products alone."""
    base = unit(1, 64)
    B = np.concatenate(
        [unit(4000, 64), base + 1e-5 * RNG.standard_normal((60, 64)).astype(np.float32)]
    )
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
    ("dim", "tiles"),
    [(1024, (256, 65_536)), (512, (512, 32_768)), (300, (768, 21_824)), (64, (1024, 16_384))],
)
def test_tiles_fill_the_caches(dim, tiles):
    with kernel_policy(KernelPolicy()):
        assert screened.tiles_for(dim, torch.device("cpu")) == tiles


def test_faiss_and_torch_give_the_same_products(monkeypatch):
    """In float32, from tiles smaller than a row's products, and with none left."""
    X, B = unit(50, 24), unit(3000, 24)
    with kernel_policy(tile_size=100):
        by_faiss = topk(X, B, 7, device="cpu")
        monkeypatch.setitem(sys.modules, "faiss", None)
        by_torch = topk(X, B, 7, device="cpu")
    np.testing.assert_array_equal(by_torch.indices, by_faiss.indices)
    np.testing.assert_allclose(by_torch.values, by_faiss.values, rtol=0, atol=3e-7)


def test_every_tensor_is_made_on_the_device_of_the_operands(monkeypatch):
    """A tensor made without a device would be on the default device, which has no numbers here."""
    monkeypatch.setitem(sys.modules, "faiss", None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.device("meta"):
            check(unit(50, 24), unit(3000, 24), 7)
    finally:
        torch.set_num_threads(threads)


def test_the_copied_rows_of_the_bank_fit_into_a_tile(monkeypatch):
    X, B = unit(200, 64), unit(6000, 64)
    monkeypatch.setitem(sys.modules, "faiss", None)
    copied, real = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: copied.append(a.numel()) or real(a, b))
    with kernel_policy(tile_size=1 << 15, screened_tile=(200, 1024)):
        topk_mean(X, B, 10, device="cpu")
    assert 1 << 14 < max(copied) <= 1 << 15


def test_a_device_that_multiplies_bfloat16_screens_in_it(monkeypatch):
    capability, cpu, cuda = (8, 0), torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with kernel_policy(KernelPolicy(screen="auto")):
        assert screens_in_bfloat16(cuda)
        capability = (7, 5)
        assert not screens_in_bfloat16(cuda)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
        assert screens_in_bfloat16(cpu)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert not screens_in_bfloat16(cpu)


def test_the_environment_names_the_dtype_of_screens(monkeypatch):
    for screen in ("float32", "bfloat16"):
        monkeypatch.setenv("MILVUS_HUBNESS_KERNEL", screen)
        with kernel_policy(KernelPolicy()):
            assert screens_in_bfloat16(torch.device("cpu")) == (screen == "bfloat16")
    # As all variables of the package: a compose file passes an empty one where there is none.
    monkeypatch.setenv("MILVUS_HUBNESS_KERNEL", "")
    assert KernelPolicy().screen == "auto"
    monkeypatch.setenv("MILVUS_HUBNESS_KERNEL", "float16")
    with pytest.raises(
        InvalidParameter, match="MILVUS_HUBNESS_KERNEL is one of auto, bfloat16, float32, not"
    ):
        KernelPolicy()


@pytest.mark.parametrize("is_faster", [True, False])
def test_products_by_numpy_and_by_torch_are_the_same(monkeypatch, is_faster):
    monkeypatch.setattr(operands, "numpy_is_faster", lambda: is_faster)
    X, B = unit(50, 24), unit(3000, 24)
    with kernel_policy(screen="float32"):
        check(X, B, 7)
    with kernel_policy(kernel="dense"):
        check(X, B, 7)
        exact = 0.1 * np.log(np.exp(X.astype(np.float64) @ B.T / 0.1).sum(1))
        np.testing.assert_allclose(logsumexp(X, B, 0.1, device="cpu"), exact, rtol=0, atol=1e-6)


def test_products_of_bfloat16_are_summed_in_float32():
    matmul = torch.backends.cuda.matmul
    assert matmul.allow_bf16_reduced_precision_reduction
    with full_precision(torch.device("cpu")):
        assert not matmul.allow_bf16_reduced_precision_reduction
    assert matmul.allow_bf16_reduced_precision_reduction


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_real_sizes_on_cuda(dense_rows, dtype):
    X, B = (torch.from_numpy(unit(n, 512)).to("cuda", dtype) for n in (3000, 200_000))
    exact = (X.double() @ B.double().T).topk(512).values
    with kernel_policy(KernelPolicy()):
        for k in (16, 128, 512):
            torch.testing.assert_close(
                topk_mean(X, B, k).double(), exact[:, :k].mean(1), rtol=0, atol=5e-6
            )
            torch.testing.assert_close(
                topk(X, B, k).values.double(), exact[:, :k], rtol=0, atol=5e-6
            )
    assert sum(dense_rows) <= 30
