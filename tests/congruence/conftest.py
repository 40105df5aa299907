"""Every database, for what all of them promise; what is Milvus's alone is shown on a `backend`."""

import pytest
from qdrant_client import QdrantClient

from milvus_hubness.milvus.store.server import version_numbers
from tests.conftest import DATABASES, Backend
from tests.qdrant.strict import StrictServer
from tests.support.databases import OnMilvus, OnQdrant
from tests.support.servers import QdrantServer
from tests.support.structs import StructServer

QDRANTS = {
    "qdrant-local": "",
    "qdrant-states": "",
    "qdrant-strict": "",
    "qdrant-server": "qdrant_uri",
}


@pytest.fixture(scope="session", params=[*DATABASES, *QDRANTS])
def found(request):
    """(kind, uri) of each database in turn."""
    uri = {**DATABASES, **QDRANTS}[request.param]
    return request.param, request.getfixturevalue(uri) if uri else ":memory:"


def _held(kind, uri):
    if kind in DATABASES:
        return OnMilvus(kind, uri, Backend(kind, uri).client)
    if kind == "qdrant-strict":
        return OnQdrant(kind, StrictServer().client())
    return OnQdrant(kind, QdrantServer.client(uri) if "://" in uri else QdrantClient(uri))


@pytest.fixture
def database(found):
    here = _held(*found)
    yield here
    here.clean()


@pytest.fixture(scope="module")
def shared_database(found):
    here = _held(*found)
    yield here
    here.clean()


@pytest.fixture(
    scope="module",
    params=["lite-structs", *(name for name in DATABASES if name == "server-current")],
)
def place(request, tmp_path_factory):
    """A Milvus with arrays of structs: a current server, and a model of one."""
    if request.param == "server-current":
        here = Backend(request.param, request.getfixturevalue("current_uri"))
        version = here.client().get_server_version()
        if version_numbers(version) < (2, 6, 4):
            pytest.skip(f"Milvus has arrays of structs from 2.6.4 on, this is {version}")
        yield here
        here.clean()
        return

    server = StructServer(tmp_path_factory.mktemp("structs"))
    yield Backend("lite", server.uri)
    server.stop()
