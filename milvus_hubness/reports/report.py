"""The report on the hubs of a gallery, before and after correction, as plain data."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.texts import number
from milvus_hubness.correction.banks.bank import QueryBank, Vectors
from milvus_hubness.correction.kernels.checks import finite_number
from milvus_hubness.errors import DimensionMismatch, InvalidParameter
from milvus_hubness.quality import measures
from milvus_hubness.quality.bank_checks import bank_coverage
from milvus_hubness.quality.groups import Group, Members, by_value, shares
from milvus_hubness.quality.tuning import FEWEST_QUERIES, default_biases
from milvus_hubness.quality.verdict import Figures, Finding, examine, findings


class Bin(NamedTuple):
    """A bin of the histogram: the number of items with low ≤ N_k ≤ high."""

    low: int
    high: int
    before: int
    after: int


class Item(NamedTuple):
    """A gallery item, with its N_k before and after. fields: its scalar fields."""

    key: Any
    fields: dict[str, Any]
    before: int
    after: int


class Swallowed(NamedTuple):
    """A query with a hub at this rank, in front of its best positive, and the rank of that positive if available."""

    query: int
    text: str | None
    rank: int
    right_before: int | None
    right_after: int | None


class Hub(NamedTuple):
    """An item that many queries find, and the queries that rank it highest."""

    item: Item
    swallows: list[Swallowed]


class Antihubs(NamedTuple):
    """Numbers of items that no query finds, and of those that are rescued, N_k > 0 after. by_chance: the number if
    every query found k items at random. examples: rescued items. never: some with N_k = 0 before and after."""

    before: int
    after: int
    rescued: int
    by_chance: float
    examples: list[Item]
    never: list[Item]


class Point(NamedTuple):
    """The search at one strength. recall: R@1, if positives are known."""

    strength: float
    hubness: measures.HubnessSummary
    recall: measures.Interval | None


class Region(NamedTuple):
    """The size of a cluster of items, the number of them that a bank query finds, and the key of the most central."""

    items: int
    reached: int
    central: Any


class BankReach(NamedTuple):
    """reached: number of items that are among the first k of some bank query; by_chance: if these found k items at
    random. blind_answers: share of the raw answers that no bank query reaches. farthest: the items with the least
    similarity to any bank query, with that similarity. regions: by their share."""

    bank_size: int
    reached: int
    by_chance: float
    blind_answers: float
    regions: list[Region]
    farthest: list[tuple[Item, float]]


class Slice(NamedTuple):
    """The items with one value of a field, None for all further values, and N_k among them, before and after. share_*:
    of all answers. gain: paired difference of R@1 of the `queries` with a positive among them. hubs: those with the
    largest N_k after."""

    value: str | None
    items: int
    share_before: float
    share_after: float
    before: measures.HubnessSummary
    after: measures.HubnessSummary
    queries: int | None
    gain: measures.Interval | None
    hubs: list[Item]

    @property
    def name(self) -> str:
        return "another value" if self.value is None else self.value


@dataclass(frozen=True)
class Diagnosis:
    """The report before (strength 0) and after correction at `strength`. gain: paired difference of R@1 after and
    before. retrieval_*: as in `retrieval_summary`. These and recall need positives. slices, groups: by the fields
    `slice_by` and `group_by`, largest first. bank: what the bank shows without labels."""

    title: str
    n_queries: int
    n_items: int
    k: int
    strength: float
    before: measures.HubnessSummary
    after: measures.HubnessSummary
    histogram: list[Bin]
    hubs: list[Hub]
    antihubs: Antihubs
    strengths: list[Point]
    gain: measures.Interval | None
    retrieval_before: dict[str, float] | None
    retrieval_after: dict[str, float] | None
    coverage: BankReach | None
    verdict: dict[str, Any] | None
    bank: Figures | None
    slice_by: str | None
    slices: list[Slice]
    group_by: str | None
    groups: list[Group]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists, numbers and strings, ready for JSON."""
        return {**measures.as_plain(self), "summary": self.summary}

    @property
    def findings(self) -> list[Finding]:
        """What the bank shows, in words; none without a bank of at least 40 queries."""
        return findings(self.bank) if self.bank else []

    @property
    def summary(self) -> list[str]:
        """The findings as sentences for readers who do not know the measures."""
        even = self.k * self.n_queries / self.n_items
        largest, lost = self.before.largest, self.antihubs
        sentences = [
            f"Without correction, one item is among the first {self.k} results of {number(largest)} of "
            f"{number(self.n_queries)} queries; an even share would be {even:.1f}. "
            f"{number(lost.before)} of {number(self.n_items)} items are found by no query.",
            f"With correction at strength {self.strength:g}, the most frequent item is found by "
            f"{number(self.after.largest)} queries, and {number(lost.after)} items by none.",
        ]
        if self.gain and self.retrieval_before and self.retrieval_after:
            is_clear = self.gain.low > 0 or self.gain.high < 0
            change = "a gain" if self.gain.estimate > 0 else "a loss"
            sentences.append(
                f"A right answer comes first for {self.retrieval_before['R@1']:.1%} of the queries without correction "
                f"and for {self.retrieval_after['R@1']:.1%} with it: "
                + (
                    f"{change} that is larger than chance explains."
                    if is_clear
                    else "a change within chance."
                )
            )
        else:
            sentences.append(
                "No right answers are known here, so this does not say whether the search is better."
            )
        if len(self.slices) > 1:
            worst = max(self.slices, key=lambda part: part.after.skewness)
            sentences.append(
                f"With correction, answers are most uneven among the items whose {self.slice_by} is {worst.name}."
            )
        if len(self.groups) > 1:
            most = max(self.groups, key=lambda group: group.excess_before.estimate)
            due = (
                (most.gallery, "items")
                if most.right is None
                else (most.right.estimate, "right answers")
            )
            sentences.append(
                f"Items whose {self.group_by} is {most.name} are {due[0]:.1%} of the {due[1]}. They take "
                f"{most.first_before.estimate:.1%} of the first answers without correction and "
                f"{most.first_after.estimate:.1%} with it."
            )
        return sentences


