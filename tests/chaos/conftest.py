"""Milvus Lite as a server of several processes, and short waits in pymilvus."""

import pytest
from pymilvus.client import grpc_handler

from tests.chaos.processes import be_quiet
from tests.chaos.scene import milvus
from tests.chaos.settings import hasten


@pytest.fixture(scope="package")
def uri(tmp_path_factory):
    with milvus("lite", tmp_path_factory.mktemp("chaos")) as address:
        yield address


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """As other tests are, after these."""
    monkeypatch.setattr("pymilvus.client.grpc_handler.time", grpc_handler.time)
    hasten()
    be_quiet()
