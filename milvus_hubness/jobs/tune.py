"""Should this collection be corrected, and with what? SearchRequest of its own rows, and kept with it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from milvus_hubness.banks import BankLike, QueryBank, optional_bank
from milvus_hubness.correction import reduced_targets
from milvus_hubness.errors import InvalidInput
from milvus_hubness.estimators import to_dict
from milvus_hubness.jobs.bank_source import WHERE_FROM
from milvus_hubness.jobs.gallery import read_gallery
from milvus_hubness.jobs.progress import Progress, silent
from milvus_hubness.quality import tuning
from milvus_hubness.state import TuningRecord
from milvus_hubness.stores.base import Key, Store


def tune(
    store: Store,
    collection: str,
    bank: BankLike | None = None,
    *,
    field: str | None = None,
    queries: BankLike | None = None,
    answers: Sequence[Key] | None = None,
    target_bank: BankLike | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> tuning.Tuning:
    """Try every method on the collection's rows; the finding goes into a property of the collection.

    bank: without one, that of the corrected collection. queries (n, d) with answers, the keys of their right
    rows, are labelled pairs; queries alone stand for what is asked. Raises InvalidInput, CollectionNotFound,
    EmptyCollection, and as `quality.tuning.tune` does.
    """
    bank, queries, target_bank = map(optional_bank, (bank, queries, target_bank))
    info = store.info(collection)
    if info.is_bank:
        raise InvalidInput(f"{info.name!r} is a query bank: tune the collection that it is for")
    state = info.state_of(field)
    kept = store.load_bank(state.profile.bank) if bank is None and state else None
    if kept is not None:
        bank, target_bank = kept.queries, target_bank or kept.targets
    if bank is None:
        raise InvalidInput(f"{info.name!r} is not corrected and has no bank: pass --bank FILE ({WHERE_FROM})")
    if answers is not None and (queries is None or len(answers) != len(queries)):
        raise InvalidInput(f"{len(answers)} answers for {len(queries) if queries else 0} queries")
    gallery = read_gallery(store, info, field, progress=progress)
    layout = gallery.layout
    for given in (bank, target_bank, queries):
        if given is not None:
            given.expect_dim(layout.dim, "the field")
    found = tuning.tune(
        QueryBank(layout.reduce_queries(bank.vectors), source=bank.source),
        layout.reduce_items(gallery.vectors),
        target_bank=reduced_targets(layout, target_bank) if target_bank else None,
        queries=layout.reduce_queries(queries.vectors) if queries else None,
        positives=gallery.positions(answers) if answers is not None else None,
        seed=seed,
        progress=progress,
    )
    record = TuningRecord(
        verdict=found.verdict,
        choice=to_dict(found.choice) if found.choice else None,
        strength=round(found.strength, 2),
        reason=found.reason,
        labelled=found.labelled,
        bank_fingerprint=bank.fingerprint,
        tuned_at=datetime.now(timezone.utc),
    )
    store.write_tuning(info.name, record)
    return found
