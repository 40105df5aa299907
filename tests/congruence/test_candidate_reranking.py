"""Collections corrected beside their vectors: against float64 oracles, and as full citizens of every job."""

import numpy as np
import pytest
from pymilvus import AnnSearchRequest, MilvusClient, RRFRanker
from pymilvus.exceptions import MilvusException, ParamError
from pymilvus.function_chain import FunctionChain, FunctionChainStage

from milvus_hubness import (
    CSLS,
    NNN,
    AlreadyCorrected,
    Beside,
    CollectionExists,
    CorrectionNotRecommended,
    GloballyCorrected,
    InvalidInput,
    InvalidParameter,
    NotCorrected,
    QueryBank,
    Recipe,
    UnsupportedOperation,
    VerificationFailed,
    diagnose,
    disable,
    enable,
    migrate,
    plan_correction,
    refresh,
    status,
    tune,
)
from milvus_hubness.jobs.store.records import TUNING_PROPERTY, Verdicts
from milvus_hubness.quality.trials import raw_ranks
from tests.support.galleries import (
    METRICS,
    all_keys,
    as_distance,
    nnn,
    plain_collection,
    similarity,
    vectors,
)
from tests.support.reranked import ALPHA, DIM, ITEMS, QUERIES, Enabled, K

ON_SERVERS = {
    "enabled": ["L2"],
}


@pytest.fixture(scope="module", params=METRICS)
def enabled(shared_backend, request):
    return Enabled(shared_backend, request.param)


def test_biases_of_an_l2_gallery_far_from_zero_are_exact(lite):
    far = Enabled(lite, "L2", away=1_000.0)
    assert far.state.layout.half_squares.mean
    far.assert_found(far.client.search(far.name, list(far.queries)))


def test_enabling_says_where_the_biases_lie_and_what_candidates_miss(enabled):
    mean_bias = enabled.biases - enabled.state.profile.mean_bias
    measured = similarity(enabled.bank, enabled.items, enabled.metric)
    missed = np.mean(
        [
            ~np.isin(
                np.argsort(-(raw - mean_bias))[:10], np.argsort(-raw)[: enabled.done.candidates]
            )
            for raw in measured
        ]
    )
    assert enabled.done.missed == pytest.approx(missed, abs=1e-9)
    assert enabled.done.missed <= 0.01
    assert enabled.state.reranking.side_prefix == f"{enabled.name}__bias"
    found = status(enabled.store, enabled.name)
    assert (found.corrected, found.pending, found.rows) == (True, 0, ITEMS)
    assert found.candidates == enabled.done.candidates
    assert found.where == "beside"


@pytest.mark.parametrize("strength", [1.0, 0.5, -0.7])
def test_scores_and_ranking_are_the_oracles(enabled, strength):
    results = enabled.client.search(
        enabled.name, data=list(enabled.queries), strength=strength, output_fields=["note"]
    )
    enabled.assert_found(results, strength)
    assert set(results[0][0]["entity"]) == {"note"}


def test_strength_zero_is_the_plain_search(enabled):
    question = {"data": list(enabled.queries), "limit": 7, "offset": 2, "output_fields": ["group"]}
    found = enabled.client.search(enabled.name, strength=0, **question)
    plain = enabled.plain.search(enabled.name, **question)
    assert [list(hits) for hits in found] == [list(hits) for hits in plain]


def test_later_pages_continue_the_first(enabled):
    results = enabled.client.search(enabled.name, data=list(enabled.queries), limit=4, offset=3)
    enabled.assert_found(results, page=slice(3, 7))


def test_a_longer_answer_looks_at_as_many_more_candidates(enabled):
    limit = 40
    results = enabled.client.search(enabled.name, data=list(enabled.queries), limit=limit)
    candidates = enabled.state.reranking.candidates * limit // 10
    enabled.assert_found(results, page=slice(0, limit), candidates=candidates)


