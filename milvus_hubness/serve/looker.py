"""One look at a set of biases: what is due is done, and whatever comes of it is a `Reconciliation`."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

from milvus_hubness.banks import QueryBank
from milvus_hubness.errors import Cancelled, HubnessError, LeaseHeld, LeaseLost, StoreError
from milvus_hubness.jobs.bank_source import read_bank
from milvus_hubness.jobs.pairs import read_pairs
from milvus_hubness.jobs.progress import Progress
from milvus_hubness.jobs.sample import Labels
from milvus_hubness.jobs.status import status
from milvus_hubness.jobs.upkeep import Duty, Kept
from milvus_hubness.operations.lease import Lease, LeasePolicy
from milvus_hubness.serve.config import CollectionTable
from milvus_hubness.serve.config_checks import BankFile
from milvus_hubness.serve.look import Reconciliation, Result, now
from milvus_hubness.stores.base import Store

OpenStore = Callable[[], Store]

Task = Literal["share", "pending", "full"]
"""What to look for: rows that wait, once they are so many, or at any rate; or another bank or method too."""


SERVICE_LEASE_SECONDS = 90.0


class Keep(Protocol):
    """`keep_up`, or what stands for it."""

    def __call__(self, store: Store, duty: Duty, *, stop: threading.Event, progress: Progress) -> Kept: ...


class Reconciler:
    """folder: from which files are meant. open_store: called at the first look, and again after the database
    failed. stop: set to have a look end soon."""

    def __init__(
        self,
        table: CollectionTable,
        folder: Path,
        open_store: OpenStore,
        keep: Keep,
        stop: threading.Event,
    ) -> None:
        self.table = table
        self._folder, self._open_store, self._keep, self._stop = folder, open_store, keep, stop
        self._opened: Store | None = None
        self._lease: Lease | None = None
        self._held = ExitStack()

    @property
    def store(self) -> Store:
        """Raises ServerUnavailable."""
        if self._opened is None:
            self._opened = self._open_store()
        return self._opened

    @property
    def is_connected(self) -> bool:
        """Whether the database answered when it was last asked."""
        return self._opened is not None

    def reconcile(self, task: Task, progress: Progress, *, alone: bool) -> Reconciliation | None:
        """None where fewer rows wait than "share" is about. alone: be the only service that looks after this,
        from now on until `release`."""
        began = time.perf_counter()
        result: Result
        try:
            if alone:
                self._acquire()
            if task == "share" and not self._share_waits():
                return None
            duty = self._duty(full=task == "full")
            return Reconciliation.of(self._keep(self.store, duty, stop=self._stop, progress=progress))
        except Cancelled as error:
            result, message = "stopped", str(error)
        except (LeaseHeld, LeaseLost) as error:
            result, message = "busy", str(error)
        except HubnessError as error:
            result, message = "failed", str(error)
            if isinstance(error, StoreError):
                self._opened = None
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            result, message = "failed", f"{type(error).__name__}: {error} ({at.filename}, line {at.lineno})"
        return Reconciliation(at=now(), result=result, message=message, seconds=time.perf_counter() - began)

    def release(self) -> None:
        """Let another service look after this."""
        self._held.close()
        self._lease = None

    def _acquire(self) -> None:
        """Raises LeaseHeld where another service is there."""
        if self._lease is None:
            policy = replace(LeasePolicy.default(), seconds=SERVICE_LEASE_SECONDS)
            lease = Lease(self.store, f"service/{self.table.label}", policy=policy, fenced=False)
            self._lease = self._held.enter_context(lease)
            return
        try:
            self._lease.check()
        except LeaseLost:
            self.release()
            raise

    def _share_waits(self) -> bool:
        share = self.table.pending_share
        found = status(self.store, self.table.name, field=self.table.field)
        return share is not None and bool(found.pending) and (found.pending or 0) >= share * found.rows

    def _duty(self, *, full: bool) -> Duty:
        return Duty(
            collection=self.table.name,
            field=self.table.field,
            profile=self.table.profile,
            bank=self._bank("bank") if full else None,
            target_bank=self._bank("target_bank") if full else None,
            estimator=self.table.estimator() if full else None,
            live=self.table.live if full else "never",
            labels=self._labels() if full else None,
            tolerance=self.table.tolerance,
            client_ttl=self.table.client_ttl,
            rows_per_second=self.table.rows_per_second,
        )

    def _labels(self) -> Labels | None:
        if self.table.pairs is None:
            return None
        queries, keys = read_pairs(str(self._folder / self.table.pairs))
        return Labels(queries.vectors, [[key] for key in keys])

    def _bank(self, key: str) -> QueryBank | None:
        named = BankFile.named(self.table, key, self._folder)
        return read_bank(self.store, named.spec, named.column) if named else None
