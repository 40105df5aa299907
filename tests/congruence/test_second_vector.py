"""Collections corrected in place: the augmented form in a second vector field, the user's own untouched."""

import asyncio
from collections import Counter

import numpy as np
import pytest
from pymilvus import AnnSearchRequest, WeightedRanker

from milvus_hubness import (
    CSLS,
    NNN,
    AlreadyCorrected,
    AsyncHubnessClient,
    CannotMigrate,
    GloballyCorrected,
    InvalidInput,
    QueryBank,
    ResumeRefused,
    UnfinishedMigration,
    diagnose,
    disable,
    enable,
    plan_enable,
    refresh,
    status,
    tune,
)
from milvus_hubness.correction.codec.base import BIAS_FIELD, EPOCH_FIELD
from milvus_hubness.correction.codec.second_vector import SECOND_VECTOR_FIELD
from milvus_hubness.milvus.store import requests as milvus_requests
from tests.support.bias_fields import TWO_FIELDS, WIDTH, width_for, with_second_field
from tests.support.galleries import METRICS, as_distance, nnn, plain_collection, similarity, vectors

DIM, ITEMS, QUERIES, BANK, K, ALPHA = 14, 150, 7, 60, 6, 0.75
OURS = {SECOND_VECTOR_FIELD, BIAS_FIELD, EPOCH_FIELD}


class InPlace:
    def __init__(self, backend, metric, *, done=True, away=0.0):
        rng = np.random.default_rng(17)
        self.backend, self.metric = backend, metric
        self.items, self.queries, self.bank = (
            np.float32(away) + vectors(rng, count, DIM) for count in (ITEMS, QUERIES, BANK)
        )
        self.plain, self.store = backend.client(), backend.store()
        self.name, self.twin = backend.name("in_place"), backend.name("twin")
        plain_collection(self.plain, self.twin, self.items, metric)
        if backend.is_lite:
            with_second_field(self.plain, self.name, self.items, metric, width_for(metric))
        else:
            plain_collection(self.plain, self.name, self.items, metric)
        self.client = backend.hubness_client()
        if done:
            self.done = enable(self.store, self.plan())
            self.state = self.client.hubness_state(self.name)

    def plan(self, **options):
        further = {"estimator": NNN(K, ALPHA), **options}
        return plan_enable(
            self.store, self.name, QueryBank(self.bank), where="second_vector", **further
        )

    def corrected(self, strength=1.0, biases=None):
        """(queries, items) by the definition, in float64."""
        if biases is None:
            biases = nnn(self.bank, self.items, self.metric, K, ALPHA)
        raw = similarity(self.queries, self.items, self.metric)
        return raw - strength * (biases - self.state.profile.mean_bias)

    def assert_found(self, results, scores, page=slice(0, 10)):
        for hits, query_scores in zip(results, scores, strict=True):
            order = np.argsort(-query_scores)[page]
            assert [hit["id"] for hit in hits] == order.tolist()
            given = as_distance(query_scores[order], self.metric)
            np.testing.assert_allclose([hit["distance"] for hit in hits], given, atol=4e-5)

    def raw_searches(self):
        """What the client and a plain one on the plain twin answer without correction."""
        question = {"data": list(self.queries), "limit": 6, "offset": 1, "output_fields": ["note"]}
        return self.client.search(self.name, strength=0, **question), self.plain.search(
            self.twin, **question
        )


def assert_alike(found, plain):
    assert [[(hit["id"], hit["entity"]) for hit in hits] for hits in found] == [
        [(hit["id"], hit["entity"]) for hit in hits] for hits in plain
    ]
    for ours, theirs in zip(found, plain, strict=True):
        np.testing.assert_allclose(ours.distances, theirs.distances, atol=4e-5)


MADE = {
    **dict.fromkeys(
        ("placed", "fresh", "untouched", "test_a_second_profile_has_columns_of_its_own"), TWO_FIELDS
    ),
    "test_one_vector_field_is_refused_with_the_versions": {"running": ["lite", "server-2.3.5"]},
}


@pytest.fixture(scope="module", params=METRICS)
def placed(shared_backend, request):
    return InPlace(shared_backend, request.param)


@pytest.fixture
def fresh(backend):
    return InPlace(backend, "COSINE")


@pytest.fixture
def untouched(backend):
    return InPlace(backend, "COSINE", done=False)


