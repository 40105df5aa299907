"""The store against the databases themselves."""

import numpy as np
import pytest
from pymilvus import DataType

from milvus_hubness import NNN, CollectionExists, Layout
from milvus_hubness.correction import initial_state
from milvus_hubness.jobs.migration.chunks import survey
from milvus_hubness.state import BankReference, Mirror
from milvus_hubness.stores.base import Record
from tests.galleries import plain_collection, vectors


def test_keys_are_all_that_were_written_whatever_the_consistency_level(backend):
    """pymilvus's default is Bounded, under which a read may lag behind the writes before it."""
    client, store, name = backend.client(), backend.store(), backend.name("bounded")
    client.create_collection(name, dimension=8, consistency_level="Bounded")
    rows = vectors(np.random.default_rng(0), 300, 8)
    for start in range(0, len(rows), 30):
        part = rows[start : start + 30]
        client.insert(name, [{"id": start + i, "vector": row} for i, row in enumerate(part)])
        assert store.keys(name) == list(range(start + 30))
        assert store.count(name) == start + 30
        assert len(store.fetch(name, store.keys(name), "vector")) == start + 30


@pytest.mark.parametrize("kind", [DataType.INT64, DataType.VARCHAR], ids=["int", "varchar"])
def test_a_scan_shows_every_row_once_in_the_order_of_keys(backend, kind):
    client, store, name = backend.client(), backend.store(), backend.name("scanned")
    schema = client.create_schema(enable_dynamic_field=True)
    schema.add_field("id", kind, is_primary=True, **({"max_length": 64} if kind == DataType.VARCHAR else {}))
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=8)
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="IP")
    client.create_collection(name, schema=schema, index_params=index)
    keys = list(range(-20, 480))
    if kind == DataType.VARCHAR:
        keys = ['"', "'", "\\", "\n", "ü€", "😀", 'a"b\\c', *(f"k{i}" for i in keys)]
    rows = vectors(np.random.default_rng(0), len(keys), 8)
    order = np.random.default_rng(1).permutation(len(keys))
    client.upsert(name, [{"id": keys[i], "vector": rows[i], "place": int(i)} for i in order])
    ordered = sorted(keys)
    assert store.count(name) == len(keys)

    found, after = [], None
    while len(page := store.scan(name, "vector", after=after, limit=37)):
        assert len(page) <= 37
        for key, vector, row in zip(page.keys, page.vectors, page.rows, strict=True):
            assert np.array_equal(vector, rows[row["place"]])
            assert row["id"] == key == keys[row["place"]]
        found += page.keys
        after = page.keys[-1]
    assert found == ordered
    assert store.scan(name, "vector", after=ordered[7], upto=ordered[300]).keys == ordered[8:301]
    assert store.scan(name, "vector").keys == ordered
    assert store.scan_keys(name, after=ordered[4], limit=9) == ordered[5:14]

    looked = survey(store, store.info(name), 100)
    assert [chunk.rows for chunk in looked.chunks] == [100] * (len(keys) // 100) + (
        [len(keys) % 100] if len(keys) % 100 else []
    )
    pieces = [store.scan(name, "vector", after=each.after, upto=each.upto).keys for each in looked.chunks]
    assert [key for piece in pieces for key in piece] == ordered
    assert looked.sample == {None: ordered}


def test_a_ledger_keeps_what_it_was_given_last(backend):
    store, name = backend.store(), backend.name("ledger")
    assert store.records(name, "anything") == []
    first = [Record(f"a/{i:03}", "a", f'{{"n": {i}, "said": "\\"quoted\\" ü"}}') for i in range(700)]
    store.put_records(name, [*first, Record("b/0", "b", "{}")])
    store.put_records(name, [Record("a/003", "a", '{"n": 33}')])
    again = backend.store()
    assert again.records(name, "a") == [*first[:3], Record("a/003", "a", '{"n": 33}'), *first[4:]]
    again.drop_records(name, "a", ["a/000", "b/0"])
    assert [each.key for each in store.records(name, "a")] == [each.key for each in first[1:]]
    again.drop_records(name, "a")
    assert store.records(name, "a") == []
    assert len(store.records(name, "b")) == 1


def test_a_ledger_takes_no_collection_of_somebody_else(lite):
    client, name = lite.client(), lite.name("theirs")
    client.create_collection(name, dimension=8)
    with pytest.raises(CollectionExists, match="no ledger"):
        lite.store().put_records(name, [Record("a", "a", "{}")])


def test_a_mirror_is_told_and_taken_back(backend):
    client, store, name = backend.client(), backend.store(), backend.name("mirrored")
    client.create_collection(name, dimension=8)
    assert store.info(name).mirror is None
    store.write_mirror(name, Mirror(collection="other", required=True))
    assert store.info(name).mirror == Mirror(collection="other", required=True)
    store.write_mirror(name, None)
    assert store.info(name).mirror is None


def test_a_copy_left_half_made_is_made_whole(backend):
    client, store, name = backend.client(), backend.store(), backend.name("whole")
    plain_collection(client, name, vectors(np.random.default_rng(0), 20, 8), "IP")
    info = store.info(name)
    layout = Layout(8, "IP")
    bank = BankReference(collection="b", generation=1, fingerprint="f", count=1)
    made = {"field": "vector", "suffix": "", "dtype": "float32", "source": name, "phase": "copying"}
    state = initial_state(layout, NNN(1), bank, **made)
    target = f"{name}_hubness"
    store._create_copy(info, target, state)
    store.create_copy(info, target, state)
    assert client.get_load_state(target)["state"].name == "Loaded"
    assert client.list_indexes(target) == client.list_indexes(name)
    store.write_state(target, state.model_copy(update={"phase": "ready"}))
    with pytest.raises(CollectionExists):
        store.create_copy(info, target, state)
