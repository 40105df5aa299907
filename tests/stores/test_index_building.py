"""Waiting for indexes that the server builds, or fails to build."""

from types import SimpleNamespace

import pytest

from milvus_hubness import MilvusStore, StoreError

FAILED = 4


class Server:
    """Answers `describe_index` with one state after the other, as pymilvus 3.0.2 does: without the reason."""

    def __init__(self, *states, reason=""):
        self.states, self.reason, self.loaded = list(states), reason, []

    def get_server_version(self):
        return "v2.6.18"

    def list_indexes(self, collection):
        return ["vector_index"]

    def describe_index(self, collection, index):
        assert self.states, "it asks for more than the server has to say"
        state, pending = self.states.pop(0)
        return {"index_name": index, "state": state, "pending_index_rows": pending}

    def get_load_state(self, collection):
        return {"state": SimpleNamespace(name="NotLoad")}

    def load_collection(self, collection):
        self.loaded.append(collection)

    def _generate_call_context(self):
        return "context"

    def _get_connection(self):
        return self

    def get_index_state(self, collection, index, *, context):
        assert (collection, index, context) == ("products", "vector_index", "context")
        return FAILED, self.reason


def test_it_waits_until_the_index_is_built():
    server = Server(("InProgress", 5), ("Finished", 5), ("Finished", 0))
    MilvusStore(server).load("products")
    assert (server.states, server.loaded) == ([], ["products"])


@pytest.mark.parametrize("states", [[("Failed", 60)], [("InProgress", 60), ("Failed", 0)]])
def test_an_index_that_cannot_be_built_is_an_error_with_the_reason(states):
    server = Server(*states, reason="M must be\n at most 2048")
    with pytest.raises(StoreError) as raised:
        MilvusStore(server).load("products")
    said = str(raised.value)
    for words in ("'products'", "'vector_index'", "M must be at most 2048", "create it again", "run the command again"):
        assert words in said
    assert "\n" not in said
    assert not server.loaded


def test_a_server_that_gives_no_reason():
    with pytest.raises(StoreError, match="it gives no reason"):
        MilvusStore(Server(("Failed", 1))).load("products")
