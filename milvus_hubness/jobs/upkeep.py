"""The biases of one collection kept right: what there is to do now, done, and told of."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from milvus_hubness.banks import BankLike
from milvus_hubness.estimators import Estimator
from milvus_hubness.jobs.aims import ready_state
from milvus_hubness.jobs.drift import drift
from milvus_hubness.jobs.engines import Engine
from milvus_hubness.jobs.living import Absorbed, absorbed, settled
from milvus_hubness.jobs.migration.throttle import Throttle
from milvus_hubness.jobs.progress import Progress, silent
from milvus_hubness.jobs.rebuild import REBUILD_SHARE
from milvus_hubness.jobs.refresh import DEFAULT_TOLERANCE, refresh
from milvus_hubness.jobs.sample import Labels
from milvus_hubness.jobs.shadow import RefreshEvaluation
from milvus_hubness.jobs.status import status
from milvus_hubness.operations.lease import lease_on, leasing
from milvus_hubness.quality.drift import Drift
from milvus_hubness.stores.base import Store

Action = Literal["none", "pending", "full", "rebuilt", "refused"]
Live = Literal["never", "on drift", "always"]


@dataclass(frozen=True)
class Duty:
    """What is to be kept right, and how.

    field, profile: as `refresh` has them. bank, target_bank, estimator: what biases are to come from, None
    for what is in use. live: when sampled queries are taken into the bank, where no other is given. labels,
    force, refit, revert, rebuild_share, plan, tolerance, client_ttl, engine: of
    `refresh`. rows_per_second: that are
    written, None for no limit.
    """

    collection: str
    field: str | None = None
    profile: str | None = None
    bank: BankLike | None = None
    target_bank: BankLike | None = None
    estimator: Estimator | None = None
    live: Live = "never"
    labels: Labels | None = None
    force: bool = False
    refit: bool = False
    revert: bool = False
    rebuild_share: float = REBUILD_SHARE
    plan: bool = False
    tolerance: float = DEFAULT_TOLERANCE
    client_ttl: float | None = None
    rows_per_second: float | None = None
    engine: Engine = "local"


@dataclass(frozen=True)
class Kept:
    """action: "none" where nothing was due, "pending" for rows without a bias only, "full" for all, "rebuilt"
    where a copy, `collection`, took over, "refused" where the new biases were judged worse. rows: of the
    collection; pending: those without a bias, before. scanned, changed, skipped: rows looked at, written, and
    left as they were right. bias_age_seconds: since the biases were last known to be right. judged: None
    where no new biases were made, or there was too little to judge by. drift, online_banks: None and empty
    where they were not looked at. planned: this would be done, nothing was. write_intents: rows that a killed
    job had left in the log of write intents."""

    collection: str
    action: Action
    reason: str
    rows: int
    pending: int
    scanned: int
    changed: int
    skipped: int
    epoch: int
    bias_age_seconds: float
    seconds: float
    judged: RefreshEvaluation | None = None
    drift: Drift | None = None
    online_banks: dict[str, int] = field(default_factory=dict)
    planned: bool = False
    write_intents: int = 0

    @property
    def skewness(self) -> dict[str, float]:
        """Of N_10 over held-out bank queries, by "raw", "old" and "new"; empty where nothing was judged."""
        return self.judged.skewness if self.judged else {}

    @property
    def overlap(self) -> float | None:
        """The mean share of old top tens that are in the new ones."""
        return self.judged.overlap if self.judged else None

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, for people and for --json."""
        told = {"judged": self.judged, "drift": self.drift}
        return vars(self) | {name: each.to_dict() if each else None for name, each in told.items()}


def keep_up(
    store: Store,
    duty: Duty,
    *,
    stop: threading.Event | None = None,
    progress: Progress = silent,
) -> Kept:
    """Compute the biases that are missing or outdated, alone: a lease is held meanwhile.

    stop: once it is set, Cancelled is raised between two batches, and the next call carries on. Raises as
    `refresh` does.
    """
    began = time.perf_counter()
    with ExitStack() as stack:
        if duty.plan:
            info = store.info(duty.collection, counted=False)
            ready_state(info, duty.field)
            lease = lease_on(store, info)
        else:
            leased = leasing(store, duty.collection, lambda it: ready_state(it, duty.field))
            lease, info = stack.enter_context(leased)
        name = info.name
        before = status(store, name, field=duty.field)
        moved, taken = _live_queries(store, name, duty)
        done = refresh(
            store,
            duty.collection,
            field=duty.field,
            profile=duty.profile,
            bank=taken.bank if taken and taken.bank else duty.bank,
            target_bank=duty.target_bank,
            estimator=duty.estimator,
            labels=duty.labels,
            force=duty.force,
            refit=duty.refit,
            revert=duty.revert,
            rebuild_share=duty.rebuild_share,
            plan=duty.plan,
            tolerance=duty.tolerance,
            client_ttl=duty.client_ttl,
            throttle=Throttle(duty.rows_per_second),
            stop=stop,
            lease=lease,
            engine=duty.engine,
            progress=progress,
        )
        if taken is not None and done.mode != "refused" and not duty.plan:
            settled(lease.store, taken)
    actions: dict[str, Action] = {"full": "full", "rebuilt": "rebuilt", "refused": "refused"}
    return Kept(
        collection=done.collection,
        action=actions.get(done.mode, "pending" if done.written else "none"),
        reason=done.reason,
        rows=before.rows,
        pending=before.pending or 0,
        scanned=done.scanned,
        changed=done.written,
        skipped=max(0, done.scanned - done.written),
        epoch=done.epoch,
        bias_age_seconds=(before.age_seconds or 0.0) if done.mode == "refused" else 0.0,
        seconds=round(time.perf_counter() - began, 2),
        judged=done.judged,
        drift=moved,
        online_banks=_counts(taken),
        planned=done.planned,
        write_intents=before.write_intents,
    )


def _live_queries(store: Store, collection: str, duty: Duty) -> tuple[Drift | None, Absorbed | None]:
    if duty.live == "never" or duty.bank is not None:
        return None, None
    moved = None
    if duty.live == "on drift":
        moved = drift(store, collection, field=duty.field, profile=duty.profile)
        if not moved.fired:
            return moved, None
    return moved, absorbed(store, collection, field=duty.field, profile=duty.profile)


def _counts(taken: Absorbed | None) -> dict[str, int]:
    if taken is None:
        return {}
    return {name: getattr(taken, name) for name in ("seed", "live", "taken", "duplicates", "dropped")}
