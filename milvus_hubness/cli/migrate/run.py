"""The commands milvus-hubness migrate run and rehearse."""

from __future__ import annotations

import resource
import sys
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

from milvus_hubness.basics.defaults import WHERE_FROM
from milvus_hubness.cli.console import can_ask, say, show_facts
from milvus_hubness.cli.migrate import options
from milvus_hubness.cli.migrate.show import (
    ALIAS_WORDS,
    NO_ALIAS,
    alias_to_move,
    migration_facts,
    migration_words,
    show_before_switch,
    show_last,
    show_migration,
    show_plan,
)
from milvus_hubness.cli.options import APPLICATION_TOKEN_VARIABLE, Connection
from milvus_hubness.errors import InvalidParameter, NoMigration

if TYPE_CHECKING:
    from milvus_hubness.cli.migrate.session import Session
    from milvus_hubness.jobs.migration.ledger import Migration, Phase
    from milvus_hubness.jobs.migration.rights import TriesRights
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


def run(
    source: options.Source,
    planning: options.Planning,
    switching: options.Switching,
    pace: options.Pace,
    watching: options.Watching,
    connection: Connection,
    postpone_cutover: options.Postpone = False,
    yes: Annotated[bool, "Switch without the question that a terminal gets."] = False,
    as_json: options.AsEvents = False,
) -> None:
    """Copy, correct, catch up with writes, verify, and with --alias or --rename cut over.

    In a terminal it puts a question before the switch, except with --yes, --json or
    --postpone-cutover; a no leaves the verified copy for migrate cutover. Elsewhere it switches.

    Continues an interrupted run; without --bank, with its own options.

    Example: milvus-hubness migrate run products --bank queries.npy --alias live
    """
    from milvus_hubness.cli.migrate.session import Session

    # Whoever runs a script has named what to switch, and nobody is there to answer.
    is_to_ask = can_ask() and not (yes or as_json or postpone_cutover)
    name = source if switching.rename else switching.alias
    session = Session(
        watching,
        pace,
        postponed=postpone_cutover,
        as_json=as_json,
        question_about=name if is_to_ask else None,
    )
    store, migration = _carry_out(connection, source, planning, watching, session, switching)
    facts = migration_facts(store, migration)
    show_last(
        as_json,
        {**facts, **session.timeline.to_dict()},
        lambda: _show_outcome(migration, facts, switching, _alias(store, migration, source)),
    )


def _alias(store: Store, migration: Migration, named: str) -> str:
    """Return the alias for commands to go on with, as `alias_to_move` does."""
    # After a switch there is nothing to go on with, and the source may be gone.
    if migration.phase != "verified":
        return NO_ALIAS
    return alias_to_move(store.info(migration.source, counted=False), named)


def _carry_out(
    connection: Connection,
    source: str,
    planning: options.Planning,
    writers: options.Writers,
    session: Session,
    switching: options.Switching | None = None,
    *,
    measure: bool = False,
) -> tuple[Store, Migration]:
    """Run the migration that the options plan, or resume the one that they name.

    switching: None for a rehearsal.
    """
    from milvus_hubness.jobs.common.lease import expect_free
    from milvus_hubness.jobs.migration.migrator import migrate, resume

    store = connection.open()
    name = switching or options.Switching()

    # --restart with a bank drops what there is, and plans again.
    resumed = None
    if not (planning.bank and planning.restart):
        resumed = to_resume(store, source, planning.target, is_planned=bool(planning.bank))

    if resumed is not None:
        planning.validate_resumed(store, resumed)
        # A rehearsal must not go on with a cutover.
        if switching is None:
            resumed.require(*BEFORE_CUTOVER, step="a rehearsal")
        with session.open() as settings:
            migration = resume(
                store, resumed.target, settings, alias=name.alias, rename=name.rename
            )
            return store, migration

    # Before the plan, which takes a while and would be printed.
    real_name = store.info(source, counted=False).name
    expect_free(store, real_name, planning.target or f"{real_name}_hubness")
    plan = planning.plan(store, source, name, writers, measure=measure)
    if not session.as_json:
        show_plan(plan.to_dict())
        show_before_switch(plan.to_dict())

    with session.open() as settings:
        return store, migrate(store, plan, settings)


