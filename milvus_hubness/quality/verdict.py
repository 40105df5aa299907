"""The verdict without labels: whether a bank fits a gallery, and how much of a correction to apply.

`benchmarks/verdict.py` shows what the verdict gains and costs: on the tasks on which the thresholds were
chosen, and on others. To change what the verdict decides: `Figures` has what is measured, by `examine`;
each `_on_…` function judges one of them, and `findings` lists these; `tuning.judge_unlabelled` turns
findings into a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.texts import percent
from milvus_hubness.correction.banks.bank import BankLike, QueryBank, Vectors
from milvus_hubness.correction.estimators.base import known_to_halves
from milvus_hubness.correction.estimators.with_demand import dispersion_of
from milvus_hubness.correction.kernels.rows import all_scores, mapped, pooled, row_keys, scored
from milvus_hubness.correction.kernels.token_rows import is_token_rows
from milvus_hubness.correction.kinds import GalleryKinds
from milvus_hubness.quality.bank_checks import ALIKE, AT_LEAST, ROUNDS, reach, share_between
from milvus_hubness.quality.clusters import clusters_of
from milvus_hubness.quality.measures import DEPTH, nearest
from milvus_hubness.quality.outcomes import assess, excess_answers_of, noise_of_change

MOST_ITEMS = 10_000
"""Items that are read, drawn at random."""
MOST_QUERIES = 5_000
"""Queries of the bank that are read, drawn at random."""
SCORED = 1_000
"""Queries whose scores of all items are read for the best score, and that are compared with items."""
MOST_OF_TOKENS = 2_000
"""Queries, and items, that are read if each has several vectors, of which a score takes long."""
COMPARED_DOCUMENTS = 100
"""Items of several vectors each that are compared with the other items."""

# Each threshold was chosen on rows that are named under it: of the tasks of the choice in
# `python -m benchmarks.verdict`, or of `python -m benchmarks.defaults`.
VIEWS_AGREE = 0.06
"""Two-view agreement below which a bank is foreign. Rows: banks of other data sets."""
ITEMS_AGREE = 0.2
"""Two-view agreement of items below which vectors may be those of a recommender, if the queries agree
in less than QUERIES_AGREE too; half of it with real queries. Rows: own banks, and recommenders."""
QUERIES_AGREE = 0.6
"""Two-view agreement of queries from which on they single out even items that have no neighbours."""
REACHED = 0.35
"""Reach below which a bank may cover a corner of the gallery. Rows: banks that crowd few items."""
FIXED_BY_ONE = 0.2
"""Signal above which low reach speaks against a bank. Rows: own banks with strong hubs, and
foreign ones."""
COVERED = 0.87
"""Share of the gallery that a bank has to cover evenly, lest it be one of few topics. Rows: banks of
one topic of four, and own banks."""
REGIONS = 16
"""Clusters of items by which the cover is measured."""
ITEMS_PER_REGION = 8
"""Mean size of a region of a small gallery, which has fewer of them."""
FEWEST_ITEMS = 300
"""Items below which a bank of items may look like one of queries: `alike` of banks of other items
errs by 0.0007 with 250 items, by 0.0011 with 100 and by 0.0024 with 50, where ALIKE is 0.002. Rows: other items
of the same kind, in galleries of 50 to 500 items."""
LEAST_FALL = 0.12
"""Share of the excess answers beyond chance that real queries have to lose. Rows: all kinds of
banks, with 100 real queries."""
ANOTHER_MODEL = 0.05
"""Share of the items' two-view agreement below which the bank is of another model, with real queries
too. Rows: banks of other encoders, and own banks, of which the lowest has 0.09.
"""
LIKE_ITEMS = 0.8
"""Share of the items' two-view agreement from which on a bank agrees as items do. Rows: own banks
and items, where bank and gallery are alike."""
MOST_GROUPS = 0.5
"""Groups of near copies, as a share of the queries, up to which a bank is a log and no items. Rows:
`python -m benchmarks.demand`."""
LITTLE_EXCESS = 0.11
"""Excess answers beyond chance below which little is gained. Rows: own banks."""
FAR_BEST = 8.0
"""Standard deviations of the best score above which scores
are like those of a re-ranker. Rows: `reranker_scores`."""
LARGEST_GROUPS = 0.01
"""Share of a log's groups whose share of its queries is reported."""
FEW_TAKE_MOST = 0.2
"""Share of a log's queries in the largest 1% of its groups from which on a warning says that few
take most. Rows: drawn logs. With even demand and by Zipf's law to the power 0.5, which no correction
minds, the groups hold 4% to 8%; to the power 1, where it may cost answers, 24% and more."""

