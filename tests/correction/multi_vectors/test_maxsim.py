"""MaxSim of ragged rows: against float64, in bounded memory, and on rows as they come."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from milvus_hubness.correction.kernels.multi_vectors import usable
from milvus_hubness.correction.kernels.policy import kernel_policy
from milvus_hubness.correction.multi_vectors import MultiVectors, maxsim, maxsim_tiles
from milvus_hubness.errors import (
    DimensionMismatch,
    InvalidInput,
    InvalidParameter,
    NonFiniteVectors,
)

DIM = 16


def rows_of(lengths, seed, dim=DIM):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((length, dim)) for length in lengths]


def oracle(queries, documents):
    """Mean over query tokens of the maximum over document tokens, pair by pair in float64."""
    return np.array(
        [[(q.astype(float) @ r.astype(float).T).max(1).mean() for r in documents] for q in queries]
    )


@pytest.fixture(scope="module")
def texts():
    """Queries of 1 to 30 tokens, and documents of 1 to 400."""
    rng = np.random.default_rng(1)
    queries = rows_of([1, 30, *rng.integers(1, 12, 25)], 2)
    documents = rows_of([1, 400, 1, *rng.integers(1, 80, 60)], 3)
    return queries, documents


@pytest.mark.parametrize("kernel", ["numpy", "dense"])
@pytest.mark.parametrize("memory_bytes", [1 << 16, 1 << 20, 1 << 26])
def test_it_is_the_mean_of_the_largest_products(texts, kernel, memory_bytes):
    queries, documents = texts
    with kernel_policy(kernel=kernel):
        scores = maxsim(
            MultiVectors.from_list(queries),
            MultiVectors.from_list(documents),
            memory_bytes=memory_bytes,
        )
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, oracle(queries, documents), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_gives_the_same(texts):
    queries, documents = texts
    scores = maxsim(
        MultiVectors.from_list(queries), MultiVectors.from_list(documents), device="cuda"
    )
    np.testing.assert_allclose(scores, oracle(queries, documents), atol=1e-5)


def test_tiles_cover_all_documents_once(texts):
    queries = MultiVectors.from_list(texts[0] * 20)
    documents = MultiVectors.from_list(texts[1])
    tiles = list(maxsim_tiles(documents, queries, memory_bytes=1 << 16))
    assert len(tiles) > 1
    assert [row for rows, _ in tiles for row in range(rows.start, rows.stop)] == list(
        range(len(documents))
    )
    np.testing.assert_allclose(
        np.concatenate([tile for _, tile in tiles]), maxsim(queries, documents).T, atol=1e-6
    )


@pytest.mark.parametrize("lengths", [[32] * 2000, [20_000] + [4] * 500])
def test_memory_is_bounded(lengths):
    """The products of all tokens would take 100 MB and more."""
    documents = MultiVectors.from_list(rows_of(lengths, 4))
    queries = MultiVectors.from_list(rows_of([8] * 150 + [400], 5))
    assert 4 * len(documents.tokens) * len(queries.tokens) > 100e6

    with kernel_policy(kernel="numpy"):
        tracemalloc.start()
        try:
            for _ in maxsim_tiles(documents, queries, memory_bytes=1 << 22):
                pass
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 1.25 * (1 << 22)


def test_no_queries_and_no_documents_have_no_scores(texts):
    queries, documents = (MultiVectors.from_list(rows) for rows in texts)
    assert maxsim(queries[:0], documents).shape == (0, len(documents))
    assert maxsim(queries, documents[:0]).shape == (len(queries), 0)


def test_rows_are_taken_like_those_of_an_array(texts):
    _, documents = texts
    rows = MultiVectors.from_list(documents)
    assert len(rows) == len(documents)
    assert rows.shape == (len(documents), DIM)
    assert rows.lengths.tolist() == [len(document) for document in documents]

    numbers = list(range(len(documents)))
    mask = np.arange(len(documents)) % 3 == 0
    for which in (slice(2, 9), slice(None, None, 3), slice(5, 2), [4, 4, -1], mask):
        taken = rows[which]
        chosen = np.array(numbers)[which]
        assert len(taken) == len(chosen)
        for tokens, number in zip(taken, chosen, strict=True):
            np.testing.assert_array_equal(tokens, documents[number].astype(np.float32))
    np.testing.assert_array_equal(rows[-1], documents[-1].astype(np.float32))
    with pytest.raises(IndexError):
        rows[len(documents)]


def test_normalised_tokens_have_length_1_and_zeros_stay():
    rows = MultiVectors.from_list([np.array([[3e25, 4e25], [0, 0]]), [[0.0, 1e-30]]])
    np.testing.assert_allclose(rows.normalised().tokens, [[0.6, 0.8], [0, 0], [0, 1]], atol=1e-6)


def test_the_mean_of_tokens_is_that_of_each_row(texts):
    _, documents = texts
    means = MultiVectors.from_list(documents).means()
    np.testing.assert_allclose(means, [row.mean(0) for row in documents], atol=1e-6)


def test_a_list_of_tensors_or_of_lists_is_taken(texts):
    queries, _ = texts
    expected = MultiVectors.from_list(queries)
    for rows in (
        [torch.from_numpy(row) for row in queries],
        [row.tolist() for row in queries],
        [row.astype(np.float16).astype(np.float64) for row in queries],
    ):
        np.testing.assert_allclose(MultiVectors.from_list(rows).tokens, expected.tokens, atol=3e-3)
    assert MultiVectors.of(expected) is expected


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        ([], InvalidInput, "the documents has no row; at least 1"),
        ([[[1.0, 2.0]], []], InvalidInput, "without a token: remove row 1"),
        ([[[1.0, 2.0]], np.empty((0, 2))], InvalidInput, "without a token: remove row 1"),
        ([[[1.0, 2.0]], [[1.0]]], DimensionMismatch, "2 numbers in row 0 and of 1 in row 1"),
        ([[[1.0, 2.0], [1.0]]], InvalidInput, "row 0 of the documents must hold tokens"),
        ([[1.0, 2.0]], InvalidInput, "row 0 of the documents must be an array"),
        ([["a"]], InvalidInput, "row 0 of the documents must hold tokens of real numbers"),
        ([[[1, 2]], [[1, 2], [3, np.nan]]], NonFiniteVectors, "correct or remove row 1"),
        ([[[1, 2]], [[1, 2]], [[1e300, 0]]], NonFiniteVectors, "correct or remove row 2"),
    ],
)
def test_a_faulty_row_is_named_in_one_line(rows, error, words):
    with pytest.raises(error, match=words) as raised:
        MultiVectors.from_list(rows, what="the documents")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "offsets", [[0, 2], [1, 3], [0, 2, 1, 3], [0.0, 3.0], [[0, 3]], [], [0, 1, 1, 3]]
)
def test_faulty_offsets_are_refused(offsets):
    with pytest.raises(InvalidInput):
        MultiVectors(np.ones((3, 2), np.float32), np.asarray(offsets))


def test_rows_without_a_score_are_counted_before():
    rows = [[[1.0, 2.0]], [], None, [[np.inf, 0]], np.empty((0, 2)), torch.ones(2, 2)]
    assert usable(rows).tolist() == [True, False, False, False, False, True]


def test_other_dimensions_and_too_little_memory_are_refused(texts):
    queries, documents = (MultiVectors.from_list(rows) for rows in texts)
    with pytest.raises(DimensionMismatch, match=r"dimension 16 and .* of 8: embed both with one"):
        maxsim(MultiVectors.from_list(rows_of([3], 6, dim=8)), documents)
    with pytest.raises(InvalidParameter, match="memory_bytes"):
        maxsim(queries, documents, memory_bytes=100)
