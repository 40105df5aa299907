"""Biases brought up to date: for rows that have none, and for all when the bank or the parameters changed."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks import QueryBank
from milvus_hubness.correction import Correction
from milvus_hubness.errors import InvalidInput, InvalidParameter, NoRoom, UnfinishedMigration
from milvus_hubness.estimators import Blend, Estimator, from_dict, to_dict
from milvus_hubness.jobs.enable import measure
from milvus_hubness.jobs.gallery import read_gallery
from milvus_hubness.jobs.nearest import keep_nearest
from milvus_hubness.jobs.placement import Placement, placement_of
from milvus_hubness.jobs.progress import Progress, chunks, silent
from milvus_hubness.jobs.restored import restored
from milvus_hubness.layout import Floats
from milvus_hubness.state import (
    SLOTS_PER_PROFILE,
    BankReference,
    CollectionState,
    Profile,
    TuningRecord,
    require_state,
)
from milvus_hubness.stores.base import CollectionInfo, Key, Store, StoredBank

DEFAULT_TOLERANCE = 1e-5


@dataclass(frozen=True)
class RefreshResult:
    """mode: "pending" for rows without a bias only, "full" for all. reason: why. scanned, written: rows."""

    collection: str
    mode: str
    reason: str
    scanned: int
    written: int
    epoch: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, for people and for --json."""
        return asdict(self)


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
    tolerance: float = DEFAULT_TOLERANCE,
    progress: Progress = silent,
) -> RefreshResult:
    """Compute what is missing or outdated and write only what moved.

    A full refresh writes the standby slot of every row whose bias there is off by more than `tolerance` (in
    units of the score) and then lets the slots change places, so that no search sees old and new mixed.
    estimator: without one, what tuning chose since the last refresh, else the one in use (Blend() for a new
    profile). field: the corrected field, where there are several. profile: the set of biases to renew, by
    default the one that searches use; one of a new name is added, from the bank given, in columns that the
    stored vectors have to spare. refit: a full one though nothing changed, for estimators that learn from the
    gallery, which did.
    Raises NotCorrected, UnfinishedMigration, DimensionMismatch, BankTooSmall, InvalidParameter, NoRoom, and
    InvalidInput where the estimator needs a target bank and none is kept or given, or a new profile a bank.
    """
    if not (np.isfinite(tolerance) and tolerance >= 0):
        raise InvalidParameter(f"tolerance is a number from 0 up, got {tolerance}")
    began = time.perf_counter()
    info = store.info(collection)
    whole = require_state(info.state_of(field), info.name)
    if whole.phase != "ready":
        what = "filled only in part: enable it again" if whole.stored_in else f"a copy of {whole.source!r}"
        raise UnfinishedMigration(f"{info.name!r} is unfinished, {what}")
    is_new = profile is not None and profile not in whole.profiles
    if profile is not None and is_new:
        whole = _with_new_profile(whole, profile, bank, estimator or Blend())
    name = profile or whole.active
    state = whole.model_copy(update={"active": name})
    kept = store.load_bank(state.profile.bank)
    wanted = StoredBank(bank or kept.queries, kept.potentials, target_bank or kept.targets)
    strength = state.profile.strength
    if estimator is None and not is_new and (tuned := _newly_tuned(info, state.profile, wanted)):
        estimator, strength = from_dict(tuned.choice or {}), tuned.strength
    estimator = estimator or from_dict(state.profile.estimator)
    reason = "the profile is new" if is_new else _what_changed(state.profile, wanted, estimator, refit)
    if reason:
        correction = _fit(store, info, state, estimator, wanted, progress)
        fitted = StoredBank(wanted.queries, correction.fitted.potentials, wanted.targets)
        reference = _referenced(store, state, fitted, kept)
        placement = placement_of(store, info, whole)
        epoch = state.profile.epoch + 1 if name == whole.active else None
        scanned, written, fresh = _refresh_all(
            store, info, state, placement, correction, reference, epoch, tolerance, progress
        )
    else:
        scanned = written = _fill_pending(store, info, whole, progress)
        fresh = state.profile.model_copy(update={"refreshed_at": datetime.now(timezone.utc)})
    fresh = fresh.model_copy(update={"strength": strength})
    renewed = state.with_profile(fresh)
    if reason:
        renewed = _measured_anew(store, info, renewed, correction, wanted.queries, progress)
    renewed = keep_nearest(store, info.name, renewed, wanted)
    store.write_state(info.name, renewed.model_copy(update={"active": whole.active}))
    if fresh.bank.generation != state.profile.bank.generation:
        store.drop_bank_generation(state.profile.bank)
    return RefreshResult(
        collection=info.name,
        mode="full" if reason else "pending",
        reason=reason or "bank and parameters are unchanged",
        scanned=scanned,
        written=written,
        epoch=fresh.epoch,
        seconds=round(time.perf_counter() - began, 2),
    )


