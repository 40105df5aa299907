"""The hub guard: rows planted to answer everything are logged or refused at insertion."""

import asyncio
import functools
import logging
from dataclasses import replace

import numpy as np
import pytest
from pymilvus import DataType
from pymilvus.exceptions import MilvusException

from milvus_hubness import (
    NNN,
    Beside,
    Blend,
    CorrectionConfig,
    HubRefused,
    InvalidParameter,
    QueryBank,
    Recipe,
    enable,
    migrate,
    plan_correction,
    refresh,
)
from milvus_hubness.correction.items import Items
from milvus_hubness.correction.prior import Prior
from milvus_hubness.jobs.common.corrections import load_correction
from milvus_hubness.jobs.migration.options import MigrationOptions
from milvus_hubness.jobs.refresh.guard import guard_hubs
from tests.support.async_clients import opened
from tests.support.planted import DIM, centroid, gallery, genuine
from tests.support.recipes import as_plan

ITEMS, BANK, USERS = gallery(rows=240, queries=400)
HUBS = centroid(USERS, 5)


def rows_of(items, first=0):
    return [{"id": first + i, "vector": item, "note": f"n{i}"} for i, item in enumerate(items)]


def raw(backend):
    """The name of a collection that is not corrected."""
    client, name = backend.client(), backend.name("shop")
    schema = client.create_schema(enable_dynamic_field=True)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="COSINE")
    client.create_collection(name, schema=schema, index_params=index, consistency_level="Strong")
    client.insert(name, rows_of(ITEMS))
    return name


def guarded(backend, on_hub, **options):
    """A migrated collection with a guard, and a client of it."""
    name = raw(backend)
    alias = backend.name("alias")
    plan = plan_correction(
        backend.store(),
        name,
        **as_plan(QueryBank(BANK), alias=alias, on_hub=on_hub, verdict="skip", **options),
    )
    migrate(backend.store(), plan, MigrationOptions(no_writers=True))
    return alias, backend.hubness_client()


@pytest.fixture(scope="module")
def lasting(shared_lite):
    """Return the name of the collection with this guard that the tests of this module share."""
    return functools.cache(lambda on_hub: guarded(shared_lite, on_hub)[0])


@pytest.fixture
def shop(lite, lasting):
    """Return the name of a collection with this guard, and a new client of it; added rows go after the test."""
    used = []

    def open_shop(on_hub):
        used.append(lasting(on_hub))
        return used[-1], lite.hubness_client()

    yield open_shop
    for name in used:
        lite.hubness_client().delete(name, filter=f"id >= {len(ITEMS)}")


def first_answers(client, name, **options):
    hits = client.search(name, data=list(USERS), limit=1, **options)
    return [hit[0]["id"] for hit in hits]


def state_of(backend, name):
    return backend.store().info(name).state_of(None)


def test_a_planted_hub_is_the_first_answer_of_most_queries_without_a_guard(lite):
    name = raw(lite)
    lite.client().insert(name, rows_of(HUBS[:1], 9000))
    answers = lite.client().search(name, data=list(USERS), limit=1)
    assert np.mean([hit[0]["id"] == 9000 for hit in answers]) > 0.5


@pytest.mark.parametrize("estimator", [None, NNN(16)], ids=["default: reach", "bias"])
def test_refuse_raises_with_the_evidence_and_writes_nothing(lite, shop, estimator):
    by_reach = estimator is None
    name, client = shop("refuse") if by_reach else guarded(lite, "refuse", estimator=estimator)
    rows = rows_of(genuine(20), 5000) + rows_of(HUBS, 9000)
    with pytest.raises(HubRefused, match="looks like a planted hub") as refused:
        client.insert(name, rows)

    error = refused.value
    assert isinstance(error, MilvusException)
    assert error.key == 9000
    assert error.rows == tuple(range(20, 25))
    assert error.quantile > 0.99
    assert "\n" not in str(error)
    if by_reach:
        items = np.concatenate([ITEMS])
        scores = BANK.astype(float) @ items.T
        means = np.sort(scores, axis=1)[:, -10:].mean(axis=1)
        above = BANK.astype(float) @ HUBS[0] > means
        assert error.reach == pytest.approx(above.mean(), abs=0.01)
    assert client.query(name, filter="id >= 5000", output_fields=["count(*)"]) == [{"count(*)": 0}]

    client.insert(name, rows[:20])
    assert client.query(name, filter="id >= 5000", output_fields=["count(*)"]) == [{"count(*)": 20}]


def test_an_upsert_cannot_turn_a_row_into_a_hub(shop):
    name, client = shop("refuse")
    with pytest.raises(HubRefused):
        client.upsert(name, rows_of(HUBS[:1], 7))
    [row] = client.get(name, ids=[7], output_fields=["vector"])
    assert np.allclose(row["vector"], ITEMS[7], atol=1e-5)


