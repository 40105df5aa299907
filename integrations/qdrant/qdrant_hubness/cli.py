"""The command qdrant-hubness: the jobs of milvus_hubness on Qdrant."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from milvus_hubness import MigrationOptions, plan_enable, plan_migration, resume
from milvus_hubness import clean as clean_migration
from milvus_hubness import disable as run_disable
from milvus_hubness import enable as run_enable
from milvus_hubness import migrate as run_plan
from milvus_hubness import refresh as run_refresh
from milvus_hubness import rollback as roll_back
from milvus_hubness import status as read_status
from milvus_hubness.extending import (
    EXIT_REFUSED,
    EXIT_TERMINATED,
    REBUILD_ROWS,
    STATE_TTL,
    AsJson,
    BankOptions,
    ClientTtl,
    EstimatorOptions,
    JudgingOptions,
    Kind,
    Leftovers,
    Migration,
    MigrationLedger,
    PriorOptions,
    Progress,
    Queries,
    RowsPerSecond,
    Throttle,
    as_events,
    command_line,
    lease_holder,
    leftovers,
    migration_to_resume,
    migration_words,
    progress_bars,
    read_vectors,
    remember_secrets,
    require_state,
    run_command_line,
    secrets_in,
    show_enable_plan,
    show_enabled,
    show_facts,
    show_json,
    show_migration_plan,
    show_refresh,
    show_result,
    status_words,
    would_drop,
)
from milvus_hubness.extending import sweep as sweep_leftovers
from qdrant_hubness.store import QdrantStore, connect

URI_VARIABLE = "QDRANT_URL"
KEY_VARIABLE = "QDRANT_API_KEY"
DEFAULT_URI = "http://localhost:6333"

Collection = Annotated[str, typer.Argument(help="Collection or alias.")]
Uri = Annotated[
    str,
    typer.Option(
        "--uri", envvar=URI_VARIABLE, help="Server (http://…), or folder of the local mode."
    ),
]
Vector = Annotated[
    str | None,
    typer.Option(
        "--vector", "--field", help="Name of the vector, required if the collection has several."
    ),
]
BankName = Annotated[
    str | None,
    typer.Option(
        "--bank-name", help="Collection to store the bank in. [default: COLLECTION__bank]"
    ),
]
Plan = Annotated[bool, typer.Option("--plan", help="Show the plan; write nothing.")]


@dataclass(frozen=True)
class Connection:
    """The options of the connection."""

    uri: Uri = DEFAULT_URI

    def open(self) -> QdrantStore:
        remember_secrets(*secrets_in(self.uri))
        return QdrantStore(connect(self.uri, os.environ.get(KEY_VARIABLE)))


@dataclass(frozen=True)
class Writers:
    """The options about clients that write during the job."""

    no_writers: Annotated[
        bool,
        typer.Option("--no-writers", help="Nobody writes to the collection: wait for no client."),
    ] = False
    client_ttl: ClientTtl = STATE_TTL

    def options(self, progress: Progress, rows_per_second: float | None = None) -> MigrationOptions:
        return MigrationOptions(
            no_writers=self.no_writers,
            client_ttl=self.client_ttl,
            throttle=Throttle(rows_per_second=rows_per_second),
            events=as_events(progress),
        )


@dataclass(frozen=True)
class Correcting(PriorOptions, EstimatorOptions, BankOptions):
    """The options that choose the bank, the estimator, the prior and the vector."""

    vector: Vector = None


def main() -> None:
    """Exit codes: 0 done, 1 failed, 2 wrong usage, 3 refused by measurement, 143 terminated."""
    signal.signal(signal.SIGTERM, _terminate)
    run_command_line(app, "qdrant-hubness")


def migrate(
    source: Annotated[str, typer.Argument(help="Collection to correct.")],
    correcting: Correcting,
    judging: JudgingOptions,
    writers: Writers,
    connection: Connection,
    kind: Kind = None,
    alias: Annotated[
        str | None, typer.Option(help="Alias that the application reads: it is moved to the copy.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Name of the copy. [default: SOURCE_hubness]")
    ] = None,
    rows_per_second: RowsPerSecond = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Drop an unfinished copy and start again.")
    ] = False,
    bank_name: BankName = None,
    plan: Plan = False,
    as_json: AsJson = False,
) -> None:
    """Make a corrected copy of a collection, verify it, and with --alias cut the application over to it.

    Continues an interrupted run; without --bank, with its own options. Exits with 3, and writes nothing,
    if the verdict on the bank is to leave the collection alone.

    Example: qdrant-hubness migrate products --bank queries.npy --alias live
    """
    store = connection.open()
    resumed = None
    if not (correcting.bank and restart):
        resumed = migration_to_resume(store, source, target, is_planned=bool(correcting.bank))

    with progress_bars() as progress:
        options = writers.options(progress, rows_per_second)
        if resumed is not None and plan:
            _show_migration("Would continue the migration of ", resumed, as_json=as_json)
            return
        if resumed is not None:
            migration = resume(store, resumed.target, options, alias=alias)
        else:
            planned = plan_migration(
                store,
                source,
                correcting.required(store, source),
                estimator=correcting.estimator(),
                field=correcting.vector,
                target=target,
                alias=alias,
                restart=restart,
                bank_collection=bank_name,
                queries=judging.read_queries(store),
                prior=correcting.read_prior(),
                prior_weight=correcting.prior_weight,
                kind=kind,
                verdict=judging.verdict,
            )
            if plan:
                facts = planned.to_dict()
                show_result(as_json, {"plan": facts}, lambda: show_migration_plan(facts))
                return
            migration = run_plan(store, planned, options)
    _show_migration("Migrated ", migration, as_json=as_json)


def rollback(
    collection: Collection, writers: Writers, connection: Connection, as_json: AsJson = False
) -> None:
    """Carry points written since the cutover back to the source, and move the alias back to it.

    Example: qdrant-hubness rollback products
    """
    store = connection.open()
    migration = MigrationLedger(store).find(collection)
    if migration.phase == "rolled back":
        result = {"source": migration.source, "target": migration.target, "carried": 0}
        _show(f"{migration.target} is rolled back already", "rollback", result, as_json=as_json)
        return
    with progress_bars() as progress:
        done = roll_back(store, migration.target, options=writers.options(progress))
    _show(f"Rolled back {done.target}", "rollback", vars(done), as_json=as_json)


def clean(
    collection: Collection,
    drop: Annotated[
        str, typer.Option(help="Collection to drop: the source or the copy, by its own name.")
    ],
    connection: Connection,
    yes: Annotated[
        bool, typer.Option("--yes", help="Drop; without it, only show what would be dropped.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Drop the source after a cutover, or the copy before it or after a rollback.

    Refuses to drop the collection that the application reads.

    Example: qdrant-hubness clean products --drop products --yes
    """
    store = connection.open()
    dropped = would_drop(store, collection, drop=drop)
    if dropped and not yes:
        title = "Would be dropped for good with --yes"
        show_result(as_json, {"clean": {"would_drop": dropped}}, lambda: show_facts(title, dropped))
        return

    done = clean_migration(store, collection, drop=drop)
    _show(f"Dropped {drop}", "clean", {"dropped": drop, "phase": done.phase}, as_json=as_json)


