"""The events of a migration as lines of JSON, for other programs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from milvus_hubness.cli.console import show_json
from milvus_hubness.jobs.migration.events import Event


def stream(event: Event) -> None:
    """A listener: one object a line, on standard output, at once."""
    show_json(event.to_dict())
    sys.stdout.flush()


def stream_result(facts: Mapping[str, Any]) -> None:
    """The last line, of the same form as the events."""
    stream(Event("result", facts, datetime.now(timezone.utc)))