def _with_new_profile(
    state: CollectionState, name: str, bank: QueryBank | None, estimator: Estimator
) -> CollectionState:
    """The state with a profile of that name in two columns that the stored vectors have to spare, as yet
    without biases."""
    if not name:
        raise InvalidParameter("a profile needs a name")
    if bank is None:
        raise InvalidInput(f"profile {name!r} is new: give the bank that its biases come from")
    wider = state.model_copy(update={"slots": state.slots + SLOTS_PER_PROFILE})
    fits = wider.layout.width == state.layout.width and wider.form.width == state.form.width
    if state.beside is not None or not fits:
        raise NoRoom(
            f"field {state.field!r} has no columns to spare for profile {name!r}: "
            "migrate it with room for more profiles"
        )
    active = state.profile
    draft = Profile(
        estimator=to_dict(estimator),
        slot=state.slots,
        standby=state.slots + 1,
        centre=0.0,
        bank=active.bank,
        epoch=1,
        refreshed_at=active.refreshed_at,
    )
    return wider.with_profile(draft, name)


def _measured_anew(
    store: Store,
    info: CollectionInfo,
    state: CollectionState,
    correction: Correction,
    queries: QueryBank,
    progress: Progress,
) -> CollectionState:
    """The state with what candidates miss of the answers that these biases give."""
    if state.beside is None:
        return state
    gallery = read_gallery(store, info, state.field, progress=progress)
    candidates, missed, measured = measure(
        gallery, correction, queries, state.profile.strength, state.beside.allowed
    )
    found = {"candidates": candidates, "missed": missed[candidates], "queries": measured}
    return state.model_copy(update={"beside": state.beside.model_copy(update=found)})


def _what_changed(profile: Profile, bank: StoredBank, estimator: Estimator, refit: bool) -> str:
    changed = ["a refit was asked for"] if refit else []
    if bank.fingerprint != profile.bank.fingerprint:
        changed.append("the bank changed")
    if to_dict(estimator) != profile.estimator:
        changed.append("the parameters changed")
    return " and ".join(changed)


def _newly_tuned(info: CollectionInfo, profile: Profile, bank: StoredBank) -> TuningRecord | None:
    """What tuning chose for this bank since the last refresh."""
    tuning = info.tuning
    if tuning is None or tuning.choice is None or tuning.tuned_at <= profile.refreshed_at:
        return None
    return tuning if tuning.bank_fingerprint == bank.queries.fingerprint else None


def _fit(
    store: Store,
    info: CollectionInfo,
    state: CollectionState,
    estimator: Estimator,
    bank: StoredBank,
    progress: Progress,
) -> Correction:
    """Fitted on the bank, and on the gallery where the estimator learns from that; warm where it is the same
    estimator as before."""
    placement = placement_of(store, info, state)
    parts = []
    for partition in info.partitions if estimator.needs_gallery else ():
        keys = store.keys(info.name, partition=partition)
        for part in chunks(keys, store.chunk_rows(info), "reading the gallery", progress):
            parts.append(placement.read(part, partition).vectors)
    return Correction.fit(
        state.layout,
        estimator,
        bank.queries,
        gallery=np.concatenate(parts) if parts else None,
        target_bank=bank.targets,
        start=bank.potentials if to_dict(estimator) == state.profile.estimator else None,
    )


def _fill_pending(store: Store, info: CollectionInfo, state: CollectionState, progress: Progress) -> int:
    """Every profile's biases for the rows that have none."""
    placement = placement_of(store, info, state)
    corrections: dict[int, Correction] = {}
    for profile in state.profiles.values():
        correction = restored(store, state, profile)
        corrections |= {profile.slot: correction, profile.standby: correction}
    written = 0
    for partition in info.partitions:
        pending = placement.pending(partition)
        for part in chunks(pending, store.chunk_rows(info), "computing missing biases", progress):
            written += placement.write(part, partition, corrections, state.profile.epoch)
    placement.settle()
    return written


