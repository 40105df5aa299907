"""What whoever starts a migration decides about its course."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime

from milvus_hubness.errors import InvalidParameter
from milvus_hubness.jobs.engines import Engine
from milvus_hubness.jobs.migration.bulk import BulkTarget
from milvus_hubness.jobs.migration.control import CutoverGate
from milvus_hubness.jobs.migration.events import Event, Events
from milvus_hubness.jobs.migration.throttle import Throttle
from milvus_hubness.jobs.progress import Progress
from milvus_hubness.operations.lease import Lease
from milvus_hubness.operations.owner import now
from milvus_hubness.state import STATE_TTL

CLIENT_TTL = STATE_TTL
"""The longest state_ttl of the clients that write, unless set otherwise."""


@dataclass(frozen=True)
class MigrationOptions:
    """no_writers: nobody writes to the source while this runs, so that clients need not be told, and what
    differs after the copy is carried over once. client_ttl: the longest state_ttl of any HubnessClient that
    writes, in seconds. gate: the cut-over waits until it is opened, catching up meanwhile. bulk: rows are
    copied by files that the database imports, rather than by upserts; only where frozen, since an import does
    not replace what a client wrote before it. engine: what computes the biases of the rows that are copied,
    "server" for the database's own search over the bank, "ray" for a Ray cluster. lease: one that is held
    already; without, one is taken. Raises InvalidParameter."""

    no_writers: bool = False
    client_ttl: float = field(default_factory=lambda: CLIENT_TTL)
    throttle: Throttle = field(default_factory=Throttle)
    events: Events = field(default_factory=lambda: Events([]))
    gate: CutoverGate | None = None
    bulk: BulkTarget | None = None
    engine: Engine = "local"
    lease: Lease | None = None

    def __post_init__(self) -> None:
        if self.bulk and not self.no_writers:
            raise InvalidParameter(
                "imported rows come beside those that clients write meanwhile, not in their place: copy by "
                "files only where nobody writes, and say so with --no-writers"
            )

    def wait_for_clients(self, since: datetime | None) -> None:
        """Until every client knows what was written into a collection's properties at that time."""
        if since is not None:
            time.sleep(max(0.0, self.client_ttl - (now() - since).total_seconds()))

    @contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """Tell how the work within ended, where it did not end well."""
        try:
            yield
        except Exception as error:
            self.events.report("failed", type=type(error).__name__, message=str(error))
            raise
        except BaseException as stop:
            self.events.report("stopped", reason=type(stop).__name__)
            raise


def as_events(progress: Progress) -> Events:
    """Events that draw progress bars."""

    def show(event: Event) -> None:
        if event.name == "copying":
            progress("copying", event.facts["rows"], event.facts["rows_total"])
        elif event.name == "catching-up":
            doing = f"comparing, pass {event.facts['pass']}" if event.facts["pass"] else "verifying"
            progress(doing, event.facts["rows"], event.facts["rows_total"])

    return Events([show])
