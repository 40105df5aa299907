"""`diagnose` and `tune` for collections of a store."""

from __future__ import annotations

from milvus_hubness.basics.logs import log
from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.basics.words import expect_instance
from milvus_hubness.correction.banks.bank import BankLike, QueryBank, optional_bank
from milvus_hubness.errors import InvalidInput
from milvus_hubness.jobs.common.judgements import Judgements, expect_judgements
from milvus_hubness.jobs.common.recipe import Recipe
from milvus_hubness.jobs.common.samples import read_from_database
from milvus_hubness.jobs.store.protocols import Store, expect_store
from milvus_hubness.quality.retrieval import R_AT_1, Measure
from milvus_hubness.quality.tuning import Tuning
from milvus_hubness.reports import report
from milvus_hubness.reports.biased import read_biased
from milvus_hubness.reports.report import (
    NO_DETAIL,
    NOTHING_KNOWN,
    BankFacts,
    Detail,
    Diagnosis,
)
from milvus_hubness.reports.runs import RunFiles
from milvus_hubness.reports.tuned import CollectionTuning, store_tuned


def diagnose(
    store: Store,
    collection: str,
    queries: BankLike | None = None,
    recipe: Recipe | BankLike | str | None = None,
    *,
    judgements: Judgements | None = None,
    measure: str | Measure = R_AT_1,
    field: str | None = None,
    detail: Detail = NO_DETAIL,
    progress: Progress = silent,
) -> Diagnosis:
    """Search queries in a collection's rows before and after correction, and report the hubs.

    queries: (n, d), the name of their file, or "collection:NAME" for the vectors of a collection; or
    judgements with right rows. recipe: the bank, the target bank, the estimator and
    the kinds whose biases are shown, or a bank alone, if the collection is not corrected; by default those of
    tuning, else the defaults. A corrected one has its own. measure: of what users
    send of these, R@k, MRR, MAP or nDCG@k. detail: what is shown beyond the hubs, and files for
    evaluators.

    Raises InvalidParameter for further words of a recipe, InvalidInput, DimensionMismatch,
    CollectionNotFound, EmptyCollection, CannotMigrate for kinds that are not possible, and with runs
    InvalidParameter and UnreadableFile.
    """
    expect_store(store)
    chosen_measure = Measure.of(measure)
    expect_judgements(judgements)
    if (queries is None) == (judgements is None):
        raise InvalidInput("a diagnosis needs queries or judgements: pass one of them")
    in_database = read_from_database(store, {"queries": queries}, collection, field)
    queries = in_database.get("queries") or optional_bank(queries)
    expect_instance("detail", detail, Detail)
    if detail.runs is not None:
        expect_instance("runs", detail.runs, RunFiles)
        detail.runs.check(judgements)
    recipe = Recipe.of(recipe)
    recipe.expect_only("diagnose", "bank", "target_bank", "estimator", "kind")
    biased = read_biased(store, collection, recipe, field=field, progress=progress)
    verdict = biased.verdict
    known = NOTHING_KNOWN
    if verdict is not None:
        known = BankFacts({"verdict": verdict.verdict, "reason": verdict.reason})
    searched: QueryBank | Judgements | None = queries
    if judgements is not None:
        searched = judgements.within(biased.gallery.keys, biased.title)
    assert searched is not None, "a diagnosis has queries or judgements"
    return report.diagnose(biased, searched, measure=chosen_measure, known=known, detail=detail)


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
) -> Tuning:
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
    expect_store(store)
    reading = CollectionTuning.read(
        store,
        collection,
        Recipe.of(recipe),
        field=field,
        judgements=judgements,
        measure=measure,
        progress=progress,
    )
    tuned = reading.run(replaces=replaces, seed=seed, progress=progress)
    if unstored := store_tuned(store, reading.info.name, tuned.unstored, replaces=replaces):
        log.warning("%s", unstored)
    return tuned.tuning
