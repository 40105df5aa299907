"""Real Milvus backends for the tests; nothing here knows pytest, and nothing outlives its owner.

Each server class has `unavailable()`, the reason why it cannot run here or None; `start()`, `stop()` and
`uri`; and is a context manager. In place of a container, $MILVUS_URI and $QDRANT_URL name a server that runs already:
see `take_addresses`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

from pymilvus import MilvusClient, MilvusException
from pymilvus.client.types import LoadState
from qdrant_client import QdrantClient

from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.milvus.pymilvus_private import database_of
from qdrant_hubness.store.properties import STATES

STARTUP_SECONDS = 120
STOP_SECONDS = 5
SETTINGS = {
    # A killed server's sessions block the next start until they expire.
    "common.session.ttl": 10,
    # By default SIGTERM waits half an hour for the query nodes to hand over.
    "common.gracefulStopTimeout": 1,
    # The default waits between the coordinators' rounds make every load and strong read take seconds.
    "proxy.timeTickInterval": 50,
    "queryCoord.checkInterval": 50,
    "queryCoord.distPullInterval": 50,
    "log.level": "warn",
}
ENVIRONMENT = {
    # Of these the configuration's template knows nothing: its `set` drops such without a word.
    "QUERYCOORD_CHECKCHANNELINTERVAL": "50",
    "QUERYCOORD_CHECKSEGMENTINTERVAL": "50",
    # A flush waits until no writer may add rows to the segment: by default for two seconds.
    "DATACOORD_SEGMENT_ASSIGNMENTEXPIRATION": "200",
    # By default 10.
    "PROXY_MAXROLENUM": "100",
    # Idle servers mostly tick and collect garbage.
    "GOGC": "400",
}
EXEC_AND_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def lite_uri(folder: Path) -> str:
    """A Milvus Lite database file in `folder`."""
    return str(folder / "lite.db")


def made_for(names: Iterable[str], existing: Iterable[str]) -> list[str]:
    """The existing collections of these names, and their copies, banks and side collections."""
    beginnings = tuple(name + end for name in names for end in ("__", "_hubness", "_r"))
    return [each for each in existing if each in names or each.startswith(beginnings)]


def aliases_of(client: MilvusClient, name: str) -> list[str]:
    """The aliases of a collection. Milvus 2.3 looks in the default database if a request does not name one."""
    return list(client.list_aliases(name, db_name=database_of(client))["aliases"])


def die_with_parent(command: list[str]) -> list[str]:
    """`command`, wrapped so that the kernel kills it when the thread that started it ends, however it ends.

    The wrapper replaces itself with the command, so the process id is the command's own. It runs between
    fork and exec in a fresh interpreter, where a preexec_fn could deadlock beside the threads of gRPC.
    """
    return [sys.executable, "-c", EXEC_AND_DIE_WITH_PARENT, *command]


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on, below the range from which the kernel takes those of outgoing connections."""
    ports: list[int] = []
    for port in random.sample(range(20_000, 32_000), 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError(f"no {count} free ports between 20000 and 32000")


def _binaries() -> Path:
    """The server's executable and libraries, unpacked once (4 s) into the environment's folder."""
    import milvus

    folder = Path(sys.prefix, f"milvus-{version('milvus')}")
    if not folder.exists():
        unpacked = tempfile.mkdtemp(dir=sys.prefix)
        milvus._initialize_data_files(unpacked)
        try:
            os.rename(unpacked, folder)
        except OSError:  # another process was quicker
            shutil.rmtree(unpacked)
    return folder / "bin"


class MilvusServer:
    """The real standalone server of `milvus==2.3.5` from PyPI, on free ports, over a temporary data folder.

    It listens on all interfaces: 2.3.5 has no setting for that (`*.ip` only sets what it advertises). channels:
    physical ones, which tick, used or not: with 2 instead of Milvus's 16 an idle server takes a quarter less of the
    CPU. But started again after it was killed, 2.3.5 shows no rows of some collections that share one.
    authorization: whether requests need a token, at first `ROOT`.
    """

    ROOT = "root:Milvus"

    def __init__(self, *, channels: int = 16, authorization: bool = False) -> None:
        import milvus

        self._token = self.ROOT if authorization else ""
        self.folder = Path(tempfile.mkdtemp(prefix="milvus-server-"))
        self.log = self.folder / "milvus.log"
        self._process: subprocess.Popen[bytes] | None = None

        config = milvus.MilvusServerConfig(data_dir=str(self.folder))
        names = [name for name in config.configurable_items if name.endswith("_port")]
        self._metrics_port, etcd_peer_port, *ports = free_ports(2 + len(names))
        config.update(**dict(zip(names, ports, strict=True)))
        settings = {
            **SETTINGS,
            "rootCoord.dmlChannelNum": channels,
            "common.security.authorizationEnabled": str(authorization).lower(),
        }
        for name, value in settings.items():
            config.set(name, value)
        config.resolve()
        self.uri = f"http://127.0.0.1:{config.get('proxy_port')}"
        self._etcd_config = self.folder / "configs" / "etcd.yaml"
        self._etcd_config.write_text(_etcd_config(config.get("etcd_port"), etcd_peer_port))

    @staticmethod
    @functools.cache
    def unavailable() -> str | None:
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            return f"milvus==2.3.5 runs on Linux x86-64 only, this is {sys.platform} {platform.machine()}"
        if importlib.util.find_spec("milvus") is None:
            return "the package milvus==2.3.5 is not installed"
        return None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start, or start again on the same folder and ports, and wait until requests are served.

        Collections that were loaded when it was killed are loaded again by then.
        """
        libraries = _binaries()
        environment = {
            **os.environ,
            "DEPLOY_MODE": "STANDALONE",
            "METRICS_PORT": str(self._metrics_port),
            "ETCD_CONFIG_PATH": str(self._etcd_config),
            "LD_LIBRARY_PATH": str(libraries),
            **ENVIRONMENT,
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                die_with_parent([str(libraries / "milvus"), "run", "standalone"]),
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait_until(self._is_healthy)
            self._wait_until(self._serves_requests)
        except BaseException:
            self.stop()
            raise

    def kill(self) -> None:
        """End it as a power cut would; the folder stays, `start` goes on from there."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it and remove its folder. Stopping twice is fine."""
        self._end(signal.SIGTERM)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> MilvusServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + STARTUP_SECONDS
        while not condition():
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"the Milvus server ended while starting:\n{self._log_tail()}")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"no Milvus server after {STARTUP_SECONDS} s:\n{self._log_tail()}"
                )
            time.sleep(0.1)

    def _is_healthy(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self._metrics_port, timeout=5)
        try:
            connection.request("GET", "/healthz")
            return b"OK" in connection.getresponse().read()
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def _serves_requests(self) -> bool:
        try:
            with closing(MilvusClient(self.uri, token=self._token, timeout=10)) as client:
                names = client.list_collections(timeout=10)
                states = [client.get_load_state(name, timeout=10)["state"] for name in names]
        except MilvusException:
            return False
        return LoadState.Loading not in states

    def _log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])


