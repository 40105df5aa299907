"""The options of a run of a migration."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from milvus_hubness.jobs.common.lease_records import default_client_ttl, expect_client_ttl
from milvus_hubness.jobs.common.progress import Events, Throttle
from milvus_hubness.jobs.migration.ledger import Migration


@dataclass(frozen=True)
class MigrationOptions:
    """Options of a run."""

    no_writers: bool = False
    """No client writes to the source, so the run waits for none."""
    client_ttl: float = field(default_factory=default_client_ttl)
    """The longest state_ttl of a HubnessClient that writes, in seconds."""
    throttle: Throttle = field(default_factory=Throttle)
    """Slows the copy down, and pauses it."""
    events: Events = field(default_factory=lambda: Events([]))
    """Passes what happens to listeners."""
    release: threading.Event | None = None
    """If given, the cutover waits until this is set; meanwhile the copy catches up."""
    confirm: Callable[[Migration], bool] | None = None
    """If given, called by `migrate` and `resume` once the copy is verified, before a name moves; if
    it returns False, the run ends with the verified copy, which `cutover` can switch to later."""

    def __post_init__(self) -> None:
        expect_client_ttl(self.client_ttl)
