"""Requests that name a missing point, which a server carries out in part: nothing is assumed, nothing is left wrong."""

import httpx
import numpy as np
import pytest
from qdrant_client import AsyncQdrantClient, QdrantClient, models
from qdrant_client.http.exceptions import UnexpectedResponse

from milvus_hubness import (
    NNN,
    Beside,
    MigrationOptions,
    QueryBank,
    Recipe,
    StoreError,
    enable,
    migrate,
    plan_correction,
    refresh,
)
from milvus_hubness.jobs.migration.catch_up import verify
from milvus_hubness.jobs.store.records import DUAL_WRITE_PROPERTY
from qdrant_hubness import AsyncHubnessQdrantClient, QdrantStore
from tests.qdrant.strict import StrictServer
from tests.qdrant.worlds import Backend, Corrected, key
from tests.support.aliases import aliased
from tests.support.galleries import nnn, similarity, vectors

SERVERS = {
    "rest": lambda: StrictServer().client(),
    "grpc": lambda: StrictServer().client(over="grpc"),
    "shards": lambda: StrictServer(shards=3).client(),
}
LONG = pytest.mark.long
DIM, ITEMS = 8, 150
MISSING = 999_999


@pytest.fixture(
    params=["rest", pytest.param("grpc", marks=LONG), pytest.param("shards", marks=LONG)]
)
def backend(request):
    here = Backend("strict", SERVERS[request.param]())
    yield here
    here.clean()


@pytest.fixture
def alone():
    """One kind of server, for what does not depend on it."""
    return Backend("strict", SERVERS["rest"]())


def deleting(client, keys):
    """A store beside which an application deletes these points, after a job has read them and before it writes."""
    waiting = list(keys)

    class Deleting(QdrantStore):
        def put_bias_keys(self, collection, batch, keys):
            self.delete_one(collection, batch)
            return super().put_bias_keys(collection, batch, keys)

        def upsert(self, collection, batch, field, *, partition=None):
            # To the copy: the application deletes in the collection that it reads.
            self.delete_one("live", batch)
            super().upsert(collection, batch, field, partition=partition)

        def delete_one(self, collection, batch):
            here = [key for key in waiting if key in batch.keys]
            if here:
                waiting.remove(here[0])
                client.delete(collection, [here[0]])

    return Deleting


def test_a_refresh_beside_deletions_leaves_no_wrong_bias(backend):
    corrected = Corrected(backend, "Dot")
    gone = [1, 2]
    corrected.store.point_alias("live", corrected.name)
    corrected.name = "live"
    store = backend.store(deleting(backend.client, [key(i) for i in gone]))
    done = refresh(store, "live", QueryBank(corrected.other), force=True)
    assert (done.action, done.written) == ("full", corrected.ITEMS - len(gone))
    found, wanted = corrected.scores(), corrected.wanted(bank=corrected.other)
    left = [i for i in range(corrected.ITEMS) if i not in gone]
    assert set(found) == set(left)
    np.testing.assert_allclose([found[i] for i in left], wanted[left], atol=3e-5)


class Enabled:
    """A collection with biases in payloads."""

    def __init__(self, backend):
        rng = np.random.default_rng(2)
        self.backend, self.store = backend, backend.store()
        self.items, self.bank, self.other = (vectors(rng, n, DIM) for n in (ITEMS, 50, 60))
        self.name = backend.fill(self.items, "Dot", keys=lambda i: i)
        enable(
            self.store,
            plan_correction(
                self.store, self.name, Recipe(QueryBank(self.bank), estimator=NNN(8)), Beside()
            ),
            client_ttl=0.0,
        )

    def assert_right(self, bank, but=()):
        mean_bias = self.store.info(self.name).state.profile.mean_bias
        query = self.items[:1]
        wanted = similarity(query, self.items, "IP")[0] - (
            nnn(bank, self.items, "IP", 8, 0.75) - mean_bias
        )
        found = (
            self.backend.hubness().query_points(self.name, query[0].tolist(), limit=ITEMS).points
        )
        scores = {point.id: point.score for point in found}
        left = [i for i in range(ITEMS) if i not in but]
        assert set(scores) == set(left)
        np.testing.assert_allclose([scores[i] for i in left], wanted[left], atol=3e-5)


def test_biases_in_payloads_are_right_beside_deletions(backend):
    enabled = Enabled(backend)
    store = backend.store(deleting(backend.client, [40]))
    done = refresh(store, enabled.name, QueryBank(enabled.other), force=True)
    assert done.written == ITEMS - 1
    enabled.assert_right(enabled.other, but=[40])


