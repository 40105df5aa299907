"""The aliases of leases, and errors of a server whose proxy answers from a cache, through client and proxy."""

import numpy as np
import pytest
from pymilvus.exceptions import DescribeCollectionException, MilvusException

from milvus_hubness import NNN
from milvus_hubness.milvus.proxy.messages import refusal
from milvus_hubness.milvus.store.server import is_missing
from tests.milvus.proxy.conftest import ProxyBackend
from tests.support.born import born
from tests.support.galleries import plain_collection, vectors

DIM = 6


@pytest.fixture
def behind(caching_uri, proxies):
    here = ProxyBackend("caching", caching_uri, proxies)
    yield here
    here.clean()


def made(backend, kind):
    rng = np.random.default_rng(8)
    items, bank = vectors(rng, 20, DIM), vectors(rng, 30, DIM)
    if kind == "corrected":
        return born(backend, items, bank, "IP", estimator=NNN(4))
    name = backend.name("plain")
    plain_collection(backend.client(), name, items, "IP")
    return name


@pytest.mark.parametrize("by", ["client", "proxy"])
@pytest.mark.parametrize("kind", ["corrected", "plain"])
def test_the_aliases_of_leases_are_hidden(behind, monkeypatch, caching_server, kind, by):
    """Of a collection that a migration copies, too, which is not corrected itself."""
    # The description is that of now, so that it has something to hide.
    monkeypatch.setattr(caching_server, "alias_seconds", 0.0)
    name, plain = made(behind, kind), behind.client()
    aliases = [f"{name}__lease_1_0123abcd", f"{name}_live"]
    for alias in aliases:
        plain.create_alias(name, alias)
    client = behind.hubness_client()
    asked = client if by == "proxy" else client.behind
    assert asked.describe_collection(name)["aliases"] == aliases[1:]
    assert asked.list_aliases(name)["aliases"] == aliases[1:]
    assert sorted(plain.describe_collection(name)["aliases"]) == sorted(aliases)
    if by == "client":
        assert sorted(asked.list_aliases(name, include_internal=True)["aliases"]) == sorted(aliases)


def test_a_missing_collection_is_missing_behind_the_proxy(behind):
    client = behind.hubness_client()
    with pytest.raises(DescribeCollectionException) as described:
        client.describe_collection("nowhere")
    assert (described.value.code, described.value.compatible_code) == (0, 4)
    assert not client.has_collection("nowhere")
    with pytest.raises(MilvusException) as deleted:
        client.delete("nowhere", ids=[1])
    assert is_missing(deleted.value)


@pytest.mark.parametrize("codes", [(0, 4), (100, 4), (100, 0)])
def test_the_codes_of_an_error_are_passed_on(codes):
    status = refusal("Query", MilvusException(codes[0], "why", codes[1])).status
    assert (status.code, status.error_code) == codes


def test_an_error_without_codes_is_no_success():
    status = refusal("Query", MilvusException(0, "why", 0)).status
    assert (status.code, status.error_code) == (65535, 1)
