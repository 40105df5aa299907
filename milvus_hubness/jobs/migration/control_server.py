"""The HTTP server of a running migration, on this machine's loopback address: its progress and its controls.

GET /status, /metrics, /healthz; POST /pause, /resume, /rate, /cutover with a JSON object.
"""

from __future__ import annotations

from milvus_hubness.errors import InvalidParameter
from milvus_hubness.jobs.http_server import (
    HttpServer,
    Json,
    RedactedResponse,
    get,
    is_loopback,
    parse_address,
    post,
)
from milvus_hubness.jobs.migration.control import Controls
from milvus_hubness.jobs.migration.latest import LatestEvents
from milvus_hubness.jobs.migration.metrics import MigrationMetrics
from milvus_hubness.jobs.migration.throttle import LIMITS


def control_server(
    address: str, controls: Controls, latest: LatestEvents, metrics: MigrationMetrics
) -> HttpServer:
    """Return a server that every program on this machine may use, but no page in its browsers: it refuses
    requests that name another host (403), and posts that are not application/json (415).

    address: as `HttpServer` has it. Raises InvalidParameter for a host that is not a loopback address, or a
    port in use.
    """
    host, _ = parse_address(address)
    if not is_loopback(host):
        raise InvalidParameter(f"{host!r} is not a loopback address: the control server has no password")

    def status() -> RedactedResponse:
        return RedactedResponse({**latest.to_dict(), **controls.snapshot()})

    def apply(settings: Json, body: Json) -> RedactedResponse:
        if body:
            raise InvalidParameter(f"nothing is expected in the body but {{}}, not {', '.join(body)}")
        controls.apply(settings)
        return status()

    def rate(body: Json) -> RedactedResponse:
        if not body or not set(body) <= set(LIMITS):
            raise InvalidParameter(f"the body must name some of {', '.join(LIMITS)}, and nothing else")
        controls.apply(body)
        return status()

    routes = [
        get("/status", status),
        get("/metrics", lambda: RedactedResponse(metrics.text(), media_type="text/plain; version=0.0.4")),
        get("/healthz", lambda: RedactedResponse({"status": "ok"})),
        post("/pause", lambda body: apply({"paused": True}, body)),
        post("/resume", lambda body: apply({"paused": False}, body)),
        post("/cutover", lambda body: apply({"cutover": "now"}, body)),
        post("/rate", rate),
    ]
    return HttpServer(address, routes, name="milvus-hubness-control")
