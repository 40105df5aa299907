"""An HTTP relay between one client process and Qdrant: holds, delays, duplicates and drops single requests."""

from __future__ import annotations

import http.client
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.chaos.relay import FORWARD_SECONDS, Call, Rules, Unavailable

METHODS = {
    ("PUT", "points"): "Upsert",
    ("POST", "points"): "Retrieve",
    ("PUT", "points/vectors"): "UpdateVectors",
    ("POST", "points/payload"): "SetPayload",
    ("POST", "points/payload/delete"): "DeletePayload",
    ("POST", "points/batch"): "Batch",
    ("POST", "points/delete"): "Delete",
    ("PUT", ""): "CreateCollection",
    ("PATCH", ""): "AlterCollection",
    ("DELETE", ""): "DropCollection",
    ("PUT", "index"): "CreateIndex",
}
"""What trials call a request, by its method and its path behind the collection; others by their paths."""
PASSED_ON = ("Content-Type", "api-key", "Retry-After")


def described(method: str, target: str) -> tuple[str, str]:
    """Return what trials call a request, and the collection or alias that it addresses."""
    parts = unquote(urlsplit(target).path).strip("/").split("/")
    if parts[:2] == ["collections", "aliases"]:
        return "AlterAliases", ""
    if parts[0] != "collections" or len(parts) < 2:
        return f"Get {parts[0]}", ""
    rest = "/".join(parts[2:])
    return METHODS.get((method, rest), f"Get {rest}"), parts[1]


class HttpRelay(Rules):
    """One process's way to Qdrant, from `with` to its end. upstream: its address."""

    def __init__(self, upstream: str, process: str) -> None:
        super().__init__(process)
        place = urlsplit(upstream)
        self._upstream = (place.hostname or "", place.port or 6333)
        relay = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                name, collection = described(self.command, self.path)
                call = Call(time.monotonic(), relay.process, name, collection)
                headers = {key: self.headers[key] for key in PASSED_ON if key in self.headers}
                try:
                    answer = relay.deliver(
                        call, lambda: relay._forward(self.command, self.path, headers, body)
                    )
                except Unavailable:
                    self.close_connection = True  # Without an answer.
                    return
                status, headers, content = answer
                try:
                    self.send_response(status)
                    for key, value in {**headers, "Content-Length": str(len(content))}.items():
                        self.send_header(key, value)
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:
                    self.close_connection = True  # The caller has given up.

            do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> HttpRelay:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._release_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def _forward(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Any:
        if self._closed:
            raise Unavailable
        connection = http.client.HTTPConnection(*self._upstream, timeout=FORWARD_SECONDS)
        try:
            connection.request(method, target, body, headers)
            response = connection.getresponse()
            kept = {key: response.headers[key] for key in PASSED_ON if key in response.headers}
            return response.status, kept, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable from error
        finally:
            connection.close()