def test_warn_writes_the_row_and_logs_one_line(shop, caplog):
    name, client = shop("warn")
    with caplog.at_level(logging.WARNING, logger="milvus_hubness"):
        client.insert(name, rows_of(HUBS[:1], 9000) + rows_of(genuine(5), 5000))
    warnings = [record.getMessage() for record in caplog.records if "hub" in record.getMessage()]
    assert len(warnings) == 1
    assert "row 9000 of a write" in warnings[0]
    assert client.query(name, filter="id >= 5000", output_fields=["count(*)"]) == [{"count(*)": 6}]


def test_off_is_silent(shop, caplog):
    name, client = shop("off")
    with caplog.at_level(logging.WARNING, logger="milvus_hubness"):
        client.insert(name, rows_of(HUBS[:1], 9000))
    assert "hub" not in caplog.text


def test_genuine_rows_pass(shop):
    """The guard is set to stop one of a thousand; more than five would be there once in 1,700 times."""
    name, client = shop("refuse")
    rows = rows_of(genuine(1000), 5000)
    try:
        client.insert(name, rows)
    except HubRefused as refused:
        stopped = set(refused.rows)
        assert len(stopped) <= 5
        client.insert(name, [row for n, row in enumerate(rows) if n not in stopped])
    [found] = client.query(name, filter="id >= 5000", output_fields=["count(*)"])
    assert found["count(*)"] >= 995


def test_a_pending_bias_is_no_way_around_the_gate(shop):
    name, client = shop("refuse")
    with pytest.raises(InvalidParameter, match='bias="pending" would pass the hub guard'):
        client.insert(name, rows_of(HUBS[:1], 9000), bias="pending")


def test_a_refresh_measures_the_gallery_again(lite):
    name, client = guarded(lite, "refuse")
    before = state_of(lite, name).profile.evidence
    client.insert(name, rows_of(genuine(100), 5000))
    refresh(lite.store(), name)
    after = state_of(lite, name).profile.evidence
    assert (before.rows, after.rows) == (240, 340)

    refresh(lite.store(), name, Recipe(QueryBank(USERS), verdict="skip"), force=True)
    third = state_of(lite, name)
    assert third.on_hub == "refuse"
    assert third.profile.evidence not in (before, after)
    with pytest.raises(HubRefused):
        client.insert(name, rows_of(centroid(BANK), 9000))


def test_a_new_collection_is_guarded_from_its_first_refresh_on(lite):
    client, name = lite.hubness_client(), lite.name("new")
    config = CorrectionConfig(Recipe(BANK, on_hub="refuse"))
    client.create_collection(
        name, dimension=DIM, metric_type="COSINE", consistency_level="Strong", hubness=config
    )
    client.insert(name, rows_of(ITEMS))
    client.insert(name, rows_of(HUBS[:1], 9000))
    client.delete(name, ids=[9000])
    refresh(lite.store(), name)
    with pytest.raises(HubRefused):
        client.insert(name, rows_of(HUBS[:1], 9000))


def test_a_new_collection_with_reference_items_is_guarded_at_once(lite):
    client, name = lite.hubness_client(), lite.name("new")
    config = CorrectionConfig(Recipe(BANK, target_bank=ITEMS, on_hub="refuse", verdict="skip"))
    client.create_collection(name, dimension=DIM, metric_type="COSINE", hubness=config)
    with pytest.raises(HubRefused):
        client.insert(name, rows_of(HUBS[:1], 9000))


def test_a_side_collection_has_the_gate(lite):
    name = raw(lite)
    plan = plan_correction(
        lite.store(),
        name,
        Recipe(QueryBank(BANK), estimator=Blend(), on_hub="refuse", verdict="skip"),
        Beside(),
    )
    enable(lite.store(), plan, client_ttl=0)
    client = lite.hubness_client()
    with pytest.raises(HubRefused):
        client.insert(name, rows_of(HUBS[:1], 9000))
    client.insert(name, rows_of(genuine(5), 5000))


def test_the_guard_is_chosen_later(lite, shop):
    name, client = shop("off")
    done = guard_hubs(lite.store(), name, "refuse")
    assert (done.on_hub, done.by, done.measured_rows) == ("refuse", "reach", 240)
    with pytest.raises(HubRefused):
        client.insert(name, rows_of(HUBS[:1], 9000))
    guard_hubs(lite.store(), name, "off")
    client.insert(name, rows_of(HUBS[:1], 9000))


