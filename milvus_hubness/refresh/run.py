"""`refresh`: compute missing biases, or all of them when the bank or the parameters changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from milvus_hubness.banks.bank import BankLike, optional_bank
from milvus_hubness.errors import Cancelled, InvalidParameter
from milvus_hubness.estimators import Blend, Estimator
from milvus_hubness.migration import plan as migration_plan
from milvus_hubness.operations.bias_backends import bias_location_of
from milvus_hubness.operations.engines import Engine
from milvus_hubness.operations.lease import Lease, lease_on, leasing
from milvus_hubness.operations.progress import Progress, Throttle, silent
from milvus_hubness.refresh.evaluate import Labels, RefreshEvaluation
from milvus_hubness.refresh.plan import SpareBanks, plan_refresh, plan_revert, ready_state, with_profile
from milvus_hubness.refresh.steps import Refreshing
from milvus_hubness.refresh.write import (
    REBUILD_SHARE,
    Waiting,
    carry_out,
    half_switched,
    rebuildings,
    unfinished,
)
from milvus_hubness.state import CollectionState
from milvus_hubness.stores.protocols import Store
from milvus_hubness.stores.records import CollectionInfo

DEFAULT_TOLERANCE = 1e-5
HEED_SECONDS = 0.2


@dataclass(frozen=True)
class RefreshResult:
    """mode: "pending" for rows without a bias only, "full" for all, "rebuilt" where a copy, `collection`,
    took over the alias instead, "refused" where the new biases were judged worse and nothing was changed.
    reason: why. scanned, written: rows. judged: what the new biases do to held-out queries; None where none
    were made, or there is too little to judge by. planned: this would be done, nothing was."""

    collection: str
    mode: str
    reason: str
    scanned: int
    written: int
    epoch: int
    seconds: float
    judged: RefreshEvaluation | None = None
    planned: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, for people and for --json."""
        return vars(self) | {"judged": self.judged.to_dict() if self.judged else None}


