"""The commands milvus-hubness migrate run and rehearse."""

from __future__ import annotations

import resource
import sys
from contextlib import AbstractContextManager
from typing import Any

import typer

from milvus_hubness.cli.console import out, show_facts
from milvus_hubness.cli.migrate.options import (
    AsEvents,
    Measure,
    Pace,
    Planning,
    Postpone,
    Source,
    Switching,
    Watching,
    Writers,
)
from milvus_hubness.cli.migrate.session import Course
from milvus_hubness.cli.migrate.show import (
    invalid_words,
    migration_facts,
    show_migration,
    show_plan,
    stream_result,
    verification_words,
)
from milvus_hubness.cli.options import Connection
from milvus_hubness.errors import NoMigration
from milvus_hubness.migration.cutover import cutover, rollback
from milvus_hubness.migration.ledger import KEPT_AS, Ledger, Migration, chosen_switch
from milvus_hubness.migration.plan import MigrationOptions
from milvus_hubness.migration.run import resume
from milvus_hubness.migration.run import run as run_migration
from milvus_hubness.operations.reading import WHERE_FROM
from milvus_hubness.stores import MilvusStore, Store


def moving(store: Store, source: str, target: str | None) -> Migration | None:
    """Return the migration of this name, or to this target, if the application's name has begun to move; else
    None. No plan is needed then, and the source may have another name or none."""
    ledger = Ledger(store)
    try:
        found = ledger.of_target(target) if target else ledger.find(source)
    except NoMigration:
        return None
    return found if found and found.phase in {"switching", "switched", "rolling back"} else None


def moved_on(store: Store, known: Migration, opened: AbstractContextManager[MigrationOptions]) -> Migration:
    """Complete a migration whose switch has begun, with its original arguments. opened: entered if any step
    is left."""
    if known.phase == "switched" and not store.exists(known.source_now):
        return known
    with opened as options:
        if known.phase != "rolling back":
            return cutover(store, known.target, options=options)
        rollback(store, known.target, options=options)
    return Ledger(store).find(known.target)


def unfinished(store: Store, name: str | None, target: str | None = None) -> Migration:
    """Return the migration of this name and to this copy; without a name, the only one that is not over.
    Raises NoMigration, and InvalidInput if the name has several copies."""
    ledger = Ledger(store)
    if name is not None or target is not None:
        try:
            return ledger.find(name or str(target), target)
        except NoMigration as error:
            raise NoMigration(f"{error}, or pass --bank FILE to start one ({WHERE_FROM})") from None
    over = {"switched", "rolled back", "finished"}
    migrations = [migration for migration in ledger.migrations() if migration.phase not in over]
    if len(migrations) == 1:
        return migrations[0]
    names = ", ".join(sorted(migration.source for migration in migrations))
    problem = f"several unfinished migrations ({names})" if migrations else "no unfinished migration"
    raise NoMigration(f"{problem} in this database: name a collection")


def run(
    planning: Planning,
    switching: Switching,
    writers: Writers,
    pace: Pace,
    watching: Watching,
    connection: Connection,
    source: Source = None,
    postpone_cutover: Postpone = False,
    as_json: AsEvents = False,
) -> None:
    """Copy, correct, catch up with writes, verify, and with --alias or --rename cut over.

    Continues an interrupted run; without --bank, with its own options.
    """
    course = Course(writers, watching, pace, postponed=postpone_cutover, as_json=as_json)
    if planning.bank and source is None:
        raise typer.BadParameter("no collection: name the one that --bank is for")
    store = connection.open()
    known = None if source is None or planning.restart else moving(store, source, planning.target)
    if known is not None:
        planning.expect_as_begun(store, known, switching)
        migration = moved_on(store, known, course.open(known.source, known.target))
    elif planning.bank and source is not None:
        migration = _planned(store, source, planning, switching, writers, course, as_json=as_json)
    else:
        found = unfinished(store, source, planning.target)
        planning.expect_as_begun(store, found, switching)
        migration = _resumed(store, found, switching, course)
    result = {**migration_facts(migration), **course.timeline.to_dict()}
    if as_json:
        stream_result(result)
    else:
        show_migration(migration)
        _show_next(migration)


def _planned(
    store: MilvusStore,
    source: str,
    planning: Planning,
    switching: Switching,
    writers: Writers,
    course: Course,
    *,
    as_json: bool,
) -> Migration:
    plan = planning.plan(store, source, switching=switching, writers=writers)
    if not as_json:
        show_plan(plan.to_dict())
    with course.open(plan.source.name, plan.target) as options:
        options.events.report("plan", **plan.to_dict())
        migration = run_migration(store, plan, options)
        return _switched(store, migration, switching, options)


