"""A collection copied to its corrected form, verified, and put in its place. The source is never touched."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np

from milvus_hubness.banks import QueryBank
from milvus_hubness.correction import Correction, hidden_columns
from milvus_hubness.errors import CollectionNotFound, InvalidInput
from milvus_hubness.estimators import to_dict
from milvus_hubness.jobs.plan import MigrationPlan
from milvus_hubness.jobs.progress import Progress, chunks, silent
from milvus_hubness.jobs.verify import Verification, verify
from milvus_hubness.state import BankReference, CollectionState, Profile, require_state
from milvus_hubness.stores.base import Batch, CollectionInfo, Key, Store, StoredBank

CENTRE_SAMPLE = 4_096


@dataclass(frozen=True)
class MigrationResult:
    """rows copied and verified. unsound: keys of rows that hold no usable vector and carry bias 0."""

    target: str
    bank: str
    rows: int
    unsound: tuple[Key, ...]
    alias: str | None
    verification: Verification
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, for people and for --json."""
        return {**asdict(self), "unsound": {"rows": len(self.unsound), "keys": list(self.unsound[:20])}}


def migrate(store: Store, plan: MigrationPlan, *, progress: Progress = silent) -> MigrationResult:
    """Copy, correct, verify, switch the alias if the plan has one.

    On any failure, and when interrupted, what this run created is dropped again. Raises VerificationFailed
    where the copy differs from the source, and what the store raises.
    """
    began = time.perf_counter()
    if plan.restart and store.exists(plan.target):
        store.drop(plan.target)
    correction = _fit(store, plan, progress)
    kept = StoredBank(plan.bank, correction.fitted.potentials, plan.target_bank)
    bank, made_bank = store.save_bank(plan.bank_collection, kept, plan.layout.metric)
    made_copy = False
    try:
        state = _initial_state(plan, correction, bank)
        made_copy = not store.exists(plan.target)
        store.create_copy(plan.source, plan.target, state)
        unsound = _copy(store, plan, state, correction, progress)
        store.finish(plan.target)
        state = keep_nearest(store, plan.target, state, kept)
        verification = verify(store, plan.source, plan.target, state, progress=progress)
        store.write_state(plan.target, state.model_copy(update={"phase": "ready"}))
    except BaseException:
        if made_copy and store.exists(plan.target):
            store.drop(plan.target)
        if made_bank == "collection":
            store.drop(plan.bank_collection)
        elif made_bank == "generation":
            store.drop_bank_generation(bank)
        raise
    if plan.alias:
        store.point_alias(plan.alias, plan.target)
    return MigrationResult(
        target=plan.target,
        bank=plan.bank_collection,
        rows=verification.rows,
        unsound=tuple(unsound),
        alias=plan.alias,
        verification=verification,
        seconds=round(time.perf_counter() - began, 2),
    )


@dataclass(frozen=True)
class Rollback:
    """alias points at source again. missing_rows: how many more rows the corrected collection counts; rows
    written to it since the switch are not in the source."""

    alias: str
    source: str
    target: str
    missing_rows: int


def rollback(store: Store, alias: str) -> Rollback:
    """Point `alias` back at the collection that its corrected one was copied from.

    Raises NotCorrected, CollectionNotFound, InvalidInput where `alias` is a collection's own name.
    """
    target = store.alias_target(alias)
    if target is None:
        if store.exists(alias):
            raise InvalidInput(f"{alias!r} is a collection: a rollback needs the alias that was switched")
        raise CollectionNotFound(f"no alias {alias!r}")
    source = _source_of(store, store.info(target))
    store.point_alias(alias, source)
    return Rollback(alias, source, target, max(0, store.count(target) - store.count(source)))


def _source_of(store: Store, target: CollectionInfo) -> str:
    """The collection that `target` was copied from: where several of its fields were corrected, one copy
    after the other, the one with most of them corrected."""
    require_state(next(iter(target.states.values()), None), target.name)
    sources = {state.source for state in target.states.values() if store.exists(state.source)}
    if not sources:
        gone = ", ".join(repr(state.source) for state in target.states.values())
        raise CollectionNotFound(f"{gone}, from which {target.name!r} was copied, is gone")
    return max(sources, key=lambda name: len(store.info(name).states))


