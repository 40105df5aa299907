"""A prior in Milvus: biases outside the vectors, collections that begin with one, fields of the schema."""

import numpy as np
import pytest
from pymilvus import DataType

from milvus_hubness import (
    NNN,
    Beside,
    CorrectionConfig,
    InvalidInput,
    MilvusStore,
    QueryBank,
    Recipe,
    enable,
    plan_correction,
    refresh,
    status,
)
from milvus_hubness.jobs.common.stored_biases import StoredBiases
from tests.support.galleries import nnn, plain_collection, vectors
from tests.support.recipes import as_plan

DIM, ITEMS, LAMBDA = 12, 60, 0.3


@pytest.fixture
def world():
    rng = np.random.default_rng(6)
    items, bank = vectors(rng, ITEMS, DIM), vectors(rng, 50, DIM)
    clicks = rng.zipf(1.6, ITEMS).clip(max=1e6).astype(float)
    clicks[::5] = 0
    return items, bank, clicks


def stored(store, name):
    info = store.info(name)
    rows = StoredBiases(store, info, info.state).read(list(range(ITEMS)), None)
    return rows.biases[:, info.state.profile.slot]


def wanted(store, name, world):
    items, bank, clicks = world
    factor = LAMBDA * np.sqrt((bank.astype(float) @ items.T).var(axis=1).mean())
    prior = factor * np.log(clicks + clicks.mean() / 3)
    neutral = nnn(bank, items, "IP", 8, 0.75) - store.info(name).state.profile.mean_bias
    return neutral - (prior - prior.mean())


def rows_of(world, **changes):
    items, _, clicks = world
    return [
        {"id": i, "vector": items[i], "group": 1, "clicks": int(clicks[i]), **changes}
        for i in range(ITEMS)
    ]


@pytest.mark.lite_only
def test_biases_outside_the_vectors_have_the_prior_too(backend, world):
    items, bank, clicks = world
    name, client = backend.name(), backend.client()
    plain_collection(client, name, items, "IP")
    client.upsert(name, rows_of(world))

    store = backend.store()
    options = {"prior": "clicks", "prior_weight": LAMBDA}
    plan = plan_correction(
        store, name, **as_plan(QueryBank(bank), Beside, estimator=NNN(8), **options)
    )
    assert plan.to_dict()["prior"]["field"] == "clicks"
    enable(store, plan, client_ttl=0)
    np.testing.assert_allclose(stored(store, name), wanted(store, name, world), atol=2e-5)

    ours = backend.hubness_client()
    ours.upsert(name, rows_of(world)[:9])
    np.testing.assert_allclose(stored(store, name), wanted(store, name, world), atol=2e-5)
    query = vectors(np.random.default_rng(9), 1, DIM)
    [hits] = ours.search(name, data=list(query), limit=10)
    scores = query[0].astype(float) @ items.T - wanted(store, name, world)
    assert [hit["id"] for hit in hits] == np.argsort(-scores)[:10].tolist()

    world = items, bank, clicks[::-1].copy()
    ours.upsert(name, rows_of(world), partial_update=True)
    ours.upsert(name, [{"id": 3, "clicks": 50_000}], partial_update=True)
    world[2][3] = 50_000
    assert refresh(store, name, client_ttl=0).action == "full"
    np.testing.assert_allclose(stored(store, name), wanted(store, name, world), atol=2e-5)


@pytest.mark.lite_only
def test_a_collection_begins_with_a_prior(backend, world):
    _, bank, _ = world
    name, client = backend.name(), backend.hubness_client()
    hubness = CorrectionConfig(Recipe(bank, estimator=NNN(8), prior="clicks", prior_weight=LAMBDA))
    client.create_collection(name, DIM, metric_type="IP", hubness=hubness)
    rows = [{key: row[key] for key in ("id", "vector", "clicks")} for row in rows_of(world)]
    with pytest.raises(InvalidInput, match=r"^row 0 has a 'clicks' that is negative"):
        client.insert(name, [{**rows[0], "clicks": -1}])
    client.insert(name, rows)

    store = backend.store()
    assert status(store, name).prior["factor"] == 0, "its values have no scale yet"
    assert refresh(store, name, client_ttl=0, rename=True).action == "full"
    np.testing.assert_allclose(stored(store, name), wanted(store, name, world), atol=2e-5)


@pytest.mark.lite_only
def test_a_field_that_holds_no_numbers_is_refused(backend, world):
    items, bank, _ = world
    name, client = backend.name(), backend.client()
    schema = client.create_schema(enable_dynamic_field=False)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    schema.add_field("title", DataType.VARCHAR, max_length=20)
    schema.add_field("sales", DataType.DOUBLE)
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="IP")
    for prior, message in {
        "title": "field 'title' of '.*' is VARCHAR, not a number: choose a field of numbers",
        "salse": r"has no field 'salse': choose a field of numbers \(id, sales\)",
    }.items():
        hubness = CorrectionConfig(Recipe(bank, estimator=NNN(8), prior=prior))
        with pytest.raises(InvalidInput, match=message):
            backend.hubness_client().create_collection(
                name, schema=schema, index_params=index, hubness=hubness
            )
        assert not client.has_collection(name)

    client.create_collection(name, schema=schema, index_params=index)
    client.insert(
        name,
        [
            {"id": i, "vector": vector, "title": "", "sales": 1.0 + i}
            for i, vector in enumerate(items)
        ],
    )
    before = sorted(client.list_collections())
    for prior, message in {
        "title": "is VARCHAR, not a number",
        "salse": "has no field 'salse'",
    }.items():
        with pytest.raises(InvalidInput, match=message):
            plan_correction(backend.store(), name, Recipe(QueryBank(bank), prior=prior))
    assert sorted(client.list_collections()) == before


@pytest.mark.lite_only
def test_a_value_that_changes_while_its_bias_is_written_counts(backend, world):
    items, bank, clicks = world
    name, client = backend.name(), backend.client()
    plain_collection(client, name, items, "IP")
    client.upsert(name, rows_of(world))
    store, ours = backend.store(), backend.hubness_client()
    options = {"prior": "clicks", "prior_weight": LAMBDA}
    plan = plan_correction(
        store, name, **as_plan(QueryBank(bank), Beside, estimator=NNN(8), **options)
    )
    enable(store, plan, client_ttl=0)
    side = store.info(name).state.codec.sides[1]

    class Meanwhile(MilvusStore):
        """A client writes a row, with the same vector, after the job has read it."""

        is_written = False

        def upsert(self, collection, batch, field, **options):
            if collection == side and not self.is_written:
                type(self).is_written = True
                ours.upsert(name, [{**rows_of(world)[3], "clicks": 4_000}])
            super().upsert(collection, batch, field, **options)

    refresh(Meanwhile(backend.client()), name, Recipe(prior_weight=0.1), client_ttl=0)
    assert Meanwhile.is_written
    prior = store.info(name).state.profile.prior
    numbers = stored(store, name)
    neutral = nnn(bank, items, "IP", 8, 0.75)
    moved = prior.factor * (np.log(4_000 + prior.added) - np.log(clicks[4] + prior.added))
    assert numbers[3] - numbers[4] == pytest.approx(neutral[3] - neutral[4] - moved, abs=1e-5)
