"""The command milvus-hubness migrate run: its plan, the rehearsal, and the run itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from milvus_hubness.cli.console import can_ask, say, show_result
from milvus_hubness.cli.migrate import options
from milvus_hubness.cli.migrate.carrying import alias_of, carry_out
from milvus_hubness.cli.migrate.rehearsal import rehearse
from milvus_hubness.cli.migrate.show import (
    ALIAS_WORDS,
    NO_ALIAS,
    migration_facts,
    show_before_switch,
    show_last,
    show_migration,
    show_plan,
)
from milvus_hubness.cli.options import Connection

if TYPE_CHECKING:
    from milvus_hubness.jobs.migration.ledger import Migration


def run(
    source: options.Source,
    planning: options.Planning,
    switching: options.Switching,
    pace: options.Pace,
    watching: options.CutoverOptions,
    extent: options.Extent,
    connection: Connection,
    yes: Annotated[bool, "Switch without the question that a terminal gets."] = False,
    as_json: options.AsEvents = False,
) -> None:
    """Copy, correct, catch up with writes, verify, and with --alias or --rename cut over.

    In a terminal it puts a question before the switch, except with --yes, --json or
    --postpone-cutover; a no leaves the verified copy for migrate cutover. Elsewhere it switches.

    Continues an interrupted run; without --bank, with its own options. Without --method: the method that
    tune chose for this bank, else blend.

    Before it, the same command with --plan shows what it would do, and with --rehearse does all of it
    but the switch.

    Example: milvus-hubness migrate run products --bank queries.npy --alias live
    """
    from milvus_hubness.cli.migrate.session import Session

    if extent.plan:
        plan(source, planning, switching, watching, connection, extent, as_json=as_json)
        return
    if extent.rehearse:
        rehearse(source, planning, switching, pace, watching, connection, extent, as_json=as_json)
        return

    # Whoever runs a script has named what to switch, and nobody is there to answer.
    is_to_ask = can_ask() and not (yes or as_json or watching.postpone_cutover)
    name = source if switching.rename else switching.alias
    session = Session(
        watching,
        pace,
        postponed=watching.postpone_cutover,
        as_json=as_json,
        question_about=name if is_to_ask else None,
    )
    store, migration = carry_out(
        connection, source, planning, watching, session, switching, measure=extent.measure
    )
    facts = migration_facts(store, migration)
    show_last(
        as_json,
        {**facts, **session.timeline.to_dict()},
        lambda: _show_outcome(
            migration, facts, switching, alias_of(store, migration, source), connection
        ),
    )


def plan(
    source: str,
    planning: options.Planning,
    switching: options.Switching,
    writers: options.Writers,
    connection: Connection,
    extent: options.Extent,
    *,
    as_json: bool,
) -> None:
    """Show what a run of these options would do."""
    planning.require(connection, source, planning.field)
    planned = planning.plan(connection.open(), source, switching, writers, measure=extent.measure)
    facts = planned.to_dict()
    show_result(as_json, {"plan": facts}, lambda: show_plan(facts))
    if as_json:
        return

    show_before_switch(facts)
    would = "Without --plan, the command does it; with --rehearse, all but the switch."
    if planned.chosen.judging.refuses(planned.chosen.verdict):
        would = (
            "Without --plan, the command would stop at this verdict, with exit code 3, unless --force "
            "is given."
        )
    say(f"\nNothing was written. {would}")


def _show_outcome(
    migration: Migration,
    facts: dict[str, Any],
    switching: options.Switching,
    alias: str,
    connection: Connection,
) -> None:
    show_migration(migration, facts)
    source = migration.source
    if migration.phase == "verified":
        say("\nNo name was moved: applications read the source.")
        alias = switching.alias or alias
        option = ["--rename"] if switching.rename else ["--alias", alias]
        # Each on one line, to be copied.
        say(f"To switch:  {connection.command('migrate', 'cutover', source, *option)}")
        if alias == NO_ALIAS and not switching.rename:
            say(f"            {ALIAS_WORDS}")
        clean = connection.command("migrate", "clean", source, "--drop", migration.target)
        say(f"To drop it: {clean}")
    elif migration.phase == "switched":
        # By the moved name: a refresh may have moved it on to another copy.
        name = migration.alias or migration.target
        say(f"\nTo undo: {connection.command('migrate', 'rollback', name)}")
