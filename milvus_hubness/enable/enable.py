"""Correction without a copy: `plan_enable`, `enable` and `disable`."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, overload

import numpy as np

from milvus_hubness.banks.bank import BankLike, QueryBank, optional_bank
from milvus_hubness.banks.generations import Key, StoredBank
from milvus_hubness.correction import Correction, initial_state
from milvus_hubness.enable.second_vector import (
    MOST_PASSES,
    SecondVectorEnabled,
    SecondVectorPlan,
    enable_second_vector,
    plan_second_vector,
)
from milvus_hubness.errors import (
    AlreadyCorrected,
    CannotMigrate,
    InvalidParameter,
    LeaseLost,
    NotCorrected,
    VerificationFailed,
    name_some,
)
from milvus_hubness.estimators import Estimator, to_dict
from milvus_hubness.migration import plan as migration_plan
from milvus_hubness.migration.plan import checked_gate, chosen
from milvus_hubness.migration.survey import require_resolved
from milvus_hubness.operations.bias_backends import BiasBackend
from milvus_hubness.operations.corrections import (
    Gallery,
    keep_nearest,
    only_field,
    read_gallery,
)
from milvus_hubness.operations.lease import Lease, leasing
from milvus_hubness.operations.progress import Progress, chunks, silent
from milvus_hubness.operations.write_intents import drop_intents, rewriting
from milvus_hubness.quality.trials import LADDER, enough_candidates, missed_share, raw_places
from milvus_hubness.state import CandidateReranking, CollectionState, suffix_for
from milvus_hubness.stores.protocols import (
    Rows,
    SecondVectors,
    SideCollections,
    Store,
    capability,
    undo_save_bank,
)
from milvus_hubness.stores.records import CollectionInfo

MAX_MISS_RATE = 0.01
MEASURED_QUERIES = 1_000
BIAS_TOLERANCE = 1e-5

Where = Literal["fields", "side", "vectors"]


@dataclass(frozen=True, eq=False)
class EnablePlan:
    """A plan to store the biases of `source` outside its vectors: in fields of its own, or in the side
    collection `side` with the same keys.

    missed: for each number of candidates, the share of the exact corrected top 10 outside them, averaged over
    `queries` queries. candidates: number of candidates that a search will fetch. adds_fields: whether the
    fields must be added first. remarks: facts that the user should know first.
    """

    source: CollectionInfo
    field: str
    suffix: str
    bank: QueryBank
    target_bank: QueryBank | None
    bank_collection: str
    correction: Correction
    strength: float
    side: str | None
    adds_fields: bool
    rows: int
    candidates: int
    missed: dict[int, float]
    max_miss_rate: float
    queries: int
    gate: int | None
    remarks: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, for people and for --json."""
        return {
            "source": self.source.name,
            "field": self.field,
            "metric": self.correction.layout.metric,
            "rows": self.rows,
            "where": "side" if self.side else "fields",
            "side": self.side,
            "adds_fields": self.adds_fields,
            "bank": {
                "collection": self.bank_collection,
                "source": self.bank.source,
                "queries": len(self.bank),
                "fingerprint": self.bank.fingerprint,
                "targets": len(self.target_bank) if self.target_bank else 0,
            },
            "estimator": to_dict(self.correction.fitted.estimator),
            "strength": self.strength,
            "candidates": self.candidates,
            "missed": {str(candidates): share for candidates, share in self.missed.items()},
            "measured_queries": self.queries,
            "gate": self.gate,
            "remarks": list(self.remarks),
        }


