"""Vectors that are in the database, in arguments of looks: of samples, and of another collection."""

from __future__ import annotations

import inspect

from milvus_hubness.jobs.common.recipe import VECTORS
from milvus_hubness.jobs.common.samples import is_in_database, vectors_in
from milvus_hubness.jobs.store.protocols import Store


def read_named(store: Store, arguments: inspect.BoundArguments) -> None:
    """Replace texts that name vectors of the database by these vectors, as a `Recipe` reads its own.

    `bank="samples"` are the queries that clients sampled, and "collection:NAME" the vectors of a
    collection with one vector field. Other texts are names of files, and stay. Raises as
    `vectors_in` does.
    """
    named = arguments.arguments
    collection = named.get("collection")
    if not isinstance(collection, str):
        return
    for name in VECTORS:
        text = named.get(name)
        if isinstance(text, str) and is_in_database(text, as_bank=name == "bank"):
            named[name] = vectors_in(store, text, collection, named.get("field"))