def _show_outcome(
    migration: Migration, facts: dict[str, Any], switching: options.Switching, alias: str
) -> None:
    show_migration(migration, facts)
    source, target = quote(migration.source), quote(migration.target)
    if migration.phase == "verified":
        say("\nNo name was moved: applications read the source.")
        alias = switching.alias or alias
        option = "--rename" if switching.rename else f"--alias {quote(alias)}"
        # Each on one line, to be copied.
        say(f"To switch:  milvus-hubness migrate cutover {source} {option}")
        if alias == NO_ALIAS and not switching.rename:
            say(f"            {ALIAS_WORDS}")
        say(f"To drop it: milvus-hubness migrate clean {source} --drop {target}")
    elif migration.phase == "switched":
        # By the moved name: a refresh may have moved it on to another copy.
        say(
            f"\nTo undo: milvus-hubness migrate rollback {quote(migration.alias or migration.target)}"
        )


def rehearse(
    source: options.Source,
    planning: options.Planning,
    pace: options.Pace,
    watching: options.Watching,
    connection: Connection,
    measure: options.Measure = False,
    application_token_file: Annotated[
        Path | None,
        "File with the token of an application: its rights are tried too, by requests without "
        f"effect. [default: ${APPLICATION_TOKEN_VARIABLE}]",
    ] = None,
    as_json: options.AsEvents = False,
) -> None:
    """Do everything except the cutover, on real data, and report what it took.

    Drop the copy afterwards, or continue with migrate run.

    Example: milvus-hubness migrate rehearse products --bank queries.npy
    """
    from milvus_hubness.cli.migrate.session import Session
    from milvus_hubness.jobs.migration.ledger import RENAMED

    session = Session(watching, pace, as_json=as_json)
    application = _application(connection, application_token_file)
    store, migration = _carry_out(connection, source, planning, watching, session, measure=measure)

    alias = _alias(store, migration, source)
    source = migration.source
    target = migration.target

    # Linux counts in KiB, macOS in bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    units_per_mib = 2**20 if sys.platform == "darwin" else 2**10
    report = {
        "source": source,
        "target": target,
        **session.timeline.to_dict(),
        "peak_memory_mib": round(peak / units_per_mib, 1),
        "passes_in_all": migration.passes,
        "verification": migration.verified,
        "invalid": migration.invalid,
        "invalid_keys": list(migration.invalid_keys),
        "application": _tried(application, store, migration),
        "cutover": [
            f"milvus-hubness migrate cutover {source} --alias {alias}: {alias} leads to {target}",
            f"milvus-hubness migrate cutover {source} --rename: {source} becomes "
            f"{RENAMED.format(source)}, and {source} an alias of {target}",
        ],
        "clean": f"milvus-hubness migrate clean {source} --drop {target}",
    }
    show_last(as_json, report, lambda: _show_rehearsal(report, store, migration))


def _application(connection: Connection, token_file: Path | None) -> TriesRights | None:
    """Return what tries the rights of an application; None without its token.

    Before the rehearsal, so that a wrong token ends it at once. Raises InvalidParameter.
    """
    from milvus_hubness.jobs.migration.rights import TriesRights

    store = connection.open_as_application(token_file)
    if store is None:
        return None
    if not isinstance(store, TriesRights):
        raise InvalidParameter(
            "rights can be tried on Milvus only: leave out --application-token-file and "
            f"${APPLICATION_TOKEN_VARIABLE}"
        )
    return store


def _tried(
    application: TriesRights | None, store: Store, migration: Migration
) -> dict[str, Any] | None:
    if application is None:
        return None

    from milvus_hubness.jobs.migration.rights import try_rights

    names = [migration.source, *store.info(migration.source).aliases]
    return asdict(try_rights(application, migration, names))


def _application_words(tried: dict[str, Any] | None) -> str | None:
    if tried is None:
        return None
    if not tried["has"]:
        return "may neither search nor write to the source: is it another token?"

    lacking = [f"{', '.join(rights)} on {name}" for name, rights in tried["lacks"].items()]
    has = ", ".join(tried["has"])
    return f"has {has} on the source; lacks {'; '.join(lacking) or 'nothing for the copy'}"


def _show_rehearsal(report: dict[str, Any], store: Store, migration: Migration) -> None:
    rows = report["rows_per_second"]
    mib = report["mib_per_second"]
    facts = {
        **{step: f"{seconds:,.1f} s" for step, seconds in report["seconds"].items()},
        "speed": f"{rows:,.0f} rows/s, {mib:,.2f} MiB/s of vectors" if rows and mib else None,
        "peak memory": f"{report['peak_memory_mib']:,.0f} MiB",
        **migration_words(migration, migration_facts(store, migration)),
        "passes": "; ".join(
            "{carried:,} of {rows:,} rows carried over".format(**facts)
            for facts in report["passes"]
        ),
        "application": _application_words(report["application"]),
        "to switch": "\n".join(report["cutover"]),
        "to drop it": report["clean"],
    }
    show_facts("\nRehearsed: {source} -> {target}".format(**report), facts)
    say("\nNo name was moved: the application reads the source.")
