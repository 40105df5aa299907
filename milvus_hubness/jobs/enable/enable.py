"""`enable`: correction without a copy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.basics.texts import field_words
from milvus_hubness.basics.waiting import wait_seconds
from milvus_hubness.correction.state import suffix_for
from milvus_hubness.errors import AlreadyCorrected, LeaseLost, StateError
from milvus_hubness.jobs.beside.entries import Entries
from milvus_hubness.jobs.beside.filling import fill_all, fill_generation
from milvus_hubness.jobs.beside.generations import (
    create_side,
    drop_side,
    expect_free_sides,
    flush_generation,
    noted_unchecked,
)
from milvus_hubness.jobs.common.corrections import keep_nearest
from milvus_hubness.jobs.common.fits import note_fits
from milvus_hubness.jobs.common.judging import store_verdict
from milvus_hubness.jobs.common.lease import Lease
from milvus_hubness.jobs.common.lease_records import default_client_ttl
from milvus_hubness.jobs.common.plan import Plan, expect_plan
from milvus_hubness.jobs.enable.plan import PlannedBeside
from milvus_hubness.jobs.enable.result import Enabled
from milvus_hubness.jobs.store.helpers import list_bank
from milvus_hubness.jobs.store.protocols import (
    BiasKeys,
    Store,
    capability,
    confirm_bank,
    expect_store,
    undo_save_bank,
)
from milvus_hubness.jobs.store.records import CollectionInfo


def enable(
    store: Store,
    plan: Plan[PlannedBeside],
    *,
    client_ttl: float | None = None,
    progress: Progress = silent,
) -> Enabled:
    """Write the biases outside the user's vectors,
    write the collection state, and check the biases.

    After a failure or an interruption, this drops what the run created, except for the names
    of payload keys. client_ttl: the longest state_ttl of a HubnessClient that writes, 5 seconds by
    default.

    Raises InvalidParameter for a plan of `migrate`, CorrectionNotRecommended if the plan demands a
    verdict for the bank and has one against it, LeaseHeld, LeaseLost, AlreadyCorrected for a correction
    since the plan was made, VerificationFailed and the exceptions of the store.
    """
    expect_store(store)
    expect_plan(plan, PlannedBeside)
    began = time.perf_counter()
    name = plan.source.name
    ttl = default_client_ttl() if client_ttl is None else client_ttl
    plan.chosen.judging.require(plan.chosen.verdict, name)
    with Lease(store, name, *plan.body.sides) as lease:
        store_verdict(lease.store, name, plan.chosen.verdict)
        info = lease.store.info(name)

        # Another job may have corrected a field since the plan was made.
        if plan.field in info.states or plan.suffix != suffix_for(plan.field, info.states.values()):
            raise AlreadyCorrected(
                f"another job has changed the correction of {field_words(plan.field)} of {name!r} "
                "since this plan was made: plan again"
            )

        with lease.explained():
            rows = _enable_reranking(lease, replace(plan, source=info), ttl, progress)
            corrected = lease.store.info(name, counted=False)
            note_fits(lease.store, corrected, corrected.states[plan.field])

    return Enabled(
        collection=name,
        bank=plan.bank_collection,
        rows=rows,
        seconds=round(time.perf_counter() - began, 2),
        side_collection=plan.body.sides[0] if plan.body.sides else None,
        candidates=plan.body.reranking.candidates,
        missed=plan.body.reranking.missed,
    )


@contextmanager
def _undone(lease: Lease) -> Iterator[ExitStack]:
    """Yield a stack whose callbacks run if the block fails, unless the lease is lost."""
    stack = ExitStack()
    try:
        yield stack
    except LeaseLost:
        raise
    except BaseException:
        # Whatever failed: what another job has made since then has the same names.
        lease.check_now()
        stack.close()
        raise


def _drop_if_ours(lease: Lease, source: CollectionInfo, side: str) -> None:
    with suppress(StateError):
        drop_side(lease, source, side)


def _enable_reranking(
    lease: Lease, plan: Plan[PlannedBeside], client_ttl: float, progress: Progress
) -> int:
    """Write all that the plan leads to, and check it; return the number of rows with a bias."""
    store = lease.store
    name = plan.source.name
    correction = plan.body.correction
    stored = correction.stored_bank(plan.chosen.target_bank)
    with _undone(lease) as undo:
        bank, made_bank = store.save_bank(plan.bank_collection, stored, correction.layout.metric)
        undo.callback(undo_save_bank, store, bank, made_bank)
        list_bank(store, plan.source.collection_id, plan.bank_collection)
        state = plan.first_state(correction, bank, phase="ready", reranking=plan.body.reranking)
        expect_free_sides(store, plan.source, plan.body.sides)
        for side in plan.body.sides:
            # Before it is created, which may fail half way: what is not ours stays.
            undo.callback(_drop_if_ours, lease, plan.source, side)
            create_side(lease, plan.source, side)
        if not plan.body.sides:
            capability(store, BiasKeys).add_bias_keys(name, plan.suffix)
            # Who has not heard of the keys would show them among the user's own.
            wait_seconds(f"all clients to hide the biases of {name!r}", client_ttl)

        entries = Entries(store, plan.source, state)
        slot = state.profile.slot
        fill_generation(entries, slot, correction, "writing biases", progress)
        flush_generation(store, state, slot)
        entries.wait_visible({slot: correction})

        # Registered before the write, which may reach the database although it fails.
        undo.callback(store.write_property, name, state.property_name, None)
        with noted_unchecked(store, plan.source, plan.field):
            store.write_property(name, state.property_name, keep_nearest(store, name, state))
            confirm_bank(store, state.profile.bank, stored, state.metric)

            # From now on clients write biases too; the check finds rows that they wrote before.
            wait_seconds(f"all clients to read the new state of {name!r}", client_ttl)
            return fill_all(entries, correction, progress)
