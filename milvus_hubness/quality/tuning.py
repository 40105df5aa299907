"""Tuning: decide whether to correct, and with which estimator.

The decision is made on queries that the biases have not seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.defaults import FEWEST_QUERIES
from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.basics.texts import in_points, percent, points
from milvus_hubness.correction.banks.bank import QueryBank, Vectors, as_vectors
from milvus_hubness.correction.estimators import DEFAULT_ESTIMATOR, Blend, Estimator
from milvus_hubness.correction.estimators.base import (
    expect_estimator,
    require_gallery,
    score_spread,
)
from milvus_hubness.correction.estimators.blend import default_blend_in_full
from milvus_hubness.correction.kernels.checks import whole_number
from milvus_hubness.correction.kernels.policy import prefer_torch
from milvus_hubness.correction.kernels.rows import as_queries, scored
from milvus_hubness.correction.kernels.token_rows import is_token_rows
from milvus_hubness.correction.kinds import LEAST_PREFERENCE, GalleryKinds
from milvus_hubness.correction.near_copies import (
    NearCopies,
    directions_of,
    groups_at,
    near_copies,
    with_groups,
)
from milvus_hubness.errors import InvalidInput
from milvus_hubness.quality import measures, outcomes, retrieval
from milvus_hubness.quality.labelled import LabelledQueries
from milvus_hubness.quality.prior_weights import Preference, PriorTrials
from milvus_hubness.quality.right_items import Grades, Positives
from milvus_hubness.quality.trial_table import SHOWN_ROWS, Row, TrialTable, in_words, rows_of
from milvus_hubness.quality.trials import (
    STRENGTHS,
    Trial,
    activated_by,
    full_trial,
    merits_of,
    search,
    search_labelled,
    sweep,
)
from milvus_hubness.quality.verdict import (
    LITTLE_EXCESS,
    Figures,
    Finding,
    examine,
    expected_gain,
    findings,
)

MEMBERS = 8
"""Trials that are mixed into one."""
EXCESS_WEIGHT = 0.3
"""Weight of the excess answers taken by hubs; the mean reciprocal rank, or the measure, has 1."""
GATE_MARGIN = 0.01
"""Lead in that score that a gate needs over the trials without one."""
FOLDS = 5

# The numbers below decide the verdict with labels, and were chosen on the tasks of
# `python -m benchmarks.tune`, which prints what it is worth on 20 random splits of their pairs.
PRIOR_GAIN = 0.04
"""Mean of the gain in R@1 before anything is measured. Other measures, whose gains are of the same
kind, have it too."""
PRIOR_SPREADS = ((0.9, 0.04), (0.1, 0.2))
"""Its standard deviations, each with its share: most collections gain about as much, a few far more.
The second is no result of these tasks: it lets pairs prove gains as large as some collections have."""
FALL_TO_TRY = 0.05
"""Fall of the excess answers taken by hubs, as a share of them, below which a loss is expected."""
WEAK = 0.6
"""Strength below which the verdict is "apply weakly"."""

SURE = 1.96
"""Standard errors by which a gain has to exceed 0, so that a 95% interval does not hold 0."""
LIKELY = 0.84
"""Standard errors more, so that this is so in four of five samples of pairs."""
MOST_PAIRS = 100_000
"""Number of pairs beyond which nobody collects them."""

Verdict = Literal["apply", "apply weakly", "not proven", "leave it alone"]
LEAVE: Verdict = "leave it alone"
NOT_PROVEN: Verdict = "not proven"
VERDICTS: tuple[Verdict, ...] = (LEAVE, NOT_PROVEN, "apply weakly", "apply")
"""From the one against a correction to the one for it."""
Values = npt.NDArray[np.float64]


class Judgement(NamedTuple):
    """A verdict with its reason."""

    verdict: Verdict
    strength: float
    """The strength to apply; 0 to leave it alone."""
    reason: str
    interval: measures.Interval | None
    """The gain in the measure over the raw search; None without labels."""
    sentence: str = ""
    """What to expect, in one sentence for people who do not know the measures."""


def pick(trials: Sequence[Trial], excess: Values, merits: Values, weights: Values) -> list[Trial]:
    """Return the `MEMBERS` best trials, all with the same gate, or none.

    excess: (n_trials,) the excess answers taken by hubs. merits: (n_trials, n_queries), as
    `merits_of` has them. weights: (n_queries,).
    """
    # The excess answers, which need no labels, keep few labels from deciding by chance.
    shares = weights / weights.sum()
    scores = merits @ shares - EXCESS_WEIGHT * excess
    is_gated = np.array([trial.gate is not None for trial in trials])
    chosen = _best(scores, ~is_gated)
    if is_gated.any():
        with_gate = _best(scores, is_gated)
        gain = merits[with_gate].mean(0) - merits[chosen].mean(0)
        # A gate has to be better by a margin and by two standard errors, as it limits what searches
        # can do and sends each query twice.
        margin = max(GATE_MARGIN, 2 * _variance_of_mean(gain, weights) ** 0.5)
        if scores[with_gate].mean() - scores[chosen].mean() > margin:
            chosen = with_gate
    return [trials[number] for number in chosen]


def _best(scores: Values, among: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return the numbers of the `MEMBERS` best of some trials, in their order."""
    numbers = np.flatnonzero(among)
    by_score = np.argsort(-scores[numbers], kind="stable")
    return np.sort(numbers[by_score[:MEMBERS]])


def mix(trials: Sequence[Trial]) -> Trial:
    """Return the mean of trials with the same gate, or none, as one trial.

    It is their mean strength times a Blend of weights s_e / Σ s.
    """
    # An estimator may be among the trials at several strengths: its shares add up.
    shares: dict[Estimator, float] = {}
    for trial in trials:
        shares[trial.estimator] = shares.get(trial.estimator, 0.0) + trial.strength
    total = sum(shares.values())
    estimator: Estimator
    if len(shares) == 1:
        [estimator] = shares
    else:
        weights = tuple(share / total for share in shares.values())
        estimator = Blend(tuple(shares), weights, strength=1.0)

    mean_bias = np.mean([trial.bias for trial in trials], axis=0, dtype=np.float64)
    bias = np.asarray(mean_bias, np.float32)
    return trials[0]._replace(estimator=estimator, strength=total / len(trials), bias=bias)