def test_an_l2_gallery_far_from_zero_is_corrected_in_place(lite):
    far = InPlace(lite, "L2", away=1_000.0)
    assert far.state.layout.mean
    far.assert_found(far.client.search(far.name, list(far.queries)), far.corrected())
    assert_alike(*far.raw_searches())
    outlier = {"id": ITEMS, "vector": [0.3, *far.items[0, 1:].tolist()], "group": 0}
    far.client.insert(far.name, [outlier])
    [row] = far.client.get(far.name, ITEMS, output_fields=["vector"])
    np.testing.assert_array_equal(np.float32(row["vector"]), np.float32(outlier["vector"]))


def test_one_vector_field_is_refused_with_the_versions(backend):
    name, bank = backend.name(), QueryBank(vectors(np.random.default_rng(0), 20, DIM))
    plain_collection(backend.client(), name, vectors(np.random.default_rng(1), 40, DIM), "IP")
    store = backend.store()
    with pytest.raises(CannotMigrate, match=r"from 2\.6\.18 on, this is") as refused:
        plan_enable(store, name, bank, estimator=NNN(4), where="second_vector")
    assert store.server_version() in str(refused.value)
    assert SECOND_VECTOR_FIELD in str(refused.value)


@pytest.mark.parametrize("strength", [1.0, 0.4])
def test_scores_and_ranking_are_the_oracles(placed, strength):
    for anns_field in (None, "vector"):
        found = placed.client.search(
            placed.name, data=list(placed.queries), strength=strength, anns_field=anns_field
        )
        placed.assert_found(found, placed.corrected(strength))


def test_strength_zero_is_the_plain_search(placed):
    assert_alike(*placed.raw_searches())


def test_the_users_field_is_as_it_was(placed):
    question = {"data": list(placed.queries), "anns_field": "vector", "output_fields": ["vector"]}
    assert_alike(
        placed.plain.search(placed.name, **question), placed.plain.search(placed.twin, **question)
    )


def test_filters_ranges_and_raw_scores(placed):
    scores = placed.corrected()
    found = placed.client.search(
        placed.name, data=list(placed.queries), filter="group == 2", limit=5, with_raw_score=True
    )
    raw = similarity(placed.queries, placed.items, placed.metric)
    group = np.arange(2, ITEMS, 5)
    for hits, corrected_scores, raw_scores in zip(found, scores, raw, strict=True):
        order = group[np.argsort(-corrected_scores[group])][:5]
        assert [hit["id"] for hit in hits] == order.tolist()
        given = [hit["raw_score"] for hit in hits]
        np.testing.assert_allclose(given, as_distance(raw_scores[order], placed.metric), atol=4e-5)
    best = np.sort(scores[0])[::-1]
    bounds = as_distance(np.array([best[6] + best[7], best[1] + best[2]]) / 2, placed.metric)
    far, near = map(float, bounds)
    [hits] = placed.client.search(
        placed.name,
        data=[placed.queries[0]],
        limit=20,
        search_params={"params": {"radius": far, "range_filter": near}},
    )
    assert [hit["id"] for hit in hits] == np.argsort(-scores[0])[2:7].tolist()


def test_rows_search_for_their_like(placed):
    found = placed.client.search(placed.name, ids=[3, 11], limit=4)
    biases = (
        nnn(placed.bank, placed.items, placed.metric, K, ALPHA) - placed.state.profile.mean_bias
    )
    scores = similarity(placed.items[[3, 11]], placed.items, placed.metric) - biases
    placed.assert_found(found, scores, slice(0, 4))


def test_candidates_can_be_ranked_by_the_banks_view(placed):
    candidates = 30
    found = placed.client.search(
        placed.name, data=list(placed.queries), limit=6, rerank=GloballyCorrected(candidates)
    )
    from_bank = similarity(placed.bank, placed.items, placed.metric)
    for hits, scores in zip(
        found, similarity(placed.queries, placed.items, placed.metric), strict=True
    ):
        pool = np.argsort(-scores)[:candidates]
        ranks = (from_bank[:, pool] > scores[pool]).sum(0)
        assert [hit["id"] for hit in hits] == pool[np.lexsort((-scores[pool], ranks))][:6].tolist()


