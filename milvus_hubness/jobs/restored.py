"""The correction that a profile's biases come from, out of what the database keeps of it."""

from __future__ import annotations

from milvus_hubness.correction import Correction
from milvus_hubness.estimators import from_dict
from milvus_hubness.state import CollectionState, Profile
from milvus_hubness.stores.base import Store


def restored(store: Store, state: CollectionState, profile: Profile) -> Correction:
    """Without the gallery: the potentials are kept with the bank."""
    kept = store.load_bank(profile.bank)
    return Correction.restore(
        state.layout,
        from_dict(profile.estimator),
        kept.queries,
        kept.potentials,
        target_bank=kept.targets,
        centre=profile.centre,
    )