@dataclass(frozen=True)
class _Scanned:
    """One partition as it stands. biases: (n,) new and not centred; standby: (n,) what the idle slot holds.
    sound: (n,) whether a bias could be computed; pending: (n,) whether the row waits for its first."""

    partition: str | None
    keys: list[Key]
    biases: Floats
    standby: Floats
    sound: npt.NDArray[np.bool_]
    pending: npt.NDArray[np.bool_]

    def moved(self, centre: float, tolerance: float) -> list[Key]:
        """Keys of the rows whose idle slot is off by more than `tolerance`, or that never had a bias."""
        wanted = np.where(self.sound, self.biases - np.float32(centre), np.float32(0))
        off = (np.abs(wanted - self.standby) > tolerance) | self.pending
        return [key for key, is_off in zip(self.keys, off, strict=True) if is_off]


def _refresh_all(
    store: Store,
    info: CollectionInfo,
    state: CollectionState,
    placement: Placement,
    correction: Correction,
    bank: BankReference,
    epoch: int | None,
    tolerance: float,
    progress: Progress,
) -> tuple[int, int, Profile]:
    """Rows scanned, rows written, and the profile that makes the new biases the ones searches read.

    epoch: what the rows say of it; None to leave that.
    """
    scans = [
        _scan(store, info, state, placement, correction, partition, progress) for partition in info.partitions
    ]
    old = state.profile
    profile = old.model_copy(
        update={
            "estimator": to_dict(correction.fitted.estimator),
            "slot": old.standby,
            "standby": old.slot,
            "centre": _settled(old.centre, np.concatenate([scan.biases[scan.sound] for scan in scans])),
            "bank": bank,
            "epoch": old.epoch + 1,
            "refreshed_at": datetime.now(timezone.utc),
        }
    )
    centred = Correction(state.layout, correction.fitted, profile.centre)
    written = 0
    for scan in scans:
        moved = scan.moved(profile.centre, tolerance)
        for part in chunks(moved, store.chunk_rows(info), "writing biases", progress):
            written += placement.write(part, scan.partition, {profile.slot: centred}, epoch)
    placement.settle()
    return sum(len(scan.keys) for scan in scans), written, profile


def _scan(
    store: Store,
    info: CollectionInfo,
    state: CollectionState,
    placement: Placement,
    correction: Correction,
    partition: str | None,
    progress: Progress,
) -> _Scanned:
    keys: list[Key] = []
    columns = []
    wanted = store.keys(info.name, partition=partition)
    for part in chunks(wanted, store.chunk_rows(info), "computing biases", progress):
        placed = placement.read(part, partition)
        keys += placed.batch.keys
        columns.append(
            np.column_stack(
                [
                    correction.centred(placed.vectors),
                    placed.biases[:, state.profile.standby],
                    ~state.layout.unsound(placed.vectors),
                    placed.pending,
                ]
            )
        )
    table = np.concatenate(columns) if columns else np.empty((0, 4), np.float32)
    biases, standby, sound, pending = table.astype(np.float32).T
    return _Scanned(partition, keys, biases, standby, sound.astype(bool), pending.astype(bool))


def _settled(old: float, biases: Floats) -> float:
    """The old centre while it is within one standard deviation of the new mean, so that rows whose bias did
    not move need no rewriting; else the new mean."""
    if not len(biases):
        return old
    mean, spread = float(biases.mean(dtype=np.float64)), float(biases.std(dtype=np.float64))
    return old if abs(mean - old) <= spread else mean


def _referenced(store: Store, state: CollectionState, bank: StoredBank, kept: StoredBank) -> BankReference:
    """Where the bank that is now used lies: a new one is stored beside the old, which stays until the end."""
    old = state.profile.bank
    if bank.fingerprint == kept.fingerprint and np.array_equal(bank.potentials, kept.potentials):
        return old.model_copy(update={"fingerprint": bank.fingerprint, "count": len(bank.queries)})
    return store.save_bank(old.collection, bank, state.metric)[0]
