"""The hubs of a collection as one page: what they swallow, and what correction does or would do about it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from milvus_hubness.banks import BankLike, QueryBank, optional_bank
from milvus_hubness.correction import Correction
from milvus_hubness.errors import InvalidInput
from milvus_hubness.estimators import Blend, Estimator, from_dict
from milvus_hubness.jobs.bank_source import WHERE_FROM
from milvus_hubness.jobs.gallery import read_gallery
from milvus_hubness.jobs.progress import Progress, silent
from milvus_hubness.quality import report
from milvus_hubness.quality.diagnosis import Diagnosis
from milvus_hubness.stores.base import Key, Store


def diagnose(
    store: Store,
    collection: str,
    queries: BankLike,
    *,
    bank: BankLike | None = None,
    target_bank: BankLike | None = None,
    estimator: Estimator | None = None,
    field: str | None = None,
    answers: Sequence[Key] | None = None,
    texts: Sequence[str] | None = None,
    progress: Progress = silent,
) -> Diagnosis:
    """Search `queries` in the collection's rows before and after correction.

    A corrected collection is shown with the biases that it serves. Another one with those that `estimator`
    (without one: what tuning chose, else Blend) would give it from `bank`. answers: the keys of the right
    rows. Raises InvalidInput, DimensionMismatch, CollectionNotFound, EmptyCollection.
    """
    queries, bank, target_bank = QueryBank.of(queries), optional_bank(bank), optional_bank(target_bank)
    info = store.info(collection)
    gallery = read_gallery(store, info, field, progress=progress)
    layout = gallery.layout
    queries.expect_dim(layout.dim, "the field")
    strength = 1.0
    state = info.state_of(field)
    if gallery.biases is not None and state is not None:
        bank = bank or store.load_bank(state.profile.bank).queries
        strength, biases = state.profile.strength, gallery.biases
    elif bank is None:
        raise InvalidInput(f"{info.name!r} is not corrected: pass --bank FILE ({WHERE_FROM})")
    else:
        tuned = info.tuning.choice if info.tuning else None
        estimator = estimator or (from_dict(tuned) if tuned else Blend())
        correction = Correction.fit(layout, estimator, bank, gallery=gallery.vectors, target_bank=target_bank)
        biases = correction.centred(gallery.vectors)
    return report.diagnose(
        layout.reduce_queries(queries.vectors),
        layout.reduce_items(gallery.vectors),
        biases - np.float32(biases.mean()),
        bank=QueryBank(layout.reduce_queries(bank.vectors), source=bank.source),
        positives=gallery.positions(answers) if answers is not None else None,
        keys=gallery.keys,
        fields=gallery.fields,
        query_texts=texts,
        strength=strength,
        verdict={"verdict": info.tuning.verdict, "reason": info.tuning.reason} if info.tuning else None,
        title=info.name,
    )
