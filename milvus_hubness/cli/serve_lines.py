"""The events of the service for people: a line for each that something came of."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from milvus_hubness.cli.console import known_tokens
from milvus_hubness.jobs.migration.commands import redacted
from milvus_hubness.jobs.migration.events import Event

ACTIONS = {
    "pending": "new rows have their bias",
    "full": "all biases were renewed",
    "rebuilt": "a copy with new biases took over",
    "refused": "new biases were refused",
}
RESULTS = {"failed": "FAILED", "busy": "left alone", "stopped": "stopped"}


def narrate(event: Event) -> None:
    """A listener that prints on standard output, at once."""
    if line := _line(event.name, event.facts):
        sys.stdout.write(redacted(f"{event.time:%Y-%m-%d %H:%M:%S}Z {line}\n", known_tokens()))
        sys.stdout.flush()


def _line(name: str, facts: Mapping[str, Any]) -> str:
    if name == "reconciled":
        return _reconciled(facts)
    if name == "missed":
        why = "this process was held up" if facts["reason"] == "late" else "the look before was not over"
        count = f"{facts['count']:,} scheduled runs" if facts["count"] > 1 else "a scheduled run"
        return f"{facts['collection']}: missed {count}, {why}; made up for now"
    if name == "warning":
        return f"{facts['collection']}: {facts['message']}"
    return {
        "started": f"the page and the metrics are at {facts.get('url')}",
        "waiting": f"waiting for the database: {facts.get('message')}",
        "ready": "every collection was looked at",
        "stopping": "stopping: what is under way ends after its batch",
        "stopped": "stopped",
    }.get(name, "")


def _reconciled(facts: Mapping[str, Any]) -> str:
    """Nothing where nothing was due."""
    collection, message = facts["collection"], " ".join(facts["message"].split())
    if facts["result"] != "ok":
        return f"{collection}: {RESULTS[facts['result']]}: {message}"
    if facts["action"] == "none":
        return ""
    skewness = facts["skewness"]
    judged = ", ".join(f"{name} {value:.2f}" for name, value in skewness.items())
    return (
        f"{collection}: {ACTIONS[facts['action']]} ({message}): {facts['scanned']:,} looked at, "
        f"{facts['changed']:,} changed, {facts['skipped']:,} as they were, in {facts['seconds']:.1f} s"
        + (f"; skewness {judged}" if judged else "")
    )
