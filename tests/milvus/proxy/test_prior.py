"""Rows that come through the proxy store the same bias and prior as those of HubnessClient."""

import numpy as np
import pytest
from pymilvus import DataType
from pymilvus.exceptions import MilvusException

from milvus_hubness import NNN, QueryBank, migrate, plan_correction, status
from tests.support.galleries import plain_collection, vectors
from tests.support.recipes import as_plan

DIM, ITEMS = 10, 40


@pytest.mark.lite_only
@pytest.mark.parametrize("prior", ["sales", "clicks", "by key"])
def test_a_write_through_the_proxy_is_that_of_a_client(backend, prior):
    """A field of the schema, a dynamic one, and clicks that are stored with the bank."""
    rng = np.random.default_rng(4)
    items, bank = vectors(rng, ITEMS, DIM), vectors(rng, 50, DIM)
    clicks = rng.zipf(1.6, ITEMS).clip(max=10_000)
    source = backend.name()
    field = ("sales", DataType.INT64, {"default_value": 3})
    plain_collection(backend.client(), source, items, "IP", fields=[field])
    rows = [
        {"id": i, "vector": items[i], "group": 1, "sales": int(n), "clicks": float(n)}
        for i, n in enumerate(clicks)
    ]
    rows[3].pop("clicks")
    backend.client().upsert(source, rows)

    store = backend.store()
    counts = dict(enumerate(clicks.tolist()))
    options = {"prior": counts if prior == "by key" else prior, "prior_weight": 0.3}
    plan = plan_correction(store, source, **as_plan(QueryBank(bank), estimator=NNN(8), **options))
    name = migrate(store, plan, no_writers=True).target
    assert status(store, name).prior["factor"] > 0

    def stored():
        state = store.info(name).state
        batch = store.get(name, list(range(ITEMS)), "vector")
        return state.codec.read_biases({"vector": batch.vectors})[:, : state.slots]

    before = stored()
    ours, foreign = backend.hubness_client().behind, backend.hubness_client()
    moved = [{**row, "sales": 900, "clicks": 900.0} for row in rows[:20]]
    written = {}
    for client in (ours, foreign):
        client.upsert(name, rows)
        np.testing.assert_allclose(stored(), before, atol=1e-5)
        client.upsert(name, moved)
        written[client] = stored()
    np.testing.assert_allclose(written[foreign], written[ours], atol=1e-5)
    if prior != "by key":
        assert (written[foreign][:20] < before[:20] - 0.01).any(), "popular rows rank higher"

    # A part of a row, without the value that goes with its vector.
    foreign.upsert(name, rows)
    foreign.upsert(name, [{"id": 5, "vector": items[5]}], partial_update=True)
    np.testing.assert_allclose(stored(), before, atol=1e-5)

    if prior == "by key":
        return
    for value in (-2, "many") if prior == "clicks" else (-2,):
        message = f"row 1 has a '{prior}' that is "
        with pytest.raises(MilvusException, match=message):
            foreign.upsert(name, [rows[0], {**rows[1], prior: value}])
    np.testing.assert_allclose(stored(), before, atol=1e-5)
