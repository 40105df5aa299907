"""`diagnose` and `tune` for collections of a store."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cached_property
from itertools import chain, compress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.logs import log
from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.basics.texts import describe, span
from milvus_hubness.correction.banks.bank import BankLike, QueryBank, optional_bank
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.codec.arrays import Floats, lengths_of
from milvus_hubness.correction.codec.quantisation import with_spread
from milvus_hubness.correction.estimators import Estimator
from milvus_hubness.correction.fitted import Correction, gallery_kinds, grouped, reduced_targets
from milvus_hubness.correction.kinds import GalleryKinds
from milvus_hubness.correction.near_copies import directions_of, groups_at, with_groups
from milvus_hubness.correction.prior import Prior
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.errors import InvalidInput, StoreError
from milvus_hubness.jobs.common.choice import Choice, choice_of, default_estimator
from milvus_hubness.jobs.common.inputs import Gallery, only_field, read_gallery
from milvus_hubness.jobs.common.judgements import Judgements
from milvus_hubness.jobs.common.judging import FEWEST_ITEMS, store_verdict
from milvus_hubness.jobs.common.kinds import (
    ChosenKinds,
    KindRequest,
    chosen_kinds,
)
from milvus_hubness.jobs.common.priors import (
    NO_PRIOR,
    ChosenPrior,
    PriorRequest,
    on_gallery,
)
from milvus_hubness.jobs.common.recipe import Recipe
from milvus_hubness.jobs.common.samples import distinct_samples, missing_bank, read_from_database
from milvus_hubness.jobs.store.protocols import Store, expect_store
from milvus_hubness.jobs.store.records import CollectionInfo, TuningRecord
from milvus_hubness.quality import tuning
from milvus_hubness.quality.groups import expect_field
from milvus_hubness.quality.labelled import LabelledQueries
from milvus_hubness.quality.prior_weights import Preference
from milvus_hubness.quality.retrieval import R_AT_1, Measure
from milvus_hubness.quality.trials import activated_by
from milvus_hubness.quality.verdict import Figures
from milvus_hubness.reports import report
from milvus_hubness.reports.report import Diagnosis
from milvus_hubness.reports.runs import RunFiles, RunWriter

LACKS_TARGETS = (
    "tune chose a method for this bank that needs reference items, which are not stored for %r: the biases "
    "shown are those of the default method"
)
"""What is said where a reader has no reference items."""

STAYS = (
    "jobs follow the stored verdict on this bank: {former}. This one does not replace it, as it rests "
    "on less: {new}. milvus-hubness tune --replace, or tune(…, replaces=True), stores it all the same"
)
"""What is said of a stored verdict that stays."""

REPLACES = "this replaces the stored verdict on this bank: {former}. Jobs follow the new one: {new}"
"""What is said of a stored verdict that another one replaces."""


@dataclass(frozen=True, eq=False)
class Biased:
    """The rows of a gallery with their biases."""

    gallery: Gallery

    biases: Floats
    """(n,), which searches subtract or, if the collection is not corrected, would subtract."""

    strength: float
    """The factor with which they are subtracted."""

    bank: QueryBank
    """The reference queries, reduced to inner products."""

    activated: frozenset[Key] | None
    """The keys of the best items without biases whose queries are corrected; None without a gate."""

    kinds: GalleryKinds | None
    """The kinds of the rows, by whose means corrected searches compare; None for none."""

    @cached_property
    def items(self) -> Floats:
        """The rows, reduced to inner products with what `sent` and `raw` return, (n, w)."""
        items = self.gallery.layout.reduce_items(self.gallery.vectors)
        return items if self.kinds is None else self.kinds.item_table(items)

    def raw(self, queries: Floats) -> Floats:
        """Return reduced queries (m, d) as raw searches send them, (m, w)."""
        return queries if self.kinds is None else self.kinds.query_table(queries, 0.0)

    def sent(self, queries: Floats) -> Floats:
        """Return reduced queries (m, d) as corrected searches send them, without biases, (m, w)."""
        return queries if self.kinds is None else self.kinds.query_table(queries)


@dataclass(frozen=True, eq=False)
class BiasedGallery(Biased):
    """The rows of a collection with their biases."""

    info: CollectionInfo

    verdict: TuningRecord | None
    """The verdict of tuning on this bank; None if there is none."""


def read_biased(
    store: Store,
    collection: str,
    recipe: Recipe | BankLike | str | None = None,
    *,
    field: str | None = None,
    gallery: Gallery | None = None,
    progress: Progress = silent,
) -> BiasedGallery:
    """Read the rows of a collection and their biases.

    If it is not corrected, they are those of the recipe, or of a bank alone: by default of the
    choice of tuning, else the default. A corrected one has its own kinds. gallery: its rows, if
    they are read already. Raises as `diagnose` does.
    """
    recipe = Recipe.of(recipe).read(store, collection, field)
    bank = recipe.named_bank
    target_bank = recipe.named_targets
    kind = recipe.kind
    info = store.info(collection)
    gallery = gallery or read_gallery(store, info, field, progress=progress)
    layout = gallery.layout
    state = info.state_of(field)
    kinds = None
    if gallery.biases is not None and state is not None:
        profile = state.profile
        if recipe.estimator is not None:
            raise InvalidInput(
                f"{info.name!r} is corrected, and its biases are those of {describe(profile.estimator)}: "
                "leave out the method (--method, --param)"
            )
        biases = gallery.biases
        kinds = _kinds_in_use(info, state, gallery, kind)
        strength = profile.strength
        activated = None
        # The bank is many rows to load: only if something in it is needed.
        if bank is None or profile.gate is not None:
            stored = store.load_bank(profile.bank)
            bank = bank or stored.queries
            activated = stored.activated if profile.gate is not None else None
    elif bank is None:
        where_from = missing_bank(store, info.name, field)
        raise InvalidInput(f"{info.name!r} is not corrected: {where_from}")
    else:
        searched = field or only_field(info)
        kinds, _ = _kinds_to_try(store, info, searched, gallery, kind, bank, target_bank)
        source = kinds.kinds.rule.source if kinds is not None else ""
        verdict = info.verdicts.of(searched, bank.fingerprint, source)
        # As jobs follow the verdict.
        default = Choice(default_estimator(by_kind=kinds is not None))
        choice = choice_of(Recipe(bank, estimator=recipe.estimator), verdict, default)
        if recipe.estimator is None and target_bank is None and choice.estimator.needs_target_bank:
            log.warning(LACKS_TARGETS, info.name)
            choice = default
        strength = choice.strength
        biases, activated = computed_biases(
            gallery, bank, target_bank, choice.estimator, choice.gate, kinds
        )

    bank.expect_dim(layout.dim, "the field")
    reduced = replace(bank, vectors=layout.reduce_queries(bank.vectors))
    source = kinds.kinds.rule.source if kinds is not None else ""
    verdict = info.verdicts.of(field or only_field(info), bank.fingerprint, source)
    return BiasedGallery(gallery, biases, strength, reduced, activated, kinds, info, verdict)


def _kinds_in_use(
    info: CollectionInfo, state: CollectionState, gallery: Gallery, kind: str | None
) -> GalleryKinds | None:
    """Return the kinds of a corrected collection. kind: what the caller names. Raises InvalidInput."""
    if kind is not None and kind != state.kind:
        present = f"with the kinds of {state.kind!r}" if state.kind else "without kinds"
        raise InvalidInput(
            f"{info.name!r} is corrected {present}: leave --kind out, or migrate it with other kinds"
        )
    kinds = state.kinds_of(state.profile)
    if kinds is None:
        return None
    return GalleryKinds(kinds, kinds.rule.numbers_of(gallery.vectors, gallery.items))


def _kinds_to_try(
    store: Store,
    info: CollectionInfo,
    field: str,
    gallery: Gallery,
    kind: str | None,
    bank: QueryBank,
    target_bank: QueryBank | None,
) -> tuple[GalleryKinds | None, tuple[str, ...]]:
    """Return the kinds that the caller names, as a migration would choose them, with remarks.

    Raises as `plan_correction` does.
    """
    request = KindRequest.of(kind)
    if request.name is None:
        return None, ()
    request.expect_no_targets(target_bank)
    layout = gallery.layout
    spread = store.column_needs(info, field).spread
    request.expect_possible(with_spread(replace(layout, kinds=None), spread), field)
    state = info.states.get(field)
    if state is not None and state.kind == request.name:
        chosen = ChosenKinds(state.kinds)
    else:
        hidden = frozenset(
            name for other in info.states.values() for name in other.codec.hidden_fields
        )
        chosen = chosen_kinds(store, info, request, layout, gallery.vectors, bank, hidden=hidden)
    if chosen.rule is None:
        return None, chosen.remarks
    numbers = chosen.rule.numbers_of(gallery.vectors, gallery.items)
    # As a job measures them: near copies of a query count once.
    bank = grouped(layout, bank, gallery.vectors)
    kinds = gallery_kinds(layout, chosen.rule, gallery.vectors, numbers, bank)
    return kinds, chosen.remarks


def computed_biases(
    gallery: Gallery,
    bank: QueryBank,
    target_bank: QueryBank | None,
    estimator: Estimator | None,
    gate: int | None,
    kinds: GalleryKinds | None,
) -> tuple[Floats, frozenset[Key] | None]:
    """Return the biases (n,) that a migration with this bank would write, with mean 0.

    estimator: by default that of jobs. The second value is the keys of the items that the gate
    activates; None without one.
    """
    layout = gallery.layout
    numbers = None if kinds is None else kinds.numbers
    default = default_estimator(by_kind=kinds is not None)
    correction = Correction.fit(
        layout,
        estimator or default,
        grouped(layout, bank, gallery.vectors),
        gallery=gallery.vectors,
        target_bank=target_bank,
        kinds=None if kinds is None else kinds.kinds,
        gallery_kinds=numbers,
    )
    items = correction.items_of(gallery.vectors, numbers)
    mask = activated_by(gate, correction.fitted.bank.vectors, items)
    activated = None if mask is None else frozenset(compress(gallery.keys, mask))

    biases = correction.centred(gallery.vectors, kinds=numbers)
    return biases - np.float32(biases.mean()), activated


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

    def expect_possible(self, gallery: Gallery, title: str) -> None:
        """Raise InvalidInput for what the rows of a gallery cannot show.

        title: what to call the gallery.
        """
        if gallery.layout.multi_vectors:
            raise InvalidInput(
                f"the hubs of {title!r} cannot be shown, as its rows have several vectors each: check "
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


def diagnose(
    store: Store,
    collection: str,
    queries: BankLike | None = None,
    recipe: Recipe | BankLike | str | None = None,
    *,
    judgements: Judgements | None = None,
    measure: str | Measure = R_AT_1,
    field: str | None = None,
    texts: Sequence[str] | None = None,
    slice_by: str | None = None,
    group_by: str | None = None,
    runs: RunFiles | None = None,
    progress: Progress = silent,
) -> Diagnosis:
    """Search queries in a collection's rows before and after correction, and report the hubs.

    queries: (n, d), the name of their file, or "collection:NAME" for the vectors of a collection; or
    judgements with right rows. recipe: the bank, the target bank, the estimator and
    the kinds whose biases are shown, or a bank alone, if the collection is not corrected; by default those of
    tuning, else the defaults. A corrected one has its own. measure: of what users
    send of these, R@k, MRR, MAP or nDCG@k. texts: of the
    queries; those of judgements are in these. slice_by: a scalar field, whose values get a report
    of their own; group_by: one whose values get their shares of the answers.
    runs: files for evaluators, with the rankings and the judgements.

    Raises InvalidParameter for further words of a recipe, InvalidInput, DimensionMismatch,
    CollectionNotFound, EmptyCollection, CannotMigrate for kinds that are not possible, and with runs
    InvalidParameter and UnreadableFile.
    """
    expect_store(store)
    chosen_measure = Measure.of(measure)
    if (queries is None) == (judgements is None):
        raise InvalidInput("a diagnosis needs queries or judgements: pass one of them")
    in_database = read_from_database(store, {"queries": queries}, collection, field)
    queries = in_database.get("queries") or optional_bank(queries)
    if runs is not None:
        runs.check(judgements)
    recipe = Recipe.of(recipe)
    recipe.expect_only("diagnose", "bank", "target_bank", "estimator", "kind")
    biased = read_biased(store, collection, recipe, field=field, progress=progress)
    verdict = biased.verdict
    if judgements is not None:
        judgements = judgements.within(biased.gallery.keys, biased.info.name)
    return diagnose_gallery(
        biased,
        biased.info.name,
        queries,
        judged=judgements,
        measure=chosen_measure,
        verdict={"verdict": verdict.verdict, "reason": verdict.reason} if verdict else None,
        detail=Detail(texts, slice_by, group_by, runs),
    )


def diagnose_gallery(
    biased: Biased,
    title: str,
    queries: QueryBank | None,
    *,
    judged: Judgements | None = None,
    measure: Measure = R_AT_1,
    verdict: Mapping[str, Any] | None = None,
    figures: Figures | None = None,
    cosine: float | None = None,
    detail: Detail = NO_DETAIL,
) -> Diagnosis:
    """Report the hubs of a gallery with biases, as `diagnose` does.

    judged: judgements about its rows, in place of queries, see `Judgements.within`. figures, cosine: what
    the bank shows, and the smallest cosine between near copies, if somebody has found them out. Raises
    DimensionMismatch, InvalidInput for rows of several vectors, and with runs UnreadableFile.
    """
    gallery = biased.gallery
    layout = gallery.layout
    detail.expect_possible(gallery, title)
    texts = detail.texts
    runs = detail.runs
    left_out: tuple[str, ...] = ()
    labelled = None
    if judged is not None:
        queries = judged.queries
        texts = judged.texts
        left_out = judged.left_out
        labelled = judged.labelled(gallery.keys, measure)
    assert queries is not None
    queries.expect_dim(layout.dim, "the field")
    reduced = layout.reduce_queries(queries.vectors)

    run_writer = None
    if runs is not None:
        ids = judged.names if judged is not None else list(map(str, range(len(queries))))
        run_writer = RunWriter(runs, ids, gallery.keys)

    activated = None
    if biased.activated is not None:
        activated = [key in biased.activated for key in gallery.keys]
    diagnosis = report.diagnose(
        reduced if labelled is None else replace(labelled, queries=reduced),
        layout.reduce_items(gallery.vectors),
        # A constant moves no answer, but the strengths of the report would all show it.
        biased.biases - np.float32(biased.biases.mean()),
        bank=biased.bank,
        keys=gallery.keys,
        fields=gallery.fields,
        query_texts=texts,
        strength=biased.strength,
        activated=activated,
        query_groups=_groups(biased, queries, cosine),
        query_lengths=_lengths(biased, queries),
        verdict=verdict,
        title=title,
        slice_by=detail.slice_by,
        group_by=detail.group_by,
        kinds=biased.kinds,
        figures=figures,
        runs=run_writer,
    )
    if runs is not None and judged is not None:
        runs.write_qrels(judged)
    return replace(diagnosis, left_out=left_out)


def _groups(biased: Biased, queries: QueryBank, cosine: float | None) -> npt.NDArray[np.int64]:
    """Return the group of near copies of each query, (n,).

    cosine: the smallest one between near copies, as the bank shows it; None to look for it.
    """
    layout = biased.gallery.layout
    if cosine is not None and queries.groups is None:
        return groups_at(directions_of(layout.reduce_queries(queries.vectors)), cosine)
    # Under L2, a reduced query has more columns, which would hide how near two queries are.
    reduced = with_groups(
        replace(queries, vectors=layout.reduce_queries(queries.vectors)),
        layout.reduce_items(biased.gallery.vectors),
        vectors=queries.vectors,
    )
    assert reduced.groups is not None
    return reduced.groups


def _lengths(biased: Biased, queries: QueryBank) -> npt.NDArray[np.float64] | None:
    """Return by how much the scores of each query are larger than they would be at length 1.

    The length of a query moves none of its answers under IP, and long queries would be the first
    ones of all items. Under the other metrics, scores can be compared as they are: None.
    """
    if biased.gallery.layout.metric != "IP":
        return None
    lengths = lengths_of(queries.vectors)
    return np.where(lengths > 0, lengths, 1)


def tune(
    store: Store,
    collection: str,
    recipe: Recipe | BankLike | str | None = None,
    *,
    field: str | None = None,
    judgements: Judgements | None = None,
    measure: str | Measure = R_AT_1,
    replaces: bool = False,
    seed: int = 0,
    progress: Progress = silent,
) -> tuning.Tuning:
    """Try every method on a collection's rows, and write the result into one of its properties; if
    that fails, a warning says so.

    A stored result on this bank that rests on more stays, as a remark says, unless `replaces`:
    labelled queries are more than real ones without labels, and these more than a part of the bank.

    recipe: a bank alone, or with a target bank, real queries, a prior and kinds. By default the bank, the
    prior and the kinds are those of the corrected collection, and the queries those that clients have
    sampled. The weight of a prior is chosen if there are judgements; searches are compared without and
    with kinds. judgements: queries with right rows, on which the measure (R@k, MRR, MAP or nDCG@k)
    decides.

    Raises InvalidParameter for further words of a recipe, InvalidInput, CollectionNotFound,
    EmptyCollection, CannotMigrate if the server computes the vectors or for kinds that are not
    possible, and as `quality.tuning.tune` does.
    """
    tuned = tune_collection(
        store,
        collection,
        recipe,
        field=field,
        judgements=judgements,
        measure=measure,
        replaces=replaces,
        seed=seed,
        progress=progress,
    )
    if unstored := store_tuned(store, tuned.title, tuned.unstored, replaces=replaces):
        log.warning("%s", unstored)
    return tuned.tuning


class Tuned(NamedTuple):
    """A tuning, and what it was made on."""

    tuning: tuning.Tuning
    title: str
    """The name of the collection, or what the items are called."""
    gallery: Gallery
    bank: QueryBank
    target_bank: QueryBank | None
    queries: QueryBank | None
    """Real queries apart from the bank, of the caller or sampled by clients; None without any, and
    with judgements."""
    judged: Judgements | None
    """The judgements about the gallery's rows; None without judgements."""
    kinds: GalleryKinds | None
    """The kinds that were tried; None for none."""
    unstored: TuningRecord | None = None
    """The verdict while it is not stored in the collection; None if it is, or another one stays."""


