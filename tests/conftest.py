"""The databases every congruence test runs against."""

import gc
import itertools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from urllib.parse import urljoin, urlsplit

import pytest
from hypothesis import settings
from pymilvus import MilvusClient
from pymilvus.client import grpc_handler
from pymilvus.exceptions import MilvusException
from pymilvus.settings import Config
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from milvus_hubness import HubnessClient, MilvusStore
from milvus_hubness.milvus.client.steps import ClientPolicy
from tests.milvus.caching import CachingServer
from tests.support import lite as milvus_lite
from tests.support import near_lite, servers, tiers
from tests.support.browser import Browser
from tests.support.budget import Budget
from tests.support.rewritten import keep_rewritten
from tests.support.shared_server import SharedServer

servers.take_addresses()
pytest.register_assert_rewrite(
    *(
        f"tests.support.{module}"
        for module in (
            "catalogue",
            "client_suite",
            "dual_writes",
            "every_call",
            "index_hints",
            "migrated",
            "pairs",
            "reranked",
        )
    )
)
settings.register_profile("short", deadline=None, max_examples=20, derandomize=True)
settings.register_profile("long", deadline=None, max_examples=200, derandomize=True)
settings.load_profile("short")
logging.getLogger("pymilvus").setLevel(logging.CRITICAL + 1)
logging.getLogger("milvus_lite").setLevel(logging.CRITICAL + 1)

# pymilvus asks twice a second whether an index is built or a flush is over.
Config.WaitTimeDurationWhenLoad = 0.05
grpc_handler.time = SimpleNamespace(
    time=time.time, sleep=lambda seconds: time.sleep(min(seconds, 0.05))
)
milvus_lite.spare_work()
near_lite.answer_without_a_connection()

# Tests that migrate or refresh have no writers that read the announcement, or pass client_ttl.
os.environ["MILVUS_HUBNESS_CLIENT_TTL"] = "0"
# Most tests correct random vectors, which no verdict would have corrected. Those that are about the
# verdict ask for it.
os.environ["MILVUS_HUBNESS_VERDICT"] = "skip"

DATABASES = {"lite": "lite_uri", "server-2.3.5": "served_uri", "caching": "caching_uri"}
if servers.CurrentMilvus.unavailable() is None:
    DATABASES["server-current"] = "current_uri"

AN_HOUR_MS = 3_600_000

_numbers = itertools.count()


@dataclass
class Backend:
    """A running Milvus. Collections made under `name` are dropped after the test."""

    kind: str
    uri: str
    made: list[str] = field(default_factory=list)

    @property
    def is_lite(self):
        """Whether Milvus Lite finds and stores: the caching server, too, has what it has, and lacks what it lacks."""
        return self.kind in ("lite", "caching")

    @property
    def database(self):
        """The database of the server that the tests of this process have to themselves."""
        return urlsplit(self.uri).path.strip("/") or "default"

    def in_database(self, name):
        """The same server, another database of it."""
        return Backend(self.kind, urljoin(self.uri, f"/{name}"))

    def client(self, cls: Callable[..., MilvusClient] = MilvusClient, **options):
        """Milvus Lite hangs up on idle clients for their pings of every ten seconds, and what is asked at
        that moment fails: these send none."""
        quiet = (
            {"grpc_options": {"grpc.keepalive_time_ms": AN_HOUR_MS}} if self.kind == "lite" else {}
        )
        again = retry_if_exception_type(MilvusException)
        retrying = Retrying(
            retry=again, stop=stop_after_attempt(5), wait=wait_fixed(0.5), reraise=True
        )
        return retrying(cls, self.uri, **quiet, **options)

    def hubness_client(self, below=None, policy=None, **options):
        """A HubnessClient. below: a subclass of MilvusClient that gets its requests to the server. policy: the fields
        of its ClientPolicy that differ from the defaults."""
        bases = (HubnessClient, below) if below else (HubnessClient,)
        cls = type("ClientOfATest", bases, {"policy": ClientPolicy(**(policy or {}))})
        return self.client(cls, state_ttl=options.pop("state_ttl", 0.0), **options)

    def store(self):
        return MilvusStore(self.client())

    def name(self, stem="c"):
        name = f"{stem}_{next(_numbers)}"
        self.made.append(name)
        return name

    def clean(self):
        client = self.client()
        for name in servers.made_for(self.made, client.list_collections()):
            for alias in servers.aliases_of(client, name):
                client.drop_alias(alias)
            client.drop_collection(name)
        self.made.clear()


