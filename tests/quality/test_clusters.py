"""k-means against scikit-learn's, and against clusters that are known."""

import numpy as np
import pytest
from sklearn.cluster import KMeans

from milvus_hubness.quality.clusters import clusters_of


def blobs(rng, count, size, dim):
    means = 20 * rng.normal(size=(count, dim))
    numbers = np.repeat(np.arange(count), size)
    return (means[numbers] + rng.normal(size=(len(numbers), dim))).astype(np.float32), numbers


def test_clusters_that_are_far_apart_are_those_that_were_made():
    rows, made = blobs(np.random.default_rng(0), 8, 50, 16)
    clusters = clusters_of(rows, 8)
    numbers, distances = clusters.nearest(rows)
    pairs = {(int(one), int(other)) for one, other in zip(made, numbers, strict=True)}
    assert len(pairs) == 8
    exact = ((rows.astype(np.float64) - clusters.means[numbers]) ** 2).sum(1)
    assert distances == pytest.approx(exact, rel=1e-3)
    assert clusters.cost == pytest.approx(exact.sum(), rel=1e-3)
    again = clusters_of(rows, 8)
    assert np.array_equal(again.means, clusters.means)


def test_far_from_the_origin_nothing_is_lost():
    rows, made = blobs(np.random.default_rng(1), 5, 40, 8)
    numbers, _ = clusters_of(rows + np.float32(1_000), 5).nearest(rows + np.float32(1_000))
    assert len(set(zip(made.tolist(), numbers.tolist(), strict=True))) == 5


def test_equal_rows_and_as_many_clusters_as_rows():
    rows = np.ones((6, 4), np.float32)
    clusters = clusters_of(rows, 3)
    assert clusters.cost == 0
    assert np.isfinite(clusters.means).all()
    rows = np.eye(4, dtype=np.float32)
    numbers, _ = clusters_of(rows, 4).nearest(rows)
    assert sorted(numbers) == [0, 1, 2, 3]


@pytest.mark.parametrize("count", [2, 16, 48])
def test_the_clusters_are_as_tight_as_those_of_scikit_learn(count):
    """Of rows that a few directions spread most, as they do with embeddings, and that have no clear clusters."""
    spread = np.arange(1, 65) ** -0.5
    items = (spread * np.random.default_rng(2).normal(size=(1_500, 64))).astype(np.float32)
    costs = [clusters_of(items, count, rounds=20, seed=seed).cost for seed in range(5)]
    others = [
        KMeans(count, n_init=1, max_iter=20, random_state=seed).fit(items).inertia_
        for seed in range(5)
    ]
    assert np.mean(costs) <= 1.01 * np.mean(others)
