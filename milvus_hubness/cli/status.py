"""milvus-hubness status"""

from __future__ import annotations

from typing import Annotated

import typer

from milvus_hubness import jobs
from milvus_hubness.cli.console import (
    DEFAULT_URI,
    AsJson,
    Database,
    TokenFile,
    Uri,
    open_store,
    show_facts,
    show_json,
)
from milvus_hubness.cli.estimator_options import describe
from milvus_hubness.jobs.migration.steering import CLIENT_TTL
from milvus_hubness.operations.lease import holder_of


def status(
    collection: Annotated[str, typer.Argument(help="Collection or alias.")],
    field: Annotated[str | None, typer.Option(help="Corrected field, where there are several.")] = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Repair the rows that a killed job left, as the next refresh would."),
    ] = False,
    client_ttl: Annotated[
        float, typer.Option(help="With --repair: the longest state_ttl of a HubnessClient that writes.")
    ] = CLIENT_TTL,
    uri: Uri = DEFAULT_URI,
    db: Database = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Tell whether a collection is corrected, how, and how fresh its biases are."""
    store = open_store(uri, db, token_file)
    repaired = jobs.repair(store, collection, client_ttl=client_ttl) if repair else None
    found = jobs.status(store, collection, field=field)
    holder = holder_of(store, found.collection)
    if as_json:
        lease = holder.model_dump(mode="json", include={"token", "owner", "expires_at"}) if holder else None
        show_json({"status": {**found.to_dict(), "lease": lease, "repaired": repaired}})
        return
    facts: dict[str, object] = {
        "corrected": "yes" if found.corrected else "no",
        "rows": f"{found.rows:,}",
        "aliases": ", ".join(found.aliases),
        "at work": holder,
        "repaired": f"{repaired:,} rows" if repair else None,
        "write intents": f"{found.write_intents:,} rows in memory" if found.write_intents else None,
        "batches": f"{found.open_batches} open: a job is at work, or was killed (repair with --repair)"
        if found.open_batches
        else None,
    }
    if found.corrected and found.estimator and found.bank and found.age_seconds is not None:
        facts |= {
            "phase": found.phase,
            "copied from": found.source if found.where == "vectors" and not found.second_vector else None,
            "field": f"{found.field}, {found.dim}-d {found.metric}, stored {found.width} wide",
            "biases": _place(found),
            "estimator": f"{describe(found.estimator)}, strength {found.strength}",
            "profiles": ", ".join(found.profiles) if len(found.profiles) > 1 else None,
            "corrected fields": ", ".join(found.fields) if len(found.fields) > 1 else None,
            "bank": f"{found.bank['collection']}, {found.bank['count']:,} queries, "
            f"{found.bank['fingerprint'][:19]}",
            "rows without bias": f"{found.pending:,}",
            "last refresh": f"{_age(found.age_seconds)} ago ({found.refreshed_at}), epoch {found.epoch}",
        }
    show_facts(found.collection, facts)


def _place(found: jobs.Status) -> str:
    if found.second_vector:
        return f"in {found.second_vector}, a second vector field"
    if found.missed is None:
        return "in the vectors"
    place = f"in {found.side}, beside the vectors" if found.side else "in fields beside the vectors"
    return f"{place}; {found.candidates} candidates a search miss {100 * found.missed:.1f}% of the top 10"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