def test_iterators_and_hybrid_searches_follow_the_corrected_order(placed):
    iterator = placed.client.search_iterator(
        placed.name, data=[placed.queries[0]], batch_size=25, limit=60
    )
    ids = []
    while page := iterator.next():
        ids += [hit["id"] for hit in page]
    assert ids == np.argsort(-placed.corrected()[0])[:60].tolist()
    request = AnnSearchRequest(list(placed.queries), "vector", {}, 10)
    found = placed.client.hybrid_search(
        placed.name, [request, request], WeightedRanker(0.5, 0.5), limit=8
    )
    for hits, scores in zip(found, placed.corrected(), strict=True):
        assert [hit["id"] for hit in hits] == np.argsort(-scores)[:8].tolist()
    iterator = placed.client.query_iterator(placed.name, batch_size=100, filter="group == 1")
    assert set(iterator.next()[0]) == {"id", "vector", "group", "note"}


def test_what_is_read_shows_nothing_of_the_second_field(placed):
    [row] = placed.client.get(placed.name, 3)
    assert set(row) == {"id", "vector", "group", "note"}
    np.testing.assert_array_equal(np.float32(row["vector"]), placed.items[3])
    [row] = placed.client.query(placed.name, filter="id == 4", output_fields=["*"])
    assert set(row) == {"id", "vector", "group", "note"}
    [[hit]] = placed.client.search(
        placed.name, data=[placed.queries[0]], limit=1, output_fields=["*"]
    )
    assert OURS.isdisjoint(hit["entity"])
    described = placed.client.describe_collection(placed.name)
    twin = placed.plain.describe_collection(placed.twin)
    assert [(each["name"], each["params"]) for each in described["fields"]] == [
        (each["name"], each["params"]) for each in twin["fields"]
    ]
    assert "hubness" not in described["properties"]
    assert placed.client.list_indexes(placed.name) == ["vector"]
    assert placed.client.describe_index(placed.name, "vector")["metric_type"] == placed.metric
    [row] = placed.client.get(placed.name, 3, output_fields=[BIAS_FIELD])
    bias = (
        nnn(placed.bank, placed.items[3:4], placed.metric, K, ALPHA)[0]
        - placed.state.profile.mean_bias
    )
    assert row[BIAS_FIELD] == pytest.approx(bias, abs=4e-5)


