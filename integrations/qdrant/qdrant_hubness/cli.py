"""qdrant-hubness: the jobs of milvus_hubness on Qdrant, from the command line."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, Any

import typer

from milvus_hubness import jobs
from milvus_hubness.cli.console import AsJson, progress_bars, show_facts, show_json, tell_error
from milvus_hubness.cli.estimator_options import Alpha, K, Method, Params, chosen_estimator, describe
from milvus_hubness.cli.migrate.moving import moving, unfinished
from milvus_hubness.errors import HubnessError, InvalidParameter
from milvus_hubness.jobs.bank_source import read_bank
from milvus_hubness.jobs.migration.ledger import Ledger, Migration
from milvus_hubness.jobs.migration.steering import CLIENT_TTL, Steering, as_events
from milvus_hubness.jobs.migration.throttle import Throttle
from milvus_hubness.jobs.progress import Progress
from milvus_hubness.state import require_state
from qdrant_hubness.store import QdrantStore, connect

FAILURE, USAGE, REFUSED, TERMINATED = 1, 2, 3, 143
URI_VARIABLE, KEY_VARIABLE = "QDRANT_URL", "QDRANT_API_KEY"

Collection = Annotated[str, typer.Argument(help="Collection or alias.")]
Uri = Annotated[
    str,
    typer.Option("--uri", envvar=URI_VARIABLE, help="Server (http://…) or folder of the local mode."),
]
Bank = Annotated[str, typer.Option(help="Reference queries: a file, or collection:NAME.")]
Column = Annotated[str | None, typer.Option(help="Column, array or vector that holds them.")]
Vector = Annotated[str | None, typer.Option("--vector", help="Name of the vector, where there are several.")]
Alias = Annotated[str | None, typer.Option(help="The alias the application uses: moved to the copy.")]
Frozen = Annotated[bool, typer.Option("--frozen", help="Nobody writes meanwhile: clients need not be told.")]
Ttl = Annotated[
    float, typer.Option(help="Seconds in which every client of ours hears of it: their longest state_ttl.")
]
Rate = Annotated[float | None, typer.Option(help="Write no faster than this.", show_default=False)]
Plan = Annotated[bool, typer.Option("--plan", help="Only say what would be done; nothing is written.")]
DEFAULT_URI = "http://localhost:6333"

app = typer.Typer(
    name="qdrant-hubness",
    help=f"Hubness correction for cross-modal search, inside Qdrant. The key of a server: ${KEY_VARIABLE}.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Exit codes: 0 done, 1 failed, 2 wrong usage, 3 new biases judged worse, 143 terminated."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except HubnessError as error:
        tell_error(error, as_json="--json" in sys.argv, program="qdrant-hubness")
        sys.exit(USAGE if isinstance(error, InvalidParameter) else FAILURE)


@app.command("migrate")
def migrate(
    source: Annotated[
        str | None, typer.Argument(help="Collection to correct. [default: the unfinished one]")
    ] = None,
    bank: Bank = "",
    bank_column: Column = None,
    alias: Alias = None,
    vector: Vector = None,
    target: Annotated[str | None, typer.Option(help="Name of the copy. [default: SOURCE_hubness]")] = None,
    method: Method = None,
    param: Params = None,
    k: K = None,
    alpha: Alpha = None,
    frozen: Frozen = False,
    client_ttl: Ttl = CLIENT_TTL,
    rows_per_second: Rate = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Drop an unfinished copy and begin anew.")
    ] = False,
    plan: Plan = False,
    uri: Uri = DEFAULT_URI,
    as_json: AsJson = False,
) -> None:
    """Copy a collection into the corrected form, verify it, and with --alias let the application read it.

    Carries on where an earlier run ended; without --bank, with what it was begun with."""
    if bank and source is None:
        raise typer.BadParameter("give the collection that --bank is for")
    store = _open(uri)
    known = None if source is None or restart else moving(store, source, target)
    with progress_bars() as progress:
        steering = _steering(progress, frozen, client_ttl, rows_per_second)
        if known is not None:
            found = _moved_on(store, known, steering)
        elif bank and source is not None:
            wanted = jobs.plan_migration(
                store,
                source,
                read_bank(store, bank, bank_column),
                estimator=chosen_estimator(method, param, k, alpha),
                field=vector,
                target=target,
                alias=alias,
                restart=restart,
            )
            if plan:
                _show(f"Would migrate {source}", "plan", wanted.to_dict(), as_json=as_json)
                return
            steering.events.tell("plan", **wanted.to_dict())
            found = jobs.run(store, wanted, steering)
        else:
            found = unfinished(store, source)
            if found.phase in {"switching", "switched", "rolling back"}:
                found = _moved_on(store, found, steering)
            else:
                found = jobs.resume(store, found.target, steering)
        if alias and found.phase == "verified":
            found = jobs.cutover(store, found.target, alias=alias, steering=steering)
    _show(f"Migrated {found.source}", "migration", _told(found), as_json=as_json)


@app.command("rollback")
def rollback(
    collection: Collection,
    frozen: Frozen = False,
    client_ttl: Ttl = CLIENT_TTL,
    uri: Uri = DEFAULT_URI,
    as_json: AsJson = False,
) -> None:
    """Let the application read the source again, with all that was written since."""
    store = _open(uri)
    with progress_bars() as progress:
        done = jobs.rollback(store, collection, steering=_steering(progress, frozen, client_ttl, None))
    _show(f"Rolled back {done.target}", "rollback", vars(done), as_json=as_json)


@app.command("clean")
def clean(
    collection: Collection,
    drop: Annotated[str, typer.Option(help="Which of the two collections to drop, by its own name.")],
    uri: Uri = DEFAULT_URI,
    as_json: AsJson = False,
) -> None:
    """Drop one side of a migration: the source once it is over, or the copy to take it back."""
    done = jobs.clean(_open(uri), collection, drop=drop)
    _show(f"Dropped {drop}", "clean", {"dropped": drop, "phase": done.phase}, as_json=as_json)


@app.command("enable")
def enable(
    collection: Collection,
    bank: Bank,
    bank_column: Column = None,
    vector: Vector = None,
    method: Method = None,
    param: Params = None,
    k: K = None,
    alpha: Alpha = None,
    plan: Plan = False,
    uri: Uri = DEFAULT_URI,
    as_json: AsJson = False,
) -> None:
    """Correct without a copy: biases in payloads, which a formula takes off the scores of candidates."""
    store = _open(uri)
    queries, estimator = read_bank(store, bank, bank_column), chosen_estimator(method, param, k, alpha)
    with progress_bars() as progress:
        wanted = jobs.plan_enable(
            store, collection, queries, estimator=estimator, field=vector, where="fields", progress=progress
        )
        if plan:
            _show(f"Would enable {collection}", "plan", wanted.to_dict(), as_json=as_json)
            return
        done = jobs.enable(store, wanted, progress=progress)
    _show(f"Enabled {collection}", "enable", done.to_dict(), as_json=as_json)


@app.command("disable")
def disable(
    collection: Collection, vector: Vector = None, uri: Uri = DEFAULT_URI, as_json: AsJson = False
) -> None:
    """Have a collection that was enabled answer as before."""
    jobs.disable(_open(uri), collection, field=vector)
    _show(f"Disabled {collection}", "disable", {"collection": collection}, as_json=as_json)


@app.command("refresh")
def refresh(
    collection: Collection,
    bank: Bank = "",
    bank_column: Column = None,
    vector: Vector = None,
    method: Method = None,
    param: Params = None,
    k: K = None,
    alpha: Alpha = None,
    back: Annotated[bool, typer.Option("--back", help="To what was before the last full refresh.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Adopt new biases even where they are judged worse.")
    ] = False,
    client_ttl: Ttl = CLIENT_TTL,
    rows_per_second: Rate = None,
    plan: Plan = False,
    uri: Uri = DEFAULT_URI,
    as_json: AsJson = False,
) -> None:
    """Recompute biases: of points that have none, and of all when the bank or the parameters changed.

    Exits with 3 where the new ones are judged worse and were not adopted."""
    store = _open(uri)
    estimator = None
    if any(option is not None for option in (method, param, k, alpha)):
        state = require_state(store.info(collection).state_of(vector), collection)
        estimator = chosen_estimator(method, param, k, alpha, state.profile.estimator)
    with progress_bars() as progress:
        done = jobs.refresh(
            store,
            collection,
            bank=read_bank(store, bank, bank_column) if bank else None,
            estimator=estimator,
            field=vector,
            back=back,
            force=force,
            plan=plan,
            client_ttl=client_ttl,
            throttle=Throttle(rows_per_second=rows_per_second),
            progress=progress,
        )
    title = "Would refresh" if done.planned else "Refreshed"
    _show(f"{title} {collection}", "refresh", done.to_dict(), as_json=as_json)
    if done.mode == "refused":
        raise typer.Exit(REFUSED)


@app.command("status")
def status(
    collection: Collection, vector: Vector = None, uri: Uri = DEFAULT_URI, as_json: AsJson = False
) -> None:
    """Tell whether a collection is corrected, how, and how fresh its biases are."""
    found = jobs.status(_open(uri), collection, field=vector).to_dict()
    if found["estimator"] and not as_json:
        found["estimator"] = describe(found["estimator"])
    _show(collection, "status", found, as_json=as_json)


def _open(uri: str) -> QdrantStore:
    return QdrantStore(connect(uri, os.environ.get(KEY_VARIABLE)))


def _steering(progress: Progress, frozen: bool, client_ttl: float, rate: float | None) -> Steering:
    throttle = Throttle(rows_per_second=rate)
    return Steering(frozen=frozen, client_ttl=client_ttl, throttle=throttle, events=as_events(progress))


def _moved_on(store: QdrantStore, known: Migration, steering: Steering) -> Migration:
    """What was begun is finished, as it was begun."""
    if known.phase == "switched" and not store.exists(known.source_now):
        return known
    if known.phase != "rolling back":
        return jobs.cutover(store, known.target, steering=steering)
    jobs.rollback(store, known.target, steering=steering)
    return Ledger(store).find(known.target)


def _told(migration: Migration) -> dict[str, Any]:
    return {
        "source": migration.source,
        "target": migration.target,
        "phase": migration.phase,
        "rows": migration.rows,
        "alias": migration.switch.name if migration.switch else None,
        "bank": migration.bank_collection,
        "unsound": migration.unsound,
        "verified": migration.verified,
    }


def _show(title: str, name: str, told: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        show_json({name: told})
    else:
        show_facts(title, told)


def _terminate(number: int, frame: Any) -> None:
    raise SystemExit(TERMINATED)
