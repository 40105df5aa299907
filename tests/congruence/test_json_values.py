"""JSON fields with values of every kind that a server takes: jobs keep the rows as they are."""

import json

import numpy as np
import pytest
from pymilvus import DataType
from pymilvus.exceptions import MilvusException

from milvus_hubness import (
    NNN,
    Beside,
    QueryBank,
    Recipe,
    StoreError,
    enable,
    migrate,
    plan_correction,
    refresh,
)
from milvus_hubness.milvus.client.messages import Write
from milvus_hubness.milvus.proxy.columns import rows_of
from tests.support.aliases import aliased
from tests.support.galleries import vectors
from tests.support.json_rows import DYNAMIC, JSON_VALUES, encoded, schema, sent

DIM, FILLERS = 8, 40
BANK = QueryBank(vectors(np.random.default_rng(2), 40, DIM))


def filled(backend):
    """A collection with a row for each value that the server takes and a plain client can read."""
    client, name = backend.client(), backend.name("json")
    made = client.create_schema(enable_dynamic_field=True)
    made.add_field("id", DataType.INT64, is_primary=True)
    made.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    made.add_field("document", DataType.JSON)
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="COSINE")
    client.create_collection(name, schema=made, index_params=index, consistency_level="Strong")
    items = vectors(np.random.default_rng(1), FILLERS + len(JSON_VALUES), DIM)
    client.insert(
        name, [{"id": i, "vector": items[i], "document": {"n": i}} for i in range(FILLERS)]
    )
    for key, value in enumerate(JSON_VALUES.values(), FILLERS):
        row = {"id": key, "vector": items[key], "document": encoded(value), **DYNAMIC}
        try:
            client.insert(name, row)
            documents(client, name, f"id == {key}")
        except MilvusException:
            continue
        except json.JSONDecodeError:
            client.delete(name, filter=f"id == {key}")
    return client, name


def documents(client, name, where="id >= 0"):
    rows = client.query(name, where, output_fields=["id", "document", *DYNAMIC])
    return {
        row["id"]: {field: value for field, value in row.items() if field != "id"} for row in rows
    }


@pytest.mark.parametrize("how", ["migrate", pytest.param("enable", marks=pytest.mark.lite_only)])
def test_jobs_keep_json_values_as_they_are(backend, how):
    client, name = filled(backend)
    store, corrected = backend.store(), backend.hubness_client()
    before = documents(client, name)
    assert len(before) >= FILLERS + (5 if backend.is_lite else 2)
    if how == "migrate":
        name = migrate(store, plan_correction(store, name, Recipe(BANK, estimator=NNN(8)))).target
        name = aliased(store, name)
    else:
        enable(
            store,
            plan_correction(store, name, Recipe(BANK, estimator=NNN(8)), Beside()),
            client_ttl=0,
        )
    assert documents(corrected, name) == before

    other = QueryBank(vectors(np.random.default_rng(3), 40, DIM))
    done = refresh(store, name, other, force=True, client_ttl=0)
    assert (done.action, done.written) == ("full", len(before))
    assert documents(corrected, name) == before


def test_a_text_that_milvus_lite_cannot_return_is_reported_in_one_line(lite):
    client, name = filled(lite)
    client.insert(name, {"id": 999, "vector": [1.0] * DIM, "document": json.dumps("hello")})
    with pytest.raises(
        StoreError, match=f"a JSON field of '{name}' has a text that Milvus Lite returns"
    ) as raised:
        plan_correction(lite.store(), name, BANK)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value", JSON_VALUES.values(), ids=JSON_VALUES)
def test_the_proxy_hands_json_values_on_as_they_came(value):
    """While a job works, the proxy writes row by row."""
    described = schema(nullable=False)
    described["fields"] = [
        field for field in described["fields"] if field["name"] in ("id", "document")
    ]
    columns = sent({"id": 1, "document": encoded(value), **DYNAMIC}, described)
    [row] = Write("insert", "c", rows_of(columns, 1)).rows
    again = sent(row, described)
    assert [column.SerializeToString() for column in again] == [
        column.SerializeToString() for column in columns
    ]
