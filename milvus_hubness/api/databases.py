"""What users have in hand for a database: a client, an address, or a store."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeAlias, TypeVar

from milvus_hubness.api.banks import read_named
from milvus_hubness.jobs.store.protocols import Store

if TYPE_CHECKING:
    from pymilvus import MilvusClient

Database: TypeAlias = "Store | MilvusClient | str | os.PathLike[str]"
"""A MilvusClient, a HubnessClient, the URI of a server, the path of a Milvus Lite .db file, or a
store."""

P = ParamSpec("P")
R = TypeVar("R")


def of_database(job: Callable[Concatenate[Store, P], R]) -> Callable[Concatenate[Database, P], R]:
    """Return a job that takes any `Database` in place of its store, which it makes of it.

    The first argument is positional. What the job opens it closes again. Banks may be in the
    database: see `read_named`.
    """

    @wraps(job)
    def call(database: Database, /, *arguments: P.args, **named: P.kwargs) -> R:
        with store_of(database) as store:
            bound = signature.bind(store, *arguments, **named)
            read_named(store, bound)
            return job(*bound.args, **bound.kwargs)

    signature = inspect.signature(job)
    # What `help` and notebooks show, as the stub says it to type checkers.
    _, *others = signature.parameters.values()
    first = inspect.Parameter("database", inspect.Parameter.POSITIONAL_ONLY, annotation="Database")
    call.__signature__ = signature.replace(parameters=[first, *others])  # type: ignore[attr-defined]
    return call


@contextmanager
def store_of(database: Database) -> Iterator[Store]:
    """Yield the store of a database.

    A connection is opened to an address, and closed at the end; a server that wants a token needs a
    MilvusClient with that token. Other objects are yielded as they are, for the job to refuse.
    Raises ServerUnavailable, InvalidParameter for an invalid address, and InvalidInput for a client
    that no job can use.
    """
    is_address = isinstance(database, str | os.PathLike)
    # By its name: whoever passes a store of another database needs no pymilvus.
    names = {base.__name__ for base in type(database).__mro__}
    if not is_address and "MilvusClient" not in names:
        yield database  # type: ignore[misc]
        return

    from milvus_hubness.milvus.store.milvus_store import MilvusStore
    from milvus_hubness.milvus.store.server import connect

    if not is_address:
        yield MilvusStore(database)
        return
    client = connect(os.fspath(database))  # type: ignore[arg-type]
    try:
        yield MilvusStore(client)
    finally:
        client.close()
