"""The command milvus-hubness adopt."""

from __future__ import annotations

from typing import Annotated

import typer

from milvus_hubness.cli import console, options


def adopt(
    collection: Annotated[
        str, typer.Argument(help="Corrected collection, under its present name.")
    ],
    renamed_from: Annotated[
        str, "Its former name, from which the names of its helper collections are derived."
    ],
    connection: options.Connection,
    as_json: options.AsJson = False,
) -> None:
    """Keep the helper collections of a collection that was renamed without HubnessClient.

    These are its side collection, its bank and its query samples. Clients and jobs do not use them
    until then: anybody who may change the collection's properties could have named them.

    Example: milvus-hubness adopt products_2026 --renamed-from products
    """
    from milvus_hubness.jobs.common.adopt import adopt

    adopted = adopt(connection.open(), collection, renamed_from=renamed_from)
    data = {"adopt": {"collection": collection, "helpers": adopted}}
    facts = {
        "helper collections": ", ".join(adopted) or "none with a name derived from the former one"
    }
    console.show_result(
        as_json, data, lambda: console.show_facts(f"Adopted by {collection}", facts)
    )
