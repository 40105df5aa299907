"""The records of leases: the process that holds one, its token, and its fencing aliases."""

from __future__ import annotations

import math
import numbers
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from milvus_hubness.basics.bounds import (
    CollectionName,
    FrozenModel,
    Moment,
    Name,
    Seconds,
    read_record,
    shown,
)
from milvus_hubness.basics.defaults import CLIENT_TTL_VARIABLE, LEASE_VARIABLE, STATE_TTL
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.jobs.store.records import Record

LEASES = "leases"
"""The first part of the group of a collection's lease records in the ledger."""

T = TypeVar("T")


def read_ledger(validate: Callable[[str], T], record: Record) -> T:
    """Return `validate(body)` of a record of the ledger. Raises StateError, which names it."""
    return read_record(
        validate, record.body, described_record(record), f"delete it from {LEDGER!r}"
    )


def described_record(record: Record) -> str:
    """Return what messages call a record of the ledger."""
    return f"the ledger record {shown(record.key)!r}"


def now() -> datetime:
    """Return the current time of this machine's clock."""
    return datetime.now(timezone.utc)


def _proc(path: str) -> str:
    """Return the target of a link, or the text of a file, under /proc; empty if there is none."""
    try:
        return os.readlink(path) if os.path.islink(path) else Path(path).read_text().strip()
    except OSError:
        return ""


def process_start(pid: int) -> str:
    """Return the start time of a process of this PID
    namespace, in ticks since boot; empty if there is none.
    """
    # The second field, the name of the program, may itself hold spaces and parentheses.
    fields = _proc(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if fields else ""


LARGEST_PID = 2**31 - 1
"""Largest process number that Linux allows."""


class Owner(FrozenModel):
    """A process.

    Process numbers are unique only within one boot and one PID namespace: two containers may share
    a host name.
    """

    host: Name
    pid: int = Field(ge=0, le=LARGEST_PID)
    started: Name
    """Its start time, in the kernel's ticks since boot."""
    boot_id: Name
    pid_namespace: Name

    @classmethod
    def here(cls) -> Owner:
        pid = os.getpid()
        return cls(
            host=socket.gethostname(),
            pid=pid,
            started=process_start(pid),
            boot_id=_proc("/proc/sys/kernel/random/boot_id"),
            pid_namespace=_proc("/proc/self/ns/pid"),
        )

    @property
    def is_dead(self) -> bool:
        """Whether the process has certainly ended: this boot and PID namespace have no such number
        and start time.
        """
        this = Owner.here()
        # Where the system has no /proc, nothing is certain, and the lease runs out by itself.
        seen = self.boot_id and self.pid_namespace and self.started
        if not seen or (self.boot_id, self.pid_namespace) != (this.boot_id, this.pid_namespace):
            return False

        # Another process may have the number by now, but it started later.
        return process_start(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def seconds_in(variable: str, default: float, smallest: float = 0.0) -> float:
    """Return the seconds in an environment variable. Raises InvalidParameter."""
    text = os.environ.get(variable) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan

    if not smallest <= seconds < math.inf:
        raise InvalidParameter(
            f"${variable} must be a number of seconds, at least {smallest:g}, not {text!r}"
        )

    return seconds


def default_client_ttl() -> float:
    """Return the longest state_ttl of a client that writes,
    in seconds: a job waits that long after an announcement.
    """
    return seconds_in(CLIENT_TTL_VARIABLE, STATE_TTL)


def expect_client_ttl(seconds: Any) -> None:
    """Raise InvalidParameter unless a job can wait for so long."""
    is_number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
    if not (is_number and 0 <= seconds <= threading.TIMEOUT_MAX):
        raise InvalidParameter(f"client_ttl must be a number of seconds from 0 up, not {seconds!r}")


@dataclass(frozen=True)
class LeasePolicy:
    """The times of a lease, and of a job that writes under it, in seconds."""

    seconds: float = 30.0
    """Lifetime without a renewal."""
    skew: float = 5.0
    """Maximum difference between the clocks of two machines."""
    fenced_write: float = 1.0
    """Within this time a server applies a write whose alias it resolved before the drop."""

    @classmethod
    def default(cls) -> LeasePolicy:
        """Return the default policy; $MILVUS_HUBNESS_LEASE_SECONDS sets `seconds`.

        Raises InvalidParameter.
        """
        seconds = seconds_in(LEASE_VARIABLE, cls.seconds, smallest=0.001)
        # The same proportion as that of the two defaults.
        return cls(seconds, skew=seconds / 6)


LARGEST_TOKEN = 999_999_999_999
"""The key of a record has twelve digits for its token, so that keys sort by token."""


class _LeaseRecord(FrozenModel):
    collection: str = Field(max_length=1_024)
    token: int = Field(ge=1, le=LARGEST_TOKEN)
    owner_id: Name

    @property
    def key(self) -> str:
        return f"{LEASES}/{self.collection}/{self.token:012}/{self.owner_id}"


class Entry(_LeaseRecord):
    """The record of one acquisition of the lease."""

    owner: Owner
    skew: Seconds
    """The owner's maximum difference between clocks, in seconds."""
    expires_at: Moment | None
    """When the lease ends without a renewal; None once it is released."""

    @property
    def is_held(self) -> bool:
        """Whether the holder may still work: it has not released the lease, which has not expired
        by any clock.
        """
        # The holder's clock may be behind this one by `skew` seconds, and it may still renew.
        if self.expires_at is None or self.expires_at + timedelta(seconds=self.skew) <= now():
            return False
        return not self.owner.is_dead

    def __str__(self) -> str:
        until = f", until {self.expires_at:%H:%M:%S} UTC unless renewed" if self.expires_at else ""
        return f"{self.owner} holds the lease on {self.collection!r} (token {self.token}{until})"


class Fence(_LeaseRecord):
    """The record of a fencing alias of `target`, which is the leased collection or the ledger."""

    target: CollectionName
    alias: CollectionName

    @property
    def key(self) -> str:
        return f"{super().key}/{self.alias}"