EXPECTED_GAIN = (
    (0.065, 0.78, 0.11, 1.45),
    (0.14, 1.56, 0.48, 2.48),
    (0.222, 3.12, 1.74, 4.28),
    (0.286, 4.47, 2.79, 6.55),
    (0.409, 6.82, 5.27, 7.55),
)
"""Excess answers beyond chance, and the mean and quartiles of the gain in points of R@1, of banks of
their own: `expected_gain` as `benchmarks.verdict` saves it. No verdict reads it."""

Biases: TypeAlias = Callable[[QueryBank, Vectors], Vectors]
"""Computes the biases (n,) of items (n, d) from a bank."""


class Figures(NamedTuple):
    """What a bank and a gallery show without labels."""

    agreement: float
    """Agreement of two halves of the bank on the biases, see `known_to_halves`."""

    two_views: float
    """Share of the queries that find the same item first in both of two random halves of the
    dimensions, each corrected by itself."""

    bank_views: float
    """The same share of the queries of the bank, without correction."""

    item_views: float
    """Share of the items that have the same nearest other item in both halves.

    Here and for `bank_views`, what searches is compared less its mean, as the items that are near to
    this mean would be the nearest of all others: hubs hide neighbours."""

    reach: float
    """Number of items that are the nearest of some bank query, over its expectation if all items
    were equally likely. It is counted on raw answers, so strong hubs lower it as well."""

    best_z: float
    """Mean of the best raw score of a query, in standard deviations above its mean score."""

    before: float
    """Excess answers taken by hubs on queries that were not fitted, without correction."""

    after: float
    """Excess answers taken by hubs on these queries, with correction."""

    noise: float
    """Standard error of the difference of these two, by resampling the queries."""

    searched: int
    """Number of queries that were not fitted."""

    by_chance: float
    """Excess answers taken by hubs if answers are random."""

    alike: float
    """Share of the variance that is between bank and gallery; 1 if they are too few to compare."""

    signal: float
    """How well a single query fixes the biases: (ρ / (1 − ρ)) / (m / 2), with the agreement ρ of two
    halves of m / 2 queries each.

    Queries of all kinds fix the biases slowly; those that all ask the same, as in a narrow or
    foreign bank, at once."""

    real_queries: bool = False
    """Whether the searches were with real queries, not with queries of the bank."""

    by_kind: bool = False
    """Whether items and queries were compared by the means of kinds; the biases count in full then."""

    logged: int = 0
    """Number of queries in the whole log, each as often as users sent it; 0 if it was not read."""

    groups: int = 0
    """Number of groups of near copies in it."""

    largest_share: float = 0.0
    """Share of its queries that the largest 1% of these groups hold, at least one group."""

    dispersion: float = 1.0
    """Variance of the queries of a group over their mean; 1 if users want all equally often."""

    items: int = FEWEST_ITEMS
    """Number of items that were read, each once."""

    cover: float = 1.0
    """Share of the gallery that the bank's answers cover evenly, by regions of items: as large as it
    may be, by two standard errors, as regions get more and fewer answers by chance."""

    apart: float = 0.0
    """Share of the variance that is between the bank and the real queries; 0 without these, or if
    either are too few to compare."""

    has_tokens: bool = False
    """Whether each row has several vectors. No mean can be taken from these, so that hubs hide what the
    bank's queries find."""

    @property
    def is_log(self) -> bool:
        """Whether the bank has near copies, as a log of users' queries has."""
        return self.groups < self.logged

    @property
    def is_uneven(self) -> bool:
        """Whether it is a log of which few groups take most."""
        return self.is_log and self.largest_share >= FEW_TAKE_MOST

    @property
    def margin(self) -> float:
        """Change of the excess answers that says nothing: one standard error, at least one answer."""
        return max(self.noise, 1 / (DEPTH * self.searched))

    def is_surely_below(self, share: float, least: float, count: int | None = None) -> bool:
        """Whether a share of so many queries, by default of the searched ones, is below `least` by more
        than its error.
        """
        count = self.searched if count is None else count
        # One more of them, so that a few queries that all fail do not seem certain.
        variance = share * (1 - share) + 1 / count
        return share + math.sqrt(variance / count) < least

    @property
    def is_of_another_model(self) -> bool:
        """Whether the bank's queries find their answers by chance: those of another model lie anywhere.

        Real queries may gain by such a bank, as by any large bias, and then lose by it elsewhere.
        """
        if self.has_tokens:
            return False
        count = max(1, min(self.groups, SCORED))
        return self.is_surely_below(self.bank_views, ANOTHER_MODEL * self.item_views, count)

    @property
    def excess(self) -> float:
        """Excess answers taken by hubs beyond chance, without correction, as a share of the most that
        there can be.
        """
        return (self.before - self.by_chance) / (1 - self.by_chance)

    @property
    def narrow(self) -> bool:
        """Whether the bank is of fewer topics than the queries of users.

        Real queries show it; without, they may be of all topics that the gallery has.
        """
        return self.apart >= ALIKE if self.real_queries else self.cover < COVERED

    @property
    def is_small(self) -> bool:
        """Whether the gallery is too small to show what a bank is; real queries show what it is worth."""
        return self.items < FEWEST_ITEMS and not self.real_queries


