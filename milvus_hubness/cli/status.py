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


def status(
    collection: Annotated[str, typer.Argument(help="Collection or alias.")],
    field: Annotated[str | None, typer.Option(help="Corrected field, where there are several.")] = None,
    uri: Uri = DEFAULT_URI,
    db: Database = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Tell whether a collection is corrected, how, and how fresh its biases are."""
    found = jobs.status(open_store(uri, db, token_file), collection, field=field)
    if as_json:
        show_json({"status": found.to_dict()})
        return
    facts: dict[str, object] = {
        "corrected": "yes" if found.corrected else "no",
        "rows": f"{found.rows:,}",
        "aliases": ", ".join(found.aliases),
    }
    if found.corrected and found.estimator and found.bank and found.age_seconds is not None:
        facts |= {
            "phase": found.phase,
            "copied from": found.source if found.where == "vectors" and not found.stored_in else None,
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
    if found.stored_in:
        return f"in {found.stored_in}, a second vector field"
    if found.missed is None:
        return "in the vectors"
    place = f"in {found.side}, beside the vectors" if found.side else "in fields beside the vectors"
    return f"{place}; {found.candidates} candidates a search miss {100 * found.missed:.1f}% of the top 10"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
