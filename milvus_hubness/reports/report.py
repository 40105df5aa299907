"""The report on the hubs of a gallery, before and after correction, as plain data."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.files.writing import whole_file
from milvus_hubness.basics.notebooks import framed
from milvus_hubness.basics.texts import number
from milvus_hubness.correction.banks.bank import QueryBank, Vectors
from milvus_hubness.correction.kernels.checks import finite_number
from milvus_hubness.correction.kinds import GalleryKinds
from milvus_hubness.correction.near_copies import with_groups
from milvus_hubness.errors import DimensionMismatch, InvalidParameter
from milvus_hubness.quality import measures, retrieval
from milvus_hubness.quality.bank_checks import bank_coverage
from milvus_hubness.quality.data_faults import Fault
from milvus_hubness.quality.demand import DemandComparison, compare
from milvus_hubness.quality.groups import Group, Members, by_value, shares
from milvus_hubness.quality.labelled import LabelledQueries
from milvus_hubness.quality.rankings import rankings
from milvus_hubness.quality.reciprocity import Reciprocity, reciprocities
from milvus_hubness.quality.right_items import RightItems
from milvus_hubness.quality.tuning import FEWEST_QUERIES, figures_of
from milvus_hubness.quality.verdict import Figures, Finding, findings
from milvus_hubness.reports.page import render
from milvus_hubness.reports.runs import RunWriter


class Bin(NamedTuple):
    """A bin of the histogram: the numbers of items with low ≤ N_k ≤ high."""

    low: int
    high: int
    before: int
    """Without correction."""
    after: int
    """With correction."""


class Item(NamedTuple):
    """A gallery item."""

    key: Hashable
    fields: dict[str, Any]
    """Its scalar fields."""
    before: int
    """N_k without correction."""
    after: int
    """N_k with correction."""


class Swallowed(NamedTuple):
    """A query with a hub in front of its best positive."""

    query: int
    """Its number."""
    text: str | None
    rank: int
    """The rank of the hub without correction."""
    right_before: int | None
    """The rank of the best positive without correction; None without positives."""
    right_after: int | None
    """That rank with correction."""


class Hub(NamedTuple):
    """An item that many queries find."""

    item: Item
    swallows: list[Swallowed]
    """The queries that rank it highest."""


class Antihubs(NamedTuple):
    """The items that no query finds."""

    before: int
    """Their number without correction."""
    after: int
    """Their number with correction."""
    rescued: int
    """How many of them some query finds with correction."""
    by_chance: float
    """Their number if every query found k items at random."""
    examples: list[Item]
    """Some that are rescued."""
    never: list[Item]
    """Some that no query finds with correction either."""


class Point(NamedTuple):
    """The search at one strength."""

    strength: float
    hubness: measures.HubnessSummary
    value: measures.Interval | None
    """Of the measure of the diagnosis; None without positives."""
    by_kind: bool = False
    """Whether it compares by the means of kinds."""


class Region(NamedTuple):
    """A cluster of items."""

    items: int
    """Its size."""
    reached: int
    """How many of its items a bank query finds."""
    central: Hashable
    """The key of its most central item."""


class BankReach(NamedTuple):
    """What of the gallery a bank reaches: items among the first k of one of its queries."""

    bank_size: int
    reached: int
    """Number of items that the bank reaches."""
    by_chance: float
    """That number if bank queries found k items at random."""
    blind_answers: float
    """Share of the raw answers that no bank query reaches."""
    regions: list[Region]
    """Ordered by the share of their items that is reached, least first."""
    farthest: list[tuple[Item, float]]
    """The items with the least similarity to any bank query, with that similarity."""


class Slice(NamedTuple):
    """The items with one value of a field, before and after correction."""

    value: str | None
    """None for all values without a slice of their own."""
    items: int
    share_before: float
    """Of all answers."""
    share_after: float
    """Of all answers."""
    before: measures.HubnessSummary
    """Of N_k among these items."""
    after: measures.HubnessSummary
    """Of N_k among these items."""
    queries: int | None
    """Number of queries with a positive among these items; None without positives."""
    gain: measures.Interval | None
    """Paired difference of the measure of these queries; None for fewer than two."""
    hubs: list[Item]
    """Those with the largest N_k after correction."""

    @property
    def name(self) -> str:
        return "another value" if self.value is None else self.value


class KindReport(NamedTuple):
    """The items of one kind, before and after correction."""

    shares: Group
    """Their shares of the answers."""
    queries: int | None
    """Number of queries with a right item of this kind; None without positives."""
    value_before: float | None
    """The measure of these queries, for which only right items of this kind are right; None without
    such queries."""
    value_after: float | None
    """The same after correction."""
    gain: measures.Interval | None
    """Paired difference of both; None for fewer than two queries."""


@dataclass(frozen=True)
class Diagnosis:
    """The report before correction, at strength 0 and without kinds, and after it."""

    title: str
    n_queries: int
    n_items: int
    k: int
    """The number of first results that count."""

    strength: float
    """That of all values named "after"."""

    before: measures.HubnessSummary
    after: measures.HubnessSummary
    reciprocity: Reciprocity
    histogram: list[Bin]
    hubs: list[Hub]
    antihubs: Antihubs
    strengths: list[Point]
    """The searches, by strength."""

    measure: str
    """By what right answers are measured, such as "R@1"."""

    gain: measures.Interval | None
    """Paired difference of the measure after and before; None without positives."""

    value_before: float | None
    """The measure without correction; None without positives."""

    value_after: float | None
    """The measure with correction; None without positives."""

    retrieval_before: dict[str, float] | None
    """As in `retrieval_summary`; None without positives."""

    retrieval_after: dict[str, float] | None
    """As in `retrieval_summary`; None without positives."""

    coverage: BankReach | None
    """None without a bank."""

    verdict: dict[str, Any] | None
    """That of tuning, with its reason; None if there is none."""

    bank: Figures | None
    """What the bank shows without labels; None without a bank of at least 40 queries."""

    demand: DemandComparison | None
    """How the biases go with the demand that the bank shows; None unless it is a log of which few
    groups of near copies take most."""

    slice_by: str | None
    """The field of `slices`."""

    slices: list[Slice]
    """Largest first."""

    group_by: str | None
    """The field of `groups`."""

    groups: list[Group]
    """Largest first."""

    kind: str | None
    """The field of the kinds by whose means corrected searches compare, or "auto"; None for none."""

    kinds: list[KindReport]
    """Of each kind, and of the items without one."""

    left_out: tuple[str, ...] = ()
    """What of the judgements is left out, a sentence for each reason."""

    faults: tuple[Fault, ...] = ()
    """The faults of the data, if they were looked for."""

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists, numbers and strings, ready for JSON."""
        return {**measures.as_plain(self), "summary": self.summary}

    def save(self, path: str | os.PathLike[str], *, image_field: str | None = None) -> None:
        """Write the page of the diagnosis, such as hubness.html, which needs no other file.

        image_field: a field of items with the URL of an image, which the page shows. Raises
        UnreadableFile if the file cannot be written.
        """
        page = render(self, image_field)
        with whole_file(Path(path)) as file:
            file.write(page)

    def _repr_html_(self) -> str:
        """Return the page for the cell of a notebook. Jupyter calls this."""
        return framed(render(self), f"Hubness of {self.title}")

    @property
    def findings(self) -> list[Finding]:
        """What the bank shows, in words; none without a bank of at least 40 queries."""
        return findings(self.bank) if self.bank else []

    @property
    def summary(self) -> list[str]:
        """The findings as sentences for readers who do not know the measures."""
        even_share = self.k * self.n_queries / self.n_items
        sentences = [
            f"Without correction, one item is among the first {self.k} results of "
            f"{number(self.before.largest)} of {number(self.n_queries)} queries; "
            f"an even share would be {even_share:.1f}. "
            f"{number(self.antihubs.before)} of {number(self.n_items)} items are found by no query; "
            f"with {number(self.n_queries)} random queries that would be "
            f"{number(self.antihubs.by_chance)}.",
            f"With correction at strength {self.strength:g}, the most frequent item is found by "
            f"{number(self.after.largest)} queries, and {number(self.antihubs.after)} items by "
            "none.",
            self._retrieval_sentence(),
        ]
        if self.demand is not None:
            sentence = self.demand.sentence
            sentences.append(f"{sentence[0].upper()}{sentence[1:]}.")
        if len(self.slices) > 1:
            worst = max(self.slices, key=lambda value: value.after.skewness)
            sentences.append(
                "With correction, answers are most uneven among the items whose "
                f"{self.slice_by} is {worst.name}."
            )
        if len(self.groups) > 1:
            sentences.append(_group_sentence(str(self.group_by), self.groups))
        if len(self.kinds) > 1:
            sentences.append(_group_sentence("kind", [each.shares for each in self.kinds]))
        return sentences

    def _retrieval_sentence(self) -> str:
        if self.gain is None or self.value_before is None or self.value_after is None:
            return (
                "No right answers are known here, so this does not say whether the search is "
                "better."
            )

        if self.gain.low > 0:
            change = "a gain that is larger than chance explains."
        elif self.gain.high < 0:
            change = "a loss that is larger than chance explains."
        else:
            change = "a change within chance."
        if self.measure == str(retrieval.R_AT_1):
            return (
                f"A right answer comes first for {self.value_before:.1%} of the queries without "
                f"correction and for {self.value_after:.1%} with it: {change}"
            )
        return (
            f"{self.measure} is {self.value_before:.1%} without correction and "
            f"{self.value_after:.1%} with it: {change}"
        )


