"""Milvus Lite for the tests."""

import logging

import pytest
from pymilvus.settings import Config

logging.getLogger("pymilvus").setLevel(logging.CRITICAL + 1)
logging.getLogger("milvus_lite").setLevel(logging.CRITICAL + 1)
Config.WaitTimeDurationWhenLoad = 0.05


@pytest.fixture(scope="session")
def uri(tmp_path_factory):
    return str(tmp_path_factory.mktemp("lite") / "langchain.db")
