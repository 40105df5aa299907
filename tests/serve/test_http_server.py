"""The HTTP server against clients that are slow, wrong or gone."""

import collections
import contextlib
import gc
import io
import itertools
import json
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.responses import Response

from milvus_hubness.errors import InvalidParameter
from milvus_hubness.serve import http_connections, http_server
from milvus_hubness.serve.http_limits import HttpLimits
from milvus_hubness.serve.http_server import HttpServer, RedactedResponse, get, probe

GET = "GET / HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n"
PROBE = GET.replace("/", "/healthz", 1)
WITH_BODY = GET.replace("\r\n\r\n", "\r\nContent-Length: 9999\r\n\r\n")


def serving(respond=RedactedResponse, **limits):
    """A server that answers / with its path, or with what `respond` makes of it, and a probe."""
    health = probe("/healthz", lambda: RedactedResponse({"path": "/healthz"}))
    routes = [get("/", lambda: respond({"path": "/"})), health]
    return HttpServer("127.0.0.1:0", routes, HttpLimits(**limits))


@pytest.fixture
def server():
    with serving() as server:
        yield server


def dial(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def received(connection):
    """All that the server sends until it hangs up."""
    parts = []
    while part := connection.recv(65_536):
        parts.append(part)
    return b"".join(parts).decode()


def send(server, text):
    """The status and the body of the answer; 0 and nothing where the server hangs up without one."""
    with dial(server) as connection:
        connection.sendall(text.encode())
        head, _, body = received(connection).partition("\r\n\r\n")
    return int(head.split()[1]) if head else 0, body


def error(server, text):
    status, body = send(server, text)
    return status, json.loads(body)["error"]["message"]


def test_an_error_nobody_foresaw_is_logged_and_not_shown(monkeypatch):
    def fail(body):
        raise ZeroDivisionError("secret")

    # A logger of its own: other tests of this process load libraries that change the handlers of the root.
    log, written = logging.Logger("http"), io.StringIO()
    log.addHandler(logging.StreamHandler(written))
    monkeypatch.setattr(http_server, "log", log)
    with serving(fail) as server:
        told = error(server, GET)
    assert told == (500, "the server failed to respond, see its log")
    assert "ZeroDivisionError: secret" in written.getvalue()


def drip(connections, ended):
    """One byte of a header a second on each."""
    while not ended.wait(1):
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.sendall(b"x")


@pytest.mark.parametrize("sent", ["", "GET / HTTP/1.0\r\nX-Slow: "])
def test_clients_that_send_a_byte_a_second_do_not_keep_the_server_from_closing(caplog, sent):
    answered, ended = [], threading.Event()

    def respond(body):
        answered.append(body)
        return RedactedResponse(body)

    with contextlib.ExitStack() as stack:
        server = serving(respond).__enter__()
        connections = [stack.enter_context(dial(server)) for _ in range(5)]
        for connection in connections:
            connection.sendall(sent.encode())
        threading.Thread(target=drip, args=(connections, ended), daemon=True).start()
        stack.callback(ended.set)
        time.sleep(1.2)
        closed, began = threading.Event(), time.monotonic()
        threading.Thread(target=lambda: (server.__exit__(), closed.set()), daemon=True).start()
        assert closed.wait(3), "the server waits for slow clients"
        assert time.monotonic() - began < 2
        assert not answered, "a request that never arrived was answered"
    assert not caplog.records


def silent(connection):
    """Whether the server has closed this connection, without an answer."""
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def test_clients_that_hold_connections_do_not_keep_probes_out(caplog):
    """A hundred of them kept /healthz at 503, and were open after 75 seconds: Kubernetes restarted the pod."""
    with serving(request_seconds=1.5) as server, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(dial(server)) for _ in range(150)]
        for connection, sent in zip(
            connections, itertools.cycle(("", "G", "GET / HTTP/1.0\r\nX-Slow: "))
        ):
            connection.sendall(sent.encode())
        assert send(server, PROBE) == (200, '{"path": "/healthz"}\n')
        time.sleep(2.5)
        assert all(map(silent, connections))
        assert send(server, PROBE) == (200, '{"path": "/healthz"}\n')
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("sent", ["", "GET / HTTP/1.0\r\nX-Slow: "])
def test_one_connection_too_many_closes_the_one_that_waited_longest(sent):
    with serving(connections=20) as server, contextlib.ExitStack() as stack:
        connections = []
        for _ in range(50):
            connections.append(stack.enter_context(dial(server)))
            connections[-1].sendall(sent.encode())
        assert send(server, PROBE) == (200, '{"path": "/healthz"}\n')
        assert [silent(connection) for connection in connections] == [True] * 31 + [False] * 19


def test_probes_are_answered_while_connections_are_opened_without_end():
    """A probe whose thread stands still while a hundred others connect is the oldest and hung up on: those who probe
    ask three times before they call a service dead."""
    ended = threading.Event()

    def is_alive(server):
        for _ in range(3):
            with contextlib.suppress(ConnectionError):
                if send(server, PROBE)[0] == 200:
                    return True
        return False

    def storm(server):
        held = collections.deque(maxlen=200)
        while not ended.is_set():
            with contextlib.suppress(OSError):
                held.append(dial(server))
            if len(held) == held.maxlen:
                held.popleft().close()
        for connection in held:
            connection.close()

    with serving(connections=100) as server:
        thread = threading.Thread(target=storm, args=(server,))
        thread.start()
        try:
            assert all(is_alive(server) for _ in range(50))
        finally:
            ended.set()
            thread.join()


