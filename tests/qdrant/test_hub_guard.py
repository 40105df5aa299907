"""Qdrant's clients do not watch their writes, so a guard is refused and not ignored."""

import pytest
from qdrant_client import QdrantClient, models

from milvus_hubness import Beside, Copy, Recipe, UnsupportedOperation, plan_correction
from milvus_hubness.jobs.refresh.guard import guard_hubs
from qdrant_hubness.store import QdrantStore
from tests.support.planted import DIM, gallery


def test_a_guard_is_refused_in_one_line():
    items, bank, _ = gallery()
    client = QdrantClient(":memory:")
    client.create_collection("shop", models.VectorParams(size=DIM, distance=models.Distance.COSINE))
    client.upload_collection("shop", items)
    store = QdrantStore(client)
    message = "this database has no clients that watch their writes for hubs: leave on_hub off"
    for body in (Copy(), Beside()):
        with pytest.raises(UnsupportedOperation, match=message):
            plan_correction(store, "shop", Recipe(bank, on_hub="refuse"), body)
    with pytest.raises(UnsupportedOperation, match=message):
        guard_hubs(store, "shop", "warn")
