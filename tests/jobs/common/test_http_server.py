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

from milvus_hubness.jobs.common import http_connections, http_server
from milvus_hubness.jobs.common.http_limits import HttpLimits
from milvus_hubness.jobs.common.http_server import HttpServer, RedactedResponse, get, post, probe

GET = "GET / HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n"
PROBE = GET.replace("/", "/healthz", 1)
HEAD = "POST /echo HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


def serving(respond=RedactedResponse, **limits):
    """A server that answers a post to /echo with its body, or with what `respond` makes of it, and a probe."""
    health = probe("/healthz", lambda: RedactedResponse({"path": "/healthz"}))
    routes = [get("/", lambda: respond({"path": "/"})), health, post("/echo", respond)]
    return HttpServer("127.0.0.1:0", routes, name="test", limits=HttpLimits(**limits))


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


@pytest.mark.parametrize("length", ["9" * 19, "65537", "00065537"])
def test_a_body_that_is_announced_as_too_long_is_refused(server, caplog, length):
    assert error(server, f"{HEAD}Content-Length: {length}\r\n\r\n{{}}") == (
        413,
        "a body has at most 65536 bytes",
    )
    assert not caplog.records


@pytest.mark.parametrize(
    "length",
    [
        "-5",
        "+5",
        "1_0",
        "0x10",
        "2.0",
        "1e1",
        "5 5",
        "",
        "²",
        "٢",
        "9" * 5_000,
        "9" * 60_000,
        "0" * 5_000,
    ],
)
def test_a_content_length_that_is_no_number_is_refused(server, caplog, length):
    status, body = send(server, f"{HEAD}Content-Length: {length}\r\n\r\n{{}}")
    assert (status, body) == (400, "Invalid HTTP request received.")
    assert not caplog.records


@pytest.mark.parametrize("header", ["", "Transfer-Encoding: chunked\r\n"])
def test_a_missing_content_length_is_named(server, header):
    assert error(server, f"{HEAD.replace('1.0', '1.1')}{header}\r\n2\r\n{{}}") == (
        411,
        "the Content-Length is missing",
    )


@pytest.mark.parametrize("length", ["7", "007", " 7 "])
def test_a_content_length_may_have_leading_zeros(server, length):
    assert send(server, f'{HEAD}Content-Length: {length}\r\n\r\n{{"a":1}}') == (200, '{"a": 1}\n')


@pytest.mark.parametrize(
    "body", ["[" * 60_000, '{"a": ' + "9" * 5_000 + "}"], ids=["nested", "digits"]
)
def test_json_that_python_cannot_read_is_refused(server, caplog, body):
    status, said = error(server, f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}")
    assert status == 400
    assert said.startswith("the body is not JSON: ")
    assert not caplog.records


def test_a_body_that_ends_early_changes_nothing(caplog):
    bodies = []
    with serving(bodies.append) as server, dial(server) as connection:
        connection.sendall(f"{HEAD}Content-Length: 9\r\n\r\n{{}}".encode())
        connection.shutdown(socket.SHUT_WR)
        assert "200 OK" not in received(connection)
    assert bodies == []
    assert not caplog.records


def test_an_error_nobody_foresaw_is_logged_and_not_shown(monkeypatch):
    def fail(body):
        raise ZeroDivisionError("secret")

    # A logger of its own: other tests of this process load libraries that change the handlers of the root.
    log, written = logging.Logger("http"), io.StringIO()
    log.addHandler(logging.StreamHandler(written))
    monkeypatch.setattr(http_server, "log", log)
    with serving(fail) as server:
        told = error(server, f"{HEAD}Content-Length: 2\r\n\r\n{{}}")
    assert told == (500, "the server failed to respond, see its log")
    assert "ZeroDivisionError: secret" in written.getvalue()


def drip(connections, ended):
    """One byte of a header a second on each."""
    while not ended.wait(1):
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.sendall(b"x")


@pytest.mark.parametrize(
    "sent", ["", "GET / HTTP/1.0\r\nX-Slow: ", f"{HEAD}Content-Length: 9999\r\n\r\n"]
)
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


@pytest.mark.parametrize(
    "sent", ["", "GET / HTTP/1.0\r\nX-Slow: ", f"{HEAD}Content-Length: 9999\r\n\r\n"]
)
def test_one_connection_too_many_closes_the_one_that_waited_longest(sent):
    with serving(connections=20) as server, contextlib.ExitStack() as stack:
        connections = []
        for _ in range(50):
            connections.append(stack.enter_context(dial(server)))
            connections[-1].sendall(sent.encode())
        assert send(server, PROBE) == (200, '{"path": "/healthz"}\n')
        assert [silent(connection) for connection in connections] == [True] * 31 + [False] * 19


def test_probes_are_answered_while_connections_are_opened_without_end():
    ended = threading.Event()

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
            assert [send(server, PROBE)[0] for _ in range(50)] == [200] * 50
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
    with serving(request_seconds=2.0) as server, dial(server) as head, dial(server) as body:
        head.sendall(b"GET / HTTP/1.0\r\nX-Slow: ")
        body.sendall(f"{HEAD}Content-Length: 9999\r\n\r\n".encode())
        threading.Thread(target=drip, args=([head, body], ended), daemon=True).start()
        began = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            assert head.recv(65_536) == b""
        assert b"408 Request Timeout" in body.recv(65_536)
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


@pytest.mark.parametrize("path", ["/echo/", "/healthz/", "//healthz"])
def test_no_client_is_sent_elsewhere(server, path):
    status, message = error(server, f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
    assert (status, message) == (404, "no such path: use one of /, /healthz, /echo")


def test_answers_hold_no_password():
    with serving(
        lambda body: RedactedResponse({"database": "http://root:s3cret@host:1"})
    ) as server:
        told = send(server, "GET / HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
    assert told == (200, '{"database": "http://***@host:1"}\n')
