"""The events of a migration for people: a line for what has happened, bars for what is going on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
)

from milvus_hubness.cli.console import err, out
from milvus_hubness.jobs.migration.events import Event, Listener


def limit_words(limits: Mapping[str, Any]) -> str:
    """The settings of a throttle in one line."""
    return ", ".join(f"{name} {'free' if value is None else value}" for name, value in limits.items())


@contextmanager
def narrated() -> Iterator[Listener]:
    """A listener that prints lines on standard output, and draws bars on standard error, if a terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[pace]}", style="progress.data.speed"),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bars:
        draw = _Bars(bars)

        def listen(event: Event) -> None:
            draw(event)
            if line := _line(event):
                out.print(line, highlight=False, markup=False, soft_wrap=True)

        yield listen


class _Bars:
    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._first: Event | None = None

    def __call__(self, event: Event) -> None:
        doing = _doing(event)
        if doing is None:
            return
        rows, total = event.facts["rows"], event.facts["rows_total"]
        if doing not in self._tasks:
            for task in self._tasks.values():
                self._bars.update(task, visible=False)
            self._tasks[doing] = self._bars.add_task(doing, total=total, pace="")
            self._first = event
        self._bars.update(self._tasks[doing], completed=rows, total=total, pace=self._pace(event))

    def _pace(self, event: Event) -> str:
        """Copying says itself how fast it is, not counting what an earlier run copied."""
        facts = event.facts
        speed, left = facts.get("rows_per_second"), facts.get("eta_seconds")
        if speed is None and self._first is not None:
            seconds = (event.time - self._first.time).total_seconds()
            speed = (facts["rows"] - self._first.facts["rows"]) / seconds if seconds else None
            left = (facts["rows_total"] - facts["rows"]) / speed if speed else None
        return f"{speed:,.0f} rows/s, {left:,.0f} s left" if speed and left is not None else ""


def _doing(event: Event) -> str | None:
    if event.name == "copying":
        return "copying"
    if event.name == "catching-up":
        return f"catching up, pass {event.facts['pass']}" if event.facts["pass"] else "verifying"
    return None


def _line(event: Event) -> str | None:
    facts = event.facts
    match event.name:
        case "before-copy":
            return f"\ncopying {facts['rows_total']:,} rows to {facts['target']}"
        case "after-copy":
            return "copied; catching up with what was written meanwhile"
        case "verified":
            return f"verified: {facts['rows']:,} rows, {facts['fields']:,} field values as in the source"
        case "postponed":
            return "the cut-over waits to be released; until then the copy follows the source"
        case "before-cutover":
            return f"switching {facts['alias']} to {facts['target']}"
        case "throttled":
            return f"resting, the server is under load: {facts['detail']}"
        case "paused":
            return f"paused by {facts['reason']}"
        case "resumed":
            return f"no longer held back by {facts['reason']}"
        case "rate":
            return "now at " + limit_words(facts)
        case "warning":
            return f"warning: {facts['message']}"
    return None
