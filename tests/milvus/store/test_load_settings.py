"""The copy and the side collection are loaded as the source is: replicas and resource groups."""

from types import SimpleNamespace

import numpy as np
import pytest
from pymilvus.exceptions import MilvusException
from pymilvus.grpc_gen import milvus_pb2

from milvus_hubness import NNN, Beside, MilvusStore, QueryBank, Recipe, connect, plan_correction
from milvus_hubness.correction.fitted import initial_state
from milvus_hubness.correction.state import BankReference
from milvus_hubness.milvus.store.requests import DEFAULT_GROUP
from tests.support.galleries import plain_collection, vectors
from tests.support.servers import MilvusServer

DIM = 8
BANK = QueryBank(vectors(np.random.default_rng(2), 40, DIM))


class Loaded:
    """A client of a server on which one collection is loaded, with a replica in each of these groups."""

    def __init__(self, groups, state="Loaded"):
        self.groups, self.state, self.loads = groups, state, []

    def get_server_version(self):
        return "v2.5.0"

    def get_load_state(self, collection):
        return {"state": SimpleNamespace(name=self.state)}

    def describe_replica(self, collection):
        assert self.state == "Loaded", "Milvus refuses this for other collections"
        return [SimpleNamespace(resource_group=group) for group in self.groups]

    def list_indexes(self, collection):
        return []

    def load_collection(self, collection, _async, **settings):
        self.loads.append(settings)
        self.state = "Loaded"


@pytest.mark.parametrize(
    ("groups", "wanted"),
    [
        ([DEFAULT_GROUP], {}),
        (["fast"], {"resource_groups": ["fast"]}),
        ([DEFAULT_GROUP] * 2, {"replica_number": 2}),
        (["fast", "fast"], {"replica_number": 2, "resource_groups": ["fast"]}),
        (["slow", "fast"], {"replica_number": 2, "resource_groups": ["fast", "slow"]}),
        (["slow", "fast", "fast"], {"replica_number": 3}),
    ],
)
def test_a_loaded_collection_is_loaded_again_with_its_own_settings(groups, wanted):
    client = Loaded(groups)
    MilvusStore(client).load("products")
    assert client.loads == [wanted]


def test_a_released_collection_is_loaded_as_pymilvus_does():
    client = Loaded([], "NotLoad")
    MilvusStore(client).load("products")
    assert client.loads == [{}]


@pytest.mark.long
@pytest.mark.skipif(MilvusServer.unavailable() is not None, reason=str(MilvusServer.unavailable()))
def test_a_copy_and_a_side_collection_go_to_the_resource_group_of_the_source():
    """A server of its own, as its only node leaves the default group, where nothing can be loaded then."""
    with MilvusServer(channels=2) as server:
        client = connect(server.uri)
        plain_collection(client, "products", vectors(np.random.default_rng(1), 60, DIM), "IP")
        client.release_collection("products")
        client.create_resource_group("fast")
        moved = milvus_pb2.TransferNodeRequest(
            source_resource_group=DEFAULT_GROUP, target_resource_group="fast", num_node=1
        )
        client._get_connection()._stub.TransferNode(moved)
        with pytest.raises(MilvusException, match="nodes not enough"):
            client.load_collection("products")
        client.load_collection("products", resource_groups=["fast"])

        store = MilvusStore(client)
        plan = plan_correction(store, "products", Recipe(BANK, estimator=NNN(8)))
        assert "the copy is loaded as the source is: resource_groups ['fast']" in plan.remarks
        reference = BankReference(
            collection="copy__bank",
            generation="0",
            count=len(BANK),
            size=len(BANK),
            fingerprint="f",
        )
        state = initial_state(
            plan.chosen.layout,
            plan.chosen.estimator,
            reference,
            field="vector",
            source="products",
            suffix="",
        )
        store.create_copy(plan.source, "copy", state)
        side, _ = plan_correction(
            store, "products", Recipe(BANK, estimator=NNN(8)), Beside()
        ).body.sides
        store.create_side(store.info("products"), side)
        for name in ("copy", side):
            assert [replica.resource_group for replica in client.describe_replica(name)] == ["fast"]
        store.load("copy")
