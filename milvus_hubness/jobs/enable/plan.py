"""The plan of a correction without a copy: `plan_enable`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from milvus_hubness.basics.defaults import (
    MAX_MISS_RATE,
    OnHub,
    VerdictMode,
)
from milvus_hubness.basics.notebooks import ShownAsTable
from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.basics.texts import field_words
from milvus_hubness.basics.words import expect_word
from milvus_hubness.correction.banks.bank import BankLike, QueryBank, optional_bank
from milvus_hubness.correction.codec.beside import sides_of
from milvus_hubness.correction.estimators import Estimator, to_dict
from milvus_hubness.correction.estimators.base import expect_estimator
from milvus_hubness.correction.fitted import Correction, grouped
from milvus_hubness.correction.state import CandidateReranking, suffix_for
from milvus_hubness.errors import (
    AlreadyCorrected,
    CannotMigrate,
    InvalidParameter,
)
from milvus_hubness.jobs.common.choice import (
    bank_facts,
    checked_gate,
    choose,
    kind_remarks,
    verdict_remarks,
)
from milvus_hubness.jobs.common.inputs import (
    FitRows,
    Gallery,
    fit_with_mean,
    only_field,
    read_gallery,
)
from milvus_hubness.jobs.common.judging import Judging, judged, stored_verdict
from milvus_hubness.jobs.common.priors import (
    NO_PRIOR,
    PriorLike,
    PriorRequest,
    chosen_prior,
    joined_with,
    on_gallery,
    prior_facts,
)
from milvus_hubness.jobs.migration.survey import resolved
from milvus_hubness.jobs.store.ownership import bank_name, side_name
from milvus_hubness.jobs.store.protocols import (
    BiasKeys,
    HubGuards,
    SearchGates,
    SideCollections,
    Store,
    capability,
    expect_store,
    validate_new_names,
)
from milvus_hubness.jobs.store.records import CollectionInfo, TuningRecord
from milvus_hubness.quality.trials import LADDER, enough_candidates, missed_share, raw_ranks

MEASURED_QUERIES = 1_000
"""Most queries on which the number of candidates is chosen."""


@dataclass(frozen=True, eq=False)
class EnablePlan(ShownAsTable):
    """A plan to store the biases of `source` outside its vectors."""

    source: CollectionInfo
    field: str
    suffix: str
    """The end of the names of the hidden fields, see CollectionState."""
    bank: QueryBank
    target_bank: QueryBank | None
    bank_collection: str
    """The collection that holds the bank's generations."""
    correction: Correction
    """The fitted biases."""
    strength: float
    """w of searches that name none."""
    gate: int | None
    """The k of a DynamicGate; None for none."""
    remarks: tuple[str, ...]
    """What the user should know before the run."""
    judging: Judging
    """What the run does with the verdict."""
    reranking: CandidateReranking
    """The number of candidates, chosen by measurement."""
    missed: dict[int, float]
    """For each number of candidates, the mean share of the exact corrected top 10 outside them."""
    verdict: TuningRecord | None = None
    """The verdict on the bank; None if it was not judged."""
    on_hub: OnHub = "off"
    """What clients do with new rows that look like planted hubs."""

    @property
    def sides(self) -> tuple[str, ...]:
        """The side collections by slot; empty if payloads hold the biases."""
        prefix = self.reranking.side_prefix
        return sides_of(prefix) if prefix is not None else ()

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, for people and for --json."""
        return {
            "source": self.source.name,
            "field": self.field,
            "metric": self.correction.layout.metric,
            "rows": self.source.rows,
            "side_collections": list(self.sides),
            "candidates": self.reranking.candidates,
            "missed": {str(candidates): share for candidates, share in self.missed.items()},
            "measured_queries": self.reranking.queries,
            "bank": bank_facts(self.bank, self.target_bank, self.bank_collection),
            "estimator": to_dict(self.correction.fitted.estimator),
            "strength": self.strength,
            "gate": self.gate,
            "prior": prior_facts(self.correction.prior, len(self.correction.clicks)),
            "verdict": self.verdict.facts if self.verdict else None,
            "on_hub": self.on_hub,
            "remarks": list(self.remarks),
        }


@dataclass(frozen=True, kw_only=True)
class EnableRequest:
    """What the caller of `plan_enable` asks for, with a valid gate and a valid limit."""

    source: str
    """The collection to correct, or an alias of it."""
    bank: QueryBank
    target_bank: QueryBank | None
    estimator: Estimator | None
    """The method to fit; None to follow tuning."""
    gate: int | None
    """The caller's gate, which overrules that of tuning; 0 for none."""
    prior: PriorRequest
    """The caller's prior."""
    field: str | None
    """The vector field to correct; None for the only one."""
    bank_collection: str | None
    """Where to store the bank; None for a name that is derived from the source's."""
    max_miss_rate: float
    judging: Judging
    on_hub: OnHub

    def __post_init__(self) -> None:
        expect_word("on_hub", self.on_hub, OnHub)
        checked_gate(self.gate)
        self.prior.expect_source()
        if not 0 < self.max_miss_rate < 1:
            raise InvalidParameter(
                f"max_miss_rate must be between 0 and 1, not {self.max_miss_rate}"
            )


