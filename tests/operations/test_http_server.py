"""The HTTP server against clients that are slow, wrong or gone."""

import contextlib
import io
import json
import logging
import socket
import threading
import time

import pytest

from milvus_hubness.operations import http_server
from milvus_hubness.operations.http_server import MOST_CONNECTIONS, HttpServer, RedactedResponse, get, post

HEAD = "POST /echo HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


def serving(respond=RedactedResponse):
    """A server that answers a post to /echo with its body, or with what `respond` makes of it."""
    routes = [get("/", lambda: respond({"path": "/"})), post("/echo", respond)]
    return HttpServer("127.0.0.1:0", routes, name="test")


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
    assert error(server, f"{HEAD}Content-Length: {length}\r\n\r\n{{}}") == (413, "a body has at most 65536 bytes")
    assert not caplog.records


@pytest.mark.parametrize(
    "length", ["-5", "+5", "1_0", "0x10", "2.0", "1e1", "5 5", "", "²", "٢", "9" * 5_000, "9" * 60_000, "0" * 5_000]
)
def test_a_content_length_that_is_no_number_is_refused(server, caplog, length):
    status, body = send(server, f"{HEAD}Content-Length: {length}\r\n\r\n{{}}")
    assert (status, body) == (400, "Invalid HTTP request received.")
    assert not caplog.records


@pytest.mark.parametrize("header", ["", "Transfer-Encoding: chunked\r\n"])
def test_a_missing_content_length_is_named(server, header):
    assert error(server, f"{HEAD.replace('1.0', '1.1')}{header}\r\n2\r\n{{}}") == (411, "the Content-Length is missing")


@pytest.mark.parametrize("length", ["7", "007", " 7 "])
def test_a_content_length_may_have_leading_zeros(server, length):
    assert send(server, f'{HEAD}Content-Length: {length}\r\n\r\n{{"a":1}}') == (200, '{"a": 1}\n')


@pytest.mark.parametrize("body", ["[" * 60_000, '{"a": ' + "9" * 5_000 + "}"], ids=["nested", "digits"])
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


@pytest.mark.parametrize("sent", ["", "GET / HTTP/1.0\r\nX-Slow: ", f"{HEAD}Content-Length: 9999\r\n\r\n"])
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


def test_only_so_many_clients_are_served_at_once(caplog):
    with serving() as server, contextlib.ExitStack() as stack:
        for _ in range(MOST_CONNECTIONS):
            stack.enter_context(dial(server)).sendall(b"GET / HTTP/1.0\r\nX-Slow: ")
        time.sleep(0.5)
        status, _ = send(server, "GET / HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
        assert status == 503
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_answers_hold_no_password():
    with serving(lambda body: RedactedResponse({"database": "http://root:s3cret@host:1"})) as server:
        told = send(server, "GET / HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
    assert told == (200, '{"database": "http://***@host:1"}\n')
