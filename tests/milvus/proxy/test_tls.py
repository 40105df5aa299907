"""TLS to the upstream, whose certificate an authority signed that only this test knows."""

import grpc
import numpy as np
import pytest
from pymilvus import MilvusClient

from milvus_hubness import NNN
from milvus_hubness.basics.files.certificates import Certificates
from tests.milvus.proxy.running import ProxyHere
from tests.support.born import born
from tests.support.galleries import vectors
from tests.support.tls import Authority, Terminator

DIM = 12


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def secured(lite, authority):
    """(backend, HOST:PORT) of a Milvus that speaks TLS only to those who trust the authority."""
    before = Terminator(lite.uri.removeprefix("http://"), *authority.sign("milvus"))
    yield lite, before.address
    before.stop()


def test_all_that_goes_upstream_is_encrypted(secured, authority):
    """What is passed on, and what the proxy asks for itself, as the bank of new rows."""
    lite, upstream = secured
    rng = np.random.default_rng(6)
    items, bank = vectors(rng, 60, DIM), vectors(rng, 30, DIM)
    target = born(lite, items, bank, "COSINE", estimator=NNN(4))
    fresh = vectors(rng, 1, DIM)
    with ProxyHere(
        upstream, upstream_tls=True, certificates=Certificates(str(authority.file))
    ) as proxy:
        client = MilvusClient(proxy.uri)
        assert (
            client.insert(target, {"id": 900, "vector": fresh[0], "group": 1})["insert_count"] == 1
        )
        [found] = client.search(target, data=fresh, limit=20)
        [expected] = lite.hubness_client().behind.search(target, data=fresh, limit=20)
        assert found.ids == expected.ids
        assert 900 in found.ids
        np.testing.assert_allclose(found.distances, expected.distances, atol=1e-5)
        client.close()


@pytest.mark.parametrize("trusted", ["nobody", "another"])
def test_an_upstream_of_an_unknown_authority_is_not_spoken_to(secured, tmp_path, trusted):
    _, upstream = secured
    further = {}
    if trusted == "another":
        further["certificates"] = Certificates(str(Authority(tmp_path, "other").file))
    with (
        ProxyHere(upstream, upstream_tls=True, **further) as proxy,
        grpc.insecure_channel(proxy.address) as channel,
        pytest.raises(grpc.RpcError) as failed,
    ):
        channel.unary_unary("/milvus.proto.milvus.MilvusService/ShowCollections")(b"", timeout=20)
    assert failed.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("shown", ["its own", "none"])
def test_an_upstream_that_wants_a_certificate_gets_that_of_the_proxy(lite, authority, shown):
    key, certificate = authority.sign("the proxy")
    shows = (str(certificate), str(key)) if shown == "its own" else ()
    before = Terminator(
        lite.uri.removeprefix("http://"), *authority.sign("milvus"), clients_of=authority.file
    )
    certificates = Certificates(str(authority.file), *shows)
    with (
        ProxyHere(before.address, upstream_tls=True, certificates=certificates) as proxy,
        grpc.insecure_channel(proxy.address) as channel,
    ):
        ask = channel.unary_unary("/milvus.proto.milvus.MilvusService/ShowCollections")
        if shown == "its own":
            assert isinstance(ask(b"", timeout=20), bytes)
        else:
            with pytest.raises(grpc.RpcError) as failed:
                ask(b"", timeout=20)
            assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
    before.stop()
