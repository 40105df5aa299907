"""A refresh: biases in the vectors by a copy, those beside them by a new generation of entries."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from milvus_hubness.correction.banks.bank import BankLike
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.errors import CollectionNotFound, WrongPhase
from milvus_hubness.jobs.common.lease import Lease, lease_on, leasing
from milvus_hubness.jobs.common.lease_records import now
from milvus_hubness.jobs.common.recipe import Recipe
from milvus_hubness.jobs.common.samples import SAMPLES
from milvus_hubness.jobs.common.stored_biases import StoredBiases
from milvus_hubness.jobs.migration.corrected import half_switched, unfinished
from milvus_hubness.jobs.migration.ledger import Ledger, Migration
from milvus_hubness.jobs.migration.run import opened
from milvus_hubness.jobs.refresh.beside import BesideVectors
from milvus_hubness.jobs.refresh.by_copy import ByCopy, copying
from milvus_hubness.jobs.refresh.options import RefreshOptions
from milvus_hubness.jobs.refresh.plan import plan_refresh, ready_state, with_profile
from milvus_hubness.jobs.refresh.refit import check_refit, samples_for_refresh
from milvus_hubness.jobs.refresh.refreshing import Refreshing
from milvus_hubness.jobs.refresh.result import RefreshResult
from milvus_hubness.jobs.store.protocols import Store, expect_store
from milvus_hubness.jobs.store.records import CollectionInfo


def refresh(
    store: Store,
    /,
    collection: str,
    recipe: Recipe | BankLike | str | None = None,
    options: RefreshOptions | None = None,
    *,
    plan: bool = False,
    **changes: Any,
) -> RefreshResult:
    """Compute new biases if they are due, and let searches use them all at once, under one lease.

    New biases are evaluated against the old ones and against none, on queries that were not fitted
    and on labelled ones if given. If they are worse, nothing changes, unless `force`. Biases in the
    vectors are those of a copy, which takes over all aliases of the collection; biases beside them,
    and those that rows there lack, are written next to the old ones. If the refresh is killed or
    stopped before that, the next one continues it.

    recipe: which biases the collection gets, in place of that of `options`; or a bank alone. plan: only
    say what would be done. changes: fields of `RefreshOptions`, in place of those of `options`. Raises NotCorrected,
    UnfinishedMigration, LeaseHeld, LeaseLost, Cancelled, DimensionMismatch, BankTooSmall,
    InvalidParameter, CannotMigrate for a collection that cannot be copied, InvalidInput if no name can
    move to a copy, or a target bank or the bank of a new profile is missing, EmptyCollection without a
    row on which the estimator is fitted, and the exceptions of a migration.
    """
    expect_store(store)
    if recipe is not None:
        changes["recipe"] = recipe
    options = RefreshOptions.of(options, changes)
    options = replace(options, recipe=_read(store, collection, options))
    began = time.perf_counter()
    result = _attempt(store, collection, options, is_planned=plan)
    while result is None:
        result = _attempt(store, collection, options, is_planned=plan, has_ended_move=True)
    return replace(result, seconds=round(time.perf_counter() - began, 2))


def _read(store: Store, collection: str, options: RefreshOptions) -> Recipe:
    """Return the recipe with the vectors that it names of the database."""
    recipe = options.recipe
    if recipe.bank == SAMPLES:
        bank = samples_for_refresh(store, collection, options.field)
        recipe = replace(recipe, bank=bank)
    return recipe.read(store, collection, options.field)


def _attempt(
    store: Store,
    collection: str,
    options: RefreshOptions,
    *,
    is_planned: bool,
    has_ended_move: bool = False,
) -> RefreshResult | None:
    """Refresh the collection; return None if a killed job had moved some of its names, and this has moved
    the others. is_planned: write nothing. has_ended_move: this process has moved these others just now.
    """
    field = options.field
    with ExitStack() as stack:
        if is_planned:
            # A plan writes nothing, so its lease is never taken.
            info = store.info(collection, counted=False)
            ready_state(info, field)
            lease = lease_on(store, info)
        else:
            validated = leasing(store, collection, lambda current: ready_state(current, field))
            try:
                lease, info = stack.enter_context(validated)
            except CollectionNotFound:
                # A collection that was renamed, and its name is no alias yet.
                left = half_switched(store, Ledger(store).migrations(collection), collection)
                if left is None:
                    raise
                with opened(store, left, copying(options)) as migrator:
                    migrator.run()
                return None

        check = check_refit(
            store if is_planned else lease.store, info, options, is_planned=is_planned
        )
        if check.bank is not None:
            # Queries of the application themselves: the evaluation decides on them.
            recipe = replace(options.recipe, bank=check.bank, verdict="skip")
            options = replace(options, recipe=recipe)
        result = _refreshed(
            lease,
            store,
            info,
            collection,
            options,
            check.reason,
            is_planned=is_planned,
            has_ended_move=has_ended_move,
        )
        return None if result is None else check.noted(result)


def _refreshed(
    lease: Lease,
    store: Store,
    info: CollectionInfo,
    requested: str,
    options: RefreshOptions,
    refit_reason: str,
    *,
    is_planned: bool,
    has_ended_move: bool,
) -> RefreshResult | None:
    """Finish what a killed job left, plan the refresh, and carry it out.

    requested: the name or alias that the caller used. Return None if names were left to move. Raises
    WrongPhase if this was so before, and a copy is due besides.
    """
    whole = ready_state(info, options.field)
    if not is_planned:
        store = lease.store

    # A strongly consistent read mostly waits, so these reads run in parallel.
    with ThreadPoolExecutor(4, "reading") as executor:
        row_count = executor.submit(store.count, info.name)
        migrations = executor.submit(Ledger(store).migrations, info.name)
        pending_count = executor.submit(StoredBiases(store, info, whole).count_pending)

        left = half_switched(store, migrations.result(), info.name)
        if left is not None and not is_planned:
            with opened(store, left, copying(options), lease) as migrator:
                migrator.run()
            return None

        begun = unfinished(store, migrations.result(), info, whole.field)
        name = _chosen_profile(whole, options, begun)
        state, is_new = with_profile(whole, name, options, begun)
        stored_bank = executor.submit(store.load_bank, state.profile.bank, checked=False)

        # The bank is awaited only where the plan needs it.
        waiting = pending_count.result()
        plan = plan_refresh(
            store,
            info,
            state,
            is_new,
            stored_bank.result,
            options,
            begun,
            refit_reason,
        )

    is_beside = whole.codec.leaves_vectors
    if has_ended_move and plan.reason and not is_beside:
        # A call of the killed job may still be under way, which leads a name to this collection. Moved on
        # by this command, the name would come back from the new copy.
        raise WrongPhase(
            f"names that a killed job was moving have arrived at {info.name!r}, and nothing else was done: "
            "repeat the command for the new biases"
        )
    if not is_planned:
        lease.check()
        bank_collection = state.profile.bank.collection
        store.drop_spare_generations(bank_collection, Ledger(store).used_banks)

    kind: type[Refreshing] = BesideVectors if is_beside else ByCopy
    job = kind(
        store=store,
        lease=lease,
        info=replace(info, rows=row_count.result()),
        requested=requested,
        state=state,
        active=whole.active,
        is_new=is_new,
        options=options,
        is_planned=is_planned,
        waiting=waiting,
    )
    result = job.run(plan)

    bias_age_seconds = 0.0
    if result.action == "refused":
        age = now() - state.profile.refreshed_at
        bias_age_seconds = round(age.total_seconds(), 1)

    return replace(
        result,
        rows=job.info.rows,
        pending=waiting,
        bias_age_seconds=bias_age_seconds,
    )


def _chosen_profile(
    state: CollectionState, options: RefreshOptions, begun: Migration | None
) -> str:
    """Return the profile to refresh: the named one,
    one whose refresh is unfinished, or the active one.

    begun: the unfinished copy.
    """
    if options.profile is not None:
        return options.profile
    if options.recipe.names_biases:
        return state.active
    return str(begun.arguments["profile"]) if begun is not None else state.active
