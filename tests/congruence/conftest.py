"""Every database, for what all of them promise; what is Milvus's alone is shown on a `backend`."""

import pytest
from qdrant_client import QdrantClient

from tests.conftest import DATABASES, Backend
from tests.qdrant.strict import StrictServer
from tests.support.databases import OnMilvus, OnQdrant
from tests.support.servers import QdrantServer

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
