"""The plan of a migration, which is made without a write, and the options of its run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from milvus_hubness.basics.defaults import Engine
from milvus_hubness.basics.texts import describe
from milvus_hubness.correction.banks.bank import BankLike, QueryBank, optional_bank
from milvus_hubness.correction.codec.arrays import BYTES, as_metric
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.estimators import Blend, Estimator, from_dict, to_dict
from milvus_hubness.correction.estimators.base import expect_estimator
from milvus_hubness.correction.rerank import DynamicGate
from milvus_hubness.correction.state import slots_for, suffix_for
from milvus_hubness.errors import (
    AlreadyCorrected,
    CannotMigrate,
    CollectionExists,
    CorrectionNotRecommended,
    EmptyCollection,
    InvalidInput,
    InvalidParameter,
)
from milvus_hubness.jobs.common.inputs import only_field
from milvus_hubness.jobs.common.lease_records import default_client_ttl
from milvus_hubness.jobs.common.progress import Events, Throttle
from milvus_hubness.jobs.migration.ledger import Ledger, Migration, chosen_switch
from milvus_hubness.jobs.migration.survey import (
    Fitting,
    Resolution,
    estimates,
    recall_gate,
    recall_words,
    resolution_of,
    survey,
)
from milvus_hubness.jobs.store.ownership import bank_name
from milvus_hubness.jobs.store.protocols import Store, expect_store
from milvus_hubness.jobs.store.records import CollectionInfo
from milvus_hubness.quality.recall import RecallGate


@dataclass(frozen=True)
class MigrationOptions:
    """Options of a run. no_writers: no client writes to the source: none is waited for. client_ttl:
    the longest state_ttl of a HubnessClient that writes, in seconds. release: the cutover waits
    until it is set; the copy catches up meanwhile. engine: computes the biases; "server" is for NNN
    and CSLS.
    """

    no_writers: bool = False
    client_ttl: float = field(default_factory=default_client_ttl)
    throttle: Throttle = field(default_factory=Throttle)
    events: Events = field(default_factory=lambda: Events([]))
    release: threading.Event | None = None
    engine: Engine = "local"


@dataclass(frozen=True, kw_only=True)
class MigrationPlan(Fitting):
    """The plan of a migration: copy `source` to `target`, with `field` in augmented form. alias:
    the alias that the cutover moves. rename: it moves the source's own name instead. seconds,
    memory_bytes: see `estimates`. waits: seconds that the run waits for clients. recall,
    resolution: the losses of the index and of an exact search, if measured. restart: the run drops
    an unfinished target first. index: the copy's, if it differs.
    """

    schema: dict[str, Any]
    target: str
    suffix: str
    bank_collection: str
    strength: float
    alias: str | None
    rename: bool
    gate: int | None
    gate_targets: int | None
    restart: bool
    remarks: tuple[str, ...]
    server: str
    seconds: float
    memory_bytes: dict[str, int]
    waits: float = 0.0
    recall: RecallGate | None = None
    resolution: Resolution | None = None
    index: dict[str, Any] | None = None

    @property
    def rows(self) -> int:
        """The number of distinct keys."""
        return self.survey.rows

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that a further run must repeat, as plain data."""
        return {
            "schema": self.schema,
            "field": self.field,
            "bank_collection": self.bank_collection,
            "bank": self.bank.fingerprint,
            "target_bank": self.target_bank.fingerprint if self.target_bank else None,
            "estimator": to_dict(self.estimator),
            "strength": self.strength,
            "gate": self.gate,
            "gate_targets": self.gate_targets,
            "slots": self.layout.slots,
            "spread": self.layout.spread,
            "index": self.index,
        }

    def to_dict(self) -> dict[str, Any]:
        vector = self.vector
        arguments = self.arguments
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
            "spread": self.layout.spread,
            "rows": self.rows,
            "partitions": [name for name in self.survey.sample if name],
            "hidden_fields": [
                f"hubness_{name}{self.suffix}"
                for name in ("bias", "epoch", *(["norm"] if self.layout.metric == "COSINE" else []))
            ],
            "vector_bytes": {
                name: BYTES[vector.dtype] * width * self.rows for name, width in self.widths.items()
            },
            "bank": bank_facts(self.bank, self.target_bank, self.bank_collection),
            **{name: arguments[name] for name in ("estimator", "strength", "gate", "gate_targets")},
            "alias": self.alias,
            "rename": self.rename,
            "remarks": list(self.remarks),
            "server": self.server,
            "memory_bytes": {**self.memory_bytes, "both": sum(self.memory_bytes.values())},
            "estimated_seconds": round(self.seconds + self.waits, 1),
            "waiting_seconds": round(self.waits, 1),
            "resolution": asdict(self.resolution) if self.resolution else None,
            "recall": {**self.recall.to_dict(), "said": recall_words(self.recall)}
            if self.recall
            else None,
        }


