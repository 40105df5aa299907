"""The store against Qdrant itself."""

import random
import uuid

import numpy as np
import pytest
from qdrant_client import models

from milvus_hubness import NNN, CollectionExists, CollectionNotFound, Layout, StoreError, UnsupportedOperation
from milvus_hubness.correction import initial_state
from milvus_hubness.jobs.migration.chunks import survey
from milvus_hubness.state import BankReference, Mirror
from milvus_hubness.stores.base import Batch, Record
from qdrant_hubness.store import schema
from tests.galleries import vectors

NUMBERS = [0, 3, 7, 2**63 + 5, 2**64 - 1, *range(100, 300)]
UUIDS = [str(uuid.UUID(int=random.Random(i).getrandbits(128))) for i in range(200)]
EDGES = ["00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"]


@pytest.mark.parametrize(
    "keys", [NUMBERS, [*UUIDS, *EDGES], [*NUMBERS, *UUIDS, *EDGES]], ids=["numbers", "uuids", "both"]
)
def test_a_scan_shows_every_point_once_in_the_order_of_ids(backend, keys):
    shuffled = random.Random(1).sample(keys, len(keys))
    items = vectors(np.random.default_rng(0), len(keys), 8)
    name = backend.fill(items, "Dot", keys=lambda i: shuffled[i], payload=lambda i: {"place": i})
    store = backend.store()
    wanted = {
        "numbers": sorted(each for each in keys if isinstance(each, int)),
        "uuids": sorted(each for each in keys if isinstance(each, str)),
    }
    assert store.keys(name) == [*wanted["numbers"], *wanted["uuids"]]
    assert store.count(name) == len(keys)
    for partition, ordered in wanted.items():
        found, after = [], None
        while len(page := store.scan(name, "", after=after, limit=37, partition=partition)):
            assert len(page) <= 37
            for key, vector, row in zip(page.keys, page.vectors, page.rows, strict=True):
                assert np.array_equal(vector, items[row["place"]])
                assert shuffled[row["place"]] == key
            found += page.keys
            after = page.keys[-1]
        assert found == ordered
        if not ordered:
            continue
        part = store.scan(name, "", after=ordered[7], upto=ordered[90], partition=partition)
        assert part.keys == ordered[8:91]
        assert store.scan_keys(name, after=ordered[4], limit=9, partition=partition) == ordered[5:14]
        assert store.scan_keys(name, after=ordered[-1], limit=9, partition=partition) == []
    looked = survey(store, store.info(name), 64)
    pieces = [
        store.scan(name, "", after=each.after, upto=each.upto, partition=each.partition).keys
        for each in looked.chunks
    ]
    assert [key for piece in pieces for key in piece] == [*wanted["numbers"], *wanted["uuids"]]


def test_points_come_back_as_they_were_written_whatever_is_in_them(backend):
    name = backend.name()
    backend.client.create_collection(
        name,
        vectors_config={
            "image": models.VectorParams(size=8, distance="Dot"),
            "title": models.VectorParams(size=6, distance="Euclid"),
            "tokens": models.VectorParams(
                size=4, distance="Dot", multivector_config=models.MultiVectorConfig(comparator="max_sim")
            ),
        },
        sparse_vectors_config={"words": models.SparseVectorParams()},
    )
    rng = np.random.default_rng(0)
    image, title = vectors(rng, 4, 8), vectors(rng, 4, 6)
    points = [
        models.PointStruct(
            id=i,
            vector={
                "image": image[i].tolist(),
                **({"title": title[i].tolist()} if i % 2 else {}),
                "tokens": [[1.0, 2.0, 3.0, i], [0.0, 0.5, 0.0, 1.0]],
                "words": models.SparseVector(indices=[3, 9], values=[0.5, i + 1.0]),
            },
            payload={"é😀": None, "deep": {"n": [1, {"x": i / 3}]}, "big": 2**60 + i},
        )
        for i in range(4)
    ]
    backend.client.upsert(name, [*points, models.PointStruct(id=4, vector={}, payload={"bare": True})])
    store = backend.store()
    batch = store.fetch(name, [4, 2, 0, 1, 3], "image")
    assert np.isnan(batch.vectors[0]).all(), "it has none"
    store.write(name, Batch([key + 10 for key in batch.keys], batch.vectors, batch.rows), "image")
    copied = {r.id - 10: r for r in backend.client.retrieve(name, range(10, 15), with_vectors=True)}
    for record in backend.client.retrieve(name, range(5), with_vectors=True):
        assert copied[record.id].payload == record.payload
        assert copied[record.id].vector == record.vector
    assert copied[4].vector == {}


def test_a_ledger_keeps_what_it_was_given_last(everywhere):
    store, name = everywhere.store(), everywhere.name("ledger")
    assert store.records(name, "anything") == []
    first = [Record(f"a/{i:03}", "a", f'{{"n": {i}, "said": "\\"quoted\\" ü"}}') for i in range(700)]
    store.put_records(name, [*first, Record("b/0", "b", "{}")])
    store.put_records(name, [Record("a/003", "a", '{"n": 33}')])
    again = everywhere.store()
    assert again.records(name, "a") == [*first[:3], Record("a/003", "a", '{"n": 33}'), *first[4:]]
    again.drop_records(name, "a", ["a/000", "b/0"])
    assert [each.key for each in store.records(name, "a")] == [each.key for each in first[1:]]
    again.drop_records(name, "a")
    assert store.records(name, "a") == []
    assert store.record(name, "b/0") == Record("b/0", "b", "{}")


