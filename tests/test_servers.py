from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from pymilvus import MilvusClient
from qdrant_client import QdrantClient, models

from tests.qdrant.strict import StrictServer, listening
from tests.support import servers
from tests.support.servers import CurrentMilvus, MilvusServer, QdrantServer, free_ports, lite_uri

VECTORS = np.random.default_rng(0).standard_normal((200, 8)).astype(np.float32)

no_server, no_current = MilvusServer.unavailable(), CurrentMilvus.unavailable()
needs_server = pytest.mark.skipif(no_server is not None, reason=str(no_server))
needs_current = pytest.mark.skipif(no_current is not None, reason=str(no_current))


def fill(uri: str) -> None:
    with closing(MilvusClient(uri)) as client:
        client.create_collection(
            "things", dimension=8, metric_type="IP", consistency_level="Strong"
        )
        rows = [{"id": i, "vector": vector.tolist()} for i, vector in enumerate(VECTORS)]
        client.insert("things", rows)


def nearest(uri: str, query: np.ndarray) -> list[int]:
    with closing(MilvusClient(uri)) as client:
        (hits,) = client.search("things", [query.tolist()], limit=5, consistency_level="Strong")
        return [hit["id"] for hit in hits]


def collections(uri: str) -> list[str]:
    with closing(MilvusClient(uri)) as client:
        return list(client.list_collections())


def expected(query: np.ndarray) -> list[int]:
    return list(np.argsort(-(VECTORS @ query))[:5])


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie that waits for its parent."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture(scope="module")
def server() -> Iterator[MilvusServer]:
    with MilvusServer() as server:
        fill(server.uri)
        yield server


@needs_server
def test_a_server_answers(server: MilvusServer) -> None:
    assert nearest(server.uri, VECTORS[3]) == expected(VECTORS[3])


@needs_server
def test_two_servers_run_side_by_side(server: MilvusServer) -> None:
    with MilvusServer() as other:
        assert collections(other.uri) == []
        assert collections(server.uri) == ["things"]
        pid, folder = other.pid, other.folder
    assert not is_running(pid)
    assert not folder.exists()


@needs_server
def test_a_killed_server_starts_again_with_its_data(server: MilvusServer) -> None:
    uri, pid = server.uri, server.pid
    server.kill()
    assert not is_running(pid)
    server.start()
    assert server.uri == uri
    assert server.pid != pid
    assert nearest(uri, VECTORS[3]) == expected(VECTORS[3])


@needs_server
def test_stopping_twice_is_fine() -> None:
    server = MilvusServer()
    server.stop()
    server.stop()
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.pid


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_server_dies_with_its_owner() -> None:
    source = """
import subprocess, time
from tests.support.servers import die_with_parent
print(subprocess.Popen(die_with_parent(["/bin/sleep", "60"])).pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        wait_for_name(pid, "sleep")
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(pid)


def wait_for_name(pid: int, name: str) -> None:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/comm").read_text().strip() != name:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_free_ports_are_distinct_and_can_be_bound() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    for port in ports:
        with socket.socket() as listener:
            listener.bind(("", port))


def test_lite(tmp_path: Path) -> None:
    fill(lite_uri(tmp_path))
    assert nearest(lite_uri(tmp_path), VECTORS[3]) == expected(VECTORS[3])


@needs_current
def test_a_current_server_answers() -> None:
    with CurrentMilvus() as server:
        fill(server.uri)
        assert nearest(server.uri, VECTORS[3]) == expected(VECTORS[3])


GIVEN = {"MILVUS_URI": CurrentMilvus, "QDRANT_URL": QdrantServer}


@pytest.mark.server
@pytest.mark.parametrize("name", GIVEN)
def test_a_given_server_answers(name: str) -> None:
    """The cases on a server that does not answer are left out: this is the one that says so."""
    if not servers.given(name):
        pytest.skip(f"${name} names no server")
    if reason := GIVEN[name].unavailable():
        pytest.fail(reason, pytrace=False)


@pytest.mark.parametrize("name", GIVEN)
def test_a_given_server_that_does_not_answer_is_named_in_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [port] = free_ports(1)
    monkeypatch.setenv(name, f"http://user:s3cret@127.0.0.1:{port}")
    servers.take_addresses()
    reason = GIVEN[name].unavailable()
    del os.environ[f"SERVER_UNDER_TEST_{name}"]
    assert reason
    assert reason.startswith(f"no server answers at ${name} (http://127.0.0.1): ")
    assert "refused" in reason
    assert "\n" not in reason
    assert "s3cret" not in reason


def run_on_given(name: str, address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run tests as `make test-server` does, on this server alone."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-q",
        "-m",
        "server and not long",
        *arguments,
    ]
    environment = {**os.environ, name: address}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False
    )


@pytest.mark.long
def test_the_suites_run_on_any_qdrant_and_leave_nothing() -> None:
    server = StrictServer()
    with listening(server) as url:
        kept = QdrantClient(url=url, check_compatibility=False)
        kept.create_collection("c_0", vectors_config=models.VectorParams(size=4, distance="Dot"))
        done = run_on_given(
            "QDRANT_URL", url, "tests/qdrant/test_store.py", "tests/qdrant/test_enabling.py"
        )
        assert done.returncode == 0, done.stdout[-3_000:]
        assert [each.name for each in kept.get_collections().collections] == ["c_0"]
        kept.close()
    assert server.requests


@pytest.mark.long
@needs_server
def test_the_suites_run_on_any_milvus_and_leave_nothing() -> None:
    with MilvusServer() as server:
        chosen = ("tests/congruence/test_store.py", "-k", "server-current")
        done = run_on_given("MILVUS_URI", server.uri, *chosen)
        assert done.returncode == 0, done.stdout[-3_000:]
        with closing(MilvusClient(server.uri)) as client:
            assert client.list_databases() == ["default"]


def test_a_given_server_that_does_not_answer_fails_one_test() -> None:
    [port] = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    done = run_on_given(
        "QDRANT_URL",
        address,
        "tests/test_servers.py",
        "tests/qdrant/test_store.py",
        "-k",
        "given or qdrant",
    )
    assert done.returncode == 1, done.stdout
    assert "1 failed" in done.stdout
    assert "no server answers at $QDRANT_URL (http://127.0.0.1): " in done.stdout
    assert "Traceback" not in done.stdout