def _fit(store: Store, plan: MigrationPlan, progress: Progress) -> Correction:
    """Fitted on the bank, and on the whole gallery where the estimator learns from it; on rows spread evenly
    over the keys, centred on their mean bias and the layout's constants measured."""
    every = 1 if plan.estimator.needs_gallery else max(1, plan.rows // CENTRE_SAMPLE)
    parts = []
    for partition, keys in plan.keys.items():
        for part in chunks(keys[::every], store.chunk_rows(plan.source), "reading the gallery", progress):
            parts.append(store.fetch(plan.source.name, part, plan.field, partition=partition).vectors)
    gallery = np.concatenate(parts)
    correction = Correction.fit(
        plan.layout.measured_on(gallery),
        plan.estimator,
        plan.bank,
        gallery=gallery if plan.estimator.needs_gallery else None,
        target_bank=plan.target_bank,
    )
    biases = correction.centred(gallery)[~plan.layout.unsound(gallery)]
    centre = float(biases.mean(dtype=np.float64)) if len(biases) else 0.0
    return Correction(correction.layout, correction.fitted, centre)


def _initial_state(plan: MigrationPlan, correction: Correction, bank: BankReference) -> CollectionState:
    layout = correction.layout
    profile = Profile(
        estimator=to_dict(plan.estimator),
        slot=0,
        standby=1,
        centre=correction.centre,
        strength=plan.strength,
        gate=plan.gate,
        gate_targets=plan.gate_targets,
        bank=bank,
        epoch=1,
        refreshed_at=datetime.now(timezone.utc),
    )
    return CollectionState(
        field=plan.field,
        suffix=plan.suffix,
        metric=layout.metric,
        dim=layout.dim,
        slots=layout.slots,
        multiple_of=layout.multiple_of,
        dtype=plan.source.vector_fields[plan.field].dtype,
        offset=layout.offset,
        scale=layout.scale,
        source=plan.source.name,
        phase="copying",
        profiles={"default": profile},
    )


def keep_nearest(store: Store, collection: str, state: CollectionState, bank: StoredBank) -> CollectionState:
    """Where searches are gated, keep the keys of each bank query's raw nearest rows, and of each target's
    where the gate asks for them too. The state that names them: until it is written, the earlier are read."""
    profile = state.profile
    if profile.gate is None:
        return state
    nearest = _nearest(store, collection, state, bank.queries, profile.gate)
    if profile.gate_targets is not None and bank.targets is not None:
        nearest += _nearest(store, collection, state, bank.targets, profile.gate_targets)
    reference = store.save_nearest(profile.bank, collection, nearest)
    return state.with_profile(profile.model_copy(update={"bank": reference}))


def _nearest(
    store: Store, collection: str, state: CollectionState, bank: QueryBank, k: int
) -> list[list[Key]]:
    """The keys of the k raw nearest rows of each of `bank`; none for vectors without a direction."""
    sound = ~state.layout.unsound(bank.vectors)
    asked = bank.vectors[sound]
    if state.beside is None:
        asked = state.layout.wrap(asked, 0.0, slot=state.profile.slot)
    found = iter(store.nearest(collection, state.field, asked, k))
    return [next(found) if is_sound else [] for is_sound in sound]


def _copy(
    store: Store, plan: MigrationPlan, state: CollectionState, correction: Correction, progress: Progress
) -> list[Key]:
    unsound: list[Key] = []
    for partition, keys in plan.keys.items():
        doing = f"copying {partition}" if partition else "copying"
        for part in chunks(keys, store.chunk_rows(plan.source), doing, progress):
            batch = store.fetch(plan.source.name, part, plan.field, partition=partition)
            flags = plan.layout.unsound(batch.vectors)
            unsound += [key for key, flag in zip(batch.keys, flags, strict=True) if flag]
            store.write(plan.target, _corrected(state, batch, correction), plan.field, partition=partition)
    return unsound


def _corrected(state: CollectionState, batch: Batch, correction: Correction) -> Batch:
    """Rows as the user knows them in the stored form, the same bias in every slot."""
    biases = correction.centred(batch.vectors)
    hidden = hidden_columns(state, batch.vectors, biases, state.profile.epoch)
    return Batch(
        batch.keys,
        state.layout.augment(batch.vectors, biases),
        [{**row, **columns} for row, columns in zip(batch.rows, hidden, strict=True)],
    )