HUBS = 9
QUERIES_PER_HUB = 4
EXAMPLES = 8
HUBS_PER_SLICE = 3


def diagnose(
    queries: npt.ArrayLike,
    gallery: npt.ArrayLike,
    bias: npt.ArrayLike,
    *,
    bank: QueryBank | npt.ArrayLike | None = None,
    positives: measures.Positives | None = None,
    keys: Sequence[Hashable] | None = None,
    fields: Sequence[Mapping[str, Any]] | None = None,
    query_texts: Sequence[str] | None = None,
    strength: float = 1.0,
    strengths: Sequence[float] = (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5),
    activated: Sequence[bool] | None = None,
    k: int = 10,
    verdict: Mapping[str, Any] | None = None,
    title: str = "Gallery",
    slice_by: str | None = None,
    group_by: str | None = None,
) -> Diagnosis:
    """Search queries (n_queries, d) in a gallery (n_items, d) by <q, r> − w·b(r) for every strength w; report the hubs.

    bias (n_items,) is b(r). strength: the w of all values named "after"; it and 0 join `strengths`. activated:
    (n_items,) whether a gate corrects queries with this raw best item. bank (m, d): for its coverage. positives: as for
    `ranks`. keys and fields, one per item, and query_texts, one per query, are read only where shown. slice_by: a
    field, whose values get a report of their own; group_by: one whose values get their shares of the answers. Raises
    InvalidInput, DimensionMismatch, NonFiniteVectors and InvalidParameter.
    """
    query_vectors, stored = measures.with_bias(queries, gallery, bias)
    items, texts = len(stored), len(query_vectors)
    for name, values, n in (
        ("keys", keys, items),
        ("fields", fields, items),
        ("query_texts", query_texts, texts),
    ):
        if values is not None and len(values) != n:
            raise DimensionMismatch(f"{name} has {len(values)} entries where {n} are needed")
    for value in (strength, *strengths):
        if finite_number("a strength", value) < 0:
            raise InvalidParameter(f"a strength must be at least 0, not {value!r}")
    strength, points = float(strength), []
    searches: dict[float, _Search] = {}
    for value in sorted({0.0, strength, *map(float, strengths)}):
        query_vectors[:, -1] = -value
        retrieved = measures.nearest(query_vectors, stored, k)
        placed = None if positives is None else measures.ranks(query_vectors, stored, positives)
        if activated is not None and value:
            raw, opens = searches[0.0], np.asarray(activated)[searches[0.0].retrieved[:, 0]]
            retrieved = np.where(opens[:, None], retrieved, raw.retrieved)
            if placed and raw.ranks:
                of_positives = np.repeat(opens, np.diff(placed.starts))
                placed = placed._replace(
                    ranks=np.where(of_positives, placed.ranks, raw.ranks.ranks)
                )
        counts = measures.k_occurrence(retrieved, len(stored), k)
        searches[value] = _Search(retrieved, counts, placed)
        recall = measures.confidence_interval(measures.hits(placed, 1)) if placed else None
        points.append(Point(value, measures.hubness_summary(counts, k), recall))
    before, after = searches[0.0], searches[strength]
    pair, gain = _Comparison(before, after, keys, fields, query_texts), None
    if before.ranks and after.ranks:
        gain = measures.paired_difference(
            measures.hits(before.ranks, 1), measures.hits(after.ranks, 1)
        )
    return Diagnosis(
        title=title,
        n_queries=len(query_vectors),
        n_items=len(stored),
        k=k,
        strength=strength,
        before=measures.hubness_summary(before.counts, k),
        after=measures.hubness_summary(after.counts, k),
        histogram=_histogram(before.counts, after.counts),
        hubs=pair.hubs(),
        antihubs=pair.antihubs(),
        strengths=points,
        gain=gain,
        retrieval_before=before.ranks and measures.retrieval_summary(before.ranks),
        retrieval_after=after.ranks and measures.retrieval_summary(after.ranks),
        coverage=None if bank is None else pair.reach(QueryBank.of(bank), stored[:, :-1]),
        verdict=None if verdict is None else measures.as_plain(verdict),
        bank=_figures(bank, stored[:, :-1]),
        slice_by=slice_by,
        slices=[
            pair.part(name, inside, positives)
            for name, inside in by_value(fields, slice_by, "--slice-by")
        ],
        group_by=group_by,
        groups=shares(
            by_value(fields, group_by, "--group-by"), before.retrieved, after.retrieved, positives
        ),
    )