def _variance_of_mean(values: Values, weights: Values) -> float:
    """Return the variance of the weighted mean of independent values (n,)."""
    shares = weights / weights.sum()
    return float(shares**2 @ (values - shares @ values) ** 2)


def judge_labelled(
    raw: Values,
    cross_fitted: Values,
    strength: float,
    fall: float,
    weights: Values | None = None,
    *,
    measure: retrieval.Measure = retrieval.R_AT_1,
    seed: int = 0,
) -> Judgement:
    """Return the verdict with labels: "leave it alone" unless the expected gain in the measure is
    above 0, and "not proven" where the interval of the measured one holds 0.

    raw, cross_fitted: (n_queries,) the measure of each query. strength: of the mix. fall: of the
    excess answers taken by hubs, as a share of them. weights: (n_queries,) above 0; None for equal
    ones.
    """
    n = len(raw)
    if weights is None:
        weights = np.ones(n)
    interval = measures.paired_difference(raw, cross_fitted, weights, seed=seed)

    # The measured gain meets a prior, positive if hubs lose answers. The variance is raised by 1/n,
    # because a few queries that all agree would otherwise seem certain; n counts queries of equal
    # weight.
    effective = float(weights.sum() ** 2 / (weights**2).sum())
    variance = _variance_of_mean(cross_fitted - raw, weights) + 1 / effective**2
    prior = PRIOR_GAIN if fall > FALL_TO_TRY else -PRIOR_GAIN
    expected = _posterior_mean(interval.estimate, variance, prior)

    result = f"cross-validated on {n} labelled queries, {measure} changes by {points(interval)}"
    if expected <= 0:
        sentence = f"expect no gain of {measure}, as {n:,} pairs show"
        return Judgement(LEAVE, 0.0, f"{result}: expect no gain", interval, sentence)

    # The prior is that of usual collections: where this one is none, the pairs know better.
    cautious = min(max(expected, interval.low), interval.high)
    gain = f"expect {in_points(cautious)} points of {measure}"
    if interval.low <= 0:
        sentence = (
            f"{gain}; {n:,} pairs cannot tell it from 0, {_pairs_needed(n, variance, expected)}"
        )
        reason = f"{result}; with the usual gain as prior, {sentence}"
        return Judgement(NOT_PROVEN, strength, reason, interval, sentence)

    sentence = f"{gain}, cautiously: {n:,} pairs show {points(interval)}"
    verdict: Verdict = "apply weakly" if strength < WEAK else "apply"
    return Judgement(verdict, strength, result, interval, sentence)


def _posterior_mean(measured: float, variance: float, prior: float) -> float:
    """Return the gain to expect after one was measured with this variance. prior: its mean before."""
    shares, spreads = np.array(PRIOR_SPREADS).T
    variances = spreads**2
    totals = variance + variances
    # Under each spread, the mean of both weighted by their precisions.
    means = (measured * variances + prior * variance) / totals
    log_odds = np.log(shares) - np.log(totals) / 2 - (measured - prior) ** 2 / (2 * totals)
    odds = np.exp(log_odds - log_odds.max())
    return float(odds @ means / odds.sum())


def _pairs_needed(count: int, variance: float, expected: float) -> str:
    """Return how many pairs would tell a gain from 0 in four of five samples, in words.

    variance: of the mean gain of `count` pairs.
    """
    # The variance of a mean falls as the number of pairs rises.
    needed = count * variance * ((SURE + LIKELY) / expected) ** 2
    if needed > MOST_PAIRS:
        return f"nor would {MOST_PAIRS:,}"
    # Two digits: the estimate is not worth more.
    unit = 10 ** max(0, math.floor(math.log10(needed)) - 1)
    return f"about {math.ceil(needed / unit) * unit:,} would"


def judge_unlabelled(figures: Figures) -> Judgement:
    """Return the verdict without labels: "apply" unless a finding fails.

    A narrow bank, or one for a small gallery, is applied with half the strength. The thresholds are
    those of `quality.verdict`.
    """
    shown = findings(figures)
    failed = [finding for finding in shown if finding.fails]
    # A bank of items fails for further reasons, whose remedies would mislead.
    if failed and failed[0].name == "kind":
        failed = failed[:1]
    if failed:
        reason = "; ".join(map(str, failed))
        return Judgement(LEAVE, 0.0, reason, None, str(failed[0]))

    reason = "; ".join(
        str(finding)
        for finding in shown
        if finding.name in ("agreement", "two views", "hubs", "log")
    )
    gain = f"{expected_gain(figures.excess):+.1f} points of R@1"
    hubs = f"hubs take {percent(figures.excess)} of the answers beyond chance"
    if figures.narrow:
        reason = f"{reason}: {_narrow_words(figures)}, so half the strength"
        sentence = f"expect less than {gain}: {hubs}, but {_narrow_words(figures)}"
        return Judgement("apply weakly", 0.5, reason, None, sentence)
    if figures.is_small:
        doubt = (
            f"{figures.items:,} items are too few to see whether the bank is of queries or of other "
            "items, so half the strength until real queries (--queries) or labelled pairs show it"
        )
        return Judgement(NOT_PROVEN, 0.5, f"{reason}: {doubt}", None, doubt)

    sentence = f"expect about {gain}, as other collections gained in the mean where {hubs}"
    if figures.excess < LITTLE_EXCESS:
        sentence = f"expect little: {hubs} only"
    return Judgement("apply", 1.0, reason, None, sentence)


def _narrow_words(figures: Figures) -> str:
    if figures.real_queries:
        return (
            f"{figures.apart:.1%} of the variance is between the bank and the real queries, which are of "
            "other topics"
        )
    return f"the bank covers {figures.cover:.0%} of the gallery evenly, as one of few topics does"


FEWEST_IN_BANK = 4
"""Groups of near copies in a bank below which its halves are too small for anything to be said."""


