"""The refresh plan, which chooses the bank and the estimator, and the record of spare bank generations.

A job notes the bank generations that may become spare. If it is killed, the next refresh of the collection
drops the noted generations. A job drops only generations that its own collection noted and that no collection
state names; if another job names a generation at the same time, the store restores its rows, see
Store.drop_bank_generation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from milvus_hubness.banks.bank import QueryBank
from milvus_hubness.banks.generations import StoredBank, holds
from milvus_hubness.codec.index_hints import foremost
from milvus_hubness.errors import (
    EmptyBank,
    InvalidInput,
    InvalidParameter,
    NoSpareColumns,
    StateError,
    UnfinishedMigration,
)
from milvus_hubness.estimators import Estimator, from_dict, to_dict
from milvus_hubness.estimators.registry import is_same
from milvus_hubness.job_properties import TuningRecord
from milvus_hubness.migration.ledger import Migration
from milvus_hubness.operations.lease_records import LEDGER
from milvus_hubness.operations.reading import WHERE_FROM
from milvus_hubness.state import SLOTS_PER_PROFILE, BankReference, CollectionState, Profile, require_state
from milvus_hubness.stores.protocols import Store
from milvus_hubness.stores.records import CollectionInfo, Record

SPARE_BANKS = "spare banks"


class SpareBanks:
    """The spare bank generations of one collection."""

    def __init__(self, store: Store, collection: str) -> None:
        self._store, self._key = store, f"{SPARE_BANKS}/{collection}"

    def note(self, banks: Iterable[BankReference]) -> None:
        """Add these generations to the note."""
        spare = list(dict.fromkeys([*self.noted(), *banks]))
        if spare:
            body = json.dumps([bank.model_dump() for bank in spare])
            self._store.put_records(LEDGER, [Record(self._key, SPARE_BANKS, body)])

    def noted(self) -> list[BankReference]:
        """Return the noted generations that are not yet dropped."""
        record = self._store.record(LEDGER, self._key)
        return [BankReference.model_validate(bank) for bank in json.loads(record.body)] if record else []

    def drop(self, noted: Sequence[BankReference]) -> None:
        """Drop the noted generations that no collection state names, and the note. noted: the whole note."""
        if not noted:
            return
        for bank in noted:
            if self._store.exists(bank.collection):
                self._store.drop_bank_generation(bank)
        self._store.drop_records(LEDGER, SPARE_BANKS, [self._key])


@dataclass(frozen=True)
class RefreshPlan:
    """The bank and the estimator of a profile's next biases.

    reason: why the current biases must be replaced; empty if they need not be. mean_bias, reference: set if
    they are already decided. carries_on: whether this continues an unfinished refresh. rebuilding: the
    unfinished rebuild that this continues, if any.
    """

    estimator: Estimator
    bank: StoredBank
    strength: float
    reason: str
    mean_bias: float = 0.0
    reference: BankReference | None = None
    carries_on: bool = False
    rebuilding: Migration | None = None


def plan_refresh(
    store: Store,
    info: CollectionInfo,
    state: CollectionState,
    is_new: bool,
    kept: Callable[[], StoredBank],
    bank: QueryBank | None,
    target_bank: QueryBank | None,
    estimator: Estimator | None,
    *,
    refit: bool,
    rebuilding: Migration | None,
) -> RefreshPlan:
    """Choose the bank and the estimator of the next refresh.

    state: with the profile to refresh as the active one. is_new: whether the collection lacks this profile so
    far. kept: reads the profile's bank. rebuilding: an unfinished rebuild of this collection.
    """
    profile = state.profile
    incoming = state.incoming
    begun = incoming.profile if incoming and incoming.name == state.active else None
    if rebuilding and rebuilding.state:
        begun = rebuilding.state.profiles.get(state.active, begun)
    lost = False
    if begun and not refit:
        left = _whole(store, begun.bank)
        lost = left is None
        same = estimator is None or is_same(estimator, begun.estimator)
        if left and same and _with(left, bank, target_bank).fingerprint == left.fingerprint:
            return RefreshPlan(
                from_dict(begun.estimator), left, begun.strength, "one was not finished",
                begun.mean_bias, begun.bank, True, rebuilding,
            )  # fmt: skip
    there = kept()
    wanted = _with(there, bank, target_bank)
    strength = profile.strength
    if estimator is None and not is_new and (tuned := _newly_tuned(info, profile, wanted)):
        estimator, strength = from_dict(tuned.choice or {}), tuned.strength
    estimator = estimator or from_dict(profile.estimator)
    if is_new:
        return RefreshPlan(estimator, wanted, strength, "the profile is new")
    changed = ["a refit was asked for"] if refit else []
    if lost:
        changed.append("the bank of an unfinished refresh is gone")
    if wanted.fingerprint != profile.bank.fingerprint or not holds(profile.bank, there):
        changed.append("the bank changed")
    if not is_same(estimator, profile.estimator):
        changed.append("the parameters changed")
    return RefreshPlan(estimator, wanted, strength, " and ".join(changed))


def plan_revert(store: Store, info: CollectionInfo, state: CollectionState) -> RefreshPlan:
    """Plan a return to the biases before the last full refresh. Raises InvalidInput if there was none."""
    former = state.profile.former
    if former is None:
        raise InvalidInput(f"{info.name!r} was never refreshed: there is nothing to go back to")
    there = store.load_bank(former.bank)
    return RefreshPlan(
        from_dict(former.estimator), there, former.strength, "the last refresh is taken back",
        former.mean_bias, former.bank,
    )  # fmt: skip


def ready_state(info: CollectionInfo, field: str | None) -> CollectionState:
    """Return the state of the field if it is ready. Raises NotCorrected, UnfinishedMigration."""
    state = require_state(info.state_of(field), info.name)
    if state.phase != "ready":
        what = (
            "filled only in part: enable it again" if state.second_vector else f"a copy of {state.source!r}"
        )
        raise UnfinishedMigration(f"{info.name!r} is unfinished, {what}")
    return state


def with_profile(
    state: CollectionState, name: str, bank: QueryBank | None, estimator: Estimator
) -> tuple[CollectionState, bool]:
    """Return the state with this profile as the active one, and whether the profile is new.

    A new profile gets two spare columns of the stored vectors, without biases yet. The vectors then have
    fewer locality hint columns; the last profile that fits also takes the graph hint column. Raises
    InvalidParameter, InvalidInput, NoSpareColumns.
    """
    if name in state.profiles:
        return state.model_copy(update={"active": name}), False
    if state.incoming is not None and state.incoming.name == name:
        begun = state.incoming.profile
        draft = begun.model_copy(
            update={"slot": begun.standby, "standby": begun.slot, "epoch": begun.epoch - 1}
        )
        return state.with_profile(draft, name).model_copy(update={"active": name}), True
    if not name:
        raise InvalidParameter("a profile needs a name")
    if bank is None:
        raise InvalidInput(f"profile {name!r} is new: give the bank that its biases come from ({WHERE_FROM})")
    wider = _with_columns(state, state.slots + SLOTS_PER_PROFILE)
    fits = wider.layout.width == state.layout.width and wider.form.width == state.form.width
    if state.reranking is not None or not fits:
        raise NoSpareColumns(
            f"field {state.field!r} has no columns to spare for profile {name!r}: "
            "migrate it with room for more profiles"
        )
    active = state.profile
    draft = Profile(
        estimator=to_dict(estimator),
        slot=state.slots,
        standby=state.slots + 1,
        mean_bias=0.0,
        bank=active.bank,
        epoch=1,
        refreshed_at=active.refreshed_at,
    )
    return wider.with_profile(draft, name).model_copy(update={"active": name}), True


def _with_columns(state: CollectionState, slots: int) -> CollectionState:
    """Return the state with this number of slots, and with the graph hint and locality hint columns that
    still fit."""
    bare = {"slots": slots, "anchor": 0.0, "pull": 0.0, "locality_hints": "", "reach": 0.0}
    found = state.model_copy(update=bare)
    spare = found.layout.spare
    if spare:
        found = found.model_copy(update={"anchor": state.anchor, "pull": state.pull})
    count = min(state.layout.locality_hint_count, spare - bool(state.anchor))
    if locality_hints := foremost(state.locality_hints, state.dim, count):
        found = found.model_copy(update={"locality_hints": locality_hints, "reach": state.reach})
    return found


def _whole(store: Store, reference: BankReference) -> StoredBank | None:
    """Return the bank; None if its rows no longer exist or are not those that the reference names."""
    try:
        return store.load_bank(reference)
    except (EmptyBank, StateError):
        return None


def _with(stored: StoredBank, bank: QueryBank | None, target_bank: QueryBank | None) -> StoredBank:
    """Return the stored bank with these queries and targets in place of its own, where given."""
    return StoredBank(bank or stored.queries, stored.potentials, target_bank or stored.targets)


def _newly_tuned(info: CollectionInfo, profile: Profile, bank: StoredBank) -> TuningRecord | None:
    """Return the choice of tuning for this bank since the last refresh; None if there is none."""
    tuning = info.tuning
    if tuning is None or tuning.choice is None or tuning.tuned_at <= profile.refreshed_at:
        return None
    return tuning if tuning.bank_fingerprint == bank.queries.fingerprint else None
