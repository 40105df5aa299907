"""`check`: the data, then the verdict, then the hubs, of a collection or of two arrays.

It is the first look: what `tune` decides and what `diagnose` shows, with the faults that only look
like hubness before both. The rows are read once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from milvus_hubness.basics.files.writing import whole_file
from milvus_hubness.basics.logs import log
from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.correction.banks.bank import BankLike, QueryBank
from milvus_hubness.errors import InvalidInput
from milvus_hubness.jobs.common.gallery import Gallery, expect_distinct
from milvus_hubness.jobs.common.judgements import Judgements, expect_judgements
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
from milvus_hubness.reports.report import NO_DETAIL, BankFacts, Detail, Diagnosis, diagnose
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

    def diagnosed(self, detail: Detail = NO_DETAIL) -> Diagnosis:
        """Search for the hubs, and return them with this detail, as `diagnose` does.

        Raises InvalidInput for what the items cannot show, DimensionMismatch for texts of another number
        than the queries, and, with runs, InvalidParameter and UnreadableFile.
        """
        return self.search_hubs(detail)

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


Source: TypeAlias = "Store | Gallery | BankLike | str | os.PathLike[str]"
"""A store with a collection; or items, as a Gallery, an array or the name of a file."""


def check(
    source: Source,
    collection: str | None = None,
    recipe: Recipe | BankLike | str | os.PathLike[str] | None = None,
    *,
    judgements: Judgements | str | os.PathLike[str] | None = None,
    measure: str | Measure = R_AT_1,
    field: str | None = None,
    seed: int = 0,
    quick: bool = False,
    progress: Progress = silent,
) -> Check:
    """Look for faults of the data, judge the correction with every method, and show the hubs.

    source: a store with a `collection`, or items (n, d) as an array or the name of a file, which are
    compared by their cosine, or as a Gallery with another metric and with keys. recipe: past
    queries as a bank alone, by default those of a corrected collection; or with real queries apart from
    these, a target bank and, of a collection, kinds. judgements: queries with right rows. Each may be the
    name of a file. field, measure: as in `tune`. The verdict on a collection is stored as by `tune`, unless
    a stored one on this bank rests on more. quick: whether to look at 5,000 items and 1,000 queries only,
    which stores nothing.

    Raises as `tune` and `diagnose` do, and InvalidInput for arguments that do not go together.
    """
    if isinstance(judgements, str | os.PathLike):
        judgements = Judgements.load(judgements)
    expect_judgements(judgements)
    reading = read(
        source,
        collection,
        Recipe.of(recipe),
        judgements=judgements,
        measure=measure,
        field=field,
        progress=progress,
    )
    result = checked(reading, quick=quick, seed=seed, progress=progress)
    if not isinstance(reading, CollectionTuning):
        return result
    # Last, as the result is worth more than the note of it.
    if unstored := store_tuned(reading.store, result.title, result.unstored):
        log.warning("%s", unstored)
        return result
    return replace(result, unstored=None)


def read(
    source: Source,
    collection: str | None,
    recipe: Recipe,
    *,
    judgements: Judgements | None = None,
    measure: str | Measure = R_AT_1,
    field: str | None = None,
    progress: Progress = silent,
) -> CollectionTuning | TuningInputs:
    """Read what `check` looks at, before methods are tried. Raises as it does."""
    chosen_measure = Measure.of(measure)
    recipe.expect_only("check", "bank", "target_bank", "queries", "kind")
    if judgements is not None and recipe.queries is not None:
        raise InvalidInput("judgements have queries of their own: leave out the other ones")
    if collection is not None:
        expect_store(source)
        return CollectionTuning.read(
            cast(Store, source),
            collection,
            recipe,
            field=field,
            judgements=judgements,
            measure=chosen_measure,
            progress=progress,
        )

    if hasattr(source, "info") or field is not None or recipe.kind is not None:
        raise InvalidInput("no collection to check: name one, or pass items as an array or a file")
    for name in VECTORS:
        if isinstance(named := getattr(recipe, name), str):
            raise InvalidInput(f"{name} {named!r} is in a database: name a collection of it, too")
    gallery = _items_of(source)
    bank = recipe.named_bank
    if bank is None:
        raise InvalidInput("items alone show no hubs: pass past queries as bank")
    title = gallery.title
    items = "the gallery" if title == "items" else f"the file {title}"
    of_judgements = None if judgements is None else judgements.queries
    for vectors in filter(None, (bank, recipe.named_queries, recipe.named_targets, of_judgements)):
        vectors.expect_dim(gallery.layout.dim, items)
    judged = None
    if judgements is not None:
        expect_distinct(gallery.keys, title)
        judged = judgements.within(gallery.keys, title)
    return TuningInputs(
        gallery, bank, recipe.named_targets, recipe.named_queries, judged, chosen_measure
    )


def _items_of(source: Gallery | BankLike | str | os.PathLike[str]) -> Gallery:
    """Return the items of a gallery, an array or a file."""
    if isinstance(source, Gallery):
        return source
    if isinstance(source, str | os.PathLike):
        return Gallery.load(source)
    return Gallery.of(source)


def checked(
    reading: CollectionTuning | TuningInputs,
    *,
    quick: bool = False,
    seed: int = 0,
    progress: Progress = silent,
) -> Check:
    """Return the check of what was read; the verdict on a collection is not stored yet.

    quick: as of `check`.
    """
    tuned = (reading.quick(seed) if quick else reading).run(seed=seed, progress=progress)
    inputs = tuned.inputs
    in_use = None
    if isinstance(reading, CollectionTuning):
        in_use = _in_use(reading, inputs)

    progress("looking for faults of the data", 0, 1)
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
    return Check(gallery.title, tuple(faults), tuned.tuning, search_hubs, tuned.unstored)


def _in_use(reading: CollectionTuning, inputs: TuningInputs) -> Biased | None:
    """Return the rows with the biases of a corrected collection; None if it is not corrected.

    inputs: those of the reading, or a part of them.
    """
    state = reading.info.state_of(reading.field)
    if state is None:
        return None
    is_its_own = state.profile.bank.queries_fingerprint == reading.inputs.bank.fingerprint
    return read_biased(
        reading.store,
        reading.info.name,
        None if is_its_own else inputs.bank,
        field=reading.field,
        gallery=inputs.gallery,
    )


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
    return Biased(gallery, biases, strength, reduced, activated, kinds)
