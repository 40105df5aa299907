"""An HTTP server on this machine's loopback address that tells of a running migration and steers it.

GET /status, /metrics, /healthz; POST /pause, /resume, /rate, /cutover with a JSON object.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from milvus_hubness.errors import InvalidParameter
from milvus_hubness.jobs.http_server import (
    Answer,
    HttpServer,
    Json,
    Refusal,
    Request,
    is_loopback,
    parse_address,
)
from milvus_hubness.jobs.migration.control import Controls
from milvus_hubness.jobs.migration.latest import LatestEvents
from milvus_hubness.jobs.migration.metrics import MigrationMetrics
from milvus_hubness.jobs.migration.throttle import LIMITS


class ControlServer(HttpServer):
    """Serves while it is open. Whatever runs on this machine may use it, but no page in its browsers:
    requests that name another host are refused (403), and so are posts that are not application/json (415).

    address: as `HttpServer` has it. Raises InvalidParameter where the host is not a loopback address, or the
    port is taken.
    """

    def __init__(
        self, address: str, controls: Controls, latest: LatestEvents, metrics: MigrationMetrics
    ) -> None:
        host, _ = parse_address(address)
        if not is_loopback(host):
            raise InvalidParameter(f"{host!r} is not a loopback address: the control server has no password")
        super().__init__(address, _Answers(controls, latest, metrics), name="milvus-hubness-control")


class _Answers:
    """What is answered to each request, by its path and method."""

    def __init__(self, controls: Controls, latest: LatestEvents, metrics: MigrationMetrics) -> None:
        self._controls, self._latest = controls, latest
        self._gets: dict[str, Callable[[], Answer]] = {
            "/status": lambda: Answer.of_json(self._status()),
            "/metrics": lambda: Answer(metrics.text(), "text/plain; version=0.0.4"),
            "/healthz": lambda: Answer.of_json({"status": "ok"}),
        }
        self._posts: dict[str, Callable[[Json], Json]] = {
            "/pause": lambda body: self._apply({"paused": True}, body),
            "/resume": lambda body: self._apply({"paused": False}, body),
            "/cutover": lambda body: self._apply({"cutover": "now"}, body),
            "/rate": self._rate,
        }

    def __call__(self, request: Request) -> Answer:
        path = request.path
        if path not in self._gets and path not in self._posts:
            raise Refusal(HTTPStatus.NOT_FOUND, f"there are {', '.join([*self._gets, *self._posts])}")
        if request.method == "GET" and path in self._gets:
            return self._gets[path]()
        if request.method == "POST" and path in self._posts:
            return Answer.of_json(self._posts[path](request.json()))
        allowed = "GET" if path in self._gets else "POST"
        raise Refusal(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes {allowed}", allowed)

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
