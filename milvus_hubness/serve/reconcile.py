"""One turn of the reconcile loop for a bias profile, its result, and the history of results."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from milvus_hubness.basics.defaults import ALERT_BUDGET
from milvus_hubness.basics.logs import log
from milvus_hubness.basics.progress import Progress
from milvus_hubness.correction.guard import FEWEST_ROWS
from milvus_hubness.errors import (
    Cancelled,
    CollectionExists,
    CollectionNotFound,
    EmptyCollection,
    HubnessError,
    LeaseHeld,
    LeaseLost,
    StoreError,
    name_some,
)
from milvus_hubness.jobs.common.lease import Lease
from milvus_hubness.jobs.common.lease_records import LeasePolicy
from milvus_hubness.jobs.refresh.options import RefreshOptions
from milvus_hubness.jobs.refresh.result import RefreshResult
from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import Record
from milvus_hubness.serve.config import CollectionTable

Result = Literal["ok", "busy", "failed", "stopped"]
ACTIONS: dict[str, str] = {
    "none": "nothing was due",
    "pending": "new rows got their bias",
    "full": "all biases were recomputed",
    "refused": "new biases were refused",
}
"""The actions of a refresh, in words."""

STOPPED = "stopped as requested: the next refresh carries on from here"
"""Why a refresh ends that a service stops."""

UNFINISHED = "unfinished"
"""The action of a reconciliation that did not end with a refresh."""


class Reconciliation(BaseModel):
    """The result of one reconciliation.

    Fields without an explanation are those of `RefreshResult`.
    """

    model_config = ConfigDict(frozen=True)

    at: datetime
    """When it ended."""
    result: Result
    """How it ended; "busy" if another process was working on the collection."""
    action: str = UNFINISHED
    """That of the refresh; "unfinished" unless the result is "ok"."""
    message: str = ""
    """The reason or the error."""
    seconds: float = 0.0
    rows: int = 0
    pending: int = 0
    scanned: int = 0
    written: int = 0
    skipped: int = 0
    epoch: int = 0
    bias_age_seconds: float | None = None
    oldest_seconds: float = 0.0
    """The greatest age of the biases since the previous stored result."""
    excess_answers: dict[str, float] = {}
    overlap: float | None = None
    unfitted_share: float | None = None
    new_bank_due: str = ""
    suspicious: int | None = None
    """Rows that look like planted hubs; None if the collection was not scanned."""
    suspicious_share: float | None = None
    """Their share of the scanned rows."""

    @classmethod
    def of(cls, refreshed: RefreshResult) -> Reconciliation:
        # By name: a field of both classes has the same meaning in both.
        shared = {
            name: getattr(refreshed, name) for name in cls.model_fields if hasattr(refreshed, name)
        }
        further = {"at": now(), "result": "ok", "message": refreshed.reason}
        return cls(**(shared | further))

    @property
    def is_refit_checked(self) -> bool:
        """Whether it has checked if a refit is due: fills do not."""
        return self.unfitted_share is not None or bool(self.new_bank_due)

    @property
    def is_new_bank_due(self) -> bool | None:
        """Whether a new bank is due; None if that was not checked."""
        return bool(self.new_bank_due) if self.is_refit_checked else None

    @property
    def has_hub_alert(self) -> bool:
        """Whether more rows look like planted hubs than the alert budget allows."""
        return self.suspicious_share is not None and self.suspicious_share > ALERT_BUDGET

    @property
    def is_eventful(self) -> bool:
        """Whether it changed something, or would have."""
        return self.result in ("ok", "stopped") and self.action != "none"

    @property
    def excess_answers_now(self) -> float | None:
        """Those under the biases that searches now use; None if they were not measured."""
        return self.excess_answers.get("old" if self.action == "refused" else "new")


@dataclass(frozen=True)
class Course:
    """The progress of a running reconciliation."""

    since: datetime
    doing: str = ""
    """The current step."""
    done: int = 0
    """Finished rows of that step."""
    total: int = 0
    """All rows of that step; 0 before they are counted."""


def now() -> datetime:
    return datetime.now(timezone.utc)


OpenStore = Callable[[], Store]


class Refresh(Protocol):
    """`jobs.refresh.run.refresh`, as the service calls it."""

    def __call__(
        self, store: Store, /, collection: str, *, options: RefreshOptions
    ) -> RefreshResult: ...


Task = Literal["fill", "refresh"]
"""fill: give rows without a bias theirs. refresh: check the bank and what else biases come from, too; it
does the work of the other.
"""
ANSWERED = (CollectionNotFound, CollectionExists, EmptyCollection)
"""Errors of a database that has answered: its connection is not broken."""

SERVICE_LEASE_SECONDS = 90.0
"""Time after which another service may take over from one that was killed."""


class Reconciler:
    """Runs reconciliations.

    open_store: called at the first reconciliation, and again after the database failed. stop: set
    it to end a reconciliation soon.
    """

    def __init__(
        self, table: CollectionTable, open_store: OpenStore, refresh: Refresh, stop: threading.Event
    ) -> None:
        self.table = table
        self._open_store = open_store
        self._refresh = refresh
        self._stop = stop
        # None before the first reconciliation and after an error of the database.
        self._opened: Store | None = None
        # The store that such an error came from, until there is another.
        self._broken: Store | None = None
        self._lease: Lease | None = None
        self._held = ExitStack()

    @property
    def store(self) -> Store:
        """The store, opened when needed. Raises ServerUnavailable."""
        if self._opened is None:
            self._opened = self._open_store()
            # The lease stays held, or this service would wait for itself until it expires.
            if self._lease is not None:
                self._lease.reconnect(self._opened)
            if self._broken is not None:
                self._broken.close()
                self._broken = None
        return self._opened

    @property
    def is_connected(self) -> bool:
        """Whether the database answered the last request."""
        return self._opened is not None

    def reconcile(self, task: Task, progress: Progress, *, alone: bool) -> Reconciliation:
        """Reconcile once.

        alone: hold the lease of the service on this profile until `release`.
        """
        began = time.perf_counter()
        result: Result
        # No error ends a worker: it is a result like others, and the next time is another try.
        try:
            if alone:
                self._acquire()

            options = self.table.refresh_options(self.store, full=task == "refresh")
            options = replace(options, progress=progress)
            with options.throttle.stopped_by(self._stop, Cancelled(STOPPED)):
                done = self._refresh(self.store, self.table.name, options=options)
            outcome = Reconciliation.of(done)
            return self._with_scan(outcome, progress) if task == "refresh" else outcome
        except Cancelled as error:
            result = "stopped"
            message = str(error)
        except (LeaseHeld, LeaseLost) as error:
            result = "busy"
            message = str(error)
        except HubnessError as error:
            result = "failed"
            message = str(error)
            # A connection may stay broken, so the next reconciliation opens another.
            is_broken = isinstance(error, StoreError) and not isinstance(error, ANSWERED)
            if is_broken and self._opened is not None:
                self._broken = self._opened
                self._opened = None
        except Exception as error:
            # A fault of the program: its place goes into the message, since no traceback is shown.
            at = traceback.extract_tb(error.__traceback__)[-1]
            result = "failed"
            message = f"{type(error).__name__}: {error} ({at.filename}, line {at.lineno})"

        return Reconciliation(
            at=now(), result=result, message=message, seconds=time.perf_counter() - began
        )

    def _with_scan(self, outcome: Reconciliation, progress: Progress) -> Reconciliation:
        """Return the result with that of a scan for planted hubs, if there are not too many rows."""
        if not FEWEST_ROWS <= outcome.rows <= self.table.hub_scan_rows:
            return outcome
        # Here, as it takes a second: a service that scans nothing does without.
        from milvus_hubness.reports.suspicious import scan_hubs

        try:
            found = scan_hubs(
                self.store, self.table.name, field=self.table.field, top=0, progress=progress
            )
        except Cancelled:
            raise
        except HubnessError as error:
            # The biases are up to date: a gallery that cannot be scanned is no failed refresh.
            log.warning("%s: not scanned for planted hubs: %s", self.table.name, error)
            return outcome

        if found.is_above_budget:
            log.warning(
                "%s: %d rows look like planted hubs, the first of them %s: see `milvus-hubness "
                "hubs %s --suspicious`",
                self.table.name,
                len(found.suspicious),
                name_some(found.suspicious),
                self.table.name,
            )
        return outcome.model_copy(
            update={
                "suspicious": len(found.suspicious),
                "suspicious_share": found.found.share,
            }
        )

    def release(self) -> None:
        """Release the lease on this profile, so that another service can take over."""
        self._held.close()
        self._lease = None

    def _acquire(self) -> None:
        """Acquire the lease of the service on this profile.

        Raises LeaseHeld if another service holds it.
        """
        if self._lease is None:
            # Not fenced: it is on no collection, whose writes each refresh guards by its own lease.
            policy = replace(LeasePolicy.default(), seconds=SERVICE_LEASE_SECONDS)
            lease = Lease(self.store, f"service/{self.table.label}", policy=policy, fenced=False)
            self._lease = self._held.enter_context(lease)
            return

        # Opened first: the lease reads its records by the connection that works.
        _ = self.store
        try:
            self._lease.check()
        except LeaseLost:
            self.release()
            raise


QUIET = timedelta(minutes=10)
"""Time for which a result like the last stored one is not stored."""


LONGEST_MESSAGE = 8_000
"""Letters of a message that are stored: servers quote whole requests, and a record has its limit."""


class History:
    """The latest results of a collection, about `size`.

    Results without a change, and repeated failures, are stored at most once in ten minutes. Results
    "busy" are not stored: the other process stores its own.
    """

    def __init__(self, label: str, size: int) -> None:
        self._size = size
        self.stored: tuple[Reconciliation, ...] = ()
        self._group = f"history/{label}"
        # A result that is not stored: the page shows it until there is another.
        self._latest: Reconciliation | None = None
        self._unwritten: tuple[Reconciliation, ...] = ()
        # Records since the last check of their number: the first write always checks.
        self._unchecked = size
        self._oldest = 0.0
        # The last result with an age, from which the age has grown since.
        self._last_with_age: Reconciliation | None = None

    @property
    def outcomes(self) -> tuple[Reconciliation, ...]:
        """The stored results and the latest one."""
        return (*self.stored, self._latest) if self._latest else self.stored

    def read(self, store: Store) -> None:
        """Read the stored results; skip entries of another version. Raises StoreError."""
        outcomes = []
        for record in store.records(LEDGER, self._group):
            with suppress(ValidationError):
                outcomes.append(Reconciliation.model_validate_json(record.body))

        self.stored = tuple(sorted(outcomes, key=lambda outcome: outcome.at)[-self._size :])
        self._latest = None
        with_age = [outcome for outcome in self.stored if outcome.bias_age_seconds is not None]
        self._last_with_age = with_age[-1] if with_age else None

    def add(self, outcome: Reconciliation) -> None:
        """Add a result, to be stored by the next `write` or only shown."""
        if outcome.result == "busy":
            return

        outcome = outcome.model_copy(update={"message": outcome.message[:LONGEST_MESSAGE]})
        # The age just before this result, when it was greatest.
        last = self._last_with_age
        if last is not None and last.bias_age_seconds is not None:
            grown = last.bias_age_seconds + (outcome.at - last.at).total_seconds()
            self._oldest = max(self._oldest, grown)

        if outcome.bias_age_seconds is not None:
            self._last_with_age = outcome

        outcome = outcome.model_copy(update={"oldest_seconds": self._oldest})
        if self._has_similar(outcome):
            self._latest = outcome
            return

        # From here on, the greatest age since this result.
        self._oldest = 0.0
        self._latest = None
        self.stored = (*self.stored, outcome)[-self._size :]
        self._unwritten = (*self._unwritten, outcome)[-self._size :]

    def write(self, store: Store) -> None:
        """Write the results that were added since the last write. Raises StoreError."""
        if not self._unwritten:
            return

        records = []
        for outcome in self._unwritten:
            # Keys sort by time, so the first keys are those of the oldest results.
            key = f"{self._group}/{outcome.at.isoformat(timespec='microseconds')}"
            records.append(Record(key, self._group, outcome.model_dump_json(exclude_defaults=True)))

        store.put_records(LEDGER, records)
        self._unwritten = ()
        self._unchecked += len(records)
        # Reading all keys at every write would cost more than a tenth too many records.
        if self._unchecked > self._size // 10:
            keys = [record.key for record in store.records(LEDGER, self._group)]
            if len(keys) > self._size:
                store.drop_records(LEDGER, self._group, keys[: -self._size])
            self._unchecked = 0

    def _has_similar(self, outcome: Reconciliation) -> bool:
        """Return whether a similar result is already stored.

        It must be less than ten minutes old, and nothing may have changed since.
        """
        for stored in reversed(self.stored):
            if stored.is_eventful or outcome.at - stored.at >= QUIET:
                return False
            # What a check has found is shown until the next one, so it is stored.
            if outcome.is_refit_checked and stored.unfitted_share != outcome.unfitted_share:
                return False
            if outcome.suspicious is not None and stored.suspicious != outcome.suspicious:
                return False
            if (stored.result, stored.message) == (outcome.result, outcome.message):
                return not outcome.is_eventful
        return False