def judge_bank(
    bank: QueryBank,
    items: Vectors,
    *,
    queries: Vectors | None = None,
    kinds: GalleryKinds | None = None,
    seed: int = 0,
) -> Judgement:
    """Return the verdict without labels on a bank for items (n, d), n ≥ 1, in some seconds.

    queries: (m, d) real ones, apart from the bank; by default half of the bank, which is then not
    fitted. kinds: those of the items, with whose means searches compare.
    """
    items = require_gallery(bank, items, "the verdict")
    _expect_no_kinds_of_tokens(items, kinds)
    if queries is None:
        log = with_groups(bank, items, seed=seed)
        return _judged_alone(figures_of(log, items, kinds=kinds, seed=seed), log)

    queries = _as_queries_of(bank, queries)
    copies = near_copies(bank, items, seed=seed)
    examined = apart(copies, queries)
    figures = figures_of(
        examined, items, queries=queries, whole=copies.bank, kinds=kinds, seed=seed
    )
    return _judged_alone(figures, copies.bank)


def figures_of(
    bank: QueryBank,
    items: Vectors,
    *,
    queries: Vectors | None = None,
    whole: QueryBank | None = None,
    kinds: GalleryKinds | None = None,
    seed: int = 0,
) -> Figures | None:
    """Return what a bank with groups shows of the default method; None if they are too few.

    whole: the log that the bank is a part of, if it is. kinds: as in `examine`.
    """
    if len(bank.condensed) < FEWEST_IN_BANK:
        return None
    return examine(
        bank, items, default_biases, queries=queries, whole=whole, kinds=kinds, seed=seed
    )


def _judged_alone(figures: Figures | None, bank: QueryBank) -> Judgement:
    """Return the verdict without labels. bank: with groups."""
    if figures is not None:
        return judge_unlabelled(figures)
    reason = (
        f"a bank of {len(bank.condensed)} distinct queries, near copies counted once, cannot be "
        "judged: collect more"
    )
    return Judgement(LEAVE, 0.0, reason, None, reason)


LEFT = 0.5
"""Share of a bank's groups that has to be left for it to stand for the whole."""


def apart(copies: NearCopies, queries: Vectors) -> QueryBank:
    """Return the bank without near copies of these queries (n, d), for a trial with them.

    Raises InvalidInput if nothing is left.
    """
    bank = copies.bank
    near = copies.near(queries)
    if near.mean() <= 1 - LEFT:
        return bank.take(~near[bank.groups])

    # As many queries as a log has are near most of its groups. What is left without these is
    # another bank, of the questions that hardly anyone has; so only the queries themselves leave.
    return bank_before(bank, queries)


def bank_before(bank: QueryBank, queries: Vectors) -> QueryBank:
    """Return the bank before these queries (n, d) were last sent, for a trial with them.

    Raises InvalidInput if that leaves nothing.
    """
    rest = bank.without(queries)
    if rest is None:
        raise InvalidInput(
            "the bank holds nothing but the queries: a bias must not be judged by its own bank"
        )
    return rest


def default_biases(bank: QueryBank, items: Vectors) -> Vectors:
    """Return the biases of the default Blend at full strength."""
    # Scores of several vectors take long: the fit and its biases share them.
    items = scored(items, bank.vectors)
    return default_blend_in_full(bank, items).gallery_biases(bank, items)


MOST_ITEMS = 20_000
"""Items on which methods are tried, unless there are more positives."""
MOST_QUERIES = 5_000
"""Queries with which methods are tried."""
MOST_OF_TOKENS = (4_000, 1_000)
"""Items and queries in place of these if each has several vectors, of which a score takes long."""


class KindComparison(NamedTuple):
    """Searches without the kinds of the items and with them."""

    source: str
    """The field of the kinds, or "auto"."""

    chosen: bool
    """Whether the choice is to compare by kind."""

    reason: str

    gain: measures.Interval | None
    """Of the choice with kinds over the one without, in the measure, cross-validated on the same
    folds, with its 95% interval; None without labels."""

    preference: float
    """How much nearer queries are to one kind than to another, see `Kinds.preference`."""

    rows: tuple[Row, ...]
    """The raw search; the default method, with the agreement of the bank's halves and in full; then
    the means of kinds alone, and the default with them, in both ways."""


