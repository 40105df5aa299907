"""What cannot be copied names the way on that there is."""

from types import SimpleNamespace

import pytest
from pymilvus import DataType

from milvus_hubness.jobs.store.records import VectorField
from milvus_hubness.milvus.store import schema as milvus_schema

KEY = {"name": "id", "type": DataType.INT64, "is_primary": True, "params": {}}
VECTOR = {"name": "vector", "type": DataType.FLOAT_VECTOR, "params": {"dim": 8}}
STRUCTS = {
    "name": "chunks",
    "type": DataType.ARRAY,
    "params": {},
    "struct_fields": [{"name": "text"}],
}


def source(*fields, **key):
    schema = {"fields": [{**KEY, **key}, VECTOR, *fields], "auto_id": key.get("auto_id", False)}
    vector = VectorField("vector", 8, "IP", "HNSW")
    return SimpleNamespace(name="lcjs", schema=schema, vector_fields={"vector": vector}, states={})


def test_enable_is_the_way_on_for_what_only_a_copy_cannot_have():
    [reason] = milvus_schema.obstacles(source(auto_id=True), "vector", "", lite=False)
    assert reason.endswith(": milvus-hubness enable corrects without a copy")


@pytest.mark.parametrize("fields", [[], [STRUCTS]], ids=["plain", "structs"])
def test_what_can_be_copied_has_no_obstacle(fields):
    assert milvus_schema.obstacles(source(*fields), "vector", "", lite=False) == []
