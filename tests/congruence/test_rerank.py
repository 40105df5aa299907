"""Gated and re-ranked searches through Milvus, against float64 oracles."""

import numpy as np
import pytest

from milvus_hubness import NNN, DynamicGate, GloballyCorrected, QueryBank, migrate, plan_migration, refresh
from tests.galleries import METRICS, as_distance, nnn, plain_collection, similarity, vectors

DIM, ITEMS, QUERIES = 12, 150, 40


class Gated:
    def __init__(self, backend, metric):
        rng = np.random.default_rng(9)
        self.backend, self.metric = backend, metric
        self.items, self.bank = vectors(rng, ITEMS, DIM), vectors(rng, 25, DIM)
        self.queries = vectors(rng, QUERIES, DIM)
        self.source = backend.name()
        plain_collection(backend.client(), self.source, self.items, metric)
        self.store = backend.store()
        plan = plan_migration(self.store, self.source, QueryBank(self.bank), estimator=NNN(8), gate=1)
        self.name = migrate(self.store, plan).target
        self.client = backend.hubness_client()
        self.raw = similarity(self.queries, self.items, metric)
        centre = self.store.info(self.name).state.profile.centre
        self.corrected = self.raw - (nnn(self.bank, self.items, metric, 8, 0.75) - centre)

    def activated(self, bank):
        return set(similarity(bank, self.items, self.metric).argmax(1).tolist())

    def chosen(self, activated):
        """(m, n) scores that decide, query by query."""
        opens = np.array([best in activated for best in self.raw.argmax(1)])
        assert 0 < opens.sum() < QUERIES
        return np.where(opens[:, None], self.corrected, self.raw)


@pytest.fixture(scope="module", params=METRICS)
def gated(shared_backend, request):
    if request.param != "L2" and not shared_backend.is_lite:
        pytest.skip("shown on Milvus Lite")
    return Gated(shared_backend, request.param)


def assert_found(gated, results, wanted, skip=0):
    for hits, scores in zip(results, wanted, strict=True):
        order = np.argsort(-scores)[skip : skip + len(hits)]
        assert [hit["id"] for hit in hits] == order.tolist()
        np.testing.assert_allclose(
            [hit["distance"] for hit in hits], as_distance(scores[order], gated.metric), atol=3e-5
        )
        assert list(hits.distances) == [hit["distance"] for hit in hits]


def test_only_queries_whose_raw_best_is_activated_are_corrected(gated):
    results = gated.client.search(gated.name, data=list(gated.queries), limit=7, output_fields=["note"])
    assert len(results) == QUERIES
    assert_found(gated, results, gated.chosen(gated.activated(gated.bank)))
    assert set(results[0][0]["entity"]) == {"note"}


def test_later_pages_are_gated_by_the_first(gated):
    results = gated.client.search(gated.name, data=list(gated.queries), limit=4, offset=3)
    assert_found(gated, results, gated.chosen(gated.activated(gated.bank)), skip=3)


def test_strength_zero_is_raw(gated):
    results = gated.client.search(gated.name, data=list(gated.queries), limit=5, strength=0)
    assert_found(gated, results, gated.raw)


def test_a_refresh_learns_the_activation_anew(gated):
    half = gated.bank[:12]
    refresh(gated.store, gated.name, bank=QueryBank(half), estimator=NNN(8))
    profile = gated.store.info(gated.name).state.profile
    corrected = gated.raw - (nnn(half, gated.items, gated.metric, 8, 0.75) - profile.centre)
    opens = np.array([best in gated.activated(half) for best in gated.raw.argmax(1)])
    found = gated.backend.hubness_client().search(gated.name, data=list(gated.queries), limit=5)
    assert_found(gated, found, np.where(opens[:, None], corrected, gated.raw))
    refresh(gated.store, gated.name, bank=QueryBank(gated.bank), estimator=NNN(8))


def test_globally_corrected_ranks_candidates_by_the_banks_view(gated):
    candidates, limit = 30, 6
    results = gated.client.search(
        gated.name,
        data=list(gated.queries),
        limit=limit,
        rerank=GloballyCorrected(candidates),
        output_fields=["group"],
    )
    from_bank = similarity(gated.bank, gated.items, gated.metric)
    for hits, scores in zip(results, gated.raw, strict=True):
        pool = np.argsort(-scores)[:candidates]
        places = (from_bank[:, pool] > scores[pool]).sum(0)
        order = pool[np.lexsort((-scores[pool], places))][:limit]
        assert [hit["id"] for hit in hits] == order.tolist()
        np.testing.assert_allclose(
            [hit["distance"] for hit in hits], as_distance(scores[order], gated.metric), atol=3e-5
        )
        assert all(set(hit["entity"]) == {"group"} for hit in hits)


def test_the_gate_is_a_number_from_one(gated):
    with pytest.raises(ValueError, match="k must be"):
        DynamicGate(0)