class Finding(NamedTuple):
    """One figure in words. A finding with a remedy that does not fail is a warning."""

    name: str
    text: str
    fails: bool = False
    """Whether it speaks against a correction."""
    remedy: str = ""
    """What to do if it fails; empty if all is well."""

    def __str__(self) -> str:
        return f"{self.text}: {self.remedy}" if self.remedy else self.text


def examine(
    bank: BankLike,
    gallery: Vectors,
    biases_of: Biases,
    *,
    queries: Vectors | None = None,
    whole: QueryBank | None = None,
    kinds: GalleryKinds | None = None,
    seed: int = 0,
) -> Figures:
    """Return the figures of a bank (m, d), m ≥ 2, on a gallery (n, d).

    At most 5,000 and 10,000 rows of them are read. Near copies, or only repeats if the bank has no
    groups, have the weight of one query. biases_of: fits items (n, d) at full strength, on half of
    the bank's groups. queries: by default those of the other half. whole: the log that the bank is
    a part of, by default the bank. kinds: those of the gallery, with whose means searches compare;
    all vectors are given as they are.
    """
    rng = np.random.default_rng(seed)
    bank = _with_repeats(QueryBank.of(bank))
    most_items = MOST_ITEMS
    most_queries = MOST_QUERIES
    if is_token_rows(gallery):
        most_items = most_queries = MOST_OF_TOKENS
    sample = bank.take(rng.permutation(len(bank))[:most_queries])
    rows = np.sort(rng.permutation(len(gallery))[:most_items])
    # Rows that a gallery has twice share their answers by chance, and would count as hubs do.
    rows = rows[distinct_rows(gallery[rows])]
    items = gallery[rows]

    # No bias may be judged by the queries that it was fitted on: they flatter it. So all near
    # copies are in one half, which is fitted on their means, and only one of them is searched.
    singles, means = _in_random_order(sample)
    alike = share_between(singles, items, at_most=SCORED, seed=seed)
    apart = 0.0
    # Few queries show what a bank is worth, but not whether it is of other topics.
    if queries is not None and min(len(singles), len(queries)) >= AT_LEAST:
        apart = share_between(singles, queries, at_most=SCORED, seed=seed)
    middle = len(means) // 2
    searched = singles[middle:] if queries is None else queries[:most_queries]
    items = scored(scored(items, singles), searched)
    raw = None
    if kinds is not None:
        # Only from here on: less their means, any bank and any gallery are about the same point.
        raw = assess(searched, items, [np.zeros(len(items), np.float32)])
        items = kinds.take(rows).centred_items(items)
        singles, means, searched = map(kinds.centred_queries, (singles, means, searched))

    fitted, others = means[:middle], means[middle:]
    biases = biases_of(QueryBank(fitted), items), biases_of(QueryBank(others), items)
    known = known_to_halves(biases, (fitted, others), items)
    agreement = known.agreement
    cover = _cover(((others, biases[0]), (fitted, biases[1])), items)
    # A log that asks for each item about once pushes all items down alike, and its part pushes down what
    # it asks for: here, not what is searched.
    bias = known.biases[0].astype(np.float32)
    if queries is not None:
        fitted = means
        bias = np.mean(known.biases, axis=0, dtype=np.float32)

    # As the jobs apply them: with kinds, the default method is applied in full.
    share = np.float32(agreement if kinds is None else 1)
    outcome = assess(searched, items, [np.zeros_like(bias), share * bias])
    # What users have without this package is compared by no kind.
    outcome = outcome if raw is None else outcome.over(raw)
    before, after = excess_answers_of(outcome, len(items)).tolist()

    answers_per_item = min(DEPTH, len(items)) * len(searched) / len(items)
    return Figures(
        agreement=agreement,
        **_two_view_agreements(fitted, searched, singles[:SCORED], items, biases_of, rng),
        reach=reach(singles, items),
        best_z=_best_z(singles[:SCORED], items),
        before=before,
        after=after,
        noise=float(noise_of_change(outcome, len(items), rng)[0]),
        searched=len(searched),
        by_chance=chance_excess(answers_per_item),
        alike=alike,
        signal=agreement / max(1 - agreement, 1e-9) / max(middle, 1),
        real_queries=queries is not None,
        by_kind=kinds is not None,
        items=len(items),
        cover=cover,
        apart=apart,
        has_tokens=is_token_rows(gallery),
        **_demand_in(bank if whole is None else _with_repeats(whole)),
    )