def test_responses_that_nobody_takes_do_not_keep_probes_out():
    large = Response(b"x" * 50_000_000)
    with serving(lambda body: large, connections=5) as server, contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(dial(server)).sendall(GET.encode())
        time.sleep(0.5)
        assert send(server, PROBE)[0] == 200


def test_many_requests_at_once_are_all_answered():
    """Of two hundred, 191 had the status 503."""

    def slow(body):
        time.sleep(0.002)
        return RedactedResponse(body)

    with serving(slow) as server, ThreadPoolExecutor(200) as threads:
        together = threading.Barrier(200)

        def ask():
            with dial(server) as connection:
                together.wait(10)
                connection.sendall(GET.encode())
                return received(connection).split()[1]

        answers = [threads.submit(ask) for _ in range(200)]
        assert collections.Counter(answer.result() for answer in answers) == {"200": 200}


def test_requests_beyond_the_limit_are_refused_and_probes_are_not():
    go_on = threading.Event()

    def hang(body):
        go_on.wait(10)
        return RedactedResponse(body)

    with serving(hang, requests=10) as server, contextlib.ExitStack() as stack:
        stack.callback(go_on.set)
        waiting = [stack.enter_context(dial(server)) for _ in range(10)]
        for connection in waiting:
            connection.sendall(GET.encode())
        time.sleep(0.3)
        with dial(server) as connection:
            connection.sendall(GET.encode())
            refused = received(connection)
        assert refused.startswith("HTTP/1.1 503 ")
        assert "\r\nretry-after: 1\r\n" in refused.lower()
        assert '{"error": {"message": "too many requests at once: try again"}}' in refused
        assert send(server, PROBE)[0] == 200
        go_on.set()
        assert [received(connection).split()[1] for connection in waiting] == ["200"] * 10


def test_a_request_that_takes_too_long_to_arrive_is_ended(caplog):
    ended = threading.Event()
    with serving(request_seconds=2.0) as server, dial(server) as head:
        head.sendall(b"GET / HTTP/1.0\r\nX-Slow: ")
        threading.Thread(target=drip, args=([head], ended), daemon=True).start()
        began = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            assert head.recv(65_536) == b""
        assert 1.5 < time.monotonic() - began < 4
        ended.set()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_client_that_does_not_receive_the_response_is_let_go(caplog):
    large = Response(b"x" * 50_000_000)
    with serving(lambda body: large, response_seconds=0.5) as server, dial(server) as connection:
        connection.sendall(GET.encode())
        time.sleep(1.5)
        with contextlib.suppress(ConnectionResetError):
            assert len(received(connection)) < 50_000_000
    assert not caplog.records


def test_a_client_that_closed_its_sending_side_gets_its_answer(server):
    """As `nc -N` does."""
    with dial(server) as connection:
        connection.sendall(GET.encode())
        connection.shutdown(socket.SHUT_WR)
        assert received(connection).startswith("HTTP/1.1 200 ")


def test_connections_that_ended_are_forgotten_at_once():
    with serving() as server:
        for _ in range(100):
            send(server, PROBE)
            dial(server).close()
        time.sleep(0.2)
        gc.collect()
        assert sum(isinstance(each, http_connections.Connection) for each in gc.get_objects()) < 5


def test_a_page_that_hangs_does_not_keep_the_server_from_closing():
    go_on = threading.Event()
    server = serving(lambda body: go_on.wait(30)).__enter__()
    try:
        with dial(server) as connection:
            connection.sendall(GET.encode())
            time.sleep(0.3)
            began = time.monotonic()
            server.__exit__()
            assert time.monotonic() - began < 4
    finally:
        go_on.set()


@pytest.mark.parametrize("path", ["/healthz/", "//healthz"])
def test_no_client_is_sent_elsewhere(server, path):
    status, message = error(server, f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
    assert (status, message) == (404, "no such path: use one of /, /healthz")


def test_answers_hold_no_password():
    with serving(
        lambda body: RedactedResponse({"database": "http://root:s3cret@host:1"})
    ) as server:
        told = send(server, "GET / HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
    assert told == (200, '{"database": "http://***@host:1"}\n')


def test_a_body_that_never_arrives_is_not_waited_for():
    """No route reads one."""
    with serving() as server, dial(server) as connection:
        connection.sendall(WITH_BODY.encode())
        assert received(connection).endswith('{"path": "/"}\n')


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_sent(server, method):
    assert error(server, GET.replace("GET", method)) == (405, "/ takes GET, HEAD")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", ""]
)
def test_requests_that_name_another_host_are_refused(server, host):
    assert error(server, GET.replace("127.0.0.1", host)) == (
        403,
        "the Host header must name this machine's loopback address",
    )


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1:1", "[::1]:7"])
def test_requests_that_name_this_machine_are_answered(server, host):
    assert send(server, PROBE.replace("127.0.0.1", host)) == (200, '{"path": "/healthz"}\n')


def test_the_server_is_silent_and_leaves_no_thread(capfd):
    before = threading.active_count()
    with serving() as server:
        send(server, GET)
        send(server, GET.replace("/", "/nothing", 1))
        dial(server).close()
    assert threading.active_count() == before
    assert capfd.readouterr() == ("", "")
    with pytest.raises(OSError, match="refused"):
        dial(server)


@pytest.mark.parametrize(
    "address", ["localhost", "127.0.0.1:x", "127.0.0.1:99999", "http://localhost:1", ""]
)
def test_addresses_of_another_form_are_refused(address):
    with pytest.raises(InvalidParameter, match="HOST:PORT"):
        HttpServer(address, [])


def test_a_port_that_is_taken_is_named(server):
    with pytest.raises(InvalidParameter, match="in use"):
        HttpServer(server.url.removeprefix("http://"), [])
