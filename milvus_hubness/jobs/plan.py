"""What a migration would do, found out without writing anything."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from milvus_hubness.banks import QueryBank
from milvus_hubness.correction import Correction
from milvus_hubness.errors import (
    AlreadyCorrected,
    CannotMigrate,
    CollectionExists,
    EmptyCollection,
    InvalidInput,
    NotAdvised,
    UnfinishedMigration,
)
from milvus_hubness.estimators import Blend, Estimator, from_dict, to_dict
from milvus_hubness.halves import BYTES, StoredForm
from milvus_hubness.jobs.gallery import only_field
from milvus_hubness.layout import Layout, as_metric
from milvus_hubness.rerank import DualDynamicGate, DynamicGate
from milvus_hubness.state import TuningRecord, form_of, slots_for, suffix_for
from milvus_hubness.stores.base import CollectionInfo, Key, Store

SAMPLE_ROWS = 512


@dataclass(frozen=True)
class MigrationPlan:
    """source is copied to target, field in the stored form; keys by partition are frozen here.

    seconds: an estimate from reading and correcting a sample, taking writing and verifying to cost as much
    as reading does. restart: an unfinished target is dropped first.
    """

    source: CollectionInfo
    target: str
    field: str
    suffix: str
    layout: Layout
    bank: QueryBank
    target_bank: QueryBank | None
    bank_collection: str
    estimator: Estimator
    strength: float
    keys: dict[str | None, list[Key]]
    alias: str | None
    gate: int | None
    gate_targets: int | None
    restart: bool
    remarks: tuple[str, ...]
    seconds: float

    @property
    def rows(self) -> int:
        """Distinct keys."""
        return sum(map(len, self.keys.values()))

    @property
    def form(self) -> StoredForm:
        """How the layout's rows lie in the field."""
        return form_of(self.layout, self.source.vector_fields[self.field].dtype)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, for people and for --json."""
        vector = self.source.vector_fields[self.field]
        return {
            "source": self.source.name,
            "target": self.target,
            "field": self.field,
            "metric": self.layout.metric,
            "index_type": vector.index_type,
            "index_params": vector.index_params,
            "dim": self.layout.dim,
            "dtype": vector.dtype,
            "width": self.form.width,
            "rows": self.rows,
            "partitions": [name for name in self.keys if name],
            "hidden_fields": [
                f"hubness_{name}{self.suffix}"
                for name in ("bias", "epoch", *(["norm"] if self.layout.metric == "COSINE" else []))
            ],
            "vector_bytes": {
                "source": BYTES[vector.dtype] * self.layout.dim * self.rows,
                "target": BYTES[vector.dtype] * self.form.width * self.rows,
            },
            "bank": {
                "collection": self.bank_collection,
                "source": self.bank.source,
                "queries": len(self.bank),
                "fingerprint": self.bank.fingerprint,
                "targets": len(self.target_bank) if self.target_bank else 0,
            },
            "estimator": to_dict(self.estimator),
            "strength": self.strength,
            "gate": self.gate,
            "gate_targets": self.gate_targets,
            "alias": self.alias,
            "remarks": list(self.remarks),
            "estimated_seconds": round(self.seconds, 1),
        }


def plan_migration(
    store: Store,
    source: str,
    bank: QueryBank,
    *,
    estimator: Estimator | None = None,
    target_bank: QueryBank | None = None,
    field: str | None = None,
    target: str | None = None,
    bank_collection: str | None = None,
    alias: str | None = None,
    gate: int | None = None,
    gate_targets: int | None = None,
    profiles: int = 1,
    restart: bool = False,
    force: bool = False,
) -> MigrationPlan:
    """Look at `source` and say what a migration would do. Reads only.

    estimator: without one, what tuning on this bank chose, at its strength; else Blend(), the best choice
    known without labelled pairs. force: migrate though tuning advises against it. gate: see DynamicGate, by
    default every query is corrected; with gate_targets, see DualDynamicGate. profiles: for how many sets of
    biases there is to be room at least; `refresh` adds those after the first.

    Raises NotAdvised, CollectionNotFound, AlreadyCorrected, EmptyCollection, CannotMigrate naming every
    obstacle, CollectionExists, UnfinishedMigration, DimensionMismatch, BankTooSmall, InvalidParameter, and
    InvalidInput where gate_targets lacks a gate or a target bank.
    """
    gate, gate_targets = _gates(gate, gate_targets, target_bank)
    info = store.info(source)
    if info.is_bank:
        raise CannotMigrate(f"{info.name!r} is a query bank")
    field = field or only_field(info)
    state = info.states.get(field)
    if state is not None and state.beside is not None and state.beside.side is None:
        raise AlreadyCorrected(
            f"{info.name!r} carries biases for {field!r} in fields, whose names a copy would need itself"
        )
    if state is not None and state.beside is None:
        raise AlreadyCorrected(
            f"{info.name!r} is already corrected in {field!r} (from {state.source!r}): refresh it instead"
        )
    suffix = suffix_for(field, info.states.values())
    if obstacles := store.obstacles(info, field, suffix):
        raise CannotMigrate(f"{info.name!r} cannot be migrated: {'; '.join(obstacles)}")
    if not info.rows:
        raise EmptyCollection(f"{info.name!r} holds no rows: there is nothing to correct yet")
    vector = info.vector_fields[field]
    layout = Layout(vector.dim, as_metric(vector.metric), slots_for(profiles), store.width_multiple(vector))
    bank.expect_dim(layout.dim, "the bank")
    tuning = advised(info, bank, force)
    strength = 1.0
    if estimator is None and tuning is not None and tuning.choice is not None:
        estimator, strength = from_dict(tuning.choice), tuning.strength
    estimator = estimator or Blend()
    target = target or f"{info.name}_hubness"
    _check_target(store, info.name, target, restart)
    if alias:
        _check_alias(store, alias, info.name, target)
    keys = {partition: store.keys(info.name, partition=partition) for partition in info.partitions}
    distinct = sum(map(len, keys.values()))
    remarks = store.remarks(info)
    if estimator.needs_gallery:
        size = 4 * layout.dim * distinct / 2**20
        remarks.append(f"the estimator is fitted on the whole gallery, {size:,.0f} MiB of vectors in memory")
    if distinct != info.rows:
        remarks.append(f"{info.rows} rows but {distinct} distinct keys: one row of each key is copied")
    return MigrationPlan(
        source=info,
        target=target,
        field=field,
        suffix=suffix,
        layout=layout,
        bank=bank,
        target_bank=target_bank,
        bank_collection=bank_collection or f"{info.name}__bank",
        estimator=estimator,
        strength=strength,
        keys=keys,
        alias=alias,
        gate=gate,
        gate_targets=gate_targets,
        restart=restart,
        remarks=tuple(remarks),
        seconds=_estimated_seconds(store, info, field, keys, layout, estimator, bank, target_bank),
    )


def _gates(
    gate: int | None, gate_targets: int | None, target_bank: QueryBank | None
) -> tuple[int | None, int | None]:
    if gate_targets is None:
        return None if gate is None else DynamicGate(gate).k, None
    if gate is None:
        raise InvalidInput("gate_targets widens the gate over bank queries: give gate too")
    if target_bank is None:
        raise InvalidInput("gate_targets asks for the nearest of target items: give a target bank")
    dual = DualDynamicGate(gate, gate_targets)
    return dual.k_query, dual.k_target


def advised(info: CollectionInfo, bank: QueryBank, force: bool) -> TuningRecord | None:
    """What tuning found for this bank; nothing where it looked at another one."""
    tuning = info.tuning
    if tuning is None or tuning.bank_fingerprint != bank.fingerprint:
        return None
    if tuning.verdict == "leave it alone" and not force:
        raise NotAdvised(f"tuning advises to leave {info.name!r} alone: {tuning.reason} (force overrides)")
    return tuning


def _check_target(store: Store, source: str, target: str, restart: bool) -> None:
    if not store.exists(target):
        return
    made = [state for state in store.info(target).states.values() if state.source == source]
    if not made or made[0].phase == "ready":
        done = bool(made)
        said = "a finished migration of it" if done else "another collection"
        raise CollectionExists(f"{target!r} is there already ({said}): give another target")
    if not restart:
        raise UnfinishedMigration(
            f"{target!r} is an unfinished copy of {source!r}: restart drops it and begins anew"
        )


def _check_alias(store: Store, alias: str, source: str, target: str) -> None:
    if alias in {source, target}:
        raise InvalidInput(f"alias {alias!r} is the name of a collection of this migration")
    if store.exists(alias) and store.alias_target(alias) is None:
        raise InvalidInput(f"{alias!r} is a collection, not an alias")
    if store.alias_target(alias) not in {None, source}:
        raise InvalidInput(f"alias {alias!r} points at {store.alias_target(alias)!r}, not at {source!r}")


def _estimated_seconds(
    store: Store,
    info: CollectionInfo,
    field: str,
    keys: dict[str | None, list[Key]],
    layout: Layout,
    estimator: Estimator,
    bank: QueryBank,
    target_bank: QueryBank | None,
) -> float:
    """Also finds out, on a sample, whether the estimator can be fitted on this bank at all."""
    partition, candidates = max(keys.items(), key=lambda item: len(item[1]))
    sample = candidates[:SAMPLE_ROWS]
    began = time.perf_counter()
    batch = store.fetch(info.name, sample, field, partition=partition)
    reading = time.perf_counter() - began
    sample_of_gallery = batch.vectors if estimator.needs_gallery else None
    Correction.fit(layout, estimator, bank, gallery=sample_of_gallery, target_bank=target_bank).centred(
        batch.vectors
    )
    correcting = time.perf_counter() - began - reading
    return (4 * reading + correcting) * sum(map(len, keys.values())) / max(1, len(sample))