def test_an_action_that_does_not_exist_is_named(lite):
    name = raw(lite)
    store = lite.store()
    for call in (
        lambda: plan_correction(store, name, Recipe(QueryBank(BANK), on_hub="drop")),
        lambda: plan_correction(store, name, Recipe(QueryBank(BANK), on_hub="drop"), Beside()),
        lambda: CorrectionConfig(Recipe(BANK, on_hub="drop")),
        lambda: guard_hubs(store, name, "drop"),
    ):
        with pytest.raises(InvalidParameter, match="on_hub is one of") as refused:
            call()
        assert str(refused.value) == "on_hub is one of off, warn, refuse, not 'drop'"


@pytest.mark.parametrize("method", ["insert", "upsert"])
def test_what_is_refused_is_in_no_answer_and_the_other_rows_can_be_written(shop, method):
    name, client = shop("refuse")
    rows = rows_of(genuine(3), 5000) + rows_of(HUBS[:2], 9000) + rows_of(genuine(3, 8), 6000)
    with pytest.raises(HubRefused) as refused:
        getattr(client, method)(name, rows)
    assert refused.value.rows == (3, 4)

    others = [row for i, row in enumerate(rows) if i not in refused.value.rows]
    assert getattr(client, method)(name, others)[f"{method}_count"] == 6
    for options in ({}, {"strength": 0.0}):
        assert not {9000, 9001} & set(first_answers(client, name, **options))
    assert {row["id"] for row in client.query(name, "id >= 5000")} == {row["id"] for row in others}


def test_a_partial_update_cannot_turn_a_row_into_a_hub(shop):
    name, client = shop("refuse")
    with pytest.raises(HubRefused):
        client.upsert(name, [{"id": 7, "vector": HUBS[0]}], partial_update=True)
    [row] = client.get(name, ids=[7], output_fields=["vector"])
    assert np.allclose(row["vector"], ITEMS[7], atol=1e-5)


def test_the_asynchronous_client_has_the_guard(lite, shop):
    name, _ = shop("refuse")

    async def run():
        async with opened(lite) as client:
            with pytest.raises(HubRefused):
                await client.insert(name, rows_of(HUBS[:1], 9000))
            return (await client.insert(name, rows_of(genuine(2), 5000)))["insert_count"]

    assert asyncio.run(run()) == 2


def test_a_prior_does_not_hide_a_hub(lite, shop):
    name, _ = shop("refuse")
    correction = load_correction(lite.store(), state_of(lite, name), state_of(lite, name).profile)
    neutral = correction.of_written(HUBS, are_new=True, with_measures=True)[2]
    prior = Prior(source="field", field="sales", factor=1.0, weight=1.0)
    popular = replace(correction, prior=prior).of_written(
        HUBS, Items([1] * 5, [{"sales": 1e6}] * 5), are_new=True, with_measures=True
    )
    assert np.array_equal(popular[2].biases, neutral.biases)
    assert (popular[0] < neutral.biases).all()


def test_what_passes_the_guard_of_a_collection_with_kinds_is_no_hub_there(lite):
    """Queries less their mean have no common direction, in which a hub could lie for all of them."""
    client, name = lite.client(), raw(lite)
    kinds = ["photo", "text"]
    client.upsert(name, [{**row, "modality": kinds[row["id"] % 2]} for row in rows_of(ITEMS)])
    plan = plan_correction(
        lite.store(),
        name,
        Recipe(
            QueryBank(BANK), estimator=Blend(), kind="modality", on_hub="refuse", verdict="skip"
        ),
    )
    target = migrate(lite.store(), plan, MigrationOptions(no_writers=True)).target
    lite.made.append(target)
    ours = lite.hubness_client()
    refused = []
    for number, kind in enumerate([*kinds, "video"]):
        try:
            ours.insert(target, [{**rows_of(HUBS[number:], 90_000 + number)[0], "modality": kind}])
        except HubRefused as error:
            refused.append(error)
    for strength in (1, 0):
        found = first_answers(ours, target, strength=strength)
        assert np.mean(np.array(found) >= 90_000) < 0.02
    assert np.mean(np.array(first_answers(ours, target, strength=0, kinds=0)) >= 90_000) > 0.3

    # The limit is that of the rows less the mean of their kind.
    store = lite.store()
    state = store.info(target).state
    numbers = np.arange(len(ITEMS)) % 2
    correction = load_correction(store, state, state.profile)
    by_kind = correction.measured(ITEMS, numbers).evidence.limit
    assert state.profile.evidence.limit == pytest.approx(by_kind, rel=1e-3)
    passing = [{**row, "modality": kinds[row["id"] % 2]} for row in rows_of(genuine(30), 91_000)]
    assert ours.insert(target, passing)["insert_count"] == 30
