"""What milvus-hubness migrate run and its rehearsal do alike: begin a migration or carry it on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from milvus_hubness.basics.defaults import WHERE_FROM
from milvus_hubness.cli.migrate import options
from milvus_hubness.cli.migrate.show import (
    NO_ALIAS,
    alias_to_move,
    show_before_switch,
    show_plan,
)
from milvus_hubness.cli.options import Connection
from milvus_hubness.errors import NoMigration

if TYPE_CHECKING:
    from milvus_hubness.cli.migrate.session import Session
    from milvus_hubness.jobs.migration.ledger import Migration, Phase
    from milvus_hubness.jobs.store.protocols import Store


def to_resume(store: Store, name: str, target: str | None, *, is_planned: bool) -> Migration | None:
    """Return the migration that a run continues without a plan.

    is_planned: a bank is named. The result is then None unless the application's name has begun to
    move. Raises NoMigration, and InvalidInput if the name has several copies.
    """
    from milvus_hubness.jobs.migration.ledger import Ledger

    try:
        migration = Ledger(store).find(name, target)
    except NoMigration as error:
        if is_planned:
            return None
        raise NoMigration(f"{error}, or pass --bank FILE to start one ({WHERE_FROM})") from None

    # A name that has begun to move must arrive, whatever the options would start.
    has_moved = migration.phase in {"switching", "switched", "rolling back"}
    return migration if has_moved or not is_planned else None


BEFORE_CUTOVER: tuple[Phase, ...] = (
    "preparing",
    "copying",
    "catching up",
    "verified",
    "rolled back",
)
"""The phases in which no name is moving or has moved."""


def alias_of(store: Store, migration: Migration, named: str) -> str:
    """Return the alias for commands to go on with, as `alias_to_move` does."""
    # After a switch there is nothing to go on with, and the source may be gone.
    if migration.phase != "verified":
        return NO_ALIAS
    return alias_to_move(store.info(migration.source, counted=False), named)


def carry_out(
    connection: Connection,
    source: str,
    planning: options.Planning,
    writers: options.Writers,
    session: Session,
    switching: options.Switching,
    *,
    is_rehearsal: bool = False,
    measure: bool = False,
) -> tuple[Store, Migration]:
    """Run the migration that the options plan, or resume the one that they name.

    is_rehearsal: whether no name moves. What a run would refuse of its names, a rehearsal refuses too.
    """
    from milvus_hubness.jobs.common.lease import expect_free
    from milvus_hubness.jobs.migration.run import migrate, resume

    if planning.restart and not planning.bank:
        raise typer.BadParameter(f"--restart begins again: pass --bank FILE too ({WHERE_FROM})")
    store = connection.open()

    # --restart drops what there is, and plans again.
    resumed = None
    if not planning.restart:
        resumed = to_resume(store, source, planning.target, is_planned=bool(planning.bank))

    if resumed is not None:
        planning.validate_resumed(store, resumed)
        # A rehearsal must not go on with a cutover.
        if is_rehearsal:
            resumed.require(*BEFORE_CUTOVER, step="a rehearsal")
        with session.open() as settings:
            if is_rehearsal:
                settings = replace(settings, confirm=_leave_names)
            migration = resume(
                store,
                resumed.target,
                settings,
                alias=switching.alias,
                rename=switching.rename,
            )
            return store, migration

    # Before the plan, which takes a while and would be printed.
    real_name = store.info(source, counted=False).name
    expect_free(store, real_name, planning.target or f"{real_name}_hubness")
    plan = planning.plan(store, source, switching, writers, measure=measure)
    if not session.as_json:
        show_plan(plan.to_dict())
        show_before_switch(plan.to_dict())

    with session.open() as settings:
        if is_rehearsal:
            settings = replace(settings, confirm=_leave_names)
        return store, migrate(store, plan, settings)


def _leave_names(_: Migration) -> bool:
    """Return that no name moves to the verified copy."""
    return False