def _etcd_config(client_port: int, peer_port: int) -> str:
    """The embedded etcd takes its ports from a file of its own; without one, two servers collide on 2379."""
    client, peer = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
    return (
        f"listen-client-urls: {client}\n"
        f"advertise-client-urls: {client}\n"
        f"listen-peer-urls: {peer}\n"
        f"initial-advertise-peer-urls: {peer}\n"
        f"initial-cluster: default={peer}\n"
    )


ADDRESSES = ("MILVUS_URI", "QDRANT_URL")
_TAKEN = "SERVER_UNDER_TEST_"


def take_addresses() -> None:
    """Move the addresses of given servers to variables that only tests read: commands and examples in tests, which read
    $MILVUS_URI and $QDRANT_URL too, must not reach these servers. Processes that tests start inherit them."""
    for name in ADDRESSES:
        if name in os.environ:
            os.environ[_TAKEN + name] = os.environ.pop(name)


def given(name: str) -> str:
    """Return the address of a given server, by its variable; "" if there is none."""
    return os.environ.get(_TAKEN + name, "")


def own_name(stem: str) -> str:
    """Return the beginning of the names of what this process makes: on a given server others may have the same name."""
    return f"t{os.getpid():x}_{_STARTED:x}_{stem}" if given("QDRANT_URL") else stem


_STARTED = time.time_ns() >> 20 & 0xFFFFFF


@functools.cache
def _no_answer(name: str, address: str) -> str | None:
    """Why nothing answers at the address of a given server, in one line."""
    place = urlsplit(address)
    try:
        port = place.port or (443 if place.scheme == "https" else DEFAULT_PORTS[name])
        with socket.create_connection((place.hostname or "", port), timeout=5):
            return None
    except (OSError, ValueError) as error:
        return f"no server answers at ${name} ({place.scheme}://{place.hostname}): {error}"


DEFAULT_PORTS = {"MILVUS_URI": 19530, "QDRANT_URL": 6333}


