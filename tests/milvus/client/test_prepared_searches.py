"""A search of a kind that was searched before: one request, as long as the collection does not change."""

import numpy as np
import pytest
from pymilvus import MilvusClient
from pymilvus.exceptions import MilvusException

from milvus_hubness import HubnessClient
from milvus_hubness.errors import DimensionMismatch, UnsupportedOperation
from tests.support.born import born, create_corrected
from tests.support.galleries import vectors
from tests.support.reranked import Enabled

DIM, ITEMS = 8, 60
QUERY = vectors(np.random.default_rng(3), 1, DIM)


@pytest.fixture(params=["COSINE", "IP", "L2"])
def collection(lite, request):
    """A corrected collection, and a client that has searched it."""
    rng = np.random.default_rng(2)
    name = born(lite, vectors(rng, ITEMS, DIM), vectors(rng, 30, DIM), request.param)
    client = lite.client(HubnessClient)
    client.search(name, QUERY, limit=3)
    yield name, client
    client.close()


@pytest.fixture
def sent(monkeypatch):
    """The names of the requests that clients of pymilvus send, in order."""
    names = []

    def watched(name):
        request = getattr(MilvusClient, name)

        def method(client, *args, **options):
            names.append(name)
            return request(client, *args, **options)

        return method

    for name in ("search", "describe_collection"):
        monkeypatch.setattr(MilvusClient, name, watched(name))
    return names


def test_it_is_one_request(collection, sent):
    name, client = collection
    client.search(name, QUERY, limit=3)
    assert sent == ["search"]


@pytest.mark.parametrize("output_fields", [None, [], ["id"], ["note"], ["vector"], ["*"]])
def test_hits_have_no_hidden_fields_and_the_vectors_of_the_user(collection, output_fields):
    """Milvus Lite returns all fields where none is named, a server returns none."""
    name, client = collection
    for _ in range(2):
        [hits] = client.search(name, QUERY, limit=3, output_fields=output_fields)
        for hit in hits:
            assert not any(field.startswith("hubness") for field in hit["entity"])
            assert len(hit["entity"].get("vector", [0] * DIM)) == DIM


def test_a_search_that_the_server_refuses_is_sent_once(collection, sent):
    name, client = collection
    with pytest.raises(MilvusException):
        client.search(name, QUERY, filter="id ==", limit=3)
    assert sent.count("search") == 1


def test_a_query_of_another_width_is_not_sent(collection, sent):
    name, client = collection
    with pytest.raises(DimensionMismatch):
        client.search(name, QUERY[:, 1:], limit=3)
    assert sent.count("search") == 0


def test_it_is_repeated_by_the_new_state_when_the_collection_has_changed(collection, lite, sent):
    name, client = collection
    rng = np.random.default_rng(4)
    other = lite.client(HubnessClient)
    other.drop_collection(name)
    wide = 2 * DIM
    create_corrected(other, name, vectors(rng, ITEMS, wide), vectors(rng, 30, wide), "IP")
    other.close()
    sent.clear()
    [hits] = client.search(name, vectors(rng, 1, wide), limit=3)
    assert len(hits) == 3
    assert sent == ["describe_collection", "search"]


@pytest.fixture(scope="module")
def beside(shared_lite):
    """A collection whose biases are in a side collection, and a client."""
    enabled = Enabled(shared_lite, "IP")
    return enabled, enabled.new_client(state_ttl=3_600.0)


@pytest.mark.parametrize(
    "needing_ranks",
    [
        {"order_by_fields": ["group"]},
        {"group_by_field": "group"},
        {"group_by_fields": ["group"]},
        {"iterator": "True"},
        {"search_iter_v2": "True"},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("is_named_before", [False, True])
def test_what_needs_the_ranks_of_the_server_is_refused_where_the_client_ranks(
    beside, needing_ranks, is_named_before
):
    enabled, client = beside
    before = dict.fromkeys(needing_ranks) if is_named_before else {}
    client.search(enabled.name, list(enabled.queries), limit=3, **before)
    with pytest.raises(UnsupportedOperation, match="would see uncorrected scores"):
        client.search(enabled.name, list(enabled.queries), limit=3, **needing_ranks)


def test_groups_of_a_field_with_its_biases_in_the_vectors_are_one_request(collection, sent):
    name, client = collection
    for _ in range(2):
        sent.clear()
        [hits] = client.search(
            name, QUERY, limit=3, group_by_field="group", output_fields=["group"]
        )
        assert len({hit["entity"]["group"] for hit in hits}) == len(hits) == 3
        assert sent == ["search"]