def sweep(
    collection: Collection,
    connection: Connection,
    plan: Plan = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove; without it, only show what would be removed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove all that the correction of a collection has left and nothing uses any more.

    Former copies after refreshes, copies after a rollback, biases in payloads after disable, banks, records.

    Example: qdrant-hubness sweep products --plan
    """
    store = connection.open()
    leftover = leftovers(store, collection)
    if not leftover:
        _show_leftovers(leftover, f"{collection} has no leftovers", as_json)
        return
    if plan:
        _show_leftovers(leftover, "Would be removed for good", as_json)
        return
    if not yes:
        if as_json:
            show_json({"sweep": {"would_remove": leftover.to_dict()}})
        else:
            _show_leftovers(leftover, "Would be removed for good with --yes", as_json)
        return

    _show_leftovers(sweep_leftovers(store, collection), "Removed", as_json)


def _show_leftovers(leftover: Leftovers, title: str, as_json: bool) -> None:
    keys = [f"{key} of {count:,} points" for key, count in leftover.keys.items()]
    facts = {
        "copies": ", ".join(leftover.copies),
        "keys in payloads": ", ".join(keys),
        "properties": ", ".join(leftover.properties),
        "banks": ", ".join(leftover.banks),
        "records of": ", ".join(leftover.records),
        "stays": "\n".join(f"{name}: {why}" for name, why in leftover.staying.items()),
    }
    show_result(as_json, {"sweep": leftover.to_dict()}, lambda: show_facts(title, facts))


def enable(
    collection: Collection,
    correcting: Correcting,
    judging: JudgingOptions,
    connection: Connection,
    bank_name: BankName = None,
    plan: Plan = False,
    as_json: AsJson = False,
) -> None:
    """Correct a collection without a copy: biases in payloads, which a formula subtracts from scores.

    Exits with 3, and writes nothing, if the verdict on the bank is to leave the collection alone.

    Example: qdrant-hubness enable products --bank queries.npy --plan
    """
    correcting.require(connection, collection)
    store = connection.open()
    queries = correcting.required(store, collection)
    estimator = correcting.estimator()
    with progress_bars() as progress:
        planned = plan_enable(
            store,
            collection,
            queries,
            estimator=estimator,
            field=correcting.vector,
            where="fields",
            bank_collection=bank_name,
            queries=judging.read_queries(store),
            prior=correcting.read_prior(),
            prior_weight=correcting.prior_weight,
            verdict=judging.verdict,
            progress=progress,
        )
        facts = planned.to_dict()
        if plan:
            show_result(as_json, {"plan": facts}, lambda: show_enable_plan(facts))
            return
        result = run_enable(store, planned, progress=progress).to_dict()
    show_result(as_json, {"enable": result}, lambda: show_enabled(result))


def disable(
    collection: Collection, connection: Connection, vector: Vector = None, as_json: AsJson = False
) -> None:
    """Undo enable: searches are raw again.

    The biases stay in payloads, where readers through the client do not see them, until sweep removes them.

    Example: qdrant-hubness disable products
    """
    run_disable(connection.open(), collection, field=vector)
    _show(f"Disabled {collection}", "disable", {"collection": collection}, as_json=as_json)


def refresh(
    collection: Collection,
    correcting: Correcting,
    connection: Connection,
    revert: Annotated[
        bool,
        typer.Option(
            "--revert", help="Restore the bank and parameters before the last full refresh."
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Write all biases again, even if they are unchanged, evaluated as worse, or advised "
            "against.",
        ),
    ] = False,
    refit: Annotated[
        bool, typer.Option("--refit", help="Compute all biases again though nothing changed.")
    ] = False,
    refit_share: Annotated[
        float | None,
        typer.Option(
            help="Share of points that are new or changed since the bank was fitted, from which on a "
            "new bank is reported as due. [default: never]"
        ),
    ] = None,
    no_prior: Annotated[
        bool, typer.Option("--no-prior", help="Drop the prior: only the biases count.")
    ] = False,
    queries: Queries = None,
    client_ttl: ClientTtl = STATE_TTL,
    rows_per_second: RowsPerSecond = None,
    rebuild_rows: Annotated[
        int, typer.Option(help="Number of points from which on a copy replaces in-place updates.")
    ] = REBUILD_ROWS,
    plan: Plan = False,
    as_json: AsJson = False,
) -> None:
    """Compute the biases of points that have none, and of all if the bank, the parameters or a prior changed.

    Exits with 3 if the new biases were not adopted: the verdict on --bank is to leave the collection
    alone, or they are evaluated as worse.

    Example: qdrant-hubness refresh products --bank new_queries.npy
    """
    store = connection.open()
    estimator = None
    if correcting.is_named:
        state = require_state(store.info(collection).state_of(correcting.vector), collection)
        estimator = correcting.estimator(state.profile.estimator)
    with progress_bars() as progress:
        done = run_refresh(
            store,
            collection,
            bank=correcting.read(store, collection),
            estimator=estimator,
            field=correcting.vector,
            revert=revert,
            force=force,
            refit=refit,
            refit_share=refit_share,
            prior=correcting.read_prior(),
            prior_weight=correcting.prior_weight,
            no_prior=no_prior,
            rebuild_rows=rebuild_rows,
            plan=plan,
            queries=read_vectors(store, queries),
            client_ttl=client_ttl,
            throttle=Throttle(rows_per_second=rows_per_second),
            progress=progress,
        )
    show_result(as_json, {"refresh": done.to_dict()}, lambda: show_refresh(done))
    if done.action == "refused":
        raise typer.Exit(EXIT_REFUSED)


def status(
    collection: Collection, connection: Connection, vector: Vector = None, as_json: AsJson = False
) -> None:
    """Show how a collection is corrected, and how fresh its biases are.

    Example: qdrant-hubness status products --json
    """
    store = connection.open()
    present = read_status(store, collection, field=vector)
    words = {
        **status_words(present, repair="the next refresh repairs its rows"),
        "lease": lease_holder(store, present.collection),
    }
    show_result(
        as_json, {"status": present.to_dict()}, lambda: show_facts(present.collection, words)
    )


app = command_line(
    "Correct hubness in cross-modal search, inside Qdrant.\n\nThe key of a server: "
    f"${KEY_VARIABLE}.\n\nExample: qdrant-hubness migrate products --bank queries.npy --alias live",
    *(migrate, rollback, clean, enable, disable, refresh, sweep, status),
    completion=True,
)


def _summary(migration: Migration) -> dict[str, Any]:
    return {
        "source": migration.source,
        "target": migration.target,
        "phase": migration.phase,
        "rows": migration.rows,
        "alias": migration.switch.name if migration.switch else None,
        "bank": migration.bank_collection,
        "invalid": migration.invalid,
        "verified": migration.verified,
    }


def _show_migration(title: str, migration: Migration, *, as_json: bool) -> None:
    facts = _summary(migration)
    words = {
        "copy": migration.target,
        "phase": migration.phase,
        "rows": f"{migration.rows:,}",
        "alias": facts["alias"],
        **migration_words(migration),
    }
    show_result(
        as_json, {"migration": facts}, lambda: show_facts(f"{title}{migration.source}", words)
    )


def _show(title: str, name: str, result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        show_json({name: result})
    else:
        show_facts(title, result)


def _terminate(number: int, frame: Any) -> None:
    raise SystemExit(EXIT_TERMINATED)
