"""A small HTTP server in threads of its own: what steers a migration and what shows the service."""

from __future__ import annotations

import io
import ipaddress
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from milvus_hubness.errors import InvalidParameter
from milvus_hubness.redaction import redacted

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

LARGEST_BODY = 65_536
REQUEST_SECONDS = 5.0
"""In so many seconds a request arrives as a whole, head and body."""
ANSWER_SECONDS = 2.0
"""In so many seconds a client takes the answer."""
POLL_SECONDS = 0.1

Json = dict[str, Any]

log = logging.getLogger("milvus_hubness")


@dataclass(frozen=True)
class Answer:
    """What goes back. content_type with its parameters; headers: further ones."""

    body: str
    content_type: str
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_json(cls, data: Json, status: HTTPStatus = HTTPStatus.OK) -> Answer:
        return cls(json.dumps(data) + "\n", "application/json", status)


class Refusal(Exception):
    """A request that gets `status` and a message for an answer. allow: the method that the path does take."""

    def __init__(self, status: HTTPStatus, message: str, allow: str = "") -> None:
        super().__init__(message)
        self.status, self.allow = status, allow

    def answer(self) -> Answer:
        told = Answer.of_json({"error": {"message": str(self)}}, self.status)
        return Answer(told.body, told.content_type, self.status, {"Allow": self.allow} if self.allow else {})


class Request:
    """method, and path without its query."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self._handler = handler
        self.method = handler.command
        self.path = urlsplit(handler.path).path

    def json(self) -> Json:
        """The body, an object. Raises Refusal, and InvalidParameter where it is none."""
        headers = self._handler.headers
        if headers.get_content_type() != "application/json":
            raise Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the Content-Type must be application/json")
        body = self._body(_length(headers.get("Content-Length")))
        try:
            data = json.loads(body or b"{}")
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(f"the body is not JSON: {error}") from None
        if not isinstance(data, dict):
            raise InvalidParameter("the body must be a JSON object")
        return data

    def _body(self, length: int) -> bytes:
        try:
            body = self._handler.rfile.read(length)
        except OSError:
            said = f"the request did not arrive as a whole within {REQUEST_SECONDS:g} seconds"
            raise Refusal(HTTPStatus.REQUEST_TIMEOUT, said) from None
        if len(body) < length:
            raise InvalidParameter(f"the body has {len(body)} bytes, and {length} were announced")
        return body


class HttpServer:
    """Serves while it is open. `answer` may raise Refusal, and InvalidParameter for a status of 400.

    address: HOST:PORT, or [::1]:PORT; port 0 is a free one, see `url`. On a loopback address only requests
    that name one are answered (403), so that no page in this machine's browsers can use it. name: of the
    thread. Raises InvalidParameter where the address is of another form, or the port is taken.
    """

    def __init__(self, address: str, answer: Callable[[Request], Answer], *, name: str) -> None:
        host, port = parse_address(address)
        try:
            self._server = _Server(host, port, answer)
        except OSError as error:
            raise InvalidParameter(f"cannot listen on {address}: {error.strerror}") from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name=name, daemon=True
        )

    @property
    def url(self) -> str:
        """Such as http://127.0.0.1:43567"""
        host, port = self._server.server_address[:2]
        return f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"

    def __enter__(self) -> HttpServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = False

    def __init__(self, host: str, port: int, answer: Callable[[Request], Answer]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.answer = answer
        self.is_local = is_loopback(host)
        self.is_closing = threading.Event()
        super().__init__((host, port), _Handler)

    def server_close(self) -> None:
        """Wait for the answers under way, and not for requests that are still arriving."""
        self.is_closing.set()
        super().server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up early is nothing to tell of."""


class _Arriving(io.RawIOBase):
    """What a client sends. Reading raises TimeoutError after REQUEST_SECONDS in all, however little arrives
    at a time, and once the server closes."""

    def __init__(self, connection: socket.socket, is_closing: threading.Event) -> None:
        self._connection, self._is_closing = connection, is_closing
        self._ends_at = time.monotonic() + REQUEST_SECONDS

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        while (left := self._ends_at - time.monotonic()) > 0 and not self._is_closing.is_set():
            self._connection.settimeout(min(left, POLL_SECONDS))
            try:
                return self._connection.recv_into(buffer)
            except TimeoutError:
                continue
        raise TimeoutError("the request did not arrive in time")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "milvus-hubness"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Arriving(self.connection, self.server.is_closing))

    def _handle(self) -> None:
        try:
            if self.server.is_local and not _names_loopback(self.headers.get_all("Host", [])):
                said = "the Host header must name this machine's loopback address"
                raise Refusal(HTTPStatus.FORBIDDEN, said)
            answer = self.server.answer(Request(self))
        except Refusal as refusal:
            answer = refusal.answer()
        except InvalidParameter as error:
            told = {"error": {"type": type(error).__name__, "message": str(error)}}
            answer = Answer.of_json(told, HTTPStatus.BAD_REQUEST)
        except Exception:
            log.exception("%s %s failed", self.command, self.path)
            told = {"error": {"message": "the service failed to answer, see its log"}}
            answer = Answer.of_json(told, HTTPStatus.INTERNAL_SERVER_ERROR)
        self._send(answer)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _handle  # noqa: N815

    def _send(self, answer: Answer) -> None:
        body = redacted(answer.body).encode()
        self.connection.settimeout(ANSWER_SECONDS)
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is written to standard error."""


def _length(header: str | None) -> int:
    """The number of bytes in a body. Raises Refusal."""
    if header is None:
        raise Refusal(HTTPStatus.LENGTH_REQUIRED, "the Content-Length is missing")
    header = header.strip(" \t")
    if not (header.isascii() and header.isdecimal()):
        raise Refusal(HTTPStatus.BAD_REQUEST, "the Content-Length must be a whole number of bytes")
    digits = header.lstrip("0") or "0"
    # Only so many digits are a number for `int`.
    if len(digits) > len(str(LARGEST_BODY)) or int(digits) > LARGEST_BODY:
        raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {LARGEST_BODY} bytes")
    return int(digits)


def parse_address(address: str) -> tuple[str, int]:
    """The host, without brackets, and the port. Raises InvalidParameter."""
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    if port is None or parts.netloc != address:
        raise InvalidParameter(f"{address!r} is not of the form HOST:PORT")
    return ("127.0.0.1" if host == "localhost" else host), port


def is_loopback(host: str) -> bool:
    """Whether it is localhost or an address of this machine's loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _names_loopback(hosts: list[str]) -> bool:
    if len(hosts) != 1:
        return False
    try:
        return is_loopback(urlsplit(f"//{hosts[0]}").hostname or "")
    except ValueError:
        return False
