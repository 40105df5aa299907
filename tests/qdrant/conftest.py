"""The Qdrants that every test runs against: the local mode, a strict server over it, and a server where one runs."""

import os
import tempfile
from pathlib import Path

import pytest
from qdrant_client import QdrantClient

from tests.qdrant.strict import StrictServer
from tests.qdrant.worlds import METRICS, Backend, Corrected
from tests.support.servers import QdrantServer


def _client(request):
    if request.param == "strict":
        return StrictServer().client()
    if request.param == "qdrant-server":
        return QdrantServer.client(request.getfixturevalue("qdrant_uri"))
    return QdrantClient(":memory:")


@pytest.fixture(params=["local", "strict", "qdrant-server"])
def backend(request):
    here = Backend(request.param, _client(request))
    yield here
    here.clean()


@pytest.fixture(params=["local", "states", "strict", "qdrant-server"])
def everywhere(request):
    """For what touches the state of collections."""
    here = Backend(request.param, _client(request))
    yield here
    here.clean()


@pytest.fixture
def corrected(backend):
    return Corrected(backend)


@pytest.fixture(params=list(METRICS))
def of_each_distance(request, backend):
    return Corrected(backend, request.param)


@pytest.fixture
def quick_folder():
    """One in memory, where there is such: the local mode waits for the disk at every point."""
    there = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=there if os.access(there, os.W_OK) else None) as folder:
        yield Path(folder)
