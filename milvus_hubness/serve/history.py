"""The last looks at a collection, kept in the database, so that a restart still shows them."""

from __future__ import annotations

from datetime import timedelta

from pydantic import ValidationError

from milvus_hubness.operations.owner import LEDGER
from milvus_hubness.serve.look import Reconciliation
from milvus_hubness.stores.base import Record, Store

KEPT = 500
SPARE = 50
QUIET = timedelta(minutes=10)


class History:
    """label: of the collection. Of looks at which nothing was done, or that failed alike, one in ten minutes
    is kept. What another process that is at work did is its own to keep."""

    def __init__(self, label: str) -> None:
        self._group = f"history/{label}"
        self._kept: tuple[Reconciliation, ...] = ()
        self._latest: Reconciliation | None = None
        self._unwritten: tuple[Reconciliation, ...] = ()
        self._unchecked = SPARE
        self._oldest = 0.0
        self._of_recorded_age: Reconciliation | None = None

    @property
    def kept(self) -> tuple[Reconciliation, ...]:
        """In the order of their time."""
        return self._kept

    @property
    def outcomes(self) -> tuple[Reconciliation, ...]:
        """Those kept and the latest one."""
        return (*self._kept, self._latest) if self._latest else self._kept

    def read(self, store: Store) -> None:
        """What is kept. Entries of another version are left out. Raises StoreError."""
        found = []
        for record in store.records(LEDGER, self._group):
            try:
                found.append(Reconciliation.model_validate_json(record.body))
            except ValidationError:
                continue
        self._kept = tuple(sorted(found, key=lambda outcome: outcome.at)[-KEPT:])
        self._latest = None
        known = [outcome for outcome in self._kept if outcome.bias_age_seconds is not None]
        self._of_recorded_age = known[-1] if known else None

    def add(self, outcome: Reconciliation) -> None:
        if outcome.result == "busy":
            return
        last = self._of_recorded_age
        if last is not None and last.bias_age_seconds is not None:
            grown = last.bias_age_seconds + (outcome.at - last.at).total_seconds()
            self._oldest = max(self._oldest, grown)
        if outcome.bias_age_seconds is not None:
            self._of_recorded_age = outcome
        outcome = outcome.model_copy(update={"oldest_seconds": self._oldest})
        if self._has_alike(outcome):
            self._latest = outcome
            return
        self._oldest, self._latest = 0.0, None
        self._kept = (*self._kept, outcome)[-KEPT:]
        self._unwritten = (*self._unwritten, outcome)[-KEPT:]

    def write(self, store: Store) -> None:
        """What was added since it was last written. Raises StoreError."""
        if not self._unwritten:
            return
        records = [
            Record(
                f"{self._group}/{outcome.at.isoformat(timespec='microseconds')}",
                self._group,
                outcome.model_dump_json(exclude_defaults=True),
            )
            for outcome in self._unwritten
        ]
        store.put_records(LEDGER, records)
        self._unwritten = ()
        self._unchecked += len(records)
        if self._unchecked > SPARE:
            self._forget_oldest(store)

    def _forget_oldest(self, store: Store) -> None:
        """Now and then only: it reads what is kept."""
        keys = [record.key for record in store.records(LEDGER, self._group)]
        if len(keys) > KEPT:
            store.drop_records(LEDGER, self._group, keys[:-KEPT])
        self._unchecked = 0

    def _has_alike(self, outcome: Reconciliation) -> bool:
        """Whether one like it is kept since something came of a look, and not ten minutes ago."""
        for kept in reversed(self._kept):
            if kept.is_eventful or outcome.at - kept.at >= QUIET:
                return False
            if (kept.result, kept.message) == (outcome.result, outcome.message):
                return not outcome.is_eventful
        return False
