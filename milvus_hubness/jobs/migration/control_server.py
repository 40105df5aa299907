"""An HTTP server on this machine's loopback address that tells of a running migration and steers it.

GET /status, /metrics, /healthz; POST /pause, /resume, /rate, /cutover with a JSON object.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from milvus_hubness.errors import InvalidParameter
from milvus_hubness.jobs.migration.control import Controls
from milvus_hubness.jobs.migration.latest import LatestEvents
from milvus_hubness.jobs.migration.metrics import MigrationMetrics
from milvus_hubness.jobs.migration.throttle import LIMITS

LARGEST_BODY = 65_536
IDLE_SECONDS = 2.0

Json = dict[str, Any]


class ControlServer:
    """Serves while it is open. Whatever runs on this machine may use it, but no page in its browsers:
    requests that name another host are refused (403), and so are posts that are not application/json (415).

    address: HOST:PORT, or [::1]:PORT; port 0 is a free one, see `url`. Raises InvalidParameter where the host
    is not a loopback address, or the port is taken.
    """

    def __init__(
        self, address: str, controls: Controls, latest: LatestEvents, metrics: MigrationMetrics
    ) -> None:
        host, port = _loopback(address)
        try:
            self._server = _Server(host, port, _Answers(controls, latest, metrics))
        except OSError as error:
            raise InvalidParameter(f"cannot listen on {address}: {error.strerror}") from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="milvus-hubness-control", daemon=True
        )

    @property
    def url(self) -> str:
        """Such as http://127.0.0.1:43567"""
        host, port = self._server.server_address[:2]
        return f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"

    def __enter__(self) -> ControlServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Answers:
    """What is answered to each request, by its path and method."""

    def __init__(self, controls: Controls, latest: LatestEvents, metrics: MigrationMetrics) -> None:
        self._controls, self._latest, self._metrics = controls, latest, metrics
        self.gets: dict[str, Callable[[], Json | str]] = {
            "/status": self._status,
            "/metrics": metrics.text,
            "/healthz": lambda: {"status": "ok"},
        }
        self.posts: dict[str, Callable[[Json], Json]] = {
            "/pause": lambda body: self._apply({"paused": True}, body),
            "/resume": lambda body: self._apply({"paused": False}, body),
            "/cutover": lambda body: self._apply({"cutover": "now"}, body),
            "/rate": self._rate,
        }

    def _status(self) -> Json:
        return {**self._latest.to_dict(), **self._controls.snapshot()}

    def _apply(self, settings: Json, body: Json) -> Json:
        if body:
            raise InvalidParameter(f"nothing is expected in the body but {{}}, not {', '.join(body)}")
        self._controls.apply(settings)
        return self._status()

    def _rate(self, body: Json) -> Json:
        if not body or not set(body) <= set(LIMITS):
            raise InvalidParameter(f"the body must name some of {', '.join(LIMITS)}, and nothing else")
        self._controls.apply(body)
        return self._status()


class _Server(ThreadingHTTPServer):
    daemon_threads = False

    def __init__(self, host: str, port: int, answers: _Answers) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.answers = answers
        super().__init__((host, port), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up early is nothing to tell of."""


class _Refusal(Exception):
    """A request that gets `status` and a message for an answer."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "milvus-hubness"
    sys_version = ""
    timeout = IDLE_SECONDS

    def _handle(self) -> None:
        try:
            self._send(HTTPStatus.OK, self._answer())
        except _Refusal as refusal:
            self._send(refusal.status, {"error": {"message": str(refusal)}})
        except InvalidParameter as error:
            self._send(
                HTTPStatus.BAD_REQUEST, {"error": {"type": type(error).__name__, "message": str(error)}}
            )

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _handle  # noqa: N815

    def _answer(self) -> Json | str:
        if not _names_loopback(self.headers.get_all("Host", [])):
            raise _Refusal(HTTPStatus.FORBIDDEN, "the Host header must name this machine's loopback address")
        path = urlsplit(self.path).path
        answers = self.server.answers
        if path not in answers.gets and path not in answers.posts:
            raise _Refusal(HTTPStatus.NOT_FOUND, f"there are {', '.join([*answers.gets, *answers.posts])}")
        if self.command == "GET" and path in answers.gets:
            return answers.gets[path]()
        if self.command == "POST" and path in answers.posts:
            return answers.posts[path](self._body())
        raise _Refusal(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes {self._allowed()}")

    def _allowed(self) -> str:
        return "GET" if urlsplit(self.path).path in self.server.answers.gets else "POST"

    def _body(self) -> Json:
        if self.headers.get_content_type() != "application/json":
            raise _Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the Content-Type must be application/json")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise _Refusal(HTTPStatus.LENGTH_REQUIRED, "the Content-Length is missing")
        if int(length) > LARGEST_BODY:
            raise _Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {LARGEST_BODY} bytes")
        try:
            body = json.loads(self.rfile.read(int(length)) or b"{}")
        except ValueError as error:
            raise InvalidParameter(f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise InvalidParameter("the body must be a JSON object")
        return body

    def _send(self, status: HTTPStatus, answer: Json | str) -> None:
        is_text = isinstance(answer, str)
        body = (answer if isinstance(answer, str) else json.dumps(answer) + "\n").encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4" if is_text else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", self._allowed())
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is written to standard error."""


def _loopback(address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    if port is None or parts.netloc != address:
        raise InvalidParameter(f"{address!r} is not of the form HOST:PORT")
    if not _is_loopback(host):
        raise InvalidParameter(f"{host!r} is not a loopback address: the control server has no password")
    return ("127.0.0.1" if host == "localhost" else host), port


def _names_loopback(hosts: list[str]) -> bool:
    if len(hosts) != 1:
        return False
    try:
        return _is_loopback(urlsplit(f"//{hosts[0]}").hostname or "")
    except ValueError:
        return False


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
