"""milvus-hubness migrate run"""

from __future__ import annotations

from typing import Annotated

import typer

from milvus_hubness import jobs
from milvus_hubness.cli.console import out
from milvus_hubness.cli.migrate.course import Course
from milvus_hubness.cli.migrate.facts import migration_facts, show_migration, show_plan
from milvus_hubness.cli.migrate.moving import moved_on, moving, unfinished
from milvus_hubness.cli.migrate.options import (
    AsEvents,
    Connection,
    Pace,
    Planning,
    Postpone,
    Switching,
    Watching,
    Writers,
)
from milvus_hubness.cli.migrate.stream import stream_result
from milvus_hubness.jobs.migration.ledger import Migration
from milvus_hubness.jobs.migration.names import chosen_switch
from milvus_hubness.stores import MilvusStore


def run(
    planning: Planning,
    switching: Switching,
    writers: Writers,
    pace: Pace,
    watching: Watching,
    connection: Connection,
    source: Annotated[
        str | None, typer.Argument(help="Collection to correct. [default: the unfinished one]")
    ] = None,
    postpone_cutover: Postpone = False,
    as_json: AsEvents = False,
) -> None:
    """Copy, correct, catch up with what is written meanwhile, verify; with --alias or --rename, switch.

    Carries on where an earlier run ended, however that ended; without --bank, with what it was begun with.
    """
    course = Course(writers, watching, pace, postponed=postpone_cutover, as_json=as_json)
    if planning.bank and source is None:
        raise typer.BadParameter("give the collection that --bank is for")
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
        migration = jobs.run(store, plan, options)
        return _switched(store, migration, switching, options)


def _resumed(store: MilvusStore, known: Migration, switching: Switching, course: Course) -> Migration:
    if known.phase in {"switching", "switched", "rolling back"}:
        return moved_on(store, known, course.open(known.source, known.target))
    if switching.asked:
        chosen_switch(store, known.source, known.target, switching.alias, switching.rename)
    with course.open(known.source, known.target) as options:
        return _switched(store, jobs.resume(store, known.target, options), switching, options)


def _switched(
    store: MilvusStore, migration: Migration, switching: Switching, options: jobs.MigrationOptions
) -> Migration:
    if not switching.asked:
        return migration
    return jobs.cutover(
        store, migration.target, alias=switching.alias, rename=switching.rename, options=options
    )


def _show_next(migration: Migration) -> None:
    say = {
        "verified": f"Next: milvus-hubness migrate cutover {migration.source}, with --alias or --rename",
        "switched": f"Back: milvus-hubness migrate rollback {migration.target}",
    }.get(migration.phase)
    if say:
        out.print(f"\n{say}", highlight=False, markup=False)