def _group_sentence(field: str, groups: Sequence[Group]) -> str:
    """Return the sentence on the group with the most answers beyond its due."""
    most = max(groups, key=lambda group: group.excess_before.estimate)
    if most.right is None:
        due = f"{most.gallery:.1%} of the items"
    else:
        due = f"{most.right.estimate:.1%} of the right answers"
    return (
        f"Items whose {field} is {most.name} are {due}. They take "
        f"{most.first_before.estimate:.1%} of the first answers without correction and "
        f"{most.first_after.estimate:.1%} with it."
    )


HUBS = 9
"""Hubs that a report shows."""
QUERIES_PER_HUB = 4
"""Queries that a report shows of each hub."""
EXAMPLES = 8
"""Items of a list of examples."""
HUBS_PER_SLICE = 3
"""Hubs that a report shows of each slice."""


def diagnose(
    queries: npt.ArrayLike | LabelledQueries,
    gallery: npt.ArrayLike,
    bias: npt.ArrayLike,
    *,
    bank: QueryBank | npt.ArrayLike | None = None,
    keys: Sequence[Hashable] | None = None,
    fields: Sequence[Mapping[str, Any]] | None = None,
    query_texts: Sequence[str] | None = None,
    strength: float = 1.0,
    strengths: Sequence[float] = (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5),
    activated: Sequence[bool] | None = None,
    query_groups: npt.NDArray[np.int64] | None = None,
    query_lengths: npt.ArrayLike | None = None,
    k: int = 10,
    verdict: Mapping[str, Any] | None = None,
    title: str = "Gallery",
    slice_by: str | None = None,
    group_by: str | None = None,
    kinds: GalleryKinds | None = None,
    figures: Figures | None = None,
    runs: RunWriter | None = None,
) -> Diagnosis:
    """Search queries in a gallery by <q, r> − w·b(r) for every strength w, and report the hubs.

    queries: (n_queries, d), or labelled ones; hubs count each query once. gallery: (n_items, d). bias:
    (n_items,) b(r). strength: the w of all
    values named "after"; it and 0 join `strengths`. activated: (n_items,) whether a gate corrects
    queries with this raw best item. query_groups: (n_queries,), the group of near copies of each
    query, by default as `near_copies` finds them. query_lengths: as `lengths` of `reciprocities`.
    bank: (m, d), for its coverage. keys and fields, one per item, and query_texts, one per query, are read only
    where shown. slice_by: a field, whose values get a report of their own; group_by: one whose
    values get their shares of the answers. kinds: those of the gallery, by whose means all searches
    compare but the raw one, that at strength 0. figures: what the bank shows, by default as `tune`
    finds it out. runs: gets the rankings at strength 0 and w. Raises
    InvalidInput, DimensionMismatch, NonFiniteVectors and InvalidParameter.
    """
    right = None
    sendings = measures.ONCE_EACH
    chosen = retrieval.R_AT_1
    if isinstance(queries, LabelledQueries):
        right = queries.right
        sendings = queries.sendings
        chosen = queries.measure
        queries = queries.queries
    query_vectors, items = measures.with_bias(queries, gallery, None)
    own = None if right is None else right.own
    _expect_length("keys", keys, len(items))
    _expect_length("fields", fields, len(items))
    _expect_length("query_texts", query_texts, len(query_vectors))
    _expect_length("the kinds", None if kinds is None else kinds.numbers.tolist(), len(items))
    for value in (strength, *strengths):
        if finite_number("a strength", value) < 0:
            raise InvalidParameter(f"a strength must be at least 0, not {value!r}")

    sent = _Sent.of(query_vectors, items, bias, kinds)
    has_kinds = kinds is not None
    strength = float(strength)
    # Raw and, with kinds, by their means alone, on which a gate decides; then all strengths.
    wanted = {(0.0, False), (0.0, has_kinds), (strength, has_kinds)}
    wanted |= {(float(value), has_kinds) for value in strengths}
    searches: dict[tuple[float, bool], _Search] = {}
    # In ascending order, because a gate needs the search at 0.
    for value, by_kind in sorted(wanted):
        search_queries = sent.at(value, by_kind=by_kind)
        search = _Search.of(search_queries, sent.stored, k, own)
        if right is not None:
            ranks = retrieval.ranks(search_queries, sent.stored, right)
            search = search._replace(ranks=ranks, values=chosen.values(ranks))
        if activated is not None and value:
            search = search.gated(searches[0.0, has_kinds], np.asarray(activated))
        searches[value, by_kind] = search

    before = searches[0.0, False]
    after = searches[strength, has_kinds]
    weights: npt.ArrayLike = strength
    if activated is not None:
        # The others have no bias subtracted.
        weights = strength * searches[0.0, has_kinds].is_activated(activated)
    pair = _Comparison(before, after, keys, fields, query_texts)
    if runs is not None:
        depth = runs.files.depth
        raw_queries = sent.at(0.0, by_kind=False)
        runs.write(runs.files.raw, rankings(raw_queries, sent.stored, depth, before.ranks, own))
        corrected = sent.at(weights, by_kind=has_kinds)
        runs.write(runs.files.corrected, rankings(corrected, sent.stored, depth, after.ranks, own))

    gain = None
    if before.values is not None and after.values is not None:
        gain = sendings.interval(after.values - before.values)

    log = None if bank is None else with_groups(QueryBank.of(bank), items)
    figures = figures or _figures(log, items, kinds)
    demand = None
    if log is not None and figures is not None and figures.is_uneven:
        demand = compare(
            log if kinds is None else replace(log, vectors=kinds.centred_queries(log.vectors)),
            items if kinds is None else kinds.centred_items(items),
            np.float32(strength) * sent.biases,
        )
    return Diagnosis(
        title=title,
        n_queries=len(query_vectors),
        n_items=len(items),
        k=k,
        strength=strength,
        before=measures.hubness_summary(before.counts, k),
        after=measures.hubness_summary(after.counts, k),
        reciprocity=_reciprocity(
            query_vectors, items, sent.biases, weights, query_groups, query_lengths, kinds
        ),
        histogram=_histogram(before.counts, after.counts),
        hubs=pair.hubs(),
        antihubs=pair.antihubs(),
        strengths=[
            search.point(value, k, sendings, by_kind=by_kind)
            for (value, by_kind), search in searches.items()
        ],
        measure=str(chosen),
        gain=gain,
        value_before=before.mean(sendings),
        value_after=after.mean(sendings),
        retrieval_before=before.summary(sendings),
        retrieval_after=after.summary(sendings),
        coverage=None if log is None else pair.reach(log, items),
        verdict=None if verdict is None else measures.as_plain(verdict),
        bank=figures,
        demand=demand,
        slice_by=slice_by,
        slices=[
            pair.slice(name, inside, right, sendings)
            for name, inside in by_value(fields, slice_by, "--slice-by")
        ],
        group_by=group_by,
        groups=shares(
            by_value(fields, group_by, "--group-by"), before.retrieved, after.retrieved, right
        ),
        kind=None if kinds is None else kinds.kinds.rule.source,
        kinds=[] if kinds is None else pair.kinds(kinds, right, chosen, sendings),
    )


