"""The plan of a correction without a copy: `plan_enable`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from milvus_hubness.basics.defaults import MAX_MISS_RATE, LocationWithoutCopy
from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.correction.banks.bank import BankLike, QueryBank, optional_bank
from milvus_hubness.correction.codec.arrays import as_metric
from milvus_hubness.correction.codec.base import form_of
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.second_vector import SECOND_VECTOR_FIELD
from milvus_hubness.correction.estimators import Estimator, to_dict
from milvus_hubness.correction.estimators.base import expect_estimator, is_same
from milvus_hubness.correction.fitted import Correction
from milvus_hubness.correction.state import (
    CandidateReranking,
    CollectionState,
    slots_for,
    suffix_for,
)
from milvus_hubness.errors import AlreadyCorrected, CannotMigrate, InvalidParameter, ResumeRefused
from milvus_hubness.jobs.common.corrections import load_correction
from milvus_hubness.jobs.common.inputs import (
    Gallery,
    fit_measured,
    fit_with_mean,
    only_field,
    read_gallery,
)
from milvus_hubness.jobs.migration.plan import bank_facts, checked_gates, chosen, verdict_remarks
from milvus_hubness.jobs.migration.survey import resolved
from milvus_hubness.jobs.store.ownership import bank_name, side_name
from milvus_hubness.jobs.store.protocols import (
    SecondVectors,
    SideCollections,
    Store,
    capability,
    expect_store,
)
from milvus_hubness.jobs.store.records import CollectionInfo
from milvus_hubness.quality.trials import LADDER, enough_candidates, missed_share, raw_places

MEASURED_QUERIES = 1_000


@dataclass(frozen=True, eq=False)
class EnablePlan:
    """A plan to store the biases of `source` outside its vectors. adds_fields: whether fields must be added first.
    missed: for each number of candidates, the mean share of the exact corrected top 10 outside them. unfinished: the
    state that an interrupted run left, which the next run continues. remarks: facts that the user should know first."""

    source: CollectionInfo
    field: str
    suffix: str
    bank: QueryBank
    target_bank: QueryBank | None
    bank_collection: str
    correction: Correction
    strength: float
    where: LocationWithoutCopy
    adds_fields: bool
    gate: int | None
    gate_targets: int | None
    remarks: tuple[str, ...]
    reranking: CandidateReranking | None = None
    missed: dict[int, float] | None = None
    unfinished: CollectionState | None = None

    @property
    def side_collection(self) -> str | None:
        return self.reranking.side_collection if self.reranking else None

    @property
    def second_vector(self) -> str | None:
        return SECOND_VECTOR_FIELD + self.suffix if self.where == "second_vector" else None

    @property
    def width(self) -> int:
        return form_of(self.correction.layout, self.source.vector_fields[self.field].dtype).width

    def to_dict(self) -> dict[str, Any]:
        reranking, carries_on = self.reranking, self.unfinished is not None
        location: dict[str, Any] = {
            "second_vector": self.second_vector,
            "width": self.width,
            "carries_on": carries_on,
        }
        if reranking:
            location = {
                "side_collection": reranking.side_collection,
                "candidates": reranking.candidates,
                "missed": {
                    str(candidates): share for candidates, share in (self.missed or {}).items()
                },
                "measured_queries": reranking.queries,
            }
        return {
            "source": self.source.name,
            "field": self.field,
            "metric": self.correction.layout.metric,
            "rows": self.source.rows,
            "where": self.where,
            **location,
            "adds_fields": self.adds_fields,
            "bank": bank_facts(self.bank, self.target_bank, self.bank_collection),
            "estimator": to_dict(self.correction.fitted.estimator),
            "strength": self.strength,
            "gate": self.gate,
            "gate_targets": self.gate_targets,
            "remarks": list(self.remarks),
        }


def plan_enable(
    store: Store,
    source: str,
    bank: BankLike,
    *,
    estimator: Estimator | None = None,
    target_bank: BankLike | None = None,
    queries: BankLike | None = None,
    field: str | None = None,
    where: LocationWithoutCopy | None = None,
    bank_collection: str | None = None,
    max_miss_rate: float = MAX_MISS_RATE,
    gate: int | None = None,
    gate_targets: int | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> EnablePlan:
    """Read `source`, fit the biases, and measure the corrected answers that candidates miss. Read only.

    estimator: as in plan_migration. queries: for the measurement, by default some of the bank's. where: by default
    "fields" if the collection has them or the server can add them and its rows do not expire, else "side_collection";
    searches of "second_vector" need no candidates. max_miss_rate: the share of the exact corrected top 10 that
    may be outside them. gate, gate_targets: as in plan_migration.

    Raises ResumeRefused if an interrupted run used another bank, estimator or gate, AlreadyCorrected, CannotMigrate,
    CorrectionNotRecommended, InvalidParameter, EmptyCollection, CollectionNotFound, BankTooSmall.
    """
    expect_store(store)
    expect_estimator(estimator)
    bank, target_bank, queries = (
        QueryBank.of(bank),
        optional_bank(target_bank),
        optional_bank(queries),
    )
    gates = (gate, gate_targets)
    checked_gates(*gates, target_bank)
    if not 0 < max_miss_rate < 1:
        raise InvalidParameter(f"max_miss_rate must be between 0 and 1, not {max_miss_rate}")
    info = store.info(source)
    if info.is_bank:
        raise CannotMigrate(f"{info.name!r} is a query bank: name the collection of the items")
    field = field or only_field(info)
    info.require_correctable(field)
    unfinished = info.states.get(field)
    if unfinished is not None and (where != "second_vector" or unfinished.serves):
        raise AlreadyCorrected(
            f"field {field!r} of {info.name!r} is corrected already: refresh it instead"
        )
    suffix = unfinished.suffix if unfinished else suffix_for(field, info.states.values())
    dtype, presence = info.vector_fields[field].dtype, "none"
    layout: Layout | None = None
    if where == "second_vector":
        vector = info.vector_fields[field]
        if not vector.metric:
            raise CannotMigrate(
                f"field {field!r} has no index, so its metric is unknown: create an index first"
            )
        new = Layout(
            vector.dim,
            as_metric(vector.metric),
            slots_for(1),
            store.width_multiple(vector),
            spread=store.bias_spread(info, field),
        )
        layout = unfinished.layout if unfinished else new
        second_vectors = capability(store, SecondVectors)
        presence = second_vectors.second_vector_field(
            info, field, suffix, form_of(layout, dtype).width
        )
        remarks = second_vectors.second_vector_remarks(info, suffix)
    else:
        presence = store.bias_fields(info, suffix)
        if where == "fields" and presence == "none":
            raise CannotMigrate(
                f"{info.name!r} has no fields for biases and this server cannot add any: "
                "use a side collection (--where side_collection)"
            )
        # Fields would restart the time to live of every row.
        where = where or (
            "side_collection" if presence == "none" or info.time_to_live else "fields"
        )
        remarks = store.bias_remarks(info, suffix) if where == "fields" else []
    remarks = [*remarks, *_remarks_on_expiry(info, where)]
    reranking = missed = None
    if unfinished is not None:
        profile = unfinished.profile
        _require_same(unfinished, bank, estimator, target_bank, gates)
        correction = load_correction(store, unfinished, profile)
        strength, gate, gate_targets = profile.strength, profile.gate, profile.gate_targets
        bank_collection = profile.bank.collection
    else:
        gallery = read_gallery(store, info, field, progress=progress)
        bank.expect_dim(gallery.layout.dim, "the field")
        resolved(gallery.layout, gallery.vectors, bank, field, dtype)
        remarks += verdict_remarks(info, field, bank, is_followed=estimator is None)
        estimator, strength, gate, gate_targets = chosen(
            info, field, bank, target_bank, estimator, gates, force=force
        )
        banks = (estimator, bank, target_bank)
        if layout is not None:
            correction = fit_measured(store, info, field, layout, gallery.vectors, *banks, strength)
        else:
            correction = fit_with_mean(gallery.layout, gallery.vectors, *banks)
            side = _free_side(store, info, suffix) if where == "side_collection" else None
            most = store.most_candidates(info)
            reranking, missed = measure(
                gallery, correction, queries or bank, strength, max_miss_rate, side, most
            )
            if reranking.missed > max_miss_rate and most < LADDER[-1]:
                raise CannotMigrate(
                    f"{info.name!r} cannot be enabled: its searches may ask for {most:,} rows (max_query_limit), and "
                    f"{reranking.missed:.1%} of the corrected top 10 are not among these, more than "
                    f"{max_miss_rate:.1%}: raise that limit, or migrate the collection"
                )
    return EnablePlan(
        source=info,
        field=field,
        suffix=suffix,
        bank=bank,
        target_bank=target_bank,
        bank_collection=bank_collection or bank_name(info.name),
        correction=correction,
        strength=strength,
        where=where,
        adds_fields=where != "side_collection" and presence == "can be added",
        gate=gate,
        gate_targets=gate_targets,
        remarks=tuple(remarks),
        reranking=reranking,
        missed=missed,
        unfinished=unfinished,
    )


def _remarks_on_expiry(info: CollectionInfo, where: LocationWithoutCopy) -> list[str]:
    """Return remarks about the time to live of rows, if the collection has one."""
    if not info.time_to_live:
        return []
    if where == "side_collection":
        return [
            f"rows expire after {info.time_to_live:,} s as before, since none is written; the next refresh removes "
            "the biases of expired rows"
        ]
    return [
        f"rows live for {info.time_to_live:,} s after their last write, and all are written now: they expire later, "
        "once by up to that time; a full refresh restarts it again, and is refused without --restart-ttl "
        "(--where side_collection writes no row)"
    ]


def _free_side(store: Store, info: CollectionInfo, suffix: str) -> str:
    """Return a name for the side collection: that of an unfinished `enable`, or one that no collection has.

    The first name may be taken: a collection that was renamed keeps its side collection.
    """
    sides = capability(store, SideCollections)
    first = side_name(info.name, suffix)
    for number in count(1):
        name = first if number == 1 else f"{first}_{number}"
        if sides.can_hold_side(info, name):
            return name
    raise AssertionError("count() does not end")


def measure(
    gallery: Gallery,
    correction: Correction,
    queries: QueryBank,
    strength: float,
    max_miss_rate: float,
    side: str | None,
    most: int,
) -> tuple[CandidateReranking, dict[int, float]]:
    """Choose the number of candidates, at most `most`, on at most 1,000 of `queries`, and return it with each number's
    miss rate."""
    queries.expect_dim(gallery.layout.dim, "the field")
    query_vectors = queries.vectors[:: -(-len(queries) // MEASURED_QUERIES)]
    places = raw_places(
        gallery.layout.reduce_queries(query_vectors),
        gallery.layout.reduce_items(gallery.vectors),
        np.float32(strength) * correction.centred(gallery.vectors),
    )
    allowed = [*(step for step in LADDER if step < most), min(most, LADDER[-1])]
    missed = {candidates: missed_share(places, candidates) for candidates in allowed}
    candidates = enough_candidates(places, max_miss_rate, allowed)
    reranking = CandidateReranking(
        side_collection=side,
        candidates=candidates,
        missed=missed[candidates],
        allowed=max_miss_rate,
        queries=len(query_vectors),
    )
    return reranking, missed


def _require_same(
    state: CollectionState,
    bank: QueryBank,
    estimator: Estimator | None,
    target_bank: QueryBank | None,
    gates: tuple[int | None, int | None],
) -> None:
    fingerprint = bank.fingerprint + (f"+{target_bank.fingerprint}" if target_bank else "")
    differences = {
        "bank": fingerprint != state.profile.bank.fingerprint,
        "estimator": estimator is not None and not is_same(estimator, state.profile.estimator),
        "gate": gates != (None, None)
        and checked_gates(*gates, target_bank) != (state.profile.gate, state.profile.gate_targets),
    }
    if names := [name for name, differs in differences.items() if differs]:
        raise ResumeRefused(
            f"an unfinished enable of {state.source!r} was started with another {', '.join(names)}: "
            "run it with the same options, or disable the collection first"
        )
