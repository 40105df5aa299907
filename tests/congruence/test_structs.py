"""Arrays of structs next to a corrected vector: jobs copy them, and clients write, read and search them as before.

On Milvus 2.6.4 and newer, and on a Milvus Lite with structs that answers requests as pymilvus encodes them: see
tests/support/structs.py.
"""

import numpy as np
import pytest
from pymilvus import DataType, MilvusClient
from pymilvus.client.embedding_list import EmbeddingList
from pymilvus.client.prepare import Prepare
from pymilvus.exceptions import MilvusException

from milvus_hubness import (
    NNN,
    CorrectionConfig,
    MilvusStore,
    QueryBank,
    enable,
    migrate,
    plan_enable,
    plan_migration,
    refresh,
)
from milvus_hubness.errors import CannotMigrate
from milvus_hubness.milvus.proxy.columns import rows_of
from tests.support.galleries import vectors

DIM, TOKEN, ROWS = 8, 4, 60
BANK = QueryBank(vectors(np.random.default_rng(2), 40, DIM))


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def schema_of(nullable=False):
    schema = MilvusClient.create_schema(enable_dynamic_field=True)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    chunks = MilvusClient.create_struct_field_schema()
    chunks.add_field("text", DataType.VARCHAR, max_length=99, mmap_enabled=False)
    chunks.add_field("page", DataType.INT32)
    chunks.add_field("share", DataType.DOUBLE)
    chunks.add_field("seen", DataType.BOOL)
    chunks.add_field("embedding", DataType.FLOAT_VECTOR, dim=TOKEN)
    chunks.add_field("half", DataType.FLOAT16_VECTOR, dim=TOKEN)
    struct = {"element_type": DataType.STRUCT, "struct_schema": chunks, "max_capacity": 9}
    schema.add_field("chunks", DataType.ARRAY, **struct, mmap_enabled=True, nullable=nullable)
    # A second one, whose sub-field has the name of one of the first.
    marks = MilvusClient.create_struct_field_schema()
    marks.add_field("text", DataType.VARCHAR, max_length=20)
    struct = {"element_type": DataType.STRUCT, "struct_schema": marks, "max_capacity": 3}
    schema.add_field("marks", DataType.ARRAY, **struct)
    return schema


def indexes():
    params = MilvusClient.prepare_index_params("vector", index_type="FLAT", metric_type="COSINE")
    params.add_index(
        "chunks[embedding]", index_type="HNSW", metric_type="MAX_SIM_IP", params={"M": 8}
    )
    return params


def element(rng, text):
    return {
        "text": text,
        "page": int(rng.integers(0, 9)),
        "share": float(rng.random()),
        "seen": bool(rng.integers(0, 2)),
        "embedding": rng.normal(size=TOKEN).astype(np.float32).tolist(),
        "half": rng.normal(size=TOKEN).astype(np.float16),
    }


def row_of(rng, key, vector):
    """Rows with no element, with one, and with several, some of which are alike."""
    elements = [element(rng, f"{key}.{i} “ü”") for i in range(key % 5)]
    return {
        "id": key,
        "vector": vector.tolist(),
        "chunks": elements + elements[:1],
        "marks": [{"text": f"m{key}"}] * (key % 3),
        "group": key % 4,
    }


def filled(place, rng):
    client, name = place.client(), place.name("structs")
    client.create_collection(
        name, schema=schema_of(), index_params=indexes(), consistency_level="Strong"
    )
    items = vectors(np.random.default_rng(1), ROWS, DIM)
    client.insert(name, [row_of(rng, key, item) for key, item in enumerate(items)])
    return client, name


def contents(client, name):
    rows = client.query(name, "id >= 0", output_fields=["id", "chunks", "marks", "group"])
    return {row["id"]: {k: comparable(v) for k, v in row.items()} for row in rows}