NO_LIMITS = [0, -1, -3, None, "3", 3.5, np.int64(3)]


@pytest.mark.parametrize("limit", NO_LIMITS, ids=repr)
@pytest.mark.parametrize("reranked", [False, True])
def test_a_limit_that_pymilvus_refuses_is_refused_alike(enabled, limit, reranked):
    """The server sees the number of candidates, and not the limit."""
    question = {"data": list(enabled.queries), "limit": limit}
    with pytest.raises(ParamError) as expected:
        enabled.plain.search(enabled.name, **question)
    further = {"rerank": GloballyCorrected(20), "strength": 0} if reranked else {}
    with pytest.raises(ParamError) as refused:
        enabled.client.search(enabled.name, **question, **further)
    assert str(refused.value) == str(expected.value)


def test_no_page_begins_before_the_first_hit(enabled):
    for further in ({"offset": -2}, {"search_params": {"offset": -2}}):
        with pytest.raises(InvalidParameter, match="offset at least 0"):
            enabled.client.search(enabled.name, data=list(enabled.queries), **further)


def asked_together(queries):
    return [AnnSearchRequest([query], "vector", {}, 5) for query in queries[:2]]


@pytest.mark.parametrize("limit", NO_LIMITS, ids=repr)
def test_a_limit_of_merged_answers_is_refused_alike(enabled, limit):
    parts = asked_together(enabled.queries)
    with pytest.raises(ParamError) as expected:
        enabled.plain.hybrid_search(enabled.name, parts, RRFRanker(), limit=limit)
    with pytest.raises(ParamError) as refused:
        enabled.client.hybrid_search(enabled.name, parts, RRFRanker(), limit=limit)
    assert str(refused.value) == str(expected.value)


def test_an_offset_of_merged_answers_is_refused_alike(enabled):
    parts = asked_together(enabled.queries)
    for offset in ("1", np.int64(1), 1.5):
        with pytest.raises(ParamError, match="wrong type for offset"):
            enabled.plain.hybrid_search(enabled.name, parts, RRFRanker(), offset=offset)
        with pytest.raises(ParamError, match="wrong type for offset"):
            enabled.client.hybrid_search(enabled.name, parts, RRFRanker(), offset=offset)
    with pytest.raises(InvalidParameter, match="offset at least 0"):
        enabled.client.hybrid_search(enabled.name, parts, RRFRanker(), limit=3, offset=-1)


def test_merged_requests_need_as_many_queries_as_each_other(enabled):
    one, two = (
        AnnSearchRequest(list(enabled.queries[:count]), "vector", {}, 5) for count in (1, 2)
    )
    for parts in ([one, two], [two, one]):
        # Milvus 2.3.5 has no hybrid search of its own.
        if enabled.backend.is_lite:
            with pytest.raises(MilvusException):
                enabled.plain.hybrid_search(enabled.name, parts, RRFRanker())
        with pytest.raises(InvalidInput, match="queries: give each request"):
            enabled.client.hybrid_search(enabled.name, parts, RRFRanker())


def test_a_merged_search_without_a_ranker_goes_by_ranks(enabled):
    """As on a server, which has this ranker of its own."""
    parts = asked_together(enabled.queries)
    without, by_rank = (
        enabled.client.hybrid_search(enabled.name, parts, ranker) for ranker in (None, RRFRanker())
    )
    assert [list(hits) for hits in without] == [list(hits) for hits in by_rank]
    for client in (enabled.plain, enabled.client):
        with pytest.raises(ParamError, match="must be a Function or a Ranker"):
            client.hybrid_search(enabled.name, parts, "rrf")


