"""What cannot be copied names the way on that there is."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from pymilvus import DataType, MilvusClient

from milvus_hubness import (
    NNN,
    Beside,
    CannotMigrate,
    CorrectionConfig,
    HubnessClient,
    InvalidInput,
    InvalidParameter,
    MilvusStore,
    QueryBank,
    Recipe,
    plan_correction,
)
from milvus_hubness.jobs.store.records import VectorField
from milvus_hubness.milvus.store import schema as milvus_schema
from qdrant_hubness.store import QdrantStore
from tests.support.galleries import plain_collection, vectors

KEY = {"name": "id", "type": DataType.INT64, "is_primary": True, "params": {}}
VECTOR = {"name": "vector", "type": DataType.FLOAT_VECTOR, "params": {"dim": 8}}
STRUCTS = {
    "name": "chunks",
    "type": DataType.ARRAY,
    "params": {},
    "struct_fields": [{"name": "text", "type": DataType.VARCHAR}],
}
RNG = np.random.default_rng(0)
BANK = QueryBank(vectors(RNG, 20, 8))


def source(**key):
    schema = {"fields": [{**KEY, **key}, VECTOR], "auto_id": key.get("auto_id", False)}
    vector = VectorField("vector", 8, "IP", "HNSW")
    return SimpleNamespace(name="lcjs", schema=schema, vector_fields={"vector": vector}, states={})


def test_enable_is_the_way_on_for_what_only_a_copy_cannot_have():
    [reason] = milvus_schema.obstacles(source(auto_id=True), "vector", "", lite=False)
    assert reason.startswith("auto_id: on this server no upsert keeps the key of its row")
    assert reason.endswith(": milvus-hubness enable corrects without a copy")


def test_what_a_copy_is_made_from_fits_a_record_of_the_ledger_with_thousands_of_partitions():
    """The record of a migration has it, to see whether it has changed; a body has 65,535 bytes."""
    names = tuple(f"{number:04}{'x' * 60}" for number in range(4_096))
    partitioned = source()
    partitioned.time_to_live = 0

    def facts(partitions):
        partitioned.partitions = partitions
        return milvus_schema.facts(partitioned)

    assert len(json.dumps(facts(names))) < 10_000
    assert facts(names) == facts(names[::-1])
    assert facts(names) != facts(names[1:])
    assert facts((None,)) == facts(())


def test_what_can_be_copied_has_no_obstacle():
    assert milvus_schema.obstacles(source(), "vector", "", lite=False) == []


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        ("", "field 'photo' has no index, so its metric is unknown: create an index first"),
        ("HAMMING", "field 'photo': metric 'HAMMING' cannot be corrected: use one of IP, COSINE"),
    ],
)
def test_a_field_without_a_metric_that_can_be_corrected_is_named(metric, reason):
    """By all commands: those that read its obstacles, and those that compare its vectors."""
    field = VectorField("photo", 8, metric, "")
    assert [text[: len(reason)] for text in field.obstacles] == [reason]
    for use in (lambda: field.plain_layout, lambda: field.width_of_copy(8)):
        with pytest.raises(InvalidParameter) as refused:
            use()
        assert str(refused.value).startswith(reason)


@pytest.mark.parametrize(
    ("name", "on_milvus", "on_qdrant"),
    [
        ("live", True, True),
        ("_l1", True, True),
        ("bad alias!", False, True),
        ("my-products", False, True),
        ("1st", False, True),
        ("a/b", False, False),
        ("a\x1fb", False, False),
        ("", False, False),
        ("a" * 256, False, False),
    ],
)
def test_names_of_new_collections_and_aliases(name, on_milvus, on_qdrant):
    for store, takes in ((MilvusStore, on_milvus), (QdrantStore, on_qdrant)):
        if takes:
            store.validate_name(object(), name)
            continue
        with pytest.raises(InvalidParameter, match="is no name for a collection or alias"):
            store.validate_name(object(), name)


class WithStructs(MilvusClient):
    """A client of a server whose collections have a field with arrays of structs."""

    def describe_collection(self, collection_name, timeout=None, **options):
        described = super().describe_collection(collection_name, timeout, **options)
        return {**described, "fields": [*described["fields"], STRUCTS]}


@pytest.fixture
def shop(tmp_path):
    """A store with a collection that has such a field."""
    client = WithStructs(str(tmp_path / "milvus.db"))
    plain_collection(client, "shop", vectors(RNG, 60, 8), "IP")
    return MilvusStore(client)


def test_arrays_of_structs_are_neither_copied_nor_rewritten(shop):
    with pytest.raises(CannotMigrate) as refused:
        plan_correction(shop, "shop", Recipe(BANK, estimator=NNN(4)))
    assert str(refused.value) == (
        "'shop' cannot be migrated: field 'chunks' has arrays of structs, which are not supported: "
        "milvus-hubness enable corrects without a copy"
    )

    plan = plan_correction(shop, "shop", Recipe(BANK, estimator=NNN(4)), Beside())
    assert plan.body.sides == ("shop__bias_a", "shop__bias_b")


def test_a_new_collection_with_arrays_of_structs_is_corrected_later(tmp_path):
    client = HubnessClient(str(tmp_path / "milvus.db"))
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=8)
    chunk = client.create_struct_field_schema()
    chunk.add_field("text", DataType.VARCHAR, max_length=10)
    schema.add_field(
        "chunks", DataType.ARRAY, element_type=DataType.STRUCT, struct_schema=chunk, max_capacity=4
    )

    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="IP")
    with pytest.raises(InvalidInput, match="'chunks' has arrays of structs"):
        client.create_collection(
            "shop", schema=schema, index_params=index, hubness=CorrectionConfig(BANK)
        )
    client.close()
