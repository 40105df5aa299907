"""Vectors that are in the database, in arguments of jobs: the queries of `diagnose`."""

from __future__ import annotations

import inspect

from milvus_hubness.jobs.common.samples import read_from_database
from milvus_hubness.jobs.store.protocols import Store


def read_named(store: Store, arguments: inspect.BoundArguments) -> None:
    """Replace texts that name vectors of the database by these vectors, as a `Recipe` reads its own.

    `queries="collection:NAME"` are the vectors of a
    collection with one vector field. Other texts are names of files, and stay. Raises as
    `read_from_database` does.
    """
    values = arguments.arguments
    collection = values.get("collection")
    if isinstance(collection, str):
        values |= read_from_database(store, values, collection, values.get("field"))
