"""Whether a collection's live queries still come from where its bank does."""

from __future__ import annotations

import numpy as np

from milvus_hubness.jobs.living import origins_of, terms_of
from milvus_hubness.quality.drift import AT_LEAST, AT_MOST, LEVEL, THRESHOLD, Drift, drift_between
from milvus_hubness.reservoir import safe_seeds, unlike_each_other
from milvus_hubness.state import require_state
from milvus_hubness.stores.base import Store

LOOKED_AT = 2 * AT_MOST
"""Samples of which those are compared that are unlike each other."""


def drift(
    store: Store,
    collection: str,
    *,
    field: str | None = None,
    profile: str | None = None,
    threshold: float = THRESHOLD,
    level: float = LEVEL,
    seed: int = 0,
) -> Drift:
    """Compare the samples that wait to be taken into the profile's bank with that bank, as the field's metric
    sees them, see `quality.drift`. Of samples that are the same one counts, as in the bank; of the bank those
    places count that samples may take, so that one which took in all it can is not found wanting again.

    To be asked before they are taken in. Where the bank does not live, or too few samples wait, nothing has
    fired, and `reason` says so. Raises NotCorrected, InvalidInput, InvalidParameter.
    """
    info = store.info(collection)
    state = require_state(info.state_of(field), info.name)
    held = state.profile_of(profile)
    online_bank = info.online_bank_of(state.field, profile or state.active)
    if online_bank is None:
        reason = f"no queries of {info.name!r} are sampled: let its bank live"
        return Drift(0.0, threshold, 1.0, level, 0.0, False, reason, held.bank.count, 0)
    vectors = store.read_query_samples(online_bank.samples_collection, online_bank.profile).vectors
    vectors = vectors[np.random.default_rng(seed).permutation(len(vectors))[:LOOKED_AT]]
    if not len(vectors):
        reason = "no recent queries were sampled"
        return Drift(0.0, threshold, 1.0, level, 0.0, False, reason, held.bank.count, 0)
    recent = vectors[unlike_each_other(vectors, online_bank.duplicate_cosine)]
    stored = store.load_bank(held.bank, checked=False)
    bank, safe = stored.queries.vectors, safe_seeds(origins_of(stored), terms_of(online_bank, seed))
    if (~safe).sum() >= AT_LEAST:
        bank = bank[~safe]
    return drift_between(
        state.layout.reduce_queries(bank)[:, : state.dim],
        state.layout.reduce_queries(recent)[:, : state.dim],
        threshold=threshold,
        level=level,
        seed=seed,
    )