class _Sent(NamedTuple):
    """What searches send, and what they search."""

    raw: Vectors
    """(n_queries, d), with a last column for the weight of the bias."""
    by_kind: Vectors
    """The same for searches that compare by kind; `raw` without kinds."""
    stored: Vectors
    """(n_items, d), with a last column of biases: one table serves all searches."""

    @classmethod
    def of(
        cls, queries: Vectors, items: Vectors, bias: npt.ArrayLike, kinds: GalleryKinds | None
    ) -> _Sent:
        if kinds is None:
            raw, stored = measures.with_bias(queries, items, bias)
            return cls(raw, raw, stored)
        table = kinds.item_table(items)
        raw, stored = measures.with_bias(kinds.query_table(queries, 0.0), table, bias)
        by_kind = np.hstack([kinds.query_table(queries), raw[:, -1:]])
        return cls(raw, by_kind, stored)

    @property
    def biases(self) -> Vectors:
        """(n_items,)."""
        return self.stored[:, -1]

    def at(self, strength: npt.ArrayLike, *, by_kind: bool) -> Vectors:
        """Return the queries of a search until the next call. strength: a number, or (n_queries,)."""
        queries = self.by_kind if by_kind else self.raw
        queries[:, -1] = -np.asarray(strength)
        return queries


