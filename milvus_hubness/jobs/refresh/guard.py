"""Turn the hub guard of a corrected collection on or off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from milvus_hubness.basics.defaults import OnHub
from milvus_hubness.basics.notebooks import ShownAsTable
from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.basics.words import expect_word
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.fitted import Correction
from milvus_hubness.correction.guard import FEWEST_ROWS, MOST_MEASURED, Evidence
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.jobs.common.corrections import load_correction
from milvus_hubness.jobs.common.lease import leasing
from milvus_hubness.jobs.common.stored_biases import StoredBiases
from milvus_hubness.jobs.refresh.plan import ready_state
from milvus_hubness.jobs.refresh.sample import sampled
from milvus_hubness.jobs.store.protocols import Store, expect_feature, expect_store
from milvus_hubness.jobs.store.records import CollectionInfo


@dataclass(frozen=True)
class GuardStatus(ShownAsTable):
    """The hub guard of a corrected field."""

    collection: str
    on_hub: OnHub
    """What clients do with a new row that looks like a planted hub."""
    measured_rows: int
    """Rows whose quantiles the guard compares with; 0 before they are measured, and then no row is
    stopped.
    """
    by: str
    """What is compared: "reach", or "bias" if the estimator keeps no scores of the gallery."""
    limit: float | None
    """The reach or the bias above which a row is stopped; None before it is measured."""

    @classmethod
    def of(cls, collection: str, state: CollectionState) -> GuardStatus:
        evidence = state.profile.evidence
        return cls(
            collection,
            state.on_hub,
            evidence.rows if evidence else 0,
            "reach" if evidence and evidence.reaches else "bias",
            evidence.limit if evidence else None,
        )

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def guard_hubs(
    store: Store,
    collection: str,
    on_hub: OnHub,
    *,
    field: str | None = None,
    progress: Progress = silent,
) -> GuardStatus:
    """Choose what clients do with new rows that look like planted hubs; clients follow within their
    state_ttl.

    No row is written. The quantiles of the gallery are measured if there are none. Raises NotCorrected,
    InvalidParameter, LeaseHeld, UnfinishedMigration, and UnsupportedOperation for a database whose
    clients have no guard.
    """
    expect_store(store)
    expect_word("on_hub", on_hub, OnHub)
    if on_hub != "off":
        expect_feature(store, "hub guard")

    with leasing(store, collection, lambda current: ready_state(current, field)) as (lease, info):
        store = lease.store
        state = ready_state(info, field)
        profile = state.profile
        if on_hub != "off" and profile.evidence is None:
            evidence = measured_evidence(store, info, state, progress)
            state = state.with_profile(profile.model_copy(update={"evidence": evidence}))
        state = state.model_copy(update={"on_hub": on_hub})
        lease.check()
        store.write_property(info.name, state.property_name, state)
        return GuardStatus.of(info.name, state)


def measured_evidence(
    store: Store, info: CollectionInfo, state: CollectionState, progress: Progress = silent
) -> Evidence | None:
    """Return the quantiles of up to 20,000 rows by the active profile."""
    correction = load_correction(store, state, state.profile)
    return _measured(StoredBiases(store, info, state), correction, progress)


def renewed_evidence(stored: StoredBiases, bank: StoredBank, progress: Progress) -> Evidence | None:
    """Return the quantiles for the hub guard: the present ones, or new ones if the gallery has
    changed its size by a tenth since.

    bank: that of the active profile.
    """
    state = stored.state
    evidence = state.profile.evidence
    rows = min(stored.info.rows, MOST_MEASURED)
    is_measured = evidence is not None and abs(rows - evidence.rows) <= 0.1 * evidence.rows
    if state.on_hub == "off" or is_measured or rows < FEWEST_ROWS:
        return evidence

    measured = _measured(stored, Correction.of_profile(state, state.profile, bank), progress)
    return None if measured is None else measured.after(evidence)


def _measured(stored: StoredBiases, correction: Correction, progress: Progress) -> Evidence | None:
    sample = sampled(stored, None, progress)
    return correction.measured(sample.vectors, sample.kinds(stored.state.kinds)).evidence