def pytest_configure(config):
    config.pluginmanager.register(Budget())
    config.pluginmanager.register(SharedServer())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    left_out = {item for item in items if tiers.is_left_out(item)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    tiers.mark_tiers(items)
    tiers.expect_named(items)
    result = yield
    tiers.order(items)  # After pytest, which brings the cases of one database together.
    # What is imported stays: garbage collections look only at what tests make, and less often.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    """Have all libraries of a worker, and of the processes that it starts, compute in one thread: those of several
    workers would wait for each other, and a thread that waits keeps a core busy. They read this when they are loaded.
    """
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    roots = [config.rootpath / folder for folder in config.getini("testpaths")]
    files = [path for root in roots for path in root.rglob("test_*.py")]
    keep_rewritten(files, config.pluginmanager.rewrite_hook)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return tiers.Scheduling(config, log)


def pytest_terminal_summary(terminalreporter):
    """Print the counts that tests recorded as a property, whatever process they ran in."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "counts" and report.when == "call":
                terminalreporter.write_line(value)


@pytest.fixture(scope="session")
def lite_uri(tmp_path_factory):
    return servers.lite_uri(tmp_path_factory.mktemp("lite"))


@pytest.fixture(scope="session")
def served_uri(request):
    """A database of Milvus 2.3.5: on the server that all workers share, or on one of this process."""
    if reason := servers.MilvusServer.unavailable():
        pytest.skip(reason)
    if worker := getattr(request.config, "workerinput", None):
        client = MilvusClient(worker["server"])
        client.create_database(worker["workerid"])
        client.close()
        yield f"{worker['server']}/{worker['workerid']}"
        return
    with servers.MilvusServer(channels=2) as server:
        yield server.uri


@pytest.fixture(scope="session")
def caching_server():
    """A model of Milvus 2.6, whose proxy answers from a cache."""
    with CachingServer() as server:
        yield server


@pytest.fixture(scope="session")
def caching_uri(caching_server):
    return caching_server.uri


@pytest.fixture(scope="session")
def current_uri():
    if reason := servers.CurrentMilvus.unavailable():
        pytest.skip(reason)
    with servers.CurrentMilvus() as server:
        yield server.uri


@pytest.fixture(scope="session")
def qdrant_uri():
    if reason := servers.QdrantServer.unavailable():
        pytest.skip(reason)
    with servers.QdrantServer() as server:
        yield server.uri


@pytest.fixture(scope="session", params=DATABASES)
def running(request):
    """(kind, uri) of each database in turn."""
    return request.param, request.getfixturevalue(DATABASES[request.param])


@pytest.fixture(scope="module")
def shared_backend(running):
    here = Backend(*running)
    yield here
    here.clean()


@pytest.fixture
def backend(running):
    here = Backend(*running)
    yield here
    here.clean()


@pytest.fixture(scope="module")
def shared_lite(lite_uri):
    here = Backend("lite", lite_uri)
    yield here
    here.clean()


@pytest.fixture
def lite(lite_uri):
    here = Backend("lite", lite_uri)
    yield here
    here.clean()


@pytest.fixture
def served(served_uri):
    here = Backend("server-2.3.5", served_uri)
    yield here
    here.clean()


@pytest.fixture
def caching(caching_uri):
    here = Backend("caching", caching_uri)
    yield here
    here.clean()


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """One Chromium for all pages of a worker: most of the time of a test in a browser is its start."""
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()