def _with_repeats(bank: QueryBank) -> QueryBank:
    """Return the bank with groups: those that it has, or those of its equal queries."""
    if bank.groups is not None:
        return bank
    number_of: dict[bytes, int] = {}
    keys = row_keys(bank.vectors)
    for key in keys:
        number_of.setdefault(key, len(number_of))
    groups = np.array([number_of[key] for key in keys])
    return replace(bank, groups=groups)


def _in_random_order(sample: QueryBank) -> tuple[Vectors, Vectors]:
    """Return one query of each group, and the means of the groups, as the sample is ordered."""
    # The numbers of groups follow the order of the bank, which may be that of its topics.
    first = sample.of_groups(np.arange(len(sample)))
    order = np.argsort(first)
    return sample.vectors[first[order]], sample.condensed.vectors[order]


def _demand_in(log: QueryBank) -> dict[str, Any]:
    """Return the figures of how unevenly users want the groups of a log."""
    counts = log.condensed.counts
    assert counts is not None, "the groups of a bank have counts"
    largest = np.sort(counts)[-max(1, round(LARGEST_GROUPS * len(counts))) :]
    return {
        "logged": round(float(counts.sum())),
        "groups": len(counts),
        "largest_share": float(largest.sum() / counts.sum()),
        "dispersion": dispersion_of(counts),
    }


