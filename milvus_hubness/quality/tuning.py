"""Tuning: decide whether to correct, and with which estimator.

The decision is made on queries that the biases have not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.basics.texts import points
from milvus_hubness.correction.banks.bank import QueryBank, Vectors, as_vectors, not_among
from milvus_hubness.correction.estimators import Blend, Estimator
from milvus_hubness.correction.estimators.base import require_gallery, score_spread
from milvus_hubness.correction.kernels.checks import whole_number
from milvus_hubness.errors import InvalidInput
from milvus_hubness.quality import measures
from milvus_hubness.quality.prior_weights import Preference, PriorTrials
from milvus_hubness.quality.trials import Answers, Trial, search, sweep
from milvus_hubness.quality.verdict import Figures, Finding, distinct_rows, examine, findings

MEMBERS = 8
"""Trials that are mixed into one."""
EXCESS_WEIGHT = 0.3
"""Weight of the excess answers taken by hubs; the mean reciprocal rank has weight 1."""
GATE_MARGIN = 0.01
"""Lead in that score that a gate needs over the trials without one."""
FOLDS = 5

# The numbers below decide the verdict with labels, and were chosen on the tasks of
# `python -m benchmarks.tune`, which prints what it is worth on 20 random splits of their pairs.
PRIOR_GAIN = 0.04
"""Mean and standard deviation of the gain in R@1 before anything is measured."""
FALL_TO_TRY = 0.05
"""Fall of the excess answers taken by hubs, as a share of them, below which a loss is expected."""
WEAK = 0.6
"""Strength below which the verdict is "apply weakly"."""

Verdict = Literal["apply", "apply weakly", "leave it alone"]
Values = npt.NDArray[np.float64]


class Judgement(NamedTuple):
    """A verdict with its reason."""

    verdict: Verdict
    strength: float
    """The strength to apply; 0 to leave it alone."""
    reason: str
    interval: measures.Interval | None
    """The gain in R@1 over the raw search; None without labels."""


def pick(trials: Sequence[Trial], excess: Values, ranks: npt.NDArray[np.int32]) -> list[Trial]:
    """Return the `MEMBERS` best trials, all with the same gate, or none.

    excess: (n_trials,) the excess answers taken by hubs. ranks: (n_trials, n_queries).
    """
    # The mean reciprocal rank follows R@1 with less noise, and the excess answers, which need no
    # labels, keep few labels from deciding by chance.
    reciprocal = 1 / ranks
    scores = reciprocal.mean(1) - EXCESS_WEIGHT * excess
    best_by_form: dict[tuple[int | None, int | None], npt.NDArray[np.int64]] = {}
    for form in dict.fromkeys(trial.form for trial in trials):
        of_form = np.array([number for number, trial in enumerate(trials) if trial.form == form])
        by_score = np.argsort(-scores[of_form], kind="stable")
        best_by_form[form] = np.sort(of_form[by_score[:MEMBERS]])

    # A gate has to be better by a margin and by two standard errors, as it limits what searches can
    # do and sends each query twice.
    without_gate = best_by_form[None, None]
    best = without_gate
    largest_lead = 0.0
    for members in best_by_form.values():
        gain = reciprocal[members].mean(0) - reciprocal[without_gate].mean(0)
        margin = max(GATE_MARGIN, 2 * float(gain.std()) / len(gain) ** 0.5)
        lead = float(scores[members].mean() - scores[without_gate].mean()) - margin
        if lead > largest_lead:
            best = members
            largest_lead = lead
    return [trials[number] for number in best]


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


def judge_labelled(
    raw: Values, cross_fitted: Values, strength: float, fall: float, *, seed: int = 0
) -> Judgement:
    """Return the verdict with labels: "apply" if the expected gain in R@1 is above 0.

    raw, cross_fitted: (n_queries,) hits. strength: of the mix. fall: of the excess answers taken by
    hubs, as a share of them.
    """
    interval = measures.paired_difference(raw, cross_fitted, seed=seed)
    n = len(raw)

    # The measured gain meets a prior of 4 ± 4 points, positive if hubs lose answers. The posterior
    # mean is that of both, weighted by their precisions. The variance is raised by 1/n, because a
    # few queries that all agree would otherwise seem certain.
    variance = (float(np.var(cross_fitted - raw)) + 1 / n) / n
    prior = PRIOR_GAIN if fall > FALL_TO_TRY else -PRIOR_GAIN
    prior_variance = PRIOR_GAIN**2
    weighted_sum = interval.estimate / variance + prior / prior_variance
    expected = weighted_sum / (1 / variance + 1 / prior_variance)

    result = f"cross-validated on {n} labelled queries, R@1 changes by {points(interval)}"
    if expected <= 0:
        return Judgement("leave it alone", 0.0, f"{result}: expect no gain", interval)
    if interval.low <= 0:
        result += (
            "; the interval holds 0, but with the usual gain as prior, "
            f"expect {100 * expected:+.1f}"
        )
    return Judgement("apply weakly" if strength < WEAK else "apply", strength, result, interval)


def judge_unlabelled(figures: Figures) -> Judgement:
    """Return the verdict without labels: "apply" unless a finding fails.

    A narrow bank is applied with half the strength. The thresholds are those of `quality.verdict`.
    """
    shown = findings(figures)
    failed = [finding for finding in shown if finding.fails]
    # A bank of items fails for further reasons, whose remedies would mislead.
    if failed and failed[0].name == "kind":
        failed = failed[:1]
    if failed:
        return Judgement("leave it alone", 0.0, "; ".join(map(str, failed)), None)

    reason = "; ".join(
        finding.text for finding in shown if finding.name in ("agreement", "two views", "hubs")
    )
    if figures.narrow:
        return Judgement(
            "apply weakly", 0.5, f"{reason}: hubs keep many answers, so half the strength", None
        )
    return Judgement("apply", 1.0, reason, None)


FEWEST_IN_BANK = 4
"""Distinct queries of a bank below which its halves are too small for anything to be said."""


def judge_bank(
    bank: QueryBank, items: Vectors, *, queries: Vectors | None = None, seed: int = 0
) -> Judgement:
    """Return the verdict without labels on a bank for items (n, d), n ≥ 1, in some seconds.

    queries: (m, d) real ones, apart from the bank; by default half of the bank, which is then not
    fitted.
    """
    distinct = len(distinct_rows(bank.vectors))
    if distinct < FEWEST_IN_BANK:
        reason = f"a bank of {distinct} distinct queries cannot be judged: collect more"
        return Judgement("leave it alone", 0.0, reason, None)
    return judge_unlabelled(
        examine(bank.vectors, items, default_biases, queries=queries, seed=seed)
    )


def default_biases(bank: QueryBank, items: Vectors) -> Vectors:
    """Return the biases of the default Blend at full strength."""
    return Blend(strength=1.0).clamped(len(bank)).fit(bank, gallery=items).bias(items)


MOST_ITEMS = 20_000
"""Items on which methods are tried, unless there are more positives."""
MOST_QUERIES = 5_000
"""Queries with which methods are tried."""
FEWEST_QUERIES = 20
"""Queries without which nothing is judged, and in each half of a bank that is judged by itself."""
RESAMPLES = 1000


class Row(NamedTuple):
    """One trial, as the table of a tuning shows it."""

    estimator: Estimator | None
    """None for the raw search."""
    strength: float
    excess_answers: float
    """Share of the answers that hubs take in excess."""
    r1: float | None
    """None without labels."""
    gain: measures.Interval | None
    """Of R@1 over the raw search, with its 95% interval; None without labels."""
    gate: int | None = None
    gate_targets: int | None = None


@dataclass(frozen=True)
class Tuning:
    """The trials, and the decision."""

    verdict: Verdict

    choice: Estimator | None
    """The estimator to apply; None for "leave it alone"."""

    strength: float
    """The share of it to apply; 0 for "leave it alone"."""

    gate: int | None
    """The k of the `DynamicGate` to apply; None corrects every query, as always without labels."""

    gate_targets: int | None
    """The k_targets of that gate."""

    reason: str

    interval: measures.Interval | None
    """The cross-validated gain in R@1; None without labels."""

    findings: tuple[Finding, ...]
    """What the bank shows, which decides without labels and informs with them; none for a bank of
    under 40 queries."""

    candidate: Estimator
    """The estimator that would apply but for the verdict: the mix of the best trials, or the
    default Blend without labels."""

    rows: tuple[Row, ...]
    """The raw search and the trials, best first."""

    labelled: bool
    bank_size: int

    items: int
    """Number of items on which the methods were tried."""

    queries: int
    """Number of queries with which they were tried."""

    real_queries: int
    """Number of these that the caller gave; 0 if half of the bank was not fitted instead."""

    seed: int

    prior_weight: float | None = None
    """The weight of the prior for the jobs, in units of the spread of scores: the best one divided
    by the strength, by which searches multiply it. None without a prior, and without labels, which
    alone can choose it."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, fit for JSON; estimators as in `estimators.to_dict`."""
        return dict(measures.as_plain(self))


