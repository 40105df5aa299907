"""Several processes on one port: all serve, one that ends is replaced, and SIGTERM lets calls end."""

import errno
import os
import resource
import signal
import socket
import subprocess
import time
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from milvus_hubness.cli import app
from milvus_hubness.errors import InvalidParameter
from tests.milvus.proxy.certificates import certificate_of
from tests.milvus.proxy.raw_calls import SERVICE
from tests.milvus.proxy.running import ProxyProcess, eventually, proxy_command, started

OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


def workers_of(process):
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return {
        int(child)
        for child in children
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    }


def answers(proxy, connections=8):
    """Whether each of so many new connections is served."""
    for _ in range(connections):
        with grpc.insecure_channel(proxy.address, OWN_CONNECTION) as channel:
            assert channel.unary_unary(SERVICE + "Flush")(b"hello", timeout=20) == b"hello"


def refuses(proxy):
    """Whether no process listens."""
    host, _, port = proxy.address.rpartition(":")
    with socket.socket() as connection:
        return connection.connect_ex((host, int(port))) == errno.ECONNREFUSED


def test_workers_share_a_port_are_replaced_and_drain(upstream):
    with ProxyProcess(upstream.address, "--workers", "2", "--drain", "20") as proxy:
        before = workers_of(proxy.process.pid)
        assert len(before) == 2
        answers(proxy)
        killed = min(before)
        os.kill(killed, signal.SIGKILL)

        def is_replaced():
            now = workers_of(proxy.process.pid)
            assert (len(now), killed in now) == (2, False)
            return now

        eventually(is_replaced)
        answers(proxy)
        port = proxy.address.rpartition(":")[2]
        second = CliRunner().invoke(
            app, ["proxy", "--upstream", upstream.address, "--port", port, "--workers", "2"]
        )
        assert isinstance(second.exception, InvalidParameter)
        with grpc.insecure_channel(proxy.address) as channel:
            running = channel.unary_unary(SERVICE + "Slow").future(b"last words", timeout=30)
            eventually(lambda: next(path for path, _, _ in upstream.calls if path.endswith("Slow")))
            proxy.process.send_signal(signal.SIGTERM)

            def is_draining():
                assert refuses(proxy)

            eventually(is_draining)
            assert not running.done()
            upstream.cancelled.set()  # The upstream answers now.
            assert running.result() == b"last words"
        assert proxy.process.wait(20) == 0
    assert not any(Path(f"/proc/{worker}").exists() for worker in before)


@pytest.mark.long
def test_workers_end_with_the_process_that_started_them(upstream):
    with ProxyProcess(upstream.address, "--workers", "2") as proxy:
        workers = workers_of(proxy.process.pid)
        proxy.process.kill()

    def are_gone():
        assert not any(Path(f"/proc/{worker}").exists() for worker in workers)

    eventually(are_gone)


@pytest.mark.long
@pytest.mark.parametrize("host", ["[::1]", "0.0.0.0", "localhost"])
def test_workers_share_any_address(upstream, host):
    if host == "[::1]" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with ProxyProcess(upstream.address, "--workers", "2", "--host", host) as proxy:
        assert proxy.address.startswith(f"{host}:")
        answers(proxy)
        assert proxy.stop() == 0


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.0, 0.5, 1.0])
def test_a_signal_during_the_start_ends_all(upstream, seconds):
    command = proxy_command(upstream.address, "--workers", "2")
    process = started(command, stderr=subprocess.PIPE)

    def have_started():
        workers = workers_of(process.pid)
        assert len(workers) == 2
        return workers

    workers = eventually(have_started)
    time.sleep(seconds)
    process.terminate()
    assert process.wait(10) == 0
    assert process.stderr.read() == b""
    process.stderr.close()
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


@pytest.mark.long
def test_a_worker_that_cannot_start_again_is_tried_until_it_can(upstream, capfd):
    with ProxyProcess(upstream.address, "--workers", "2") as proxy:
        killed, other = sorted(workers_of(proxy.process.pid))
        unlimited = resource.prlimit(proxy.process.pid, resource.RLIMIT_AS)
        resource.prlimit(
            proxy.process.pid, resource.RLIMIT_AS, (300 << 20, unlimited[1])
        )  # Too little for gRPC.
        os.kill(killed, signal.SIGKILL)
        said = ""

        def says_why():
            nonlocal said
            said += capfd.readouterr().err
            assert "a worker ended with exit code -9" in said
            assert "a worker cannot serve: a worker ended with exit code 1" in said

        eventually(says_why)
        assert other in workers_of(proxy.process.pid)
        answers(proxy)
        resource.prlimit(proxy.process.pid, resource.RLIMIT_AS, unlimited)
        os.kill(other, signal.SIGKILL)

        def is_replaced():
            assert len(workers_of(proxy.process.pid) - {killed, other}) == 2

        eventually(is_replaced, 30)
        eventually(lambda: answers(proxy))
        assert proxy.stop() == 0


@pytest.mark.long
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_worker_that_cannot_serve_says_why(tmp_path, workers):
    """Its key is one that Python's ssl takes, so that it is not refused before, and gRPC does not."""
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:brainpoolP256r1", "-nodes"]
    key, certificate = certificate_of(tmp_path, "odd", *curve)
    files = ["--tls-cert", str(certificate), "--tls-key", str(key)]
    done = CliRunner().invoke(
        app, ["proxy", "--upstream", "localhost:1", "--port", "0", "--workers", workers, *files]
    )
    assert isinstance(done.exception, InvalidParameter)
    said = str(done.exception)
    assert said.startswith("cannot listen on 127.0.0.1:")
    assert said.endswith("a key that gRPC knows: RSA, or elliptic on P-256 or P-384")
