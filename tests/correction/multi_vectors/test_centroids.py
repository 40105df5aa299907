"""MaxSim by centroids: its error is the measured one, and estimators take it for the exact scores."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from milvus_hubness.correction.estimators import NNN, Blend
from milvus_hubness.correction.kernels import centroids as centroids_module
from milvus_hubness.correction.kernels import token_rows
from milvus_hubness.correction.kernels.policy import kernel_policy
from milvus_hubness.correction.multi_vectors import Centroids, MultiVectors, maxsim
from milvus_hubness.errors import DimensionMismatch, InvalidParameter

DIM = 24


@pytest.fixture(scope="module")
def texts():
    """A bank and documents whose tokens are noisy words of one vocabulary."""
    rng = np.random.default_rng(0)
    words = rng.standard_normal((120, DIM))

    def rows(count, longest):
        lengths = rng.integers(1, longest + 1, count)
        noisy = [
            words[rng.integers(0, len(words), length)] + 0.15 * rng.standard_normal((length, DIM))
            for length in lengths
        ]
        return MultiVectors.from_list(noisy).normalised()

    return rows(300, 12), rows(150, 40)


def test_scores_are_those_of_the_means_of_clusters(texts):
    """In float64: each query token is replaced by the mean of its cluster."""
    bank, documents = texts
    centroids = Centroids.of(bank, 100, refined=0)
    assert 80 < len(centroids) < 120
    clusters = centroids.cluster_of
    means = [bank.tokens[clusters == c].mean(0, dtype=float) for c in range(len(centroids))]
    replaced = np.array(means)[clusters]
    best = np.array([(replaced @ r.astype(float).T).max(1) for r in documents])
    expected = np.add.reduceat(best, bank.offsets[:-1], axis=1) / bank.lengths
    np.testing.assert_allclose(centroids.scores(documents), expected, atol=1e-5)


def test_the_best_scores_of_each_document_are_exact(texts):
    bank, documents = texts
    exact = maxsim(bank, documents).T
    rough = Centroids.of(bank, 60, refined=0).scores(documents)
    refined = Centroids.of(bank, 60, refined=40).scores(documents)
    for of_exact, of_rough, of_refined in zip(exact, rough, refined, strict=True):
        best = np.argsort(-of_rough)[:40]
        np.testing.assert_allclose(of_refined[best], of_exact[best], atol=1e-6)
        others = np.setdiff1d(np.arange(len(bank)), best)
        shift = (of_exact[best] - of_rough[best]).mean()
        np.testing.assert_allclose(of_refined[others], of_rough[others] + shift, atol=1e-5)

    def distance(scores):
        biases = NNN(8).fit(np.eye(len(bank))).bias(scores)
        return np.abs(biases - NNN(8).fit(np.eye(len(bank))).bias(exact)).mean()

    assert distance(refined) < 0.2 * distance(rough)
    few = Centroids.of(bank[:50], 20).scores(documents)
    np.testing.assert_allclose(few, exact[:, :50], atol=1e-6)


def test_of_many_documents_the_best_of_each_query_are_exact_too(texts):
    bank, documents = texts
    rng = np.random.default_rng(1)
    many = documents[rng.integers(0, len(documents), 300)]
    exact = maxsim(bank, many).T
    rough = Centroids.of(bank, 60, refined=0).scores(many)
    refined = Centroids.of(bank, 60, refined=5).scores(many)
    best = np.argsort(-rough, axis=0)[:10]
    queries = np.arange(len(bank))
    np.testing.assert_allclose(refined[best, queries], exact[best, queries], atol=1e-6)
    # The others are not.
    assert (np.abs(refined - exact) > 1e-4).mean() > 0.8


def test_the_reported_error_is_that_of_a_sample(texts):
    bank, documents = texts
    centroids = Centroids.of(bank, 100, refined=0)
    error = centroids.error_on(documents, sampled=len(documents))
    difference = maxsim(bank, documents).T.astype(float) - centroids.scores(documents)
    assert error.documents == len(documents)
    assert error.mean == pytest.approx(difference.mean(), abs=1e-6)
    assert error.deviation == pytest.approx(difference.std(), abs=1e-6)
    assert 0.9 < error.correlation < 1
    assert error.deviation < 0.4 * error.spread

    coarse = Centroids.of(bank, 12, refined=0).error_on(documents)
    assert coarse.documents < len(documents)
    assert coarse.correlation < error.correlation
    assert coarse.deviation > error.deviation


def test_a_centroid_for_each_word_gives_nearly_the_exact_biases(texts):
    bank, documents = texts
    exact = Blend().fit(bank, gallery=documents).bias(documents)
    rows = Centroids.of(bank, 240).documents(documents)
    by_centroids = Blend().fit(bank, gallery=rows).bias(rows)
    assert np.corrcoef(exact, by_centroids)[0, 1] > 0.97


def test_a_fit_by_centroids_computes_no_exact_score(texts, monkeypatch):
    bank, documents = texts
    centroids = Centroids.of(bank, 100)

    def refused(*_, **__):
        raise AssertionError("an exact score")

    monkeypatch.setattr(token_rows, "maxsim_tiles", refused)
    rows = centroids.documents(documents)
    fitted = Blend().fit(bank, gallery=rows)
    scores = centroids.scores(documents)
    units = np.eye(len(bank), dtype=np.float32)
    expected = Blend().fit(units, gallery=scores).bias(scores)
    np.testing.assert_allclose(fitted.bias(rows), expected, atol=1e-5)

    # Without a table too, and of documents that are new.
    with kernel_policy(sinkhorn_limits=(0, 2e10)):
        few = centroids.documents(documents[:20])
        np.testing.assert_allclose(fitted.bias(few), expected[:20], atol=1e-5)
    with pytest.raises(AssertionError, match="an exact score"):
        fitted.bias(documents)


def test_equal_seeds_give_equal_centroids(texts):
    bank, _ = texts
    first, second = (Centroids.of(bank, 50, seed=3) for _ in range(2))
    np.testing.assert_array_equal(first.cluster_of, second.cluster_of)


def test_the_cost_is_that_of_centroids_not_of_tokens(texts, monkeypatch):
    """Documents are compared with the centroids, and with the tokens of their best queries."""
    bank, documents = texts
    centroids = Centroids.of(bank, 60, refined=0)
    products = []
    original = centroids_module.maxsim_tiles

    def counting(documents, queries, **options):
        products.append(len(documents.tokens) * len(queries.tokens))
        return original(documents, queries, **options)

    monkeypatch.setattr(centroids_module, "maxsim_tiles", counting)
    rows = centroids.documents(documents)
    NNN(8).fit(bank, gallery=rows).bias(rows)
    # The fit of this estimator needs no scores, and its biases each of them once.
    assert 0 < sum(products) <= len(documents.tokens) * 60


def test_memory_is_bounded(texts):
    bank, documents = texts
    centroids = Centroids.of(bank, 100)
    many = documents[np.tile(np.arange(len(documents)), 40)]
    numbers = np.arange(len(bank))
    with kernel_policy(kernel="numpy"):
        tracemalloc.start()
        try:
            for _ in centroids.tiles(many, numbers, memory_bytes=1 << 20):
                pass
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    # The scores of all pairs alone would take six times as much.
    assert len(many) * len(bank) * 4 > 6 * (1 << 20)
    assert peak < 3 * (1 << 20)


@pytest.mark.parametrize("count", [0, 1.5, "many"])
def test_a_wrong_number_of_centroids_is_refused(texts, count):
    with pytest.raises(InvalidParameter, match="count"):
        Centroids.of(texts[0], count)


def test_too_few_tokens_and_other_dimensions_are_refused(texts):
    bank, _ = texts
    with pytest.raises(InvalidParameter, match="has 1 token: centroids need at least 2"):
        Centroids.of(MultiVectors.from_list([np.ones((1, 3))], what="the bank"))
    with pytest.raises(DimensionMismatch, match="embed both with one model"):
        Centroids.of(bank, 10).documents(MultiVectors.from_list([np.ones((2, 3))]))
    assert len(Centroids.of(bank[:2], 4096)) <= len(bank[:2].tokens)
