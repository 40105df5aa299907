"""The status page: one HTML document without a script, which needs nothing but itself."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from html import escape
from importlib.resources import files
from itertools import groupby
from string import Template

from milvus_hubness.serve.history_charts import age_chart, skewness_chart
from milvus_hubness.serve.look import Course, Look
from milvus_hubness.serve.view import CollectionView, ServiceView
from milvus_hubness.serve.wording import ago, ahead, number, span

SHOWN_RUNS = 8
LONGEST = 300
ACTIONS = {
    "none": "nothing was due",
    "pending": "new rows",
    "full": "all rows",
    "rebuilt": "all rows, in a copy that took over",
    "refused": "refused",
}


@cache
def _template() -> str:
    return files(__package__).joinpath("page.html").read_text("utf-8")


def _policy() -> str:
    """Nothing but the page's own style is let in, and no other site may frame it."""
    style = re.search("<style>(.*?)</style>", _template(), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256((style[1] if style else "").encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


HEADERS = {
    "Content-Security-Policy": _policy(),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def render(view: ServiceView) -> str:
    """The page, in UTF-8."""
    waiting = f'<p class="card banner">Not ready: waiting for {_short(view.waiting_for)}.</p>'
    return Template(_template()).substitute(
        database=_short(view.database),
        version=escape(view.version),
        at=_moment(view.at),
        up=span((view.at - view.started_at).total_seconds()),
        waiting=waiting if view.waiting_for else "",
        collections="\n".join(_collection(each, view.at) for each in view.collections),
    )


def _collection(view: CollectionView, at: datetime) -> str:
    table = view.table
    parts = [
        f"{what} {_short(name)}"
        for what, name in (("field", table.field), ("profile", table.profile))
        if name
    ]
    tone, state = _state(view)
    return (
        f'<section class="card"><h2>{_short(table.name)} <small>{" · ".join(parts)}</small>'
        f'<span class="state {tone}">{state}</span></h2>'
        f"{_trouble(view)}{_facts(view, at)}"
        f'<div class="pair"><figure><figcaption>Skewness of N<sub>10</sub>: how unevenly answers fall, '
        f"0 is even</figcaption>{skewness_chart(view.looks, at)}</figure>"
        f"<figure><figcaption>Age of the biases</figcaption>{age_chart(view.looks, at)}</figure></div>"
        f"{_recent(view.looks, at)}</section>"
    )


def _state(view: CollectionView) -> tuple[str, str]:
    """Its class, and its words."""
    last = view.last
    if view.running:
        return "busy", f"at work{_progress(view.running)}"
    if last is None:
        return "busy", "not looked at yet"
    if view.failures:
        return "bad", "failed"
    if last.result == "busy":
        return "busy", "another process is at work"
    if last.result == "stopped":
        return "busy", "stopped"
    return ("weak", "the new biases were refused") if last.action == "refused" else ("good", "up to date")


def _progress(running: Course) -> str:
    if not running.total:
        return f": {escape(running.doing)}" if running.doing else ""
    return f": {escape(running.doing)}, {number(running.done)} of {number(running.total)}"


def _trouble(view: CollectionView) -> str:
    """What went wrong, while it does; and why new biases are not in use."""
    last = view.last
    told = view.failing or (last if last and (last.result == "busy" or last.action == "refused") else None)
    if told is None:
        return ""
    times = f" ({number(view.failures)} times in a row)" if view.failures > 1 else ""
    return f'<p class="trouble {"bad" if view.failing else ""}">{_short(told.message)}{times}</p>'


def _facts(view: CollectionView, at: datetime) -> str:
    found = next((look for look in (view.last, *reversed(view.looks)) if look and look.result == "ok"), None)
    facts = [
        ("Last success", ago(view.last_success, at) if view.last_success else "none yet"),
        ("Next look", ahead(view.next_look, at) if view.next_look else "after the start"),
        ("Rows", number(found.rows) if found else "–"),
        ("Rows that waited", number(found.pending) if found else "–"),
        ("Epoch", number(found.epoch) if found else "–"),
        ("Looks for new rows", str(view.table.schedule)),
        ("At the bank", str(view.table.full_schedule)),
    ]
    cells = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f"<dl>{cells}</dl>"


def _recent(looks: tuple[Look, ...], at: datetime) -> str:
    shown = [look for look in reversed(looks) if look.is_eventful or look.result == "failed"]
    if not shown:
        return '<p class="soft">No refresh has been needed yet.</p>'
    runs = [list(run) for _, run in groupby(shown, key=lambda look: (look.result, look.action, look.message))]
    rows = "".join(_row(run, at) for run in runs[:SHOWN_RUNS])
    return (
        '<div class="scroll"><table><thead><tr><th>When</th><th>What</th><th>Why</th>'
        '<th class="count">Scanned</th><th class="count">Changed</th><th class="count">Skipped</th>'
        f'<th class="count">Took</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _row(run: Sequence[Look], at: datetime) -> str:
    """Looks that came to the same, the last one first, with the sums of their rows."""
    last = run[0]
    what = ACTIONS.get(last.action, last.action) if last.result == "ok" else last.result
    times = f", {number(len(run))} times" if len(run) > 1 else ""
    each = [(one.scanned, one.changed, one.skipped) for one in run]
    rows = [sum(counts) for counts in zip(*each, strict=True)]
    cells = "".join(f'<td class="count">{number(count)}</td>' for count in rows)
    tone = "bad" if last.result == "failed" else "weak" if last.action == "refused" else ""
    when = f'<time datetime="{last.at.isoformat()}" title="{_moment(last.at)}">{ago(last.at, at)}</time>'
    return (
        f'<tr><td>{when}</td><td class="{tone}">{escape(what)}{times}</td>'
        f'<td class="why">{_short(last.message)}</td>{cells}'
        f'<td class="count">{span(sum(one.seconds for one in run))}</td></tr>'
    )


def _moment(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def _short(text: str) -> str:
    return escape(text if len(text) <= LONGEST else text[: LONGEST - 1] + "…")