def findings(figures: Figures) -> list[Finding]:
    """Return the figures in words, in the order in which reports show them.

    Each has a remedy if it speaks against a correction or is a warning.
    """
    return [
        _on_kind(figures),
        _on_agreement(figures),
        _on_two_views(figures),
        _on_neighbours(figures),
        _on_reach(figures),
        _on_best_score(figures),
        _on_hubs(figures),
        _on_gain(figures),
        *_on_log(figures),
    ]


def _on_kind(figures: Figures) -> Finding:
    is_alike = figures.alike < ALIKE
    # Items agree with items more than queries do.
    agrees_as_items = figures.bank_views >= LIKE_ITEMS * figures.item_views
    # Users repeat themselves, but a gallery has most items once.
    is_repeated = figures.groups <= MOST_GROUPS * figures.logged and figures.is_log
    is_of_items = is_alike and agrees_as_items and not (is_repeated or figures.real_queries)

    remedy = "this looks like a bank of items: pass real queries (--queries), which show what it is worth"
    if figures.is_of_another_model:
        remedy = (
            f"below {ANOTHER_MODEL:.0%} of what the items agree on, the bank is of another model: use "
            "queries of this collection, embedded by its model"
        )
    return _finding(
        "kind",
        f"{max(0.0, figures.alike):.1%} of the variance is between bank and gallery, and two "
        f"halves of the dimensions agree on {figures.bank_views:.0%} of the bank, on "
        f"{figures.item_views:.0%} of the items",
        fails=is_of_items or figures.is_of_another_model,
        remedy=remedy,
    )


def _on_agreement(figures: Figures) -> Finding:
    # Of a log, each half has other groups here, but a fit has some of each group in both.
    meaning = "which is the share of the bias to apply"
    if figures.by_kind:
        meaning = "compared by kind"
    elif figures.is_log:
        meaning = "with all near copies of a query in one of them"
    return _finding(
        "agreement",
        f"the two halves of the bank agree to {figures.agreement:.2f}, {meaning}",
        fails=figures.agreement == 0,
        remedy="their biases are noise, so collect more queries",
    )


def _on_two_views(figures: Figures) -> Finding:
    # The agreement of the halves says nothing here: a foreign bank agrees with itself.
    fails = figures.is_surely_below(figures.two_views, VIEWS_AGREE)
    # Of real queries there are as many as the caller wants, and nothing decides after them.
    if figures.real_queries:
        fails = figures.two_views < VIEWS_AGREE
    return _finding(
        "two views",
        f"answers from two halves of the dimensions agree on {figures.two_views:.0%} of the "
        "queries",
        fails=fails,
        remedy=f"below {VIEWS_AGREE:.0%}, the bank is foreign: use queries of this collection, "
        "embedded by its model",
    )


def _on_neighbours(figures: Figures) -> Finding:
    # In a recommender each dimension is a taste of its own: half of them are another model. Items
    # that are described by what they are have the same neighbours in any half; and where they have
    # none, queries still agree on their answers.
    limit = ITEMS_AGREE
    # Where real queries show that hubs lose answers, it has to be beyond doubt.
    if figures.real_queries:
        limit /= 2
    is_split = figures.item_views < limit and figures.two_views < QUERIES_AGREE
    return _finding(
        "neighbours",
        f"two halves of the dimensions agree on the neighbours of {figures.item_views:.0%} of the "
        "items",
        fails=is_split,
        remedy="queries and items agree in too little, as in a recommender, where users may want what "
        "is popular",
    )


def _on_reach(figures: Figures) -> Finding:
    # Strong hubs lower the reach of a good bank too. Only a narrow one fixes the biases with few
    # queries. Real queries show what either is worth.
    is_low = figures.reach < REACHED and figures.signal > FIXED_BY_ONE
    return _finding(
        "reach",
        f"the bank reaches {figures.reach:.0%} of the items that evenly spread queries would reach",
        fails=is_low and not figures.real_queries,
        remedy=f"below {REACHED:.0%}, it covers a corner of the gallery: draw the bank at random "
        "from all queries",
    )


