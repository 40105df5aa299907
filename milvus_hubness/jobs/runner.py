"""Who is at work: a process, told apart from one that has its number later."""

from __future__ import annotations

import os
import socket
from datetime import datetime, timezone
from pathlib import Path

from pydantic import BaseModel, ConfigDict

LEDGER = "hubness_ledger"
"""The collection in which jobs note what they are at."""

SILENT_SECONDS = 60
"""After so long without a sign, a process on another machine is taken for dead."""


class Runner(BaseModel):
    """The process at work. started: of the process, in the kernel's ticks; seen: its last sign of life."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    pid: int
    started: str
    seen: datetime

    @classmethod
    def here(cls) -> Runner:
        return cls(host=socket.gethostname(), pid=os.getpid(), started=started(os.getpid()), seen=now())

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, a process of this machine."""
        return self.host == socket.gethostname()

    def is_same(self, other: Runner) -> bool:
        return (self.host, self.pid, self.started) == (other.host, other.pid, other.started)

    def is_alive(self) -> bool:
        """On this machine, whether the very process is there; elsewhere, whether it was seen lately."""
        if self.is_here:
            return bool(self.started) and started(self.pid) == self.started
        return (now() - self.seen).total_seconds() < SILENT_SECONDS


def now() -> datetime:
    return datetime.now(timezone.utc)


def started(pid: int) -> str:
    """When a process of this machine began, in ticks since the machine did; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return ""
