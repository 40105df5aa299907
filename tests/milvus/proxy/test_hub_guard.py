"""The hub guard for clients of the proxy, which know nothing of it."""

import pytest
from pymilvus.exceptions import MilvusException

from milvus_hubness import Blend, MigrationOptions, QueryBank, Recipe, migrate, plan_correction
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
    plan = plan_correction(
        lite.store(),
        name,
        Recipe(QueryBank(BANK), estimator=Blend(), on_hub="refuse", verdict="skip"),
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
