"""The commands milvus-hubness migrate plan, verify, cutover, rollback, clean and status."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from milvus_hubness.cli.console import out, show_facts, show_json, show_result
from milvus_hubness.cli.migrate.options import (
    AsEvents,
    Measure,
    Name,
    Planning,
    Postpone,
    Switching,
    Target,
    Watching,
    Writers,
)
from milvus_hubness.cli.migrate.session import Course
from milvus_hubness.cli.migrate.show import (
    migration_facts,
    migration_words,
    show_last,
    show_migration,
    show_plan,
    verification_words,
)
from milvus_hubness.cli.options import AsJson, Connection
from milvus_hubness.migration.catch_up import verify as verify_copy
from milvus_hubness.migration.clean import clean as clean_migration
from milvus_hubness.migration.clean import would_drop
from milvus_hubness.migration.ledger import Ledger, Migration
from milvus_hubness.migration.migrator import cutover as cut_over
from milvus_hubness.migration.migrator import rollback as roll_back
from milvus_hubness.operations.lease import holder_of
from milvus_hubness.stores import MilvusStore


def plan(
    source: Annotated[str, typer.Argument(help="Collection to correct.")],
    planning: Planning,
    switching: Switching,
    writers: Writers,
    connection: Connection,
    measure: Measure = False,
    as_json: AsJson = False,
) -> None:
    """Show what a migration would do; write nothing.

    Without --method: nnn if --k or --alpha is given, else the method that tune chose for this bank, else blend.
    """
    planning.require()
    store = connection.open()
    plan = planning.plan(store, source, switching=switching, measure=measure, writers=writers).to_dict()
    show_result(as_json, {"plan": plan}, lambda: show_plan(plan))
    if not as_json:
        out.print("\nNothing was written. migrate run does it; migrate rehearse does all but the cutover.")


def verify(name: Name, connection: Connection, target: Target = None, as_json: AsEvents = False) -> None:
    """Compare every row and field of source and copy once more; write nothing."""
    course = Course(Watching(), as_json=as_json)
    store = connection.open()
    migration = Ledger(store).find(name, target)
    with course.open(migration.source_now, migration.target) as options:
        verification = asdict(verify_copy(store, migration.target, options=options))
    result = {"source": migration.source_now, "target": migration.target, **verification}
    title = f"{migration.target} has the same rows as {migration.source_now}"
    facts = {"verified": verification_words(verification)}
    show_last(as_json, result, lambda: show_facts(title, facts))


def cutover(
    name: Name,
    switching: Switching,
    watching: Watching,
    connection: Connection,
    postpone_cutover: Postpone = False,
    target: Target = None,
    as_json: AsEvents = False,
) -> None:
    """Catch up once more, then move the name that the application reads to the verified copy.

    Finishes an interrupted cutover with its own options.
    """
    course = Course(watching, postponed=postpone_cutover, as_json=as_json)
    store = connection.open()
    migration = Ledger(store).find(name, target)
    if migration.phase == "verified" and not switching.is_named:
        raise typer.BadParameter("no name to move to the copy: pass --alias or --rename")
    with course.open(migration.source, migration.target) as options:
        migration = cut_over(store, migration.target, alias=switching.alias, rename=switching.rename, options=options)
    show_last(as_json, migration_facts(migration), lambda: show_migration(migration))


def rollback(
    name: Name, watching: Watching, connection: Connection, target: Target = None, as_json: AsEvents = False
) -> None:
    """Carry rows written since the switch back to the source, and move the application's name back to it."""
    course = Course(watching, as_json=as_json)
    store = connection.open()
    migration = Ledger(store).find(name, target)
    if migration.phase == "rolled back":
        result = {"source": migration.source, "target": migration.target, "carried": 0}
        show_last(as_json, result, lambda: out.print(f"{migration.source} is rolled back already."))
        return
    with course.open(migration.source, migration.target) as options:
        done = roll_back(store, migration.target, options=options)
    renamed = f"{done.source}, under its own name"
    facts = {
        "alias": f"{done.alias} -> {done.source}" if done.alias != done.source else renamed,
        "carried back": f"{done.carried:,} rows written since the switch",
        "to drop the copy": f"milvus-hubness migrate clean {done.source} --drop {done.target}",
    }
    show_last(as_json, vars(done), lambda: show_facts(f"\nRolled back: {done.source}", facts))


