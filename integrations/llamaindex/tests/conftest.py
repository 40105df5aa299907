"""Milvus Lite for the tests."""

import logging

import pytest

logging.getLogger("pymilvus").setLevel(logging.CRITICAL + 1)
logging.getLogger("milvus_lite").setLevel(logging.CRITICAL + 1)


@pytest.fixture(scope="session")
def uri(tmp_path_factory):
    return str(tmp_path_factory.mktemp("lite") / "llamaindex.db")
