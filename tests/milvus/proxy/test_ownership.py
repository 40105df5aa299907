"""A client behind the proxy, of a collection whose properties a stranger has written: nothing else is harmed."""

import json

import numpy as np
import pytest
from pymilvus import MilvusException

from milvus_hubness import NNN
from milvus_hubness.jobs.store.records import (
    DUAL_WRITE_PROPERTY,
    DualWrite,
)
from tests.support.born import born
from tests.support.galleries import plain_collection, vectors

DIM, ITEMS = 6, 20


@pytest.fixture
def collections(lite):
    """A client behind the proxy, a plain one, and two plain collections."""
    plain = lite.client()
    names = lite.name("public"), lite.name("private")
    for name in names:
        plain_collection(plain, name, vectors(np.random.default_rng(1), ITEMS, DIM), "IP")
    return lite.hubness_client(), plain, *names


def rows_of(client, name):
    rows = client.query(
        name, filter="id >= 0", output_fields=["*"], limit=1_000, consistency_level="Strong"
    )
    return sorted(repr(sorted(row.items())) for row in rows)


CALLS = {
    "delete by filter": lambda client, name: client.delete(name, filter="id < 5"),
    "delete by ids": lambda client, name: client.delete(name, ids=[1, 2]),
    "insert": lambda client, name: client.insert(
        name, [{"id": 90, "vector": [1.0] * DIM, "group": 1}]
    ),
    "upsert": lambda client, name: client.upsert(
        name, [{"id": 1, "vector": [1.0] * DIM, "group": 1}]
    ),
}
PROPERTIES = {
    "a copy": lambda name: {DUAL_WRITE_PROPERTY: DualWrite(collection=name).model_dump_json()},
    "a required copy": lambda name: {
        DUAL_WRITE_PROPERTY: DualWrite(collection=name, required=True).model_dump_json()
    },
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("named", PROPERTIES)
def test_a_property_that_names_another_collection_harms_nothing(collections, named, call):
    client, plain, public, private = collections
    before = rows_of(plain, private)
    plain.alter_collection_properties(public, PROPERTIES[named](private))
    if named == "a copy":
        CALLS[call](client, public)
    else:
        with pytest.raises(MilvusException, match=f"names '{private}'"):
            CALLS[call](client, public)
    assert rows_of(plain, private) == before


def test_no_bank_of_another_collection_is_read(lite):
    plain, client = lite.client(), lite.hubness_client()
    items, bank = vectors(np.random.default_rng(1), ITEMS, DIM), np.eye(DIM, dtype=np.float32)
    public, private = (born(lite, items, bank, estimator=NNN(2)) for _ in range(2))
    state = json.loads(plain.describe_collection(public)["properties"]["hubness"])
    rows = [{"id": 90, "vector": [1.0] * DIM, "group": 1}]
    client.insert(public, rows)

    for profile in state["profiles"].values():
        profile["bank"]["collection"] = f"{private}__bank"
    plain.alter_collection_properties(public, {"hubness": json.dumps(state)})
    with pytest.raises(MilvusException, match=f"names the bank '{private}__bank'"):
        lite.hubness_client().insert(public, [{**rows[0], "id": 91}])
    assert not plain.query(public, filter="id == 91", consistency_level="Strong")
