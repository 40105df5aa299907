"""The Qdrants that every test runs against: the local mode, and a server where Docker answers."""

import importlib.util
import os
import tempfile
from pathlib import Path

import pytest
from qdrant_client import QdrantClient

from tests.qdrant.worlds import METRICS, Backend, Corrected

IMAGE = "qdrant/qdrant:v1.16.3"


def _server():
    if importlib.util.find_spec("testcontainers") is None:
        pytest.skip("the package testcontainers is not installed")
    from docker.errors import DockerException
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.docker_client import DockerClient
    from testcontainers.core.waiting_utils import wait_for_logs

    try:
        DockerClient(timeout=5).client.ping()
    except (DockerException, OSError) as error:
        pytest.skip(f"no Docker engine answers: {error}")
    container = DockerContainer(IMAGE).with_exposed_ports(6333)
    container.start()
    wait_for_logs(container, "Qdrant HTTP listening", timeout=60)
    return container


@pytest.fixture(scope="session")
def server_uri():
    container = _server()
    yield f"http://{container.get_container_host_ip()}:{container.get_exposed_port(6333)}"
    container.stop()


def _client(request):
    if request.param == "server":
        return QdrantClient(url=request.getfixturevalue("server_uri"))
    return QdrantClient(":memory:")


@pytest.fixture(params=["local", "server"])
def backend(request):
    here = Backend(request.param, _client(request))
    yield here
    here.clean()


@pytest.fixture(params=["local", "states", "server"])
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