def _resumed(store: MilvusStore, known: Migration, switching: Switching, course: Course) -> Migration:
    if known.phase in {"switching", "switched", "rolling back"}:
        return moved_on(store, known, course.open(known.source, known.target))
    if switching.asked:
        chosen_switch(store, known.source, known.target, switching.alias, switching.rename)
    with course.open(known.source, known.target) as options:
        return _switched(store, resume(store, known.target, options), switching, options)


def _switched(
    store: MilvusStore, migration: Migration, switching: Switching, options: MigrationOptions
) -> Migration:
    if not switching.asked:
        return migration
    return cutover(store, migration.target, alias=switching.alias, rename=switching.rename, options=options)


def _show_next(migration: Migration) -> None:
    say = {
        "verified": f"Next: milvus-hubness migrate cutover {migration.source}, with --alias or --rename",
        "switched": f"To undo: milvus-hubness migrate rollback {migration.target}",
    }.get(migration.phase)
    if say:
        out.print(f"\n{say}", highlight=False, markup=False)


def rehearse(
    planning: Planning,
    writers: Writers,
    pace: Pace,
    watching: Watching,
    connection: Connection,
    source: Source = None,
    measure: Measure = False,
    as_json: AsEvents = False,
) -> None:
    """Do everything except the cutover, on real data, and report what it took.

    Drop the copy afterwards, or continue with migrate run.
    """
    course = Course(writers, watching, pace, as_json=as_json)
    if planning.bank and source is None:
        raise typer.BadParameter("no collection: name the one that --bank is for")
    store = connection.open()
    if planning.bank and source is not None:
        plan = planning.plan(store, source, measure=measure, writers=writers)
        if not as_json:
            show_plan(plan.to_dict())
        with course.open(plan.source.name, plan.target) as options:
            options.events.report("plan", **plan.to_dict())
            migration = run_migration(store, plan, options)
    else:
        known = unfinished(store, source, planning.target)
        planning.expect_as_begun(store, known)
        known.require("preparing", "copying", "catching up", "verified", "rolled back", step="a rehearsal")
        with course.open(known.source, known.target) as options:
            migration = resume(store, known.target, options)
    report = _report(store, migration, course)
    if as_json:
        stream_result(report)
    else:
        _show(report)


def _report(store: MilvusStore, migration: Migration, course: Course) -> dict[str, Any]:
    source, target = migration.source, migration.target
    aliases = store.info(source).aliases
    alias = aliases[0] if aliases else "ALIAS"
    return {
        "source": source,
        "target": target,
        **course.timeline.to_dict(),
        "peak_memory_mib": _peak_memory_mib(),
        "passes_in_all": migration.passes,
        "verification": migration.verified,
        "invalid": migration.invalid,
        "invalid_keys": list(migration.invalid_keys),
        "cutover": [
            f"milvus-hubness migrate cutover {source} --alias {alias}: {alias} leads to {target}",
            f"milvus-hubness migrate cutover {source} --rename: {source} becomes {KEPT_AS.format(source)}, "
            f"and {source} an alias of {target}",
        ],
        "clean": f"milvus-hubness migrate clean {source} --drop {target}",
    }


def _show(report: dict[str, Any]) -> None:
    passes = [f"{each['carried']:,} of {each['rows']:,} rows carried over" for each in report["passes"]]
    seconds = {doing: f"{seconds:,.1f} s" for doing, seconds in report["seconds"].items()}
    rows, mib = report["rows_per_second"], report["mib_per_second"]
    show_facts(
        f"\nRehearsed: {report['source']} -> {report['target']}",
        {
            **seconds,
            "speed": f"{rows:,.0f} rows/s, {mib:,.2f} MiB/s of vectors" if rows and mib else None,
            "peak memory": f"{report['peak_memory_mib']:,.0f} MiB",
            "passes": "; ".join(passes),
            "verified": verification_words(report["verification"]),
            "bias 0": invalid_words(report["invalid"], report["invalid_keys"]),
            "to switch": "\n".join(report["cutover"]),
            "to drop it": report["clean"],
        },
    )
    out.print("\nNo name was moved: the application reads the source.")


def _peak_memory_mib() -> float:
    """Return the peak memory of this process in MiB; Linux counts in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)
