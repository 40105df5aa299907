"""milvus-hubness migrate status"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from milvus_hubness.cli.console import AsJson, out, show_facts, show_json
from milvus_hubness.cli.migrate.facts import invalid_words, migration_facts, switch_words, verification_words
from milvus_hubness.cli.migrate.options import Connection, Target
from milvus_hubness.jobs.migration.ledger import Ledger, Migration
from milvus_hubness.operations.lease import holder_of
from milvus_hubness.stores import MilvusStore


def status(
    connection: Connection,
    name: Annotated[
        str | None, typer.Argument(help="Source, copy or alias of one migration. [default: all of them]")
    ] = None,
    target: Target = None,
    as_json: AsJson = False,
) -> None:
    """Tell how far migrations are, from what they keep in the database: from any machine, at any time."""
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
