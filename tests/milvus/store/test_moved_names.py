"""Reads of a name that another job moves to another collection meanwhile."""

import pytest
from pymilvus import MilvusClient

from milvus_hubness import MilvusStore, connect
from milvus_hubness.errors import StoreError


def test_rows_of_another_size_than_described_are_refused_in_one_line(tmp_path, monkeypatch):
    uri = str(tmp_path / "milvus.db")
    client = MilvusClient(uri)
    for name, dim in (("narrow", 4), ("products", 8)):
        client.create_collection(name, dim)
    client.insert("products", [{"id": 1, "vector": [1.0] * 8}])
    store = MilvusStore(connect(uri))
    described = store.client.describe_collection("narrow")
    monkeypatch.setattr(store.client, "describe_collection", lambda name, **options: described)
    with pytest.raises(
        StoreError, match="moved the name to another collection: run this command again"
    ):
        store.get("products", [1], "vector")