@dataclass(frozen=True)
class Tuning(TrialTable):
    """The trials, and the decision."""

    verdict: Verdict

    choice: Estimator | None
    """The estimator to apply; None for "leave it alone"."""

    strength: float
    """The share of it to apply; 0 for "leave it alone"."""

    gate: int | None
    """The k of the `DynamicGate` to apply; None corrects every query, as always without labels."""

    reason: str

    interval: measures.Interval | None
    """The cross-validated gain in the measure; None without labels."""

    findings: tuple[Finding, ...]
    """What the bank shows, which decides without labels and informs with them; none for a bank of
    under 40 queries."""

    candidate: Estimator
    """The estimator that would apply but for the verdict: the mix of the best trials, or the
    default Blend without labels."""

    rows: tuple[Row, ...]
    """The raw search and the trials, best first."""

    labelled: bool

    measure: str
    """What decides with labels, such as "R@1"."""

    demand: float | None
    """Share of the pairs, by weight, whose answers are the 1% of items with most pairs; None
    without labels."""

    bank_size: int

    items: int
    """Number of items on which the methods were tried."""

    queries: int
    """Number of queries with which they were tried."""

    real_queries: int
    """Number of these that the caller gave; 0 if half of the bank was not fitted instead."""

    seed: int

    log: QueryBank = field(repr=False, compare=False)
    """The bank with the groups of its near copies; not in `to_dict`."""

    cosine: float = field(repr=False, compare=False)
    """The smallest one between near copies of a query, 1 for repeats only; not in `to_dict`."""

    figures: Figures | None = field(repr=False, compare=False)
    """What the bank shows of the default method; None for a bank of under 40 queries. `to_dict` has
    the findings that follow."""

    bias: Vectors | None = field(default=None, repr=False, compare=False)
    """(n_items,) that of the candidate at strength 1, of all items; None if it was not computed. Not in
    `to_dict`."""

    prior_weight: float | None = None
    """The weight of the prior for the jobs, in units of the spread of scores: the best one divided
    by the strength, by which searches multiply it. None without a prior, and without labels, which
    alone can choose it."""

    left_out: tuple[str, ...] = ()
    """What of the judgements is left out, a sentence for each reason."""

    remarks: tuple[str, ...] = ()
    """What the user should know of the items that were tried and of the kinds, a sentence each."""

    sentence: str = ""
    """What to expect, in one sentence for people who do not know the measures."""

    kinds: KindComparison | None = None
    """The comparison with kinds, of which `choice` and `rows` follow from the better side; None if
    there are none to compare with."""

    @property
    def kind(self) -> str:
        """What a job names for the chosen kinds: a field, or "auto"; empty for none."""
        return self.kinds.source if self.kinds is not None and self.kinds.chosen else ""

    @property
    def why(self) -> str:
        """The reason without the sentence, for output that has both."""
        if not self.sentence:
            return self.reason
        return self.reason.replace(f", {self.sentence}", ", this is what to expect")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, fit for JSON; estimators as in `estimators.to_dict`."""
        of_the_bank = {"log", "cosine", "figures", "bias"}
        plain = {
            entry.name: measures.as_plain(getattr(self, entry.name))
            for entry in fields(self)
            if entry.name not in of_the_bank
        }
        return {**plain, "why": self.why}

    def _repr_html_(self) -> str:
        """Return the verdict and the best trials for the cell of a notebook. Jupyter calls this."""
        chosen = "" if self.choice is None else in_words(self.choice)
        lines = (
            f"{self.sentence[:1].upper()}{self.sentence[1:]}",
            chosen and f"Method: {chosen}, at strength {self.strength:.2f}",
            f"Why: {self.why}",
        )
        return self.html(self.verdict, lines, SHOWN_ROWS)


def tune(
    bank: QueryBank | npt.ArrayLike,
    gallery: npt.ArrayLike,
    *,
    target_bank: QueryBank | npt.ArrayLike | None = None,
    queries: npt.ArrayLike | LabelledQueries | None = None,
    preference: Preference | None = None,
    kinds: GalleryKinds | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Tuning:
    """Try every method on a gallery (n_items, d), and decide whether one is worth applying.

    queries: (n, d), n ≥ 20, or labelled ones, each counted as often as it was sent; by default half of
    the bank, which is then not fitted. With labels their measure decides, else the findings of
    `quality.verdict`. preference: the values of a prior, whose weight is chosen with the method if
    there are labels. kinds: those of the gallery, with whose means every method is tried too;
    the better side is chosen, by the measure or, without labels, by the verdict, if the gap
    between the kinds is real. Near copies in the bank share the weight of one query. `queries` that are
    in the bank are left out of the fit that these judge, once each. A gallery beyond 20,000 items
    and queries beyond 5,000 are sampled. Equal seeds give equal results. Raises InvalidInput,
    BankTooSmall, DimensionMismatch, NonFiniteVectors.
    """
    prefer_torch()
    bank = QueryBank.of(bank)
    rng = np.random.default_rng(whole_number("seed", seed, at_least=0))
    items = require_gallery(bank, gallery, "tune")
    _expect_no_kinds_of_tokens(items, kinds)
    targets = None if target_bank is None else QueryBank.of(target_bank)
    if targets is not None:
        bank.expect_dim(targets.dim, "the target bank")
    if targets is not None and kinds is not None:
        raise InvalidInput(
            "a target bank has no kinds, with whose means its items would be compared: leave the "
            "target bank out, or the kinds"
        )
    pairs = None
    demand = None
    real: Vectors | None = None
    if isinstance(queries, LabelledQueries):
        pairs = _drawn_pairs(bank, queries.as_sent(), len(items), rng)
        demand = _demand(pairs, len(items))
        real = pairs.queries
    else:
        bank.require(at_least=2 * FEWEST_QUERIES)
        if queries is not None:
            real = _drawn_queries(bank, queries, rng)
    n_items = len(items)
    all_items, all_pairs = items, pairs
    items, pairs, numbers = _some_items(items, pairs, rng)
    whole = None if all_pairs is None else Whole(all_items, all_pairs, targets, numbers)
    # Kinds and priors are tried on the part alone, and several vectors take too long.
    judges_all = kinds is None and preference is None and not is_token_rows(items)
    drawn = ""
    if whole is not None and pairs is not None:
        drawn = drawn_words(whole, items, pairs, judges_all=judges_all)

    kinds = None if kinds is None else kinds.take(numbers)
    preference = None if preference is None else preference.take(numbers)

    progress("comparing the queries of the bank", 0, 1)
    copies = near_copies(bank, items, seed=seed)
    if real is None:
        fitted, searched = halves(copies.bank, rng)
        examined = copies.bank
    else:
        searched = real
        examined = apart(copies, real)
        # Labels say what a query is worth as users send it: with near copies in the log, or without.
        fitted = examined if pairs is None else bank_before(copies.bank, real)

    def figures_with(kinds: GalleryKinds | None) -> Figures | None:
        if len(bank) < 2 * FEWEST_QUERIES:
            return None
        progress("judging the bank", 0, 1)
        return figures_of(examined, items, queries=real, whole=copies.bank, kinds=kinds, seed=seed)

    # All trials and searches read the same scores, which take long if rows have several vectors.
    items = scored(scored(items, fitted.vectors), searched)
    side = _Side(items, fitted, searched, targets, pairs)
    judging = _Judging(
        fold=None if pairs is None else folds(pairs.queries, copies.cosine, seed),
        preference=preference,
        log=copies.bank,
        whole=whole if drawn and judges_all else None,
        seed=seed,
    )
    best = _tried(side, None, judging, figures_with(None), progress, in_full=kinds is not None)
    comparison = None
    if kinds is not None:
        without = best
        compared = _tried(
            side.less(kinds),
            without.swept.outcome,
            judging,
            figures_with(kinds),
            progress,
            in_full=True,
        )
        comparison = _comparison(kinds, without, compared, copies.bank, seed)
        best = compared if comparison.chosen else without

    chosen = best.decision.chosen
    judged = best.decision.judged
    bias = best.decision.bias
    # The candidate stays in the result either way: a user may overrule the verdict.
    applies = judged.verdict != LEAVE
    return Tuning(
        **judged._asdict(),
        choice=chosen.estimator if applies else None,
        gate=chosen.gate if applies else None,
        findings=tuple(findings(best.figures)) if best.figures else (),
        candidate=chosen.estimator,
        rows=_table(best, len(items), pairs, seed),
        labelled=pairs is not None,
        measure=str(retrieval.R_AT_1 if pairs is None else pairs.measure),
        demand=demand,
        bank_size=len(bank),
        items=len(items),
        queries=len(searched),
        real_queries=0 if real is None else len(searched),
        seed=seed,
        log=copies.bank,
        cosine=copies.cosine,
        figures=best.figures,
        bias=bias if bias is not None and len(bias) == n_items else None,
        prior_weight=best.decision.prior_weight if applies else None,
        remarks=(drawn,) if drawn else (),
        kinds=comparison,
    )


@dataclass(frozen=True)
class Comparison(TrialTable):
    """The raw search and some methods, in the order of the call."""

    rows: tuple[Row, ...]
    measure: str

    def _repr_html_(self) -> str:
        """Return all rows for the cell of a notebook. Jupyter calls this."""
        return self.html("Comparison", (), len(self.rows))


def compare(
    methods: Sequence[Estimator],
    gallery: npt.ArrayLike,
    queries: npt.ArrayLike,
    bank: QueryBank | npt.ArrayLike,
    positives: Positives | None = None,
    *,
    target_bank: QueryBank | npt.ArrayLike | None = None,
    grades: Grades | None = None,
    measure: str | retrieval.Measure = retrieval.R_AT_1,
    seed: int = 0,
) -> Comparison:
    """Return what each method does to a gallery (n_items, d), as the table of `tune` has it.

    Nothing is tried or chosen but the methods as they are given, nor are items drawn. queries: (n,
    d), n ≥ 20, of which 5,000 are drawn if there are more; those that are in the bank are left out of
    the fit. positives, grades, measure: as in `LabelledQueries.of`; without positives the table has
    excess answers only. Equal seeds give equal results. Raises as `tune` does.
    """
    if isinstance(methods, str | Estimator) or None in methods:
        raise InvalidInput(f"methods must be a list such as [NNN(), CSLS()], not {methods!r}")
    for method in methods:
        expect_estimator(method)
    bank = QueryBank.of(bank)
    chosen_measure = retrieval.Measure.of(measure)
    rng = np.random.default_rng(whole_number("seed", seed, at_least=0))
    items = require_gallery(bank, gallery, "compare")
    pairs = None
    if positives is not None:
        labelled = LabelledQueries.of(queries, positives, grades, measure=chosen_measure)
        pairs = _drawn_pairs(bank, labelled, len(items), rng)
        real = pairs.queries
    else:
        real = _drawn_queries(bank, queries, rng)

    fitted = bank_before(bank, real)
    items = scored(scored(items, fitted.vectors), real)
    fits = [method.fit(fitted, gallery=items, target_bank=target_bank) for method in methods]
    trials = [Trial(fit.estimator, 1.0, fit.bias(items)) for fit in fits]
    outcome = search_labelled(trials, pairs, items) if pairs else search(trials, real, items)
    by_kind = [False] * (len(trials) + 1)
    rows = rows_of([None, *trials], by_kind, outcome, len(items), pairs, seed)
    return Comparison(tuple(rows), str(chosen_measure))


class _Side(NamedTuple):
    """The vectors of a tuning as searches compare them: as they are, or less the means of kinds."""

    items: Vectors
    fitted: QueryBank
    """What the trials are fitted on."""
    searched: Vectors
    targets: QueryBank | None
    pairs: LabelledQueries | None
    with_kinds: bool = False

    def less(self, kinds: GalleryKinds) -> _Side:
        """Return the vectors less the means of their kinds."""
        of_queries = kinds.centred_queries
        pairs = self.pairs
        return self._replace(
            items=kinds.centred_items(self.items),
            fitted=replace(self.fitted, vectors=of_queries(self.fitted.vectors)),
            searched=of_queries(self.searched),
            pairs=None if pairs is None else replace(pairs, queries=of_queries(pairs.queries)),
            with_kinds=True,
        )

    def search(self, trials: Sequence[Trial]) -> outcomes.Outcome:
        """Return the outcome without a bias, then that of each trial."""
        if self.pairs is not None:
            return search_labelled(trials, self.pairs, self.items)
        return search(trials, self.searched, self.items)


class _Judging(NamedTuple):
    """What all trials of a tuning are judged with."""

    fold: npt.NDArray[np.int64] | None
    """(n_queries,) of the pairs; None without pairs."""
    preference: Preference | None
    log: QueryBank
    """The whole bank, with groups."""
    whole: Whole | None
    """That of which the methods are tried on a part; None if they are tried on all items."""
    seed: int


class Swept(NamedTuple):
    """The trials of a bank on a gallery, and what they find."""

    trials: Sequence[Trial]
    outcome: outcomes.Outcome
    """Of the raw search, then of the trials."""
    bank: QueryBank
    """What the trials were fitted on."""
    items: Vectors
    """The gallery, (n, d)."""

    @property
    def excess(self) -> Values:
        """(1 + n_trials,) the excess answers taken by hubs in the raw search, then in the trials."""
        return outcomes.excess_answers_of(self.outcome, len(self.items))


class _Tried(NamedTuple):
    """The trials of one side, and what they decide."""

    side: _Side
    swept: Swept
    """The trials, with the raw search without kinds."""
    unbiased: outcomes.Outcome
    """Of the search of this side without a bias: with kinds, of their means alone."""
    decision: Decision
    figures: Figures | None


def _tried(
    side: _Side,
    raw: outcomes.Outcome | None,
    judging: _Judging,
    figures: Figures | None,
    progress: Progress,
    *,
    in_full: bool,
) -> _Tried:
    """Return the trials of one side, and the choice among them.

    raw: begins with the raw search; None if that is the search of this side without a bias.
    """
    trials = sweep(side.fitted, side.items, side.targets, in_full=in_full, progress=progress)
    progress("searching with all methods", 0, 1)
    own = side.search(trials)
    # Gains are those over what users have without this package.
    swept = Swept(trials, own if raw is None else own.over(raw), side.fitted, side.items)
    progress("choosing a method", 0, 1)
    decision = _decided(side, swept, judging, figures)
    return _Tried(side, swept, own.of_biases(np.array([0])), decision, figures)


def _decided(side: _Side, swept: Swept, judging: _Judging, figures: Figures | None) -> Decision:
    """Return the choice among the trials of one side, by labels or by what the bank shows."""
    pairs = side.pairs
    if pairs is None or judging.fold is None:
        # Without labels no trial can be chosen: the last one is the default Blend at full strength,
        # which the default takes the demand of the bank from. With kinds it goes without the
        # agreement, as jobs do.
        blend = full_trial(swept.trials) if side.with_kinds else swept.trials[-1]
        default = replace(DEFAULT_ESTIMATOR, estimators=(blend.estimator,))
        chosen = blend._replace(estimator=default)
        return Decision(chosen, _judged_alone(figures, judging.log), np.empty(0))

    if judging.preference is not None:
        return decide_with_prior(swept, pairs, judging.fold, judging.preference, seed=judging.seed)
    return decide(swept, pairs, judging.fold, whole=judging.whole, seed=judging.seed)


def _comparison(
    kinds: GalleryKinds, without: _Tried, compared: _Tried, log: QueryBank, seed: int
) -> KindComparison:
    """Return whether to compare by kind, and why.

    without, compared: the sides without and with kinds. log: the bank as it is.
    """
    preference = kinds.kinds.preference(log.condensed.vectors)
    before = without.decision.judged.verdict
    after = compared.decision.judged.verdict
    verdicts = f"the verdict without kinds is {before!r}, with them {after!r}"
    pairs = without.side.pairs
    gain = None
    if pairs is None:
        # A verdict alone does not see that kinds are topics, of which each query has one.
        is_real = preference >= LEAST_PREFERENCE
        chosen = is_real and VERDICTS.index(after) >= VERDICTS.index(before)
        reason = (
            f"queries prefer one kind by {preference:.1f} standard deviations, and a gap between "
            f"kinds is real from {LEAST_PREFERENCE:g} on; {verdicts}"
        )
        if not is_real:
            reason += ": labelled pairs (--pairs) can show a gain all the same"
    else:
        gain = measures.paired_difference(
            without.decision.cross_fitted, compared.decision.cross_fitted, pairs.weights, seed=seed
        )
        chosen = after != LEAVE and (before == LEAVE or gain.estimate > 0)
        reason = (
            f"cross-validated, {pairs.measure} with kinds differs by {points(gain)} from that "
            f"without; {verdicts}"
        )
    rows = _default_rows(without, compared, seed)
    return KindComparison(kinds.kinds.rule.source, chosen, reason, gain, preference, rows)


def _default_rows(without: _Tried, compared: _Tried, seed: int) -> tuple[Row, ...]:
    """Return the searches of a comparison of kinds, as its rows have them."""
    trials: list[Trial | None] = [None]
    outcome = without.swept.outcome.of_biases(np.array([0]))
    for tried in (without, compared):
        if tried is compared:
            trials.append(None)
            outcome = outcome.joined(tried.unbiased)
        of_side = tried.swept.trials
        defaults = [of_side[-1], full_trial(of_side)]
        # The outcome has the raw search first.
        numbers = [len(of_side), len(of_side) - len(STRENGTHS)]
        trials += defaults
        outcome = outcome.joined(tried.swept.outcome.of_biases(np.array(numbers)))

    are_by_kind = [False, False, False, True, True, True]
    side = without.side
    rows = rows_of(trials, are_by_kind, outcome, len(side.items), side.pairs, seed)
    return tuple(rows)


class Decision(NamedTuple):
    """What labels choose."""

    chosen: Trial
    judged: Judgement
    cross_fitted: Values
    """(n_queries,) the measure of each query, under a choice that was made without it."""
    prior_weight: float | None = None
    """The weight of the prior; None without one."""
    bias: Vectors | None = None
    """(n_items,) that of the choice at strength 1 for all items, also those that no method was tried
    on; None if it was not computed."""


class Whole(NamedTuple):
    """A gallery of which methods were tried on a part, and the pairs about it."""

    items: Vectors
    pairs: LabelledQueries
    targets: QueryBank | None
    tried: npt.NDArray[np.int64]
    """(n,) the numbers of the items that methods were tried on."""

    def measured(
        self, picked: Trial, swept: QueryBank, *, is_demanded: bool
    ) -> tuple[Vectors, Values]:
        """Return the bias of the choice at strength 1, and the measure of each query without and with
        it, (2, n_queries), among all items.

        picked: as it was tried on the part. is_demanded: whether the choice is that less the demand of
        the bank.
        """
        strength = np.float32(picked.strength)
        trial = picked._replace(
            bias=strength * self._biases(picked, swept),
            activated=activated_by(picked.gate, swept.condensed.vectors, self.items),
        )
        if is_demanded:
            trial = _with_demand(trial, swept, self.items)

        values = search_labelled([trial], self.pairs, self.items).values
        return trial.bias / strength, values

    def _biases(self, picked: Trial, swept: QueryBank) -> Vectors:
        """Return the biases of all items, (n_items,), at strength 1."""
        # What was tried stays as it was, with its agreement; the other items get their biases from the
        # same fit.
        fitted = picked.estimator.settled().fit(
            swept, gallery=self.items[self.tried], target_bank=self.targets
        )
        biases = np.empty(len(self.items), np.float32)
        biases[self.tried] = picked.bias / np.float32(picked.strength)
        others = np.setdiff1d(np.arange(len(self.items)), self.tried, assume_unique=True)
        for start in range(0, len(others), MOST_ITEMS):
            block = others[start : start + MOST_ITEMS]
            biases[block] = fitted.bias(self.items[block])
        return biases


def decide(
    swept: Swept,
    pairs: LabelledQueries,
    fold: npt.NDArray[np.int64],
    *,
    whole: Whole | None = None,
    seed: int = 0,
) -> Decision:
    """Return the mix of a sweep's best trials, and the verdict on it.

    fold: (n_queries,), see `folds`. whole: of which the gallery of the sweep is a part, among all of
    which the verdict measures; None if these are all items.
    """
    trials = swept.trials
    gallery = swept.items
    excess = swept.excess
    weights = pairs.weights
    merits = merits_of(swept.outcome, pairs.measure)[1:]
    picked = mix(pick(trials, excess[1:], merits, weights))
    chosen = _best_of_demand(picked, swept.bank, gallery, pairs)
    raw = swept.outcome.values[0]

    # Picked on all queries, the mix would be judged by the labels that chose it. So each query is
    # judged under a mix that was picked without its fold; what users get is the mix of all.
    # Its near copies would pick for it from another fold.
    cross_fitted = np.empty(len(raw))
    for left_out in range(fold.max() + 1):
        held_out = np.flatnonzero(fold == left_out)
        others = np.flatnonzero(fold != left_out)
        # Near copies of all are in one fold, and nothing can choose a method for them.
        if not len(others):
            cross_fitted[held_out] = raw[held_out]
            continue
        of_others = mix(pick(trials, excess[1:], merits[:, others], weights[others]))
        of_fold = _best_of_demand(of_others, swept.bank, gallery, pairs.take(others))
        found = search_labelled([of_fold], pairs.take(held_out), gallery)
        cross_fitted[held_out] = found.values[1]

    bias: Vectors | None = chosen.bias / np.float32(chosen.strength)
    if whole is not None:
        # Among more items, right ones come first less often. By how much a choice made without a
        # query is worse for it, the part shows.
        choice_in_part = search_labelled([chosen], pairs, gallery).values[1]
        is_demanded = chosen is not picked
        bias, (raw, choice) = whole.measured(picked, swept.bank, is_demanded=is_demanded)
        cross_fitted = choice + cross_fitted - choice_in_part

    judged = judge_labelled(
        raw,
        cross_fitted,
        chosen.strength,
        # Demand takes answers to what is popular, which is its purpose: the fall is that without it.
        _fall(picked, excess, gallery, pairs),
        weights,
        measure=pairs.measure,
        seed=seed,
    )
    return Decision(chosen, judged, cross_fitted, bias=bias)


def _fall(trial: Trial, excess: Values, gallery: Vectors, pairs: LabelledQueries) -> float:
    """Return by which share of them the excess answers taken by hubs fall.

    excess: of the raw search, then of the trials of a sweep.
    """
    outcome = search([trial], pairs.queries, gallery, pairs.right)
    of_trial = float(outcomes.excess_answers_of(outcome, len(gallery))[1])
    # The last trial is the default, with which no label had to do: hubs have to lose under both.
    highest = max(of_trial, float(excess[-1]))
    return 1 - highest / float(excess[0]) if excess[0] else 0.0


def _best_of_demand(
    trial: Trial, bank: QueryBank, gallery: Vectors, pairs: LabelledQueries
) -> Trial:
    """Return a trial less the demand of the bank, or as it is, whichever the pairs prefer.

    Groups of unlike sizes may be those of an uneven demand, or of an encoder that takes unlike
    queries for near copies; the labels decide which it is.
    """
    demanded = _with_demand(trial, bank, gallery)
    if demanded is trial:
        return trial
    merits = merits_of(search_labelled([trial, demanded], pairs, gallery), pairs.measure)[1:]
    without, less_demand = np.average(merits, axis=1, weights=pairs.weights)
    return demanded if less_demand >= without else trial


def _with_demand(trial: Trial, bank: QueryBank, gallery: Vectors) -> Trial:
    """Return a trial less the demand of the bank, as jobs have it by default.

    It is the trial itself where demand is even.
    """
    demanded = replace(DEFAULT_ESTIMATOR, estimators=(trial.estimator,))
    full = np.asarray(trial.bias / np.float32(trial.strength), np.float32)
    less_demand = demanded.of_gallery(full, bank, gallery)
    if less_demand is full:
        return trial
    return trial._replace(estimator=demanded, bias=np.float32(trial.strength) * less_demand)


def decide_with_prior(
    swept: Swept,
    pairs: LabelledQueries,
    fold: npt.NDArray[np.int64],
    preference: Preference,
    *,
    seed: int = 0,
) -> Decision:
    """Return the method, the verdict on it, and the weight of the prior, as `decide` does.

    preference: the values of the prior for the gallery. The excess answers are those without the
    prior: that popular items have more is its purpose.
    """
    excess = swept.excess
    unit = score_spread(swept.bank.condensed, swept.items)
    searches = PriorTrials(swept.trials, swept.items, pairs, preference, unit, fold)

    def picked(merits: Values, weights: Values) -> Trial:
        return mix(pick(swept.trials, excess[1:], merits, weights))

    merits = merits_of(swept.outcome, pairs.measure)[1:]
    chosen = searches.choose(picked, merits, np.ones(len(fold), np.bool_))
    choices = [searches.choose(picked, merits, fold != left) for left in range(fold.max() + 1)]
    cross_fitted = searches.values(choices)

    strength = chosen.method.strength
    judged = judge_labelled(
        swept.outcome.values[0],
        cross_fitted,
        strength,
        _fall(chosen.method, excess, swept.items, pairs),
        pairs.weights,
        measure=pairs.measure,
        seed=seed,
    )
    # Searches multiply what is stored by the strength, the prior too, which was tried in full.
    weight = round(chosen.weight / strength, 3)
    with_prior = f"with {preference.prior.words} as a prior of weight {chosen.weight:g}"
    judged = judged._replace(reason=f"{judged.reason}, {with_prior}")
    return Decision(chosen.method, judged, cross_fitted, weight)


def folds(queries: Vectors, cosine: float, seed: int = 0) -> npt.NDArray[np.int64]:
    """Return the fold of each query (n,), one for all near copies; folds are about as large.

    cosine: the smallest one between near copies.
    """
    groups = groups_at(directions_of(queries), cosine)
    sizes = np.bincount(groups)
    fold_of_group = np.empty(len(sizes), np.int64)
    filled = np.zeros(min(FOLDS, len(sizes)), np.int64)
    order = np.random.default_rng(seed).permutation(len(sizes))
    # The largest first, so that the small ones can make up for them.
    for group in order[np.argsort(-sizes[order], kind="stable")]:
        smallest = int(filled.argmin())
        fold_of_group[group] = smallest
        filled[smallest] += sizes[group]
    return fold_of_group[groups]


def halves(bank: QueryBank, rng: np.random.Generator) -> tuple[QueryBank, Vectors]:
    """Return half of a bank's groups to fit, and one query of each of the others to search with."""
    groups = bank.groups
    assert groups is not None, "the near copies of the bank were looked for"
    singles = bank.of_groups(bank.vectors)
    order = rng.permutation(len(singles))
    middle = len(singles) // 2
    fitted = bank.take(np.isin(groups, order[middle:]))
    # A bank of one group has nothing to spare, and cannot be judged: only its trials are shown.
    return fitted, singles[order[: max(1, middle)][: _most_queries(singles)]]


