"""The process that runs a job, told apart from any process that gets its number later."""

from __future__ import annotations

import os
import socket
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict

LEDGER = "hubness_ledger"
"""The collection in which jobs keep their records."""


class Owner(BaseModel):
    """A process. started: when it began, in the kernel's ticks since boot.

    Process numbers mean something only within one boot of one kernel and one PID namespace: two containers
    with the same host name may each have a process of the same number.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    pid: int
    started: str
    boot_id: str
    pid_namespace: str

    @classmethod
    def here(cls) -> Owner:
        """Return the owner that stands for this process."""
        pid = os.getpid()
        return cls(
            host=socket.gethostname(),
            pid=pid,
            started=process_start(pid),
            boot_id=_boot_id(),
            pid_namespace=_pid_namespace(),
        )

    @property
    def is_dead(self) -> bool:
        """Whether the process is gone for certain: it ran in this boot and this PID namespace, and no
        process here has its number and its start time."""
        if not (self.boot_id and self.pid_namespace and self.started):
            return False
        if (self.boot_id, self.pid_namespace) != (_boot_id(), _pid_namespace()):
            return False
        return process_start(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def now() -> datetime:
    """Return the time of this machine's clock."""
    return datetime.now(timezone.utc)


def process_start(pid: int) -> str:
    """Return when a process of this PID namespace began, in ticks since boot; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return ""


@cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