def refresh(
    store: Store,
    collection: str,
    *,
    bank: BankLike | None = None,
    target_bank: BankLike | None = None,
    estimator: Estimator | None = None,
    field: str | None = None,
    profile: str | None = None,
    refit: bool = False,
    revert: bool = False,
    force: bool = False,
    labels: Labels | None = None,
    rebuild_share: float = REBUILD_SHARE,
    plan: bool = False,
    tolerance: float = DEFAULT_TOLERANCE,
    client_ttl: float | None = None,
    throttle: Throttle | None = None,
    stop: threading.Event | None = None,
    lease: Lease | None = None,
    engine: Engine = "local",
    progress: Progress = silent,
) -> RefreshResult:
    """Compute what is missing or outdated and write only what moved.

    A full refresh writes the standby slot of every row whose bias there is off by more than `tolerance` (in
    units of the score) and then lets the slots change places, so that no search sees old and new mixed.
    Killed or stopped before that, it is carried on by the next one. Before it begins, the new biases are
    judged against the old and against none on held-out queries, and on `labels` where there are some; where
    they are worse nothing is changed, unless `force`. estimator: without one, what tuning chose since the
    last refresh, else the one in use (Blend() for a new profile). field: the corrected field, where there are
    several. profile: the set of biases to renew, by default the one that searches use; one of a new name is
    added, from the bank given, in columns that the stored vectors have to spare. refit: a full one though
    nothing changed, for estimators that learn from the gallery, which did. revert: to what the biases came
    from before the last full refresh. rebuild_share: where at least that share of 50,000 rows or more would
    be written, and `collection` is an alias, a copy is made that has the new biases and takes it over. plan:
    only say what would be done. client_ttl: the seconds in which every client hears what the collection says
    of itself: so long is waited before the first row is written. throttle: how fast rows may be written.
    stop: once it is set, Cancelled is raised between two batches. lease: one that is held already; without,
    one is taken. engine: what computes the biases that are written: "server", the database's own search over
    the bank (NNN and CSLS); "ray", the workers of a Ray cluster, which also fit (milvus_hubness.distributed).
    Raises NotCorrected, UnfinishedMigration, LeaseHeld, LeaseLost, Cancelled, DimensionMismatch,
    BankTooSmall, InvalidParameter, NoSpareColumns, and InvalidInput where the estimator needs a target bank
    and none is kept or given, a new profile a bank, or there is nothing to go back to."""
    if not (np.isfinite(tolerance) and tolerance >= 0):
        raise InvalidParameter(f"tolerance is a number from 0 up, got {tolerance}")
    bank, target_bank = optional_bank(bank), optional_bank(target_bank)
    if revert and (bank or target_bank or estimator or refit):
        raise InvalidParameter("back goes to what was: it takes no bank, estimator or refit")
    began = time.perf_counter()
    with ExitStack() as stack:
        if lease is None and not plan:
            lease, info = stack.enter_context(leasing(store, collection, lambda it: ready_state(it, field)))
        else:
            info = store.info(collection, counted=False)
            lease = lease or lease_on(store, info)
        name, whole = info.name, ready_state(info, field)
        asks = bank is not None or target_bank is not None or estimator is not None or revert
        if profile is None:
            profile = whole.incoming.name if whole.incoming and not asks else whole.active
        state, is_new = with_profile(whole, profile, bank, estimator or Blend())
        with ThreadPoolExecutor(4, "reading") as executor:
            # A strongly consistent read mostly waits.
            finding = executor.submit(rebuildings, store)
            noting = executor.submit(SpareBanks(store, name).noted)
            looking = None if asks or refit else executor.submit(_waiting, store, info, state)
            reading = executor.submit(store.load_bank, state.profile.bank, checked=False)
            known = finding.result()
            left, half = unfinished(known, name), half_switched(known, info)
            if half and not plan:
                carry_out(lease.store, half, migration_plan.MigrationOptions(), lease)
            unused = [] if plan or left else noting.result()
            waiting = looking.result() if looking else None
            if not plan:
                store = lease.store
            if revert:
                refresh_plan = plan_revert(store, info, state)
            else:
                refresh_plan = plan_refresh(
                    store, info, state, is_new, reading.result, bank, target_bank, estimator,
                    refit=refit, rebuilding=left,
                )  # fmt: skip
        if refresh_plan.reason:
            info = replace(info, rows=store.count(name))
        throttle, stop = throttle or Throttle(), stop or threading.Event()
        stack.enter_context(_heeded(stop, throttle))
        job = Refreshing(
            store=store,
            info=info,
            requested=collection,
            state=state,
            active=whole.active,
            is_new=is_new,
            tolerance=tolerance,
            client_ttl=migration_plan.CLIENT_TTL if client_ttl is None else client_ttl,
            throttle=throttle,
            stop=stop,
            lease=lease,
            plan=plan,
            engine=engine,
            progress=progress,
        )
        if unused:
            lease.check()
            SpareBanks(store, name).drop(unused)
        if refresh_plan.reason:
            done = job.full(refresh_plan, labels, force, rebuild_share)
        else:
            done = job.pending(refresh_plan, waiting or _waiting(store, info, state))
    seconds = round(time.perf_counter() - began, 2)
    result: dict[str, Any] = {"collection": info.name, "planned": plan, "seconds": seconds}
    return RefreshResult(**(result | done))


def _waiting(store: Store, info: CollectionInfo, state: CollectionState) -> Waiting:
    bias_location = bias_location_of(store, info, state)
    return {partition: bias_location.pending(partition) for partition in info.partitions}


@contextmanager
def _heeded(stop: threading.Event, throttle: Throttle) -> Iterator[None]:
    """Who waits until rows may be written waits no longer than until `stop` is set."""
    over = threading.Event()

    def heed() -> None:
        while not over.wait(HEED_SECONDS):
            if stop.is_set():
                throttle.stop(Cancelled("stopped as asked: the next refresh carries on from here"))
                return

    thread = threading.Thread(target=heed, name="milvus-hubness-stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
