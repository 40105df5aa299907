"""A gallery of photos and texts, whose queries are texts, and the float64 oracle of its searches."""

from typing import NamedTuple

import numpy as np

from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.kinds import GalleryKinds, KindRule, Kinds

VALUES = ("photo", "text")
RANK = 16


class MixedKinds(NamedTuple):
    """Vectors of unit length, float32."""

    items: np.ndarray
    """(n, d)."""
    values: list
    """The kind of each item by name; None for the few of no kind."""
    bank: np.ndarray
    """(m, d)."""
    queries: np.ndarray
    """(q, d), apart from the bank."""
    answers: np.ndarray
    """(q,) the item that each looks for."""

    @property
    def numbers(self):
        """(n,) the kinds of the items as `KindRule` numbers them."""
        return np.array([-1 if value is None else VALUES.index(value) for value in self.values])

    @property
    def layout(self):
        return Layout(self.items.shape[1], "COSINE")

    @property
    def kinds(self):
        rule = KindRule(field="modality", values=VALUES)
        return GalleryKinds(Kinds.measured(rule, self.items, self.numbers, self.bank), self.numbers)


def mixed_kinds(*, gap=1.5, items=600, queries=600, bank=800, dim=48, seed=0):
    """Two thirds are photos, which lie apart from texts and queries by `gap`, and some items are hubs.

    With a gap, the raw search finds hardly any photo; without one, kinds say nothing.
    """
    rng = np.random.default_rng(seed)
    # Few directions carry the content, as in an embedding.
    basis = rng.standard_normal((RANK, dim)) / np.sqrt(RANK * dim)
    drift = rng.standard_normal(RANK)
    # Items of one topic are each other's neighbours.
    topics = rng.standard_normal((items // 5, RANK))[rng.integers(items // 5, size=items)]
    content = topics + 0.35 * rng.standard_normal((items, RANK))
    content += np.outer(rng.gamma(1, 0.4, items), drift)
    direction = rng.standard_normal(dim) / np.sqrt(dim)
    is_photo = np.arange(items) % 3 > 0

    def asking(count):
        answers = rng.integers(items, size=count)
        drawn = content[answers] + 0.35 * rng.standard_normal((count, RANK)) + 0.8 * drift
        return unit(drawn @ basis + gap * direction), answers

    sides = np.where(is_photo, -gap, gap)
    stored = unit(content @ basis + np.outer(sides, direction))
    values = ["photo" if of_photo else "text" for of_photo in is_photo]
    for nth in range(5, items, 97):
        values[nth] = None
    vectors, answers = asking(queries)
    return MixedKinds(stored, values, asking(bank)[0], vectors, answers)


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def scores_by_kind(mixed, queries, factor=1.0):
    """(m, n) float64: the scores of a search with kinds and without biases, from the definition.

    ⟨q − κμq, r⟩ − κ⟨q − κμq, μk − μ⟩ + κ⟨μq, μ⟩
    """
    kinds = mixed.kinds.kinds
    means = np.vstack([kinds.of_kinds, kinds.overall]).astype(float)[mixed.numbers]
    mean_query, overall = kinds.mean_query.astype(float), kinds.overall.astype(float)
    moved = queries.astype(float) - factor * mean_query
    by_kind = moved @ (mixed.items.astype(float) - factor * (means - overall)).T
    return by_kind + factor * mean_query @ overall
