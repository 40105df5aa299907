"""The migration job: `migrate`, `resume`, `cutover` and `roll_back`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from milvus_hubness.basics.progress import Progress
from milvus_hubness.basics.words import expect_instance
from milvus_hubness.errors import WrongPhase
from milvus_hubness.jobs.common.judging import store_verdict
from milvus_hubness.jobs.common.lease import Lease
from milvus_hubness.jobs.common.plan import Plan, expect_plan
from milvus_hubness.jobs.common.progress import as_events
from milvus_hubness.jobs.migration.clean import drop_copy
from milvus_hubness.jobs.migration.copy import begun
from milvus_hubness.jobs.migration.ledger import Ledger, Migration
from milvus_hubness.jobs.migration.migrator import Migrator, Rollback
from milvus_hubness.jobs.migration.options import MigrationOptions
from milvus_hubness.jobs.migration.pauses import noting_pauses
from milvus_hubness.jobs.migration.plan import PlannedCopy
from milvus_hubness.jobs.migration.presence import require_collections, require_copy
from milvus_hubness.jobs.migration.rights import expect_rights
from milvus_hubness.jobs.store.protocols import Store, expect_store


def migrate(
    store: Store,
    /,
    plan: Plan[PlannedCopy],
    options: MigrationOptions | None = None,
    *,
    progress: Progress | None = None,
    **changes: Any,
) -> Migration:
    """Copy, catch up, verify, and cut over if the plan names an alias or a rename.

    After a failure or an interruption, call it again to continue, or use `clean` to undo it.

    changes: fields of `MigrationOptions`, in place of those of `options`.

    Raises InvalidParameter, also for a plan of `enable`, CorrectionNotRecommended if the plan demands a
    verdict for the bank and has one against it, ResumeRefused if the plan or the source's schema differs
    from that of the earlier run, WrongPhase while the source's own name moves to another copy or back, or
    once an interrupted `clean` is carried out, LeaseHeld, LeaseLost, NotCaughtUp, VerificationFailed,
    CannotMigrate, StoreError before anything is written if the user lacks a right that every copy takes,
    and the exceptions of the store.
    """
    expect_store(store)
    expect_plan(plan, PlannedCopy)
    if options is not None:
        expect_instance("options", options, MigrationOptions)
    if progress is not None:
        changes["events"] = as_events(progress)
    options = replace(options, **changes) if options else MigrationOptions(**changes)
    options.events.report("plan", **plan.to_dict())
    plan.chosen.judging.require(plan.chosen.verdict, plan.source.name)
    request = plan.body.request
    target = plan.body.target
    expect_rights(store, plan.source, target)
    with _leased(store, (plan.source.name, target), target, options) as lease:
        store_verdict(lease.store, plan.source.name, plan.chosen.verdict)
        ledger = Ledger(lease.store)
        earlier = ledger.of_target(target)
        # A migration with a state that is being prepared is what an interrupted `clean` has left.
        is_half_cleaned = (
            earlier is not None and earlier.phase == "preparing" and earlier.state is not None
        )
        if earlier is not None and (request.restart or is_half_cleaned):
            if lease.store.exists(target):
                # A call that moves a name to this copy must not find the next one, of the same name.
                earlier.expect_no_move()
            drop_copy(lease, ledger, earlier)
        if is_half_cleaned:
            # A call of that `clean` may still be under way, which drops a copy of this name.
            raise WrongPhase(
                f"what an interrupted clean had left of {target!r} is dropped now, and nothing else was "
                "done: repeat the command for a new copy"
            )

        migrator = Migrator(lease, begun(ledger, plan), options)
        return migrator.run(plan, alias=request.alias, rename=request.rename)


def resume(
    store: Store,
    name: str,
    options: MigrationOptions | None = None,
    *,
    alias: str | None = None,
    rename: bool = False,
) -> Migration:
    """Resume the unfinished migration of this source or to this target, with its original
    arguments. alias, rename: as in `cutover`; with neither, a verified copy does not take over.
    Raises NoMigration, InvalidParameter for another name than the one that has moved, and as
    `migrate` does.
    """
    expect_store(store)
    migration = Ledger(store).find(name)
    migration.expect_name(alias, rename)
    if migration.phase in {"switched", "finished"} and not store.exists(migration.source_now):
        require_copy(store, migration)
        return migration

    with opened(store, migration, options or MigrationOptions()) as migrator:
        return migrator.run(alias=alias, rename=rename)


def cutover(
    store: Store,
    name: str,
    *,
    alias: str | None = None,
    rename: bool = False,
    options: MigrationOptions | None = None,
) -> Migration:
    """Let the application read the copy: catch up once
    more, then move the name that the application uses.

    name: the source, the copy or the alias. alias: is moved or created, in one step of the
    database. rename: the source gets a new name, and its own becomes an alias of the copy; in
    between, for some milliseconds, the name leads nowhere, which a HubnessClient waits out. An
    interrupted step is finished with its original arguments. Raises WrongPhase unless the copy is
    verified, InvalidParameter if another name has moved or moves, InvalidInput, NotCaughtUp, and the
    exceptions of the store.
    """
    expect_store(store)
    migration = Ledger(store).find(name)
    migration.require("verified", "switching", "switched", step="cutover")
    with opened(store, migration, options or MigrationOptions()) as migrator:
        migrator.migration.require("verified", "switching", "switched", step="cutover")
        migrator.migration.expect_name(alias, rename)
        require_collections(store, migrator.migration)
        migrator.cut_over(alias, rename)
        return migrator.migration


def roll_back(store: Store, name: str, options: MigrationOptions) -> Rollback:
    """Let the application read the source of a copy again, as `rollback` does."""
    migration = Ledger(store).find(name)
    migration.require("switched", "rolling back", step="rollback")
    with opened(store, migration, options) as migrator:
        migrator.end_refresh_of_copy()
        return migrator.roll_back()


@contextmanager
def opened(
    store: Store, migration: Migration, options: MigrationOptions, lease: Lease | None = None
) -> Iterator[Migrator]:
    """Yield the migrator of a migration, under `lease` or a new one.

    Raises LeaseHeld, NoMigration.
    """
    expect_instance("options", options, MigrationOptions)
    names = (migration.source_now, migration.target, migration.source)
    with _leased(store, names, migration.target, options, lease) as held:
        yield Migrator(held, Ledger(held.store).reread(migration), options)


@contextmanager
def _leased(
    store: Store,
    names: Sequence[str],
    target: str,
    options: MigrationOptions,
    lease: Lease | None = None,
) -> Iterator[Lease]:
    """Hold the lease, and report a failure or a stop as an event, and pauses in the ledger.

    Waits in the throttle check the lease. target: the copy.
    """
    try:
        with (
            nullcontext(lease) if lease else Lease(store, *names) as held,
            options.throttle.checking(held.check),
        ):
            held.include(*names)
            with noting_pauses(held, target, options):
                yield held
    except Exception as error:
        options.events.report("failed", type=type(error).__name__, message=str(error))
        raise
    except BaseException as stop:
        options.events.report("stopped", reason=type(stop).__name__)
        raise
