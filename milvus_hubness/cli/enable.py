"""The commands milvus-hubness enable and disable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from milvus_hubness.basics.defaults import MAX_MISS_RATE
from milvus_hubness.cli import console, options


def enable(
    collection: Annotated[
        str, typer.Argument(help="Collection to correct; its vectors stay as they are.")
    ],
    planning: options.CorrectionOptions,
    connection: options.Connection,
    max_miss_rate: Annotated[
        float, "Share of the exact corrected top 10 that candidates may miss."
    ] = MAX_MISS_RATE,
    plan: Annotated[bool, "Show the plan and the measured miss rate; write nothing."] = False,
    as_json: options.AsJson = False,
) -> None:
    """Correct a collection without a copy: searches fetch more candidates and re-rank them.

    --plan shows first the verdict on the bank, where the biases would go, and what searches would
    miss. Exits with 3, and writes nothing, if the verdict is to leave the collection alone.

    Example: milvus-hubness enable products --bank queries.npy --plan
    """
    from milvus_hubness.jobs.common.lease import expect_free
    from milvus_hubness.jobs.enable.enable import enable
    from milvus_hubness.jobs.enable.plan import Beside
    from milvus_hubness.jobs.plan import plan_correction

    planning.require(connection, collection, planning.field)
    store = connection.open()
    if not plan:
        # Before the plan, which takes a while and would be printed.
        expect_free(store, store.info(collection, counted=False).name)
    with console.progress_bars() as progress:
        planned = plan_correction(
            store,
            collection,
            planning.recipe_for(store, collection),
            Beside(max_miss_rate),
            field=planning.field,
            bank_collection=planning.bank_name,
            progress=progress,
        )
        data: dict[str, Any] = {"plan": planned.to_dict()}
        # Before the first write, so that a user who does not like it can still interrupt.
        if not as_json:
            show_enable_plan(data["plan"])

        if not plan:
            done = enable(store, planned, progress=progress)
            data["enable"] = done.to_dict()

    if as_json:
        console.show_json(data)
    elif plan:
        console.say("\nNothing was written. The same command without --plan does it.")
    else:
        show_enabled(data["enable"])


def disable(
    collection: Annotated[str, typer.Argument(help="Collection that was enabled.")],
    connection: options.Connection,
    field: options.Field = None,
    as_json: options.AsJson = False,
) -> None:
    """Undo enable: searches are raw again and the side collection is dropped.

    The bank stays.

    Example: milvus-hubness disable products
    """
    from milvus_hubness.jobs.enable.disable import disable

    store = connection.open()
    dropped = disable(store, collection, field=field)
    data = {"disable": {"collection": collection, "dropped": dropped}}
    text = {"corrected": "no", "dropped": dropped}
    console.show_result(as_json, data, lambda: console.show_facts(f"Disabled {collection}", text))


def _biases_beside(sides: Sequence[str]) -> str:
    """Return where biases beside the rows are, in words."""
    if not sides:
        return "keys of the payloads"
    word = "collection" if len(sides) == 1 else "collections"
    return f"{word} {' and '.join(sides)}, with the same keys"


def show_enable_plan(plan: dict[str, Any]) -> None:
    """Print the facts of a plan."""
    facts: dict[str, object] = {
        "vector field": f"{plan['field'] or console.UNNAMED}, {plan['metric']}, not changed",
        "rows": f"{plan['rows']:,}",
    }
    facts["biases"] = _biases_beside(plan["side_collections"])
    facts["candidates"] = f"{plan['candidates']} a search"

    # Up to the first number of candidates that misses nothing: more miss nothing either.
    shares = list(plan["missed"].values())
    until = shares.index(0) + 1 if 0 in shares else None
    missed = ", ".join(
        f"{share:.1%} beyond {number}" for number, share in list(plan["missed"].items())[:until]
    )
    queries = f"mean over {plan['measured_queries']:,} queries"
    facts["missed"] = f"of the exact corrected top 10: {missed} candidates ({queries})"

    facts |= {**console.bank_words(plan), "note": "\n".join(plan["remarks"])}
    console.show_facts(f"Correction of {plan['source']} in place", facts)


def show_enabled(result: dict[str, Any]) -> None:
    """Print what an enable has done."""
    facts = {"corrected": "{collection}, {rows:,} rows have a bias".format(**result)}
    facts["biases"] = _biases_beside([side] if (side := result["side_collection"]) else [])
    facts["candidates"] = "{candidates} a search, which miss {missed:.1%}".format(**result)
    facts |= {"bank": result["bank"], "took": f"{result['seconds']} s"}
    console.show_facts("\nDone", facts)
