"""The verdict without labels: whether a bank fits a gallery, and how much of a correction to apply.

The thresholds were chosen on tasks that include those of `benchmarks/defaults.py`, so its figures
are in sample. To change what the verdict decides: `Figures` has what is measured, by `examine`;
each `_on_…` function judges one of them, and `findings` lists these; `tuning.judge_unlabelled` turns
findings into a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from milvus_hubness.correction.banks.bank import QueryBank, Vectors
from milvus_hubness.correction.estimators.base import correlation
from milvus_hubness.quality.bank_checks import THRESHOLD, drift_between, reach
from milvus_hubness.quality.measures import DEPTH, assess, excess_answers_of, nearest

MOST_ITEMS = 10_000
"""Items that are read, drawn at random."""
MOST_QUERIES = 5_000
"""Queries of the bank that are read, drawn at random."""
SCORED = 1_000
"""Queries whose scores of all items are read for the best score and for the drift."""

# Each threshold was chosen on the rows of `python -m benchmarks.defaults` that are named under it.
# The benchmark also prints what the verdict gains and loses without each finding.
VIEWS_AGREE = 0.06
"""Two-view agreement below which a bank is foreign. Rows: banks of other data sets."""
REACHED = 0.35
"""Reach below which a bank covers a corner of the gallery. Rows: banks that crowd few items."""
FAR_BEST = 8.0
"""Standard deviations of the best score above which scores
are like those of a re-ranker. Rows: `reranker_scores`."""
EXCESS_TO_HALVE = 0.12
"""Share of excess answers beyond chance above which half
the strength is applied. Rows: banks of one topic."""

EXPECTED_GAIN = (
    (0.002, -3.03, -3.93, -1.83),
    (0.152, 2.98, 1.56, 3.6),
    (0.253, 4.03, 1.95, 5.79),
    (0.34, 5.33, 2.39, 7.75),
    (0.415, 5.98, 3.29, 8.62),
)
"""Two-view agreement, and the mean and quartiles of the gain in points of R@1: `expected_gain` as
`benchmarks.defaults` saves it. The report draws it; no verdict reads it."""

Biases: TypeAlias = Callable[[QueryBank, Vectors], Vectors]
"""Computes the biases (n,) of items (n, d) from a bank."""


class Figures(NamedTuple):
    """What a bank and a gallery show without labels."""

    agreement: float
    """Correlation of the biases from two halves of the bank, at least 0."""

    two_views: float
    """Share of the queries that find the same item first in both of two random halves of the
    dimensions, each corrected by itself."""

    reach: float
    """Number of items that are the nearest of some bank query, over its expectation if all items
    were equally likely. It is counted on raw answers, so strong hubs lower it as well."""

    best_z: float
    """Mean of the best raw score of a query, in standard deviations above its mean score."""

    before: float
    """Excess answers taken by hubs on queries that were not fitted, without correction."""

    after: float
    """Excess answers taken by hubs on these queries, with correction."""

    by_chance: float
    """Excess answers taken by hubs if answers are random."""

    alike: float
    """Share of the variance that is between bank and gallery."""

    real_queries: bool = False
    """Whether the searches were with real queries, not with queries of the bank."""

    @property
    def narrow(self) -> bool:
        """Whether the bank may be of one topic: hubs keep many answers beyond chance.

        With real queries the figures before and after decide, and nothing is left to suspect.
        """
        beyond_chance = self.after - self.by_chance
        return not self.real_queries and beyond_chance > EXCESS_TO_HALVE * (1 - self.by_chance)


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
    bank: Vectors,
    gallery: Vectors,
    biases_of: Biases,
    *,
    queries: Vectors | None = None,
    seed: int = 0,
) -> Figures:
    """Return the figures of a bank (m, d), m ≥ 2, on a gallery (n, d).

    At most 5,000 and 10,000 rows of them are read. biases_of: fits items (n, d) at full strength,
    on half of the bank. queries: by default the other half.
    """
    rng = np.random.default_rng(seed)
    sample = bank[rng.permutation(len(bank))[:MOST_QUERIES]]
    items = gallery[np.sort(rng.permutation(len(gallery))[:MOST_ITEMS])]

    # No bias may be judged by the queries that it was fitted on: they flatter it.
    middle = len(sample) // 2
    fitted = sample[:middle]
    rest = sample[middle:]
    searched = rest if queries is None else queries[:MOST_QUERIES]

    bias = biases_of(QueryBank(fitted), items)
    agreement = correlation(bias, biases_of(QueryBank(rest), items))
    outcome = assess(searched, items, [np.zeros_like(bias), np.float32(agreement) * bias])
    before, after = excess_answers_of(outcome, len(items)).tolist()

    answers_per_item = min(DEPTH, len(items)) * len(searched) / len(items)
    # One permutation: the share of the variance is read, its p-value is not.
    drift = drift_between(sample, items, at_most=SCORED, permutations=1, seed=seed)
    return Figures(
        agreement=agreement,
        two_views=_two_view_agreement(fitted, searched, items, biases_of, rng),
        reach=reach(sample, items),
        best_z=_best_z(sample[:SCORED], items),
        before=before,
        after=after,
        by_chance=chance_excess(answers_per_item),
        alike=drift.statistic,
        real_queries=queries is not None,
    )


def findings(figures: Figures) -> list[Finding]:
    """Return the figures in words, in the order in which reports show them.

    Each has a remedy if it speaks against a correction or is a warning.
    """
    in_words = [
        _on_agreement(figures),
        _on_two_views(figures),
        _on_reach(figures),
        _on_best_score(figures),
        _on_hubs(figures),
    ]
    if figures.alike < THRESHOLD:
        in_words.append(_ITEMS_AS_BANK)
    return in_words


def _on_agreement(figures: Figures) -> Finding:
    return _finding(
        "agreement",
        f"the two halves of the bank agree to {figures.agreement:.2f}, which is the share of the "
        "bias to apply",
        fails=figures.agreement == 0,
        remedy="their biases are noise, so collect more queries",
    )


def _on_two_views(figures: Figures) -> Finding:
    # The agreement of the halves says nothing here: a foreign bank agrees with itself.
    return _finding(
        "two views",
        f"answers from two halves of the dimensions agree on {figures.two_views:.0%} of the "
        "queries",
        fails=figures.two_views < VIEWS_AGREE,
        remedy=f"below {VIEWS_AGREE:.0%}, the bank is foreign: use queries of this collection, "
        "embedded by its model",
    )


def _on_reach(figures: Figures) -> Finding:
    return _finding(
        "reach",
        f"the bank reaches {figures.reach:.0%} of the items that evenly spread queries would reach",
        fails=figures.reach < REACHED,
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
    # No margin for noise: with few queries a fall may be missed by chance.
    return _finding(
        "hubs",
        f"excess answers taken by hubs go from {figures.before:.1%} to {figures.after:.1%} on "
        "queries that were not fitted",
        fails=figures.after >= figures.before,
        remedy="no hubs are removed, so keep the raw search",
    )


def _finding(name: str, text: str, *, fails: bool, remedy: str) -> Finding:
    return Finding(name, text, fails, remedy if fails else "")


# A warning that refuses nothing, because queries may well be distributed like the items they seek.
_ITEMS_AS_BANK = Finding(
    "kind",
    "bank and gallery are distributed alike",
    remedy="check that it holds queries, not items",
)


def chance_excess(mean: float) -> float:
    """Return the expected share of excess answers of random answers: that of Poisson counts.

    It is E|N − μ| / 2μ, with De Moivre's mean deviation of a Poisson count.
    """
    whole = math.floor(mean)
    # In logarithms: the powers and the factorial overflow from some hundred answers an item on.
    return math.exp(whole * math.log(mean) - mean - math.lgamma(whole + 1))


def _two_view_agreement(
    fitted: Vectors,
    searched: Vectors,
    items: Vectors,
    biases_of: Biases,
    rng: np.random.Generator,
) -> float:
    """Return the share of the queries whose first item is the same in both views."""
    first_items = []
    for view_fitted, view_searched, view_items in _views((fitted, searched, items), rng):
        view_bias = biases_of(QueryBank(view_fitted), view_items)
        first_items.append(nearest(view_searched, view_items, 1, view_bias)[:, 0])
    return float((first_items[0] == first_items[1]).mean())


def _views(matrices: Sequence[Vectors], rng: np.random.Generator) -> Iterator[list[Vectors]]:
    """Yield the vectors in each of two random halves of their dimensions after a random rotation.

    The rotation is random signs, then the Fourier transform, whose frequencies are drawn at random.
    """
    # Without the rotation, a few dominant dimensions would make the halves unequal.
    dim = max(4, matrices[0].shape[1])
    signs = rng.choice(np.array([-1, 1], np.float32), matrices[0].shape[1])
    spectra = [np.fft.rfft(vectors * signs, dim).astype(np.complex64) for vectors in matrices]

    for frequencies in np.array_split(rng.permutation(dim // 2 + 1), 2):
        yield [
            # A complex number is two floats side by side.
            np.ascontiguousarray(spectrum[:, frequencies]).view(np.float32)
            for spectrum in spectra
        ]


def _best_z(queries: Vectors, items: Vectors) -> float:
    """Return the mean over queries of (largest − mean score) / standard deviation.

    Zero vectors are left out.
    """
    scores = queries @ items.T
    spread = scores.std(1)
    # Equal scores have a spread of rounding errors only, which would divide to anything.
    has_spread = spread > 1e-6 * np.abs(scores).max()
    lead = scores.max(1) - scores.mean(1)
    best = lead[has_spread] / spread[has_spread]
    return float(best.mean()) if len(best) else 0.0