def _drawn_queries(bank: QueryBank, queries: npt.ArrayLike, rng: np.random.Generator) -> Vectors:
    """Return the queries that are tried. Raises InvalidInput, DimensionMismatch, NonFiniteVectors."""
    vectors = _as_queries_of(bank, queries)
    return vectors[_some(vectors, rng)]


def _drawn_pairs(
    bank: QueryBank, labelled: LabelledQueries, item_count: int, rng: np.random.Generator
) -> LabelledQueries:
    """Return the pairs that are tried. Raises InvalidInput, DimensionMismatch."""
    bank.expect_dim(labelled.queries.shape[1], "a query")
    labelled.right.expect_within(len(labelled), item_count)
    return labelled.take(_some(labelled.queries, rng))


def _as_queries_of(bank: QueryBank, queries: npt.ArrayLike) -> Vectors:
    query_vectors: Vectors = as_queries(as_vectors(queries, "the queries"))
    bank.expect_dim(query_vectors.shape[1], "a query")
    return query_vectors


def _expect_no_kinds_of_tokens(items: Vectors, kinds: GalleryKinds | None) -> None:
    if kinds is not None and is_token_rows(items):
        raise InvalidInput(
            "items of several vectors each are not compared by kind: leave the kinds out"
        )


def _most_queries(queries: Vectors) -> int:
    return MOST_OF_TOKENS[1] if is_token_rows(queries) else MOST_QUERIES


