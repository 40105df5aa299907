"""Which biases a collection gets: what follows from a recipe, the verdict on its bank and the rows.

`chosen` is the only place of that sequence, for a collection without biases; `choice_of`, its middle, is
also that of a refresh, which starts from the biases in use. What the recipe names comes first, then the
choice of the verdict, then what is in use, then the defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from milvus_hubness.basics.defaults import OnHub
from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.index_hints import measured_on
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.quantisation import with_bias_scale
from milvus_hubness.correction.estimators import DEFAULT_ESTIMATOR, Estimator, from_dict, to_dict
from milvus_hubness.correction.fitted import Correction, grouped, measured_kinds
from milvus_hubness.correction.items import Items
from milvus_hubness.correction.kinds import KindRule
from milvus_hubness.jobs.common.gallery import FitRows
from milvus_hubness.jobs.common.judging import Judging, judged, stored_verdict
from milvus_hubness.jobs.common.kinds import (
    NO_KINDS,
    ChosenKinds,
    chosen_kinds,
    with_kind_offsets,
    with_kinds,
)
from milvus_hubness.jobs.common.priors import (
    NO_PRIOR,
    ChosenPrior,
    chosen_prior,
    joined_with,
    on_gallery,
)
from milvus_hubness.jobs.common.recipe import Recipe, checked_gate
from milvus_hubness.jobs.store.protocols import (
    Schemas,
    Store,
    expect_feature,
    has_feature,
)
from milvus_hubness.jobs.store.records import CollectionInfo, TuningRecord
from milvus_hubness.quality.tuning import LEAVE

SampledRows: TypeAlias = Callable[[], tuple[Floats, Items]]
"""Reads some rows, the same ones each time: their vectors (n, d), and their keys and fields."""


@dataclass(frozen=True)
class Choice:
    """What biases are fitted with, and how strongly searches apply them."""

    estimator: Estimator
    strength: float = 1.0
    """w of searches that name none."""
    gate: int | None = None
    """The k of `DynamicGate`; None corrects every query."""


@dataclass(frozen=True, eq=False)
class Chosen(Choice):
    """The biases that a collection gets, before they are fitted."""

    _: KW_ONLY
    bank: QueryBank
    target_bank: QueryBank | None = None
    layout: Layout
    """The columns of the rows, with those for their kinds."""
    prior: ChosenPrior = NO_PRIOR
    """The prior, measured on the values of all rows."""
    kinds: ChosenKinds = NO_KINDS
    """The kinds of the rows."""
    kind: str | None = None
    """The field of kinds, or AUTO, that the recipe names; None for none."""
    verdict: TuningRecord | None = None
    """The verdict on the bank; None if it was not judged."""
    judging: Judging
    """What a run does with the verdict."""
    on_hub: OnHub = "off"
    """What clients do with new rows that look like planted hubs."""
    remarks: tuple[str, ...] = ()
    """What the user should know of the choice."""

    def fit_rows(self, vectors: Floats, rows: Items) -> FitRows:
        """Return rows with these vectors (n, d) and fields as a fit takes them."""
        return FitRows.of(vectors, rows, self.prior, self.kinds.rule)

    def fit(self, rows: FitRows) -> Correction:
        """Return a correction that is fitted on the bank and, if the method needs it, on the rows, whose
        biases give its mean bias, the unit of the prior's weight and the scale of a spread layout.

        Raises as `Correction.fit` does.
        """
        layout = self.layout
        vectors = rows.vectors
        correction = Correction.fit(
            layout,
            self.estimator,
            self.bank,
            gallery=vectors if self.estimator.needs_gallery else None,
            target_bank=self.target_bank,
            kinds=measured_kinds(layout, self.kinds.rule, vectors, rows.kinds, self.bank),
            gallery_kinds=rows.kinds,
        )

        valid = ~layout.invalid(vectors)
        biases = correction.centred(vectors, kinds=rows.kinds)
        mean_bias = float(biases[valid].mean(dtype=np.float64)) if valid.any() else 0.0
        correction = replace(correction, mean_bias=mean_bias).measured(vectors, rows.kinds)
        if self.prior.prior is not None and rows.values is not None:
            prior = self.prior.prior.with_factor(correction.spread(vectors, rows.kinds))
            correction = replace(correction, prior=prior, clicks=self.prior.clicks)

        # The scale of a quantised bias depends on the sizes of the biases, which the fit gives.
        if layout.slots.spread > 1:
            centred = biases - np.float32(mean_bias)
            stored = correction.with_prior(centred, valid, None, rows.values)
            layout = with_bias_scale(layout, vectors[valid], stored[valid], self.strength)
        return replace(correction, layout=layout)

    def measured(self, store: Schemas, info: CollectionInfo, field: str, rows: FitRows) -> Chosen:
        """Return the choice with the near copies of the bank and the constants of the layout as these
        rows of the field show them.
        """
        bank = grouped(self.layout, self.bank, rows.vectors)
        layout = measured_on(
            self.layout,
            rows.vectors,
            bank.condensed.vectors,
            **store.column_needs(info, field).hints,
        )
        return replace(self, bank=bank, layout=layout)

    @property
    def facts(self) -> dict[str, Any]:
        """What a plan says of it, as plain data, but for the bank."""
        return {
            "estimator": to_dict(self.estimator),
            "strength": self.strength,
            "gate": self.gate,
            "prior": self.prior.facts,
            "kinds": self.kinds.facts,
            "verdict": self.verdict.facts if self.verdict else None,
            "on_hub": self.on_hub,
        }

    def bank_facts(self, collection: str) -> dict[str, Any]:
        """What a plan says of the bank. collection: the one that will hold it."""
        return {
            "collection": collection,
            "source": self.bank.source,
            "queries": len(self.bank),
            "fingerprint": self.bank.fingerprint,
            "targets": len(self.target_bank) if self.target_bank else 0,
        }


def chosen(
    store: Store,
    info: CollectionInfo,
    field: str,
    layout: Layout,
    recipe: Recipe,
    rows: SampledRows,
    *,
    is_judged: bool = True,
    progress: Progress = silent,
) -> Chosen:
    """Return the biases of a field that has none so far. Read only.

    layout: the columns of its rows, without kinds. recipe: with its vectors read. rows: some of the
    collection's, read where the kinds or the verdict need them. is_judged: False leaves a bank without
    a stored verdict unjudged.

    Raises InvalidInput, InvalidParameter, CannotMigrate for kinds that are not possible, and as
    `on_gallery` does.
    """
    if recipe.on_hub not in (None, "off"):
        expect_feature(store, "hub guard")
    if recipe.gate:
        expect_feature(store, "gate")
    recipe.prior_request.expect_source()
    recipe.kind_request.expect_possible(layout, field)
    bank = recipe.required_bank(info.name)

    kinds = NO_KINDS
    if recipe.kind is not None:
        vectors, items = rows()
        kinds = chosen_kinds(store, info, recipe.kind_request, layout, vectors, bank)
        layout = with_kinds(layout, kinds.rule, vectors)
        if store.column_needs(info, field).kind_offsets:
            layout = with_kind_offsets(layout, kinds.rule, vectors, items)

    judging = recipe.judging if is_judged else Judging("skip")
    verdict = stored_verdict(info, field, bank, judging, kinds.source)
    if verdict is None and judging.mode != "skip":
        judged_rows = FitRows.of(*rows(), NO_PRIOR, kinds.rule)
        verdict = judged(layout, judged_rows, field, bank, judging, kinds.rule)

    is_followed = recipe.estimator is None
    prior = chosen_prior(recipe.prior_request, verdict, is_followed=is_followed)
    default = Choice(default_estimator(by_kind=kinds.rule is not None))
    choice = choice_of(recipe, verdict, default, prior, are_gated=has_feature(store, "gate"))
    prior = on_gallery(store, info, prior, progress=progress)
    remarks = (
        *_verdict_remarks(verdict, info, judging, is_followed=is_followed),
        *filter(None, [prior.remark(verdict)]),
        *kinds.remarks,
        *_kind_remarks(info, field, bank, recipe.kind, kinds.rule),
    )
    return Chosen(
        **vars(choice),
        bank=bank,
        target_bank=recipe.named_targets,
        layout=layout,
        prior=prior,
        kinds=kinds,
        kind=recipe.kind,
        verdict=verdict,
        judging=judging,
        on_hub=recipe.on_hub or "off",
        remarks=remarks,
    )


def choice_of(
    recipe: Recipe,
    verdict: TuningRecord | None,
    in_use: Choice,
    prior: ChosenPrior = NO_PRIOR,
    *,
    are_gated: bool = True,
) -> Choice:
    """Return the method to fit, with its strength and the gate.

    verdict: on the bank, with the kinds of the plan; against the bank, it chooses nothing. in_use: what
    applies where neither names anything. prior: that of the biases. are_gated: whether clients of the
    database gate searches; without, a gate of the verdict does not count.
    """
    estimator = in_use.estimator
    strength = in_use.strength
    gate = in_use.gate
    is_against = verdict is not None and verdict.verdict == LEAVE
    if recipe.estimator is not None:
        # It is applied as strongly as before, or in full: the verdict is about another method.
        estimator = recipe.estimator
    elif verdict is not None and not is_against:
        strength = verdict.strength
        if verdict.choice is not None:
            estimator = from_dict(verdict.choice)
        # Without labels, tuning does not judge gates, so that in use stays.
        if verdict.labelled and are_gated:
            gate = verdict.gate
    if recipe.gate is not None:
        gate = checked_gate(recipe.gate)

    return Choice(joined_with(estimator, recipe.prior_request, prior), strength, gate)


def default_estimator(*, by_kind: bool) -> Estimator:
    """Return the method that applies where nobody chooses one; by kind, in full."""
    if not by_kind:
        return DEFAULT_ESTIMATOR
    # The agreement of the bank's halves is low where much of the scores is a matter of kinds, and with
    # their means taken off nothing is left to be careful about (`benchmarks.mixed_forms`: with means of
    # vectors no gallery loses at full strength, and three of eleven do with the agreement).
    return DEFAULT_ESTIMATOR.in_full()


def _verdict_remarks(
    verdict: TuningRecord | None, info: CollectionInfo, judging: Judging, *, is_followed: bool
) -> list[str]:
    """Return that there is no verdict on a bank, and what follows from that; nothing if there is one.

    is_followed: whether the plan would follow it, because the caller names no method.
    """
    if verdict is not None:
        return []
    if judging.mode != "skip":
        return [f"{info.name!r} has too few rows to judge the bank on"]
    if not is_followed:
        return []

    others = len(info.verdicts.records)
    elsewhere = f", but on {others} other bank{'s' * (others > 1)}" if others else ""
    return [
        f"there is no verdict on this bank{elsewhere}: the default method applies; "
        "run tune with it to choose one"
    ]


def _kind_remarks(
    info: CollectionInfo, field: str, bank: QueryBank, kind: str | None, kinds: KindRule | None
) -> list[str]:
    """Return that tuning chose otherwise about kinds than a plan does; nothing if it did not.

    kind: what the caller names. kinds: those of the plan.
    """
    record = info.verdicts.compared(field, bank.fingerprint)
    if record is None:
        return []
    if kind is None and record.kind:
        return [
            f"tune found searches better by the kinds of {record.kind!r}: pass --kind {record.kind} "
            "to migrate"
        ]
    if kinds is not None and not record.kind and record.kind_tried == kinds.source:
        return [
            f"tune found searches no better by the kinds of {record.kind_tried!r}: leave --kind out"
        ]
    return []
