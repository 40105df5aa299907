"""The evaluation of new biases of a refresh against those in use, on a sample of the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.defaults import FEWEST_QUERIES
from milvus_hubness.correction.banks.bank import not_among
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.fitted import Correction, reduced_items, reduced_queries
from milvus_hubness.correction.kernels.rows import as_floats, as_queries
from milvus_hubness.correction.kinds import KindNumbers, Kinds
from milvus_hubness.jobs.refresh.among_all import values_among_all
from milvus_hubness.jobs.refresh.plan import RefreshPlan
from milvus_hubness.quality.labelled import LabelledQueries
from milvus_hubness.quality.measures import (
    Interval,
    k_occurrence,
    paired_difference,
    skewness,
)
from milvus_hubness.quality.outcomes import assess, excess_answers_of, noise_of_change
from milvus_hubness.quality.retrieval import R_AT_1, Measure
from milvus_hubness.quality.trials import activated_by

HELD_OUT = 0.2
"""The share of the bank's queries that an evaluation keeps back from the fit."""

FEWEST_HELD_OUT = 50
MOST_QUERIES = 2_000
"""Queries of an evaluation, held out or real ones; of more, it draws so many."""

FEWEST_ITEMS = 200
"""Fewer rows do not show how often each is among the ten best."""

UNEVALUATED = (
    f"it cannot be evaluated: that takes {FEWEST_ITEMS} rows, and {FEWEST_QUERIES} real queries apart "
    f"from the bank or a bank of {round(FEWEST_HELD_OUT / HELD_OUT)}"
)
"""Why a refit that no user has requested is refused."""

NOISE = 1.0
"""Standard errors by which the excess answers may rise, as in the verdict on a bank.

Without a margin, every other bank that is as good as the one in use is refused by chance. In
`benchmarks.refresh_evaluation` this is the widest of the margins that were compared at which real
queries let no more worse banks pass than the skewness of N_10 did, on the tasks of its choice.
"""

COMPARED = ("raw", "old", "new")
"""The biases that an evaluation compares: none, those in use, and those of the plan."""


@dataclass(frozen=True)
class RefreshEvaluation:
    """The result of a refresh evaluation."""

    items: int
    """Number of rows in the sample."""
    queries: int
    """Number of queries, none of which the biases are fitted on."""
    real_queries: bool
    """Whether they are real queries of the application; else a part of the new bank is held out."""
    excess_answers: dict[str, float]
    """Excess answers taken by hubs, as a share of all, under `raw`, `old` and `new` biases."""
    noise: dict[str, float]
    """The standard errors of the changes in excess answers from `raw` and from `old` to `new`
    biases, by resampling the queries.
    """
    skewness: dict[str, float]
    """The skewness of N_10 under `raw`, `old` and `new` biases. It decides nothing: a few items
    that are far out make it jump.
    """
    overlap: float
    """Mean share of the old ten best that are among the new ten best."""
    measure: str
    """What is measured on labelled queries, such as "R@1"."""
    measured_rows: int
    """Number of rows among which it is measured; 0 without labels."""
    measured: dict[str, float]
    """The measure of the labelled queries; empty without labels."""
    gains: dict[str, Interval]
    """The 95% intervals of what `new` gains in the measure over the others; empty without labels."""
    objection: str
    """The reason not to use the new biases; empty if there is none."""


class ReducedSample(NamedTuple):
    """Sampled rows as a fit compares them."""

    layout: Layout
    vectors: Floats
    """(n, d), as users see them."""
    items: Floats
    """(n, d) or wider, for inner products."""
    kinds: Kinds | None
    """The means of kinds, with which all biases are compared, also none; None without kinds."""
    numbers: KindNumbers | None
    """(n,), the kinds of the rows."""

    @classmethod
    def of(
        cls,
        layout: Layout,
        vectors: Floats,
        kinds: Kinds | None = None,
        numbers: KindNumbers | None = None,
    ) -> ReducedSample:
        """Return rows (n, d) with the means of kinds, and with theirs, (n,)."""
        return cls(layout, vectors, reduced_items(layout, vectors, kinds, numbers), kinds, numbers)

    def reduced(self, queries: Floats) -> Floats:
        """Return queries (m, d) for inner products with `items`."""
        return reduced_queries(self.layout, queries, self.kinds)


