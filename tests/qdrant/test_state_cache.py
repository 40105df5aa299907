"""What a client remembers of collections and of banks."""

import numpy as np
from qdrant_client import QdrantClient, models
from qdrant_client.http.exceptions import ResponseHandlingException

from milvus_hubness import NNN, QueryBank, Recipe, refresh
from milvus_hubness.extending import Ask, drive
from qdrant_hubness import AsyncHubnessQdrantClient
from qdrant_hubness.client.points import Call
from tests.qdrant.worlds import Backend, Corrected, key
from tests.support.galleries import vectors


def driven(client, operation, before):
    """Run an operation of a client, and call `before` with each request."""

    def answer(step):
        if isinstance(step, Ask):
            before(step)
        return client._answer(step)

    return drive(operation, answer)


def a_point(i, vector):
    return models.PointStruct(id=key(i), vector=vector.tolist(), payload={})


def test_a_state_that_was_forgotten_while_it_was_read_is_read_again():
    corrected = Corrected(Backend("local", QdrantClient(":memory:")))
    client = corrected.backend.hubness(state_ttl=1_000.0)
    operations = client._operations

    def forget(ask):
        if ask.method == "get_aliases":
            operations.forget(corrected.name)

    driven(client, operations.cached_state(corrected.name), forget)
    methods = []
    driven(client, operations.cached_state(corrected.name), lambda ask: methods.append(ask.method))
    assert "get_collection" in methods


def test_the_banks_of_all_profiles_stay_in_memory_whatever_the_budget():
    corrected = Corrected(Backend("local", QdrantClient(":memory:")))
    other = Recipe(QueryBank(corrected.other), estimator=NNN(8))
    corrected.store.point_alias("live", corrected.name)
    refresh(corrected.store, "live", other, profile="second")
    client = corrected.backend.hubness(state_ttl=1_000.0, bank_budget=1)
    rows = vectors(np.random.default_rng(3), 2, corrected.DIM)
    client.upsert("live", [a_point(1_001, rows[0])])

    methods = []
    write = client._operations.write_one
    call = Call("upsert", {"points": [a_point(1_003, rows[1])], "wait": True})
    driven(client, write("live", call), lambda ask: methods.append(ask.method))
    assert "scroll" not in methods


def test_an_upload_goes_on_where_the_state_could_not_be_read_after_a_batch():
    """The last read says whether a copy has taken the name meanwhile."""
    corrected = Corrected(Backend("local", QdrantClient(":memory:")))
    client = corrected.backend.hubness(state_ttl=0.0)
    methods = []

    def fail_once(ask):
        methods.append(ask.method)
        after = methods[methods.index("upsert") :] if "upsert" in methods else []
        if ask.method == "get_collection" and after.count("get_collection") == 2:
            raise ResponseHandlingException(ConnectionError("the server is away"))

    row = vectors(np.random.default_rng(3), 1, corrected.DIM)[0]
    upload = client._operations.upload(corrected.name, [a_point(1_001, row)], 64, {})
    driven(client, upload, fail_once)
    assert methods.count("upsert") == 2


def pointed(name, *, moved=False):
    """The changes by which the alias "live" leads to a collection."""
    change = models.CreateAlias(collection_name=name, alias_name="live")
    delete = models.DeleteAlias(alias_name="live")
    former_ones = [models.DeleteAliasOperation(delete_alias=delete)] if moved else []
    return [*former_ones, models.CreateAliasOperation(create_alias=change)]


def test_a_client_that_moves_an_alias_writes_to_where_it_leads():
    backend = Backend("local", QdrantClient(":memory:"))
    former, newer = Corrected(backend), Corrected(backend)
    client = backend.hubness(state_ttl=1_000.0)
    client.update_collection_aliases(change_aliases_operations=pointed(former.name))
    client.query_points("live", former.query.tolist())
    client.update_collection_aliases(pointed(newer.source, moved=True))

    client.upsert("live", [a_point(1_001, newer.items[0])])
    assert backend.client.retrieve(newer.source, [1_001])
    assert not backend.client.retrieve(former.name, [1_001])


def test_a_client_that_makes_a_collection_again_knows_no_former_state_of_it():
    backend = Backend("local", QdrantClient(":memory:"))
    former = Corrected(backend, "Dot")
    client = backend.hubness(state_ttl=1_000.0)
    client.query_points(former.name, former.query.tolist())
    stored = backend.client.get_collection(former.name).config.params.vectors.size
    config = models.VectorParams(size=stored, distance="Dot")
    client.delete_collection(former.name)
    client.create_collection(former.name, config)

    assert client.get_collection(former.name).config.params.vectors.size == stored
    client.upsert(former.name, [a_point(1_001, np.ones(stored, np.float32))])
    [record] = client.retrieve(former.name, [1_001], with_vectors=True)
    assert record.vector == [1.0] * stored


async def test_an_async_client_that_moves_an_alias_writes_to_where_it_leads(tmp_path):
    backend = Backend("local", QdrantClient(path=str(tmp_path)))
    former, newer = Corrected(backend), Corrected(backend)
    backend.client.close()

    client = AsyncHubnessQdrantClient(path=str(tmp_path), state_ttl=1_000.0)
    await client.update_collection_aliases(pointed(former.name))
    await client.query_points("live", former.query.tolist())
    await client.update_collection_aliases(pointed(newer.name, moved=True))
    await client.upsert("live", [a_point(1_001, newer.items[0])])
    await client.close()

    plain = QdrantClient(path=str(tmp_path))
    assert plain.retrieve(newer.name, [1_001])
    assert not plain.retrieve(former.name, [1_001])
    plain.close()
