"""Settings of a job process in trials: its lease, clock, host, size of batches, and shorter waits.

Everything here knows names inside the package; the rest of the suite does not."""

from __future__ import annotations

import datetime
import importlib
import os
import socket
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import time_machine
from pymilvus.client import grpc_handler
from pymilvus.settings import Config

DIM = 16
POLLING = 0.05
RECHECK_DELAYS = (0.0, 0.05, 0.3)
"""Seconds between looks at a row that differs between source and copy: clients write both at once."""


@dataclass(frozen=True)
class Settings:
    """lease_seconds: after which a lease expires that nobody renews. skew: seconds that the wall clock of the
    process is ahead. host: of a machine that it pretends to run on. rows: that a job takes at once.
    rebuilds: a full refresh makes a new copy, however few rows there are."""

    lease_seconds: float = 2.0
    skew: float = 0.0
    host: str = ""
    rows: int = 60
    rebuilds: bool = False

    def apply(self) -> None:
        """Apply them to this process."""
        if self.skew:
            shifted = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=self.skew)
            time_machine.travel(shifted).start()
        if self.host:
            socket.gethostname = lambda: self.host
            _set("_boot_id", lambda: self.host)
        hasten()
        os.environ["MILVUS_HUBNESS_LEASE_SECONDS"] = str(self.lease_seconds)
        _set_lease_of_former_versions(self.lease_seconds)
        milvus = importlib.import_module("milvus_hubness.stores.milvus")
        milvus.CHUNK_BYTES = self.rows * (milvus.ROW_OVERHEAD_BYTES + 4 * DIM)
        _set("RECHECK_DELAYS", RECHECK_DELAYS)
        if self.rebuilds:
            assert _set("FEWEST_ROWS", 1), "the package has no FEWEST_ROWS any more"


def hasten() -> None:
    """Let pymilvus wait less between two looks at an index or at a collection that is being loaded."""
    Config.WaitTimeDurationWhenLoad = POLLING
    short = {"sleep": lambda seconds: time.sleep(min(seconds, POLLING))}
    grpc_handler.time = SimpleNamespace(**(vars(time) | short))


def _set_lease_of_former_versions(seconds: float) -> None:
    """Versions without the environment variable: the suite is to fail there for what it tests."""
    if _set("LEASE_SECONDS", seconds):
        lease = sys.modules["milvus_hubness.jobs.lease"]
        lease.Lease.__init__.__kwdefaults__["seconds"] = seconds
    _set("SILENT_SECONDS", seconds)


def _set(name: str, value: Any) -> bool:
    """Set a constant in every module of the package that has it. Returns whether there is one."""
    found = [
        module
        for path, module in list(sys.modules.items())
        if path.startswith("milvus_hubness.") and name in vars(module)
    ]
    for module in found:
        setattr(module, name, value)
    return bool(found)
