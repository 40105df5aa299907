"""The proxy divides what exceeds a limit of the server only because of the correction."""

import grpc
import numpy as np
import pytest
from pymilvus import AnnSearchRequest, RRFRanker
from pymilvus.exceptions import MilvusException

from milvus_hubness import NNN, QueryBank, Recipe, migrate, plan_correction
from milvus_hubness.clients.steps import Ask
from milvus_hubness.milvus.proxy.messages import Send
from milvus_hubness.milvus.proxy.sessions import Session
from tests.support.born import born
from tests.support.dual_writes import Moving
from tests.support.galleries import plain_collection, vectors

DIM = 8
RNG = np.random.default_rng(1)
ITEM_VECTORS, QUERIES, NEW = vectors(RNG, 300, DIM), vectors(RNG, 150, DIM), vectors(RNG, 200, DIM)
BANK = QueryBank(vectors(RNG, 40, DIM))
MAX_QUERIES, MAX_BYTES, MAX_ROWS = 200, 9_000, 120


class TooLarge(grpc.RpcError):
    """As Milvus ends a request of more than 64 MiB."""

    def code(self):
        return grpc.StatusCode.RESOURCE_EXHAUSTED

    def details(self):
        return "grpc: received message larger than max (72138869 vs. 67108864)"

    def trailing_metadata(self):
        return None


@pytest.fixture
def limits(monkeypatch):
    """What a server with small limits refuses."""
    refused = []
    answer = Session.answer

    def is_too_large(step):
        if not isinstance(step, Send):
            return (
                isinstance(step, Ask)
                and step.method in ("insert", "upsert")
                and len(step.args[1]) > MAX_ROWS
            )
        request = step.args[0]
        if hasattr(request, "requests"):
            return sum(part.ByteSize() for part in request.requests) > MAX_BYTES
        if hasattr(request, "nq"):
            return request.nq > MAX_QUERIES
        return hasattr(request, "num_rows") and request.num_rows > MAX_ROWS

    async def limited(self, step, caller, pool, send):
        if is_too_large(step):
            refused.append(step)
            raise TooLarge
        return await answer(self, step, caller, pool, send)

    monkeypatch.setattr(Session, "answer", limited)
    return refused


def corrected(lite, gate=None):
    if gate is None:
        return born(lite, ITEM_VECTORS, BANK)
    name, store = lite.name("limits"), lite.store()
    plain_collection(lite.client(), name, ITEM_VECTORS, "IP")
    return migrate(
        store, plan_correction(store, name, Recipe(BANK, estimator=NNN(8), gate=gate))
    ).target


def found(results):
    return [
        [(hit["id"], pytest.approx(hit["distance"], abs=1e-5)) for hit in hits] for hits in results
    ]


def test_a_gated_search_is_divided(lite, limits):
    name, client = corrected(lite, gate=8), lite.hubness_client()
    got = client.search(name, data=QUERIES, limit=5, output_fields=["group"])
    assert limits
    wanted = [
        client.search(name, data=QUERIES[i : i + 1], limit=5, output_fields=["group"])[0]
        for i in range(150)
    ]
    assert found(got) == found(wanted)
    assert [[hit["entity"] for hit in hits] for hits in got] == [
        [hit["entity"] for hit in hits] for hits in wanted
    ]


def test_a_hybrid_search_is_divided(lite, limits):
    name, client = corrected(lite), lite.hubness_client()
    requests = [AnnSearchRequest(list(QUERIES), "vector", {}, 10) for _ in range(2)]
    got = client.hybrid_search(name, requests, RRFRanker(), 5)
    assert limits
    few = [AnnSearchRequest(list(QUERIES[:9]), "vector", {}, 10) for _ in range(2)]
    assert len(got) == len(QUERIES)
    assert found(got[:9]) == found(client.hybrid_search(name, few, RRFRanker(), 5))


@pytest.mark.parametrize("method", ["insert", "upsert"])
def test_a_write_is_divided(lite, limits, method):
    name, client = corrected(lite), lite.hubness_client()
    rows = [{"id": 1_000 + i, "vector": vector, "group": i} for i, vector in enumerate(NEW)]
    answer = getattr(client, method)(name, rows)
    assert limits
    assert answer[f"{method}_count"] == len(rows)
    if method == "insert":
        assert list(answer["ids"]) == [row["id"] for row in rows]
    read = client.query(name, "id >= 1000", output_fields=["vector", "group"])
    stored = {row["id"]: row for row in read}
    np.testing.assert_allclose([stored[row["id"]]["vector"] for row in rows], NEW, rtol=1e-6)
    assert [stored[row["id"]]["group"] for row in rows] == list(range(len(rows)))


def test_the_first_rows_of_a_write_that_fails_in_a_later_part_reach_the_copy(
    lite, limits, monkeypatch
):
    moving = Moving(lite).backward(required=True)
    answer = Session.answer
    taken = []

    async def filling(self, step, caller, pool, send):
        is_insert = isinstance(step, Ask) and step.method == "insert"
        if is_insert and len(step.args[1]) <= MAX_ROWS:
            taken.append(step)
            if len(taken) > 1:
                raise MilvusException(1, "the disk is full")
        return await answer(self, step, caller, pool, send)

    monkeypatch.setattr(Session, "answer", filling)
    rows = moving.rows(range(1_000, 1_200))
    with pytest.raises(MilvusException, match="the first 100 of 200 rows were written"):
        lite.hubness_client().insert(moving.target, rows)
    assert [key for key in moving.assert_equal() if key >= 1_000] == list(range(1_000, 1_100))


def test_a_plain_collection_keeps_the_limits_of_its_server(lite, limits):
    name, client = lite.name("plain"), lite.hubness_client()
    plain_collection(lite.client(), name, ITEM_VECTORS, "IP")
    with pytest.raises((MilvusException, grpc.RpcError), match="larger than max"):
        client.search(name, data=np.ones((201, DIM), np.float32), limit=1)
    assert len(limits) == 1