class CurrentMilvus:
    """The Milvus at $MILVUS_URI, or a current one in Docker, removed by testcontainers even if the tests are killed.

    On a given server the tests use a database of their own, which is dropped after them.
    """

    IMAGE = os.environ.get("MILVUS_IMAGE", "milvusdb/milvus:v3.0.1")

    def __init__(self) -> None:
        self._address = given("MILVUS_URI")
        self._database = f"tests_{os.getpid():x}_{_STARTED:x}"
        if not self._address:
            from testcontainers.community.milvus import MilvusContainer

            self._container = MilvusContainer(self.IMAGE).with_env("DEPLOY_MODE", "STANDALONE")

    @staticmethod
    def unavailable() -> str | None:
        address = given("MILVUS_URI")
        return _no_answer("MILVUS_URI", address) if address else no_docker()

    @property
    def uri(self) -> str:
        if self._address:
            return f"{self._address.rstrip('/')}/{self._database}"
        return str(self._container.get_connection_url())

    def start(self) -> None:
        if not self._address:
            self._container.start()
            return
        with closing(MilvusClient(self._address)) as client:
            client.create_database(self._database)

    def stop(self) -> None:
        if not self._address:
            self._container.stop()
            return
        with closing(MilvusClient(self.uri)) as client:
            for name in client.list_collections():
                for alias in aliases_of(client, name):
                    client.drop_alias(alias)
                client.drop_collection(name)
        with closing(MilvusClient(self._address)) as client:
            client.drop_database(self._database)

    def __enter__(self) -> CurrentMilvus:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


class QdrantServer:
    """The Qdrant at $QDRANT_URL, or one in Docker, removed by testcontainers even if the tests are killed.

    On a given server, whose key is in $QDRANT_API_KEY, the names of collections begin as `own_name` says, and these are
    dropped after the tests; and so are the ledger and the collection of states, if the tests made them.
    """

    IMAGE = os.environ.get("QDRANT_IMAGE", "qdrant/qdrant:v1.19.1")
    PORT = 6333

    def __init__(self) -> None:
        self._address = given("QDRANT_URL")
        self._present: set[str] = set()
        if not self._address:
            from testcontainers.core.container import DockerContainer

            self._container = DockerContainer(self.IMAGE).with_exposed_ports(self.PORT)

    @staticmethod
    def unavailable() -> str | None:
        address = given("QDRANT_URL")
        return _no_answer("QDRANT_URL", address) if address else no_docker()

    @staticmethod
    def client(uri: str) -> QdrantClient:
        """Return a client of a server of any version."""
        return QdrantClient(
            url=uri, api_key=os.environ.get("QDRANT_API_KEY"), check_compatibility=False
        )

    @property
    def uri(self) -> str:
        if self._address:
            return self._address
        host, port = (
            self._container.get_container_host_ip(),
            self._container.get_exposed_port(self.PORT),
        )
        return f"http://{host}:{port}"

    def start(self) -> None:
        if self._address:
            self._present = self._collections()
            return
        from testcontainers.core.waiting_utils import wait_for_logs

        self._container.start()
        wait_for_logs(self._container, "Qdrant HTTP listening", timeout=STARTUP_SECONDS)

    def stop(self) -> None:
        if not self._address:
            self._container.stop()
            return
        with closing(self.client(self._address)) as client:
            for name in self._collections() - self._present:
                if name.startswith(own_name("")) or name in (LEDGER, STATES):
                    client.delete_collection(name)

    def _collections(self) -> set[str]:
        with closing(self.client(self.uri)) as client:
            return {each.name for each in client.get_collections().collections}

    def __enter__(self) -> QdrantServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


@functools.cache
def no_docker() -> str | None:
    """Why nothing can be started in Docker."""
    folders = (
        Path("/var/run"),
        Path(f"/run/user/{os.getuid()}"),
        Path.home() / ".docker/run",
        Path.home() / ".docker/desktop",
    )
    if "DOCKER_HOST" not in os.environ and not any(
        (folder / "docker.sock").exists() for folder in folders
    ):
        return "no Docker engine answers: there is no docker.sock, and $DOCKER_HOST is not set"
    if importlib.util.find_spec("testcontainers") is None:
        return "the package testcontainers is not installed"
    from docker.errors import DockerException
    from testcontainers.core.docker_client import DockerClient

    try:
        DockerClient(timeout=5).client.ping()
    except (DockerException, OSError) as error:
        return f"no Docker engine answers: {error}"
    return None
