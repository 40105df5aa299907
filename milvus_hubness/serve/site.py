"""What the service answers over HTTP; all of it reads only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus

from milvus_hubness.jobs.http_server import Answer, Refusal, Request
from milvus_hubness.serve.metrics import CONTENT_TYPE, ServiceMetrics
from milvus_hubness.serve.page import HEADERS, render
from milvus_hubness.serve.view import ServiceView


class Site:
    """GET and HEAD of /, /status.json, /metrics, /healthz (503 where something that should run does not) and
    /readyz (503 until every collection was looked at). redact: takes secrets out."""

    def __init__(
        self,
        view: Callable[[], ServiceView],
        is_alive: Callable[[], bool],
        metrics: ServiceMetrics,
        redact: Callable[[str], str],
    ) -> None:
        self._view, self._is_alive, self._metrics, self._redact = view, is_alive, metrics, redact
        self._pages: dict[str, Callable[[], Answer]] = {
            "/": lambda: Answer(render(self._view()), "text/html; charset=utf-8", headers=HEADERS),
            "/status.json": lambda: Answer.of_json(self._view().to_dict()),
            "/metrics": self._measured,
            "/healthz": self._health,
            "/readyz": self._readiness,
        }

    def __call__(self, request: Request) -> Answer:
        if request.path not in self._pages:
            raise Refusal(HTTPStatus.NOT_FOUND, f"there are {', '.join(self._pages)}")
        if request.method not in ("GET", "HEAD"):
            raise Refusal(HTTPStatus.METHOD_NOT_ALLOWED, f"{request.path} takes GET", "GET, HEAD")
        answer = self._pages[request.path]()
        return replace(answer, body=self._redact(answer.body))

    def _measured(self) -> Answer:
        return Answer(self._metrics.text(ready=not self._view().waiting_for), CONTENT_TYPE)

    def _health(self) -> Answer:
        if self._is_alive():
            return Answer.of_json({"status": "ok"})
        return Answer.of_json({"status": "something stopped"}, HTTPStatus.SERVICE_UNAVAILABLE)

    def _readiness(self) -> Answer:
        if waiting_for := self._view().waiting_for:
            return Answer.of_json({"status": "waiting", "for": waiting_for}, HTTPStatus.SERVICE_UNAVAILABLE)
        return Answer.of_json({"status": "ready"})
