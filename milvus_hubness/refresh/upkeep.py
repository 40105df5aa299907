"""Status, repair and upkeep of a corrected collection."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal

from milvus_hubness.banks.bank import BankLike
from milvus_hubness.estimators import Estimator
from milvus_hubness.migration import plan
from milvus_hubness.operations import write_intents
from milvus_hubness.operations.bias_backends import BiasBackend
from milvus_hubness.operations.engines import Engine
from milvus_hubness.operations.lease import lease_on, leasing
from milvus_hubness.operations.progress import Progress, Throttle, silent
from milvus_hubness.operations.row_writer import open_batches
from milvus_hubness.quality.bank_checks import Drift
from milvus_hubness.refresh.evaluate import Labels, RefreshEvaluation
from milvus_hubness.refresh.online_bank import Absorbed, absorbed, drift, settled
from milvus_hubness.refresh.plan import ready_state
from milvus_hubness.refresh.run import DEFAULT_TOLERANCE, refresh
from milvus_hubness.refresh.write import REBUILD_SHARE
from milvus_hubness.stores.protocols import Store
from milvus_hubness.stores.records import CollectionInfo


@dataclass(frozen=True)
class Status:
    """The status of a collection.

    phase: "ready", or "copying" for a copy that was never verified. pending: number of rows without a bias.
    where: "vectors" (in the second field `second_vector`, if there is one), "fields", or "side", in the
    collection `side`. candidates, missed: see state.CandidateReranking. profiles: the field's bias profiles;
    the status describes the active one. fields: all corrected fields. age_seconds: time since the last
    refresh. write_intents: number of rows in the write-intent log. open_batches: number of batch records of a
    job that is running or was killed. If nothing is corrected, only the first four fields, write_intents and
    open_batches are set.
    """

    collection: str
    rows: int
    aliases: tuple[str, ...]
    corrected: bool
    phase: str | None = None
    source: str | None = None
    field: str | None = None
    metric: str | None = None
    dim: int | None = None
    width: int | None = None
    estimator: dict[str, Any] | None = None
    strength: float | None = None
    bank: dict[str, Any] | None = None
    where: str | None = None
    second_vector: str | None = None
    side: str | None = None
    candidates: int | None = None
    missed: float | None = None
    pending: int | None = None
    epoch: int | None = None
    refreshed_at: str | None = None
    age_seconds: float | None = None
    profiles: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    write_intents: int = 0
    open_batches: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the status as plain data, for people and for --json."""
        return asdict(self)


def status(store: Store, collection: str, *, field: str | None = None) -> Status:
    """Return the status of `field`, or of the first corrected field. Raises CollectionNotFound, InvalidInput
    for an unknown field, and StateError if the state cannot be read."""
    info = store.info(collection)
    state = info.state_of(field) if field is not None else next(iter(info.states.values()), None)
    left = _left(store, info)
    if state is None:
        return Status(info.name, info.rows, info.aliases, corrected=False, fields=tuple(info.states), **left)
    profile = state.profile
    reranking, bias_location = state.reranking, BiasBackend(store, info, state)
    age = datetime.now(timezone.utc) - profile.refreshed_at
    return Status(
        collection=info.name,
        rows=info.rows,
        aliases=info.aliases,
        corrected=True,
        phase=state.phase,
        source=state.source,
        field=state.field,
        metric=state.metric,
        dim=state.dim,
        width=state.dim if state.reranking else state.layout.width,
        estimator=profile.estimator,
        strength=profile.strength,
        bank=profile.bank.model_dump(),
        where="vectors" if reranking is None else "side" if reranking.side else "fields",
        second_vector=state.second_vector,
        side=reranking.side if reranking else None,
        candidates=reranking.candidates if reranking else None,
        missed=reranking.missed if reranking else None,
        pending=sum(len(bias_location.pending(partition)) for partition in info.partitions),
        epoch=profile.epoch,
        refreshed_at=profile.refreshed_at.isoformat(timespec="seconds"),
        age_seconds=round(age.total_seconds(), 1),
        profiles=tuple(state.profiles),
        fields=tuple(info.states),
        **left,
    )


def repair(store: Store, collection: str, *, client_ttl: float | None = None) -> int:
    """Repair the rows that a killed job may have set back to an earlier content, and end the noting of
    writes. Return the number of repaired rows.

    The next refresh does the same. client_ttl: the longest state_ttl of a client that writes. Raises
    LeaseHeld if a job is running, CollectionNotFound.
    """
    ttl = plan.CLIENT_TTL if client_ttl is None else client_ttl
    with leasing(store, collection) as (lease, info):
        return write_intents.repair(lease, info.name, client_ttl=ttl)


def _left(store: Store, info: CollectionInfo) -> dict[str, Any]:
    """Return the rows in the write-intent log and the batch records of jobs that are running or were
    killed."""
    if info.intent_log is None:
        return {}
    return {
        "write_intents": store.count_notes(info.intent_log),
        "open_batches": len(open_batches(store, info.name)),
    }


Action = Literal["none", "pending", "full", "rebuilt", "refused"]
Live = Literal["never", "on drift", "always"]


@dataclass(frozen=True)
class Duty:
    """The biases to keep up to date, and how.

    field, profile: as in `refresh`. bank, target_bank, estimator: the source of the biases; None for the
    current one. live: when sampled queries enter the bank, if no other bank is given. labels, force, refit,
    revert, rebuild_share, plan, tolerance, client_ttl, engine: as in `refresh`. rows_per_second: maximum rate
    of written rows; None for no limit.
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
    """The result of `keep_up`.

    action: "none" if nothing was due, "pending" if only rows without a bias were written, "full" for all
    rows, "rebuilt" if a copy, `collection`, took over, "refused" if the new biases were judged worse. rows:
    number of rows of the collection. pending: number of rows without a bias before. scanned, changed,
    skipped: numbers of rows that were read, written, and left unchanged. bias_age_seconds: time since the
    biases were last known to be up to date. judged: None if there are no new biases, or too little data.
    drift, online_banks: None and empty if they were not measured. planned: whether this is only a plan.
    write_intents: number of rows that a killed job had left in the write-intent log.
    """

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
        """The skewness of N_10 over held-out bank queries, by "raw", "old" and "new"; empty without an
        evaluation."""
        return self.judged.skewness if self.judged else {}

    @property
    def overlap(self) -> float | None:
        """The mean share of old top tens that are in the new top tens."""
        return self.judged.overlap if self.judged else None

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for people and for --json."""
        told = {"judged": self.judged, "drift": self.drift}
        return vars(self) | {name: each.to_dict() if each else None for name, each in told.items()}


def keep_up(
    store: Store,
    duty: Duty,
    *,
    stop: threading.Event | None = None,
    progress: Progress = silent,
) -> Kept:
    """Compute missing or outdated biases under one lease.

    stop: an event; once it is set, Cancelled is raised between two batches, and the next call continues.
    Raises as `refresh` does.
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
