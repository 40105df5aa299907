"""The report on the hubs of a gallery, before and after correction, as plain data."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.defaults import FEWEST_QUERIES
from milvus_hubness.basics.files.writing import whole_file
from milvus_hubness.basics.notebooks import framed
from milvus_hubness.basics.texts import number
from milvus_hubness.correction.banks.bank import QueryBank, Vectors
from milvus_hubness.correction.codec.arrays import lengths_of
from milvus_hubness.correction.kernels.checks import finite_number
from milvus_hubness.correction.kinds import GalleryKinds
from milvus_hubness.correction.near_copies import directions_of, groups_at, with_groups
from milvus_hubness.errors import DimensionMismatch, InvalidInput, InvalidParameter
from milvus_hubness.jobs.common.gallery import Gallery
from milvus_hubness.jobs.common.judgements import Judgements
from milvus_hubness.quality import measures, retrieval
from milvus_hubness.quality.bank_checks import bank_coverage
from milvus_hubness.quality.data_faults import Fault
from milvus_hubness.quality.demand import DemandComparison, compare
from milvus_hubness.quality.groups import Group, Members, by_value, expect_field, shares
from milvus_hubness.quality.labelled import LabelledQueries
from milvus_hubness.quality.rankings import Ranking, rankings
from milvus_hubness.quality.reciprocity import Reciprocity, reciprocities
from milvus_hubness.quality.retrieval import R_AT_1, Measure
from milvus_hubness.quality.right_items import RightItems
from milvus_hubness.quality.tuning import figures_of
from milvus_hubness.quality.verdict import Figures, Finding, findings
from milvus_hubness.reports.biased import Biased, Flags
from milvus_hubness.reports.page import render
from milvus_hubness.reports.runs import RunFiles, RunWriter


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

    coverage: BankReach

    verdict: dict[str, Any] | None
    """That of tuning, with its reason; None if there is none."""

    bank: Figures | None
    """What the bank shows without labels; None for fewer than 40 queries."""

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
        if self.measure == str(R_AT_1):
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


class Detail(NamedTuple):
    """What a diagnosis shows beyond the hubs."""

    texts: Sequence[str] | None = None
    """Of the queries; those of judgements are in these."""
    slice_by: str | None = None
    """A scalar field, whose values get a report of their own."""
    group_by: str | None = None
    """A scalar field, whose values get their shares of the answers."""
    runs: RunFiles | None = None
    """Files for evaluators, with the rankings and the judgements."""
    image_field: str | None = None
    """A scalar field with the images of the rows, which a page shows."""

    def expect_possible(self, gallery: Gallery) -> None:
        """Raise InvalidInput for what the rows of a gallery cannot show."""
        if gallery.layout.multi_vectors:
            raise InvalidInput(
                f"the hubs of {gallery.title!r} cannot be shown, as its rows have several vectors each: check "
                "without a page says whether correction helps"
            )
        named = {
            "--slice-by": self.slice_by,
            "--group-by": self.group_by,
            "--image-field": self.image_field,
        }
        for option, field in named.items():
            if field is not None:
                expect_field(gallery.fields, field, option)
        if self.runs is not None:
            self.runs.check_keys(gallery.keys)


NO_DETAIL = Detail()
"""The hubs alone."""


class BankFacts(NamedTuple):
    """What is known of a bank before a diagnosis."""

    verdict: Mapping[str, Any] | None = None
    """That of tuning, with its reason; None if there is none."""
    figures: Figures | None = None
    """What the bank shows, as `tune` finds it out; None to look for it."""
    cosine: float | None = None
    """The smallest one between near copies; None to look for it."""


NOTHING_KNOWN = BankFacts()

STRENGTHS = (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5)
"""Strengths that a report shows, with 0 and the one in use."""


def diagnose(
    biased: Biased,
    queries: QueryBank | Judgements,
    *,
    measure: str | Measure = R_AT_1,
    known: BankFacts = NOTHING_KNOWN,
    detail: Detail = NO_DETAIL,
    strengths: Sequence[float] = STRENGTHS,
    k: int = 10,
) -> Diagnosis:
    """Search queries in a gallery by <q, r> − w·b(r) for every strength w, and report the hubs.

    queries: of the dimension of the field, or judgements about the rows, see `Judgements.within`. Hubs
    count each query once, measures as often as users send it. measure: R@k, MRR, MAP or nDCG@k.
    strengths: the w, which 0 and that of the biases join. With kinds, all searches compare by their
    means but the raw one. Writes the runs of the detail. Raises InvalidInput, DimensionMismatch,
    InvalidParameter and UnreadableFile.
    """
    gallery = biased.gallery
    detail.expect_possible(gallery)
    for value in (biased.strength, *strengths):
        if finite_number("a strength", value) < 0:
            raise InvalidParameter(f"a strength must be at least 0, not {value!r}")
    chosen = Measure.of(measure)
    judged = queries if isinstance(queries, Judgements) else None
    bank = queries.queries if isinstance(queries, Judgements) else queries
    bank.expect_dim(gallery.layout.dim, "the field")
    texts = detail.texts if judged is None else judged.texts
    if texts is not None and len(texts) != len(bank):
        raise DimensionMismatch(f"texts has {len(texts)} entries where {len(bank)} are needed")

    sent = _Sent.of(gallery.layout.reduce_queries(bank.vectors), biased)
    labelled = None if judged is None else judged.labelled(gallery.keys, chosen)
    has_kinds = biased.kinds is not None
    strength = float(biased.strength)
    # Raw and, with kinds, by their means alone, on which a gate decides; then all strengths.
    wanted = {(0.0, False), (0.0, has_kinds), (strength, has_kinds)}
    wanted |= {(float(value), has_kinds) for value in strengths}
    searches: dict[tuple[float, bool], _Search] = {}
    # In ascending order, because a gate needs the search at 0.
    for value, by_kind in sorted(wanted):
        search = _Search.of(sent.at(value, by_kind=by_kind), sent.stored, k, labelled)
        if biased.activated is not None and value:
            search = search.gated(searches[0.0, has_kinds], biased.activated)
        searches[value, by_kind] = search

    weights: npt.ArrayLike = strength
    if biased.activated is not None:
        # The others have no bias subtracted.
        weights = strength * searches[0.0, has_kinds].is_activated(biased.activated)
    before = searches[0.0, False]
    after = searches[strength, has_kinds]
    pair = _Comparison(before, after, gallery, texts, labelled)
    if detail.runs is not None:
        names = judged.names if judged is not None else list(map(str, range(len(bank))))
        writer = RunWriter(detail.runs, names, gallery.keys)
        raw = sent.at(0.0, by_kind=False)
        writer.write(detail.runs.raw, pair.rankings(before, raw, sent.stored, detail.runs.depth))
        corrected = sent.at(weights, by_kind=has_kinds)
        writer.write(
            detail.runs.corrected,
            pair.rankings(after, corrected, sent.stored, detail.runs.depth),
        )
        if judged is not None:
            detail.runs.write_qrels(judged)

    items = biased.reduced
    log = with_groups(biased.bank, items)
    figures = known.figures or _figures(log, items, biased.kinds)
    return Diagnosis(
        title=biased.title,
        n_queries=len(bank),
        n_items=len(items),
        k=k,
        strength=strength,
        before=measures.hubness_summary(before.counts, k),
        after=measures.hubness_summary(after.counts, k),
        reciprocity=_reciprocity(biased, bank, sent.biases, weights, known.cosine),
        histogram=_histogram(before.counts, after.counts),
        hubs=pair.hubs(),
        antihubs=pair.antihubs(),
        strengths=[
            search.point(value, k, pair.sendings, by_kind=by_kind)
            for (value, by_kind), search in searches.items()
        ],
        measure=str(chosen),
        gain=pair.gain,
        value_before=before.mean(pair.sendings),
        value_after=after.mean(pair.sendings),
        retrieval_before=before.summary(pair.sendings),
        retrieval_after=after.summary(pair.sendings),
        coverage=pair.reach(log, items),
        verdict=None if known.verdict is None else measures.as_plain(known.verdict),
        bank=figures,
        demand=_demand(biased, log, strength * sent.biases, figures),
        slice_by=detail.slice_by,
        slices=[
            pair.slice(name, inside)
            for name, inside in by_value(gallery.fields, detail.slice_by, "--slice-by")
        ],
        group_by=detail.group_by,
        groups=pair.shares(by_value(gallery.fields, detail.group_by, "--group-by")),
        kind=None if biased.kinds is None else biased.kinds.kinds.rule.source,
        kinds=[] if biased.kinds is None else pair.kinds(biased.kinds.members),
        left_out=() if judged is None else judged.left_out,
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
    def of(cls, queries: Vectors, biased: Biased) -> _Sent:
        # A constant moves no answer, but the strengths of the report would all show it.
        biases = biased.biases - np.float32(biased.biases.mean())
        raw, stored = measures.with_bias(biased.raw(queries), biased.items, biases)
        if biased.kinds is None:
            return cls(raw, raw, stored)
        return cls(raw, np.hstack([biased.sent(queries), raw[:, -1:]]), stored)

    @property
    def biases(self) -> Vectors:
        """(n_items,)."""
        return self.stored[:, -1]

    def at(self, strength: npt.ArrayLike, *, by_kind: bool) -> Vectors:
        """Return the queries of a search until the next call. strength: a number, or (n_queries,)."""
        queries = self.by_kind if by_kind else self.raw
        queries[:, -1] = -np.asarray(strength)
        return queries


def _figures(log: QueryBank, items: Vectors, kinds: GalleryKinds | None) -> Figures | None:
    """Return what a bank with groups shows, as `tune` judges it; None for fewer than 40 queries."""
    if len(log) < 2 * FEWEST_QUERIES:
        return None
    return figures_of(log, items, kinds=kinds)


def _demand(
    biased: Biased, log: QueryBank, biases: Vectors, figures: Figures | None
) -> DemandComparison | None:
    """Return how the biases go with the demand that the bank shows; None if that is even."""
    if figures is None or not figures.is_uneven:
        return None
    items = biased.reduced
    if biased.kinds is not None:
        log = replace(log, vectors=biased.kinds.centred_queries(log.vectors))
        items = biased.kinds.centred_items(items)
    return compare(log, items, np.asarray(biases, np.float32))


def _reciprocity(
    biased: Biased,
    queries: QueryBank,
    biases: Vectors,
    strength: npt.ArrayLike,
    cosine: float | None,
) -> Reciprocity:
    """Return the reciprocity without correction, and with that of `strength`.

    cosine: see `BankFacts`.
    """
    layout = biased.gallery.layout
    sent = layout.reduce_queries(queries.vectors)
    items = biased.reduced
    groups = _groups(biased, queries, sent, cosine)
    lengths = None
    if layout.metric == "IP":
        # The length of a query moves none of its answers, and long queries would be the first ones of
        # all items. Under the other metrics, scores can be compared as they are.
        lengths = lengths_of(queries.vectors)
        lengths = np.where(lengths > 0, lengths, 1)

    if biased.kinds is None:
        before, after = reciprocities(
            sent, items, biases, [0.0, strength], groups=groups, lengths=lengths
        )
    else:
        [before] = reciprocities(sent, items, biases, [0.0], groups=groups, lengths=lengths)
        # What items choose is by the means of kinds too.
        [after] = reciprocities(
            biased.kinds.centred_queries(sent),
            biased.kinds.centred_items(items),
            biases,
            [strength],
            groups=groups,
            lengths=lengths,
        )
    distinct = int(groups.max()) + 1
    return Reciprocity(before, after, distinct, min(1.0, len(items) / distinct))


def _groups(
    biased: Biased, queries: QueryBank, sent: Vectors, cosine: float | None
) -> npt.NDArray[np.int64]:
    """Return the group of near copies of each query, (n,). sent: the queries, reduced."""
    if cosine is not None and queries.groups is None:
        return groups_at(directions_of(sent), cosine)
    # Under L2, a reduced query has more columns, which would hide how near two queries are.
    reduced = with_groups(replace(queries, vectors=sent), biased.reduced, vectors=queries.vectors)
    assert reduced.groups is not None
    return reduced.groups


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
        cls, queries: Vectors, gallery: Vectors, k: int, labelled: LabelledQueries | None
    ) -> _Search:
        """Return the search. labelled: the queries, if their right items are known."""
        own = None if labelled is None else labelled.right.own
        retrieved = measures.nearest(queries, gallery, k, own=own)
        counts = measures.k_occurrence(retrieved, len(gallery), k)
        if labelled is None:
            return cls(retrieved, counts)
        ranks = retrieval.ranks(queries, gallery, labelled.right)
        return cls(retrieved, counts, ranks, labelled.measure.values(ranks))

    def mean(self, sendings: measures.Sendings) -> float | None:
        """Return the measure of what users send; None without positives."""
        return None if self.values is None else sendings.mean(self.values)

    def summary(self, sendings: measures.Sendings) -> dict[str, float] | None:
        """Return all measures of retrieval; None without positives."""
        if self.ranks is None:
            return None
        return retrieval.retrieval_summary(self.ranks, sendings=sendings)

    def is_activated(self, activated: Flags) -> Flags:
        """Return which queries, (n_queries,), have a first item that is activated."""
        is_activated: Flags = activated[self.retrieved[:, 0]]
        return is_activated

    def gated(self, raw: _Search, activated: Flags) -> _Search:
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
    gallery: Gallery
    texts: Sequence[str] | None
    """Of the queries."""
    labelled: LabelledQueries | None
    """The queries, if their right items are known."""

    @property
    def right(self) -> RightItems | None:
        return None if self.labelled is None else self.labelled.right

    @property
    def sendings(self) -> measures.Sendings:
        return measures.ONCE_EACH if self.labelled is None else self.labelled.sendings

    @property
    def gain(self) -> measures.Interval | None:
        """The paired difference of the measure; None without right items."""
        if self.before.values is None or self.after.values is None:
            return None
        return self.sendings.interval(self.after.values - self.before.values)

    def rankings(
        self, search: _Search, queries: Vectors, stored: Vectors, depth: int
    ) -> Iterator[Ranking]:
        """Yield the first items of each query of a search. queries: as it sends them."""
        own = None if self.right is None else self.right.own
        return rankings(queries, stored, depth, search.ranks, own)

    def shares(self, members: Sequence[tuple[str | None, Members]]) -> list[Group]:
        """Return the shares of groups of items in the answers."""
        return shares(members, self.before.retrieved, self.after.retrieved, self.right)

    def items(self, numbers: npt.NDArray[np.int64]) -> list[Item]:
        return [
            Item(
                self.key(number),
                measures.as_plain(self.gallery.fields[number]),
                int(self.before.counts[number]),
                int(self.after.counts[number]),
            )
            for number in numbers.tolist()
        ]

    def key(self, number: int) -> Hashable:
        key: Hashable = measures.as_plain(self.gallery.keys[number])
        return key

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
                text = None if self.texts is None else str(self.texts[query])
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

    def slice(self, name: str | None, inside: Members) -> Slice:
        """Return the slice of the items `inside`, (n_items,) bool."""
        before = self.before.counts
        after = self.after.counts
        k = self.before.retrieved.shape[1]

        queries = gain = None
        before_values = self.before.values
        after_values = self.after.values
        right = self.right
        if right is not None and before_values is not None and after_values is not None:
            # Whether a positive of the query is in the slice: only such queries can gain from it.
            is_relevant = right.sums(inside[right.items].astype(np.int64)) > 0
            queries = int(is_relevant.sum())
            if queries > 1:
                gains = after_values[is_relevant] - before_values[is_relevant]
                gain = self.sendings.of(is_relevant).interval(gains)

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

    def kinds(self, members: Sequence[tuple[str | None, Members]]) -> list[KindReport]:
        """Return the report of each kind, and of the items without one if there are any."""
        return [
            self._kind(group, inside)
            for group, (_, inside) in zip(self.shares(members), members, strict=True)
        ]

    def _kind(self, group: Group, inside: Members) -> KindReport:
        before_ranks = self.before.ranks
        after_ranks = self.after.ranks
        if self.labelled is None or before_ranks is None or after_ranks is None:
            return KindReport(group, None, None, None, None)
        has_one, before_ranks = before_ranks.among(inside)
        if not has_one.any():
            return KindReport(group, 0, None, None, None)

        measure = self.labelled.measure
        before = measure.values(before_ranks)
        after = measure.values(after_ranks.among(inside)[1])
        sent = self.sendings.of(has_one)
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
