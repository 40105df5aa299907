"""Experiments on live traffic, and outcomes of answers, from the client to the report."""

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
from pymilvus import AnnSearchRequest, DataType, RRFRanker

from milvus_hubness import (
    Blend,
    Experiment,
    InvalidInput,
    InvalidParameter,
    MigrationOptions,
    QueryBank,
    migrate,
    plan_migration,
    refresh,
)
from milvus_hubness.jobs.common.outcomes import judgements_of_outcomes, recorded_answers
from milvus_hubness.jobs.refresh.sampling import list_samplings, start_sampling
from milvus_hubness.milvus.client import experiments
from milvus_hubness.milvus.client.answers import MOST_KEYS
from milvus_hubness.reports.experiments import experiment_names, experiment_page, experiment_report
from tests.support.async_clients import opened
from tests.support.galleries import hubby_gallery, plain_collection, vectors

DIM = 16


@pytest.fixture(autouse=True)
def _one_window(monkeypatch):
    """The clock by which arms are drawn stands still: a test may run over the end of ten minutes."""
    clock = SimpleNamespace(time=lambda: 1_800_000_000.0, perf_counter=time.perf_counter)
    monkeypatch.setattr(experiments, "time", clock)


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@pytest.fixture
def corrected(lite, rng):
    """The name of a corrected collection whose outcomes are recorded."""
    name = lite.name()
    items = vectors(rng, 300, DIM)
    plain_collection(lite.client(), name, items, "IP")
    plan = plan_migration(
        lite.store(), name, QueryBank(vectors(rng, 100, DIM)), estimator=Blend(), verdict="skip"
    )
    done = migrate(lite.store(), plan, MigrationOptions(no_writers=True))
    lite.made += [done.target, f"{name}__bank", f"{done.target}__query_samples"]
    start_sampling(lite.store(), done.target, rate=1e-9, outcomes=1.0)
    return done.target


def clients(lite, share=0.5, **settings):
    return lite.hubness_client(experiment=Experiment("november", share, **settings))


def ids(answer):
    return [hits.ids for hits in answer]


def test_each_query_is_in_one_arm_and_the_answer_says_which(lite, corrected, rng):
    client, plain = clients(lite), lite.hubness_client()
    arms = []
    queries = vectors(rng, 40, DIM)
    for query in queries:
        answer = client.search(corrected, [query.tolist()], limit=8)
        again = client.search(corrected, [query], limit=8)
        assert (answer.hubness.arm, ids(answer)) == (again.hubness.arm, ids(again))
        if answer.hubness.arm == "corrected":
            expected = plain.search(corrected, [query], limit=8)
        else:
            expected = plain.search(corrected, [query], limit=8, strength=0.0)
        assert ids(answer) == ids(expected)
        assert not hasattr(expected, "hubness") or expected.hubness.arm is None
        arms.append(answer.hubness.arm)
    assert 8 < arms.count("control") < 32
    other = clients(lite)
    others = [other.search(corrected, [query], limit=1).hubness.arm for query in queries]
    assert others == arms, "another client with the same settings has the same arms"


def test_a_search_that_names_its_strength_is_in_no_arm(lite, corrected, rng):
    client = clients(lite)
    query = vectors(rng, 1, DIM)
    answer = client.search(corrected, query, limit=3, strength=0.5)
    assert answer.hubness.arm is None
    assert answer.hubness.token() is not None, "its outcomes are recorded all the same"


def test_outcomes_become_a_report_pairs_and_a_prior(lite, corrected, rng):
    client = clients(lite, 0.4)
    queries = vectors(rng, 60, DIM)
    for number, query in enumerate(queries):
        answer = client.search(corrected, [query], limit=5)
        if number % 3 == 0:
            assert client.feedback(answer, answer[0][1].id)
            assert client.feedback(answer, answer[0][1].id), "a double click"
        if number % 3 == 1:
            token = answer.hubness.token()
            assert client.feedback_by_token(corrected, token, answer[0][0].id, kind="sale")
    client.close()

    store = lite.store()
    [status] = list_samplings(store, corrected)
    assert (status.answers, status.outcomes, status.waiting) == (60, 40, 0)
    name, shown = experiment_report(store, corrected)
    assert name == "november"
    assert shown.control.queries + shown.treatment.queries == 60
    assert shown.control.clicks + shown.treatment.clicks == 20
    clicked = (shown.control.reciprocal_rank or 0) * shown.control.queries + (
        shown.treatment.reciprocal_rank or 0
    ) * shown.treatment.queries
    assert clicked == pytest.approx(20 / 2)
    assert shown.treatment.latency_p50 > 0
    assert shown.share == 0.4
    assert experiment_report(store, corrected, kind="sale")[1].control.reciprocal_rank is not None
    assert experiment_names(store, corrected) == {"november": 60}

    page = experiment_page(store, corrected)
    assert "no difference proven yet" in page
    assert page.count("<polyline") == 3, "two arms, and the answers; no query is sampled here"

    judgements = judgements_of_outcomes(store, corrected)
    assert len(judgements) == 20
    assert {row.tobytes() for row in judgements.queries.vectors} == {
        row.tobytes() for row in queries[::3]
    }
    assert set(np.round(judgements.weights, 6)) <= {round(1 / 0.4, 6), round(1 / 0.6, 6)}
    assert sum(judgements.clicks_by_key().values()) == pytest.approx(sum(judgements.weights))