def test_the_offset_of_a_part_has_no_effect_on_merged_answers_either(enabled):
    at_end = AnnSearchRequest([enabled.queries[0]], "vector", {"offset": 2}, 5)
    parts = asked_together(enabled.queries)
    # Milvus 2.3.5 has no hybrid search of its own.
    clients = (enabled.plain, enabled.client) if enabled.backend.is_lite else (enabled.client,)
    for client in clients:
        moved, expected = (
            client.hybrid_search(enabled.name, [first, parts[1]], RRFRanker())
            for first in (at_end, parts[0])
        )
        assert moved[0].ids == expected[0].ids


@pytest.mark.parametrize("strength", [1, 0])
def test_another_metric_than_the_fields_is_refused(enabled, strength):
    """Milvus Lite would search by it, and the worst candidates come first."""
    other = "IP" if enabled.metric == "L2" else "L2"
    for params in ({"metric_type": other}, {"params": {"metric_type": other}}):
        with pytest.raises(InvalidParameter, match=f"expected {enabled.metric}, not {other}"):
            enabled.client.search(
                enabled.name, list(enabled.queries), search_params=params, strength=strength
            )
    question = {"data": list(enabled.queries), "strength": strength}
    named = enabled.client.search(
        enabled.name, search_params={"metric_type": enabled.metric}, **question
    )
    assert named[0].ids == enabled.client.search(enabled.name, **question)[0].ids


def test_filters_and_rounding(enabled):
    results = enabled.client.search(
        enabled.name, data=list(enabled.queries), filter="group == 2", limit=5, round_decimal=3
    )
    corrected, _ = enabled.wanted()
    for hits, scores, raw in zip(results, corrected, enabled.raw, strict=True):
        group = np.arange(2, ITEMS, 5)
        pool = group[np.argsort(-raw[group])][: enabled.state.reranking.candidates]
        order = pool[np.argsort(-scores[pool])][:5]
        assert [hit["id"] for hit in hits] == order.tolist()
        given = as_distance(scores[order], enabled.metric)
        np.testing.assert_allclose([hit["distance"] for hit in hits], given, atol=6e-4)
        assert [hit["distance"] for hit in hits] == [round(hit["distance"], 3) for hit in hits]


def test_range_search_is_in_corrected_scores(enabled):
    corrected, orders = enabled.wanted()
    scores = as_distance(corrected[0][orders[0]], enabled.metric)
    far, near = float(scores[6] + scores[7]) / 2, float(scores[1] + scores[2]) / 2
    [hits] = enabled.client.search(
        enabled.name,
        data=[enabled.queries[0]],
        limit=20,
        search_params={"params": {"radius": far, "range_filter": near}},
    )
    assert [hit["id"] for hit in hits] == orders[0][2:7].tolist()


def test_a_search_may_look_at_fewer_nodes_than_there_are_candidates(enabled):
    """Milvus refuses an ef below the number of results; the user's is above that of them."""
    options = {"search_params": {"params": {"ef": 12}}, "consistency_level": "Strong"}
    enabled.assert_found(enabled.client.search(enabled.name, data=list(enabled.queries), **options))


def test_what_the_server_would_do_to_uncorrected_scores_is_refused(enabled):
    chain = FunctionChain(FunctionChainStage.L2_RERANK).limit(3)
    with pytest.raises(UnsupportedOperation, match="function_chains"):
        enabled.client.search(enabled.name, data=list(enabled.queries), function_chains=chain)


def test_rows_are_read_as_they_were_written(enabled):
    [row] = enabled.client.get(enabled.name, 3)
    assert set(row) == {"id", "vector", "group", "note"}
    np.testing.assert_array_equal(np.float32(row["vector"]), enabled.items[3])
    described = enabled.client.describe_collection(enabled.name)
    assert [field["name"] for field in described["fields"]] == ["id", "vector", "group"]
    assert "hubness" not in described["properties"]


