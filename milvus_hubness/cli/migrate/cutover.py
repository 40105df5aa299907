"""milvus-hubness migrate cutover"""

from __future__ import annotations

import typer

from milvus_hubness import jobs
from milvus_hubness.cli.migrate.course import Course
from milvus_hubness.cli.migrate.facts import migration_facts, show_migration
from milvus_hubness.cli.migrate.options import (
    AsEvents,
    Connection,
    Name,
    Postpone,
    Switching,
    Target,
    Watching,
    Writers,
)
from milvus_hubness.cli.migrate.stream import stream_result
from milvus_hubness.jobs.migration.ledger import Ledger


def cutover(
    name: Name,
    switching: Switching,
    writers: Writers,
    watching: Watching,
    connection: Connection,
    postpone_cutover: Postpone = False,
    target: Target = None,
    as_json: AsEvents = False,
) -> None:
    """Let the application read a verified copy: catch up once more, then move the name that it uses. One
    that was interrupted is finished as it was begun."""
    course = Course(writers, watching, postponed=postpone_cutover, as_json=as_json)
    store = connection.open()
    migration = Ledger(store).find(name, target)
    if migration.phase == "verified" and not switching.asked:
        raise typer.BadParameter("give the name that moves to the copy: --alias or --rename")
    with course.open(migration.source, migration.target) as options:
        migration = jobs.cutover(
            store, migration.target, alias=switching.alias, rename=switching.rename, options=options
        )
    if as_json:
        stream_result(migration_facts(migration))
    else:
        show_migration(migration)
