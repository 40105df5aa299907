"""The corrections that biases come from, out of what the database keeps of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from milvus_hubness.correction import Correction
from milvus_hubness.estimators import from_dict
from milvus_hubness.jobs.engines import Engine, on_engine
from milvus_hubness.state import BankReference, CollectionState, Profile
from milvus_hubness.stores.base import Store, StoredBank

Banks = Mapping[BankReference, StoredBank]
"""Those that were read already."""
NONE_READ: Banks = MappingProxyType({})


def restored(
    store: Store,
    state: CollectionState,
    profile: Profile,
    engine: Engine = "local",
    banks: Banks = NONE_READ,
) -> Correction:
    """Without the gallery: the potentials are kept with the bank. Raises as `on_engine` does."""
    kept = banks.get(profile.bank) or store.load_bank(profile.bank)
    correction = Correction.restore(
        state.layout,
        from_dict(profile.estimator),
        kept.queries,
        kept.potentials,
        target_bank=kept.targets,
        centre=profile.centre,
    )
    return on_engine(correction, engine, store, profile.bank, kept.targets)


def restored_by_slot(
    store: Store, state: CollectionState, engine: Engine = "local", banks: Banks = NONE_READ
) -> dict[int, Correction]:
    """By the slot that its biases lie in: every profile's, and those of biases on their way
    in or out."""
    corrections: dict[int, Correction] = {}
    for profile in state.profiles.values():
        correction = restored(store, state, profile, engine, banks)
        corrections |= {profile.slot: correction, profile.standby: correction}
    for moving in (state.outgoing, state.incoming):
        if moving is not None:
            corrections[moving.profile.slot] = restored(store, state, moving.profile, engine, banks)
    return corrections
