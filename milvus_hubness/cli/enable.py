"""The commands milvus-hubness enable and disable."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from milvus_hubness.cli.console import describe, out, progress_bars, show_facts, show_json, show_result
from milvus_hubness.cli.options import (
    AsJson,
    BankName,
    BankOptions,
    ClientTtl,
    Connection,
    EstimatorOptions,
    Field,
    Gate,
    TargetBank,
    read_vectors,
)
from milvus_hubness.enable.enable import disable as run_disable
from milvus_hubness.enable.enable import enable as run_enable
from milvus_hubness.enable.plan import MAX_MISS_RATE, plan_enable
from milvus_hubness.migration.plan import CLIENT_TTL
from milvus_hubness.operations.inputs import read_bank

Where = Literal["auto", "fields", "side", "vectors"]


def enable(
    collection: Annotated[str, typer.Argument(help="Collection to correct; its vectors stay as they are.")],
    bank: BankOptions,
    estimating: EstimatorOptions,
    connection: Connection,
    bank_name: BankName = None,
    target_bank: TargetBank = None,
    queries: Annotated[
        str | None, typer.Option(help="Queries that measure the miss rate. [default: some of the bank]")
    ] = None,
    field: Field = None,
    gate: Gate = None,
    where: Annotated[
        Where,
        typer.Option(
            help="Bias location. fields: fields of the collection. side: a side collection with the same "
            "keys. vectors: a second vector field, whose searches need no candidates."
        ),
    ] = "auto",
    max_miss_rate: Annotated[
        float, typer.Option(help="Share of the exact corrected top 10 that candidates may miss.")
    ] = MAX_MISS_RATE,
    client_ttl: ClientTtl = CLIENT_TTL,
    execute: Annotated[bool, typer.Option("--execute", help="Write the biases; without it, only plan.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Enable even if tune advises against it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Correct a collection without a copy: searches fetch more candidates and re-rank them.

    Plans and measures the miss rate; writes only with --execute.
    """
    bank.require()
    store = connection.open()
    with progress_bars() as progress:
        plan = plan_enable(
            store,
            collection,
            read_bank(store, bank.bank, bank.bank_column),
            estimator=estimating.estimator(),
            target_bank=read_vectors(store, target_bank),
            queries=read_vectors(store, queries),
            field=field,
            where=None if where == "auto" else where,
            bank_collection=bank_name,
            max_miss_rate=max_miss_rate,
            gate=gate,
            force=force,
            progress=progress,
        )
        if not as_json:
            _show_plan(plan.to_dict())
        result = run_enable(store, plan, client_ttl=client_ttl, progress=progress) if execute else None
    if as_json:
        done = {"result": result.to_dict()} if result else {}
        show_json({"plan": plan.to_dict(), "executed": execute, **done})
    elif result is None:
        out.print("\nNothing was written. Repeat the command with --execute.")
    else:
        _show_result(result.to_dict())


def disable(
    collection: Annotated[str, typer.Argument(help="Collection that was enabled.")],
    connection: Connection,
    field: Field = None,
    as_json: AsJson = False,
) -> None:
    """Undo enable: searches are raw again and the side collection is dropped.

    The bank stays, and so does a second vector field if the server cannot drop it.
    """
    store = connection.open()
    dropped = run_disable(store, collection, field=field)
    info = store.info(collection)
    stays = ", ".join(sorted(info.vector_fields.keys() - info.users_fields.keys())) or None
    note = "searches by other clients must still name their field" if stays else None
    facts = {"corrected": "no", "dropped": dropped, "stays": stays, "note": note}
    data = {"disable": {"collection": collection, "dropped": dropped, "stays": stays}}
    show_result(as_json, data, lambda: show_facts(f"Disabled {collection}", facts))


def _show_plan(plan: dict[str, Any]) -> None:
    added = " (added to it)" if plan["adds_fields"] else ""
    facts: dict[str, object] = {
        "vector field": f"{plan['field']}, {plan['metric']}, not changed",
        "rows": f"{plan['rows']:,}",
    }
    if plan["where"] == "vectors":
        facts["second field"] = f"{plan['second_vector']}, {plan['width']} wide{added}"
        facts["continues"] = "an interrupted run" if plan["carries_on"] else None
    else:
        side = f"collection {plan['side']}, with the same keys"
        facts["biases"] = side if plan["where"] == "side" else f"fields of the collection{added}"
        facts["candidates"] = f"{plan['candidates']} a search"
        rates = _until_none_missed(plan["missed"])
        missed = ", ".join(f"{100 * share:.1f}% beyond {number}" for number, share in rates)
        facts["missed"] = (
            f"of the exact corrected top 10: {missed} candidates (mean over {plan['measured_queries']:,} queries)"
        )
    facts |= {
        "bank": f"{plan['bank']['queries']:,} queries of {plan['bank']['source']}, "
        f"stored as {plan['bank']['collection']}",
        "estimator": f"{describe(plan['estimator'])}, strength {plan['strength']:g}",
        "gate": plan["gate"],
        "note": "\n".join(plan["remarks"]),
    }
    show_facts(f"Correction of {plan['source']} in place", facts)


def _until_none_missed(missed: dict[str, float]) -> list[tuple[str, float]]:
    """Return the numbers of candidates up to the first that misses nothing."""
    result = []
    for candidates, share in missed.items():
        result.append((candidates, share))
        if share == 0:
            break
    return result


def _show_result(result: dict[str, Any]) -> None:
    facts = {"corrected": f"{result['collection']}, {result['rows']:,} rows have a bias"}
    if result["second_vector"]:
        facts["searched"] = (
            f"{result['second_vector']}; of {result['searched']} rows searched for "
            f"{result['found_in_second']} found ({result['found_in_field']} in the first field)"
        )
    else:
        facts["biases"] = result["side"] or "fields of the collection"
        facts["candidates"] = f"{result['candidates']} a search, which miss {100 * result['missed']:.1f}%"
    show_facts("\nDone", {**facts, "bank": result["bank"], "took": f"{result['seconds']} s"})
