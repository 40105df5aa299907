"""Biases brought up to date: for rows that have none, and for all when the bank or the parameters changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

import numpy as np

from milvus_hubness.banks import QueryBank
from milvus_hubness.beyond import fit_on_ray
from milvus_hubness.correction import Correction
from milvus_hubness.errors import (
    InvalidInput,
    InvalidParameter,
    LeaseLost,
    Stopped,
)
from milvus_hubness.estimators import Blend, Estimator, from_dict, to_dict
from milvus_hubness.jobs.aims import Aim, aim_at, aim_back, ready_state, with_profile
from milvus_hubness.jobs.enable import measure
from milvus_hubness.jobs.engines import Engine
from milvus_hubness.jobs.gallery import read_gallery
from milvus_hubness.jobs.journal import WriteJournal, journalled
from milvus_hubness.jobs.lease import Lease
from milvus_hubness.jobs.migration import steering
from milvus_hubness.jobs.migration.ledger import Migration
from milvus_hubness.jobs.migration.steering import Steering, as_events
from milvus_hubness.jobs.migration.throttle import Throttle
from milvus_hubness.jobs.nearest import keep_nearest
from milvus_hubness.jobs.placement import Placement, placement_of
from milvus_hubness.jobs.progress import Progress, chunks, silent
from milvus_hubness.jobs.rebuild import REBUILD_SHARE, abandon, begin, carry_out, unfinished, way
from milvus_hubness.jobs.renewal import Renewal
from milvus_hubness.jobs.restored import NONE_READ, Banks, restored
from milvus_hubness.jobs.sample import Labels, Sample, labelled_in, sampled
from milvus_hubness.jobs.shadow import Shadow, Standing, judge
from milvus_hubness.jobs.spare_banks import SpareBanks
from milvus_hubness.layout import Floats
from milvus_hubness.state import (
    BankReference,
    CollectionState,
    Former,
    Incoming,
    Profile,
)
from milvus_hubness.stores.base import CollectionInfo, Key, Store, StoredBank

DEFAULT_TOLERANCE = 1e-5
HEED_SECONDS = 0.2

Waiting = Mapping[str | None, Sequence[Key]]
"""Keys of the rows without a bias, by partition."""


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
    judged: Shadow | None = None
    planned: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, for people and for --json."""
        return vars(self) | {"judged": self.judged.to_dict() if self.judged else None}