def _some(queries: Vectors, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return the numbers of the queries that are tried. Raises InvalidInput for too few."""
    count = len(queries)
    if count < FEWEST_QUERIES:
        raise InvalidInput(
            f"{count} queries cannot judge a correction: {FEWEST_QUERIES} are needed"
        )
    most = _most_queries(queries)
    if count <= most:
        return np.arange(count)
    return np.sort(rng.permutation(count)[:most])


def _demand(pairs: LabelledQueries, n_items: int) -> float:
    """Return the share of the weight whose answers are the 1% of items with most of it."""
    counts = pairs.right.counts
    # A query with several answers wants each of them a little.
    shares = np.repeat(pairs.weights / counts, counts)
    demand = np.bincount(pairs.right.items, shares, minlength=n_items)
    largest = np.sort(demand)[-max(1, round(n_items / 100)) :]
    return float(largest.sum() / demand.sum())


def _some_items(
    items: Vectors, pairs: LabelledQueries | None, rng: np.random.Generator
) -> tuple[Vectors, LabelledQueries | None, npt.NDArray[np.int64]]:
    """Return the items that are tried: not more than the limit, or all positives if they are more.

    The second value has the new positions of the positives, the third the old ones of the items.
    """
    most = MOST_OF_TOKENS[0] if is_token_rows(items) else MOST_ITEMS
    if len(items) <= most:
        return items, pairs, np.arange(len(items))

    # No positive may be missing, or its query could not be answered.
    needed = np.unique(pairs.right.items) if pairs else np.empty(0, np.int64)
    others = np.setdiff1d(rng.permutation(len(items))[:most], needed)
    room = max(0, most - len(needed))
    chosen = np.sort(np.concatenate([needed, others[:room]]))
    if pairs is not None:
        pairs = replace(pairs, right=pairs.right.among(chosen))
    return items[chosen], pairs, chosen


def drawn_words(whole: Whole, items: Vectors, pairs: LabelledQueries, *, judges_all: bool) -> str:
    """Return of how many items the trials are, and what the measure of the pairs is among all without
    a bias; empty if these are all.

    Right items are always among the drawn ones, and fewer others rank before them there. judges_all:
    whether the verdict is of all items.
    """
    if len(items) == len(whole.items):
        return ""
    among = f"{len(items):,} of {len(whole.items):,} items, with all right ones"
    if is_token_rows(items):
        return f"{pairs.measure} is measured among {among}: among all it is lower"

    before, of_all = (
        float(np.average(search_labelled([], each, rows).values[0], weights=each.weights))
        for each, rows in ((pairs, items), (whole.pairs, whole.items))
    )
    measured = f"{pairs.measure} is measured"
    if judges_all:
        measured = "the gain is measured among all items, each trial"
    return (
        f"{measured} among {among}: as it is, {pairs.measure} is {before:.1%} there and {of_all:.1%} "
        "among all"
    )


def _table(
    tried: _Tried, n_items: int, pairs: LabelledQueries | None, seed: int
) -> tuple[Row, ...]:
    """Return the raw search, then the trials, best first."""
    trials, outcome, *_ = tried.swept
    are_by_kind = [False, *(tried.side.with_kinds for _ in trials)]
    raw, *rows = rows_of([None, *trials], are_by_kind, outcome, n_items, pairs, seed)
    rows.sort(key=lambda row: row.excess_answers if row.value is None else -row.value)
    return (raw, *rows)