def test_jobs_see_the_rows_and_their_biases(placed):
    found = status(placed.store, placed.name)
    assert (found.where, found.second_vector, found.phase) == (
        "second_vector",
        SECOND_VECTOR_FIELD,
        "ready",
    )
    assert (found.pending, found.rows, found.width) == (0, ITEMS, width_for(placed.metric))
    assert tune(placed.store, placed.name).verdict in {
        "apply",
        "apply weakly",
        "not proven",
        "leave it alone",
    }
    told = diagnose(placed.store, placed.name, QueryBank(placed.queries))
    counts = Counter(np.argsort(-placed.corrected(), axis=1)[:, :10].ravel().tolist())
    assert told.after.largest == max(counts.values())
    assert (placed.done.rows, placed.done.searched) == (ITEMS, ITEMS // 10)
    assert placed.done.in_second == placed.done.in_field
    with pytest.raises(AlreadyCorrected, match="refresh"):
        placed.plan()


def change(fresh, new):
    """What is written to it below, by whichever client: rows 1000 to 1004, and 7 near the first of them."""
    rows = [
        {"id": 1_000 + i, "vector": vector, "group": 0, "note": "new"}
        for i, vector in enumerate(new)
    ]
    moved = {"id": 7, "vector": 2 * new[0] + new[1], "group": 1, "note": "moved"}
    items = np.r_[fresh.items, new]
    items[7] = moved["vector"]
    return rows, moved, items


def assert_written(fresh, items, results):
    keys = np.r_[np.arange(ITEMS), 1_000 + np.arange(5)]
    biases = nnn(fresh.bank, items, "COSINE", K, ALPHA) - fresh.state.profile.mean_bias
    scores = similarity(fresh.queries, items, "COSINE") - biases
    for hits, query_scores in zip(results, scores, strict=True):
        order = np.argsort(-query_scores)[:10]
        assert [hit["id"] for hit in hits] == keys[order].tolist()
        np.testing.assert_allclose(
            [hit["distance"] for hit in hits], query_scores[order], atol=4e-5
        )
    assert status(fresh.store, fresh.name).pending == 0


def test_writes_reach_both_fields(fresh):
    rows, moved, items = change(fresh, vectors(np.random.default_rng(3), 5, DIM))
    fresh.client.insert(fresh.name, rows)
    fresh.client.upsert(fresh.name, {"id": 7, "vector": fresh.items[0], "group": 1})
    fresh.client.upsert(fresh.name, {"id": 7, "vector": moved["vector"]}, partial_update=True)
    fresh.client.upsert(fresh.name, {"id": 7, "note": "moved"}, partial_update=True)
    assert_written(fresh, items, fresh.client.search(fresh.name, data=list(fresh.queries)))
    [row] = fresh.client.get(fresh.name, 7)
    assert (row["note"], row["group"]) == ("moved", 1)
    np.testing.assert_array_equal(np.float32(row["vector"]), moved["vector"])
    with pytest.raises(InvalidInput, match=SECOND_VECTOR_FIELD):
        fresh.client.insert(fresh.name, {**rows[0], SECOND_VECTOR_FIELD: [0.0] * WIDTH})


def test_writes_of_the_async_client_reach_both_fields(fresh):
    rows, moved, items = change(fresh, vectors(np.random.default_rng(4), 5, DIM))

    async def write_and_search():
        client = AsyncHubnessClient(fresh.backend.uri, state_ttl=0.0)
        try:
            await client.insert(fresh.name, rows)
            await client.upsert(fresh.name, [moved])
            assert await client.list_indexes(fresh.name) == ["vector"]
            return await client.search(fresh.name, data=list(fresh.queries))
        finally:
            await client.close()

    assert_written(fresh, items, asyncio.run(write_and_search()))


def test_a_refresh_gives_what_foreign_writers_left_out(fresh):
    new = vectors(np.random.default_rng(5), 1, DIM)[0]
    zeros = {SECOND_VECTOR_FIELD: np.zeros(WIDTH, np.float32)} if fresh.backend.is_lite else {}
    fresh.plain.insert(fresh.name, {"id": 2_000, "vector": new, "group": 0, **zeros})
    assert status(fresh.store, fresh.name).pending == 1
    assert (refresh(fresh.store, fresh.name).written, status(fresh.store, fresh.name).pending) == (
        1,
        0,
    )
    bias = nnn(fresh.bank, new[None], "COSINE", K, ALPHA)[0] - fresh.state.profile.mean_bias
    [[hit]] = fresh.client.search(fresh.name, data=[new], filter="id == 2000", limit=1)
    assert hit["distance"] == pytest.approx(1 - bias, abs=4e-5)


def test_a_new_bank_takes_the_other_slot(fresh):
    other = vectors(np.random.default_rng(6), 50, DIM)
    done = refresh(fresh.store, fresh.name, bank=QueryBank(other), estimator=CSLS(4))
    fresh.state = fresh.client.hubness_state(fresh.name)
    assert (done.action, done.written, fresh.state.profile.slot) == ("full", ITEMS, 1)
    biases = nnn(other, fresh.items, "COSINE", 4, 0.5)
    found = fresh.client.search(fresh.name, data=list(fresh.queries))
    fresh.assert_found(found, fresh.corrected(biases=biases))
    assert_alike(*fresh.raw_searches())


def test_a_refresh_mends_rows_whose_vector_a_foreign_writer_changed(fresh):
    """Such a row keeps its epoch, and so does not count as pending."""
    new = vectors(np.random.default_rng(7), 1, DIM)[0]
    fresh.plain.upsert(fresh.name, {"id": 9, "vector": new}, partial_update=True)
    assert refresh(fresh.store, fresh.name, refit=True).written >= 1
    fresh.items[9] = new
    fresh.state = fresh.client.hubness_state(fresh.name)
    fresh.assert_found(fresh.client.search(fresh.name, data=list(fresh.queries)), fresh.corrected())


def test_disabling_leaves_the_users_field(fresh):
    dropped = disable(fresh.store, fresh.name)
    there = {each["name"] for each in fresh.plain.describe_collection(fresh.name)["fields"]}
    assert (dropped == SECOND_VECTOR_FIELD) == (SECOND_VECTOR_FIELD not in there)
    assert not status(fresh.store, fresh.name).corrected
    question = {"data": list(fresh.queries), "anns_field": "vector", "output_fields": ["note"]}
    assert_alike(
        fresh.client.search(fresh.name, **question), fresh.plain.search(fresh.twin, **question)
    )
    enable(fresh.store, fresh.plan(estimator=NNN(3, 1.0)))
    fresh.state = fresh.client.hubness_state(fresh.name)
    biases = nnn(fresh.bank, fresh.items, "COSINE", 3, 1.0)
    found = fresh.client.search(fresh.name, data=list(fresh.queries))
    fresh.assert_found(found, fresh.corrected(biases=biases))


class Interrupted(BaseException):
    """As a signal would be."""


def test_an_interrupted_run_is_searched_raw_and_carried_on(untouched, monkeypatch):
    update, calls = untouched.store.update, []

    def fail_late(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise Interrupted
        return update(*args, **options)

    monkeypatch.setattr(untouched.store, "chunk_rows", lambda info: 60)
    monkeypatch.setattr(untouched.store, "update", fail_late)
    with pytest.raises(Interrupted):
        enable(untouched.store, untouched.plan())
    found = status(untouched.store, untouched.name)
    assert (found.phase, found.pending) == ("copying", ITEMS - 60)
    question = {"data": list(untouched.queries), "output_fields": ["note"]}
    plain = untouched.plain.search(untouched.twin, **question)
    assert_alike(untouched.client.search(untouched.name, **question), plain)
    iterator = untouched.client.search_iterator(
        untouched.name, data=[untouched.queries[0]], batch_size=10
    )
    assert [hit["id"] for hit in iterator.next()] == [hit["id"] for hit in plain[0]]
    untouched.client.upsert(untouched.name, {"id": 140, "vector": untouched.items[0], "group": 0})
    assert status(untouched.store, untouched.name).pending == ITEMS - 61
    with pytest.raises(UnfinishedMigration, match="enable it again"):
        refresh(untouched.store, untouched.name)
    with pytest.raises(ResumeRefused, match="estimator"):
        untouched.plan(estimator=NNN(K, 1.0))
    calls += [None] * 3
    plan = untouched.plan(estimator=None)
    assert plan.to_dict()["carries_on"]
    before = len(calls)
    assert enable(untouched.store, plan).rows == ITEMS
    assert len(calls) == before + 2
    untouched.items[140] = untouched.items[0]
    untouched.state = untouched.client.hubness_state(untouched.name)
    [hits] = untouched.client.search(untouched.name, data=[untouched.queries[0]])
    scores = np.sort(untouched.corrected()[0])[::-1][:10]
    np.testing.assert_allclose([hit["distance"] for hit in hits], scores, atol=4e-5)


@pytest.mark.parametrize("updates", [True, False], ids=["fields updated", "rows replaced"])
def test_what_clients_write_while_it_is_filled_is_kept(untouched, monkeypatch, updates):
    """Between the reading of the rows and their writing, a client that has heard of it changes one."""
    monkeypatch.setattr(milvus_requests, "supports", lambda version, feature: updates)
    update, new = untouched.store.update, vectors(np.random.default_rng(8), 2, DIM)
    pending = [{"id": 20, "vector": new[0], "group": 0, "note": "theirs"}]

    def interfere(*args, **options):
        if pending and updates:
            untouched.client.upsert(untouched.name, pending.pop())
        written = update(*args, **options)
        if pending:
            untouched.client.upsert(untouched.name, pending.pop())
        return written

    monkeypatch.setattr(untouched.store, "update", interfere)
    enable(untouched.store, untouched.plan())
    assert not pending
    [row] = untouched.client.get(untouched.name, 20)
    assert row["note"] == "theirs"
    np.testing.assert_array_equal(np.float32(row["vector"]), new[0])
    untouched.items[20] = new[0]
    untouched.state = untouched.client.hubness_state(untouched.name)
    untouched.assert_found(
        untouched.client.search(untouched.name, data=list(untouched.queries)), untouched.corrected()
    )


def test_a_refresh_keeps_what_clients_write_meanwhile(fresh, monkeypatch):
    """A client gives a row another vector between its reading and its writing."""
    update, new = fresh.store.update, vectors(np.random.default_rng(10), 1, DIM)[0]
    pending = [{"id": 20, "vector": new, "group": 0}]

    def interfere(*args, **options):
        if pending:
            fresh.client.upsert(fresh.name, pending.pop())
        return update(*args, **options)

    monkeypatch.setattr(fresh.store, "update", interfere)
    refresh(fresh.store, fresh.name, estimator=NNN(K, 1.0))
    assert not pending
    fresh.items[20] = new
    fresh.state = fresh.client.hubness_state(fresh.name)
    biases = nnn(fresh.bank, fresh.items, "COSINE", K, 1.0)
    found = fresh.client.search(fresh.name, data=list(fresh.queries))
    fresh.assert_found(found, fresh.corrected(biases=biases))
    [[hit]] = fresh.client.search(fresh.name, data=[new], filter="id == 20", limit=1, strength=0)
    assert hit["distance"] == pytest.approx(1, abs=1e-5)


def test_a_row_that_is_deleted_while_it_is_filled_stays_deleted(untouched, monkeypatch):
    update, pending = untouched.store.update, [20]

    def interfere(*args, **options):
        if pending:
            untouched.client.delete(untouched.name, ids=[pending.pop()])
        return update(*args, **options)

    monkeypatch.setattr(untouched.store, "update", interfere)
    assert enable(untouched.store, untouched.plan()).rows == ITEMS - 1
    assert not untouched.client.get(untouched.name, 20)
    assert status(untouched.store, untouched.name).pending == 0


def test_a_gate_opens_for_activated_items_only(untouched):
    enable(untouched.store, untouched.plan(gate=1))
    untouched.state = untouched.client.hubness_state(untouched.name)
    activated = set(similarity(untouched.bank, untouched.items, "COSINE").argmax(1).tolist())
    raw, corrected = similarity(untouched.queries, untouched.items, "COSINE"), untouched.corrected()
    opens = [scores.argmax() in activated for scores in raw]
    for query, before, after, opened in zip(untouched.queries, raw, corrected, opens, strict=True):
        [hits] = untouched.client.search(untouched.name, data=[query])
        assert [hit["id"] for hit in hits] == np.argsort(-(after if opened else before))[
            :10
        ].tolist()
    assert any(opens)


def test_a_second_profile_has_columns_of_its_own(backend):
    """COSINE with 12 dimensions leaves four of 16 columns: room for two sets of biases."""
    rng = np.random.default_rng(23)
    items, queries, banks = (
        vectors(rng, 120, 12),
        vectors(rng, 4, 12),
        [vectors(rng, 40, 12) for _ in "ab"],
    )
    name, store, client = backend.name("profiles"), backend.store(), backend.hubness_client()
    if backend.is_lite:
        with_second_field(backend.client(), name, items, "COSINE", 16)
    else:
        plain_collection(backend.client(), name, items, "COSINE")
    enable(
        store,
        plan_enable(store, name, QueryBank(banks[0]), estimator=NNN(K), where="second_vector"),
    )
    refresh(store, name, bank=QueryBank(banks[1]), estimator=NNN(K), profile="image")
    for profile, bank in zip(["default", "image"], banks, strict=True):
        scores = similarity(queries, items, "COSINE") - nnn(bank, items, "COSINE", K, 0.75)
        found = client.search(name, data=list(queries), profile=profile)
        assert [list(hits.ids) for hits in found] == np.argsort(-scores, axis=1)[:, :10].tolist()


def test_a_field_of_another_width_is_refused(lite):
    name, rng = lite.name(), np.random.default_rng(9)
    with_second_field(lite.client(), name, vectors(rng, 30, DIM), "IP", 48)
    with pytest.raises(CannotMigrate, match="has 48 dimensions, the augmented vectors have 16"):
        plan_enable(
            lite.store(),
            name,
            QueryBank(vectors(rng, 20, DIM)),
            estimator=NNN(4),
            where="second_vector",
        )


def test_a_plan_says_what_other_clients_must_do(untouched):
    told = untouched.plan().to_dict()
    assert told["adds_fields"] != untouched.backend.is_lite
    assert (told["where"], told["second_vector"], told["width"]) == (
        "second_vector",
        SECOND_VECTOR_FIELD,
        WIDTH,
    )
    said = " ".join(told["remarks"])
    assert "must name one of" in said
    assert (f"must set: {SECOND_VECTOR_FIELD}" in said) == untouched.backend.is_lite
    assert not status(untouched.store, untouched.name).corrected
