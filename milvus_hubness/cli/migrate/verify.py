"""milvus-hubness migrate verify"""

from __future__ import annotations

from dataclasses import asdict

from milvus_hubness import jobs
from milvus_hubness.cli.console import show_facts
from milvus_hubness.cli.migrate.course import Course
from milvus_hubness.cli.migrate.facts import verification_words
from milvus_hubness.cli.migrate.options import AsEvents, Connection, Name, Target, Watching, Writers
from milvus_hubness.cli.migrate.stream import stream_result
from milvus_hubness.jobs.migration.ledger import Ledger


def verify(name: Name, connection: Connection, target: Target = None, as_json: AsEvents = False) -> None:
    """Compare every row and field of source and copy once more. Writes nothing."""
    course = Course(Writers(), Watching(), as_json=as_json)
    store = connection.open()
    migration = Ledger(store).find(name, target)
    with course.open(migration.source_now, migration.target) as options:
        found = asdict(jobs.verify(store, migration.target, options=options))
    if as_json:
        stream_result({"source": migration.source_now, "target": migration.target, **found})
    else:
        title = f"{migration.target} holds what {migration.source_now} does"
        show_facts(title, {"verified": verification_words(found)})
