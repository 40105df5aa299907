"""The run of a refresh: fill missing biases, or write all biases if the bank or the parameters changed."""

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
from milvus_hubness.operations.bias_backends import BiasBackend
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
    """The result of a refresh.

    mode: "pending" if only rows without a bias were written, "full" for all rows, "rebuilt" if a copy,
    `collection`, took over the alias, "refused" if the new biases were judged worse and nothing changed.
    reason: why this mode. scanned, written: numbers of rows. judged: the evaluation of the new biases on
    held-out queries; None if there are no new biases, or too little data. planned: whether this is only a
    plan.
    """

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
        """Return the result as plain data, for people and for --json."""
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
    """Compute missing or outdated biases, and write only the rows whose bias changes.

    A full refresh writes the standby slot of every row whose bias there differs by more than `tolerance` (in
    units of the score). It then exchanges the slots, so that no search mixes old and new biases. If it is
    killed or stopped before that, the next refresh continues it. Before it begins, it evaluates the new
    biases against the old ones and against none, on held-out queries and on `labels` if given. If the new
    biases are worse, it changes nothing, unless `force`.

    estimator: by default the choice of tuning since the last refresh, else the current one (Blend() for a new
    profile). field: the corrected field, if there are several. profile: the bias profile to refresh, by
    default the active one; a new name adds a profile, from the given bank, in spare columns of the stored
    vectors. refit: run a full refresh even if nothing changed, for estimators that learn from a gallery that
    has changed. revert: return to the biases before the last full refresh. rebuild_share: if at least this
    share of 50,000 rows or more must be written, and `collection` is an alias, make a copy with the new
    biases, which takes over the alias. plan: only return the plan. client_ttl: seconds until every client has
    read a new collection state; the refresh waits this long before it writes the first row. throttle: limits
    the rows per second. stop: an event; once it is set, Cancelled is raised between two batches. lease: a
    lease that the caller holds; without it, the refresh acquires one. engine: computes the written biases:
    "server" uses the database's own search over the bank (NNN and CSLS); "ray" uses the workers of a Ray
    cluster, which also fit (milvus_hubness.distributed).

    Raises NotCorrected, UnfinishedMigration, LeaseHeld, LeaseLost, Cancelled, DimensionMismatch,
    BankTooSmall, InvalidParameter, NoSpareColumns, and InvalidInput if the estimator needs a target bank and
    none is stored or given, if a new profile has no bank, or if there are no former biases to return to.
    """
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
            # A strongly consistent read mostly waits, so these reads run in parallel.
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
    bias_location = BiasBackend(store, info, state)
    return {partition: bias_location.pending(partition) for partition in info.partitions}


@contextmanager
def _heeded(stop: threading.Event, throttle: Throttle) -> Iterator[None]:
    """End all waits in the throttle once `stop` is set."""
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
