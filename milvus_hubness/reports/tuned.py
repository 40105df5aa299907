"""A tuning of a gallery or of a collection: what it is made on, and what is stored of it."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import chain
from typing import NamedTuple

import numpy as np

from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.basics.texts import span
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.fitted import reduced_targets
from milvus_hubness.correction.kinds import GalleryKinds
from milvus_hubness.correction.prior import Prior
from milvus_hubness.errors import InvalidInput, StoreError
from milvus_hubness.jobs.common.gallery import Gallery, only_field, read_gallery
from milvus_hubness.jobs.common.judgements import Judgements, expect_judgements
from milvus_hubness.jobs.common.judging import FEWEST_ITEMS, store_verdict
from milvus_hubness.jobs.common.priors import NO_PRIOR, ChosenPrior, PriorRequest, on_gallery
from milvus_hubness.jobs.common.recipe import Recipe
from milvus_hubness.jobs.common.samples import distinct_samples, missing_bank
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import CollectionInfo, TuningRecord
from milvus_hubness.quality import tuning
from milvus_hubness.quality.labelled import LabelledQueries
from milvus_hubness.quality.prior_weights import Preference
from milvus_hubness.quality.retrieval import R_AT_1, Measure
from milvus_hubness.reports.biased import kinds_to_try

STAYS = (
    "jobs follow the stored verdict on this bank: {former}. This one does not replace it, as it rests "
    "on less: {new}. milvus-hubness tune --replace, or tune(…, replaces=True), stores it all the same"
)
"""What is said of a stored verdict that stays."""

REPLACES = "this replaces the stored verdict on this bank: {former}. Jobs follow the new one: {new}"
"""What is said of a stored verdict that another one replaces."""


PRODUCTS_PER_SECOND = 8e8
"""Products of numbers of items and queries that a look at both handles in a second of one core:
`benchmarks.check_time` has what it took without pairs and with some, where this lies between them."""

ANNOUNCED_SECONDS = 10
"""Seconds from which on a look at items and queries says how long it takes."""

QUICK_ITEMS = 5_000
QUICK_QUERIES = 1_000
"""Rows and bank queries of a quick look."""

QUICK = (
    "a quick look at {items:,} of {all_items:,} items and {queries:,} of {all_queries:,} queries of the "
    "bank: among fewer items, right ones are found more often, and nothing is stored"
)


@dataclass(frozen=True, eq=False)
class TuningInputs:
    """What methods are tried on: items, a bank, and the queries that judge."""

    gallery: Gallery

    bank: QueryBank

    target_bank: QueryBank | None = None

    queries: QueryBank | None = None
    """Real queries apart from the bank, of the caller or sampled by clients; None without any, and
    with judgements."""

    judged: Judgements | None = None
    """The judgements about the rows of the gallery, see `Judgements.within`; None without any."""

    measure: Measure = R_AT_1
    """What is measured on the judgements."""

    kinds: GalleryKinds | None = None
    """The kinds that are tried too; None for none."""

    preference: Preference | None = None
    """The values of a prior, whose weight is chosen with the method; None without one."""

    is_quick: bool = False
    """Whether this is for a quick look, whose verdict is not stored."""

    remarks: tuple[str, ...] = ()
    """What the user should know of them, a sentence each."""

    @property
    def inputs(self) -> TuningInputs:
        """These, as a `CollectionTuning` has them."""
        return self

    @property
    def searched(self) -> QueryBank | None:
        """The queries apart from the bank, with right items or without; None without any."""
        return self.queries if self.judged is None else self.judged.queries

    @property
    def labelled(self) -> LabelledQueries | None:
        """The queries of the judgements; None without any."""
        return (
            None if self.judged is None else self.judged.labelled(self.gallery.keys, self.measure)
        )

    def quick(self, seed: int) -> TuningInputs:
        """Return a part of the items, with all that are right answers, and of the bank; all of them
        if they are few.
        """
        rng = np.random.default_rng(seed)
        keys = self.gallery.keys
        needed = np.empty(0, np.int64)
        if self.judged is not None:
            needed = np.unique(np.concatenate(self.judged.positions(keys)))
        others = np.setdiff1d(rng.permutation(len(keys)), needed, assume_unique=True)
        room = max(0, QUICK_ITEMS - len(needed))
        rows = np.sort(np.concatenate([needed, others[:room]]))
        queries = np.sort(rng.permutation(len(self.bank))[:QUICK_QUERIES])
        if len(rows) == len(keys) and len(queries) == len(self.bank):
            return replace(self, is_quick=True)

        remark = QUICK.format(
            items=len(rows),
            all_items=len(keys),
            queries=len(queries),
            all_queries=len(self.bank),
        )
        return replace(
            self,
            gallery=self.gallery.take(rows),
            bank=self.bank.take(queries),
            is_quick=True,
            remarks=(remark,),
        )

    def run(self, *, seed: int = 0, progress: Progress = silent) -> Tuned:
        """Try every method, as `quality.tuning.tune` does, and raise as it does.

        Raises InvalidInput for fewer than FEWEST_ITEMS items.
        """
        layout = self.gallery.layout
        bank = self.bank
        count = len(self.gallery.vectors)
        if count < FEWEST_ITEMS:
            raise InvalidInput(
                f"{count} items are too few for a verdict, as ten answers are a good part "
                f"of them: {FEWEST_ITEMS} are needed"
            )
        seconds = expected_seconds(count, len(bank), layout.dim)
        if seconds >= ANNOUNCED_SECONDS:
            doing = f"trying all methods on {count:,} items with {len(bank):,} queries"
            progress(f"{doing}, about {span(seconds)}", 0, 1)
        for vectors in filter(None, (bank, self.target_bank, self.searched)):
            vectors.expect_dim(layout.dim, "the field")

        queries = None
        if self.searched is not None:
            queries = layout.reduce_queries(self.searched.vectors)
        labelled = self.labelled
        if labelled is not None and queries is not None:
            labelled = replace(labelled, queries=queries)
        tuned = tuning.tune(
            replace(bank, vectors=layout.reduce_queries(bank.vectors)),
            layout.reduce_items(self.gallery.vectors),
            target_bank=reduced_targets(layout, self.target_bank) if self.target_bank else None,
            queries=labelled or queries,
            preference=self.preference,
            kinds=self.kinds,
            seed=seed,
            progress=progress,
        )
        tuned = replace(
            tuned,
            # As the caller gave its vectors.
            log=replace(bank, groups=tuned.log.groups),
            left_out=self.judged.left_out if self.judged is not None else (),
            remarks=(*tuned.remarks, *self.remarks),
        )
        return Tuned(tuned, self)


def expected_seconds(items: int, queries: int, dim: int) -> float:
    """Return about how many seconds a look takes on this machine."""
    return items * queries * dim / PRODUCTS_PER_SECOND / (os.cpu_count() or 1)


class Tuned(NamedTuple):
    """A tuning, and what it was made on."""

    tuning: tuning.Tuning
    inputs: TuningInputs
    unstored: TuningRecord | None = None
    """The verdict while it is not stored in the collection; None if it is, or another one stays."""


@dataclass(frozen=True, eq=False)
class CollectionTuning:
    """The rows of a collection and what a recipe says of them, before methods are tried."""

    store: Store

    info: CollectionInfo

    field: str

    recipe: Recipe
    """With the bank and the kinds to try."""

    prior_in_use: ChosenPrior
    """That of the collection."""

    inputs: TuningInputs
    """Without kinds and preference."""

    @classmethod
    def read(
        cls,
        store: Store,
        collection: str,
        recipe: Recipe,
        *,
        field: str | None = None,
        judgements: Judgements | None = None,
        measure: str | Measure = R_AT_1,
        progress: Progress = silent,
    ) -> CollectionTuning:
        """Read the rows of a collection, and its bank and samples where the recipe names none.

        Raises as `reports.collections.tune` does.
        """
        chosen_measure = Measure.of(measure)
        expect_judgements(judgements)
        recipe = recipe.read(store, collection, field)
        recipe.expect_only("tune", "bank", "target_bank", "queries", "prior", "kind")
        info = store.info(collection)
        if info.is_bank:
            raise InvalidInput(f"{info.name!r} is a query bank: tune the collection that it is for")
        state = info.state_of(field)
        in_use = NO_PRIOR
        bank = recipe.named_bank
        queries = recipe.named_queries
        target_bank = recipe.named_targets
        kind = recipe.kind
        if state is not None:
            if recipe.prior is None and state.profile.prior is not None:
                clicks = store.load_bank(state.profile.bank, checked=False).clicks
                in_use = ChosenPrior(state.profile.prior, clicks)
            if bank is None:
                stored = store.load_bank(state.profile.bank)
                bank = stored.queries
                target_bank = target_bank or stored.targets
            kind = kind or state.kind or None
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
        judged = None if judgements is None else judgements.within(gallery.keys, info.name)
        recipe = replace(recipe, bank=bank, target_bank=target_bank, kind=kind)
        inputs = TuningInputs(gallery, bank, target_bank, queries, judged, chosen_measure)
        return cls(store, info, field, recipe, in_use, inputs)

    def quick(self, seed: int) -> CollectionTuning:
        """Return this for a part of the rows and of the bank, see `TuningInputs.quick`."""
        inputs = self.inputs.quick(seed)
        return replace(self, inputs=inputs, recipe=replace(self.recipe, bank=inputs.bank))

    def run(self, *, replaces: bool = False, seed: int = 0, progress: Progress = silent) -> Tuned:
        """Try every method. The verdict is not stored yet.

        replaces: whether it takes the place of a stored verdict that rests on more.
        """
        info = self.info
        inputs = self.inputs
        kinds, remarks = kinds_to_try(self.store, info, self.field, inputs.gallery, self.recipe)
        preference = _preference(
            self.store, info, self.recipe.prior_request, self.prior_in_use, inputs
        )
        inputs = replace(
            inputs, kinds=kinds, preference=preference, remarks=(*remarks, *inputs.remarks)
        )
        tuned = inputs.run(seed=seed, progress=progress)
        if inputs.is_quick:
            return tuned

        chosen = preference.prior if preference is not None else None
        record = _record_of(self.field, inputs.bank, tuned.tuning, chosen)
        former = _former_remarks(info, record, replaces=replaces)
        stays = not replaces and info.verdicts.outweighing(record) is not None
        result = replace(tuned.tuning, remarks=(*tuned.tuning.remarks, *former))
        return Tuned(result, inputs, None if stays else record)


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


def _preference(
    store: Store,
    info: CollectionInfo,
    request: PriorRequest,
    in_use: ChosenPrior,
    inputs: TuningInputs,
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
    judged = inputs.judged
    labelled = Counter(chain.from_iterable(judged.keys if judged is not None else ()))
    is_counted = measured.prior.source == "pairs" and all(
        measured.clicks.get(key, 0) >= count for key, count in labelled.items()
    )
    return Preference(measured.prior, measured.values_of(inputs.gallery.items), is_counted)


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
