"""The nearest rows of each bank query, which gates of searches go by."""

from __future__ import annotations

from milvus_hubness.banks import QueryBank
from milvus_hubness.state import CollectionState
from milvus_hubness.stores.base import Key, Store


def keep_nearest(store: Store, collection: str, state: CollectionState) -> CollectionState:
    """For every profile whose searches are gated, keep the keys of each bank query's raw nearest rows, and of
    each target's where the gate asks for them too.

    Returns the state that names them: until it is written, the earlier are read.
    """
    for name, profile in state.profiles.items():
        if profile.gate is None:
            continue
        bank = store.load_bank(profile.bank, checked=False)
        nearest = _nearest(store, collection, state, bank.queries, profile.gate)
        if profile.gate_targets is not None and bank.targets is not None:
            nearest += _nearest(store, collection, state, bank.targets, profile.gate_targets)
        reference = store.save_nearest(profile.bank, collection, nearest)
        state = state.with_profile(profile.model_copy(update={"bank": reference}), name)
    return state


def _nearest(
    store: Store, collection: str, state: CollectionState, bank: QueryBank, k: int
) -> list[list[Key]]:
    """The keys of the k raw nearest rows of each of `bank`; none for vectors without a direction."""
    valid = ~state.layout.invalid(bank.vectors)
    query_vectors = bank.vectors[valid]
    if state.reranking is None:
        query_vectors = state.layout.encode_queries(query_vectors, 0.0, slot=state.profile.slot)
    found = iter(store.nearest(collection, state.searched_field, query_vectors, k))
    return [next(found) if is_sound else [] for is_sound in valid]
