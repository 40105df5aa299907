"""Properties of a collection, as jobs write them beside the user's own."""

import pytest

from milvus_hubness import MilvusStore


class Server:
    """A client of a server with one collection. Each alteration is noted, as the server gets it."""

    def __init__(self, version, properties):
        self.version, self.properties, self.altered = version, properties, []

    def get_server_version(self):
        return self.version

    def describe_collection(self, collection):
        return {"properties": self.properties}

    def alter_collection_properties(self, collection, properties):
        self.altered.append(properties)


@pytest.mark.parametrize("version", ["v2.3.5", "v2.6.0"])
def test_a_property_is_written_with_the_time_to_live_which_milvus_2_3_forgets_otherwise(version):
    server = Server(version, {"collection.ttl.seconds": "60", "owner": "search"})
    MilvusStore(server).write_property("products", "hubness_tuning", None)
    assert server.altered
    for properties in server.altered:
        assert properties == {"collection.ttl.seconds": "60", "hubness_tuning": ""}


def test_no_other_property_is_written_again():
    server = Server("v2.3.5", {"owner": "search"})
    MilvusStore(server).write_property("products", "hubness_tuning", None)
    assert all(properties == {"hubness_tuning": ""} for properties in server.altered)
