"""The corrections that biases come from, out of what the database keeps of them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from types import MappingProxyType

from milvus_hubness.correction import Correction
from milvus_hubness.estimators import from_dict
from milvus_hubness.jobs.engines import Engine, on_engine
from milvus_hubness.state import BankReference, CollectionState, Profile
from milvus_hubness.stores.base import Store, StoredBank

Banks = Mapping[BankReference, StoredBank]
"""Those that were read already."""
NONE_READ: Banks = MappingProxyType({})


def load_correction(
    store: Store,
    state: CollectionState,
    profile: Profile,
    engine: Engine = "local",
    banks: Banks = NONE_READ,
    *,
    checked: bool = True,
) -> Correction:
    """Without the gallery: the potentials are kept with the bank. checked: as `load_bank` has it. Raises as
    that and `on_engine` do."""
    kept = banks.get(profile.bank) or store.load_bank(profile.bank, checked=checked)
    correction = Correction.restore(
        state.layout,
        from_dict(profile.estimator),
        kept.queries,
        kept.potentials,
        target_bank=kept.targets,
        mean_bias=profile.mean_bias,
    )
    return on_engine(correction, engine, store, profile.bank, kept.targets)


def load_corrections(
    store: Store,
    state: CollectionState,
    engine: Engine = "local",
    banks: Banks = NONE_READ,
    *,
    unchecked: Container[str] = (),
) -> dict[int, Correction]:
    """By the slot that its biases lie in: every profile's, and those of biases on their way
    in or out. unchecked: profiles whose bank is used as it is, though it was edited by hand."""
    corrections: dict[int, Correction] = {}
    for name, profile in state.profiles.items():
        correction = load_correction(store, state, profile, engine, banks, checked=name not in unchecked)
        corrections |= {profile.slot: correction, profile.standby: correction}
    if leaving := state.outgoing:
        checked = leaving.name not in unchecked
        corrections[leaving.profile.slot] = load_correction(
            store, state, leaving.profile, engine, banks, checked=checked
        )
    if coming := state.incoming:
        corrections[coming.profile.slot] = load_correction(store, state, coming.profile, engine, banks)
    return corrections