def refresh(
    store: Store,
    collection: str,
    *,
    bank: QueryBank | None = None,
    target_bank: QueryBank | None = None,
    estimator: Estimator | None = None,
    field: str | None = None,
    profile: str | None = None,
    refit: bool = False,
    back: bool = False,
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
    they are worse nothing is changed, unless `force`.
    estimator: without one, what tuning chose since the last refresh, else the one in use (Blend() for a new
    profile). field: the corrected field, where there are several. profile: the set of biases to renew, by
    default the one that searches use; one of a new name is added, from the bank given, in columns that the
    stored vectors have to spare. refit: a full one though nothing changed, for estimators that learn from the
    gallery, which did. back: to what the biases came from before the last full refresh.
    rebuild_share: where at least that share of 50,000 rows or more would be written, and `collection` is an
    alias, a copy is made that has the new biases and takes it over. plan: only say what would be done.
    client_ttl: the seconds in which every client hears what the collection says of itself: so long is waited
    before the first row is written. throttle: how fast rows may be written. stop: once it is set, Stopped is
    raised between two batches. lease: one that is held already; without, one is taken. engine: what computes
    the biases that are written: "server", the database's own search over the bank (NNN and CSLS); "ray", the
    workers of a Ray cluster, which also fit (milvus_hubness.beyond).
    Raises NotCorrected, UnfinishedMigration, LeaseHeld, LeaseLost, Stopped, DimensionMismatch, BankTooSmall,
    InvalidParameter, NoRoom, and InvalidInput where the estimator needs a target bank and none is kept or
    given, a new profile a bank, or there is nothing to go back to.
    """
    if not (np.isfinite(tolerance) and tolerance >= 0):
        raise InvalidParameter(f"tolerance is a number from 0 up, got {tolerance}")
    if back and (bank or target_bank or estimator or refit):
        raise InvalidParameter("back goes to what was: it takes no bank, estimator or refit")
    began = time.perf_counter()
    with ExitStack() as stack:
        before = store.info(collection, counted=False)
        ready_state(before, field)
        name = before.name
        lease = lease or Lease(store, name)
        if not (plan or lease.is_held):
            stack.enter_context(lease.claimed())
        info = store.info(name, counted=False)
        whole = ready_state(info, field)
        asks = bank is not None or target_bank is not None or estimator is not None or back
        if profile is None:
            profile = whole.incoming.name if whole.incoming and not asks else whole.active
        state, is_new = with_profile(whole, profile, bank, estimator or Blend())
        with ThreadPoolExecutor(1, "bank") as beside:
            reading = beside.submit(store.load_bank, state.profile.bank)
            left = unfinished(store, name)
            spare = SpareBanks(store, name)
            unused = [] if plan or left else spare.noted()
            waiting = None if asks or refit else _waiting(store, info, state)
            if not plan:
                lease.settle()
            if back:
                aim = aim_back(store, info, state)
            else:
                aim = aim_at(
                    store, info, state, is_new, reading.result, bank, target_bank, estimator,
                    refit=refit, rebuilding=left,
                )  # fmt: skip
        if aim.reason:
            info = replace(info, rows=store.count(name))
        throttle, stop = throttle or Throttle(), stop or threading.Event()
        stack.enter_context(_heeded(stop, throttle))
        job = _Refresh(
            store=store,
            info=info,
            asked_for=collection,
            state=state,
            active=whole.active,
            is_new=is_new,
            tolerance=tolerance,
            client_ttl=steering.CLIENT_TTL if client_ttl is None else client_ttl,
            throttle=throttle,
            stop=stop,
            lease=lease,
            plan=plan,
            engine=engine,
            progress=progress,
        )
        if unused:
            lease.check()
            spare.drop(unused)
        if aim.reason:
            done = job.full(aim, labels, force, rebuild_share)
        else:
            done = job.pending(aim, waiting or _waiting(store, info, state))
    seconds = round(time.perf_counter() - began, 2)
    told: dict[str, Any] = {"collection": info.name, "planned": plan, "seconds": seconds}
    return RefreshResult(**(told | done))


def _waiting(store: Store, info: CollectionInfo, state: CollectionState) -> Waiting:
    placement = placement_of(store, info, state)
    return {partition: placement.pending(partition) for partition in info.partitions}


@contextmanager
def _heeded(stop: threading.Event, throttle: Throttle) -> Iterator[None]:
    """Who waits until rows may be written waits no longer than until `stop` is set."""
    over = threading.Event()

    def heed() -> None:
        while not over.wait(HEED_SECONDS):
            if stop.is_set():
                throttle.stop(Stopped("stopped as asked: the next refresh carries on from here"))
                return

    thread = threading.Thread(target=heed, name="milvus-hubness-stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@dataclass(frozen=True)
class _Refresh:
    """state: with the profile to be renewed as the active one. active: the one that is. is_new: whether that
    to be renewed is none of the collection's yet."""

    store: Store
    info: CollectionInfo
    asked_for: str
    state: CollectionState
    active: str
    is_new: bool
    tolerance: float
    client_ttl: float
    throttle: Throttle
    stop: threading.Event
    lease: Lease
    plan: bool
    engine: Engine
    progress: Progress

    # -- rows without a bias ----------------------------------------------------------------------------

    def pending(self, aim: Aim, waiting: Waiting) -> dict[str, Any]:
        placement = placement_of(self.store, self.info, self.state)
        written = sum(map(len, waiting.values())) if self.plan else 0
        if self.plan:
            return self._told_of_pending(written)
        with ThreadPoolExecutor(2, "refresh") as beside:
            if any(waiting.values()) or self._left_behind():
                with self._journalled() as journal:
                    known = {self.state.profile.bank: aim.bank}
                    written = self._renewal(journal, known).fill_pending()
                    last = self._settling(placement, beside)
            else:
                last = self._settling(placement, beside)
            for each in last:
                each.result()
        fresh = self.state.profile.model_copy(update={"refreshed_at": _now()})
        state = self._let_go(self.state).with_profile(fresh)
        if fresh.gate is not None:
            state = keep_nearest(self.store, self.info.name, state, self.store.load_bank(fresh.bank))
        self._write_state(state)
        return self._told_of_pending(written)

    def _settling(self, placement: Placement, beside: ThreadPoolExecutor) -> list[Future[None]]:
        """What is done beside the end of the journal."""
        self.lease.check()
        return [beside.submit(placement.settle), beside.submit(self._forget_unless_unfinished)]

    def _forget_unless_unfinished(self) -> None:
        if self.state.incoming is None:
            Renewal.forget(self.store, self.info.name)

    def _left_behind(self) -> bool:
        """Whether a refresh that was killed left a journal, from which its rows are yet to be put right."""
        return self.info.journal is not None

    def _told_of_pending(self, rows: int) -> dict[str, Any]:
        return {
            "mode": "pending",
            "reason": "bank and parameters are unchanged",
            "scanned": rows,
            "written": rows,
            "epoch": self.state.profile.epoch,
        }

    # -- all rows -----------------------------------------------------------------------------------------

    def full(self, aim: Aim, labels: Labels | None, force: bool, rebuild_share: float) -> dict[str, Any]:
        if aim.carries_on and self.plan:
            return self._told_of(aim, "rebuilt" if aim.rebuilding else "full", aim.reason, self.info.rows)
        if aim.carries_on:
            self.lease.check()
            return self._rebuilt(aim, aim.rebuilding) if aim.rebuilding else self._carried_out(aim)
        sample = sampled(self.store, self.info, self.state, labels, self.progress)
        judged = None if self.is_new else self._judged(aim, sample, labels)
        if judged and judged.objection and not force:
            reason = f"{aim.reason}, but {judged.objection}"
            return {**self._told_of(aim, "refused", reason, 0), "judged": judged}
        centre, correction = aim.centre, None
        if aim.reference is None:
            correction = self._fitted(aim)
            centre = _settled(self.state.profile.centre, correction.centred(sample.vectors))
        rebuilds, why = self._way(aim, sample, correction, centre, rebuild_share)
        reason = f"{aim.reason}; {why}" if why else aim.reason
        if self.plan:
            told = self._told_of(aim, "rebuilt" if rebuilds else "full", reason, self.info.rows)
            return {**told, "judged": judged}
        self.lease.check()
        fresh = self._fresh(aim, correction, centre)
        if left := unfinished(self.store, self.info.name):
            abandon(self.store, left)
        if rebuilds:
            state = self._told(self.state.with_profile(fresh))
            state = state.model_copy(update={"incoming": None, "outgoing": None})
            done = self._rebuilt(aim, begin(self.store, self.info, state, progress=self.progress))
        else:
            done = self._announced(fresh)._carried_out(aim)
        return {**done, "reason": reason, "judged": judged}

    def _told_of(self, aim: Aim, mode: str, reason: str, rows: int) -> dict[str, Any]:
        return {
            "mode": mode,
            "reason": reason,
            "scanned": self.info.rows,
            "written": rows,
            "epoch": self.state.profile.epoch,
        }

    def _way(
        self, aim: Aim, sample: Sample, correction: Correction | None, centre: float, threshold: float
    ) -> tuple[bool, str]:
        """Whether to rebuild, and why; by the share of the sample whose standby slot is off."""
        if self.is_new:
            return False, ""
        if correction is None:
            correction = Correction.restore(
                self.state.layout,
                aim.estimator,
                aim.bank.queries,
                aim.bank.potentials,
                target_bank=aim.bank.targets,
            )
        wanted = correction.centred(sample.vectors) - np.float32(centre)
        off = np.abs(wanted - sample.biases[:, self.state.profile.standby]) > self.tolerance
        return way(self.info, self.asked_for, self.state, float(off.mean()) if len(off) else 0.0, threshold)

    def _rebuilt(self, aim: Aim, migration: Migration) -> dict[str, Any]:
        def watch(doing: str, done: int, total: int) -> None:
            self.progress(doing, done, total)
            try:
                self.lease.check()
            except LeaseLost as error:
                self.throttle.stop(error)

        how = Steering(client_ttl=self.client_ttl, throttle=self.throttle, events=as_events(watch))
        done = carry_out(self.store, migration, how)
        epoch = done.corrected().profile.epoch
        rows = (done.verified or {}).get("rows", 0)
        told = {"reason": aim.reason, "scanned": rows, "written": rows, "epoch": epoch}
        return {"mode": "rebuilt", "collection": done.target, **told}

    def _judged(self, aim: Aim, sample: Sample, labels: Labels | None) -> Shadow | None:
        profile = self.state.profile
        old = Standing(from_dict(profile.estimator), self.store.load_bank(profile.bank), profile.strength)
        new = Standing(aim.estimator, aim.bank, aim.strength)
        known = labelled_in(sample, labels) if labels else None
        return judge(self.state.layout, sample.vectors, old, new, known)

    def _fresh(self, aim: Aim, correction: Correction | None, centre: float) -> Profile:
        """The profile as it will be, its bank kept."""
        old, reference = self.state.profile, aim.reference
        if reference is None and correction is not None:
            fitted = StoredBank(aim.bank.queries, correction.fitted.potentials, aim.bank.targets)
            self.lease.check()
            reference = self._referenced(fitted)
        return old.model_copy(
            update={
                "estimator": to_dict(aim.estimator),
                "slot": old.standby,
                "standby": old.slot,
                "centre": centre,
                "bank": reference,
                "epoch": old.epoch + 1,
                "strength": aim.strength,
                "refreshed_at": _now(),
                "former": None if self.is_new else _former(old),
            }
        )

    def _announced(self, fresh: Profile) -> _Refresh:
        """This job with the new biases announced: whoever writes a row from now on gives it both."""
        abandoned = self.state.incoming
        incoming = Incoming(name=self.state.active, profile=fresh)
        state = self.state.model_copy(update={"incoming": incoming, "outgoing": None})
        self._spare.note([abandoned.profile.bank] if abandoned else [])
        self._write_state(state)
        self._spare.drop(self._spare.noted())
        Renewal.forget(self.store, self.info.name)
        return replace(self, state=state)

    def _referenced(self, bank: StoredBank) -> BankReference:
        """Where the bank lies: a new one is stored beside the old, which stays."""
        old = self.state.profile.bank
        kept = self.store.load_bank(old)
        if bank.fingerprint == kept.fingerprint and np.array_equal(bank.potentials, kept.potentials):
            return old.model_copy(update={"fingerprint": bank.fingerprint, "count": len(bank.queries)})
        self._spare.note([self.store.next_generation(old.collection)])
        return self.store.save_bank(old.collection, bank, self.state.metric)[0]

    def _carried_out(self, aim: Aim) -> dict[str, Any]:
        incoming = self.state.incoming
        if incoming is None:
            raise InvalidInput("no biases are on their way")
        with self._journalled() as journal:
            renewal = self._renewal(journal)
            filled = renewal.fill_pending()
            scanned, written = renewal.run()
            placement_of(self.store, self.info, self._told(self.state)).settle()
            fresh = incoming.profile.model_copy(update={"refreshed_at": _now()})
            leaving = None if self.is_new else Incoming(name=incoming.name, profile=self.state.profile)
            moved = {"incoming": None, "outgoing": leaving}
            state = self.state.model_copy(update=moved).with_profile(fresh, incoming.name)
            state = self._measured_anew(state, aim)
            state = keep_nearest(self.store, self.info.name, state, self.store.load_bank(fresh.bank))
            unused = {*self.state.profile.banks} - {*state.profile.banks}
            self._spare.note(unused)
            self._write_state(state)
        self._let_go(state)
        self._spare.drop(self._spare.noted())
        Renewal.forget(self.store, self.info.name)
        return {
            "mode": "full",
            "reason": aim.reason,
            "scanned": scanned,
            "written": written + filled,
            "epoch": fresh.epoch,
        }

    def _let_go(self, state: CollectionState) -> CollectionState:
        """The state without biases that no client reads any more, once all have heard of the new ones."""
        if state.outgoing is None:
            return state
        if self.stop.wait(self.client_ttl):
            return state
        renewed = state.model_copy(update={"outgoing": None})
        self._write_state(renewed)
        return renewed

    @property
    def _spare(self) -> SpareBanks:
        return SpareBanks(self.store, self.info.name)

    def _fitted(self, aim: Aim) -> Correction:
        """On the bank, and on the gallery where the estimator learns from that; warm where it is the same
        estimator as before."""
        info, parts = self.info, []
        placement = placement_of(self.store, info, self.state)
        for partition in info.partitions if aim.estimator.needs_gallery else ():
            keys = self.store.keys(info.name, partition=partition)
            for part in chunks(keys, self.store.chunk_rows(info), "reading the gallery", self.progress):
                parts.append(placement.read(part, partition).vectors)
        is_same = to_dict(aim.estimator) == self.state.profile.estimator
        return Correction.fit(
            self.state.layout,
            aim.estimator,
            aim.bank.queries,
            gallery=np.concatenate(parts) if parts else None,
            target_bank=aim.bank.targets,
            start=aim.bank.potentials if is_same else None,
            fit=fit_on_ray if self.engine == "ray" else None,
        )

    def _measured_anew(self, state: CollectionState, aim: Aim) -> CollectionState:
        """The state with what candidates miss of the answers that these biases give."""
        if state.beside is None:
            return state
        gallery = read_gallery(self.store, self.info, state.field, progress=self.progress)
        correction = restored(self.store, state, state.profile)
        candidates, missed, measured = measure(
            gallery, correction, aim.bank.queries, state.profile.strength, state.beside.allowed
        )
        found = {"candidates": candidates, "missed": missed[candidates], "queries": measured}
        return state.model_copy(update={"beside": state.beside.model_copy(update=found)})

    # -- what all of it needs -----------------------------------------------------------------------------

    @contextmanager
    def _journalled(self) -> Iterator[WriteJournal]:
        ttl, check = self.client_ttl, self.lease.check
        with (
            journalled(self.store, self.info, client_ttl=ttl, stop=self.stop, check=check) as journal,
            self.lease.explained(),
        ):
            yield journal

    def _renewal(self, journal: WriteJournal, banks: Banks = NONE_READ) -> Renewal:
        return Renewal(
            store=self.store,
            info=self.info,
            state=self._told(self.state),
            names_epoch=self.state.active == self.active,
            tolerance=self.tolerance,
            journal=journal,
            lease=self.lease,
            throttle=self.throttle,
            stop=self.stop,
            progress=self.progress,
            banks=banks,
            engine=self.engine,
        )

    def _write_state(self, state: CollectionState) -> None:
        self.lease.check()
        self.store.write_state(self.info.name, self._told(state))

    def _told(self, state: CollectionState) -> CollectionState:
        """What the collection says: searches know no profile that has no biases yet."""
        known = dict(state.profiles)
        if self.is_new and state.incoming is not None:
            known.pop(state.incoming.name, None)
        return state.model_copy(update={"active": self.active, "profiles": known})


def _settled(old: float, biases: Floats) -> float:
    """The old centre while it is within one standard deviation of the new mean, so that rows whose bias did
    not move need no rewriting; else the new mean."""
    if not len(biases):
        return old
    mean, spread = float(biases.mean(dtype=np.float64)), float(biases.std(dtype=np.float64))
    return old if abs(mean - old) <= spread else mean


def _former(profile: Profile) -> Former:
    return Former(
        estimator=profile.estimator, centre=profile.centre, strength=profile.strength, bank=profile.bank
    )


def _now() -> datetime:
    return datetime.now(timezone.utc)