def test_without_an_experiment_outcomes_are_recorded_of_a_share_of_answers(lite, corrected, rng):
    start_sampling(lite.store(), corrected, outcomes=0.5)
    client = lite.hubness_client()
    recorded = 0
    for query in vectors(rng, 60, DIM):
        answer = client.search(corrected, [query], limit=3)
        recorded += client.feedback(answer, answer[0][0].id)
    client.close()
    assert 12 < recorded < 48
    # Of the places, 2,000 here, a few are taken twice.
    assert recorded - 5 < len(recorded_answers(lite.store(), corrected)) <= recorded


def test_outcomes_of_a_plain_collection(lite, rng):
    name = lite.name()
    plain_collection(lite.client(), name, vectors(rng, 100, DIM), "IP")
    lite.made.append(f"{name}__query_samples_vector")
    client = clients(lite)
    query = vectors(rng, 1, DIM)
    answer = client.search(name, query.tolist(), limit=3)
    assert not client.feedback(answer, answer[0][0].id), "nothing is recorded unless wanted"

    start_sampling(lite.store(), name, rate=1e-9, outcomes=1.0)
    client = clients(lite)
    answer = client.search(name, query.tolist(), limit=3, offset=2)
    assert answer.hubness.arm is None, "both arms would be the same"
    assert client.feedback(answer, answer[0][1].id)
    client.close()
    [recorded] = recorded_answers(lite.store(), name)
    assert recorded.outcomes == [(answer[0][1].id, 4)]
    assert np.array_equal(recorded.vector, query[0])
    with pytest.raises(InvalidInput, match="no answer of an experiment is recorded"):
        experiment_report(lite.store(), name)


def test_batches_hybrid_searches_and_asynchronous_ones_have_arms(lite, corrected, rng):
    client = clients(lite)
    queries = vectors(rng, 3, DIM)
    answer = client.search(corrected, queries.tolist(), limit=4)
    assert answer.hubness.arm in ("corrected", "control")
    assert client.feedback(answer, answer[2][0].id, query=2)
    requests = [AnnSearchRequest([queries[0].tolist()], "vector", {}, limit=5)] * 2
    hybrid = client.hybrid_search(corrected, requests, RRFRanker(), limit=4)
    assert hybrid.hubness.arm == client.search(corrected, queries[:1], limit=4).hubness.arm
    assert client.feedback(hybrid, hybrid[0][0].id)
    client.close()
    answers = recorded_answers(lite.store(), corrected)
    assert len(answers) == 5
    assert sorted(len(answer.outcomes) for answer in answers) == [0, 0, 0, 1, 1]


async def test_asynchronous_clients_are_in_the_same_arms(lite, corrected, rng):
    queries = vectors(rng, 12, DIM)
    other = clients(lite)
    expected = [other.search(corrected, [query], limit=2).hubness.arm for query in queries]
    async with opened(lite, experiment=Experiment("november")) as client:
        answers = [await client.search(corrected, [query], limit=2) for query in queries]
        assert [answer.hubness.arm for answer in answers] == expected
        assert await client.feedback(answers[0], answers[0][0][0].id)


def test_a_recorded_answer_has_no_more_of_the_user_than_the_page_says(lite, corrected, rng):
    client = clients(lite)
    client.search(corrected, vectors(rng, 1, DIM), limit=30, filter="id >= 0")
    client.close()
    [recorded] = recorded_answers(lite.store(), corrected)
    rows = lite.client().query(
        f"{corrected}__query_samples", filter="sample >= 0", output_fields=["*"]
    )
    [row] = rows
    assert row.keys() == {
        "place", "vector", "profile", "sample", "queried_at", "event", "facts"
    }  # fmt: skip
    facts = json.loads(row["facts"])
    assert facts.keys() == {"keys", "offset", "trial"}
    assert facts["trial"].keys() == {
        "experiment", "share", "treated", "unit", "query", "milliseconds"
    }  # fmt: skip
    assert len(recorded.facts.keys) == MOST_KEYS


