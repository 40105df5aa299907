"""One job at a time on a collection: a lease in the database, with a fencing number.

The database has no compare-and-set, so a lease is taken as in Fischer's timed mutual exclusion (Lamport, ACM
TOCS 1987, algorithm 2): whoever reads that it is free writes its own name, waits `SETTLE_SECONDS`, and has it
where its name is still there. Two that read "free" both write within that time of their reading, or begin
again; each looks that long after its own write, and so after the other's: only the last one finds itself.
Meanwhile it may read (`claimed`): where it has the lease in the end, nobody else had it in between.

A holder that was stopped and revived looks before it writes (`check`), and finds another name.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from milvus_hubness.errors import HubnessError, LeaseHeld, LeaseLost, StateError
from milvus_hubness.jobs.runner import LEDGER, Runner, now
from milvus_hubness.stores.base import Record, Store

LEASES = "leases"
LEASE_SECONDS = 30.0
SETTLE_SECONDS = 0.5
WAITS = True
"""False where nobody else can take a lease: nothing then needs to settle."""

RENEWALS = 3
"""In the time after which it would expire."""
LOOKS = 30
"""At most, in the same time."""
ATTEMPTS = 10


class Entry(BaseModel):
    """What the database holds. number: of the fencing, one more with every holder. name: of one taking of the
    lease. expires_at: None once it was given back."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int = Field(ge=1)
    name: str
    runner: Runner
    expires_at: datetime | None

    @property
    def is_held(self) -> bool:
        """Whether its holder may be at work: it has not given it back, it has not let it expire, and, on this
        machine, its process is there."""
        if self.expires_at is None or self.expires_at <= now():
            return False
        return not self.runner.is_here or self.runner.is_alive()


class Lease:
    """Held from `with` to its end, and renewed meanwhile.

    collection: its real name. seconds: after which the lease of a killed holder expires; clocks of the
    machines should agree to a fraction of that. Raises LeaseHeld naming the holder.
    """

    def __init__(
        self,
        store: Store,
        collection: str,
        *,
        seconds: float = LEASE_SECONDS,
    ) -> None:
        self._store, self._collection, self._seconds = store, collection, seconds
        self._mine: Entry | None = None
        self._settles_at: float | None = None
        self._seen = -math.inf
        self._over = threading.Event()
        self._renewing: threading.Thread | None = None

    @property
    def number(self) -> int:
        """The fencing number."""
        return self._held().number

    def __enter__(self) -> Lease:
        self._claim()
        try:
            self.settle()
        except BaseException:
            self._give_back()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._give_back()

    @contextmanager
    def claimed(self) -> Iterator[Lease]:
        """The lease from here on, as `with` has it, but that only its first `settle` or `check` waits until
        it is known to be held. Read what you like before; write nothing."""
        self._claim()
        try:
            yield self
        finally:
            self._give_back()

    def settle(self) -> None:
        """Waits until it is known to be held. Raises LeaseHeld where another process took it instead."""
        if self._settles_at is None:
            return
        time.sleep(max(0.0, self._settles_at - time.monotonic()))
        began, there = time.monotonic(), self._read()
        if there is None or not self._is_mine(there):
            raise LeaseHeld(self._told(there) if there else f"the lease on {self._collection!r} is gone")
        self._seen, self._settles_at = began, None

    @property
    def is_held(self) -> bool:
        """By this process, as far as it knows."""
        return self._mine is not None

    def check(self) -> None:
        """Call this before every write. Raises LeaseLost where another process has it by now, and LeaseHeld
        as `settle` does.

        What was seen within 1/`LOOKS` of the time after which the lease expires still holds: nobody takes it
        sooner.
        """
        self.settle()
        if not self._was_just_seen():
            self._look()

    def _was_just_seen(self) -> bool:
        return time.monotonic() - self._seen < self._seconds / LOOKS

    def _look(self) -> None:
        began, entry = time.monotonic(), self._read()
        if not self._is_mine(entry):
            self._seen = -math.inf
            there = f"process {entry.runner.pid} on {entry.runner.host} has it" if entry else "it is gone"
            raise LeaseLost(
                f"the lease on {self._collection!r} was lost, {there}: this process changes nothing more"
            )
        self._seen = began

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raises LeaseLost in place of whatever fails within while another process has the lease: that may
        have taken away what this one works with."""
        try:
            yield
        except LeaseLost:
            raise
        except HubnessError as error:
            try:
                self._look()
            except LeaseLost as lost:
                raise lost from error
            raise

    def _claim(self) -> None:
        name = uuid.uuid4().hex
        for _ in range(ATTEMPTS):
            began = time.monotonic()
            there = self._read()
            if there is not None and there.is_held and there.name != name:
                raise LeaseHeld(self._told(there))
            mine = Entry(
                number=there.number + (there.name != name) if there else 1,
                name=name,
                runner=Runner.here(),
                expires_at=self._expiry(),
            )
            self._write(mine)
            now_is = time.monotonic()
            if now_is - began <= SETTLE_SECONDS:
                break
        else:
            raise LeaseHeld(
                f"the lease on {self._collection!r} could not be taken: in none of {ATTEMPTS} attempts did "
                f"the database answer within {SETTLE_SECONDS} s"
            )
        self._mine, self._seen = mine, -math.inf
        self._settles_at = now_is + (SETTLE_SECONDS if WAITS else 0.0)
        self._over.clear()
        self._renewing = threading.Thread(target=self._renew, name="milvus-hubness-lease", daemon=True)
        self._renewing.start()

    def _give_back(self) -> None:
        self._over.set()
        if self._renewing:
            self._renewing.join()
        # What ends the work may be that the database does not answer: then it expires.
        with suppress(HubnessError):
            if self._was_just_seen() or self._is_mine(self._read()):
                self._write(self._held().model_copy(update={"expires_at": None}))
        self._mine = self._settles_at = None

    def _renew(self) -> None:
        while not self._over.wait(self._seconds / RENEWALS):
            # Unreachable for a while, it is tried again; lost, `check` tells.
            with suppress(HubnessError):
                if not self._is_mine(self._read()):
                    return
                self._write(self._held().model_copy(update={"expires_at": self._expiry()}))

    def _expiry(self) -> datetime:
        return now() + timedelta(seconds=self._seconds)

    def _held(self) -> Entry:
        if self._mine is None:
            raise LeaseLost(f"the lease on {self._collection!r} is not held")
        return self._mine

    def _is_mine(self, entry: Entry | None) -> bool:
        return entry is not None and entry.name == self._held().name

    def _told(self, entry: Entry) -> str:
        until = f", until {entry.expires_at:%H:%M:%S} UTC unless renewed" if entry.expires_at else ""
        return (
            f"process {entry.runner.pid} on {entry.runner.host} is at work on {self._collection!r} "
            f"(lease {entry.number}{until})"
        )

    def _read(self) -> Entry | None:
        found = self._store.record(LEDGER, self._key)
        if found is None:
            return None
        try:
            return Entry.model_validate_json(found.body)
        except ValidationError as error:
            raise StateError(f"the lease {self._key!r} is broken: {error.errors()[0]['msg']}") from None

    def _write(self, entry: Entry) -> None:
        self._store.put_records(LEDGER, [Record(self._key, LEASES, entry.model_dump_json())])

    @property
    def _key(self) -> str:
        return f"{LEASES}/{self._collection}"
