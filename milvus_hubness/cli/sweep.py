"""The command milvus-hubness sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from milvus_hubness.cli import console, options

if TYPE_CHECKING:
    from milvus_hubness.jobs.refresh.sweep import Leftovers


def sweep(
    collection: Annotated[
        str, typer.Argument(help="Collection, also a former one, or an alias of it; it stays.")
    ],
    connection: options.Connection,
    yes: Annotated[bool, "Remove; without it, only show what would be removed."] = False,
    as_json: options.AsJson = False,
) -> None:
    """Remove all that the correction of a collection has left and nothing uses any more.

    These are former copies after refreshes, copies after a rollback, biases in payloads after disable,
    banks, properties and records.

    Example: milvus-hubness sweep products --yes
    """
    from milvus_hubness.jobs.refresh import sweep as sweeping

    store = connection.open()
    leftovers = sweeping.leftovers(store, collection)
    if leftovers and not yes:
        result = {"would_remove": leftovers.to_dict()}
        console.show_result(as_json, {"sweep": result}, lambda: _show_preview(leftovers))
        return
    if leftovers:
        leftovers = sweeping.sweep(store, collection)

    title = "Removed" if leftovers else f"{collection} has no leftovers"
    result = {"removed": leftovers.to_dict()}
    console.show_result(
        as_json, {"sweep": result}, lambda: console.show_facts(title, _facts(leftovers))
    )


SAMPLES_CAN_BE_WRITTEN = (
    "The sampled queries of a copy go with it: milvus-hubness bank export COPY FILE writes them to a "
    "file first, and migrate clean --drop COPY --keep-samples leaves them."
)


def _show_preview(leftovers: Leftovers) -> None:
    console.show_facts("Would be removed for good", _facts(leftovers))
    if leftovers.samples:
        console.say(f"\n{SAMPLES_CAN_BE_WRITTEN}")
    console.say("\nNothing was removed. Repeat the command with --yes to remove it.")


def _facts(leftovers: Leftovers) -> dict[str, object]:
    keys = [f"{key} of {count:,} rows" for key, count in leftovers.keys.items()]
    return {
        "copies": ", ".join(leftovers.copies),
        "query samples": ", ".join(
            f"{name}, {count:,} queries" for name, count in leftovers.samples.items()
        ),
        "keys in payloads": ", ".join(keys),
        "properties": ", ".join(leftovers.properties),
        "banks": ", ".join(leftovers.banks),
        "records of": ", ".join(leftovers.records),
        "stays": "\n".join(f"{name}: {why}" for name, why in leftovers.staying.items()),
    }
