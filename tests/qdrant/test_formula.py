"""Biases in payloads, taken off by a formula: the vectors stay as they are."""

import numpy as np
import pytest
from qdrant_client import models

from milvus_hubness import (
    NNN,
    AlreadyCorrected,
    Beside,
    CannotMigrate,
    NotCorrected,
    QueryBank,
    Recipe,
    UnsupportedOperation,
    disable,
    enable,
    plan_correction,
    refresh,
    status,
)
from qdrant_hubness import QdrantStore
from tests.qdrant.worlds import METRICS, key
from tests.support.galleries import nnn, similarity, vectors

DIM, ITEMS = 12, 200
FILTER = models.Filter(must=[models.FieldCondition(key="group", match=models.MatchValue(value=2))])


class Enabled:
    def __init__(self, backend, distance):
        rng = np.random.default_rng(2)
        self.backend, self.metric = backend, METRICS[distance]
        self.items, self.bank, self.other = (vectors(rng, n, DIM) for n in (ITEMS, 50, 70))
        self.query = vectors(rng, 1, DIM)[0]
        self.name = backend.fill(self.items, distance)
        self.store, self.client = backend.store(), backend.hubness()
        self.plain = {
            r.id: r for r in backend.client.scroll(self.name, limit=500, with_vectors=True)[0]
        }
        plan = plan_correction(
            self.store, self.name, Recipe(QueryBank(self.bank), estimator=NNN(8)), Beside()
        )
        assert plan.body.sides == ()
        self.done = enable(self.store, plan)
        self.keys = [key(i) for i in range(ITEMS)]

    def wanted(self, bank, query=None, k=8, strength=1.0):
        mean_bias = self.store.info(self.name).state.profile.mean_bias
        query = self.query if query is None else query
        biases = nnn(bank, self.items, self.metric, k, 0.75) - mean_bias
        return similarity(query[None], self.items, self.metric)[0] - strength * biases

    def best(self, wanted, count, among=None):
        return [self.keys[i] for i in np.argsort(-wanted) if among is None or i in among][:count]


@pytest.fixture(params=["Cosine", "Dot"])
def enabled(request, backend):
    return Enabled(backend, request.param)


def test_a_formula_takes_the_biases_off(enabled):
    assert (enabled.done.rows, enabled.done.side_collection) == (ITEMS, None)
    told = status(enabled.store, enabled.name)
    assert (told.where, told.pending, told.width) == ("beside", 0, DIM)
    query = enabled.query.tolist()
    for strength in (1.0, 0.5):
        wanted = enabled.wanted(enabled.bank, strength=strength)
        found = enabled.client.query_points(enabled.name, query, limit=10, strength=strength).points
        assert [point.id for point in found] == enabled.best(wanted, 10)
        assert [point.score for point in found] == pytest.approx(
            np.sort(wanted)[::-1][:10].tolist(), abs=1e-5
        )
    raw = enabled.client.query_points(enabled.name, query, limit=10, strength=0).points
    theirs = enabled.backend.client.query_points(enabled.name, query, limit=10).points
    assert [p.id for p in raw] == [p.id for p in theirs]
    wanted, among = enabled.wanted(enabled.bank), [i for i in range(ITEMS) if i % 5 == 2]
    threshold = float(np.sort(wanted[among])[::-1][:8].mean())
    count = int((wanted[among] >= threshold).sum())
    options = {"query_filter": FILTER, "limit": 20, "score_threshold": threshold}
    found = enabled.client.query_points(enabled.name, query, **options).points
    assert [p.id for p in found] == enabled.best(wanted, count, among)
    options = {"query_filter": FILTER, "limit": 4, "offset": 3}
    found = enabled.client.query_points(enabled.name, query, **options).points
    assert [p.id for p in found] == enabled.best(wanted, 7, among)[3:]
    wanted = enabled.wanted(enabled.bank, query=enabled.items[3])
    found = enabled.client.query_points(enabled.name, key(3), limit=9).points
    assert [p.id for p in found] == [k for k in enabled.best(wanted, 10) if k != key(3)][:9]


def test_vectors_stay_as_they_are_and_payloads_look_so(enabled):
    stored = enabled.backend.client.scroll(enabled.name, limit=500, with_vectors=True)[0]
    for record in stored:
        np.testing.assert_allclose(record.vector, enabled.plain[record.id].vector, rtol=3e-7)
        added = {"hubness_bias", "hubness_epoch"}
        assert record.payload.keys() - enabled.plain[record.id].payload.keys() == added
    for record in enabled.client.scroll(enabled.name, limit=500)[0]:
        assert record.payload == enabled.plain[record.id].payload
    [record] = enabled.client.retrieve(enabled.name, [key(3)], with_payload=["hubness_bias"])
    assert set(record.payload) == {"hubness_bias"}, "asked for by name"