def bank_facts(bank: QueryBank, target_bank: QueryBank | None, collection: str) -> dict[str, Any]:
    return {
        "collection": collection,
        "source": bank.source,
        "queries": len(bank),
        "fingerprint": bank.fingerprint,
        "targets": len(target_bank) if target_bank else 0,
    }


def plan_migration(
    store: Store,
    source: str,
    bank: BankLike,
    *,
    estimator: Estimator | None = None,
    target_bank: BankLike | None = None,
    field: str | None = None,
    target: str | None = None,
    bank_collection: str | None = None,
    alias: str | None = None,
    rename: bool = False,
    measure: bool = False,
    gate: int | None = None,
    gate_targets: int | None = None,
    profiles: int = 1,
    index_type: str | None = None,
    index_params: Mapping[str, Any] | None = None,
    restart: bool = False,
    force: bool = False,
    client_ttl: float = 0.0,
) -> MigrationPlan:
    """Plan a migration of `source`. Read only.

    estimator: by default the one that tuning on this bank chose, with its strength; else Blend().
    force: plan even if tuning advises against correction. gate, gate_targets: see DynamicGate; by
    default those of the choice of tuning, if that is followed, else none; 0 for none. profiles: the
    minimum number of bias profiles with room in the vectors. index_type, index_params: of the
    copy's index; if the type is unchanged, unnamed parameters are the source's. measure: measure
    the recall that such an index loses with the augmented form, in some 10 s. client_ttl: as in
    MigrationOptions; 0 if no client writes.

    Raises CorrectionNotRecommended, CollectionNotFound, AlreadyCorrected, EmptyCollection,
    CannotMigrate, which names every obstacle, CollectionExists, DimensionMismatch, BankTooSmall,
    InvalidParameter, InvalidInput.
    """
    expect_store(store)
    expect_estimator(estimator)
    bank = QueryBank.of(bank)
    target_bank = optional_bank(target_bank)
    gates = (gate, gate_targets)
    checked_gates(*gates, target_bank)
    info = store.info(source)
    if info.is_bank:
        raise CannotMigrate(f"{info.name!r} is a query bank: name the collection of the items")
    field = field or only_field(info)
    state = info.states.get(field)
    if state is not None and state.codec.needs_candidates and state.codec.writes_rows:
        raise AlreadyCorrected(
            f"{info.name!r} carries biases for {field!r} in fields, whose names a copy would need "
            "itself"
        )
    if state is not None and state.codec.writes_rows:
        raise AlreadyCorrected(
            f"{info.name!r} is already corrected in {field!r} (from {state.source!r}): refresh it "
            "instead"
        )
    suffix = suffix_for(field, info.states.values())
    if obstacles := store.obstacles(info, field, suffix):
        raise CannotMigrate(f"{info.name!r} cannot be migrated: {'; '.join(obstacles)}")
    if not info.rows:
        raise EmptyCollection(f"{info.name!r} has no rows: insert items first")
    schema = store.schema_facts(info)
    index = _index(info, field, index_type, index_params)
    former = info.vector_fields[field]
    info = info.with_index(field, **index) if index else info
    vector = info.vector_fields[field]
    store.validate_index(vector, former)
    layout = Layout(
        vector.dim,
        as_metric(vector.metric),
        slots_for(profiles),
        store.width_multiple(vector),
        spread=store.bias_spread(info, field),
    )
    bank.expect_dim(layout.dim, "the field")
    names_method = estimator is not None
    estimator, strength, gate, gate_targets = chosen(
        info, field, bank, target_bank, estimator, gates, force=force
    )
    target = target or f"{info.name}_hubness"
    unfinished = _unfinished(store, info, target, restart=restart)
    if alias or rename:
        chosen_switch(store, info.name, target, alias, rename)
    fitting = Fitting(
        info,
        field,
        survey(store, info, store.chunk_rows(info)),
        layout,
        estimator,
        bank,
        target_bank,
    )
    distinct = fitting.survey.rows
    other_aliases = tuple(name for name in info.aliases if name != alias)
    remarks = store.remarks(replace(info, aliases=other_aliases), field)
    remarks += verdict_remarks(info, field, bank, is_followed=not names_method)
    if estimator.needs_gallery:
        size = 4 * layout.dim * distinct / 2**20
        remarks.append(
            f"the estimator is fitted on the whole gallery, {size:,.0f} MiB of vectors in memory"
        )
    if index is not None:
        remarks.append(
            f"the source's index is {former.index_type} {former.index_params or ''}".rstrip()
        )
    # Clients may have inserted and deleted rows while the keys were read.
    if distinct < info.rows and distinct < (counted := store.count(info.name)):
        rows = min(info.rows, counted)
        remarks.append(f"{rows} rows but {distinct} distinct keys: one row of each key is copied")
    resolution = resolution_of(store, fitting)
    remarks += resolution.remark(vector.dtype) if resolution else []
    seconds, memory_bytes = estimates(store, fitting)
    plan = MigrationPlan(
        **vars(fitting),
        schema=schema,
        target=target,
        suffix=suffix,
        bank_collection=bank_collection or bank_name(info.name),
        strength=strength,
        alias=alias,
        rename=rename,
        gate=gate,
        gate_targets=gate_targets,
        restart=restart,
        remarks=tuple(remarks),
        server=store.server_version(),
        seconds=seconds,
        memory_bytes=memory_bytes,
        waits=max(0.0, client_ttl - seconds) + (client_ttl if alias or rename else 0.0),
        recall=recall_gate(store, fitting) if measure else None,
        resolution=resolution,
        index=index,
    )
    if unfinished is not None and not restart and (changes := unfinished.changes(plan.arguments)):
        remark = f"{changes}: a run needs them again, or --restart, which drops it first"
        plan = replace(plan, remarks=(*plan.remarks, remark))
    return plan


