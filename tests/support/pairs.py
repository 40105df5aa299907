"""The same Milvus rows twice, plain and corrected, and the comparison of their hits."""

import numpy as np

from milvus_hubness import (
    NNN,
    DimensionMismatch,
    InvalidInput,
    NonFiniteVectors,
    ZeroVectors,
)
from tests.support.born import born
from tests.support.galleries import (
    as_distance,
    nnn,
    plain_collection,
    similarity,
    single_queries,
    vectors,
)

DIM, ITEMS, QUERIES, BANK, K, ALPHA = 20, 150, 12, 80, 8, 0.75


class Pair:
    """The same rows twice: plain, and corrected."""

    def __init__(self, backend, metric):
        rng = np.random.default_rng(7)
        self.backend, self.metric = backend, metric
        self.changed = []
        self.items = vectors(rng, ITEMS, DIM)
        self.queries = vectors(rng, QUERIES, DIM)
        self.bank = vectors(rng, BANK, DIM)
        self.plain = backend.client()
        self.name = backend.name("pair")
        self.rows = plain_collection(self.plain, self.name, self.items, metric)
        bank = single_queries(self.bank)
        self.corrected = born(backend, self.items, bank, metric, estimator=NNN(K, ALPHA))
        self.client = backend.hubness_client()

    def biases(self, items):
        return nnn(self.bank, items, self.metric, K, ALPHA)

    def oracle(self, queries, items, strength):
        """(m, n) corrected scores in the user's metric."""
        mean_bias = self.client.hubness_state(self.corrected).profile.mean_bias
        corrected = similarity(queries, items, self.metric) - strength * (
            self.biases(items) - mean_bias
        )
        return as_distance(corrected, self.metric)


def restored(pair):
    """Yield the pair, and put back every row that a test changed."""
    yield pair
    for client, name in ((pair.plain, pair.name), (pair.client, pair.corrected)):
        added = client.query(name, filter=f"id >= {ITEMS}", output_fields=["id"])
        if added:
            client.delete(name, ids=[row["id"] for row in added])
        if pair.changed:
            client.upsert(name, [pair.rows[i] for i in pair.changed])
    pair.changed = []


def hits_of(results):
    return [[dict(hit) for hit in hits] for hits in results]


def ids(hits):
    return [hit["id"] for hit in hits]


def assert_same_hits(plain, corrected):
    for expected, got in zip(plain, corrected, strict=True):
        assert ids(got) == ids(expected)
        np.testing.assert_allclose(
            [hit["distance"] for hit in got], [hit["distance"] for hit in expected], atol=1e-5
        )
        for a, b in zip(expected, got, strict=True):
            assert a.keys() == b.keys()
            assert a["entity"].keys() == b["entity"].keys()


def bad_rows(metric):
    """(rows, exception, words of its message) of inserts that must be refused."""
    good = [0.5] * DIM
    cases = [
        ([{"id": 1, "vector": good[:-1], "group": 1}], DimensionMismatch, "row 0"),
        (
            [
                {"id": 1, "vector": good, "group": 1},
                {"id": 2, "vector": [float("nan")] * DIM, "group": 1},
            ],
            NonFiniteVectors,
            "row 1",
        ),
        (
            [{"id": 1, "vector": good, "group": 1, "hubness_bias": 1.0}],
            InvalidInput,
            "hubness_bias",
        ),
        ([{"id": 1, "vector": 3.0, "group": 1}], DimensionMismatch, "row 0"),
        ([{"id": 1, "vector": np.full(DIM, 1 + 1j), "group": 1}], InvalidInput, "real numbers"),
    ]
    if metric == "COSINE":
        cases.append(([{"id": 1, "vector": [0.0] * DIM, "group": 1}], ZeroVectors, "row 0"))
    return cases
