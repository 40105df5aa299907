"""A Milvus collection corrected by candidate re-ranking, and what its searches must answer."""

import numpy as np

from milvus_hubness import NNN, Beside, QueryBank, Recipe, enable, plan_correction
from tests.support.galleries import as_distance, nnn, plain_collection, similarity, vectors

DIM, ITEMS, QUERIES, BANK, K, ALPHA = 16, 200, 9, 60, 6, 0.75


class Enabled:
    def __init__(self, backend, metric, away=0.0, **options):
        rng = np.random.default_rng(11)
        self.backend, self.metric = backend, metric
        self.items, self.queries, self.bank = (
            np.float32(away) + vectors(rng, count, DIM) for count in (ITEMS, QUERIES, BANK)
        )
        self.plain = backend.client()
        self.name = backend.name("beside")
        backend.made += [f"{self.name}__bias_a", f"{self.name}__bias_b"]
        plain_collection(self.plain, self.name, self.items, metric, **options)
        self.store = backend.store()
        plan = plan_correction(
            self.store, self.name, Recipe(QueryBank(self.bank), estimator=NNN(K, ALPHA)), Beside()
        )
        self.done = enable(self.store, plan)
        self.client = self.new_client()
        self.state = self.client.hubness_state(self.name)
        self.raw = similarity(self.queries, self.items, metric)
        self.biases = nnn(self.bank, self.items, metric, K, ALPHA)

    def new_client(self, **options):
        return self.backend.hubness_client(**options)

    def wanted(self, strength=1.0, candidates=None):
        """For each query (scores, order): the raw top candidates, by corrected score."""
        corrected = self.raw - strength * (self.biases - self.state.profile.mean_bias)
        candidates = candidates or self.state.reranking.candidates
        orders = []
        for raw, scores in zip(self.raw, corrected, strict=True):
            pool = np.argsort(-raw)[:candidates]
            orders.append(pool[np.argsort(-scores[pool])])
        return corrected, orders

    def assert_found(self, results, strength=1.0, page=slice(0, 10), candidates=None):
        corrected, orders = self.wanted(strength, candidates)
        for hits, scores, order in zip(results, corrected, orders, strict=True):
            order = order[page]
            assert [hit["id"] for hit in hits] == order.tolist()
            assert list(hits.ids) == order.tolist()
            distances = [hit["distance"] for hit in hits]
            np.testing.assert_allclose(
                distances, as_distance(scores[order], self.metric), atol=3e-5
            )
            assert list(hits.distances) == distances