def test_groups_prefetches_and_batches(enabled):
    query, name, client = enabled.query.tolist(), enabled.name, enabled.client
    wanted = enabled.wanted(enabled.bank)
    for group in client.query_points_groups(name, "group", query, limit=3, group_size=4).groups:
        among = [i for i in range(ITEMS) if i % 5 == group.id]
        assert [hit.id for hit in group.hits] == enabled.best(wanted, 4, among)
    inner = [models.Prefetch(query=query, limit=20)]
    found = client.query_points(
        name, models.FusionQuery(fusion="rrf"), prefetch=inner, limit=8
    ).points
    assert [p.id for p in found] == enabled.best(wanted, 8)
    requests = [
        models.QueryRequest(query=query, limit=5),
        models.QueryRequest(query=key(9), limit=5),
    ]
    first, second = client.query_batch_points(name, requests)
    assert [p.id for p in first.points] == enabled.best(wanted, 5)
    assert [p.id for p in second.points] == [
        p.id for p in client.query_points(name, key(9), limit=5).points
    ]


def test_new_points_and_new_vectors_get_their_biases(enabled):
    fresh = vectors(np.random.default_rng(8), 2, DIM)
    client, name = enabled.client, enabled.name
    client.upsert(name, [models.PointStruct(id=900, vector=fresh[0].tolist(), payload={"a": 1})])
    client.update_vectors(name, [models.PointVectors(id=key(3), vector=fresh[1].tolist())])
    enabled.items = np.vstack([enabled.items, fresh[:1]])
    enabled.items[3] = fresh[1]
    enabled.keys.append(900)
    found = client.query_points(name, enabled.query.tolist(), limit=15).points
    assert [p.id for p in found] == enabled.best(enabled.wanted(enabled.bank), 15)
    assert status(enabled.store, name).pending == 0
    enabled.backend.client.upsert(
        name, [models.PointStruct(id=902, vector=fresh[0].tolist(), payload={})]
    )
    assert status(enabled.store, name).pending == 1, "a client that knows of no biases"
    assert refresh(enabled.store, name).written == 1
    scores = {
        p.id: p.score for p in client.query_points(name, enabled.query.tolist(), limit=300).points
    }
    assert scores[902] == pytest.approx(scores[900], abs=1e-6)


def test_a_refresh_touches_biases_only(enabled):
    search_request = []

    class Counting(QdrantStore):
        def ask(self, method, collection, /, **options):
            search_request.append((method, collection))
            return super().ask(method, collection, **options)

    refresh(
        enabled.backend.store(Counting),
        enabled.name,
        Recipe(QueryBank(enabled.other), estimator=NNN(3)),
    )
    writes = {method for method, where in search_request if where == enabled.name} & {
        "upsert", "update_vectors", "set_payload", "batch_update_points", "delete", "overwrite_payload",
    }  # fmt: skip
    assert writes == {"batch_update_points"}
    found = enabled.client.query_points(enabled.name, enabled.query.tolist(), limit=10).points
    assert [p.id for p in found] == enabled.best(enabled.wanted(enabled.other, k=3), 10)


def test_what_a_client_writes_while_biases_are_written_stays(enabled):
    fresh = vectors(np.random.default_rng(8), 1, DIM)[0]
    done = []

    class Late(QdrantStore):
        def put_bias_keys(self, collection, batch, keys):
            if not done:
                done.append(batch.keys)
                enabled.client.update_vectors(
                    enabled.name, [models.PointVectors(id=key(3), vector=fresh.tolist())]
                )
            return super().put_bias_keys(collection, batch, keys)

    refresh(enabled.backend.store(Late), enabled.name, QueryBank(enabled.other))
    assert key(3) in done[0]
    enabled.items[3] = fresh
    found = enabled.client.query_points(enabled.name, enabled.query.tolist(), limit=ITEMS).points
    wanted = enabled.wanted(enabled.other)
    got = {p.id: p.score for p in found}
    np.testing.assert_allclose([got[k] for k in enabled.keys], wanted, atol=1e-5)


def test_it_can_be_taken_back_and_not_done_twice(enabled):
    with pytest.raises(AlreadyCorrected):
        plan_correction(enabled.store, enabled.name, QueryBank(enabled.bank), Beside())
    disable(enabled.store, enabled.name)
    query = enabled.query.tolist()
    mine = enabled.client.query_points(enabled.name, query, limit=10).points
    theirs = enabled.backend.client.query_points(enabled.name, query, limit=10).points
    assert [(p.id, p.score) for p in mine] == [(p.id, p.score) for p in theirs]
    with pytest.raises(NotCorrected):
        disable(enabled.store, enabled.name)


def test_what_a_formula_cannot_do_is_said(enabled):
    query = enabled.query.tolist()
    for asked in (
        models.RecommendQuery(
            recommend=models.RecommendInput(positive=[key(1)], strategy="best_score")
        ),
        models.NearestQuery(nearest=query, mmr=models.Mmr()),
        models.ContextQuery(context=[models.ContextPair(positive=key(1), negative=key(2))]),
    ):
        with pytest.raises(UnsupportedOperation, match="payloads"):
            enabled.client.query_points(enabled.name, asked)
        assert enabled.client.query_points(enabled.name, asked, strength=0).points


def test_the_root_of_euclid_is_no_score_to_subtract_from(backend):
    name = backend.fill(vectors(np.random.default_rng(0), 60, 8), "Euclid")
    bank = QueryBank(vectors(np.random.default_rng(1), 40, 8))
    with pytest.raises(CannotMigrate, match="Cosine and Dot only, not of L2: migrate"):
        plan_correction(backend.store(), name, Recipe(bank, estimator=NNN(8)), Beside())
