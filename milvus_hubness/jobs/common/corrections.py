"""Corrections of stored collections, from their banks."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import partial
from types import MappingProxyType

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.banks.stored import Key, StoredBank
from milvus_hubness.correction.codec.arrays import Metric
from milvus_hubness.correction.fitted import Correction
from milvus_hubness.correction.kernels.policy import prefer_torch
from milvus_hubness.correction.overrides import Overrides
from milvus_hubness.correction.state import BankReference, CollectionState, Profile
from milvus_hubness.jobs.store.generations import holds
from milvus_hubness.jobs.store.protocols import Rows, Store

Banks = Mapping[BankReference, StoredBank]
"""Banks that the caller has read already."""
NONE_READ: Banks = MappingProxyType({})


def load_correction(
    store: Store,
    state: CollectionState,
    profile: Profile,
    banks: Banks = NONE_READ,
    *,
    checked: bool = True,
) -> Correction:
    """Return the correction of a profile from its stored bank and potentials.

    checked: as in `load_bank`. Raises as `load_bank` does.
    """
    # Jobs compute biases of all rows at once, where torch
    # is faster than NumPy; a client does not import it.
    prefer_torch()
    bank = banks.get(profile.bank) or store.load_bank(profile.bank, checked=checked)
    return Correction.of_profile(state, profile, bank)


def load_corrections(
    store: Store,
    state: CollectionState,
    banks: Banks = NONE_READ,
    *,
    unchecked: Container[str] = (),
) -> dict[int, Correction]:
    """Return the corrections of all profiles, and of the generation that a job fills, by bias
    slot. unchecked: profiles whose bank is used even if it was edited by hand.
    """
    corrections: dict[int, Correction] = {}
    load = partial(load_correction, store, state, banks=banks)
    for name, profile in state.profiles.items():
        corrections[profile.slot] = load(profile, checked=name not in unchecked)

    if state.filling is not None:
        corrections[state.filling.slot] = load(state.filling)
    return corrections


def saved_bank(
    store: Store, bank: StoredBank, current: BankReference, metric: Metric
) -> BankReference:
    """Save a bank beside the current one, and return the reference to it; or the current reference,
    which may name nearest items too, if they hold the same rows.
    """
    is_current = holds(current, bank)
    saved, _ = store.save_bank(current.collection, bank, metric, in_use=is_current)
    return current if is_current else saved


def keep_nearest(store: Store, collection: str, state: CollectionState) -> CollectionState:
    """Store the keys of the raw nearest rows of bank queries, for the gates of the profiles. Return
    the state that names them; clients read the former keys until it is stored.
    """
    for name, profile in state.profiles.items():
        if profile.gate is None:
            continue

        bank = store.load_bank(profile.bank, checked=False)
        nearest = _nearest(store, collection, state, profile, bank.queries, profile.gate)

        # A list of its own: clients go on with the former one until they read the new state.
        reference = store.save_nearest(profile.bank, (collection, state.field, name), nearest)
        state = state.with_profile(profile.model_copy(update={"bank": reference}), name)
    return state


def _nearest(
    store: Rows,
    collection: str,
    state: CollectionState,
    profile: Profile,
    bank: QueryBank,
    k: int,
) -> list[list[Key]]:
    """Return the keys of the k raw nearest rows of each
    vector of `bank`; none for vectors without a direction.
    """
    valid = ~state.layout.invalid(bank.vectors)
    # A gate corrects hubs, and kinds are apart from it: nearest is what a search at strength 0 finds.
    weights = state.query_weights(profile, Overrides(0.0))
    query_vectors = state.codec.encode_queries(bank.vectors[valid], weights)
    nearest = iter(store.nearest(collection, state.field, query_vectors, k))
    return [next(nearest) if is_valid else [] for is_valid in valid]