def test_records_that_a_stranger_wrote_count_nothing(lite, corrected, rng, caplog):
    client = clients(lite)
    answer = client.search(corrected, vectors(rng, 1, DIM), limit=3)
    assert client.feedback(answer, answer[0][0].id)
    client.close()
    samples = f"{corrected}__query_samples"
    for number, facts in enumerate(("", "7", "{", '{"keys": 3}', '{"key": 1, "kind": "click"}')):
        for event in ("answer", "outcome"):
            row = {
                "place": f"{event}/{number}",
                "vector": [1.0] * DIM,
                "profile": "default",
                "sample": number,
                "queried_at": 1,
                "event": event,
                "facts": facts,
            }
            lite.client().upsert(samples, [row])
    _, shown = experiment_report(lite.store(), corrected)
    assert shown.control.queries + shown.treatment.queries == 1
    assert "10 records in" in caplog.text


def test_long_keys_and_profiles_with_dots_are_those_of_the_answer(lite, rng):
    """Keys such as addresses are whole in outcomes, though not in answers."""
    name = lite.name()
    client = lite.client()
    schema = client.create_schema()
    schema.add_field("address", DataType.VARCHAR, is_primary=True, max_length=2_000)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="IP")
    client.create_collection(name, schema=schema, index_params=index, consistency_level="Strong")
    addresses = [f"https://shop.example/{'long/' * 40}{number}" for number in range(100)]
    client.insert(
        name,
        [
            {"address": address, "vector": vector.tolist()}
            for address, vector in zip(addresses, vectors(rng, 100, DIM), strict=True)
        ],
    )
    plan = plan_migration(
        lite.store(), name, QueryBank(vectors(rng, 100, DIM)), estimator=Blend(), verdict="skip"
    )
    target = migrate(lite.store(), plan, MigrationOptions(no_writers=True)).target
    lite.made += [target, f"{name}__bank", f"{target}__query_samples"]
    refresh(
        lite.store(),
        target,
        bank=QueryBank(vectors(rng, 50, DIM)),
        profile="text.v2",
        verdict="skip",
    )
    start_sampling(lite.store(), target, profile="text.v2", rate=1e-9, outcomes=1.0)

    searching = clients(lite)
    answer = searching.search(target, vectors(rng, 1, DIM), limit=5, profile="text.v2")
    third = answer[0][2].id
    assert searching.feedback_by_token(target, answer.hubness.token(), third)
    searching.close()
    [recorded] = recorded_answers(lite.store(), target, profile="text.v2")
    assert recorded.outcomes == [(third, 3)]
    assert judgements_of_outcomes(lite.store(), target, profile="text.v2").keys == [(third,)]


def test_hubs_among_the_hits_are_counted(lite, rng):
    items, queries = hubby_gallery(rows=300, queries=400, dim=DIM)[:2]
    name = lite.name()
    plain_collection(lite.client(), name, items, "IP")
    plan = plan_migration(
        lite.store(), name, QueryBank(queries[:300]), estimator=Blend(strength=1.0), verdict="skip"
    )
    done = migrate(lite.store(), plan, MigrationOptions(no_writers=True))
    lite.made += [done.target, f"{name}__bank", f"{done.target}__query_samples"]
    start_sampling(lite.store(), done.target, rate=1e-9, outcomes=1.0)
    client = clients(lite)
    for query in queries[300:]:
        client.search(done.target, [query], limit=10)
    client.close()
    _, shown = experiment_report(lite.store(), done.target)
    assert shown.control.hub_share > 1.5 * shown.treatment.hub_share
    assert shown.verdict == "no difference proven yet"


def test_settings_that_make_no_sense_are_refused(lite, corrected, rng):
    for wrong in (
        {"name": ""},
        {"name": "a b"},
        {"name": "x", "share": 1.0},
        {"name": "x", "rate": 0},
    ):
        with pytest.raises(InvalidParameter):
            Experiment(**wrong)
    with pytest.raises(InvalidParameter, match="NAME or NAME:SHARE"):
        Experiment.parse("x:half")
    assert Experiment.parse("x:0.25") == Experiment("x", 0.25)

    client = clients(lite)
    answer = client.search(corrected, vectors(rng, 1, DIM), limit=2)
    with pytest.raises(InvalidParameter, match="kind of an outcome"):
        client.feedback(answer, answer[0][0].id, kind="A click!")
    with pytest.raises(InvalidInput, match="no hit with the key -7"):
        client.feedback(answer, -7)
    with pytest.raises(InvalidParameter, match="no token of an answer"):
        client.feedback_by_token(corrected, "12; drop", 1)
    client.close()
    with pytest.raises(InvalidInput, match="no recorded answers of experiment 'other'"):
        experiment_report(lite.store(), corrected, "other")