@dataclass(frozen=True)
class FittedPlan:
    """The biases of a plan, newly fitted."""

    correction: Correction
    strength: float
    gate: int | None
    bank_collection: str
    remarks: list[str]
    reranking: CandidateReranking
    missed: dict[int, float]
    verdict: TuningRecord | None
    """The verdict on the bank; None if it was not judged."""


def plan_enable(
    store: Store,
    source: str,
    bank: BankLike,
    *,
    estimator: Estimator | None = None,
    target_bank: BankLike | None = None,
    queries: BankLike | None = None,
    field: str | None = None,
    bank_collection: str | None = None,
    max_miss_rate: float = MAX_MISS_RATE,
    gate: int | None = None,
    prior: PriorLike | None = None,
    prior_weight: float | None = None,
    verdict: VerdictMode | None = None,
    on_hub: OnHub = "off",
    progress: Progress = silent,
) -> EnablePlan:
    """Read `source`, fit the biases, and measure the corrected answers that candidates miss.

    Read only.

    estimator, verdict: as in plan_migration. queries: real ones, apart from the bank, on which the
    bank is judged and the candidates are measured; by default some of the bank's.
    max_miss_rate: the share of the exact corrected top 10 that may be outside them. gate,
    prior, prior_weight, on_hub: as in plan_migration.

    Raises AlreadyCorrected, CannotMigrate, InvalidParameter, EmptyCollection, CollectionNotFound,
    BankTooSmall.
    """
    expect_store(store)
    expect_estimator(estimator)
    request = EnableRequest(
        source=source,
        bank=QueryBank.of(bank),
        target_bank=optional_bank(target_bank),
        estimator=estimator,
        gate=gate,
        prior=PriorRequest.of(prior, prior_weight),
        field=field,
        bank_collection=bank_collection,
        max_miss_rate=max_miss_rate,
        judging=Judging.of(verdict, queries),
        on_hub=on_hub,
    )
    return _planned(store, request, progress)


def _planned(store: Store, request: EnableRequest, progress: Progress) -> EnablePlan:
    """Validate, choose the location, fit and measure, and assemble the plan."""
    if request.on_hub != "off":
        capability(store, HubGuards).expect_hub_guard()
    if request.gate:
        capability(store, SearchGates).expect_gates()
    info, field = _correctable(store, request)
    suffix = suffix_for(field, info.states.values())
    side = None
    if isinstance(store, SideCollections):
        side = _free_side(store, info, suffix)
    else:
        capability(store, BiasKeys)
    remarks = [*store.beside_remarks(info), *_remarks_on_expiry(info)]
    gallery = read_gallery(store, info, field, progress=progress)
    fitted = _fitted(store, request, info, gallery, side, progress)

    return EnablePlan(
        source=info,
        field=field,
        suffix=suffix,
        bank=request.bank,
        target_bank=request.target_bank,
        bank_collection=fitted.bank_collection,
        correction=fitted.correction,
        strength=fitted.strength,
        gate=fitted.gate,
        remarks=(*remarks, *fitted.remarks),
        reranking=fitted.reranking,
        missed=fitted.missed,
        verdict=fitted.verdict,
        judging=request.judging,
        on_hub=request.on_hub,
    )


def _correctable(store: Store, request: EnableRequest) -> tuple[CollectionInfo, str]:
    """Return the source and its field, if `enable` can correct them.

    Raises CannotMigrate, AlreadyCorrected, CollectionNotFound, InvalidInput.
    """
    info = store.info(request.source)
    if info.is_bank:
        raise CannotMigrate(f"{info.name!r} is a query bank: name the collection of the items")

    field = request.field or only_field(info)
    info.require_correctable(field)
    if info.vector_fields[field].multi_vectors:
        raise CannotMigrate(
            f"{field_words(field)} of {info.name!r} has several vectors a row, whose right answers are "
            "often not among the raw candidates: migrate the collection, which corrects all rows"
        )

    if field in info.states:
        raise AlreadyCorrected(
            f"{field_words(field)} of {info.name!r} is corrected already: refresh it instead"
        )

    validate_new_names(store, request.bank_collection)
    return info, field