def _figures(log: QueryBank | None, gallery: Vectors, kinds: GalleryKinds | None) -> Figures | None:
    """Return what a bank with groups shows, as `tune` judges it; None for fewer than 40 queries."""
    if log is None or len(log) < 2 * FEWEST_QUERIES:
        return None
    return figures_of(log, gallery, kinds=kinds)


def _reciprocity(
    queries: Vectors,
    items: Vectors,
    biases: Vectors,
    strength: npt.ArrayLike,
    groups: npt.NDArray[np.int64] | None,
    lengths: npt.ArrayLike | None,
    kinds: GalleryKinds | None,
) -> Reciprocity:
    """Return the reciprocity without correction, and with that of `strength`."""
    if groups is None:
        groups = with_groups(QueryBank(queries), items).groups
    assert groups is not None
    if kinds is None:
        before, after = reciprocities(
            queries, items, biases, [0.0, strength], groups=groups, lengths=lengths
        )
    else:
        [before] = reciprocities(queries, items, biases, [0.0], groups=groups, lengths=lengths)
        # What items choose is by the means of kinds too.
        [after] = reciprocities(
            kinds.centred_queries(queries),
            kinds.centred_items(items),
            biases,
            [strength],
            groups=groups,
            lengths=lengths,
        )
    distinct = int(groups.max()) + 1
    return Reciprocity(before, after, distinct, min(1.0, len(items) / distinct))


