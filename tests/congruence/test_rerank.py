"""Gated and re-ranked searches through Milvus, against float64 oracles."""

import numpy as np
import pytest
from pymilvus.exceptions import ParamError

from milvus_hubness import (
    NNN,
    DynamicGate,
    GloballyCorrected,
    InvalidParameter,
    QueryBank,
    Recipe,
    cutover,
    migrate,
    plan_correction,
    refresh,
)
from milvus_hubness.correction.state import CollectionState
from tests.support.aliases import aliased
from tests.support.galleries import METRICS, as_distance, nnn, plain_collection, similarity, vectors

ON_SERVERS = {"gated": ["L2"]}

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
        plan = plan_correction(
            self.store, self.source, Recipe(QueryBank(self.bank), estimator=NNN(8), gate=1)
        )
        self.name = aliased(self.store, migrate(self.store, plan).target)
        self.client = backend.hubness_client()
        self.raw = similarity(self.queries, self.items, metric)
        self.corrected = self.corrected_by(self.bank)

    def activated(self, bank):
        return set(similarity(bank, self.items, self.metric).argmax(1))

    def chosen(self, activated, bank=None):
        """(m, n) scores that decide, query by query."""
        opens = np.array([best in activated for best in self.raw.argmax(1)])
        assert 0 < opens.sum() < QUERIES
        corrected = self.corrected if bank is None else self.corrected_by(bank)
        return np.where(opens[:, None], corrected, self.raw)

    def corrected_by(self, bank):
        mean_bias = self.store.info(self.name).state.profile.mean_bias
        return self.raw - (nnn(bank, self.items, self.metric, 8, 0.75) - mean_bias)

    def found(self):
        return self.backend.hubness_client().search(self.name, data=list(self.queries), limit=5)


@pytest.fixture(scope="module", params=METRICS)
def gated(shared_backend, request):
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
    results = gated.client.search(
        gated.name, data=list(gated.queries), limit=7, output_fields=["note"]
    )
    assert len(results) == QUERIES
    assert_found(gated, results, gated.chosen(gated.activated(gated.bank)))
    assert set(results[0][0]["entity"]) == {"note"}


def test_later_pages_are_gated_by_the_first(gated):
    results = gated.client.search(gated.name, data=list(gated.queries), limit=4, offset=3)
    assert_found(gated, results, gated.chosen(gated.activated(gated.bank)), skip=3)


@pytest.mark.parametrize(
    "page", [{"limit": 0}, {"limit": -3, "offset": 5}, {"limit": "3"}], ids=str
)
def test_a_limit_that_pymilvus_refuses_is_refused_alike(gated, page):
    """The server sees the end of the page, and not the limit."""
    with pytest.raises(ParamError, match="`limit` value"):
        gated.client.search(gated.name, data=list(gated.queries), **page)


def test_no_page_begins_before_the_first_hit(gated):
    with pytest.raises(InvalidParameter, match="offset at least 0"):
        gated.client.search(gated.name, data=list(gated.queries), offset=-2)


def test_strength_zero_is_raw(gated):
    results = gated.client.search(gated.name, data=list(gated.queries), limit=5, strength=0)
    assert_found(gated, results, gated.raw)


@pytest.mark.beyond_contract
def test_a_refresh_learns_the_activation_anew(gated):
    half = gated.bank[:12]
    refresh(gated.store, gated.name, Recipe(QueryBank(half), estimator=NNN(8)))
    assert_found(gated, gated.found(), gated.chosen(gated.activated(half), half))
    refresh(gated.store, gated.name, Recipe(QueryBank(gated.bank), estimator=NNN(8)))


def test_a_refresh_of_any_profile_activates_new_rows(lite):
    """Two new rows, each the raw best of a bank query, before and after a refresh that has nothing else to do."""
    gated = Gated(lite, "IP")
    refresh(
        gated.store,
        gated.name,
        Recipe(QueryBank(gated.bank[:16]), estimator=NNN(4)),
        profile="other",
    )
    asked, new = gated.bank[:2], 3 * gated.bank[:2]
    rows = [{"id": ITEMS + i, "vector": row, "group": 0} for i, row in enumerate(new)]

    def are_corrected():
        """Whether the answers to each query are corrected."""
        corrected = gated.backend.hubness_client().search(gated.name, data=list(asked), limit=9)
        raw = gated.backend.hubness_client().search(
            gated.name, data=list(asked), limit=9, strength=0
        )
        return [
            a[0]["distance"] != pytest.approx(b[0]["distance"])
            for a, b in zip(corrected, raw, strict=True)
        ]

    gated.client.insert(gated.name, rows)
    assert are_corrected() == [False, False]
    assert refresh(gated.store, gated.name, profile="other").action == "none"
    assert are_corrected() == [True, True]


def test_rows_that_come_before_the_cutover_are_activated(lite):
    source, store, rng = lite.name(), lite.store(), np.random.default_rng(2)
    items, bank = vectors(rng, 40, DIM), vectors(rng, 20, DIM)
    plain_collection(lite.client(), source, items, "IP")
    plan = plan_correction(store, source, Recipe(QueryBank(bank), estimator=NNN(4), gate=1))
    target = migrate(store, plan).target
    lite.client().insert(source, [{"id": 40, "vector": 3 * bank[0], "group": 0}])
    cutover(store, source, alias=f"{source}_live")
    assert 40 in store.load_bank(store.info(target).state.profile.bank).activated


def test_until_a_refresh_ends_searches_keep_their_gate(lite, monkeypatch):
    """Items deleted since make others the nearest of bank queries, which the refresh is to learn."""
    gated = Gated(lite, "IP")
    before = gated.chosen(gated.activated(gated.bank))
    assert_found(gated, gated.found(), before)
    taken = sorted(gated.activated(gated.bank))[:5]
    gated.client.delete(gated.name, ids=[int(key) for key in taken])
    left = gated.raw.copy()
    left[:, taken] = -np.inf
    earlier = np.array([best in gated.activated(gated.bank) for best in left.argmax(1)])
    write_property, seen = gated.store.write_property, []

    def write(collection, name, record):
        if isinstance(record, CollectionState):
            seen.append(gated.found())
        write_property(collection, name, record)

    monkeypatch.setattr(gated.store, "write_property", write)
    refresh(gated.store, gated.name)
    [between] = seen
    corrected = gated.corrected_by(gated.bank)
    corrected[:, taken] = -np.inf
    assert_found(gated, between, np.where(earlier[:, None], corrected, left))
    from_bank = similarity(gated.bank, gated.items, "IP")
    from_bank[:, taken] = -np.inf
    later = np.isin(left.argmax(1), from_bank.argmax(1))
    assert (later != earlier).any()
    assert_found(gated, gated.found(), np.where(later[:, None], corrected, left))


def test_collections_that_share_a_bank_have_their_own_gates(lite):
    gated = Gated(lite, "IP")
    other = lite.name()
    plain_collection(lite.client(), other, gated.items[::-1].copy(), "IP")
    plan = plan_correction(
        gated.store,
        other,
        Recipe(QueryBank(gated.bank), estimator=NNN(8), gate=1),
        bank_collection=f"{gated.source}__bank",
    )
    migrate(gated.store, plan)
    references = [
        gated.store.info(name).state.profile.bank for name in (gated.name, plan.body.target)
    ]
    assert references[0].generation == references[1].generation
    mirrored = {ITEMS - 1 - item for item in gated.activated(gated.bank)}
    assert gated.store.load_bank(references[1]).activated == mirrored
    assert_found(gated, gated.found(), gated.chosen(gated.activated(gated.bank)))


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
