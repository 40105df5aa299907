"""Output of plans, migrations and their events, as text, progress bars or JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from milvus_hubness.cli.console import describe, out, progress_bars, show_facts, show_json
from milvus_hubness.migration.ledger import Migration
from milvus_hubness.operations.progress import Event, Listener


def show_plan(plan: dict[str, Any]) -> None:
    """Print the facts of a plan."""
    sizes = {side: _mib(size) for side, size in plan["vector_bytes"].items()}
    loaded = {side: _mib(size) for side, size in plan["memory_bytes"].items()}
    resolution = plan["resolution"]
    show_facts(
        f"Migration of {plan['source']}",
        {
            "would create": plan["target"],
            "vector field": f"{plan['field']}, {plan['dtype']}, {plan['index_type']} "
            f"{plan['index_params'] or ''}".rstrip(),
            "metric": f"{plan['metric']}, served as IP",
            "rows": f"{plan['rows']:,}",
            "width": f"{plan['dim']} -> {plan['width']} ({sizes['source']} -> {sizes['target']} of vectors)",
            "partitions": ", ".join(plan["partitions"]),
            "fields added": ", ".join(plan["hidden_fields"]),
            "bank": f"{plan['bank']['queries']:,} queries of {plan['bank']['source']}, "
            f"kept as {plan['bank']['collection']}",
            "estimator": f"{describe(plan['estimator'])}, strength {plan['strength']:g}",
            "gate": plan["gate"],
            "gate over targets": plan["gate_targets"],
            "alias": plan["alias"],
            "rename": f"{plan['source']} becomes an alias of the copy" if plan["rename"] else None,
            "server": plan["server"],
            "memory": f"{loaded['source']} now, {loaded['target']} for the copy, {loaded['both']} for both",
            "recall": plan["recall"] and plan["recall"]["said"],
            "resolution": resolution
            and f"{resolution['in_order']:.1%} of {resolution['queries']} queries keep "
            "the order of their nearest rows at strength 0",
            "about": f"{plan['estimated_seconds']} s (from a sample, read only)"
            + (f", {plan['waiting_seconds']} s of it for clients to hear of it" if plan["waiting_seconds"] else ""),
            "note": "\n".join(plan["remarks"]),
        },
    )


def migration_facts(migration: Migration) -> dict[str, Any]:
    """Return a migration as plain data, without facts that only the program needs."""
    return migration.model_dump(mode="json", exclude={"version", "arguments", "state", "announced_at"})


def show_migration(migration: Migration) -> None:
    """Print the state of a migration after a command."""
    show_facts(f"\n{migration.source} -> {migration.target}: {migration.phase}", migration_words(migration))


def migration_words(migration: Migration) -> dict[str, object]:
    """Return the results of a migration in words."""
    count, keys = migration.invalid, list(migration.invalid_keys)
    return {
        "bank": migration.bank_collection,
        "passes": f"{migration.passes} to catch up" if migration.passes else None,
        "verified": verification_words(migration.verified),
        "bias 0": f"{count} rows without a usable vector: {keys}" if count else None,
        "switched": _switch_words(migration),
    }


def verification_words(facts: dict[str, Any] | None) -> str | None:
    """Return the figures of a verification in one line."""
    if facts is None:
        return None
    return (
        f"{facts['rows']:,} rows, {facts['fields']:,} field values equal; {facts['biases']:,} biases as "
        f"computed anew; of {facts['searched']:,} rows searched for, {facts['found_in_copy']:,} found "
        f"({facts['found_in_source']:,} in the source)"
    )


def _switch_words(migration: Migration) -> str | None:
    """Return the name that leads to the copy and the new name of the source, in words."""
    switch = migration.switch
    if switch is None or switch.at is None:
        return None
    renamed = f"; the source is {switch.kept_as}" if switch.kept_as else ""
    window = f", in {1000 * switch.window:.0f} ms" if switch.window is not None else ""
    return f"{switch.name} -> {migration.target} since {switch.at:%Y-%m-%d %H:%M:%S} UTC{window}{renamed}"


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


def limit_words(limits: Mapping[str, Any]) -> str:
    """Return the settings of a throttle in one line."""
    return ", ".join(f"{name} {'free' if value is None else value}" for name, value in limits.items())


@contextmanager
def narrated() -> Iterator[Listener]:
    """Yield a listener that prints lines on standard output, and shows progress bars."""
    with progress_bars() as report:

        def listen(event: Event) -> None:
            if doing := _doing(event):
                report(doing, event.facts["rows"], event.facts["rows_total"])
            if line := _line(event):
                out.print(line, highlight=False, markup=False, soft_wrap=True)

        yield listen


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
            return "the cutover waits to be released; until then the copy follows the source"
        case "before-cutover":
            return f"switching {facts['alias']} to {facts['target']}"
        case "throttled":
            return f"paused, the server is under load: {facts['detail']}"
        case "paused":
            return f"paused by {facts['reason']}"
        case "resumed":
            return f"resumed by {facts['reason']}"
        case "rate":
            return "now at " + limit_words(facts)
        case "warning":
            return f"warning: {facts['message']}"
    return None


def stream(event: Event) -> None:
    """Print an event as one JSON object per line, without buffering."""
    show_json(event.to_dict())
    sys.stdout.flush()


def show_last(as_json: bool, facts: Mapping[str, Any], show: Callable[[], object]) -> None:
    """Print a result as the last event or, by calling `show`, as text."""
    if as_json:
        stream(Event("result", facts, datetime.now(timezone.utc)))
    else:
        show()


BEGINNINGS = {
    "plan": "preparing",
    "before-copy": "copying",
    "after-copy": "catching up",
    "before-verify": "verifying",
    "verified": None,
}


class Timeline:
    """A listener that measures the time of each step. The work of an earlier run does not count."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._doing: str | None = None
        self._since: datetime | None = None
        self._bytes = 0
        self._rows_per_second: float | None = None
        self._passes: dict[int, dict[str, int]] = {}

    def __call__(self, event: Event) -> None:
        facts = event.facts
        if event.name == "copying":
            self._turn("indexing", event.time, since="copying")
            self._bytes += facts["bytes"]
            self._rows_per_second = facts["rows_per_second"]
        elif event.name in BEGINNINGS:
            self._turn(BEGINNINGS[event.name], event.time)
        elif event.name == "catching-up" and facts["pass"]:
            self._passes[facts["pass"]] = {"rows": facts["rows"], "carried": facts["repaired"]}

    def to_dict(self) -> dict[str, Any]:
        """Return the seconds by step, the speed of the copy, and for each pass the numbers of rows that were
        compared and carried over, as plain data."""
        copying = self._seconds.get("copying")
        return {
            "seconds": {doing: round(seconds, 2) for doing, seconds in self._seconds.items()},
            "rows_per_second": round(self._rows_per_second, 1) if self._rows_per_second else None,
            "mib_per_second": round(self._bytes / copying / 2**20, 2) if copying else None,
            "passes": [{"pass": number, **facts} for number, facts in sorted(self._passes.items())],
        }

    def _turn(self, doing: str | None, at: datetime, *, since: str | None = None) -> None:
        """End the current step at `at`, and begin `doing`. since: a new name for the step that ends."""
        if self._since is not None and (done := since or self._doing):
            self._seconds[done] = self._seconds.get(done, 0.0) + (at - self._since).total_seconds()
        self._doing, self._since = doing, at