def comparable(value):
    """Vectors as lists: a query returns those of two bytes as numbers of NumPy."""
    if isinstance(value, list):
        return [comparable(each) for each in value]
    if isinstance(value, dict):
        return {name: comparable(each) for name, each in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def hits_of(client, name, query, **options):
    found = client.search(
        name, data=[EmbeddingList(query)], anns_field="chunks[embedding]", limit=9, **options
    )
    return [(hit["id"], pytest.approx(hit["distance"], abs=1e-5)) for hit in found[0]]


def described(client, name):
    fields = client.describe_collection(name)["fields"]
    return {field["name"]: without_ids(field) for field in fields if field.get("struct_fields")}


def without_ids(value):
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    if isinstance(value, dict):
        return {name: without_ids(each) for name, each in value.items() if name != "field_id"}
    return value


@pytest.fixture
def migrated(place, rng):
    client, source = filled(place, rng)
    store = place.store()
    plan = plan_migration(store, source, BANK, field="vector", estimator=NNN(8))
    return client, source, migrate(store, plan).target


def test_a_copy_has_the_struct_fields_their_settings_and_indexes(migrated):
    client, source, copy = migrated
    assert described(client, copy) == described(client, source)
    settings = client._get_connection().describe_collection(copy)["struct_array_fields"]
    assert {struct["name"]: struct.get("params") for struct in settings} == {
        "chunks": {"mmap_enabled": True},
        "marks": None,
    }
    assert client.describe_index(copy, "chunks[embedding]")["metric_type"] == "MAX_SIM_IP"
    assert str(client.describe_index(copy, "chunks[embedding]")["M"]) == "8"


def test_a_copy_has_the_structs_of_each_row(place, migrated):
    client, source, copy = migrated
    before = contents(client, source)
    assert len(before) == ROWS
    assert not before[0]["chunks"]
    assert len(before[4]["chunks"]) == 5
    assert contents(place.hubness_client(), copy) == before
    assert contents(client, copy) == before


def test_a_refresh_keeps_the_structs_of_each_row(place, migrated):
    client, source, copy = migrated
    other = QueryBank(vectors(np.random.default_rng(3), 40, DIM))
    done = refresh(place.store(), copy, bank=other, force=True, client_ttl=0)
    assert (done.action, done.written) == ("full", ROWS)
    assert contents(client, copy) == contents(client, source)


def test_a_rebuild_keeps_them(place, rng):
    """The copy is the source of the next one, by what the server says of it."""
    client, source = filled(place, rng)
    store, alias = place.store(), place.name("live")
    before = contents(client, source)
    plan = plan_migration(store, source, BANK, field="vector", estimator=NNN(8), alias=alias)
    first = migrate(store, plan).target
    other = QueryBank(vectors(np.random.default_rng(3), 40, DIM))
    done = refresh(store, alias, bank=other, force=True, client_ttl=0, rebuild_rows=1)
    second = client.describe_collection(alias)["collection_name"]
    place.made.append(second)
    assert done.action == "rebuilt"
    assert second != first
    assert described(client, second) == described(client, source)
    assert contents(place.hubness_client(), alias) == before


def test_biases_in_a_side_collection_leave_the_structs_alone(place, rng):
    client, name = filled(place, rng)
    before = contents(client, name)
    store = place.store()
    plan = plan_enable(store, name, BANK, field="vector", estimator=NNN(8), where="side_collection")
    enable(store, plan, client_ttl=0)
    assert contents(place.hubness_client(), name) == before


def test_a_client_searches_the_structs_as_before(place, migrated, rng):
    client, source, copy = migrated
    query = rng.normal(size=(3, TOKEN)).astype(np.float32)
    corrected = place.hubness_client()
    assert hits_of(corrected, copy, query) == hits_of(client, source, query)
    options = {"filter": "group == 2"}
    wanted = hits_of(client, source, query, **options)
    assert len(wanted) == 9
    assert hits_of(corrected, copy, query, **options) == wanted


def test_corrected_hits_have_their_structs(place, migrated, rng):
    client, source, copy = migrated
    before = contents(client, source)
    query = vectors(rng, 1, DIM)
    [hits] = place.hubness_client().search(
        copy, data=query, anns_field="vector", limit=9, output_fields=["chunks", "vector"]
    )
    assert len(hits) == 9
    for hit in hits:
        assert comparable(hit["entity"]["chunks"]) == before[hit["id"]]["chunks"]
        assert len(hit["entity"]["vector"]) == DIM


@pytest.mark.parametrize("method", ["insert", "upsert"])
def test_a_client_writes_rows_with_structs(place, migrated, rng, method):
    client, source, copy = migrated
    items = vectors(rng, 6, DIM)
    rows = [row_of(rng, key, item) for key, item in enumerate(items, ROWS)]
    corrected = place.hubness_client()
    getattr(corrected, method)(copy, rows)
    getattr(client, method)(source, rows)
    written = [row["id"] for row in rows]
    before, after = contents(client, source), contents(corrected, copy)
    assert len(after) == ROWS + 6
    assert [after[key] for key in written] == [before[key] for key in written]
    # They are corrected: all rows have a bias.
    [found] = corrected.search(copy, data=items[:1], anns_field="vector", limit=ROWS + 6)
    assert set(written) <= {hit["id"] for hit in found}


def test_milvus_lite_that_would_drop_a_struct_field_is_refused(lite):
    """Lite 3.2.2 creates a collection without it, and without an error."""
    client, name = lite.client(), lite.name("lost")
    client.create_collection(name, schema=schema_of())
    assert not described(client, name), (
        "Milvus Lite has arrays of structs now: run this suite on it"
    )

    corrected, name = lite.hubness_client(), lite.name("new")
    with pytest.raises(MilvusException, match="has no field 'chunks'") as refused:
        corrected.create_collection(
            name, schema=schema_of(), index_params=indexes(), hubness=CorrectionConfig(BANK)
        )
    assert "\n" not in str(refused.value.message)
    assert name not in client.list_collections()


def test_a_copy_that_lacks_a_struct_field_is_dropped(place, rng):
    """As by a server of an older release behind the same address."""
    client, name = filled(place, rng)

    class Older(MilvusClient):
        def create_collection(self, collection_name, **options):
            options["schema"]._struct_fields = options["schema"]._struct_fields[:1]
            return super().create_collection(collection_name, **options)

    plan = plan_migration(place.store(), name, BANK, field="vector", estimator=NNN(8))
    with pytest.raises(CannotMigrate, match="it has no field 'marks'") as refused:
        migrate(MilvusStore(place.client(Older)), plan)
    assert "\n" not in str(refused.value)
    assert plan.target not in client.list_collections()


def test_new_collections_keep_their_structs(place, rng):
    client, name = place.hubness_client(), place.name("new")
    client.create_collection(
        name,
        schema=schema_of(),
        index_params=indexes(),
        hubness=CorrectionConfig(BANK, anns_field="vector", estimator=NNN(8)),
        consistency_level="Strong",
    )
    rows = [row_of(rng, key, item) for key, item in enumerate(vectors(rng, 20, DIM))]
    client.insert(name, rows)
    after = contents(client, name)
    assert [after[row["id"]]["chunks"] for row in rows] == [
        comparable([{**e, "half": list(e["half"])} for e in row["chunks"]]) for row in rows
    ]


def test_the_proxy_reads_the_structs_of_a_request_row_by_row(place, rng):
    """While a job runs, it writes rows, as a client does."""
    client, name = filled(place, rng)
    schema = client._get_connection().describe_collection(name)
    fields, structs = schema["fields"], schema["struct_array_fields"]
    items = vectors(rng, 6, DIM)
    rows = [row_of(rng, key, item) for key, item in enumerate(items, 100)]
    request = Prepare.row_insert_param(
        name, rows, "", fields, struct_fields_info=structs, enable_dynamic=True
    )
    read = rows_of(request.fields_data, len(rows))
    again = Prepare.row_insert_param(
        name, read, "", fields, struct_fields_info=structs, enable_dynamic=True
    )
    assert again == request
