"""The commands milvus-hubness enable and disable."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

from milvus_hubness.cli.console import (
    DEFAULT_URI,
    Alpha,
    AsJson,
    Database,
    K,
    Method,
    Params,
    TokenFile,
    Uri,
    chosen_estimator,
    describe,
    open_store,
    out,
    progress_bars,
    show_facts,
    show_json,
)
from milvus_hubness.enable.enable import MAX_MISS_RATE, plan_enable
from milvus_hubness.enable.enable import disable as run_disable
from milvus_hubness.enable.enable import enable as run_enable
from milvus_hubness.enable.second_vector import SecondVectorEnabled, SecondVectorPlan
from milvus_hubness.migration import plan as migration_plan
from milvus_hubness.operations.reading import WHERE_FROM, read_bank


class Mode(str, Enum):
    """The ways to correct a collection without a copy of it."""

    rerank = "rerank"


class Where(str, Enum):
    """The bias locations that --where offers."""

    auto = "auto"
    fields = "fields"
    side = "side"
    vectors = "vectors"


def enable(
    collection: Annotated[str, typer.Argument(help="Collection to correct without changing its vectors.")],
    bank: Annotated[
        str, typer.Option(help="Reference queries: .npy .npz .parquet .arrow file, or collection:NAME.")
    ] = "",
    mode: Annotated[
        Mode, typer.Option(help="rerank: biases beside the vectors; candidates are re-ranked by them.")
    ] = Mode.rerank,
    bank_column: Annotated[
        str | None, typer.Option(help="Column, array or vector field that holds the queries.")
    ] = None,
    bank_name: Annotated[
        str | None, typer.Option(help="Collection that keeps the bank. [default: COLLECTION__bank]")
    ] = None,
    target_bank: Annotated[
        str | None, typer.Option(help="Reference items, as --bank, for dualis and dbsn.")
    ] = None,
    queries: Annotated[
        str, typer.Option(help="Queries to measure what candidates miss. [default: some of the bank's]")
    ] = "",
    field: Annotated[str | None, typer.Option(help="Vector field, where there are several.")] = None,
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
    where: Annotated[
        Where,
        typer.Option(
            help="Fields of the collection, a side collection under the same keys, or a second vector field, "
            "whose searches need no candidates."
        ),
    ] = Where.auto,
    side_name: Annotated[
        str | None, typer.Option(help="Name of the side collection. [default: COLLECTION__bias]")
    ] = None,
    max_miss_rate: Annotated[
        float, typer.Option(help="Share of the exact corrected top 10 that candidates may miss.")
    ] = MAX_MISS_RATE,
    client_ttl: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="The longest state_ttl of a HubnessClient that writes, in seconds, for --where vectors.",
        ),
    ] = migration_plan.CLIENT_TTL,
    execute: Annotated[bool, typer.Option("--execute", help="Do it. Without this, only plan.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Enable though tuning advises against it.")] = False,
    uri: Uri = DEFAULT_URI,
    db: Database = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Correct a collection that cannot be copied: searches fetch more candidates and re-rank them by biases
    that lie beside the vectors. Plans, and measures what that misses, unless told to --execute."""
    if not bank:
        raise typer.BadParameter(f"give the reference queries: --bank FILE ({WHERE_FROM})")
    estimator = chosen_estimator(method, param, k, alpha)
    store = open_store(uri, db, token_file)
    with progress_bars() as progress:
        plan = plan_enable(
            store,
            collection,
            read_bank(store, bank, bank_column),
            estimator=estimator,
            target_bank=read_bank(store, target_bank, None) if target_bank else None,
            queries=read_bank(store, queries, None) if queries else None,
            field=field,
            where=None if where is Where.auto else where.value,
            side=side_name,
            bank_collection=bank_name,
            max_miss_rate=max_miss_rate,
            gate=gate,
            force=force,
            progress=progress,
        )
        if not as_json and isinstance(plan, SecondVectorPlan):
            _show_second_vector_plan(plan.to_dict())
        elif not as_json:
            _show_plan(plan.to_dict(), mode)
        result = run_enable(store, plan, client_ttl=client_ttl, progress=progress) if execute else None
    if as_json:
        done = {"result": result.to_dict()} if result else {}
        show_json({"plan": plan.to_dict(), "executed": execute, **done})
    elif result is None:
        out.print("\nNothing was written. Run it again with --execute to do this.")
    elif isinstance(result, SecondVectorEnabled):
        _show_second_vector_result(result.to_dict())
    else:
        _show_result(result.to_dict())


