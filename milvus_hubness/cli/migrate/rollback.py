"""milvus-hubness migrate rollback"""

from __future__ import annotations

from milvus_hubness import jobs
from milvus_hubness.cli.console import out, show_facts
from milvus_hubness.cli.migrate.course import Course
from milvus_hubness.cli.migrate.options import AsEvents, Connection, Name, Target, Watching, Writers
from milvus_hubness.cli.migrate.stream import stream_result
from milvus_hubness.jobs.migration.ledger import Ledger


def rollback(
    name: Name,
    writers: Writers,
    watching: Watching,
    connection: Connection,
    target: Target = None,
    as_json: AsEvents = False,
) -> None:
    """Let the application read the source again, once that holds what was written since the switch."""
    course = Course(writers, watching, as_json=as_json)
    store = connection.open()
    migration = Ledger(store).find(name, target)
    if migration.phase == "rolled back":
        if as_json:
            stream_result({"source": migration.source, "target": migration.target, "carried": 0})
        else:
            out.print(f"{migration.source} is rolled back already: the application reads it.")
        return
    with course.open(migration.source, migration.target) as options:
        done = jobs.rollback(store, migration.target, options=options)
    if as_json:
        stream_result(vars(done))
        return
    leads = "reads the source again, under its own name"
    show_facts(
        f"\nRolled back: {done.source}",
        {
            "alias": f"{done.alias} -> {done.source}" if done.alias != done.source else leads,
            "carried back": f"{done.carried:,} rows written since the switch",
            "to drop the copy": f"milvus-hubness migrate clean {done.source} --drop {done.target}",
        },
    )
