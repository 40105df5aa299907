"""The store against Qdrant itself."""

import numpy as np
import pytest
from qdrant_client import models

from milvus_hubness import NNN, CollectionNotFound, Layout, StoreError, UnsupportedOperation
from milvus_hubness.correction.fitted import initial_state
from milvus_hubness.correction.state import BankReference
from milvus_hubness.jobs.store.generations import Batch
from milvus_hubness.jobs.store.protocols import (
    QuerySampling,
    Renaming,
    SideCollections,
    capability,
)
from qdrant_hubness.store import schema
from tests.support.galleries import vectors


def test_points_come_back_as_they_were_written_whatever_is_in_them(backend):
    name = backend.name()
    backend.client.create_collection(
        name,
        vectors_config={
            "image": models.VectorParams(size=8, distance="Dot"),
            "title": models.VectorParams(size=6, distance="Euclid"),
            "tokens": models.VectorParams(
                size=4,
                distance="Dot",
                multivector_config=models.MultiVectorConfig(comparator="max_sim"),
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
    backend.client.upsert(
        name, [*points, models.PointStruct(id=4, vector={}, payload={"bare": True})]
    )
    store = backend.store()
    batch = store.get(name, [4, 2, 0, 1, 3], "image")
    assert np.isnan(batch.vectors[0]).all(), "it has none"
    store.upsert(name, Batch([key + 10 for key in batch.keys], batch.vectors, batch.rows), "image")
    copied = {r.id - 10: r for r in backend.client.retrieve(name, range(10, 15), with_vectors=True)}
    for record in backend.client.retrieve(name, range(5), with_vectors=True):
        assert copied[record.id].payload == record.payload
        assert copied[record.id].vector == record.vector
    assert copied[4].vector == {}


def test_an_alias_moves_in_one_step(backend):
    store = backend.store()
    first, second = (backend.fill(np.ones((1, 4), np.float32)) for _ in range(2))
    asked = []
    change = backend.client.update_collection_aliases
    backend.client.update_collection_aliases = lambda **options: (
        asked.append(options) or change(**options)
    )
    assert store.alias_target("live") is None
    store.point_alias("live", first)
    store.point_alias("live", second)
    assert [len(each["change_aliases_operations"]) for each in asked] == [1, 2]
    assert store.alias_target("live") == second
    store.drop_alias("live")
    assert store.alias_target("live") is None
    with pytest.raises(CollectionNotFound):
        store.info("live")
    with pytest.raises(UnsupportedOperation):
        capability(store, Renaming)


def test_a_copy_has_the_settings_of_its_source(backend):
    name = backend.fill(vectors(np.random.default_rng(0), 3, 8), "Cosine")
    info = backend.store().info(name)
    described = info.schema["described"]
    quantized = models.ScalarQuantization(
        scalar=models.ScalarQuantizationConfig(type="int8", quantile=0.9)
    )
    described.config.quantization_config = quantized
    described.config.hnsw_config.m = 48
    vector = described.config.params.vectors
    vector.hnsw_config, vector.on_disk = models.HnswConfigDiff(ef_construct=77), True
    described.config.params.replication_factor = 2
    described.config.metadata = {"owner": "search", "hubness_dual_write": "{}"}
    described.payload_schema["group"] = models.PayloadIndexInfo(data_type="integer", points=3)
    bank = BankReference(collection="b", generation="01", fingerprint="f", count=1, size=1)
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
    assert any("quantized" in said for said in schema.remarks(info, ""))


def test_errors_are_ours_and_name_the_collection(backend):
    store = backend.store()
    with pytest.raises(CollectionNotFound, match="nowhere"):
        store.count("nowhere")
    name = backend.fill(np.ones((1, 4), np.float32))
    with pytest.raises(StoreError, match=name):
        store.ask("upsert", name, points=[models.PointStruct(id=1, vector=[1.0, 2.0])])
    for kind in (QuerySampling, SideCollections):
        with pytest.raises(UnsupportedOperation):
            capability(store, kind)


def test_a_quantised_collection_goes_without_a_link_column_and_cell_columns(backend):
    """Its one range for all columns would be spent on those."""
    store = backend.store()
    info = store.info(backend.fill(np.ones((1, 4), np.float32), "Dot"))
    assert all(store.column_needs(info, "").hints.values())
    described = info.schema["described"]
    scalar = models.ScalarQuantization(scalar=models.ScalarQuantizationConfig(type="int8"))
    for owner in (described.config, described.config.params.vectors):
        owner.quantization_config = scalar
        assert not any(store.column_needs(info, "").hints.values())
        owner.quantization_config = None
    assert all(store.column_needs(info, "").hints.values())