def test_nothing_takes_a_collection_of_somebody_else(backend):
    store, name = backend.store(), backend.fill(np.ones((1, 4), np.float32))
    with pytest.raises(CollectionExists, match="no ledger"):
        store.put_records(name, [Record("a", "a", "{}")])
    with pytest.raises(CollectionExists, match="no query bank"):
        store.next_generation(name)


def test_what_a_collection_is_told_it_says_by_any_name(everywhere):
    store, name = everywhere.store(), everywhere.fill(np.ones((1, 4), np.float32))
    store.point_alias(f"{name}_live", name)
    assert store.info(name).mirror is None
    store.write_mirror(f"{name}_live", Mirror(collection="other", required=True))
    assert store.info(name).mirror == Mirror(collection="other", required=True)
    assert store.info(f"{name}_live").mirror == store.info(name).mirror
    assert store.info(f"{name}_live").name == name
    store.write_mirror(name, None)
    assert store.info(name).mirror is None
    store.write_mirror(name, Mirror(collection="other"))
    store.drop(name)
    config = models.VectorParams(size=4, distance="Dot")
    everywhere.client.create_collection(name, vectors_config=config)
    assert store.info(name).mirror is None, "another of the same name says nothing of it"


def test_an_alias_moves_in_one_step(backend):
    store = backend.store()
    first, second = (backend.fill(np.ones((1, 4), np.float32)) for _ in range(2))
    asked = []
    change = backend.client.update_collection_aliases
    backend.client.update_collection_aliases = lambda **options: asked.append(options) or change(**options)
    assert store.alias_target("live") is None
    store.point_alias("live", first)
    store.point_alias("live", second)
    assert [len(each["change_aliases_operations"]) for each in asked] == [1, 2]
    assert store.alias_target("live") == second
    store.drop_alias("live")
    assert store.alias_target("live") is None
    with pytest.raises(CollectionNotFound):
        store.info("live")
    assert not store.renames()
    with pytest.raises(UnsupportedOperation):
        store.rename(first, "another")


def test_a_copy_that_is_there_is_gone_on_with_until_it_is_ready(everywhere):
    store = everywhere.store()
    name = everywhere.fill(vectors(np.random.default_rng(0), 20, 8), "Dot")
    info, target = store.info(name), f"{name}_hubness"
    bank = BankReference(collection="b", generation=1, fingerprint="f", count=1)
    made = {"field": "", "suffix": "", "dtype": "float32", "source": name, "phase": "copying"}
    state = initial_state(Layout(8, "IP"), NNN(1), bank, **made)
    store.create_copy(info, target, state)
    store.create_copy(info, target, state)
    assert store.info(target).states == {"": state}
    store.write_state(target, state.model_copy(update={"phase": "ready"}))
    with pytest.raises(CollectionExists):
        store.create_copy(info, target, state)


def test_a_copy_has_the_settings_of_its_source(backend):
    name = backend.fill(vectors(np.random.default_rng(0), 3, 8), "Cosine")
    info = backend.store().info(name)
    described = info.schema["described"]
    quantized = models.ScalarQuantization(scalar=models.ScalarQuantizationConfig(type="int8", quantile=0.9))
    described.config.quantization_config = quantized
    described.config.hnsw_config.m = 48
    vector = described.config.params.vectors
    vector.hnsw_config, vector.on_disk = models.HnswConfigDiff(ef_construct=77), True
    described.config.params.replication_factor = 2
    described.config.metadata = {"owner": "search", "hubness_mirror": "{}"}
    described.payload_schema["group"] = models.PayloadIndexInfo(data_type="integer", points=3)
    bank = BankReference(collection="b", generation=1, fingerprint="f", count=1)
    made = {"field": "", "suffix": "", "dtype": "float32", "source": name}
    state = initial_state(Layout(8, "COSINE"), NNN(1), bank, **made)
    config = schema.copy_config(info, state, schema.copied_metadata(info, state))
    copied = config["vectors_config"]
    assert (copied.size, copied.distance, copied.on_disk) == (16, models.Distance.DOT, True)
    assert copied.hnsw_config.ef_construct == 77
    assert config["quantization_config"] == quantized
    assert config["hnsw_config"].m == 48
    assert config["replication_factor"] == 2
    assert config["metadata"] == {"owner": "search", "hubness": state.to_json()}
    assert schema.facts(info)["indexes"] == {"group": "integer"}
    assert any("quantized" in said for said in schema.remarks(info))


def test_errors_are_ours_and_name_the_collection(backend):
    store = backend.store()
    with pytest.raises(CollectionNotFound, match="nowhere"):
        store.count("nowhere")
    name = backend.fill(np.ones((1, 4), np.float32))
    with pytest.raises(StoreError, match=name):
        store.ask("upsert", name, points=[models.PointStruct(id=1, vector=[1.0, 2.0])])
    for call in (
        lambda: store.create_traffic("t", 4),
        lambda: store.create_side(store.info(name), "side"),
        lambda: store.bulk_import(name, "file"),
    ):
        with pytest.raises(UnsupportedOperation):
            call()
