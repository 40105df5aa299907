"""The status page and the other HTTP responses of the service."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cache
from importlib.resources import files
from itertools import groupby, islice
from operator import attrgetter
from typing import Any

from jinja2 import Template
from markupsafe import Markup
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.routing import Route

from milvus_hubness.basics.texts import TIME_UNITS, span
from milvus_hubness.reports.charts import Line, Mark, page_template, timeline
from milvus_hubness.serve.http_server import RedactedResponse, get, probe
from milvus_hubness.serve.reconcile import ACTIONS, Reconciliation
from milvus_hubness.serve.worker import ServiceMetrics, ServiceView


def ago(moment: datetime, now: datetime) -> str:
    seconds = (now - moment).total_seconds()
    return "just now" if seconds < 1 else f"{span(seconds)} ago"


def ahead(moment: datetime, now: datetime) -> str:
    seconds = (moment - now).total_seconds()
    return f"in {span(seconds)}" if seconds >= 1 else "now"


SHOWN_RUNS = 8
"""Runs that the page shows of a collection."""
LONGEST = 300
"""Letters of a text that the page shows."""
MOST_TEETH = 100
"""Reconciliations up to which the chart of the age shows the fall at each."""
COUNTS = (("Scanned", "scanned"), ("Changed", "written"), ("Skipped", "skipped"))
"""The columns of the table of runs that count rows, and the fields of a reconciliation for them."""

MOMENT = "{:%Y-%m-%d %H:%M:%S} UTC"


def _policy() -> str:
    """Return a policy that allows the page's own style alone, and no site to frame the page."""
    page = files(__package__).joinpath("page.html").read_text("utf-8")
    style = re.search("<style>(.*?)</style>", page, re.DOTALL)
    digest = hashlib.sha256((style[1] if style else "").encode()).digest()

    return (
        "default-src 'none'; "
        f"style-src 'sha256-{base64.b64encode(digest).decode()}'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


HEADERS = {
    "Content-Security-Policy": _policy(),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def render(view: ServiceView, *, renews: bool = True) -> str:
    """Return the page, in UTF-8.

    renews: whether browsers load it again every 30 seconds, which takes the focus of keyboards and
    screen readers away.
    """
    return _template().render(
        view=view,
        renews=renews,
        up=(view.at - view.started_at).total_seconds(),
        runs_of=_runs,
        counts=COUNTS,
        excess_chart=excess_chart,
        age_chart=age_chart,
    )


@cache
def _template() -> Template:
    # Compiling it takes ten times as long as rendering it.
    return page_template(
        __package__, "page.html", LONGEST, ago=ago, ahead=ahead, moment=MOMENT.format
    )


def _runs(outcomes: Sequence[Reconciliation]) -> list[dict[str, Any]]:
    """Return the latest reconciliations that changed something or failed, last one first.

    Equal neighbours are one run with their sums.
    """
    shown = [
        outcome
        for outcome in reversed(outcomes)
        if outcome.is_eventful or outcome.result == "failed"
    ]
    neighbours = groupby(shown, key=attrgetter("result", "action", "message"))
    return [_run(list(group)) for _, group in islice(neighbours, SHOWN_RUNS)]


def _run(outcomes: Sequence[Reconciliation]) -> dict[str, Any]:
    """Return a row of the table for reconciliations that are alike, the last one first."""
    last = outcomes[0]
    tone = ""
    if last.result == "failed":
        tone = "bad"
    elif last.action == "refused":
        tone = "weak"
    return {
        "last": last,
        "what": ACTIONS.get(last.action, last.action) if last.result == "ok" else last.result,
        "tone": tone,
        "times": len(outcomes),
        "rows": [(name, sum(map(attrgetter(count), outcomes))) for name, count in COUNTS],
        "seconds": sum(outcome.seconds for outcome in outcomes),
    }


def excess_chart(outcomes: Sequence[Reconciliation], until: datetime) -> Markup | None:
    """Return a chart of the excess answers taken by hubs, raw and with the biases in use.

    Refused new biases are rings.
    """
    # Most reconciliations evaluate nothing.
    measured = [outcome for outcome in outcomes if outcome.excess_answers]
    raw = [(outcome.at, outcome.excess_answers.get("raw")) for outcome in measured]
    in_use = [(outcome.at, outcome.excess_answers_now) for outcome in measured]
    lines = []
    for name, css_class, values in (("raw", "before", raw), ("in use", "after", in_use)):
        points = [(at, value) for at, value in values if value is not None]
        if points:
            # Biases stay as they are until the next evaluation, and so does the line.
            latest = points[-1][1]
            lines.append(Line(f"{name} {latest:.1%}", css_class, [*points, (until, latest)]))
    if not lines:
        return None

    marks = []
    for outcome in measured:
        new = outcome.excess_answers.get("new")
        if outcome.action == "refused" and new is not None:
            marks.append(Mark(outcome.at, new, "refused", f"refused {new:.1%}"))

    title = "Excess answers taken by hubs over time"
    return timeline(title, lines, outcomes[0].at, until, lambda value: f"{100 * value:.4g}%", marks)


def age_chart(outcomes: Sequence[Reconciliation], until: datetime) -> Markup | None:
    """Return a chart of the age of the biases; None if no reconciliation has measured it."""
    measured = [
        (outcome, outcome.bias_age_seconds)
        for outcome in outcomes
        if outcome.bias_age_seconds is not None
    ]
    if not measured:
        return None

    # The age grows, and falls at a reconciliation: two points at one moment draw the fall. Of many
    # reconciliations only the greatest ages are drawn, which are what one wants to know.
    points: list[tuple[datetime, float]] = []
    for outcome, age in measured:
        if outcome.oldest_seconds:
            points.append((outcome.at, outcome.oldest_seconds))
        if len(measured) <= MOST_TEETH or not points:
            points.append((outcome.at, age))

    last, last_age = measured[-1]
    current = last_age + (until - last.at).total_seconds()
    points.append((until, current))

    most = max(age for _, age in points)
    unit, size = next((unit for unit in TIME_UNITS if most >= 2 * unit[1]), TIME_UNITS[-1])
    line = Line(
        f"now {span(current)}", "after", [(at, age / size) for at, age in points], dots=False
    )
    title = "Age of the biases over time"
    return timeline(title, [line], outcomes[0].at, until, lambda value: f"{value:.4g} {unit}")


def service_routes(
    view: Callable[[], ServiceView], is_alive: Callable[[], bool], metrics: ServiceMetrics
) -> list[Route]:
    """Return the routes of the service.

    /still is the page without renewal. /healthz gives 503 once a thread has ended; /readyz until
    all collections were reconciled.
    """

    def health() -> RedactedResponse:
        if is_alive():
            return RedactedResponse({"status": "ok"})
        return RedactedResponse({"status": "something stopped"}, 503)

    def readiness() -> RedactedResponse:
        if waiting_for := view().waiting_for:
            return RedactedResponse({"status": "waiting", "for": waiting_for}, 503)
        return RedactedResponse({"status": "ready"})

    def measured() -> RedactedResponse:
        return RedactedResponse(
            metrics.text(ready=not view().waiting_for), media_type=CONTENT_TYPE_LATEST
        )

    def page(*, renews: bool) -> RedactedResponse:
        return RedactedResponse(
            render(view(), renews=renews), headers=HEADERS, media_type="text/html"
        )

    return [
        get("/", lambda: page(renews=True)),
        get("/still", lambda: page(renews=False)),
        get("/status.json", lambda: RedactedResponse(view().to_dict())),
        get("/metrics", measured),
        probe("/healthz", health),
        probe("/readyz", readiness),
    ]
