"""Milvus Lite as a server of several processes, and short waits in pymilvus."""

import logging

import pytest
from pymilvus.client import grpc_handler

from tests.chaos.processes import LIBRARIES, be_quiet
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
    levels = {name: logging.getLogger(name).level for name in LIBRARIES}
    be_quiet()
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