def test_candidates_can_be_ranked_by_the_banks_view(enabled):
    candidates = 30
    results = enabled.client.search(
        enabled.name, data=list(enabled.queries), limit=6, rerank=GloballyCorrected(candidates)
    )
    from_bank = similarity(enabled.bank, enabled.items, enabled.metric)
    for hits, scores in zip(results, enabled.raw, strict=True):
        pool = np.argsort(-scores)[:candidates]
        ranks = (from_bank[:, pool] > scores[pool]).sum(0)
        assert [hit["id"] for hit in hits] == pool[np.lexsort((-scores[pool], ranks))][:6].tolist()
        assert not hits[0]["entity"]


def test_tune_and_diagnose_see_the_rows_and_their_biases(enabled):
    found = tune(enabled.store, enabled.name)
    assert found.verdict in {"apply", "apply weakly", "not proven", "leave it alone"}
    told = diagnose(enabled.store, enabled.name, QueryBank(enabled.queries))
    assert told.title == enabled.name
    biases = enabled.biases - enabled.biases.mean()
    corrected = enabled.raw - biases
    counts = np.bincount(np.argsort(-corrected, axis=1)[:, :10].ravel(), minlength=ITEMS)
    assert told.after.largest == counts.max()


def test_enabling_twice_is_refused(enabled):
    with pytest.raises(AlreadyCorrected, match="refresh"):
        plan_correction(enabled.store, enabled.name, QueryBank(enabled.bank), Beside())


@pytest.fixture
def fresh(backend):
    return Enabled(backend, "IP")


def test_rows_come_and_go_with_their_biases(fresh):
    rng = np.random.default_rng(3)
    new = vectors(rng, 5, DIM)
    rows = [{"id": 1_000 + i, "vector": vector, "group": 0} for i, vector in enumerate(new)]
    fresh.client.insert(fresh.name, rows)
    fresh.client.upsert(fresh.name, [{"id": 7, "vector": new[0], "group": 1}])
    fresh.client.delete(fresh.name, ids=[8, 9])
    fresh.items[7] = new[0]
    keys = np.r_[np.delete(np.arange(ITEMS), [8, 9]), 1_000 + np.arange(5)]
    items = np.r_[np.delete(fresh.items, [8, 9], axis=0), new]
    scores = similarity(fresh.queries, items, "IP") - (
        nnn(fresh.bank, items, "IP", K, ALPHA) - fresh.state.profile.mean_bias
    )
    results = fresh.client.search(fresh.name, data=list(fresh.queries), limit=3)
    for hits, query_scores in zip(results, scores, strict=True):
        order = np.argsort(-query_scores)[:3]
        assert [hit["id"] for hit in hits] == keys[order].tolist()
        np.testing.assert_allclose(
            [hit["distance"] for hit in hits], query_scores[order], atol=3e-5
        )
    assert status(fresh.store, fresh.name).pending == 0
    assert all_keys(fresh.store, fresh.done.side_collection) == sorted(keys.tolist())


def test_a_row_of_another_partition_than_the_deletion_names_keeps_its_bias(fresh):
    fresh.plain.create_partition(fresh.name, "winter")
    question = {"data": [fresh.items[5]], "limit": 1, "filter": "id == 5"}
    [[before]] = fresh.client.search(fresh.name, **question)
    fresh.client.delete(fresh.name, ids=[5], partition_name="winter")
    if not fresh.client.get(fresh.name, [5]):
        pytest.skip("Milvus Lite takes no notice of the partition")
    for client in (fresh.client, fresh.new_client()):
        [[after]] = client.search(fresh.name, **question)
        assert after["distance"] == pytest.approx(before["distance"], abs=1e-6)


