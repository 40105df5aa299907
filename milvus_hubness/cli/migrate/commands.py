"""The commands milvus-hubness migrate, other than run and status."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from milvus_hubness.cli.console import say, show_facts, show_json, show_result
from milvus_hubness.cli.migrate import options, show
from milvus_hubness.cli.options import AsJson, Connection, Field


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
    with session.open() as settings:
        verification = asdict(catch_up.verify(store, migration.target, options=settings))

    result = {"source": migration.source_now, "target": migration.target, **verification}
    title = f"{migration.target} has the same rows as {migration.source_now}"
    facts = {"verified": show.verification_words(verification)}
    show.show_last(as_json, result, lambda: show_facts(title, facts))


def cutover(
    name: options.Name,
    switching: options.Switching,
    watching: options.CutoverOptions,
    connection: Connection,
    target: options.Target = None,
    as_json: options.AsEvents = False,
) -> None:
    """Catch up once more, then move the name that the application reads to the verified copy.

    Finishes an interrupted cutover with its own options.

    Example: milvus-hubness migrate cutover products --alias live
    """
    from milvus_hubness.cli.migrate.session import Session
    from milvus_hubness.jobs.migration.ledger import Ledger
    from milvus_hubness.jobs.migration.run import cutover

    session = Session(watching, postponed=watching.postpone_cutover, as_json=as_json)
    store = connection.open()
    migration = Ledger(store).find(name, target)
    # In a later phase the ledger has the name that an interrupted cutover was moving.
    if migration.phase == "verified" and not (switching.alias or switching.rename):
        raise typer.BadParameter("no name to move to the copy: pass --alias or --rename")

    with session.open() as settings:
        migration = cutover(store, migration.target, **vars(switching), options=settings)

    facts = show.migration_facts(store, migration)
    show.show_last(as_json, facts, lambda: show.show_migration(migration, facts))


def rollback(
    name: options.Name,
    watching: options.Watching,
    connection: Connection,
    target: options.Target = None,
    field: Field = None,
    as_json: options.AsEvents = False,
) -> None:
    """Carry rows written since the switch back to the source, and move the application's name back to it.

    For biases beside the vectors: let searches read those before the last refresh again.

    Example: milvus-hubness migrate rollback products
    """
    from milvus_hubness.cli.migrate.session import Session
    from milvus_hubness.jobs.migration.ledger import Ledger
    from milvus_hubness.jobs.refresh.rollback import is_beside, rollback

    session = Session(watching, as_json=as_json)
    store = connection.open()
    if target is None and is_beside(store, name, field):
        with session.open() as settings:
            done = rollback(store, name, field=field, options=settings)
        facts = {"done": done.reason, "biases written": f"{done.carried:,} rows"}
        title = f"\nRolled back: {done.source}"
        show.show_last(as_json, done.to_dict(), lambda: show_facts(title, facts))
        return

    migration = Ledger(store).find(name, target)
    source = migration.source
    target = migration.target
    if migration.phase == "rolled back":
        result = {"source": source, "target": target, "carried": 0}
        show.show_last(as_json, result, lambda: say(f"{source} is rolled back already."))
        return

    with session.open() as settings:
        done = rollback(store, target, options=settings)

    is_renamed = done.alias == source
    facts = {
        "alias": f"{source}, under its own name" if is_renamed else f"{done.alias} -> {source}",
        "carried back": f"{done.carried:,} rows written since the switch",
    }
    # On one line, to be copied: a table would fold it.
    clean = connection.command("migrate", "clean", source, "--drop", target)

    def show_done() -> None:
        show_facts(f"\nRolled back: {source}", facts)
        say(f"\nTo drop the copy: {clean}")

    show.show_last(as_json, done.to_dict(), show_done)


def clean(
    name: options.Name,
    drop: Annotated[str, "Collection to drop: the source or the copy, by its own name."],
    connection: Connection,
    yes: Annotated[bool, "Drop; without it, only show what would be dropped."] = False,
    target: options.Target = None,
    keep_samples: Annotated[
        bool, "Leave the collections of its sampled queries, which --bank collection:NAME takes."
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Drop the source after a cutover, or the copy before it or after a rollback.

    Refuses to drop the collection that the application reads.

    Example: milvus-hubness migrate clean products --drop products
    """
    from milvus_hubness.jobs.migration import clean as cleaning

    store = connection.open()
    # It refuses what must not be dropped, before anything is shown.
    dropped = cleaning.would_drop(store, name, drop=drop, target=target, keep_samples=keep_samples)
    if dropped and not yes:
        show_result(as_json, {"clean": {"would_drop": dropped}}, lambda: _show_preview(dropped))
        return
    if not as_json:
        show_facts("Dropping for good", dropped)

    migration = cleaning.clean(store, name, drop=drop, target=target, keep_samples=keep_samples)
    if as_json:
        show_json({"clean": {"dropped": dropped, **show.migration_facts(store, migration)}})


SAMPLES_CAN_STAY = (
    "The sampled queries stay with --keep-samples: --bank collection:NAME takes them. milvus-hubness "
    "bank export writes them to a file."
)


def _show_preview(dropped: dict[str, str]) -> None:
    show_facts("Would be dropped for good", dropped)
    if "the copy" not in dropped:
        say("\nWithout it there is no rollback.")
    if "query samples" in dropped:
        say(f"\n{SAMPLES_CAN_STAY}")
    say("\nNothing was dropped. Repeat the command with --yes to drop it.")
