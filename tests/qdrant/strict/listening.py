"""A strict server on a port of the loopback, for clients in other processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from tests.qdrant.strict.server import StrictServer


@contextmanager
def listening(server: StrictServer, port: int = 0) -> Iterator[str]:
    """Let clients reach the server; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            request = httpx.Request(
                self.command,
                f"http://strict{self.path}",
                headers=dict(self.headers),
                content=self.rfile.read(size),
            )
            response = server.answer(request)
            self.send_response(response.status_code)
            for name in ("Content-Type", "Retry-After"):
                if name in response.headers:
                    self.send_header(name, response.headers[name])
            self.send_header("Content-Length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

        do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    listener = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    listener.daemon_threads = True
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.server_address[1]}"
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()
