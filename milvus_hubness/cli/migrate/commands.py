"""The commands milvus-hubness migrate, other than run and rehearse."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milvus_hubness.cli.console import say, show_facts, show_json, show_result, show_table
from milvus_hubness.cli.migrate import options, show
from milvus_hubness.cli.options import AsJson, Connection

if TYPE_CHECKING:
    from milvus_hubness.jobs.migration.ledger import Ledger, Migration
    from milvus_hubness.milvus.store.milvus_store import MilvusStore


def plan(
    source: options.Source,
    planning: options.Planning,
    switching: options.Switching,
    writers: options.Writers,
    connection: Connection,
    measure: options.Measure = False,
    as_json: AsJson = False,
) -> None:
    """Show what a migration would do; write nothing.

    Without --method: nnn if --k or --alpha is given, else the method that tune chose for this bank,
    else blend.

    Example: milvus-hubness migrate plan products --bank queries.npy --measure
    """
    plan = planning.plan(connection.open(), source, switching, writers, measure=measure).to_dict()
    show_result(as_json, {"plan": plan}, lambda: show.show_plan(plan))
    if not as_json:
        say(
            "\nNothing was written. migrate run does it; migrate rehearse does all but the cutover."
        )


def verify(
    name: options.Name,
    connection: Connection,
    target: options.Target = None,
    as_json: options.AsEvents = False,
) -> None:
    """Compare every row and field of source and copy once more; write nothing.

    Example: milvus-hubness migrate verify products
    """
    from milvus_hubness.cli.migrate.session import Session
    from milvus_hubness.jobs.migration import catch_up
    from milvus_hubness.jobs.migration.ledger import Ledger

    # Nothing to watch or to control: the session prints the events and takes signals.
    session = Session(options.Watching(), as_json=as_json)
    store = connection.open()
    migration = Ledger(store).find(name, target)
    with session.open(migration.source_now, migration.target) as settings:
        verification = asdict(catch_up.verify(store, migration.target, options=settings))

    result = {"source": migration.source_now, "target": migration.target, **verification}
    title = f"{migration.target} has the same rows as {migration.source_now}"
    facts = {"verified": show.verification_words(verification)}
    show.show_last(as_json, result, lambda: show_facts(title, facts))


def cutover(
    name: options.Name,
    switching: options.Switching,
    watching: options.Watching,
    connection: Connection,
    postpone_cutover: options.Postpone = False,
    target: options.Target = None,
    as_json: options.AsEvents = False,
) -> None:
    """Catch up once more, then move the name that the application reads to the verified copy.

    Finishes an interrupted cutover with its own options.

    Example: milvus-hubness migrate cutover products --alias live
    """
    from milvus_hubness.cli.migrate.session import Session
    from milvus_hubness.jobs.migration.ledger import Ledger
    from milvus_hubness.jobs.migration.migrator import cutover

    session = Session(watching, postponed=postpone_cutover, as_json=as_json)
    store = connection.open()
    migration = Ledger(store).find(name, target)
    # In a later phase the ledger has the name that an interrupted cutover was moving.
    if migration.phase == "verified" and not (switching.alias or switching.rename):
        raise typer.BadParameter("no name to move to the copy: pass --alias or --rename")

    with session.open(migration.source, migration.target) as settings:
        migration = cutover(store, migration.target, **vars(switching), options=settings)

    show.show_last(as_json, show.migration_facts(migration), lambda: show.show_migration(migration))


def rollback(
    name: options.Name,
    watching: options.Watching,
    connection: Connection,
    target: options.Target = None,
    as_json: options.AsEvents = False,
) -> None:
    """Carry rows written since the switch back to the source, and move the application's name back to it.

    Example: milvus-hubness migrate rollback products
    """
    from milvus_hubness.cli.migrate.session import Session
    from milvus_hubness.jobs.migration.ledger import Ledger
    from milvus_hubness.jobs.migration.migrator import rollback

    session = Session(watching, as_json=as_json)
    store = connection.open()
    migration = Ledger(store).find(name, target)
    source = migration.source
    target = migration.target
    if migration.phase == "rolled back":
        result = {"source": source, "target": target, "carried": 0}
        show.show_last(as_json, result, lambda: say(f"{source} is rolled back already."))
        return

    with session.open(source, target) as settings:
        done = rollback(store, target, options=settings)

    is_renamed = done.alias == source
    facts = {
        "alias": f"{source}, under its own name" if is_renamed else f"{done.alias} -> {source}",
        "carried back": f"{done.carried:,} rows written since the switch",
        "to drop the copy": f"milvus-hubness migrate clean {source} --drop {target}",
    }
    show.show_last(as_json, vars(done), lambda: show_facts(f"\nRolled back: {source}", facts))


def clean(
    name: options.Name,
    drop: Annotated[str, "Collection to drop: the source or the copy, by its own name."],
    connection: Connection,
    yes: Annotated[bool, "Drop; without it, only show what would be dropped."] = False,
    target: options.Target = None,
    as_json: AsJson = False,
) -> None:
    """Drop the source after a cutover, or the copy before it or after a rollback.

    Refuses to drop the collection that the application reads.

    Example: milvus-hubness migrate clean products --drop products
    """
    from milvus_hubness.jobs.migration import clean as cleaning

    store = connection.open()
    # It refuses what must not be dropped, before anything is shown.
    dropped = cleaning.would_drop(store, name, drop=drop, target=target)
    if not as_json:
        show_facts("Dropping for good" if yes else "Would be dropped for good", dropped)

    if dropped and not yes:
        raise typer.BadParameter("not confirmed: add --yes")

    migration = cleaning.clean(store, name, drop=drop, target=target)
    if as_json:
        show_json({"clean": {"dropped": dropped, **show.migration_facts(migration)}})


def status(
    connection: Connection,
    name: Annotated[
        str | None,
        typer.Argument(help="Source, copy or alias of one migration. [default: all migrations]"),
    ] = None,
    target: options.Target = None,
    as_json: AsJson = False,
) -> None:
    """Show the progress of migrations from the ledger in the database.

    Example: milvus-hubness migrate status products
    """
    from milvus_hubness.jobs.migration.ledger import Ledger

    store = connection.open()
    ledger = Ledger(store)
    if name is None:
        progress = [_progress(store, ledger, migration) for migration in ledger.migrations()]
        show_result(as_json, {"migrations": progress}, lambda: _show_all(progress))
    else:
        migration = ledger.find(name, target)
        facts = _progress(store, ledger, migration)
        show_result(as_json, {"migration": facts}, lambda: _show(migration, facts))


def _progress(store: MilvusStore, ledger: Ledger, migration: Migration) -> dict[str, Any]:
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
        **show.migration_facts(migration),
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
                facts["switch"]["name"] if facts["switch"] else "",
                "yes" if facts["lease"] else "no",
                "gone, see below" if facts["problem"] else copied,
            )
        )
    show_table(None, ("source", "copy", "phase", "name", "running", "rows"), rows, texts=5)
    for facts in migrations:
        if facts["problem"]:
            typer.echo(f"problem: {facts['problem']}")


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
        **show.migration_words(migration),
        "writers": f"write to {dual_write['collection']} too{required}" if dual_write else None,
        "lease": HOLDER.format(**lease) if lease else "none",
        "started": f"{migration.begun_at:%Y-%m-%d %H:%M:%S} UTC",
        "changed": f"{migration.changed_at:%Y-%m-%d %H:%M:%S} UTC",
    }
    show_facts(f"{migration.source} -> {migration.target}", words)