def disable(
    collection: Annotated[str, typer.Argument(help="Collection that was enabled.")],
    field: Annotated[str | None, typer.Option(help="Corrected field, where there are several.")] = None,
    uri: Uri = DEFAULT_URI,
    db: Database = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Take back what enable did: searches are raw again, the side collection is dropped, the bank stays, and
    so does a second vector field where the server cannot drop it."""
    store = open_store(uri, db, token_file)
    dropped = run_disable(store, collection, field=field)
    info = store.info(collection)
    stays = ", ".join(sorted(info.vector_fields.keys() - info.users_fields.keys())) or None
    if as_json:
        show_json({"disable": {"collection": collection, "dropped": dropped, "stays": stays}})
    else:
        note = "searches by other clients must still name their field" if stays else None
        show_facts(
            f"Disabled {collection}",
            {"corrected": "no", "dropped": dropped, "stays": stays, "note": note},
        )


def _show_plan(plan: dict[str, Any], mode: Mode) -> None:
    places = {"side": f"collection {plan['side']}, under the same keys", "fields": "fields of the collection"}
    added = " (added to it)" if plan["adds_fields"] else ""
    missed = ", ".join(f"{100 * share:.1f}% beyond {n}" for n, share in _telling(plan["missed"]))
    show_facts(
        f"Correction of {plan['source']} beside its vectors",
        {
            "mode": mode.value,
            "vector field": f"{plan['field']}, {plan['metric']}, not changed",
            "rows": f"{plan['rows']:,}",
            "biases": places[plan["where"]] + added,
            "bank": f"{plan['bank']['queries']:,} queries of {plan['bank']['source']}, "
            f"kept as {plan['bank']['collection']}",
            "estimator": f"{describe(plan['estimator'])}, strength {plan['strength']:g}",
            "gate": plan["gate"],
            "candidates": f"{plan['candidates']} a search",
            "missed": f"of the exact corrected top 10: {missed} candidates "
            f"(mean over {plan['measured_queries']:,} queries)",
            "note": "\n".join(plan["remarks"]),
        },
    )


def _show_second_vector_plan(plan: dict[str, Any]) -> None:
    added = " (added to it)" if plan["adds_fields"] else ""
    show_facts(
        f"Correction of {plan['source']} in place",
        {
            "vector field": f"{plan['field']}, {plan['metric']}, not changed",
            "rows": f"{plan['rows']:,}",
            "second field": f"{plan['second_vector']}, {plan['width']} wide{added}",
            "bank": f"{plan['bank']['queries']:,} queries of {plan['bank']['source']}, "
            f"kept as {plan['bank']['collection']}",
            "estimator": f"{describe(plan['estimator'])}, strength {plan['strength']:g}",
            "gate": plan["gate"],
            "carries on": "what an interrupted run began" if plan["carries_on"] else None,
            "note": "\n".join(plan["remarks"]),
        },
    )


def _telling(missed: dict[str, float]) -> list[tuple[str, float]]:
    """Return the numbers of candidates up to the first that misses nothing."""
    result = []
    for candidates, share in missed.items():
        result.append((candidates, share))
        if share == 0:
            break
    return result


def _show_result(result: dict[str, Any]) -> None:
    show_facts(
        "\nDone",
        {
            "corrected": f"{result['collection']}, {result['rows']:,} rows carry a bias",
            "biases": result["side"] or "fields of the collection",
            "bank": result["bank"],
            "candidates": f"{result['candidates']} a search, which miss {100 * result['missed']:.1f}%",
            "took": f"{result['seconds']} s",
        },
    )


def _show_second_vector_result(result: dict[str, Any]) -> None:
    show_facts(
        "\nDone",
        {
            "corrected": f"{result['collection']}, {result['rows']:,} rows carry a bias",
            "searched": f"{result['second_vector']}; of {result['searched']} rows searched for "
            f"{result['found_in_second']} found ({result['found_in_field']} in the first field)",
            "bank": result["bank"],
            "took": f"{result['seconds']} s",
        },
    )
