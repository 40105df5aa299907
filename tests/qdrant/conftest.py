"""The Qdrants that every test runs against: the local mode, a strict server over it, and a server where one runs."""

import os
import tempfile
from pathlib import Path

import pytest
from qdrant_client import QdrantClient
from typer.testing import CliRunner

from milvus_hubness.api import databases
from milvus_hubness.cli import app
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


@pytest.fixture
def command(monkeypatch):
    """Calls milvus-hubness in this process, and closes what it opened: a folder has one reader at a time."""
    opened = []
    opener_of = databases.opener_of

    def keeping(address):
        def kept(*arguments):
            opened.append(opener_of(address)(*arguments))
            return opened[-1]

        return kept

    def call(*words, **settings):
        try:
            return CliRunner().invoke(app, list(words), **settings)
        finally:
            while opened:
                opened.pop().close()

    monkeypatch.setattr(databases, "opener_of", keeping)
    return call
