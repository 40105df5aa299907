"""The async client answers what the sync one does."""

import asyncio
import inspect

import numpy as np
import pytest
from qdrant_client import AsyncQdrantClient, QdrantClient, models

from milvus_hubness import DimensionMismatch
from qdrant_hubness import AsyncHubnessQdrantClient, HubnessQdrantClient
from tests.qdrant.worlds import Backend, Corrected, key
from tests.support.galleries import vectors


@pytest.fixture
def made(quick_folder):
    """The folder of a corrected collection, that collection, and what the sync client answers."""
    plain = QdrantClient(path=str(quick_folder))
    corrected = Corrected(Backend("local", plain), "Euclid")
    sync = HubnessQdrantClient(client=plain)
    query = corrected.query.tolist()
    answers = {
        "query": sync.query_points(corrected.name, query, limit=20, with_vectors=True).points,
        "by id": sync.query_points(corrected.name, key(3), limit=20).points,
        "groups": sync.query_points_groups(corrected.name, "group", query).groups,
        "rows": sync.retrieve(corrected.name, [key(3), key(4)], with_vectors=True),
        "page": sync.scroll(corrected.name, limit=5, with_vectors=True),
        "described": sync.get_collection(corrected.name),
    }
    plain.close()
    return str(quick_folder), corrected, answers


def test_methods_are_coroutine_functions_where_qdrants_are():
    """Libraries look at that, and so does AsyncMock."""
    plain = {
        name
        for name in dir(AsyncQdrantClient)
        if inspect.iscoroutinefunction(getattr(AsyncQdrantClient, name))
    }
    assert "query_points" in plain
    for name in plain:
        assert inspect.iscoroutinefunction(getattr(AsyncHubnessQdrantClient, name)), name


async def test_every_call_is_awaited(made):
    folder, corrected, answers = made
    name, query = corrected.name, corrected.query.tolist()
    client = AsyncHubnessQdrantClient(path=folder)
    assert isinstance(client, AsyncQdrantClient)
    assert (await client.query_points(name, query, limit=20, with_vectors=True)).points == answers[
        "query"
    ]
    assert (await client.query_points(name, key(3), limit=20)).points == answers["by id"]
    assert (await client.query_points_groups(name, "group", query)).groups == answers["groups"]
    assert await client.retrieve(name, [key(3), key(4)], with_vectors=True) == answers["rows"]
    assert await client.scroll(name, limit=5, with_vectors=True) == answers["page"]
    assert await client.get_collection(name) == answers["described"]
    fresh = vectors(np.random.default_rng(8), 3, corrected.DIM)
    await client.upsert(
        name, [models.PointStruct(id=900, vector=fresh[0].tolist(), payload={"a": 1})]
    )
    await client.upload_collection(name, vectors=fresh[1:], ids=[901, 902])
    await client.update_vectors(name, [models.PointVectors(id=902, vector=fresh[0].tolist())])
    await client.set_payload(name, {"b": 2}, [900])
    await client.delete(name, [901])
    assert (await client.count(name)).count == corrected.ITEMS + 2
    assert (await client.retrieve(name, [900]))[0].payload == {"a": 1, "b": 2}
    batch = [models.QueryRequest(query=fresh[0].tolist(), limit=300)] * 2
    first, second = await client.query_batch_points(name, batch)
    assert first == second
    scores = {point.id: point.score for point in first.points}
    assert scores[900] == pytest.approx(scores[902], abs=1e-6)
    with pytest.raises(DimensionMismatch):
        await client.query_points(name, query[:-1])
    at_once = await asyncio.gather(*(client.query_points(name, query, limit=5) for _ in range(8)))
    assert len({tuple(point.id for point in each.points) for each in at_once}) == 1
    shared = AsyncHubnessQdrantClient(client=client, strength=0)
    raw = await shared.query_points(name, query, limit=5)
    assert raw == await client.query_points(name, query, limit=5, strength=0)
    await shared.close()
    assert await client.collection_exists(name)
    await client.close()
