"""The Qdrants that every test runs against: the local mode, and a server where Docker answers."""

import os
import tempfile
from pathlib import Path

import pytest
from qdrant_client import QdrantClient

from tests.qdrant.worlds import METRICS, Backend, Corrected


def _client(request):
    if request.param == "qdrant-server":
        return QdrantClient(url=request.getfixturevalue("qdrant_uri"))
    return QdrantClient(":memory:")


@pytest.fixture(params=["local", "qdrant-server"])
def backend(request):
    here = Backend(request.param, _client(request))
    yield here
    here.clean()


@pytest.fixture(params=["local", "states", "qdrant-server"])
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
