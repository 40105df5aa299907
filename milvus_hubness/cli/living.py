"""milvus-hubness bank"""

from __future__ import annotations

from typing import Annotated

import typer

from milvus_hubness.cli.console import (
    DEFAULT_URI,
    AsJson,
    Database,
    TokenFile,
    Uri,
    open_store,
    out,
    show_facts,
    show_json,
)
from milvus_hubness.jobs.living import OnlineBankStatus, start_online_bank, stop_online_bank
from milvus_hubness.jobs.living import list_online_banks as online_bank_statuses

HOUR = 3_600.0


def bank(
    collection: Annotated[str, typer.Argument(help="A corrected collection or its alias.")],
    rate: Annotated[
        float | None, typer.Option(help="Share of live queries that clients sample. [default: 0.01]")
    ] = None,
    size: Annotated[int | None, typer.Option(help="Places in the bank. [default: as many as it has]")] = None,
    seed_share: Annotated[
        float | None, typer.Option(help="Share of them that its first queries keep. [default: 0.25]")
    ] = None,
    half_life: Annotated[
        float | None, typer.Option(help="Hours after which a query counts half. [default: 168]")
    ] = None,
    duplicate_cosine: Annotated[
        float | None, typer.Option(help="Queries of a cosine above this are the same. [default: 0.99]")
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="Sample no more; the bank stays as it is.")] = False,
    field: Annotated[str | None, typer.Option(help="Corrected field, where there are several.")] = None,
    profile: Annotated[
        str | None, typer.Option(help="Set of biases whose bank it is. [default: the active one]")
    ] = None,
    uri: Uri = DEFAULT_URI,
    db: Database = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Let the bank follow live queries: clients sample them from now on, or on other terms. Without options,
    tell the online banks of the collection."""
    are_told = any(term is not None for term in (rate, size, seed_share, half_life, duplicate_cosine))
    if off and are_told:
        raise typer.BadParameter("give --off or terms, not both")
    store = open_store(uri, db, token_file)
    if off:
        stopped = stop_online_bank(store, collection, field=field, profile=profile)
        if as_json:
            show_json({"online_banks": [], "stopped": stopped.model_dump() if stopped else None})
        else:
            out.print("Turned off." if stopped else "It has no online bank.")
        return
    if are_told:
        start_online_bank(
            store,
            collection,
            field=field,
            profile=profile,
            rate=rate,
            size=size,
            seed_share=seed_share,
            half_life_seconds=None if half_life is None else HOUR * half_life,
            duplicate_cosine=duplicate_cosine,
        )
    found = online_bank_statuses(store, collection)
    if as_json:
        show_json({"online_banks": [each.to_dict() for each in found]})
        return
    for each in found:
        _show(collection, each)
    if not found:
        out.print(f"{collection!r} has no online bank: turn one on with --rate.")


def _show(collection: str, found: OnlineBankStatus) -> None:
    terms = found.online_bank
    held = f"{found.seed:,} queries it began with and {found.live:,} live ones"
    facts = {
        "bank of": f"{terms.field}, profile {terms.profile}",
        "sampled": f"{terms.rate:.3%} of live queries, into {terms.samples_collection}",
        "waiting": f"{found.waiting:,} of at most {terms.capacity:,}",
        "bank": f"{held}, of at most {terms.size:,}",
        "kept of the first": f"{terms.seed_share:.0%} of the places",
        "half-life": f"{terms.half_life_seconds / HOUR:g} h",
        "the same query": f"cosine above {terms.duplicate_cosine:g}",
    }
    show_facts(collection, facts)
