"""The HTTP routes of the service, all of them read-only."""

from __future__ import annotations

from collections.abc import Callable

from starlette.routing import Route

from milvus_hubness.jobs.http_server import RedactedResponse, get
from milvus_hubness.serve.metrics import CONTENT_TYPE, ServiceMetrics
from milvus_hubness.serve.page import HEADERS, render
from milvus_hubness.serve.view import ServiceView


def service_routes(
    view: Callable[[], ServiceView], is_alive: Callable[[], bool], metrics: ServiceMetrics
) -> list[Route]:
    """Return /, /status.json, /metrics, /healthz (503 once a thread that should run does not) and /readyz
    (503 until every collection was looked at)."""

    def health() -> RedactedResponse:
        if is_alive():
            return RedactedResponse({"status": "ok"})
        return RedactedResponse({"status": "something stopped"}, 503)

    def readiness() -> RedactedResponse:
        if waiting_for := view().waiting_for:
            return RedactedResponse({"status": "waiting", "for": waiting_for}, 503)
        return RedactedResponse({"status": "ready"})

    def measured() -> RedactedResponse:
        return RedactedResponse(metrics.text(ready=not view().waiting_for), media_type=CONTENT_TYPE)

    return [
        get("/", lambda: RedactedResponse(render(view()), headers=HEADERS, media_type="text/html")),
        get("/status.json", lambda: RedactedResponse(view().to_dict())),
        get("/metrics", measured),
        get("/healthz", health),
        get("/readyz", readiness),
    ]
