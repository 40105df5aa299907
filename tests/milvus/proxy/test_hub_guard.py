"""The hub guard for clients of the proxy, which know nothing of it."""

from dataclasses import replace

import numpy as np
import pytest
from pymilvus.exceptions import MilvusException

from milvus_hubness import Blend, MigrationOptions, QueryBank, migrate, plan_migration
from milvus_hubness.jobs.common.bias_backends import BiasBackend
from milvus_hubness.jobs.common.corrections import load_correction
from tests.support.planted import DIM, centroid, gallery, genuine

ITEMS, BANK, USERS = gallery()
HUBS = centroid(USERS, 2)


def rows_of(items, first):
    return [{"id": first + i, "vector": item.tolist()} for i, item in enumerate(items)]


@pytest.fixture
def shop(lite):
    client, name = lite.client(), lite.name()
    client.create_collection(name, dimension=DIM, metric_type="COSINE", consistency_level="Strong")
    client.insert(name, rows_of(ITEMS, 0))
    plan = plan_migration(
        lite.store(), name, QueryBank(BANK), estimator=Blend(), on_hub="refuse", verdict="skip"
    )
    return migrate(lite.store(), plan, MigrationOptions(no_writers=True)).target


def test_a_hub_is_refused_with_its_key(lite, shop):
    client = lite.hubness_client()
    with pytest.raises(MilvusException, match="row 9000, 9001 of a write"):
        client.insert(shop, rows_of(genuine(3), 5000) + rows_of(HUBS, 9000))
    assert client.get(shop, ids=[5000, 9000]) == []
    with pytest.raises(MilvusException, match="row 7 of a write"):
        client.upsert(shop, rows_of(HUBS[:1], 7))
    assert client.insert(shop, rows_of(genuine(3), 5000))["insert_count"] == 3


def test_a_hub_that_is_let_in_gets_the_bias_that_a_job_would_store(lite):
    client, name = lite.client(), lite.name()
    client.create_collection(name, dimension=DIM, metric_type="COSINE", consistency_level="Strong")
    client.insert(name, rows_of(ITEMS, 0))
    plan = plan_migration(
        lite.store(), name, QueryBank(BANK), estimator=Blend(), on_hub="warn", verdict="skip"
    )
    plan = replace(plan, strength=0.5)
    shop = migrate(lite.store(), plan, MigrationOptions(no_writers=True)).target
    proxied = lite.hubness_client()
    proxied.insert(shop, rows_of(HUBS, 9000))

    store = lite.store()
    state = store.info(shop).state_of(None)
    correction = load_correction(store, state, state.profile)
    rows = BiasBackend(store, store.info(shop), state).read([9000, 9001], None)
    expected, _ = correction.of_rows(HUBS, are_new=True)
    plain, _ = replace(correction, hub_strength=None).of_rows(HUBS, are_new=True)
    assert rows.biases[:, state.profile.slot] == pytest.approx(expected, rel=1e-5)
    assert (expected > 2 * plain).all()

    queries = [query.tolist() for query in USERS]
    hits = proxied.search(shop, data=queries, limit=10)
    assert np.mean([any(row["id"] >= 9000 for row in answers) for answers in hits]) < 0.05