def judge(
    sample: ReducedSample,
    old: RefreshPlan,
    new: RefreshPlan,
    labelled: LabelledQueries | None = None,
    queries: Floats | None = None,
    others: Iterable[tuple[Floats, KindNumbers | None]] = (),
) -> RefreshEvaluation | None:
    """Evaluate old and new biases on a sample of n rows of the gallery.

    labelled: m ≥ 2 queries with right rows in the sample. queries: (m, d) real ones of the application.
    Those in neither bank are searched, if they are 20; else a fifth of the new bank, and both biases
    are fitted without it. Labels decide if given, else the excess answers taken by hubs. Return None
    if there is too little data: under 50 held-out queries, or under 200 items. others: parts (k, d) of
    the other rows with their kinds, among which labelled queries are measured too; none where searches
    have a gate.
    """
    items = sample.items
    if len(items) < FEWEST_ITEMS:
        return None

    searched = _apart_from((old, new), queries) if queries is not None else None
    has_real_queries = searched is not None
    if searched is None:
        searched = _held_out(new)
    if searched is None:
        return None

    fits = [fit for plan in (old, new) if (fit := _fit_without(sample, plan, searched))]
    if len(fits) < 2:
        return None

    biases = _compared_biases(len(items), fits)
    gates = [fit.gate for fit in fits]
    outcome = assess(sample.reduced(searched), items, biases).gated(gates)
    skews = [skewness(k_occurrence(answers, len(items))) for answers in outcome.retrieved]
    noise = noise_of_change(outcome, len(items), np.random.default_rng(0))
    excess = _by_name(excess_answers_of(outcome, len(items)), digits=5)
    noise_of = _by_name(noise, digits=5)
    _, old_answers, new_answers = outcome.retrieved

    measured: dict[str, float] = {}
    gains: dict[str, Interval] = {}
    measure = R_AT_1
    measured_rows = 0
    if labelled is not None:
        sent = labelled.as_sent()
        measure = sent.measure
        values, measured_rows = _labelled_values(sample, fits, sent, others)
        measured, gains = _gains_of(values, sent.weights)

    return RefreshEvaluation(
        items=len(items),
        queries=len(searched),
        real_queries=has_real_queries,
        excess_answers=excess,
        noise=noise_of,
        skewness=_by_name(skews, digits=3),
        overlap=round(_mean_overlap(old_answers, new_answers), 4),
        measure=str(measure),
        measured_rows=measured_rows,
        measured=measured,
        gains=gains,
        objection=_objection(excess, noise_of, measured, measure),
    )


def _held_out(new: RefreshPlan) -> Floats | None:
    """Return one query of a fifth of the new bank's groups, drawn at random; None if these are too
    few.
    """
    bank = new.bank.queries.of_groups(new.bank.queries.vectors)
    order = np.random.default_rng(0).permutation(len(bank))
    held_out = bank[order[: min(MOST_QUERIES, int(HELD_OUT * len(bank)))]]
    return held_out if len(held_out) >= FEWEST_HELD_OUT else None


def _apart_from(plans: Sequence[RefreshPlan], queries: Floats) -> Floats | None:
    """Return the queries that are in no bank, at most 2,000; None if they are too few."""
    banks = [plan.bank.queries.vectors for plan in plans]
    rows: Floats = as_queries(as_floats(queries))
    others = rows[not_among(rows, *banks)]
    if len(others) < FEWEST_QUERIES:
        return None
    return others[np.random.default_rng(0).permutation(len(others))[:MOST_QUERIES]]


def _by_name(figures: Iterable[float], *, digits: int) -> dict[str, float]:
    """Return rounded figures of COMPARED, in their order, by these names."""
    return {
        name: round(float(figure), digits) for name, figure in zip(COMPARED, figures, strict=False)
    }


def _mean_overlap(old_answers: npt.NDArray[np.int32], new_answers: npt.NDArray[np.int32]) -> float:
    """Return the mean share of each query's old answers that are among its new ones."""
    shares = [
        len(np.intersect1d(old_ten, new_ten)) / len(old_ten)
        for old_ten, new_ten in zip(old_answers, new_answers, strict=True)
    ]
    return float(np.mean(shares))