def _on_best_score(figures: Figures) -> Finding:
    return _finding(
        "best score",
        f"the best raw score of a query is {figures.best_z:.1f} standard deviations above its "
        "mean score",
        fails=figures.best_z > FAR_BEST,
        remedy=f"above {FAR_BEST:g}, scores are like those of a re-ranker: search them as they are",
    )


def _on_hubs(figures: Figures) -> Finding:
    # Queries of the bank flatter it, so that a rise within the noise says nothing. Real queries
    # have to show that hubs lose answers.
    most = figures.before + figures.margin
    remedy = "no hubs are removed, so keep the raw search"
    if figures.real_queries:
        # Where hubs take nothing beyond chance, there is nothing to lose.
        beyond_chance = figures.before - figures.by_chance
        most = figures.before - LEAST_FALL * beyond_chance if beyond_chance > 0 else 0.0
        remedy = f"they fall by less than {LEAST_FALL:.0%}, so keep the raw search"
    return _finding(
        "hubs",
        f"excess answers taken by hubs go from {figures.before:.1%} to {figures.after:.1%} on "
        f"queries that were not fitted; {figures.by_chance:.1%} are chance",
        fails=figures.after >= most,
        remedy=remedy,
    )


def _on_gain(figures: Figures) -> Finding:
    gain = expected_gain(figures.excess)
    text = (
        f"hubs take {percent(figures.excess)} of the answers beyond chance, at which banks of "
        f"their own gained {gain:+.1f} points of R@1 in the mean"
    )
    remedy = f"below {LITTLE_EXCESS:.0%}, expect little" if figures.excess < LITTLE_EXCESS else ""
    return Finding("gain", text, remedy=remedy)


def _on_log(figures: Figures) -> list[Finding]:
    # A bank without near copies has no demand to show.
    if not figures.is_log:
        return []
    remedy = (
        "few questions take most of it, so that what one of them gains or loses decides: labelled "
        "pairs of the same log show what a correction is worth"
    )
    text = (
        f"{figures.logged:,} queries are {figures.groups:,} groups of near copies; the largest "
        f"{LARGEST_GROUPS:.0%} of them hold {figures.largest_share:.0%} of all queries"
    )
    return [Finding("log", text, remedy=remedy if figures.is_uneven else "")]


def expected_gain(excess: float) -> float:
    """Return the mean gain in points of R@1 of own banks with this share of excess answers."""
    # Beyond the ends of the curve, the gain of its nearest end is the best guess.
    at, mean, *_ = zip(*EXPECTED_GAIN, strict=True)
    return float(np.interp(excess, at, mean))


def _finding(name: str, text: str, *, fails: bool, remedy: str) -> Finding:
    return Finding(name, text, fails, remedy if fails else "")


def chance_excess(mean: float) -> float:
    """Return the expected share of excess answers of random answers: that of Poisson counts.

    It is E|N − μ| / 2μ, with De Moivre's mean deviation of a Poisson count.
    """
    whole = math.floor(mean)
    # In logarithms: the powers and the factorial overflow from some hundred answers an item on.
    return math.exp(whole * math.log(mean) - mean - math.lgamma(whole + 1))


def distinct_rows(rows: Vectors) -> npt.NDArray[np.int64]:
    """Return the positions of rows (n, d) that are equal to none before them."""
    first_of: dict[bytes, int] = {}
    for position, key in enumerate(row_keys(rows)):
        first_of.setdefault(key, position)
    return np.array(list(first_of.values()), np.int64)


def _two_view_agreements(
    fitted: Vectors,
    searched: Vectors,
    sample: Vectors,
    items: Vectors,
    biases_of: Biases,
    rng: np.random.Generator,
) -> dict[str, Any]:
    """Return the shares of queries, and of items, that find the same item first in both views."""
    firsts: dict[str, list[npt.NDArray[np.int64]]] = {
        name: [] for name in ("two_views", "bank_views", "item_views")
    }
    for vectors in _views((fitted, searched, sample, items), rng):
        view_fitted, view_searched, view_sample, view_items = vectors
        bias = biases_of(QueryBank(view_fitted), view_items)
        firsts["two_views"].append(nearest(view_searched, view_items, 1, bias)[:, 0])
        firsts["bank_views"].append(nearest(_less_mean(view_sample), view_items, 1)[:, 0])
        firsts["item_views"].append(_neighbours(view_items))
    return {name: float((first == second).mean()) for name, (first, second) in firsts.items()}


