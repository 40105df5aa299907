"""Clients write vectors while `enable` runs: all writes succeed, and each point has the bias of its last vector."""

import asyncio
import itertools

import numpy as np
import pytest
from qdrant_client import AsyncQdrantClient, models

from milvus_hubness import NNN, Beside, QueryBank, Recipe, enable, plan_correction
from qdrant_hubness import AsyncHubnessQdrantClient, QdrantStore
from tests.qdrant.strict import StrictServer
from tests.qdrant.worlds import Backend
from tests.support.galleries import nnn, similarity, vectors

DIM, ITEMS = 8, 60
VECTORS = {"first": "Dot", "second": "Cosine"}


class World:
    """A collection of two vectors, of which `enable` corrects one after the other."""

    def __init__(self, backend):
        rng = np.random.default_rng(2)
        self.backend, self.store = backend, backend.store()
        self.name = backend.name()
        params = {
            name: models.VectorParams(size=DIM, distance=distance)
            for name, distance in VECTORS.items()
        }
        backend.client.create_collection(self.name, vectors_config=params)
        self.items = {name: vectors(rng, ITEMS, DIM) for name in VECTORS}
        self.bank = vectors(rng, 40, DIM)
        backend.client.upsert(self.name, [self.point(i) for i in range(ITEMS)])

    def point(self, i):
        own = {name: rows[i].tolist() for name, rows in self.items.items()}
        return models.PointStruct(id=i, vector=own, payload={"n": i})

    def renew(self, i, seed):
        """Return the point with other vectors."""
        for rows in self.items.values():
            rows[i] = vectors(np.random.default_rng(seed), 1, DIM)[0]
        return self.point(i)

    def enable(self, field, write):
        """Enable, and call `write` before biases are written that were computed, and once clients read the
        state: it gets the number of its call."""
        calls = itertools.count()

        class Announcing(QdrantStore):
            def put_bias_keys(self, *args):
                write(next(calls))
                return super().put_bias_keys(*args)

            def write_property(self, collection, name, record):
                super().write_property(collection, name, record)
                if getattr(record, "field", None) == field:
                    write(next(calls))

        store = self.backend.store(Announcing)
        plan = plan_correction(
            store, self.name, Recipe(QueryBank(self.bank), estimator=NNN(4)), Beside(), field=field
        )
        enable(store, plan, client_ttl=0.0)

    def assert_right(self, field):
        query = self.items[field][:1]
        metric = {"Dot": "IP", "Cosine": "COSINE"}[VECTORS[field]]
        biases = nnn(self.bank, self.items[field], metric, 4, 0.75)
        state = self.store.info(self.name).states[field]
        wanted = similarity(query, self.items[field], metric)[0] - (
            biases - state.profile.mean_bias
        )
        found = (
            self.backend.hubness()
            .query_points(self.name, query[0].tolist(), field, limit=ITEMS)
            .points
        )
        scores = {point.id: point.score for point in found}
        np.testing.assert_allclose([scores[i] for i in range(ITEMS)], wanted, atol=3e-5)


def test_writes_of_a_client_during_enable_succeed(backend):
    world = World(backend)
    client = backend.hubness()
    for seed, field in enumerate(VECTORS):
        calls = []

        def write(number, seed=seed, calls=calls):
            calls.append(number)
            if number > 1:
                return  # Biases of what was written at the calls before.
            client.upsert(world.name, [world.renew(3 + number, 10 * number + seed)])
            changed = world.renew(5 + number, 20 + 10 * number + seed)
            client.update_vectors(
                world.name, [models.PointVectors(id=5 + number, vector=changed.vector)]
            )

        world.enable(field, write)
        assert len(calls) > 1
        for corrected in list(VECTORS)[: seed + 1]:
            world.assert_right(corrected)


@pytest.mark.parametrize("over", ["rest", "grpc"])
def test_writes_of_an_async_client_succeed_too(over):
    server = StrictServer()
    world = World(Backend("strict", server.client(over=over)))

    async def upserted(number):
        client = AsyncHubnessQdrantClient(
            client=server.client(AsyncQdrantClient, over=over), state_ttl=0.0
        )
        await client.upsert(world.name, [world.renew(3 + number, 10 + number)])
        changed = world.renew(5 + number, 20 + number)
        await client.update_vectors(
            world.name, [models.PointVectors(id=5 + number, vector=changed.vector)]
        )

    def write(number):
        if number < 2:
            asyncio.run(upserted(number))

    world.enable("first", write)
    world.assert_right("first")