def _gains_of(
    values: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]
) -> tuple[dict[str, float], dict[str, Interval]]:
    """Return the means, and the gains of `new` over the others, of the values (3, m) of COMPARED.

    weights: (m,), how often users send each query.
    """
    raw, old, new = values
    means = np.average(values, axis=1, weights=weights).round(4).tolist()
    gains = {
        "raw": paired_difference(raw, new, weights),
        "old": paired_difference(old, new, weights),
    }
    return dict(zip(COMPARED, means, strict=True)), gains


class FitWithout(NamedTuple):
    """The biases of a plan, from the queries that are not held out."""

    bias: Floats
    """(n,), of the sample."""
    gate: npt.NDArray[np.bool_] | None
    """(n,) which of its items the gate lets through; None without a gate."""
    bias_of: Callable[[Floats, KindNumbers | None], Floats]
    """Computes the biases of other rows (k, d) with these kinds."""


def _fit_without(sample: ReducedSample, plan: RefreshPlan, held_out: Floats) -> FitWithout | None:
    """Return the fit on the other queries, without near copies of those held out; None if they are too
    few.
    """
    bank = plan.bank.queries
    others = not_among(bank.vectors, held_out)
    if bank.groups is not None:
        others = ~np.isin(bank.groups, bank.groups[~others])
    if others.sum() < FEWEST_HELD_OUT:
        return None

    correction = Correction.fit(
        sample.layout,
        plan.estimator,
        bank.take(others),
        gallery=sample.vectors if plan.estimator.needs_gallery else None,
        target_bank=plan.bank.targets,
        kinds=sample.kinds,
        gallery_kinds=sample.numbers,
    )
    strength = np.float32(plan.strength)

    def bias_of(vectors: Floats, numbers: KindNumbers | None) -> Floats:
        return correction.centred(vectors, kinds=numbers) * strength

    bias = bias_of(sample.vectors, sample.numbers)
    gate = activated_by(plan.gate, correction.fitted.bank.vectors, sample.items)
    return FitWithout(bias, gate, bias_of)


def _compared_biases(count: int, fits: Sequence[FitWithout]) -> list[Floats]:
    """Return the biases (n,) of the sample in the order of COMPARED: none, then those of the fits."""
    return [np.zeros(count, np.float32), *(fit.bias for fit in fits)]


def _labelled_values(
    sample: ReducedSample,
    fits: Sequence[FitWithout],
    labelled: LabelledQueries,
    others: Iterable[tuple[Floats, KindNumbers | None]],
) -> tuple[npt.NDArray[np.float64], int]:
    """Return the measure of labelled queries under each of COMPARED, (3, m), and among how many rows.

    others: as of `judge`.
    """
    sent = sample.reduced(labelled.queries)
    biases = _compared_biases(len(sample.items), fits)
    right = labelled.right
    measure = labelled.measure
    if not others:
        outcome = assess(sent, sample.items, biases, right, measure)
        return outcome.gated([fit.gate for fit in fits]).values, len(sample.items)

    row_counts = [len(sample.items)]

    def others_with_biases() -> Iterator[tuple[Floats, list[Floats]]]:
        for vectors, numbers in others:
            row_counts.append(len(vectors))
            raw = np.zeros(len(vectors), np.float32)
            fitted = [fit.bias_of(vectors, numbers) for fit in fits]
            items = reduced_items(sample.layout, vectors, sample.kinds, numbers)
            yield items, [raw, *fitted]

    values = values_among_all(sent, sample.items, biases, right, others_with_biases(), measure)
    return values, sum(row_counts)


def _objection(
    excess: dict[str, float],
    noise: dict[str, float],
    measured: dict[str, float],
    measure: Measure,
) -> str:
    """Return why the new biases are worse; empty if they are not.

    Labels leave no margin for noise: in doubt, the biases in use stay.
    """
    for name, other in (("old", "the biases in use"), ("raw", "no correction")):
        if measured and measured["new"] < measured[name]:
            return (
                f"{measure} falls from {measured[name]:.3f} with {other} to {measured['new']:.3f}"
            )
        if not measured and excess["new"] > excess[name] + NOISE * noise[name]:
            return (
                f"excess answers taken by hubs rise from {excess[name]:.1%} with {other} to "
                f"{excess['new']:.1%}"
            )
    return ""