def tune(
    bank: QueryBank | npt.ArrayLike,
    gallery: npt.ArrayLike,
    *,
    target_bank: QueryBank | npt.ArrayLike | None = None,
    queries: npt.ArrayLike | None = None,
    positives: measures.Positives | None = None,
    preference: Preference | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Tuning:
    """Try every method on a gallery (n_items, d), and decide whether one is worth applying.

    queries: (n, d), n ≥ 20; by default half of the bank, which is then not fitted. positives: for
    each query the number of its gallery item or several; R@1 then decides, else the findings of
    `quality.verdict`. preference: the values of a prior, whose weight is chosen with the method if
    there are positives. Bank queries that are among `queries` are left out of the fit. A gallery
    beyond 20,000 items and queries beyond 5,000 are sampled. Equal seeds give equal results. Raises
    InvalidInput, BankTooSmall, DimensionMismatch, NonFiniteVectors.
    """
    bank = QueryBank.of(bank)
    rng = np.random.default_rng(whole_number("seed", seed, at_least=0))
    items = require_gallery(bank, gallery, "tune")
    targets = None if target_bank is None else QueryBank.of(target_bank)
    if targets is not None:
        bank.expect_dim(targets.dim, "the target bank")

    fitted, query_vectors, answers = _split(bank, queries, positives, len(items), rng)
    items, answers, numbers = _some_items(items, answers, rng)
    trials = sweep(fitted, items, targets, progress=progress)
    outcome = search(trials, query_vectors, items, answers)

    figures = None
    if len(bank) >= 2 * FEWEST_QUERIES:
        # Of real queries, the bank is examined without those that are in it.
        real = None if queries is None else query_vectors
        examined = bank if queries is None else fitted
        figures = examine(examined.vectors, items, default_biases, queries=real, seed=seed)
    weight = None
    if answers is not None and preference is not None:
        chosen, judged, weight = decide_with_prior(
            trials, outcome, query_vectors, items, answers, preference.take(numbers), fitted, seed
        )
    elif answers is not None:
        chosen, judged = decide(trials, outcome, query_vectors, items, answers, seed=seed)
    else:
        assert figures is not None, "a bank without labels has at least 40 queries"
        # Without labels no trial can be chosen: the last one is the default Blend at full strength.
        chosen = trials[-1]
        judged = judge_unlabelled(figures)

    # The candidate stays in the result either way: a user may overrule the verdict.
    applies = judged.verdict != "leave it alone"
    return Tuning(
        **judged._asdict(),
        choice=chosen.estimator if applies else None,
        gate=chosen.gate if applies else None,
        gate_targets=chosen.gate_targets if applies else None,
        findings=tuple(findings(figures)) if figures else (),
        candidate=chosen.estimator,
        rows=_table(trials, outcome, len(items), seed),
        labelled=answers is not None,
        bank_size=len(bank),
        items=len(items),
        queries=len(query_vectors),
        real_queries=0 if queries is None else len(query_vectors),
        seed=seed,
        prior_weight=weight if applies else None,
    )


def decide(
    trials: Sequence[Trial],
    outcome: measures.Outcome,
    queries: Vectors,
    gallery: Vectors,
    positives: Answers,
    *,
    seed: int = 0,
) -> tuple[Trial, Judgement]:
    """Return the mix of a sweep's best trials, and the verdict on it.

    outcome: of the raw search, then the trials.
    """
    excess = measures.excess_answers_of(outcome, len(gallery))

    # Picked on all queries, the mix would be judged by the labels that chose it. So each query is
    # judged under a mix that was picked without its fold; what users get is the mix of all.
    fold = np.random.default_rng(seed).permutation(len(queries)) % FOLDS
    mixed = mix(pick(trials, excess[1:], outcome.ranks[1:]))
    mixes = [
        mix(pick(trials, excess[1:], outcome.ranks[1:, fold != left_out]))
        for left_out in range(FOLDS)
    ]

    after = search([mixed, *mixes], queries, gallery, positives)
    # In `after`, the raw search is first, then the mix of all queries, then that without each fold.
    cross_fitted = after.hits[2 + fold, np.arange(len(queries))]

    mixed_excess = float(measures.excess_answers_of(after, len(gallery))[1])
    # The last trial is the default, with which no label had to do: hubs have to lose under both.
    highest = max(mixed_excess, float(excess[-1]))
    fall = 1 - highest / float(excess[0]) if excess[0] else 0.0
    return mixed, judge_labelled(outcome.hits[0], cross_fitted, mixed.strength, fall, seed=seed)


def decide_with_prior(
    trials: Sequence[Trial],
    outcome: measures.Outcome,
    queries: Vectors,
    gallery: Vectors,
    positives: Answers,
    preference: Preference,
    bank: QueryBank,
    seed: int,
) -> tuple[Trial, Judgement, float]:
    """Return the method, the verdict on it, and the weight of the prior, as `decide` does.

    preference: the values of the prior for the gallery. bank: the one that the trials were fitted
    on. The excess answers are those without the prior: that popular items have more is its purpose.
    """
    excess = measures.excess_answers_of(outcome, len(gallery))
    fold = np.random.default_rng(seed).permutation(len(queries)) % FOLDS
    unit = score_spread(bank, gallery)
    searches = PriorTrials(trials, queries, gallery, positives, preference, unit, fold)

    def picked(ranks: npt.NDArray[np.int32]) -> Trial:
        return mix(pick(trials, excess[1:], ranks))

    ranks = outcome.ranks[1:]
    chosen = searches.choose(picked, ranks, np.ones(len(queries), np.bool_))
    choices = [searches.choose(picked, ranks, fold != left_out) for left_out in range(FOLDS)]
    cross_fitted = searches.hits(choices)

    neutral = search([chosen.method], queries, gallery, positives)
    highest = max(float(measures.excess_answers_of(neutral, len(gallery))[1]), float(excess[-1]))
    fall = 1 - highest / float(excess[0]) if excess[0] else 0.0
    strength = chosen.method.strength
    judged = judge_labelled(outcome.hits[0], cross_fitted, strength, fall, seed=seed)
    # Searches multiply what is stored by the strength, the prior too, which was tried in full.
    weight = round(chosen.weight / strength, 3)
    with_prior = f"with {preference.prior.words} as a prior of weight {chosen.weight:g}"
    return chosen.method, judged._replace(reason=f"{judged.reason}, {with_prior}"), weight


def _split(
    bank: QueryBank,
    queries: npt.ArrayLike | None,
    positives: measures.Positives | None,
    n_items: int,
    rng: np.random.Generator,
) -> tuple[QueryBank, Vectors, Answers | None]:
    """Return a bank to fit and disjoint queries to search with, and their positives."""
    if positives is None:
        bank.require(at_least=2 * FEWEST_QUERIES)
    elif queries is None:
        raise InvalidInput("positives without the queries that they belong to: pass queries too")
    if queries is None:
        order = rng.permutation(len(bank))
        middle = len(bank) // 2
        fitted = QueryBank(bank.vectors[order[middle:]], bank.source)
        return fitted, bank.vectors[order[:middle][:MOST_QUERIES]], None

    query_vectors = as_vectors(queries, "the queries")
    bank.expect_dim(query_vectors.shape[1], "a query")
    if len(query_vectors) < FEWEST_QUERIES:
        raise InvalidInput(
            f"{len(query_vectors)} queries cannot judge a correction: {FEWEST_QUERIES} are needed"
        )

    answers = None
    if positives is not None:
        numbers, starts = measures.checked_positives(positives, len(query_vectors), n_items)
        answers = np.split(numbers, starts[1:-1])
    if len(query_vectors) > MOST_QUERIES:
        some = np.sort(rng.permutation(len(query_vectors))[:MOST_QUERIES])
        query_vectors = query_vectors[some]
        answers = answers and [answers[query] for query in some]

    # A query in the bank raises the bias of its own answer, and would be judged by it.
    is_other = not_among(bank.vectors, query_vectors)
    if not is_other.any():
        raise InvalidInput(
            "the bank holds nothing but the queries: a bias must not be judged by its own bank"
        )
    fitted = bank if is_other.all() else QueryBank(bank.vectors[is_other], bank.source)
    return fitted, query_vectors, answers


def _some_items(
    items: Vectors, answers: Answers | None, rng: np.random.Generator
) -> tuple[Vectors, Answers | None, npt.NDArray[np.int64]]:
    """Return at most `MOST_ITEMS` items, or all positives if they are more.

    The second value is the new positions of the positives, the third the numbers of the items.
    """
    if len(items) <= MOST_ITEMS:
        return items, answers, np.arange(len(items))

    # No positive may be missing, or its query could not be answered.
    needed = np.unique(np.concatenate(answers)) if answers is not None else np.empty(0, np.int64)
    others = np.setdiff1d(rng.permutation(len(items))[:MOST_ITEMS], needed)
    room = max(0, MOST_ITEMS - len(needed))
    chosen = np.sort(np.concatenate([needed, others[:room]]))
    positions = answers and [np.searchsorted(chosen, numbers) for numbers in answers]
    return items[chosen], positions, chosen


def _table(
    trials: Sequence[Trial], outcome: measures.Outcome, n_items: int, seed: int
) -> tuple[Row, ...]:
    """Return the raw search, then the trials, best first.

    outcome: of the raw search, then of the trials.
    """
    r1s: Sequence[float | None] = [None] * len(outcome.retrieved)
    gains: Sequence[measures.Interval | None] = [None] * len(r1s)
    if outcome.ranks.size:
        hits = outcome.hits
        r1s = hits.mean(1).tolist()
        gains = measures.bootstrap(hits - hits[0], resamples=RESAMPLES, seed=seed)

    excess = measures.excess_answers_of(outcome, n_items).tolist()
    raw = Row(None, 0.0, excess[0], r1s[0], gains[0])
    rows = [
        Row(trial.estimator, trial.strength, share, r1, gain, *trial.form)
        for trial, share, r1, gain in zip(trials, excess[1:], r1s[1:], gains[1:], strict=True)
    ]
    rows.sort(key=lambda row: row.excess_answers if row.r1 is None else -row.r1)
    return (raw, *rows)
