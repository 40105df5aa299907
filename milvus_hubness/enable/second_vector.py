"""Correction in a second vector field; the user's field stays as it is."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks.bank import QueryBank
from milvus_hubness.banks.generations import StoredBank
from milvus_hubness.codec.arrays import as_metric
from milvus_hubness.codec.base import form_of
from milvus_hubness.codec.index_hints import measured_on
from milvus_hubness.codec.layout import Layout
from milvus_hubness.codec.second_vector import SECOND_VECTOR_FIELD
from milvus_hubness.correction import Correction, initial_state
from milvus_hubness.errors import (
    AlreadyCorrected,
    CannotMigrate,
    NotCaughtUp,
    ResumeRefused,
    VerificationFailed,
)
from milvus_hubness.estimators import Estimator, to_dict
from milvus_hubness.estimators.base import is_same
from milvus_hubness.migration.catch_up import FEWER_ALLOWED, FEWEST_MISSES, SEARCHED, TOP
from milvus_hubness.migration.compare import same_rows
from milvus_hubness.migration.plan import chosen
from milvus_hubness.migration.survey import require_resolved
from milvus_hubness.operations.bias_backends import BiasBackend, BiasedRows
from milvus_hubness.operations.corrections import (
    keep_nearest,
    load_correction,
    only_field,
    read_gallery,
)
from milvus_hubness.operations.lease import Lease
from milvus_hubness.operations.progress import Progress, chunks, silent
from milvus_hubness.operations.write_intents import rewriting
from milvus_hubness.state import CollectionState, slots_for, suffix_for
from milvus_hubness.stores.protocols import Rows, SecondVectors, Store, capability, undo_save_bank
from milvus_hubness.stores.records import CollectionInfo

BIAS_TOLERANCE = 1e-5
MOST_PASSES = 20
SAMPLED_ROWS = 256


@dataclass(frozen=True, eq=False)
class SecondVectorPlan:
    """A plan to store the augmented form of `field` in a second vector field of `source`, `second_vector`.

    adds_fields: whether that field must be added first. unfinished: the state that an interrupted run left,
    which the next run continues. remarks: facts that the user should know first.
    """

    source: CollectionInfo
    field: str
    suffix: str
    bank: QueryBank
    target_bank: QueryBank | None
    bank_collection: str
    correction: Correction
    strength: float
    adds_fields: bool
    gate: int | None
    unfinished: CollectionState | None
    remarks: tuple[str, ...]

    @property
    def second_vector(self) -> str:
        """The name of the second vector field."""
        return SECOND_VECTOR_FIELD + self.suffix

    @property
    def width(self) -> int:
        """The width of the second vector field."""
        return form_of(self.correction.layout, self.source.vector_fields[self.field].dtype).width

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, for people and for --json."""
        return {
            "source": self.source.name,
            "field": self.field,
            "metric": self.correction.layout.metric,
            "rows": self.source.rows,
            "where": "vectors",
            "second_vector": self.second_vector,
            "width": self.width,
            "adds_fields": self.adds_fields,
            "carries_on": self.unfinished is not None,
            "bank": {
                "collection": self.bank_collection,
                "source": self.bank.source,
                "queries": len(self.bank),
                "fingerprint": self.bank.fingerprint,
                "targets": len(self.target_bank) if self.target_bank else 0,
            },
            "estimator": to_dict(self.correction.fitted.estimator),
            "strength": self.strength,
            "gate": self.gate,
            "remarks": list(self.remarks),
        }