def _neighbours(items: Vectors) -> npt.NDArray[np.int64]:
    """Return the nearest other item of each of the first items, at most SCORED."""
    # The tokens of a document are many more than those of a query.
    count = COMPARED_DOCUMENTS if is_token_rows(items) else SCORED
    searching = _less_mean(items)[:count]
    two_nearest = nearest(searching, items, min(2, len(items)))
    # An item is its own nearest, but under inner products a longer one may be nearer.
    is_itself = two_nearest[:, 0] == np.arange(len(searching))
    return np.where(is_itself, two_nearest[:, -1], two_nearest[:, 0])


def _less_mean(rows: Vectors) -> Vectors:
    """Return rows (n, d) less their mean; rows of several vectors, whose scores no mean goes with, as
    they are.
    """
    if not is_token_rows(rows):
        rows = rows - rows.mean(0)
    return cast(Vectors, rows)


def _cover(searches: Sequence[tuple[Vectors, Vectors]], items: Vectors) -> float:
    """Return `Figures.cover` of queries (m, d) with the biases (n,) of others, each half once."""
    vectors = pooled(items)
    count = min(REGIONS, len(items) // ITEMS_PER_REGION)
    if count < 2:
        return 1.0
    region, _ = clusters_of(vectors, count, rounds=ROUNDS).nearest(vectors)
    firsts = [nearest(queries, items, 1, bias)[:, 0] for queries, bias in searches]
    answers = np.bincount(region[np.concatenate(firsts)], minlength=count)
    expected = np.bincount(region, minlength=count) * (answers.sum() / len(items))

    # Pearson's statistic has the mean and half the variance of its degrees of freedom, by chance.
    has_items = expected > 0
    statistic = float(((answers - expected)[has_items] ** 2 / expected[has_items]).sum())
    degrees = int(has_items.sum()) - 1
    beyond_chance = statistic - degrees - 2 * math.sqrt(2 * degrees)
    return 1 / (1 + max(0.0, beyond_chance) / float(answers.sum()))


def _views(matrices: Sequence[Vectors], rng: np.random.Generator) -> Iterator[list[Vectors]]:
    """Yield the vectors in each of two random halves of their dimensions after a random rotation.

    The rotation is random signs, then the Fourier transform, whose frequencies are drawn at random.
    """
    # Without the rotation, a few dominant dimensions would make the halves unequal.
    dim = max(4, matrices[0].shape[1])
    signs = rng.choice(np.array([-1, 1], np.float32), matrices[0].shape[1])

    def view(vectors: Vectors, frequencies: npt.NDArray[np.int64]) -> Vectors:
        spectrum = np.fft.rfft(vectors * signs, dim)[:, frequencies]
        # A complex number is two floats side by side.
        return np.ascontiguousarray(spectrum, np.complex64).view(np.float32)

    for frequencies in np.array_split(rng.permutation(dim // 2 + 1), 2):
        yield [mapped(vectors, partial(view, frequencies=frequencies)) for vectors in matrices]


def _best_z(queries: Vectors, items: Vectors) -> float:
    """Return the mean over queries of (largest − mean score) / standard deviation.

    Zero vectors are left out.
    """
    scores = all_scores(queries, items)
    spread = scores.std(1)
    # Equal scores have a spread of rounding errors only, which would divide to anything.
    has_spread = spread > 1e-6 * np.abs(scores).max()
    lead = scores.max(1) - scores.mean(1)
    best = lead[has_spread] / spread[has_spread]
    return float(best.mean()) if len(best) else 0.0
