"""The demo's retriever: the standard library is read, and the towers are trained, once."""

import pytest

from milvus_hubness.demo.run import Pair, Retriever, build, collect


@pytest.fixture(scope="package")
def pairs() -> list[Pair]:
    return collect()


@pytest.fixture(scope="package")
def retriever(pairs: list[Pair]) -> Retriever:
    return build(pairs)