@dataclass(frozen=True)
class SecondVectorEnabled:
    """The result of `enable_second_vector`.

    rows: number of rows that now have the augmented form. searched: number of rows whose own vector was
    searched for. found_in_field, found_in_second: number of those rows among the ten best.
    """

    collection: str
    second_vector: str
    bank: str
    rows: int
    searched: int
    found_in_field: int
    found_in_second: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for people and for --json."""
        return asdict(self)


def plan_second_vector(
    store: Store,
    info: CollectionInfo,
    bank: QueryBank,
    *,
    estimator: Estimator | None,
    target_bank: QueryBank | None,
    field: str | None,
    bank_collection: str | None,
    gate: int | None,
    force: bool,
    progress: Progress = silent,
) -> SecondVectorPlan:
    """Read `info` and fit the biases. Read only. Arguments as in plan_enable.

    Raises CannotMigrate, which names every obstacle, AlreadyCorrected, ResumeRefused if an interrupted run
    used another bank, estimator or gate, CorrectionNotRecommended, EmptyCollection, DimensionMismatch,
    BankTooSmall.
    """
    field = field or only_field(info)
    info.require_field(field)
    vector = info.vector_fields[field]
    unfinished = info.states.get(field)
    if unfinished is not None:
        if unfinished.serves:
            raise AlreadyCorrected(f"{info.name!r} carries biases for {field!r} already: refresh it instead")
        _expect(unfinished, bank, estimator, target_bank, gate)
        suffix, layout = unfinished.suffix, unfinished.layout
    else:
        if not vector.metric:
            raise CannotMigrate(
                f"field {field!r} has no index, so its metric is unknown: create an index first"
            )
        suffix = suffix_for(field, info.states.values())
        layout = Layout(vector.dim, as_metric(vector.metric), slots_for(1), store.width_multiple(vector))
    second_vectors = capability(store, SecondVectors)
    holds = second_vectors.second_vector_field(info, field, suffix, form_of(layout, vector.dtype).width)
    if unfinished is not None:
        correction, strength = (
            load_correction(store, unfinished, unfinished.profile),
            unfinished.profile.strength,
        )
        bank_collection = unfinished.profile.bank.collection
    else:
        bank.expect_dim(layout.dim, "the field")
        estimator, strength = chosen(info, bank, estimator, force=force)
        correction = _fit(store, info, field, layout, estimator, bank, target_bank, progress)
    return SecondVectorPlan(
        source=info,
        field=field,
        suffix=suffix,
        bank=bank,
        target_bank=target_bank,
        bank_collection=bank_collection or f"{info.name}__bank",
        correction=correction,
        strength=strength,
        adds_fields=holds == "can be added",
        gate=gate,
        unfinished=unfinished,
        remarks=tuple(second_vectors.second_vector_remarks(info, suffix)),
    )


def enable_second_vector(
    lease: Lease, plan: SecondVectorPlan, *, client_ttl: float, progress: Progress = silent
) -> SecondVectorEnabled:
    """Add the second field, fill it, check it, and let clients search it.

    Clients write both fields as soon as they read the new state, and search the user's field until all rows
    are filled. client_ttl: seconds until all clients have read the new state; the first row is filled after
    that time. After an interruption or failure, the same plan, made again, continues the run, and disable
    undoes it. Raises AlreadyCorrected, LeaseLost, NotCaughtUp, VerificationFailed.
    """
    began = time.perf_counter()
    store, name = lease.store, plan.source.name
    before = plan.source.states.get(plan.field)
    if before != plan.unfinished:
        raise AlreadyCorrected(
            f"another job has changed the correction of {plan.field!r} of {name!r} since this plan was made: "
            "plan again"
        )
    state = plan.unfinished or _begun(store, plan)
    info = store.info(name)
    capability(store, SecondVectors).load_second_vector(info, state)
    with rewriting(lease, info, state, client_ttl=client_ttl) as writer, lease.explained():
        bias_location = BiasBackend(store, info, state, writer)
        doing = "filling the second field"
        for _ in range(MOST_PASSES):
            rows, changed = _fill(store, info, bias_location, plan.correction, doing, progress)
            if not changed:
                break
            doing = "verifying"
        else:
            raise NotCaughtUp(
                f"rows of {name!r} change faster than their second field can be filled: enable it again when "
                "there are fewer writes"
            )
    store.flush(name)
    searched, in_field, in_second = _find_themselves(store, info, state)
    if in_second < in_field - max(FEWEST_MISSES, FEWER_ALLOWED * searched):
        raise VerificationFailed(
            f"of {searched} rows searched for by their own vectors {in_field} are found in {state.field!r} "
            f"and {in_second} in {state.searched_field!r}: is its index built?"
        )
    ready = keep_nearest(store, name, state).model_copy(update={"phase": "ready"})
    store.write_property(name, ready.property_name, ready)
    return SecondVectorEnabled(
        collection=name,
        second_vector=plan.second_vector,
        bank=plan.bank_collection,
        rows=rows,
        searched=searched,
        found_in_field=in_field,
        found_in_second=in_second,
        seconds=round(time.perf_counter() - began, 2),
    )


def _expect(
    state: CollectionState,
    bank: QueryBank,
    estimator: Estimator | None,
    target_bank: QueryBank | None,
    gate: int | None,
) -> None:
    given = bank.fingerprint + (f"+{target_bank.fingerprint}" if target_bank else "")
    others = {
        "bank": given != state.profile.bank.fingerprint,
        "estimator": estimator is not None and not is_same(estimator, state.profile.estimator),
        "gate": gate != state.profile.gate,
    }
    if differing := [name for name, differs in others.items() if differs]:
        raise ResumeRefused(
            f"an unfinished enable of {state.source!r} was started with another {', '.join(differing)}: "
            "repeat it, or disable the collection first"
        )


def _fit(
    store: Store,
    info: CollectionInfo,
    field: str,
    layout: Layout,
    estimator: Estimator,
    bank: QueryBank,
    target_bank: QueryBank | None,
    progress: Progress,
) -> Correction:
    """Return the correction, fitted on the bank and the gallery, with its mean bias and the layout's
    constants measured."""
    gallery = read_gallery(store, info, field, progress=progress)
    require_resolved(gallery.layout, gallery.vectors, bank, field, info.vector_fields[field].dtype)
    fitted = Correction.fit(
        measured_on(
            layout,
            gallery.vectors,
            bank.vectors,
            graph_hint=store.takes_graph_hint(info, field),
            locality_hints=store.takes_locality_hints(info, field),
        ),
        estimator,
        bank,
        gallery=gallery.vectors if estimator.needs_gallery else None,
        target_bank=target_bank,
    )
    mean_bias = float(fitted.centred(gallery.vectors).mean(dtype=np.float64))
    return Correction(fitted.layout, fitted.fitted, mean_bias)


def _begun(store: Store, plan: SecondVectorPlan) -> CollectionState:
    """Save the bank, add the fields, and announce them to clients. The fields come first: clients write them
    once they read the state."""
    kept = StoredBank(plan.bank, plan.correction.fitted.potentials, plan.target_bank)
    bank, made_bank = store.save_bank(plan.bank_collection, kept, plan.correction.layout.metric)
    try:
        if plan.adds_fields:
            second_vectors = capability(store, SecondVectors)
            second_vectors.add_second_vector(plan.source, plan.field, plan.suffix, plan.width)
        state = initial_state(
            plan.correction.layout,
            plan.correction.fitted.estimator,
            bank,
            field=plan.field,
            suffix=plan.suffix,
            dtype=plan.source.vector_fields[plan.field].dtype,
            source=plan.source.name,
            phase="copying",
            mean_bias=plan.correction.mean_bias,
            strength=plan.strength,
            gate=plan.gate,
            second_vector=plan.second_vector,
        )
        store.write_property(plan.source.name, state.property_name, state)
    except BaseException:
        undo_save_bank(store, bank, made_bank)
        raise
    return state


def _fill(
    store: Rows,
    info: CollectionInfo,
    bias_location: BiasBackend,
    correction: Correction,
    doing: str,
    progress: Progress,
) -> tuple[int, int]:
    """Return the number of rows, and the number of rows that had to be written to have the correct scores.
    That excludes rows that lacked only locality hint columns, because a client whose memory cannot hold the
    bank writes such rows. Raises NotCaughtUp."""
    rows = repaired = 0
    for partition in info.partitions:
        keys = store.keys(info.name, partition=partition)
        for part in chunks(keys, store.chunk_rows(info), doing, progress):
            rows += len(part)
            biased_rows = bias_location.read(part, partition)
            off = _off(biased_rows, correction)
            repaired += int(off.sum())
            off |= biased_rows.pending
            if off.any():
                bias_location.write(
                    biased_rows.only(off).batch.keys, partition, dict.fromkeys((0, 1), correction), 1
                )
    return rows, repaired


def _off(biased_rows: BiasedRows, correction: Correction) -> npt.NDArray[np.bool_]:
    """Return (n,) whether the second field is wrong; locality hint columns do not count."""
    wanted = correction.centred(biased_rows.vectors)[:, None]
    near = np.abs(biased_rows.biases - wanted) <= BIAS_TOLERANCE * np.maximum(1, np.abs(wanted))
    return np.asarray(biased_rows.unbiased | ~near.all(axis=1), np.bool_)


def _find_themselves(store: Rows, info: CollectionInfo, state: CollectionState) -> tuple[int, int, int]:
    """Return the number of rows that were searched for, and of those that each field found. Rows that a
    client changes meanwhile do not count."""
    counts = np.zeros(3, np.int64)
    for partition in info.partitions:
        there = store.keys(info.name, partition=partition)
        picked = there[:: max(1, -(-len(there) * len(info.partitions) // SAMPLED_ROWS))]
        before = store.get(info.name, picked, state.field, partition=partition)
        valid = ~state.layout.invalid(before.vectors)
        keys = [key for key, fine in zip(before.keys, valid, strict=True) if fine]
        vectors = before.vectors[valid]
        if not keys:
            continue
        encoded = state.codec.encode_query(vectors, 0.0, slot=state.profile.slot)
        by_field = store.nearest(info.name, state.field, vectors, SEARCHED)
        by_second = store.nearest(info.name, state.searched_field, encoded, SEARCHED)
        after = store.get(info.name, keys, state.field, partition=partition)
        same = {key for key, is_same in same_rows(before, after).items() if is_same}
        for key, first, second in zip(keys, by_field, by_second, strict=True):
            if key in same:
                counts += [1, key in first[:TOP], key in second[:TOP]]
    searched, in_field, in_second = counts.tolist()
    return searched, in_field, in_second