def test_vectors_that_a_client_changes_beside_a_missing_point_have_their_biases(backend):
    """The application sees the server's error; all points that exist are changed, each with the bias of its vector."""
    enabled = Enabled(backend)
    fresh = vectors(np.random.default_rng(5), 70, DIM)
    changed = [models.PointVectors(id=i, vector=row.tolist()) for i, row in enumerate(fresh)]
    changed.insert(20, models.PointVectors(id=MISSING, vector=fresh[0].tolist()))
    with pytest.raises(Exception, match=f"No point with id {MISSING} found"):
        backend.hubness().update_vectors(enabled.name, changed)
    enabled.items[:70] = fresh
    enabled.assert_right(enabled.bank)


async def test_an_async_client_does_so_too():
    server = StrictServer()
    enabled = Enabled(Backend("strict", server.client()))
    fresh = vectors(np.random.default_rng(5), 40, DIM)
    changed = [models.PointVectors(id=i, vector=row.tolist()) for i, row in enumerate(fresh)]
    changed.append(models.PointVectors(id=MISSING, vector=fresh[0].tolist()))
    client = AsyncHubnessQdrantClient(client=server.client(AsyncQdrantClient), state_ttl=0.0)
    with pytest.raises(UnexpectedResponse, match=f"No point with id {MISSING} found"):
        await client.update_vectors(enabled.name, changed)
    enabled.items[:40] = fresh
    enabled.assert_right(enabled.bank)


def naming(ids):
    """Requests that change payloads of these points."""
    set_payload = models.SetPayload(payload={"batched": 1}, points=ids)
    return {
        "set_payload": lambda client, name: client.set_payload(name, {"a": 1}, ids),
        "overwrite_payload": lambda client, name: client.overwrite_payload(name, {"b": 1}, ids),
        "delete_payload": lambda client, name: client.delete_payload(name, ["n"], ids),
        "update_vectors": lambda client, name: client.update_vectors(
            name, [models.PointVectors(id=id, vector=[1.0] * DIM) for id in ids]
        ),
        "batch_update_points": lambda client, name: client.batch_update_points(
            name, [models.SetPayloadOperation(set_payload=set_payload)]
        ),
    }


@pytest.mark.parametrize(
    "call", ["set_payload", *(pytest.param(name, marks=LONG) for name in [*naming([])][1:])]
)
def test_a_copy_gets_what_the_source_got_of_a_request_in_part(alone, call):
    rng = np.random.default_rng(3)
    name = alone.fill(vectors(rng, 120, DIM), "Dot", keys=lambda i: i)
    store = alone.store()
    plan = plan_correction(store, name, Recipe(QueryBank(vectors(rng, 40, DIM)), estimator=NNN(4)))
    migrate(store, plan, MigrationOptions(client_ttl=0.0))
    assert DUAL_WRITE_PROPERTY in store.properties_of(name)
    request = naming([*range(50), MISSING, *range(50, 100)])[call]
    with pytest.raises(UnexpectedResponse, match=f"No point with id {MISSING} found"):
        request(alone.hubness(), name)
    assert verify(store, name).rows == 120


def test_forcing_a_refresh_repairs_biases_that_something_has_damaged(alone):
    corrected = Corrected(alone, "Dot")
    broken = corrected.store.get(corrected.name, [key(i) for i in range(30)], "")
    layout = corrected.state.layout
    broken.vectors[:, layout.slot_columns] += 0.5
    corrected.store.upsert(corrected.name, broken, "")
    corrected.name = aliased(corrected.store, corrected.name)
    assert refresh(corrected.store, corrected.name).action == "none", "nobody can see it"
    bank = QueryBank(corrected.bank)
    done = refresh(corrected.store, corrected.name, bank, force=True, client_ttl=0.0)
    assert (done.action, done.reason) == ("full", "it was forced")
    corrected.assert_scores()


def test_not_found_without_a_word_on_a_collection_is_no_missing_collection():
    """A proxy in front of the server answers so to a wrong path."""
    refusing = httpx.MockTransport(lambda request: httpx.Response(404, text="404 page not found"))
    client = QdrantClient(url="http://proxy", transport=refusing, check_compatibility=False)
    store = QdrantStore.__new__(QdrantStore)
    store.client, store._fences = client, None
    with pytest.raises(StoreError, match="404 page not found") as raised:
        store.ask("count", "items")
    assert type(raised.value) is StoreError
