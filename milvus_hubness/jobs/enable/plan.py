"""A plan without a copy: `Beside`, which a caller chooses."""

from __future__ import annotations

import numbers
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from milvus_hubness.basics.defaults import MAX_MISS_RATE
from milvus_hubness.basics.progress import Progress
from milvus_hubness.basics.texts import field_words
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.codec.beside import sides_of
from milvus_hubness.correction.estimators import to_dict
from milvus_hubness.correction.fitted import Correction, grouped
from milvus_hubness.correction.state import CandidateReranking
from milvus_hubness.errors import (
    AlreadyCorrected,
    CannotMigrate,
    InvalidInput,
    InvalidParameter,
)
from milvus_hubness.jobs.common.choice import chosen
from milvus_hubness.jobs.common.gallery import Gallery, read_gallery
from milvus_hubness.jobs.common.plan import Body, Draft, Plan, PlannedBody
from milvus_hubness.jobs.common.recipe import Recipe
from milvus_hubness.jobs.migration.estimates import resolved
from milvus_hubness.jobs.store.ownership import side_name
from milvus_hubness.jobs.store.protocols import (
    BiasKeys,
    SideCollections,
    Store,
    capability,
)
from milvus_hubness.jobs.store.records import CollectionInfo
from milvus_hubness.quality.trials import LADDER, enough_candidates, missed_share, raw_ranks

MEASURED_QUERIES = 1_000
"""Most queries on which the number of candidates is chosen."""


@dataclass(frozen=True, eq=False)
class PlannedBeside(PlannedBody):
    """Biases outside the vectors: in side collections, or in payloads."""

    job = "enable"

    correction: Correction
    """The fitted biases."""
    reranking: CandidateReranking
    """The number of candidates, chosen by measurement."""
    missed: dict[int, float]
    """For each number of candidates, the mean share of the exact corrected top 10 outside them."""

    @property
    def sides(self) -> tuple[str, ...]:
        """The side collections by slot; empty if payloads hold the biases."""
        prefix = self.reranking.side_prefix
        return sides_of(prefix) if prefix is not None else ()

    def facts(self, plan: Plan[Any]) -> dict[str, Any]:
        """Return what the plan says of the biases and the candidates, as plain data."""
        prior = self.correction.prior
        return {
            "rows": plan.source.rows,
            "side_collections": list(self.sides),
            "candidates": self.reranking.candidates,
            "missed": {str(candidates): share for candidates, share in self.missed.items()},
            "measured_queries": self.reranking.queries,
            "estimator": to_dict(self.correction.fitted.estimator),
            "prior": prior.facts(len(self.correction.clicks)) if prior else None,
        }


@dataclass(frozen=True, eq=False)
class Beside(Body[PlannedBeside]):
    """Biases are stored beside the vectors, which stay as they are; `enable` writes them.

    Searches fetch more candidates and re-rank them. The candidates are measured on the real queries of
    the recipe, by default on some of the bank's. Raises InvalidParameter.
    """

    max_miss_rate: float = MAX_MISS_RATE
    """The share of the exact corrected top 10 that may be outside the candidates."""

    def __post_init__(self) -> None:
        is_number = isinstance(self.max_miss_rate, numbers.Real)
        if isinstance(self.max_miss_rate, bool) or not is_number or not 0 < self.max_miss_rate < 1:
            raise InvalidParameter(
                f"max_miss_rate must be between 0 and 1, not {self.max_miss_rate!r}"
            )

    def expect_correctable(self, store: Store, draft: Draft, recipe: Recipe) -> None:
        """Raise CannotMigrate, AlreadyCorrected, InvalidInput unless `enable` can correct the field."""
        if recipe.kind is not None:
            raise InvalidInput(
                "biases beside the vectors cannot be compared by kind: leave the kinds out, or migrate "
                "the collection"
            )
        info = draft.source
        info.require_correctable(draft.field)
        if draft.vector.multi_vectors:
            raise CannotMigrate(
                f"{field_words(draft.field)} of {info.name!r} has several vectors a row, whose right "
                "answers are often not among the raw candidates: migrate the collection, which corrects "
                "all rows"
            )

        if draft.field in info.states:
            raise AlreadyCorrected(
                f"{field_words(draft.field)} of {info.name!r} is corrected already: refresh it instead"
            )

    def planned(
        self, store: Store, draft: Draft, recipe: Recipe, progress: Progress
    ) -> Plan[PlannedBeside]:
        """Fit the biases on all rows, and measure the corrected answers that candidates miss."""
        info = draft.source
        field = draft.field
        side = None
        if isinstance(store, SideCollections):
            side = _free_side(store, info, draft.suffix)
            draft.expect_bank_apart(*sides_of(side))
        else:
            capability(store, BiasKeys)

        gallery = read_gallery(store, info, field, progress=progress)
        bank = recipe.required_bank(info.name)
        # Also where biases leave the vectors as they are: scores that are equal in float32 cannot be
        # corrected.
        resolved(gallery.layout, gallery.vectors, bank, field, draft.vector.dtype)
        biases = chosen(
            store,
            info,
            field,
            gallery.layout,
            recipe,
            lambda: (gallery.vectors, gallery.items),
            progress=progress,
        )
        biases = replace(biases, bank=grouped(gallery.layout, bank, gallery.vectors))
        correction = biases.fit(biases.fit_rows(gallery.vectors, gallery.items))
        most = store.most_candidates(info)
        reranking, missed = measure(
            gallery,
            correction,
            recipe.judging.queries or bank,
            biases.strength,
            self.max_miss_rate,
            side,
            most,
        )
        _require_few_missed(info, reranking, most)
        return Plan(
            **vars(draft),
            chosen=biases,
            remarks=(*store.beside_remarks(info), *_remarks_on_expiry(info), *biases.remarks),
            body=PlannedBeside(correction, reranking, missed),
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