def tune_collection(
    store: Store,
    collection: str,
    recipe: Recipe | BankLike | str | None = None,
    *,
    field: str | None = None,
    judgements: Judgements | None = None,
    measure: str | Measure = R_AT_1,
    replaces: bool = False,
    quick: bool = False,
    detail: Detail | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Tuned:
    """Try every method on a collection's rows, as `tune` does; return with the result what it was
    made on. The verdict is not stored yet.

    replaces: whether it takes the place of a stored verdict that rests on more. quick: whether to
    look at a part only, see `quick_part`; its verdict is not to be stored. detail: what a diagnosis
    of these rows is to show, which is looked at before the methods are tried.
    """
    expect_store(store)
    chosen_measure = Measure.of(measure)
    recipe = Recipe.of(recipe).read(store, collection, field)
    recipe.expect_only("tune", "bank", "target_bank", "queries", "prior", "kind")
    bank = recipe.named_bank
    queries = recipe.named_queries
    target_bank = recipe.named_targets
    kind = recipe.kind
    info = store.info(collection)
    if info.is_bank:
        raise InvalidInput(f"{info.name!r} is a query bank: tune the collection that it is for")
    state = info.state_of(field)
    in_use = NO_PRIOR
    if state is not None and recipe.prior is None and state.profile.prior is not None:
        clicks = store.load_bank(state.profile.bank, checked=False).clicks
        in_use = ChosenPrior(state.profile.prior, clicks)
    if bank is None and state:
        stored = store.load_bank(state.profile.bank)
        bank = stored.queries
        target_bank = target_bank or stored.targets
    if bank is None:
        where_from = missing_bank(store, info.name, field)
        raise InvalidInput(f"{info.name!r} is not corrected and has no bank: {where_from}")
    if queries is not None and judgements is not None:
        raise InvalidInput("judgements have queries of their own: leave out the other ones")
    if queries is None and judgements is None and state is not None:
        queries = distinct_samples(store, info, state.field)

    field = field or only_field(info)
    info.require_correctable(field)
    gallery = read_gallery(store, info, field, progress=progress)
    if detail is not None:
        detail.expect_possible(gallery, info.name)
    judged = None if judgements is None else judgements.within(gallery.keys, info.name)
    if quick:
        gallery, bank, remark = quick_part(gallery, bank, judged, seed)
    if kind is None and state is not None:
        kind = state.kind or None
    kinds, remarks = _kinds_to_try(store, info, field, gallery, kind, bank, target_bank)
    preference = _preference(store, info, gallery, recipe.prior_request, in_use, judged)
    tuned = tune_gallery(
        gallery,
        bank,
        target_bank=target_bank,
        queries=queries,
        judged=judged,
        measure=chosen_measure,
        preference=preference,
        kinds=kinds,
        seed=seed,
        progress=progress,
    )
    chosen = preference.prior if preference is not None else None
    record = _record_of(field, bank, tuned, chosen)
    if quick:
        remarks += (remark,) if remark else ()
    else:
        remarks += _former_remarks(info, record, replaces=replaces)
    stays = quick or (not replaces and info.verdicts.outweighing(record) is not None)
    tuned = replace(tuned, remarks=(*tuned.remarks, *remarks))
    unstored = None if stays else record
    return Tuned(tuned, info.name, gallery, bank, target_bank, queries, judged, kinds, unstored)


def _former_remarks(
    info: CollectionInfo, record: TuningRecord, *, replaces: bool
) -> tuple[str, ...]:
    """Return what becomes of a stored verdict with another method; nothing if there is none."""
    staying = None if replaces else info.verdicts.outweighing(record)
    if staying is not None:
        return (STAYS.format(former=staying.in_words, new=record.in_words),)
    others = [
        former
        for former in info.verdicts.former(record)
        if (former.choice, former.strength) != (record.choice, record.strength)
    ]
    return tuple(REPLACES.format(former=former.in_words, new=record.in_words) for former in others)


def store_tuned(
    store: Store, collection: str, record: TuningRecord | None, *, replaces: bool = False
) -> str:
    """Store the verdict of a tuning; return in one line that it was not stored, or "".

    It is stored after everything else: who may only read gets the result all the same.
    """
    if record is None:
        return ""
    try:
        staying = store_verdict(store, collection, record, replaces=replaces)
    except StoreError as error:
        return (
            f"the verdict could not be stored in {collection!r}, so jobs will judge the bank again: "
            f"{error}"
        )
    # Another process has stored it while this one was measured.
    return "" if staying is None else STAYS.format(former=staying.in_words, new=record.in_words)


PRODUCTS_PER_SECOND = 8e8
"""Products of numbers of items and queries that a look at both handles in a second of one core:
`benchmarks.check_time` has what it took without pairs and with some, where this lies between them."""

ANNOUNCED_SECONDS = 10
"""Seconds from which on a look at items and queries says how long it takes."""


def expected_seconds(items: int, queries: int, dim: int) -> float:
    """Return about how many seconds a look takes on this machine."""
    return items * queries * dim / PRODUCTS_PER_SECOND / (os.cpu_count() or 1)


QUICK_ITEMS = 5_000
QUICK_QUERIES = 1_000
"""Rows and bank queries of a quick look."""

QUICK = (
    "a quick look at {items:,} of {all_items:,} items and {queries:,} of {all_queries:,} queries of the "
    "bank: among fewer items, right ones are found more often, and nothing is stored"
)


def quick_part(
    gallery: Gallery, bank: QueryBank, judged: Judgements | None, seed: int
) -> tuple[Gallery, QueryBank, str]:
    """Return a part of the items, with all that are right answers, and of the bank, and what is said
    of it; as they are, and "", if they are few.
    """
    rng = np.random.default_rng(seed)
    needed = np.empty(0, np.int64)
    if judged is not None:
        needed = np.unique(np.concatenate(judged.positions(gallery.keys)))
    others = np.setdiff1d(rng.permutation(len(gallery.keys)), needed, assume_unique=True)
    room = max(0, QUICK_ITEMS - len(needed))
    rows = np.sort(np.concatenate([needed, others[:room]]))
    queries = np.sort(rng.permutation(len(bank))[:QUICK_QUERIES])
    if len(rows) == len(gallery.keys) and len(queries) == len(bank):
        return gallery, bank, ""

    remark = QUICK.format(
        items=len(rows),
        all_items=len(gallery.keys),
        queries=len(queries),
        all_queries=len(bank),
    )
    return gallery.take(rows), bank.take(queries), remark


def tune_gallery(
    gallery: Gallery,
    bank: QueryBank,
    *,
    target_bank: QueryBank | None = None,
    queries: QueryBank | None = None,
    judged: Judgements | None = None,
    measure: Measure = R_AT_1,
    preference: Preference | None = None,
    kinds: GalleryKinds | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> tuning.Tuning:
    """Try every method on the items of a gallery, as `quality.tuning.tune` does, and raise as it does.

    judged: judgements about its rows, see `Judgements.within`. Raises InvalidInput for fewer than
    FEWEST_ITEMS items.
    """
    if len(gallery.vectors) < FEWEST_ITEMS:
        raise InvalidInput(
            f"{len(gallery.vectors)} items are too few for a verdict, as ten answers are a good part "
            f"of them: {FEWEST_ITEMS} are needed"
        )
    count = len(gallery.vectors)
    seconds = expected_seconds(count, len(bank), gallery.layout.dim)
    if seconds >= ANNOUNCED_SECONDS:
        doing = f"trying all methods on {count:,} items with {len(bank):,} queries"
        progress(f"{doing}, about {span(seconds)}", 0, 1)
    layout = gallery.layout
    if judged is not None:
        queries = judged.queries
    for vectors in filter(None, (bank, target_bank, queries)):
        vectors.expect_dim(layout.dim, "the field")

    searched: Floats | LabelledQueries | None = None
    if queries is not None:
        searched = reduced = layout.reduce_queries(queries.vectors)
        if judged is not None:
            searched = replace(judged.labelled(gallery.keys, measure), queries=reduced)
    tuned = tuning.tune(
        replace(bank, vectors=layout.reduce_queries(bank.vectors)),
        layout.reduce_items(gallery.vectors),
        target_bank=reduced_targets(layout, target_bank) if target_bank else None,
        queries=searched,
        preference=preference,
        kinds=kinds,
        seed=seed,
        progress=progress,
    )
    # As the caller gave its vectors.
    log = replace(bank, groups=tuned.log.groups)
    return replace(tuned, log=log, left_out=judged.left_out if judged is not None else ())


def _preference(
    store: Store,
    info: CollectionInfo,
    gallery: Gallery,
    request: PriorRequest,
    in_use: ChosenPrior,
    judged: Judgements | None,
) -> Preference | None:
    """Return the values of the prior for the gallery; None without one.

    in_use: the prior of the collection. Raises InvalidInput.
    """
    chosen = ChosenPrior.of(request) if request.prior is not None else in_use
    if chosen.prior is None:
        return None

    measured = on_gallery(store, info, chosen, is_new=request.prior is not None)
    assert measured.prior is not None
    # Clicks that may be those of the labelled queries are not to decide on themselves.
    labelled = Counter(chain.from_iterable(judged.keys if judged is not None else ()))
    is_counted = measured.prior.source == "pairs" and all(
        measured.clicks.get(key, 0) >= count for key, count in labelled.items()
    )
    return Preference(measured.prior, measured.values_of(gallery.items), is_counted)


def _record_of(
    field: str, bank: QueryBank, tuned: tuning.Tuning, prior: Prior | None
) -> TuningRecord:
    """Return the verdict of a tuning as it is stored."""
    values = {
        name: value for name, value in tuned.to_dict().items() if name in TuningRecord.model_fields
    }
    # The bank as the user passed it: its fingerprint, not that of the reduced one, is looked up.
    values |= {"strength": round(tuned.strength, 2), "bank_fingerprint": bank.fingerprint}
    values |= {"kind": tuned.kind, "kind_tried": tuned.kinds.source if tuned.kinds else ""}
    if prior is not None and tuned.prior_weight is not None:
        # The jobs measure it on the gallery as it is then.
        values["prior"] = Prior(source=prior.source, field=prior.field, weight=tuned.prior_weight)
    return TuningRecord(**values, field=field, tuned_at=datetime.now(timezone.utc))