def _expect_length(name: str, values: Sequence[object] | None, length: int) -> None:
    if values is not None and len(values) != length:
        raise DimensionMismatch(f"{name} has {len(values)} entries where {length} are needed")


class _Search(NamedTuple):
    """A search at one strength."""

    retrieved: npt.NDArray[np.int64]
    """(n_queries, k), the items, best first."""

    counts: measures.Counts
    """(n_items,) N_k."""

    ranks: retrieval.PositiveRanks | None = None
    """The ranks of all positives; None without positives."""

    values: retrieval.PerQuery | None = None
    """(n_queries,) of the measure; None without positives."""

    @classmethod
    def of(
        cls, queries: Vectors, gallery: Vectors, k: int, own: npt.NDArray[np.int64] | None = None
    ) -> _Search:
        """Return the search without the ranks of positives. own: see `RightItems.own`."""
        retrieved = measures.nearest(queries, gallery, k, own=own)
        return cls(retrieved, measures.k_occurrence(retrieved, len(gallery), k))

    def mean(self, sendings: measures.Sendings) -> float | None:
        """Return the measure of what users send; None without positives."""
        return None if self.values is None else sendings.mean(self.values)

    def summary(self, sendings: measures.Sendings) -> dict[str, float] | None:
        """Return all measures of retrieval; None without positives."""
        if self.ranks is None:
            return None
        return retrieval.retrieval_summary(self.ranks, sendings=sendings)

    def is_activated(self, activated: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return which queries, (n_queries,), have a first item that is activated."""
        is_activated: npt.NDArray[np.bool_] = np.asarray(activated)[self.retrieved[:, 0]]
        return is_activated

    def gated(self, raw: _Search, activated: npt.NDArray[np.bool_]) -> _Search:
        """Return this search for queries whose raw best item is activated, else the raw one."""
        is_corrected = raw.is_activated(activated)
        retrieved = np.where(is_corrected[:, None], self.retrieved, raw.retrieved)
        counts = measures.k_occurrence(retrieved, len(self.counts), retrieved.shape[1])
        gated = _Search(retrieved, counts)
        if self.ranks is None or raw.ranks is None:
            return gated

        assert self.values is not None, "values come with ranks"
        assert raw.values is not None, "values come with ranks"
        return gated._replace(
            ranks=self.ranks.where(is_corrected, raw.ranks),
            values=np.where(is_corrected, self.values, raw.values),
        )

    def point(
        self, strength: float, k: int, sendings: measures.Sendings, *, by_kind: bool
    ) -> Point:
        value = None
        if self.values is not None:
            value = sendings.interval(self.values)
        return Point(strength, measures.hubness_summary(self.counts, k), value, by_kind)

    def rank(self, query: int) -> int | None:
        """Return the rank of a query's best positive; None without positives."""
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

    def key(self, number: int) -> Hashable:
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
        """Return the queries that rank the hub highest, of those whose positive ranks behind."""
        queries, columns = np.nonzero(self.before.retrieved == hub)
        swallowed: list[Swallowed] = []
        # By the hub's rank; few queries are looked at, since the first ones that fit are enough.
        for nth in np.argsort(columns, kind="stable").tolist():
            if len(swallowed) == QUERIES_PER_HUB:
                break
            query = int(queries[nth])
            rank = int(columns[nth]) + 1
            right = self.before.rank(query)
            if right is None or right > rank:
                text = None if self.query_texts is None else str(self.query_texts[query])
                swallowed.append(Swallowed(query, text, rank, right, self.after.rank(query)))
        return swallowed

    def antihubs(self) -> Antihubs:
        before = self.before.counts
        after = self.after.counts
        lost = np.flatnonzero(before == 0)

        # The rescued ones first.
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

    def slice(
        self,
        name: str | None,
        inside: Members,
        right: RightItems | None,
        sendings: measures.Sendings,
    ) -> Slice:
        """Return the slice of the items `inside`, (n_items,) bool."""
        before = self.before.counts
        after = self.after.counts
        k = self.before.retrieved.shape[1]

        queries = gain = None
        before_values = self.before.values
        after_values = self.after.values
        if right is not None and before_values is not None and after_values is not None:
            # Whether a positive of the query is in the slice: only such queries can gain from it.
            is_relevant = right.sums(inside[right.items].astype(np.int64)) > 0
            queries = int(is_relevant.sum())
            if queries > 1:
                gains = after_values[is_relevant] - before_values[is_relevant]
                gain = sendings.of(is_relevant).interval(gains)

        members = np.flatnonzero(inside)
        by_count = np.argsort(-after[members], kind="stable")
        return Slice(
            value=name,
            items=len(members),
            share_before=float(before[members].sum() / before.sum()),
            share_after=float(after[members].sum() / after.sum()),
            before=measures.hubness_summary(before[members], k),
            after=measures.hubness_summary(after[members], k),
            queries=queries,
            gain=gain,
            hubs=self.items(members[by_count[:HUBS_PER_SLICE]]),
        )

    def kinds(
        self,
        kinds: GalleryKinds,
        right: RightItems | None,
        measure: retrieval.Measure,
        sendings: measures.Sendings,
    ) -> list[KindReport]:
        """Return the report of each kind, and of the items without one if there are any."""
        groups = shares(kinds.members, self.before.retrieved, self.after.retrieved, right)
        return [
            self._kind(group, inside, measure, sendings)
            for group, (_, inside) in zip(groups, kinds.members, strict=True)
        ]

    def _kind(
        self,
        group: Group,
        inside: Members,
        measure: retrieval.Measure,
        sendings: measures.Sendings,
    ) -> KindReport:
        before_ranks = self.before.ranks
        after_ranks = self.after.ranks
        if before_ranks is None or after_ranks is None:
            return KindReport(group, None, None, None, None)
        has_one, before_ranks = before_ranks.among(inside)
        if not has_one.any():
            return KindReport(group, 0, None, None, None)

        before = measure.values(before_ranks)
        after = measure.values(after_ranks.among(inside)[1])
        sent = sendings.of(has_one)
        gain = sent.interval(after - before) if len(before) > 1 else None
        return KindReport(group, len(before), sent.mean(before), sent.mean(after), gain)

    def reach(self, bank: QueryBank, gallery: Vectors) -> BankReach:
        """Return what of the gallery (n_items, d) the bank reaches."""
        n_items = len(gallery)
        k = self.before.retrieved.shape[1]
        coverage = bank_coverage(bank, gallery, k=k)
        is_reached = coverage.counts > 0

        sizes = np.bincount(coverage.region)
        reached_counts = np.bincount(coverage.region, is_reached).astype(int)
        regions = [
            Region(
                items=int(sizes[region]),
                reached=int(reached_counts[region]),
                central=self.key(int(coverage.central[region])),
            )
            # The least reached first: queries like its items are missing in the bank.
            for region in np.argsort(reached_counts / sizes, kind="stable")
        ]

        farthest = np.argsort(coverage.similarity, kind="stable")[:EXAMPLES]
        similarities = coverage.similarity[farthest].tolist()
        return BankReach(
            bank_size=len(bank),
            reached=int(is_reached.sum()),
            by_chance=n_items - _unreached(n_items, len(bank), k),
            blind_answers=float((~is_reached)[self.before.retrieved].mean()),
            regions=regions,
            farthest=list(zip(self.items(farthest), similarities, strict=True)),
        )


def _histogram(before: measures.Counts, after: measures.Counts) -> list[Bin]:
    """Return bins of N_k = 0, 1, 2 … 3, 4 … 7, and so on by powers of two."""

    def count_within(counts: measures.Counts, low: int, high: int) -> int:
        return int(((low <= counts) & (counts <= high)).sum())

    bins = []
    low = 0
    high = 0
    while low <= max(before.max(), after.max()):
        before_count = count_within(before, low, high)
        after_count = count_within(after, low, high)
        bins.append(Bin(low, high, before_count, after_count))
        low = high + 1
        high = 2 * high + 1
    return bins


def _unreached(n_items: int, n_queries: int, k: int) -> float:
    """Return the expected number of items that no query finds if queries find k at random."""
    return float(n_items * (1 - k / n_items) ** n_queries)
