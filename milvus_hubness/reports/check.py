"""`check`: the data, then the verdict, then the hubs, of a collection or of two arrays.

It is the first look: what `tune` decides and what `diagnose` shows, with the faults that only look
like hubness before both. The rows are read once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import Any, cast

import numpy as np

from milvus_hubness.basics.files.writing import whole_file
from milvus_hubness.basics.logs import log
from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.correction.banks.bank import BankLike, QueryBank, as_vectors
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.errors import InvalidInput, redacted
from milvus_hubness.jobs.common.inputs import (
    Gallery,
    expect_distinct,
    gallery_of,
    key_column_of,
    read_items,
)
from milvus_hubness.jobs.common.judgements import Judgements
from milvus_hubness.jobs.common.recipe import Recipe
from milvus_hubness.jobs.common.samples import VECTORS
from milvus_hubness.jobs.store.protocols import Store, expect_store
from milvus_hubness.jobs.store.records import TuningRecord
from milvus_hubness.quality.data_faults import Fault, data_faults
from milvus_hubness.quality.measures import as_plain
from milvus_hubness.quality.retrieval import R_AT_1, Measure
from milvus_hubness.quality.tuning import Tuning, Verdict, halves
from milvus_hubness.reports.biased import Biased, computed_biases, read_biased
from milvus_hubness.reports.page import render
from milvus_hubness.reports.report import BankFacts, Detail, Diagnosis, diagnose
from milvus_hubness.reports.runs import RunFiles
from milvus_hubness.reports.tuned import CollectionTuning, Tuned, TuningInputs, store_tuned

PAGE_HEIGHT = 720
"""Height of the page within a notebook, in pixels."""

HALVED = (
    "The hubs are those of one half of the bank, corrected by the other half: pass --queries or "
    "--pairs to see those of your users."
)
FLATTERED = (
    "The hubs are those of the bank itself, on which its own biases look better than on other "
    "queries: pass --queries or --pairs."
)


@dataclass(frozen=True, eq=False)
class Check:
    """What one look at items and queries shows.

    A notebook shows its page; `save` writes it.
    """

    title: str
    """The name of the collection, or of the file of items."""

    faults: tuple[Fault, ...]
    """The faults of the data, which come before everything else."""

    tuning: Tuning
    """The verdict, and the methods that it compares."""

    search_hubs: Callable[[Detail], Diagnosis] = field(repr=False)
    """Returns a diagnosis, which the verdict does not need."""

    unstored: TuningRecord | None = None
    """The verdict while it is not stored in the collection; None if it is, or none is to be."""

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """The hubs, before and after the correction that the verdict is about; they are searched when this
        is first read.
        """
        return self.diagnosed()

    def diagnosed(
        self,
        *,
        texts: Sequence[str] | None = None,
        slice_by: str | None = None,
        group_by: str | None = None,
        runs: RunFiles | None = None,
    ) -> Diagnosis:
        """Search for the hubs, and return them with what these arguments name, as in `diagnose`.

        Raises InvalidInput for queries of another number than `texts`, and, with runs, InvalidParameter and
        UnreadableFile.
        """
        return self.search_hubs(Detail(texts, slice_by, group_by, runs))

    @property
    def verdict(self) -> Verdict:
        """ "apply", "apply weakly", "not proven" or "leave it alone"."""
        return self.tuning.verdict

    @property
    def sentence(self) -> str:
        """What to expect, in one sentence."""
        return self.tuning.sentence

    @property
    def is_refused(self) -> bool:
        """Whether the data or the verdict speak against a correction."""
        return self.verdict == "leave it alone" or any(fault.is_grave for fault in self.faults)

    def to_dict(self, *, diagnosed: bool = True) -> dict[str, Any]:
        """Return everything as dicts, lists, numbers and strings, ready for JSON.

        diagnosed: whether with the diagnosis.
        """
        return {
            "title": self.title,
            "faults": as_plain(self.faults),
            "verdict": self.verdict,
            "sentence": self.sentence,
            "tuning": self.tuning.to_dict(),
            **({"diagnosis": self.diagnosis.to_dict()} if diagnosed else {}),
        }

    def save(self, path: str | os.PathLike[str] = "hubness.html") -> Path:
        """Write the page, and return its path. Raises UnreadableFile."""
        path = Path(path)
        with whole_file(path) as file:
            file.write(render(self.diagnosis))
        return path

    def _repr_html_(self) -> str:
        # A frame of its own: the styles of the page are not to reach the notebook.
        page = escape(render(self.diagnosis), quote=True)
        return (
            f'<iframe srcdoc="{page}" style="width: 100%; height: {PAGE_HEIGHT}px; border: 0" '
            'title="hubness"></iframe>'
        )


def check(
    source: Store | BankLike | str | os.PathLike[str],
    collection: str | None = None,
    recipe: Recipe | BankLike | str | os.PathLike[str] | None = None,
    *,
    judgements: Judgements | str | os.PathLike[str] | None = None,
    ignore_identical: bool = False,
    measure: str | Measure = R_AT_1,
    metric: str = "COSINE",
    keys: Sequence[Key] | None = None,
    key_column: str | None = None,
    field: str | None = None,
    seed: int = 0,
    stores: bool = True,
    quick: bool = False,
    detail: Detail | None = None,
    progress: Progress = silent,
) -> Check:
    """Look for faults of the data, judge the correction with every method, and show the hubs.

    source: a store with a `collection`, or items (n, d) as an array or the name of a file. recipe: past
    queries as a bank alone, by default those of a corrected collection; or with real queries apart from
    these, a target bank and, of a collection, kinds. judgements: queries with right rows. Each may be the
    name of a file.
    ignore_identical: whether the row that has the id of a query of the judgements is no answer to it,
    for data in which queries are rows, see `Judgements.ignoring_identical`.
    metric, keys: of items that are no collection; their keys are numbers of rows by default, or those
    of the file, from `key_column` or a column of a usual name. field, measure: as in `tune`. The verdict on
    a collection is stored as by `tune`, unless a stored one on this bank rests on more. stores: False
    leaves that to the caller, see `store_tuned`. quick: whether to look at 5,000 items and 1,000 queries only,
    which stores nothing. detail: what `search_hubs` will be called with, if it will be: what the items
    cannot show is refused before the methods are tried.

    Raises as `tune` and `diagnose` do, and InvalidInput for arguments that do not go together.
    """
    chosen_measure = Measure.of(measure)
    recipe = Recipe.of(recipe)
    recipe.expect_only("check", "bank", "target_bank", "queries", "kind")
    if collection is not None:
        expect_store(source)
        recipe = recipe.read(cast(Store, source), collection, field)
    past = recipe.named_bank
    real = recipe.named_queries
    targets = recipe.named_targets
    # Files that the caller names: of items, and of judgements.
    items = source if collection is None and isinstance(source, str | os.PathLike) else None
    pairs = judgements if isinstance(judgements, str | os.PathLike) else None
    if key_column is not None and items is None and pairs is None:
        raise InvalidInput(
            "key_column is of a file of items or of judgements: pass one by its name"
        )
    key_of_items = None if items is None else key_column_of(items, key_column, pairs)
    if isinstance(judgements, str | os.PathLike):
        judgements = Judgements.load(
            judgements, key_column=key_column_of(judgements, key_column, items)
        )
    if ignore_identical:
        if judgements is None:
            raise InvalidInput("ignore_identical is about judgements, with ids: pass these too")
        judgements = judgements.ignoring_identical()
    if judgements is not None and real is not None:
        raise InvalidInput("judgements have queries of their own: leave out the other ones")

    if collection is not None:
        store = cast(Store, source)
        reading = CollectionTuning.read(
            store,
            collection,
            recipe,
            field=field,
            judgements=judgements,
            measure=chosen_measure,
            progress=progress,
        )
        if detail is not None:
            detail.expect_possible(reading.inputs.gallery, reading.inputs.title)
        if quick:
            reading = reading.quick(seed)
        tuned = reading.run(seed=seed, progress=progress)
        result = _checked(tuned, _in_use(reading, past), seed, progress)
        if not stores:
            return result
        # Last, as the result is worth more than the note of it.
        if unstored := store_tuned(store, result.title, tuned.unstored):
            log.warning("%s", unstored)
            return result
        return replace(result, unstored=None)

    if hasattr(source, "info") or field is not None or recipe.kind is not None:
        raise InvalidInput("no collection to check: name one, or pass items as an array or a file")
    for name in VECTORS:
        if isinstance(named := getattr(recipe, name), str):
            raise InvalidInput(f"{name} {named!r} is in a database: name a collection of it, too")
    gallery, title = _items_of(source, metric, keys, key_of_items)
    if detail is not None:
        detail.expect_possible(gallery, title)
    if past is None:
        raise InvalidInput("items alone show no hubs: pass past queries as bank")
    of_judgements = None if judgements is None else judgements.queries
    items = f"the file {title}" if isinstance(source, str | os.PathLike) else "the gallery"
    for one in (past, real, targets, of_judgements):
        if one is not None:
            one.expect_dim(gallery.layout.dim, items)
    if judgements is not None or (detail is not None and detail.runs is not None):
        expect_distinct(gallery.keys, title)
    judged = None if judgements is None else judgements.within(gallery.keys, title)
    inputs = TuningInputs(title, gallery, past, targets, real, judged, chosen_measure)
    if quick:
        inputs = inputs.quick(seed)
    return _checked(Tuned(inputs.tune(seed=seed, progress=progress), inputs), None, seed, progress)


def _in_use(reading: CollectionTuning, past: QueryBank | None) -> Biased | None:
    """Return the rows with the biases of a corrected collection; None if it is not corrected.

    past: the bank that the caller names.
    """
    inputs = reading.inputs
    state = reading.info.state_of(reading.field)
    if state is None:
        return None
    is_its_own = state.profile.bank.queries_fingerprint == inputs.bank.fingerprint or past is None
    return read_biased(
        reading.store,
        reading.info.name,
        None if is_its_own else inputs.bank,
        field=reading.field,
        gallery=inputs.gallery,
    )


def _items_of(
    source: BankLike | str | os.PathLike[str],
    metric: str,
    keys: Sequence[Key] | None,
    key_column: str | None,
) -> tuple[Gallery, str]:
    """Return the items of an array or a file, and what to call them."""
    if isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        if "://" in name or name.endswith(".db"):
            address = redacted(repr(name))
            raise InvalidInput(
                f"{address} is a database: pass MilvusStore(connect({address})) and a collection"
            )
        if keys is not None:
            raise InvalidInput("the keys of a file are in it: leave out keys, or pass an array")
        return read_items(source, metric, key_column), name
    vectors = source.vectors if isinstance(source, QueryBank) else as_vectors(source, "the gallery")
    return gallery_of(vectors, metric, keys, "items"), "items"


def _checked(tuned: Tuned, in_use: Biased | None, seed: int, progress: Progress) -> Check:
    """Return the check after its tuning. in_use: the biases of a corrected collection."""
    progress("looking for faults of the data", 0, 1)
    inputs = tuned.inputs
    gallery = inputs.gallery
    judged = inputs.judged
    queries = None if inputs.queries is None else inputs.queries.vectors
    faults = data_faults(
        gallery.vectors,
        inputs.bank,
        gallery.layout.metric,
        unusable=gallery.unusable,
        queries=inputs.labelled or queries,
        share_with_ids=0.0 if judged is None else judged.share_with_ids(gallery.keys),
        seed=seed,
    )

    search_hubs = partial(_diagnosed, tuned, in_use, tuple(faults), seed, progress)
    return Check(inputs.title, tuple(faults), tuned.tuning, search_hubs, tuned.unstored)


def _diagnosed(
    tuned: Tuned,
    in_use: Biased | None,
    faults: tuple[Fault, ...],
    seed: int,
    progress: Progress,
    detail: Detail,
) -> Diagnosis:
    """Return the hubs before and after the correction that the verdict is about.

    in_use: the biases of a corrected collection.
    """
    inputs = tuned.inputs
    tuning = tuned.tuning
    if detail.runs is not None:
        detail.runs.check(inputs.judged)
    # Its near copies are known by now.
    bank = tuning.log
    searched = inputs.judged or inputs.queries
    notes: tuple[str, ...] = ()
    if searched is None and in_use is None:
        # Queries that a bias was fitted on would flatter it.
        bank, rest = halves(tuning.log, np.random.default_rng(seed))
        # One query of each group.
        searched = QueryBank(rest, bank.source, groups=np.arange(len(rest)))
        notes = (HALVED,)
    elif searched is None:
        searched = bank
        notes = (FLATTERED,)

    progress("computing the biases", 0, 1)
    biased = in_use or _would_be(tuned, bank)
    progress("searching for the page", 0, 1)
    verdict = {"verdict": tuning.verdict, "sentence": tuning.sentence, "reason": tuning.why}
    diagnosis = diagnose(
        biased,
        searched,
        measure=tuning.measure,
        known=BankFacts(verdict, tuning.figures, tuning.cosine),
        detail=detail,
    )
    progress("searching for the page", 1, 1)
    return replace(diagnosis, faults=faults, left_out=(*diagnosis.left_out, *notes))


def _would_be(tuned: Tuned, bank: QueryBank) -> Biased:
    """Return the rows with the biases that jobs would write after this tuning."""
    inputs = tuned.inputs
    gallery = inputs.gallery
    tuning = tuned.tuning
    kinds = inputs.kinds if tuning.kind else None
    activated = None
    if tuning.bias is not None and tuning.choice is not None and tuning.gate is None:
        # The fit of the verdict, which the queries of the pairs have no part in.
        biases = tuning.bias - np.float32(tuning.bias.mean())
    else:
        estimator = tuning.choice
        if not tuning.labelled:
            # At the agreement that the verdict rests on, also where that speaks against it.
            estimator = tuning.candidate.settled()
        biases, activated = computed_biases(
            gallery,
            bank,
            inputs.target_bank,
            # After "leave it alone", the default shows what would be lost.
            estimator,
            tuning.gate,
            kinds,
        )
    reduced = replace(bank, vectors=gallery.layout.reduce_queries(bank.vectors))
    # Rounded as in the stored verdict, which jobs follow.
    strength = round(tuning.strength, 2) or 1.0
    return Biased(inputs.title, gallery, biases, strength, reduced, activated, kinds)
