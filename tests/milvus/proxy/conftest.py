"""The databases of the suites, behind a proxy: collections are made, and corrected, without it."""

from urllib.parse import urlsplit

import grpc
import numpy as np
import pytest
from milvus_lite.server_manager import server_manager_instance

from milvus_hubness import NNN
from milvus_hubness.correction.overrides import Overrides
from tests.conftest import Backend
from tests.milvus.proxy.hostile import DIM
from tests.milvus.proxy.raw_calls import UNLIMITED
from tests.milvus.proxy.running import ForeignClient, ProxyHere, at
from tests.milvus.proxy.upstreams import FakeUpstream
from tests.support.born import born
from tests.support.galleries import vectors


class ProxyBackend(Backend):
    """What answers as HubnessClient does is a plain client, which speaks to the proxy."""

    def __init__(self, kind, uri, proxies):
        super().__init__(kind, uri)
        self.proxies = proxies

    def hubness_client(self, strength=None, policy=None, **options):
        client = ForeignClient(self.proxies.uri(self.uri, strength), **options)
        client.behind = super().hubness_client(policy=policy)
        return client


class Proxies:
    """One for each database and strength that are asked for."""

    def __init__(self):
        self.running = {}

    def uri(self, upstream, strength=None):
        where = urlsplit(upstream)
        if (upstream, strength) not in self.running:
            self.running[upstream, strength] = ProxyHere(
                where.netloc, overrides=Overrides(strength), state_ttl=0.0
            )
        return self.running[upstream, strength].uri + where.path


@pytest.fixture(scope="session")
def proxies():
    here = Proxies()
    yield here
    for proxy in here.running.values():
        proxy.stop()


@pytest.fixture(scope="session")
def lite_server_uri(tmp_path_factory):
    """The address of a Milvus Lite of this process."""
    path = str(tmp_path_factory.mktemp("served") / "lite.db")
    yield server_manager_instance.start_and_get_uri(path)
    server_manager_instance.release_server(path)


@pytest.fixture(scope="session", params=["lite", "server-2.3.5"])
def running(request):
    """(kind, uri) of each database in turn."""
    return at(request)


@pytest.fixture(scope="module")
def shared_backend(running, proxies):
    here = ProxyBackend(*running, proxies)
    yield here
    here.clean()


@pytest.fixture
def backend(running, proxies):
    here = ProxyBackend(*running, proxies)
    yield here
    here.clean()


@pytest.fixture
def lite(lite_server_uri, proxies):
    here = ProxyBackend("lite", lite_server_uri, proxies)
    yield here
    here.clean()


@pytest.fixture
def upstream():
    """A server that is no Milvus. It takes any token."""
    here = FakeUpstream()
    yield here
    here.stop()


@pytest.fixture
def proxy(upstream):
    with ProxyHere(upstream.address) as here:
        yield here


@pytest.fixture
def channel(proxy):
    """A connection to the proxy that sends messages of any size."""
    with grpc.insecure_channel(proxy.address, UNLIMITED) as here:
        yield here


@pytest.fixture
def target(lite):
    """The name of a corrected collection."""
    rng = np.random.default_rng(6)
    items, bank = vectors(rng, 60, DIM), vectors(rng, 30, DIM)
    return born(lite, items, bank, "COSINE", estimator=NNN(4))
