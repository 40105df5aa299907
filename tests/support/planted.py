"""A gallery whose queries lie apart from it, as texts do from images, and rows planted as hubs."""

import numpy as np

DIM = 48


def gallery(rows=400, queries=800, seed=0):
    """Unit items (rows, d), bank queries and queries of users, each (queries / 2, d)."""
    rng = np.random.default_rng(seed)
    drift, gap = directions()
    items = drawn(rng, rows, drift)
    answers = items[rng.integers(0, rows, queries)]
    asked = unit(0.7 * answers + 0.8 * gap + rng.standard_normal((queries, DIM)) / DIM**0.5)
    return items, asked[::2], asked[1::2]


def genuine(count, seed=5):
    """Rows (count, d) that are drawn as those of the gallery."""
    return drawn(np.random.default_rng(seed), count, directions()[0])


def centroid(queries, count=1, seed=0):
    """Rows (count, d), each the mean of another half of the queries."""
    rng = np.random.default_rng(seed)
    halves = [queries[rng.permutation(len(queries))[: len(queries) // 2]] for _ in range(count)]
    return unit(np.stack([half.mean(axis=0) for half in halves]))


def directions():
    return unit(np.random.default_rng(99).standard_normal((2, DIM)))


def drawn(rng, count, drift):
    far = rng.gamma(2, 0.08, count)
    return unit(rng.standard_normal((count, DIM)) / DIM**0.5 + np.outer(far, drift))


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)
