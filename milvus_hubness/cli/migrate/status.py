"""The command milvus-hubness migrate status."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from milvus_hubness.cli.console import say, show_facts, show_result, show_table
from milvus_hubness.cli.migrate import options, show
from milvus_hubness.cli.options import AsJson, Connection

if TYPE_CHECKING:
    from milvus_hubness.jobs.migration.ledger import Ledger, Migration
    from milvus_hubness.jobs.store.protocols import Store


def status(
    connection: Connection,
    name: Annotated[
        str | None,
        typer.Argument(help="Source, copy or alias of one migration. [default: all migrations]"),
    ] = None,
    target: options.Target = None,
    watch: Annotated[bool, "Show a line again and again, until the migration is over."] = False,
    as_json: AsJson = False,
) -> None:
    """Show the progress of migrations from the ledger in the database.

    Example: milvus-hubness migrate status products --watch
    """
    from milvus_hubness.jobs.migration.ledger import Ledger

    store = connection.open()
    ledger = Ledger(store)
    if watch:
        from milvus_hubness.cli.migrate.watch import Watch, to_watch

        watched = ledger.find(name, target) if name else to_watch(store, ledger)
        Watch(store, ledger, watched.target, progress_of).run(as_json=as_json)
    elif name is None:
        progress = [progress_of(store, ledger, migration) for migration in ledger.migrations()]
        show_result(as_json, {"migrations": progress}, lambda: _show_all(progress))
    else:
        migration = ledger.find(name, target)
        facts = progress_of(store, ledger, migration)
        show_result(as_json, {"migration": facts}, lambda: _show(migration, facts))


def progress_of(store: Store, ledger: Ledger, migration: Migration) -> dict[str, Any]:
    """Return a migration with the progress of its copy, as plain data."""
    from milvus_hubness.jobs.common.lease import holder_of
    from milvus_hubness.jobs.migration.presence import problem_of

    # The ledger has the time of each chunk that is written; the speed is that of the writes alone.
    chunks = ledger.chunks(migration)
    done = [chunk for chunk in chunks if chunk.seconds is not None]
    rows = sum(chunk.rows for chunk in done)
    seconds = sum(chunk.seconds or 0.0 for chunk in done)
    speed = rows / seconds if seconds else None
    copying = migration.phase == "copying"

    # The source may be gone, dropped by `clean` or by hand.
    dual_write = None
    if store.exists(migration.source_now):
        dual_write = store.info(migration.source_now, checked=False).dual_write
    holder = holder_of(store, migration.target)
    lease = None
    if holder:
        lease = holder.model_dump(mode="json", include={"token", "owner", "expires_at"})

    return {
        **show.migration_facts(store, migration),
        "lease": lease,
        "rows_copied": rows if copying else migration.rows,
        "chunks_done": len(done) if copying else migration.chunks,
        "rows_per_second": round(speed, 1) if speed else None,
        "eta_seconds": round((migration.rows - rows) / speed, 1) if speed and copying else None,
        "dual_write": dual_write.model_dump() if dual_write else None,
        "problem": problem_of(store, migration) or None,
    }


def _show_all(migrations: list[dict[str, Any]]) -> None:
    if not migrations:
        say("There are no migrations in this database.")
        return

    rows = []
    for facts in migrations:
        copied = "{rows_copied:,} of {rows:,}".format(**facts)
        rows.append(
            (
                facts["source"],
                facts["target"],
                facts["phase"],
                _name_words(facts),
                "yes" if facts["lease"] else "no",
                "gone, see below" if facts["problem"] else copied,
            )
        )
    show_table(None, ("source", "copy", "phase", "name", "running", "rows"), rows, texts=5)
    for facts in migrations:
        if facts["problem"]:
            typer.echo(f"problem: {facts['problem']}")


def _name_words(facts: dict[str, Any]) -> str:
    """Return the name that a migration has moved, and the copy that it leads to if that is another."""
    if not facts["switch"]:
        return ""
    name = str(facts["switch"]["name"])
    leads_to = facts["leads_to"]
    return name if leads_to in {None, facts["target"]} else f"{name}, now -> {leads_to}"


HOLDER = "process {owner[pid]} on {owner[host]}, until {expires_at:.19} UTC"


def _show(migration: Migration, facts: dict[str, Any]) -> None:
    speed = facts["rows_per_second"]
    eta = facts["eta_seconds"]
    lease = facts["lease"]
    dual_write = facts["dual_write"]
    required = ", and fail if that fails" if dual_write and dual_write["required"] else ""
    words = {
        "phase": migration.phase,
        "problem": facts["problem"],
        "rows": f"{facts['rows_copied']:,} of {migration.rows:,}",
        "chunks": f"{facts['chunks_done']:,} of {migration.chunks:,}",
        "speed": f"{speed:,.0f} rows/s while writing" if speed else None,
        "left": f"{eta:,.0f} s" if eta is not None else None,
        **show.migration_words(migration, facts),
        "writers": f"write to {dual_write['collection']} too{required}" if dual_write else None,
        "lease": HOLDER.format(**lease) if lease else "none",
        "started": f"{migration.begun_at:%Y-%m-%d %H:%M:%S} UTC",
        "changed": f"{migration.changed_at:%Y-%m-%d %H:%M:%S} UTC",
    }
    show_facts(f"{migration.source} -> {migration.target}", words)
