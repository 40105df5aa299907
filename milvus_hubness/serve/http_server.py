"""The HTTP server of the service, which runs in a thread of its own."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from milvus_hubness.basics.logs import log
from milvus_hubness.errors import InvalidParameter, redacted
from milvus_hubness.serve.http_connections import BACKLOG, Connection, Waiting
from milvus_hubness.serve.http_limits import HttpLimits

NAME = "milvus-hubness-http"
"""The name of the server's thread."""

REQUEST_THREADS = 2
"""Pages take no input or output: further threads make them no faster, and probes slower."""
PROBE_THREADS = 2
CLOSE_SECONDS = 1
"""Time that responses in progress have when the server closes."""

T = TypeVar("T")


class RedactedResponse(Response):
    """A response that is a text, or data as JSON, with secrets removed."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        text = content if isinstance(content, str) else json.dumps(content) + "\n"
        return redacted(text).encode()


class Work:
    """Runs functions in threads of its own. most: how many may run or wait for a thread."""

    def __init__(self, name: str, threads: int, most: int) -> None:
        self._executor = ThreadPoolExecutor(threads, name)
        self._most = most
        self._count = 0

    async def run(self, function: Callable[[], T]) -> T:
        """Return the result of `function`.

        Raises HTTPException if there are too many, and what it raises.
        """
        if self._count >= self._most:
            raise HTTPException(
                503, "too many requests at once: try again", headers={"Retry-After": "1"}
            )

        self._count += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._executor, function)
        finally:
            self._count -= 1

    def close(self) -> None:
        """Wait for the functions that run, but not for one that hangs."""
        # `shutdown` knows no limit of time, so a thread waits in place of this one.
        self._executor.shutdown(wait=False, cancel_futures=True)
        ending = threading.Thread(target=self._executor.shutdown, daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)


def get(path: str, respond: Callable[[], Response]) -> Route:
    """Return a route for GET and HEAD. `respond` runs in a thread."""

    async def endpoint(request: Request) -> Response:
        return await _work(request, "requests").run(respond)

    return Route(path, endpoint)


def probe(path: str, respond: Callable[[], Response]) -> Route:
    """Return a route as `get` does, for a probe: other
    requests neither keep it waiting nor count against it.
    """

    async def endpoint(request: Request) -> Response:
        return await _work(request, "probes").run(respond)

    return Route(path, endpoint)


def _work(request: Request, name: str) -> Work:
    work: Work = getattr(request.app.state, name)
    return work


class HttpServer:
    """Serves `routes` while this context is open. address: HOST:PORT; port 0 selects a free port,
    see `url`. On a loopback address, requests that name another host are refused (403), so that no
    web page can use the server through a browser. Raises InvalidParameter.
    """

    def __init__(
        self, address: str, routes: Sequence[BaseRoute], limits: HttpLimits | None = None
    ) -> None:
        limits = limits or HttpLimits()
        self._socket = _listening(address)

        # Port 0 has become a free port, and a name an address.
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        checks = [Middleware(_LoopbackOnly)] if _is_loopback(urlsplit(self.url).netloc) else []
        app = Starlette(
            routes=routes,
            middleware=checks,
            exception_handlers={HTTPException: _respond, Exception: _respond},
        )
        # A redirect would name whatever host the client named.
        app.router.redirect_slashes = False

        # Routes are functions; what they share comes with the request, see `_work`.
        self._requests = app.state.requests = Work(NAME, REQUEST_THREADS, limits.requests)
        self._probes = app.state.probes = Work(f"{NAME}-probes", PROBE_THREADS, limits.connections)

        self._server = uvicorn.Server(_config(app, limits))
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name=NAME, daemon=True
        )

    def __enter__(self) -> HttpServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._requests.close()
        self._probes.close()


def _listening(address: str) -> socket.socket:
    """Return a socket that listens on HOST:PORT. Raises InvalidParameter."""
    host, port = parse_address(address)
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise InvalidParameter(f"cannot listen on {address}: {error.strerror}") from None

    return listening


def _config(app: Starlette, limits: HttpLimits) -> uvicorn.Config:
    """Return uvicorn's configuration: one request for each connection, and no log of its own."""
    return uvicorn.Config(
        app,
        http=partial(Connection, waiting=Waiting(), limits=limits),  # type: ignore[arg-type]
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=CLOSE_SECONDS,
        headers=[("Cache-Control", "no-store"), ("Connection", "close")],
    )


class _LoopbackOnly:
    """Refuses requests whose Host header is not a loopback address."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if not _is_loopback(Request(scope).headers.get("host", "")):
            app = _error(403, "the Host header must name this machine's loopback address")
        await app(scope, receive, send)


def _error(status: int, message: str) -> RedactedResponse:
    return RedactedResponse({"error": {"message": message}}, status)


async def _respond(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return _error(500, "the server failed to respond, see its log")

    message = error.detail
    headers = dict(error.headers or {})
    allow = ", ".join(sorted(headers.pop("Allow", "").split(", ")))
    if error.status_code == 404:
        message = (
            f"no such path: use one of {', '.join(route.path for route in request.app.routes)}"
        )
    elif error.status_code == 405:
        message = f"{request.url.path} takes {allow}"

    response = _error(error.status_code, message)
    response.headers.update(headers)
    if allow:
        response.headers["Allow"] = allow
    return response


def parse_address(address: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port. Raises InvalidParameter."""
    try:
        parts = urlsplit(f"//{address}")
        host = parts.hostname or ""
        port = parts.port
    except ValueError:
        host = ""
        port = None

    if port is None or parts.netloc != address:
        raise InvalidParameter(f"the address must be HOST:PORT, not {address!r}")

    return ("127.0.0.1" if host == "localhost" else host), port


def _is_loopback(address: str) -> bool:
    """Return whether the host of HOST or HOST:PORT is
    localhost or a loopback address of this machine.
    """
    try:
        host = urlsplit(f"//{address}").hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