def _fitted(
    store: Store,
    request: EnableRequest,
    info: CollectionInfo,
    gallery: Gallery,
    side: str | None,
    progress: Progress,
) -> FittedPlan:
    """Choose and fit an estimator on the gallery, and measure what candidates miss."""
    field = request.field or only_field(info)
    request.bank.expect_dim(gallery.layout.dim, "the field")
    dtype = info.vector_fields[field].dtype
    # Also where biases leave the vectors as they are: scores that are equal in float32 cannot be
    # corrected.
    resolved(gallery.layout, gallery.vectors, request.bank, field, dtype)

    verdict = stored_verdict(info, field, request.bank, request.judging, kind="")
    if verdict is None and request.judging.mode != "skip":
        judged_rows = FitRows.of(gallery.vectors, gallery.items, NO_PRIOR, None)
        verdict = judged(gallery.layout, judged_rows, field, request.bank, request.judging)
    remarks = verdict_remarks(verdict, info, request.judging, is_followed=request.estimator is None)
    choice = choose(
        verdict,
        request.estimator,
        request.gate,
        are_gated=isinstance(store, SearchGates),
    )
    chosen = chosen_prior(request.prior, verdict, is_followed=request.estimator is None)
    chosen = on_gallery(store, info, chosen, progress=progress)
    remarks += filter(None, [chosen.remark])
    remarks += kind_remarks(info, field, request.bank, None, None)
    estimator = joined_with(choice.estimator, request.prior, chosen)
    rows = FitRows.of(gallery.vectors, gallery.items, chosen, None)
    bank = grouped(gallery.layout, request.bank, gallery.vectors)
    correction = fit_with_mean(
        gallery.layout, rows, estimator, bank, request.target_bank, choice.strength, chosen
    )
    most = store.most_candidates(info)
    reranking, missed = measure(
        gallery,
        correction,
        request.judging.queries or request.bank,
        choice.strength,
        request.max_miss_rate,
        side,
        most,
    )
    _require_few_missed(info, reranking, most)

    return FittedPlan(
        correction=correction,
        strength=choice.strength,
        gate=choice.gate,
        bank_collection=request.bank_collection or bank_name(info.name),
        remarks=remarks,
        reranking=reranking,
        missed=missed,
        verdict=verdict,
    )


def _require_few_missed(info: CollectionInfo, reranking: CandidateReranking, most: int) -> None:
    """Raise CannotMigrate if searches may not ask for enough candidates, at most `most`.

    Where the ladder itself ends, the plan is made with the largest number, and states the rate.
    """
    if reranking.missed > reranking.allowed and most < LADDER[-1]:
        raise CannotMigrate(
            f"{info.name!r} cannot be enabled: its searches may ask for {most:,} rows "
            f"(max_query_limit), and {reranking.missed:.1%} of the corrected top 10 are not among "
            f"these, more than {reranking.allowed:.1%}: raise that limit, or migrate the collection"
        )


def _remarks_on_expiry(info: CollectionInfo) -> list[str]:
    """Return remarks about the time to live of rows, if the collection has one."""
    if not info.time_to_live:
        return []

    return [
        f"rows expire after {info.time_to_live:,} s as before, since none is written; the next "
        "refresh removes the biases of expired rows"
    ]


def _free_side(sides: SideCollections, info: CollectionInfo, suffix: str) -> str:
    """Return what the names of the side collections begin with: of those of an unfinished `enable`,
    or of ones that no collection has.

    The first names may be taken: a collection that was renamed keeps its side collections.
    """
    first = side_name(info.name, suffix)
    for number in count(1):
        name = first if number == 1 else f"{first}_{number}"
        if all(sides.can_hold_side(info, side) for side in sides_of(name)):
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
    """Choose the number of candidates, at most `most`, on at most 1,000 of `queries`, and return it
    with each number's miss rate.
    """
    queries.expect_dim(gallery.layout.dim, "the field")
    every = -(-len(queries) // MEASURED_QUERIES)
    query_vectors = queries.vectors[::every]
    # A corrected answer is missed if its rank in the raw ranking is behind the last candidate.
    ranks = raw_ranks(
        gallery.layout.reduce_queries(query_vectors),
        gallery.layout.reduce_items(gallery.vectors),
        np.float32(strength) * correction.centred(gallery.vectors, gallery.items),
    )

    # The server refuses searches for more rows than `most`.
    allowed = [*(step for step in LADDER if step < most), min(most, LADDER[-1])]
    missed = {candidates: missed_share(ranks, candidates) for candidates in allowed}
    candidates = enough_candidates(ranks, max_miss_rate, allowed)
    reranking = CandidateReranking(
        side_prefix=side,
        candidates=candidates,
        missed=missed[candidates],
        allowed=max_miss_rate,
        queries=len(query_vectors),
    )
    return reranking, missed