def _index(
    info: CollectionInfo, field: str, index_type: str | None, index_params: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    if index_type is None and not index_params:
        return None
    vector = info.vector_fields[field]
    kind = index_type.upper() if index_type else vector.index_type
    inherited = vector.index_params if kind == vector.index_type else {}
    return {"index_type": kind, "index_params": {**inherited, **(index_params or {})}}


def checked_gates(
    gate: int | None, gate_targets: int | None, target_bank: QueryBank | None
) -> tuple[int | None, int | None]:
    """Return the valid k and k_targets of a DynamicGate; a gate of 0 is none. Raises
    InvalidParameter, InvalidInput.
    """
    if not gate and gate_targets is None:
        return None, None
    if not gate:
        raise InvalidInput("gate_targets widens the gate over bank queries: give gate too")
    if gate_targets is not None and target_bank is None:
        raise InvalidInput(
            "gate_targets counts the nearest rows of target items: give a target bank"
        )
    try:
        valid = DynamicGate(gate, gate_targets)
    except InvalidParameter as error:
        raise InvalidParameter(
            f"{'gate' if gate_targets is None else 'gate, gate_targets'}: {error}"
        ) from None
    return valid.k, valid.k_targets


def verdict_remarks(
    info: CollectionInfo, field: str, bank: QueryBank, *, is_followed: bool
) -> list[str]:
    """Return the verdict of tuning on a bank and its date, or that there is none. is_followed: no
    method is named.
    """
    verdict = info.verdicts.of(field, bank.fingerprint)
    if verdict is not None:
        method = describe(verdict.choice) if verdict.choice else "no method"
        at = f"{verdict.tuned_at:%Y-%m-%d %H:%M} UTC"
        return [
            f"verdict of tune on this bank, {at}: {verdict.verdict}, {method}, strength "
            f"{verdict.strength:g}"
        ]
    if not is_followed:
        return []
    others = len(info.verdicts.records)
    elsewhere = f", but on {others} other bank{'s' * (others > 1)}" if others else ""
    return [
        f"tune has no verdict on this bank{elsewhere}: the default method applies; run tune with "
        "it to choose one"
    ]


def chosen(
    info: CollectionInfo,
    field: str,
    bank: QueryBank,
    target_bank: QueryBank | None,
    estimator: Estimator | None,
    gates: tuple[int | None, int | None],
    *,
    force: bool,
) -> tuple[Estimator, float, int | None, int | None]:
    """Return the estimator to fit, its strength and the gates: `estimator` at 1; else the choice of
    tuning for this bank; else Blend() at 1. gates: the caller's, which overrule those of tuning.
    Raises CorrectionNotRecommended if tuning advises against this bank, unless `force`, and as
    `checked_gates` does.
    """
    tuning = info.verdicts.of(field, bank.fingerprint)
    strength = 1.0
    if tuning is not None:
        if tuning.verdict == "leave it alone" and not force:
            raise CorrectionNotRecommended(
                f"tuning advises to leave {info.name!r} alone: {tuning.reason} (force overrides)"
            )
        if estimator is None and tuning.choice is not None:
            estimator = from_dict(tuning.choice)
            strength = tuning.strength
            gates = (tuning.gate, tuning.gate_targets) if gates == (None, None) else gates
    return estimator or Blend(), strength, *checked_gates(*gates, target_bank)


def _unfinished(
    store: Store, info: CollectionInfo, target: str, *, restart: bool
) -> Migration | None:
    """Return the unfinished migration that a run would continue. Raises CollectionExists,
    AlreadyCorrected.
    """
    migration = Ledger(store).of_target(target)
    if restart and migration is not None and not store.exists(target):
        return None  # Its copy is gone, in whatever phase that happened.
    if migration is not None and migration.source == info.name:
        if migration.phase in {"switching", "switched", "rolling back"}:
            raise AlreadyCorrected(
                f"the application was switched from {info.name!r} to {target!r}: roll back, or "
                "refresh that"
            )
        if migration.state is not None and migration.phase != "finished":
            return migration
    if store.exists(target):
        raise CollectionExists(
            f"{target!r} exists already as another collection: choose another target"
        )
    return None