def _figures(bank: QueryBank | npt.ArrayLike | None, gallery: Vectors) -> Figures | None:
    """Return what a bank of at least 40 queries shows."""
    queries = None if bank is None else QueryBank.of(bank).vectors
    if queries is None or len(queries) < 2 * FEWEST_QUERIES:
        return None
    return examine(queries, gallery, default_biases)


class _Search(NamedTuple):
    """A search: its results (n_queries, k), the count of each item, and the ranks of the positives if known."""

    retrieved: npt.NDArray[np.int64]
    counts: measures.Counts
    ranks: measures.PositiveRanks | None

    def rank(self, query: int) -> int | None:
        return None if self.ranks is None else int(self.ranks.best[query])


class _Comparison(NamedTuple):
    """Two searches, and the names of the items and queries."""

    before: _Search
    after: _Search
    keys: Sequence[Hashable] | None
    fields: Sequence[Mapping[str, Any]] | None
    query_texts: Sequence[str] | None

    def items(self, numbers: npt.NDArray[np.int64]) -> list[Item]:
        return [
            Item(
                self.key(number),
                {} if self.fields is None else measures.as_plain(self.fields[number]),
                int(self.before.counts[number]),
                int(self.after.counts[number]),
            )
            for number in numbers.tolist()
        ]

    def key(self, number: int) -> Any:
        return number if self.keys is None else measures.as_plain(self.keys[number])

    def hubs(self) -> list[Hub]:
        """Return the items with the largest counts, with the queries that rank them highest."""
        worst = np.argsort(-self.before.counts, kind="stable")[:HUBS]
        worst = worst[self.before.counts[worst] > 0]
        return [
            Hub(item, self.swallowed(hub))
            for item, hub in zip(self.items(worst), worst.tolist(), strict=True)
        ]

    def swallowed(self, hub: int) -> list[Swallowed]:
        """Return the queries that rank the hub highest, among those whose positive ranks behind it."""
        queries, places = np.nonzero(self.before.retrieved == hub)
        chosen: list[Swallowed] = []
        for nth in np.argsort(places, kind="stable").tolist():
            query, rank = int(queries[nth]), int(places[nth]) + 1
            right = self.before.rank(query)
            if len(chosen) < QUERIES_PER_HUB and (right is None or right > rank):
                text = None if self.query_texts is None else str(self.query_texts[query])
                chosen.append(Swallowed(query, text, rank, right, self.after.rank(query)))
        return chosen

    def antihubs(self) -> Antihubs:
        before, after = self.before.counts, self.after.counts
        lost = np.flatnonzero(before == 0)
        order = lost[np.argsort(-after[lost], kind="stable")]
        rescued = int((after[lost] > 0).sum())
        return Antihubs(
            before=len(lost),
            after=int((after == 0).sum()),
            rescued=rescued,
            by_chance=_unreached(len(before), *self.before.retrieved.shape),
            examples=self.items(order[: min(EXAMPLES, rescued)]),
            never=self.items(order[rescued:][:EXAMPLES]),
        )

    def part(
        self, name: str | None, inside: Members, positives: measures.Positives | None
    ) -> Slice:
        """Return the slice of the items `inside`, (n_items,) bool."""
        before, after, own = self.before.counts, self.after.counts, np.flatnonzero(inside)
        k = self.before.retrieved.shape[1]
        queries = gain = None
        if positives is not None and self.before.ranks and self.after.ranks:
            items, starts = measures.checked_positives(
                positives, len(self.before.retrieved), len(before)
            )
            asking = np.logical_or.reduceat(inside[items], starts[:-1])
            queries = int(asking.sum())
            if queries > 1:
                hits = (
                    measures.hits(ranks, 1)[asking]
                    for ranks in (self.before.ranks, self.after.ranks)
                )
                gain = measures.paired_difference(*hits)
        return Slice(
            value=name,
            items=len(own),
            share_before=float(before[own].sum() / before.sum()),
            share_after=float(after[own].sum() / after.sum()),
            before=measures.hubness_summary(before[own], k),
            after=measures.hubness_summary(after[own], k),
            queries=queries,
            gain=gain,
            hubs=self.items(own[np.argsort(-after[own], kind="stable")[:HUBS_PER_SLICE]]),
        )

    def reach(self, bank: QueryBank, gallery: Vectors) -> BankReach:
        n_items, k = len(gallery), self.before.retrieved.shape[1]
        coverage = bank_coverage(bank, gallery, k=k)
        reached = coverage.counts > 0
        sizes, hits = (
            np.bincount(coverage.region),
            np.bincount(coverage.region, reached).astype(int),
        )
        farthest = np.argsort(coverage.similarity, kind="stable")[:EXAMPLES]
        return BankReach(
            bank_size=len(bank),
            reached=int(reached.sum()),
            by_chance=n_items - _unreached(n_items, len(bank), k),
            blind_answers=float((~reached)[self.before.retrieved].mean()),
            regions=[
                Region(
                    int(sizes[region]), int(hits[region]), self.key(int(coverage.central[region]))
                )
                for region in np.argsort(hits / sizes, kind="stable")
            ],
            farthest=list(
                zip(self.items(farthest), coverage.similarity[farthest].tolist(), strict=True)
            ),
        )


def _histogram(before: measures.Counts, after: measures.Counts) -> list[Bin]:
    """Return bins of N_k = 0, 1, 2 … 3, 4 … 7, and so on by powers of two."""
    bins, low, high = [], 0, 0
    while low <= max(before.max(), after.max()):
        inside = [int(((low <= counts) & (counts <= high)).sum()) for counts in (before, after)]
        bins.append(Bin(low, high, *inside))
        low, high = high + 1, 2 * high + 1
    return bins


def _unreached(n_items: int, n_queries: int, k: int) -> float:
    """Return the expected number of items that no query finds if queries find k at random."""
    return float(n_items * (1 - k / n_items) ** n_queries)