def test_rows_whose_biases_fail_are_not_written_twice(lite, monkeypatch):
    """The collection is disabled between the row and its bias, so that what the client knew is outdated."""
    enabled = Enabled(lite, "IP")

    put = MilvusClient.upsert

    def upsert(client, collection, *args, **options):
        if collection != enabled.done.side_collection:
            return put(client, collection, *args, **options)
        disable(enabled.store, enabled.name)
        raise MilvusException(message=f"no {collection}")

    inserted = []
    insert = MilvusClient.insert
    monkeypatch.setattr(MilvusClient, "upsert", upsert)
    monkeypatch.setattr(
        MilvusClient,
        "insert",
        lambda *args, **options: inserted.append(args) or insert(*args, **options),
    )
    row = {"id": 5_000, "vector": enabled.items[0], "group": 0}
    # The row needs no bias any more.
    enabled.client.insert(enabled.name, [row])
    assert len(inserted) == 1
    assert enabled.plain.get(enabled.name, [5_000])
    enabled.client.insert(enabled.name, [{**row, "id": 5_001}])


def test_a_refresh_gives_what_foreign_writers_left_out_and_takes_what_they_left_behind(fresh):
    new = vectors(np.random.default_rng(4), 1, DIM)
    fresh.plain.insert(fresh.name, [{"id": 2_000, "vector": new[0], "group": 0}])
    fresh.plain.delete(fresh.name, ids=[5])
    assert status(fresh.store, fresh.name).pending == 1
    done = refresh(fresh.store, fresh.name)
    assert (done.action, done.written) == ("pending", 1)
    assert status(fresh.store, fresh.name).pending == 0
    bias = nnn(fresh.bank, new, "IP", K, ALPHA)[0] - fresh.state.profile.mean_bias
    [hits] = fresh.client.search(fresh.name, data=[new[0]], limit=400)
    [found] = [hit["distance"] for hit in hits if hit["id"] == 2_000]
    assert found == pytest.approx(float(new[0] @ new[0]) - bias, abs=3e-5)
    assert 5 not in all_keys(fresh.store, fresh.done.side_collection)


def test_a_full_refresh_changes_the_slots_and_measures_anew(fresh):
    done = refresh(fresh.store, fresh.name, Recipe(estimator=CSLS(4)))
    state = fresh.client.hubness_state(fresh.name)
    assert (done.action, state.profile.slot, state.other.profile.slot) == ("full", 1, 0)
    fresh.biases = nnn(fresh.bank, fresh.items, "IP", 4, 0.5)
    fresh.state = state
    fresh.assert_found(fresh.client.search(fresh.name, data=list(fresh.queries)))
    ranks = raw_ranks(fresh.bank, fresh.items, fresh.biases.astype(np.float32))
    assert state.reranking.missed == pytest.approx((ranks > state.reranking.candidates).mean())


def test_disabling_leaves_an_ordinary_collection(fresh):
    disable(fresh.store, fresh.name)
    assert not fresh.plain.has_collection(f"{fresh.name}__bias_a")
    found = fresh.client.search(fresh.name, data=list(fresh.queries), output_fields=["note"])
    plain = fresh.plain.search(fresh.name, data=list(fresh.queries), output_fields=["note"])
    assert [list(hits) for hits in found] == [list(hits) for hits in plain]
    assert not status(fresh.store, fresh.name).corrected
    with pytest.raises(NotCorrected):
        disable(fresh.store, fresh.name)


def test_an_enabled_collection_can_still_be_migrated(lite):
    enabled = Enabled(lite, "COSINE")
    done = migrate(
        enabled.store,
        plan_correction(
            enabled.store, enabled.name, Recipe(QueryBank(enabled.bank), estimator=NNN(K))
        ),
    )
    assert status(enabled.store, done.target).where == "vector"
    assert status(enabled.store, enabled.name).where == "beside"
    corrected, _ = enabled.wanted()
    results = enabled.client.search(done.target, data=list(enabled.queries))
    for hits, scores in zip(results, corrected, strict=True):
        assert [hit["id"] for hit in hits] == np.argsort(-scores)[:10].tolist()


