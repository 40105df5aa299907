"""milvus-hubness migrate"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from milvus_hubness import jobs
from milvus_hubness.cli.console import (
    DEFAULT_URI,
    AsJson,
    Database,
    TokenFile,
    Uri,
    open_store,
    out,
    progress_bars,
    read_bank,
    show_facts,
    show_json,
)
from milvus_hubness.cli.estimator_options import Alpha, K, Method, Params, chosen_estimator, describe


def migrate(
    collection: Annotated[str, typer.Argument(help="Collection to correct; with --rollback, the alias.")],
    bank: Annotated[
        str, typer.Option(help="Reference queries: .npy .npz .parquet .arrow file, or collection:NAME.")
    ] = "",
    bank_column: Annotated[
        str | None, typer.Option(help="Column, array or vector field that holds the queries.")
    ] = None,
    bank_name: Annotated[
        str | None, typer.Option(help="Collection that keeps the bank. [default: COLLECTION__bank]")
    ] = None,
    field: Annotated[str | None, typer.Option(help="Vector field, where there are several.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Name of the copy. [default: COLLECTION_hubness]")
    ] = None,
    target_bank: Annotated[
        str | None, typer.Option(help="Reference items, as --bank, for dualis, dbsn and --gate-targets.")
    ] = None,
    method: Method = None,
    param: Params = None,
    k: K = None,
    alpha: Alpha = None,
    gate: Annotated[
        int | None,
        typer.Option(
            help="Correct only queries whose raw best item is among the GATE nearest of a bank query."
        ),
    ] = None,
    gate_targets: Annotated[
        int | None,
        typer.Option(
            help="With --gate: also queries whose raw best item is among the GATE_TARGETS nearest of a "
            "--target-bank item."
        ),
    ] = None,
    alias: Annotated[str | None, typer.Option(help="Alias to point at the copy once it is verified.")] = None,
    execute: Annotated[bool, typer.Option("--execute", help="Do it. Without this, only plan.")] = False,
    profiles: Annotated[
        int, typer.Option(help="Sets of biases to leave room for; refresh --profile adds the further ones.")
    ] = 1,
    restart: Annotated[
        bool, typer.Option("--restart", help="Drop what an unfinished migration left and begin anew.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Migrate though tuning advises against it.")] = False,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Point the alias back at the collection it came from.")
    ] = False,
    uri: Uri = DEFAULT_URI,
    db: Database = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Copy a collection into its corrected form. Plans unless told to --execute; never touches the source.

    Without --method: nnn where --k or --alpha is given; else what tune chose for this bank; else blend, the
    best choice known without labels.
    """
    if bool(bank) == rollback:
        raise typer.BadParameter("give either --bank, to migrate, or --rollback")
    estimator = chosen_estimator(method, param, k, alpha)
    store = open_store(uri, db, token_file)
    if rollback:
        _show_rollback(jobs.rollback(store, collection), as_json)
        return
    plan = jobs.plan_migration(
        store,
        collection,
        read_bank(store, bank, bank_column),
        estimator=estimator,
        target_bank=read_bank(store, target_bank, None) if target_bank else None,
        field=field,
        target=target,
        bank_collection=bank_name,
        alias=alias,
        gate=gate,
        gate_targets=gate_targets,
        profiles=profiles,
        restart=restart,
        force=force,
    )
    if not as_json:
        _show_plan(plan.to_dict())
    if not execute:
        if as_json:
            show_json({"plan": plan.to_dict(), "executed": False})
        else:
            out.print("\nNothing was written. Run it again with --execute to do this.")
        return
    with progress_bars() as progress:
        result = jobs.migrate(store, plan, progress=progress)
    if as_json:
        show_json({"plan": plan.to_dict(), "executed": True, "result": result.to_dict()})
    else:
        _show_result(result.to_dict())


def _show_plan(plan: dict[str, Any]) -> None:
    sizes = {side: f"{size / 2**20:,.1f} MiB" for side, size in plan["vector_bytes"].items()}
    show_facts(
        f"Migration of {plan['source']}",
        {
            "would create": plan["target"],
            "vector field": f"{plan['field']}, {plan['dtype']}, {plan['index_type']} "
            f"{plan['index_params'] or ''}".rstrip(),
            "metric": f"{plan['metric']}, served as IP",
            "rows": f"{plan['rows']:,}",
            "width": f"{plan['dim']} -> {plan['width']} ({sizes['source']} -> {sizes['target']} of vectors)",
            "partitions": ", ".join(plan["partitions"]),
            "fields added": ", ".join(plan["hidden_fields"]),
            "bank": f"{plan['bank']['queries']:,} queries of {plan['bank']['source']}, "
            f"kept as {plan['bank']['collection']}",
            "estimator": f"{describe(plan['estimator'])}, strength {plan['strength']:g}",
            "gate": plan["gate"],
            "gate over targets": plan["gate_targets"],
            "alias": plan["alias"],
            "about": f"{plan['estimated_seconds']} s (from a sample, read only)",
            "note": "\n".join(plan["remarks"]),
        },
    )


def _show_result(result: dict[str, Any]) -> None:
    unsound = result["unsound"]
    show_facts(
        "\nDone",
        {
            "created": result["target"],
            "bank": result["bank"],
            "verified": f"{result['verification']['rows']:,} rows, "
            f"{result['verification']['fields']:,} field values equal to the source",
            "bias 0": f"{unsound['rows']} rows without a usable vector: {unsound['keys']}"
            if unsound["rows"]
            else None,
            "alias": f"{result['alias']} -> {result['target']}" if result["alias"] else None,
            "took": f"{result['seconds']} s",
        },
    )


def _show_rollback(done: jobs.Rollback, as_json: bool) -> None:
    if as_json:
        show_json({"rollback": vars(done)})
        return
    missing = f"{done.missing_rows} rows written since the switch stay in {done.target} only"
    show_facts(
        "Rolled back",
        {
            "alias": f"{done.alias} -> {done.source}",
            "note": missing if done.missing_rows else None,
        },
    )
