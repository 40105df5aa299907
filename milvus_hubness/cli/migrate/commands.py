"""The commands milvus-hubness migrate plan, verify, cutover, rollback, clean and status."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from milvus_hubness.cli.console import AsJson, out, show_facts, show_json
from milvus_hubness.cli.migrate.options import (
    AsEvents,
    Connection,
    Measuring,
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
    invalid_words,
    migration_facts,
    show_migration,
    show_plan,
    stream_result,
    switch_words,
    verification_words,
)
from milvus_hubness.migration.cutover import clean as clean_migration
from milvus_hubness.migration.cutover import cutover as cut_over
from milvus_hubness.migration.cutover import rollback as roll_back
from milvus_hubness.migration.cutover import would_drop
from milvus_hubness.migration.ledger import Ledger, Migration
from milvus_hubness.migration.verify import verify as verify_copy
from milvus_hubness.operations.lease import holder_of
from milvus_hubness.operations.reading import WHERE_FROM
from milvus_hubness.stores import MilvusStore


def plan(
    source: Annotated[str, typer.Argument(help="Collection to correct.")],
    planning: Planning,
    switching: Switching,
    measuring: Measuring,
    writers: Writers,
    connection: Connection,
    as_json: AsJson = False,
) -> None:
    """Say what a migration would do. Reads only.

    Without --method: nnn where --k or --alpha is given; else what tune chose for this bank; else blend, the
    best choice known without labels.
    """
    if not planning.bank:
        raise typer.BadParameter(f"give the reference queries: --bank FILE ({WHERE_FROM})")
    store = connection.open()
    wanted = planning.plan(store, source, switching=switching, measuring=measuring, writers=writers)
    found = wanted.to_dict()
    if as_json:
        show_json({"plan": found})
        return
    show_plan(found)
    out.print("\nNothing was written. migrate rehearse does all of it but the switch, migrate run all of it.")


def verify(name: Name, connection: Connection, target: Target = None, as_json: AsEvents = False) -> None:
    """Compare every row and field of source and copy once more. Writes nothing."""
    course = Course(Writers(), Watching(), as_json=as_json)
    store = connection.open()
    migration = Ledger(store).find(name, target)
    with course.open(migration.source_now, migration.target) as options:
        found = asdict(verify_copy(store, migration.target, options=options))
    if as_json:
        stream_result({"source": migration.source_now, "target": migration.target, **found})
    else:
        title = f"{migration.target} holds what {migration.source_now} does"
        show_facts(title, {"verified": verification_words(found)})


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
        migration = cut_over(
            store, migration.target, alias=switching.alias, rename=switching.rename, options=options
        )
    if as_json:
        stream_result(migration_facts(migration))
    else:
        show_migration(migration)


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
        done = roll_back(store, migration.target, options=options)
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


def clean(
    name: Name,
    drop: Annotated[str, typer.Option(help="Which of the two collections to drop: the source or the copy.")],
    connection: Connection,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    target: Target = None,
    as_json: AsJson = False,
) -> None:
    """Drop for good what a migration leaves: the source after the switch, or the copy while or once more the
    application reads the source. Never what the application reads."""
    store = connection.open()
    going = would_drop(store, name, drop=drop, target=target)
    if not as_json:
        show_facts("Dropping for good" if yes else "Would be dropped for good", going)
    if going and not yes:
        if as_json or not sys.stdin.isatty():
            raise typer.BadParameter("not confirmed: add --yes")
        if not typer.confirm("Drop this?"):
            out.print("Nothing was dropped.")
            return
    done = clean_migration(store, name, drop=drop, target=target)
    if as_json:
        show_json({"clean": {"dropped": going, **migration_facts(done)}})


def status(
    connection: Connection,
    name: Annotated[
        str | None, typer.Argument(help="Source, copy or alias of one migration. [default: all of them]")
    ] = None,
    target: Target = None,
    as_json: AsJson = False,
) -> None:
    """Show the progress of migrations, as the database has it: from any machine, at any time."""
    store = connection.open()
    ledger = Ledger(store)
    if name is None:
        migrations = ledger.migrations()
        if as_json:
            show_json({"migrations": [_standing(store, ledger, each) for each in migrations]})
        else:
            _show_all([_standing(store, ledger, each) for each in migrations])
        return
    migration = ledger.find(name, target)
    standing = _standing(store, ledger, migration)
    if as_json:
        show_json({"migration": standing})
    else:
        _show(migration, standing)


def _standing(store: MilvusStore, ledger: Ledger, migration: Migration) -> dict[str, Any]:
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


def _show_all(standings: list[dict[str, Any]]) -> None:
    if not standings:
        out.print("There are no migrations in this database.")
        return
    table = Table(box=None)
    for heading in ("source", "copy", "phase", "rows", "at work", "name"):
        table.add_column(heading, justify="right" if heading == "rows" else "left", overflow="fold")
    for each in standings:
        table.add_row(
            each["source"],
            each["target"],
            each["phase"],
            f"{each['rows_copied']:,} of {each['rows']:,}",
            "yes" if each["lease"] else "no",
            each["switch"]["name"] if each["switch"] else "",
        )
    out.print(table)


def _show(migration: Migration, standing: dict[str, Any]) -> None:
    speed, eta = standing["rows_per_second"], standing["eta_seconds"]
    lease, dual_write = standing["lease"], standing["dual_write"]
    required = ", and fail where that does" if dual_write and dual_write["required"] else ""
    show_facts(
        f"{migration.source} -> {migration.target}",
        {
            "phase": migration.phase,
            "rows": f"{standing['rows_copied']:,} of {migration.rows:,}",
            "chunks": f"{standing['chunks_done']:,} of {migration.chunks:,}",
            "speed": f"{speed:,.0f} rows/s while writing" if speed else None,
            "left": f"{eta:,.0f} s" if eta is not None else None,
            "passes": migration.passes or None,
            "bank": migration.bank_collection,
            "bias 0": invalid_words(migration.invalid, migration.invalid_keys),
            "verified": verification_words(migration.verified),
            "switched": switch_words(migration),
            "writers": f"write to {dual_write['collection']} too{required}" if dual_write else None,
            "at work": f"process {lease['owner']['pid']} on {lease['owner']['host']}, lease until "
            f"{lease['expires_at'][:19]} UTC"
            if lease
            else "nobody",
            "begun": f"{migration.begun_at:%Y-%m-%d %H:%M:%S} UTC",
            "changed": f"{migration.changed_at:%Y-%m-%d %H:%M:%S} UTC",
        },
    )