@dataclass(frozen=True)
class Enabled:
    """The result of `enable`. rows: number of rows that now have a bias."""

    collection: str
    side: str | None
    bank: str
    rows: int
    candidates: int
    missed: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for people and for --json."""
        return asdict(self)


def plan_enable(
    store: Store,
    source: str,
    bank: BankLike,
    *,
    estimator: Estimator | None = None,
    target_bank: BankLike | None = None,
    queries: BankLike | None = None,
    field: str | None = None,
    where: Where | None = None,
    side: str | None = None,
    bank_collection: str | None = None,
    max_miss_rate: float = MAX_MISS_RATE,
    gate: int | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> EnablePlan | SecondVectorPlan:
    """Read `source`, fit the biases, and measure the corrected answers that candidates miss. Read only.

    estimator: as in plan_migration. queries: queries for the measurement, by default some of the bank's.
    where: by default "fields" if the collection has the fields or the server can add them, else "side";
    "vectors" stores augmented vectors in a second vector field, whose searches need no candidates.
    max_miss_rate: the share of the exact corrected top 10 that may be outside the candidates. gate: see
    DynamicGate.

    Raises ResumeRefused, AlreadyCorrected, CannotMigrate, CorrectionNotRecommended, InvalidParameter,
    EmptyCollection, CollectionNotFound, DimensionMismatch, BankTooSmall.
    """
    bank, target_bank, queries = QueryBank.of(bank), optional_bank(target_bank), optional_bank(queries)
    gate = checked_gate(gate)
    if not 0 < max_miss_rate < 1:
        raise InvalidParameter(f"max_miss_rate must be between 0 and 1, not {max_miss_rate}")
    info = store.info(source)
    if info.is_bank:
        raise CannotMigrate(f"{info.name!r} is a query bank: name the collection of the items")
    if where == "vectors":
        return plan_second_vector(
            store,
            info,
            bank,
            estimator=estimator,
            target_bank=target_bank,
            field=field,
            bank_collection=bank_collection,
            gate=gate,
            force=force,
            progress=progress,
        )
    field = field or only_field(info)
    if field in info.states:
        raise AlreadyCorrected(f"{info.name!r} carries biases for {field!r} already: refresh it instead")
    suffix = suffix_for(field, info.states.values())
    holds = store.bias_fields(info, suffix)
    if where == "fields" and holds == "none":
        raise CannotMigrate(
            f"{info.name!r} has no fields for biases and this server cannot add any: "
            "use a side collection (--where side)"
        )
    gallery = read_gallery(store, info, field, progress=progress)
    bank.expect_dim(gallery.layout.dim, "the field")
    require_resolved(gallery.layout, gallery.vectors, bank, field, info.vector_fields[field].dtype)
    estimator, strength = chosen(info, bank, estimator, force=force)
    fitted = Correction.fit(
        gallery.layout,
        estimator,
        bank,
        gallery=gallery.vectors if estimator.needs_gallery else None,
        target_bank=target_bank,
    )
    mean_bias = float(fitted.centred(gallery.vectors).mean(dtype=np.float64))
    correction = Correction(gallery.layout, fitted.fitted, mean_bias)
    query_vectors = queries or bank
    candidates, missed, measured = measure(gallery, correction, query_vectors, strength, max_miss_rate)
    in_side = where == "side" or (where is None and holds == "none")
    return EnablePlan(
        source=info,
        field=field,
        suffix=suffix,
        bank=bank,
        target_bank=target_bank,
        bank_collection=bank_collection or f"{info.name}__bank",
        correction=correction,
        strength=strength,
        side=(side or f"{info.name}__bias{suffix}") if in_side else None,
        adds_fields=not in_side and holds == "can be added",
        rows=info.rows,
        candidates=candidates,
        missed=missed,
        max_miss_rate=max_miss_rate,
        queries=measured,
        gate=gate,
        remarks=() if in_side else tuple(store.bias_remarks(info, suffix)),
    )


def measure(
    gallery: Gallery, correction: Correction, queries: QueryBank, strength: float, max_miss_rate: float
) -> tuple[int, dict[int, float], int]:
    """Return the number of candidates to fetch, the share that each number of candidates misses, and the
    number of queries of this measurement: at most 1,000 of `queries`, spread evenly."""
    queries.expect_dim(gallery.layout.dim, "the field")
    query_vectors = queries.vectors[:: -(-len(queries) // MEASURED_QUERIES)]
    places = raw_places(
        gallery.layout.reduce_queries(query_vectors),
        gallery.layout.reduce_items(gallery.vectors),
        np.float32(strength) * correction.centred(gallery.vectors),
    )
    missed = {each: missed_share(places, each) for each in LADDER}
    return enough_candidates(places, max_miss_rate), missed, len(query_vectors)


@overload
def enable(
    store: Store, plan: EnablePlan, *, client_ttl: float | None = None, progress: Progress = silent
) -> Enabled: ...
@overload
def enable(
    store: Store, plan: SecondVectorPlan, *, client_ttl: float | None = None, progress: Progress = silent
) -> SecondVectorEnabled: ...
def enable(
    store: Store,
    plan: EnablePlan | SecondVectorPlan,
    *,
    client_ttl: float | None = None,
    progress: Progress = silent,
) -> Enabled | SecondVectorEnabled:
    """Write the biases outside the user's vectors, write the collection state, and check the biases.

    After a failure or an interruption, this drops what the run created, except for fields that a server
    added. With a second vector field, see enable_second_vector, everything stays and the next run continues.
    client_ttl: the longest state_ttl of a HubnessClient that writes, 5 seconds by default. Raises LeaseHeld,
    LeaseLost, AlreadyCorrected if another job has enabled the field since the plan was made,
    VerificationFailed, which names the rows, and the exceptions of the store.
    """
    ttl = migration_plan.CLIENT_TTL if client_ttl is None else client_ttl
    further = [plan.side] if isinstance(plan, EnablePlan) and plan.side else []
    with Lease(store, plan.source.name, *further) as lease:
        info = lease.store.info(plan.source.name)
        plan = replace(plan, source=info)
        if plan.suffix != suffix_for(plan.field, info.states.values()) and plan.field not in info.states:
            raise AlreadyCorrected(
                f"another job has corrected a field of {info.name!r} since this plan was made: plan again"
            )
        if isinstance(plan, SecondVectorPlan):
            return enable_second_vector(lease, plan, client_ttl=ttl, progress=progress)
        if plan.field in info.states:
            raise AlreadyCorrected(
                f"another job has corrected {plan.field!r} of {info.name!r} since this plan was made: "
                "plan again"
            )
        with lease.explained():
            return _enable_reranking(lease, plan, ttl, progress)


def _enable_reranking(lease: Lease, plan: EnablePlan, client_ttl: float, progress: Progress) -> Enabled:
    store, began = lease.store, time.perf_counter()
    kept = StoredBank(plan.bank, plan.correction.fitted.potentials, plan.target_bank)
    bank, made_bank = store.save_bank(plan.bank_collection, kept, plan.correction.layout.metric)
    made_side = announced = False
    state: CollectionState | None = None
    try:
        if plan.side:
            sides = capability(store, SideCollections)
            if sides.is_left_side(plan.source, plan.side):
                lease.drop(plan.side)
            sides.create_side(plan.source, plan.side)
            made_side = True
            lease.fence(plan.side)
        elif plan.adds_fields:
            store.add_bias_fields(plan.source.name, plan.suffix)
        state = initial_state(
            plan.correction.layout,
            plan.correction.fitted.estimator,
            bank,
            field=plan.field,
            suffix=plan.suffix,
            dtype=plan.source.vector_fields[plan.field].dtype,
            source=plan.source.name,
            mean_bias=plan.correction.mean_bias,
            strength=plan.strength,
            gate=plan.gate,
            reranking=CandidateReranking(
                side=plan.side,
                candidates=plan.candidates,
                missed=plan.missed[plan.candidates],
                allowed=plan.max_miss_rate,
                queries=plan.queries,
            ),
        )
        wait = 0.0 if plan.side else client_ttl
        with rewriting(lease, plan.source, state, client_ttl=wait) as writer:
            bias_location = BiasBackend(store, plan.source, state, writer)
            _write(store, plan, state, bias_location, progress)
            announced = True
            gated = keep_nearest(store, plan.source.name, state)
            store.write_property(plan.source.name, state.property_name, gated)
            # From now on clients write biases too; the check finds rows that they wrote before.
            time.sleep(client_ttl)
            rows = _checked(store, plan, state, bias_location, progress)
    except LeaseLost:
        raise
    except BaseException:
        if announced and state is not None:
            store.write_property(plan.source.name, state.property_name, None)
        if plan.side and made_side:
            lease.drop(plan.side)
        undo_save_bank(store, bank, made_bank)
        raise
    return Enabled(
        collection=plan.source.name,
        side=plan.side,
        bank=plan.bank_collection,
        rows=rows,
        candidates=plan.candidates,
        missed=plan.missed[plan.candidates],
        seconds=round(time.perf_counter() - began, 2),
    )


def disable(store: Store, collection: str, *, field: str | None = None) -> str | None:
    """Remove the biases that are stored outside a collection's vectors. The vectors were never changed, and
    the bank stays. A second vector field is removed too if the server can drop it. Return the name of the
    dropped side collection or field. Raises NotCorrected, and InvalidInput if several fields are corrected
    and none is named."""
    with leasing(store, collection) as (lease, info):
        return _disable(lease, info, field)


def _disable(lease: Lease, info: CollectionInfo, field: str | None) -> str | None:
    store = lease.store
    state = info.state_of(field)
    if state is None:
        raise NotCorrected(f"{info.name!r} is not corrected: there is nothing to disable")
    if not state.codec.leaves_vectors:
        raise NotCorrected(f"{info.name!r} has its biases in its vectors: undo that with migrate rollback")
    store.write_property(info.name, state.property_name, None)
    drop_intents(lease, info)
    if state.second_vector:
        dropped = capability(store, SecondVectors).drop_second_vector(info.name, state)
        return state.second_vector if dropped else None
    side = state.reranking.side if state.reranking else None
    if side:
        lease.drop(side)
    return side


def _write(
    store: Rows, plan: EnablePlan, state: CollectionState, bias_location: BiasBackend, progress: Progress
) -> None:
    """Write all biases."""
    corrections = dict.fromkeys(range(state.layout.slots), plan.correction)
    for partition in plan.source.partitions:
        keys = store.keys(plan.source.name, partition=partition)
        for part in chunks(keys, store.chunk_rows(plan.source), "writing biases", progress):
            bias_location.write(part, partition, corrections, state.profile.epoch)
    if plan.side:
        store.flush(plan.side)
    bias_location.wait_visible()


def _checked(
    store: Rows, plan: EnablePlan, state: CollectionState, bias_location: BiasBackend, progress: Progress
) -> int:
    """Read all biases again, and write those that are missing or wrong, until all are correct: clients may
    have changed rows before they read the new state. Return the number of rows. Raises VerificationFailed."""
    corrections = dict.fromkeys(range(state.layout.slots), plan.correction)
    wrong: list[Key] = []
    for _ in range(MOST_PASSES):
        rows, wrong = 0, []
        for partition in plan.source.partitions:
            keys = store.keys(plan.source.name, partition=partition)
            for part in chunks(keys, store.chunk_rows(plan.source), "verifying", progress):
                biased_rows = bias_location.read(part, partition)
                wanted = plan.correction.centred(biased_rows.vectors)
                off = (np.abs(biased_rows.biases - wanted[:, None]) > BIAS_TOLERANCE).any(
                    axis=1
                ) | biased_rows.pending
                if off.any():
                    wrong += biased_rows.only(off).batch.keys
                    bias_location.write(
                        biased_rows.only(off).batch.keys, partition, corrections, state.profile.epoch
                    )
                rows += len(biased_rows.batch)
        if not wrong:
            return rows
        bias_location.wait_visible()
    raise VerificationFailed(
        f"biases are missing or wrong for rows {name_some(wrong)} of {plan.source.name!r}, which change "
        "faster than biases are written: enable it again when there are fewer writes"
    )
