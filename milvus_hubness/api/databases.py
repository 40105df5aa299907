"""What users have in hand for a database: a client, an address, or a store."""

from __future__ import annotations

import inspect
import os
import re
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeAlias, TypeVar

from milvus_hubness.basics.files.certificates import NO_CERTIFICATES, Certificates
from milvus_hubness.basics.requirements import install_line_of
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.jobs.store.protocols import Store

if TYPE_CHECKING:
    from pymilvus import MilvusClient

Database: TypeAlias = "Store | MilvusClient | str | os.PathLike[str]"
"""A MilvusClient, a HubnessClient, a store, or the address of a database: see `open_store`."""

STORES = "milvus_hubness.stores"
"""The group of entry points by which a package offers a database: `NAME = "MODULE:FUNCTION"`. The
function takes an address without `NAME+`, a token, empty if there is none, and an ssl.SSLContext
for TLS, None for the usual one, and returns the Store.
"""

PACKAGES = {"qdrant": ("qdrant-hubness", "integrations/qdrant")}
"""The package that offers a database, where it is known without it, and its folder in a clone."""

_OF_A_PACKAGE = re.compile(r"(?P<name>[a-z][a-z0-9]*)\+(?P<address>(?P<scheme>[a-z]+)://.*)")
"""An address of a database that a package offers, such as qdrant+http://localhost:6333."""

Opener: TypeAlias = "Callable[[str, Certificates], Store]"
"""Opens the store of an address with a token and certificates."""

P = ParamSpec("P")
R = TypeVar("R")


def of_database(job: Callable[Concatenate[Store, P], R]) -> Callable[Concatenate[Database, P], R]:
    """Return a job that takes any `Database` in place of its store, which it makes of it.

    The first argument is positional. What the job opens it closes again.
    """

    @wraps(job)
    def call(database: Database, /, *arguments: P.args, **named: P.kwargs) -> R:
        with store_of(database) as store:
            return job(store, *arguments, **named)

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
    client with that token, or a store. Other objects are yielded as they are, for the job to
    refuse. Raises as `open_store` does, and InvalidInput for a client that no job can use.
    """
    if isinstance(database, str | os.PathLike):
        store = open_store(os.fspath(database))
        try:
            yield store
        finally:
            store.close()
        return

    # By its name: whoever passes a store of another database needs no pymilvus.
    if "MilvusClient" in {base.__name__ for base in type(database).__mro__}:
        from milvus_hubness.milvus.store.milvus_store import MilvusStore

        yield MilvusStore(database)
        return
    yield database


def open_store(
    address: str,
    token: str = "",
    certificates: Certificates = NO_CERTIFICATES,
) -> Store:
    """Return the store of an address.

    address: of a Milvus server, with /DATABASE at its end for another than the default one, the path
    of a Milvus Lite .db file, or NAME+ADDRESS of a database that another package offers, such as
    qdrant+http://localhost:6333 or qdrant+file://FOLDER.
    token: empty for none. certificates: for TLS with an authority of your own, or with a
    certificate of the client.

    Raises InvalidParameter for an invalid address, for one whose package is not installed, and for
    certificates of an address without TLS,
    ServerUnavailable, and MissingExtra without Milvus Lite.
    """
    return opener_of(address)(token, certificates)


def opener_of(address: str) -> Opener:
    """Return a function that opens the store of an address.

    The libraries of the database are imported by then. Raises InvalidParameter for an address whose
    package is not installed.
    """
    matched = _OF_A_PACKAGE.fullmatch(address)
    if matched is not None:
        return _opener_in(matched["name"], matched["scheme"], matched["address"])

    from milvus_hubness.milvus.store.milvus_store import MilvusStore
    from milvus_hubness.milvus.store.server import connect, tls_options

    return lambda token, certificates: MilvusStore(
        connect(address, token, **tls_options(address, certificates))
    )


def _opener_in(name: str, scheme: str, address: str) -> Opener:
    """Return a function that opens a store by the entry point of that name. Raises InvalidParameter."""
    entry = next(iter(entry_points(group=STORES, name=name)), None)
    if entry is None:
        remedy = "install the package that offers it"
        if name in PACKAGES:
            remedy = install_line_of(*PACKAGES[name])
        raise InvalidParameter(f"no store for '{name}+{scheme}': {remedy}")

    function: Callable[[str, str, ssl.SSLContext | None], Store] = entry.load()

    def open_by(token: str, certificates: Certificates) -> Store:
        certificates.expect_https(address)
        context = certificates.context() if certificates else None
        return function(address, token, context)

    return open_by