def clean(
    name: Name,
    drop: Annotated[str, typer.Option(help="Collection to drop: the source or the copy, by its own name.")],
    connection: Connection,
    yes: Annotated[bool, typer.Option("--yes", help="Drop without asking.")] = False,
    target: Target = None,
    as_json: AsJson = False,
) -> None:
    """Drop the source after a cutover, or the copy before it or after a rollback.

    Refuses to drop the collection that the application reads.
    """
    store = connection.open()
    dropped = would_drop(store, name, drop=drop, target=target)
    if not as_json:
        show_facts("Dropping for good" if yes else "Would be dropped for good", dropped)
    if dropped and not yes:
        if as_json or not sys.stdin.isatty():
            raise typer.BadParameter("not confirmed: add --yes")
        if not typer.confirm("Drop this?"):
            out.print("Nothing was dropped.")
            return
    migration = clean_migration(store, name, drop=drop, target=target)
    if as_json:
        show_json({"clean": {"dropped": dropped, **migration_facts(migration)}})


def status(
    connection: Connection,
    name: Annotated[
        str | None, typer.Argument(help="Source, copy or alias of one migration. [default: all migrations]")
    ] = None,
    target: Target = None,
    as_json: AsJson = False,
) -> None:
    """Show the progress of migrations from the ledger in the database."""
    store = connection.open()
    ledger = Ledger(store)
    if name is None:
        progress = [_progress(store, ledger, migration) for migration in ledger.migrations()]
        show_result(as_json, {"migrations": progress}, lambda: _show_all(progress))
        return
    migration = ledger.find(name, target)
    facts = _progress(store, ledger, migration)
    show_result(as_json, {"migration": facts}, lambda: _show(migration, facts))


def _progress(store: MilvusStore, ledger: Ledger, migration: Migration) -> dict[str, Any]:
    chunks = ledger.chunks(migration)
    done = [chunk for chunk in chunks if chunk.seconds is not None]
    rows, seconds = sum(chunk.rows for chunk in done), sum(chunk.seconds or 0.0 for chunk in done)
    speed = rows / seconds if seconds else None
    copying = migration.phase == "copying"
    dual_write = store.info(migration.source_now).dual_write if store.exists(migration.source_now) else None
    holder = holder_of(store, migration.target)
    return {
        **migration_facts(migration),
        "lease": holder.model_dump(mode="json", include={"token", "owner", "expires_at"}) if holder else None,
        "rows_copied": rows if copying else migration.rows,
        "chunks_done": len(done) if copying else migration.chunks,
        "rows_per_second": round(speed, 1) if speed else None,
        "eta_seconds": round((migration.rows - rows) / speed, 1) if speed and copying else None,
        "dual_write": dual_write.model_dump() if dual_write else None,
    }


def _show_all(migrations: list[dict[str, Any]]) -> None:
    if not migrations:
        out.print("There are no migrations in this database.")
        return
    table = Table(box=None)
    for heading in ("source", "copy", "phase", "rows", "running", "name"):
        table.add_column(heading, justify="right" if heading == "rows" else "left", overflow="fold")
    for facts in migrations:
        table.add_row(
            facts["source"],
            facts["target"],
            facts["phase"],
            f"{facts['rows_copied']:,} of {facts['rows']:,}",
            "yes" if facts["lease"] else "no",
            facts["switch"]["name"] if facts["switch"] else "",
        )
    out.print(table)


def _show(migration: Migration, facts: dict[str, Any]) -> None:
    speed, eta = facts["rows_per_second"], facts["eta_seconds"]
    lease, dual_write = facts["lease"], facts["dual_write"]
    required = ", and fail if that fails" if dual_write and dual_write["required"] else ""
    show_facts(
        f"{migration.source} -> {migration.target}",
        {
            "phase": migration.phase,
            "rows": f"{facts['rows_copied']:,} of {migration.rows:,}",
            "chunks": f"{facts['chunks_done']:,} of {migration.chunks:,}",
            "speed": f"{speed:,.0f} rows/s while writing" if speed else None,
            "left": f"{eta:,.0f} s" if eta is not None else None,
            **migration_words(migration),
            "writers": f"write to {dual_write['collection']} too{required}" if dual_write else None,
            "lease": f"process {lease['owner']['pid']} on {lease['owner']['host']}, until "
            f"{lease['expires_at'][:19]} UTC"
            if lease
            else "none",
            "started": f"{migration.begun_at:%Y-%m-%d %H:%M:%S} UTC",
            "changed": f"{migration.changed_at:%Y-%m-%d %H:%M:%S} UTC",
        },
    )
