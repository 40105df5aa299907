"""milvus-hubness migrate rehearse"""

from __future__ import annotations

import resource
import sys
from typing import Annotated, Any

import typer

from milvus_hubness import jobs
from milvus_hubness.cli.console import out, show_facts
from milvus_hubness.cli.migrate.course import Course
from milvus_hubness.cli.migrate.facts import invalid_words, show_plan, verification_words
from milvus_hubness.cli.migrate.moving import unfinished
from milvus_hubness.cli.migrate.options import (
    AsEvents,
    Connection,
    Measuring,
    Pace,
    Planning,
    Watching,
    Writers,
)
from milvus_hubness.cli.migrate.stream import stream_result
from milvus_hubness.jobs.migration.ledger import Migration
from milvus_hubness.jobs.migration.names import KEPT_AS
from milvus_hubness.stores import MilvusStore


def rehearse(
    planning: Planning,
    measuring: Measuring,
    writers: Writers,
    pace: Pace,
    watching: Watching,
    connection: Connection,
    source: Annotated[
        str | None, typer.Argument(help="Collection to correct. [default: the unfinished one]")
    ] = None,
    as_json: AsEvents = False,
) -> None:
    """Do all of a migration but the switch, for real, and report what it took. The application notices
    nothing; the copy can be dropped, or go on to be the one of migrate run."""
    course = Course(writers, watching, pace, as_json=as_json)
    if planning.bank and source is None:
        raise typer.BadParameter("give the collection that --bank is for")
    store = connection.open()
    if planning.bank and source is not None:
        plan = planning.plan(store, source, measuring=measuring, writers=writers)
        if not as_json:
            show_plan(plan.to_dict())
        with course.open(plan.source.name, plan.target) as options:
            options.events.report("plan", **plan.to_dict())
            migration = jobs.run(store, plan, options)
    else:
        known = unfinished(store, source, planning.target)
        planning.expect_as_begun(store, known)
        known.require("preparing", "copying", "catching up", "verified", "rolled back", step="a rehearsal")
        with course.open(known.source, known.target) as options:
            migration = jobs.resume(store, known.target, options)
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
    """Of this process; Linux counts in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)