def test_a_gate_opens_for_activated_items_only(lite):
    gated = Enabled(lite, "IP")
    disable(gated.store, gated.name)
    enable(
        gated.store,
        plan_correction(
            gated.store,
            gated.name,
            Recipe(QueryBank(gated.bank), estimator=NNN(K), gate=1),
            Beside(),
        ),
    )
    activated = set(similarity(gated.bank, gated.items, "IP").argmax(1).tolist())
    _, orders = gated.wanted()
    opened = 0
    for query, raw, order in zip(gated.queries, gated.raw, orders, strict=True):
        opens = raw.argmax() in activated
        opened += opens
        [hits] = gated.new_client().search(gated.name, data=[query])
        assert [hit["id"] for hit in hits] == (order if opens else np.argsort(-raw))[:10].tolist()
    assert 0 < opened < QUERIES


class TestWhatIsRefused:
    @pytest.fixture
    def plain(self, lite):
        rng = np.random.default_rng(5)
        name = lite.name("refused")
        lite.made += [f"{name}__bias_a", f"{name}__bias_b"]
        plain_collection(lite.client(), name, vectors(rng, 80, DIM), "IP")
        return lite.store(), name, QueryBank(vectors(rng, 20, DIM))

    @pytest.mark.parametrize("share", [0, 1, -1, float("nan")])
    def test_a_share_that_is_none(self, plain, share):
        store, name, bank = plain
        with pytest.raises(InvalidParameter, match="max_miss_rate"):
            plan_correction(store, name, bank, Beside(share))

    def test_a_side_name_that_was_taken_since_the_plan(self, plain, lite):
        store, name, bank = plain
        plan = plan_correction(store, name, Recipe(bank, estimator=NNN(4)), Beside())
        plain_collection(
            lite.client(), f"{name}__bias_a", vectors(np.random.default_rng(0), 3, DIM), "IP"
        )
        with pytest.raises(
            CollectionExists, match="was created since this plan was made: plan again"
        ):
            enable(store, plan)
        assert not store.exists(f"{name}__bank")
        assert store.count(f"{name}__bias_a") == 3
        # The next plan takes another name.
        plan = plan_correction(store, name, Recipe(bank, estimator=NNN(4)), Beside())
        assert plan.body.sides == (f"{name}__bias_2_a", f"{name}__bias_2_b")

    def test_what_tuning_advised_against(self, plain):
        store, name, bank = plain
        store.write_property(
            name,
            TUNING_PROPERTY,
            Verdicts(
                records=[
                    {
                        "field": "vector",
                        "verdict": "leave it alone",
                        "choice": None,
                        "strength": 0,
                        "reason": "it hurts",
                        "labelled": False,
                        "bank_fingerprint": bank.fingerprint,
                        "tuned_at": "2026-01-01T00:00:00Z",
                    }
                ]
            ),
        )
        plan = plan_correction(store, name, Recipe(bank, verdict="require"), Beside())
        with pytest.raises(CorrectionNotRecommended, match="it hurts"):
            enable(store, plan)
        assert plan_correction(
            store, name, Recipe(bank, estimator=NNN(4), verdict="warn"), Beside()
        ).body.reranking.candidates

    def test_biases_that_are_not_what_was_written(self, plain, monkeypatch):
        store, name, bank = plain
        plan = plan_correction(store, name, Recipe(bank, estimator=NNN(4)), Beside())
        write = store.upsert

        def spoil(collection, batch, field, **options):
            if field == "biases":
                batch.vectors[batch.keys.index(7)] += 1
            write(collection, batch, field, **options)

        monkeypatch.setattr(store, "upsert", spoil)
        with pytest.raises(VerificationFailed, match="rows 7"):
            enable(store, plan)
        assert not store.exists(f"{name}__bias_a")
        assert not store.exists(f"{name}__bank")
        assert not status(store, name).corrected

    def test_what_a_killed_run_left_is_no_obstacle(self, plain):
        store, name, bank = plain
        store.create_side(store.info(name), f"{name}__bias_a")
        done = enable(store, plan_correction(store, name, Recipe(bank, estimator=NNN(4)), Beside()))
        assert done.rows == 80
