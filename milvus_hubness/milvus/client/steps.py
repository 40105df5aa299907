"""Steps of an operation, the limits of a client, its plain connection, errors as MilvusException.

An operation is a generator: it yields what it needs of the outside world as a step, and is resumed
with the outcome. So it does no I/O itself, and the same operation runs in HubnessClient (`sync`),
in AsyncHubnessClient (`aio`) and in the proxy (`proxy.sessions`), each of which runs steps its own
way. CONTRIBUTING.md has a drawing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pymilvus import MilvusClient
from pymilvus.exceptions import ErrorCode, ExceptionsMessage, MilvusException

from milvus_hubness.clients.steps import CUT_OVER_SECONDS, Ask, Compute, Pause
from milvus_hubness.errors import HubnessError, InvalidInput
from milvus_hubness.milvus.store.server import connect

if TYPE_CHECKING:
    from milvus_hubness.correction.state import BankReference
    from milvus_hubness.milvus.store.milvus_store import MilvusStore

CONNECT_SECONDS = 10.0
"""Time limit of a connection, unless the user gives one."""


@dataclass(frozen=True)
class ClientPolicy:
    """Waits of a client, and what it assumes of the server."""

    cut_over_seconds: float = CUT_OVER_SECONDS
    """Longest wait for a collection whose name moves to its copy."""


@contextmanager
def refusing() -> Iterator[None]:
    """Convert each HubnessError of the block to an error that is also a MilvusException."""
    try:
        yield
    except HubnessError as error:
        raise as_milvus(error) from error


_KINDS: dict[type[HubnessError], type[HubnessError]] = {}
"""The classes that `as_milvus` has made, by the class of the error."""


def as_milvus(error: HubnessError) -> HubnessError:
    """Return the error as an instance of its own class and of MilvusException.

    It has the same name, message and attributes, so that programs can catch either class.
    """
    kind = type(error)
    if issubclass(kind, MilvusException):
        return error

    if kind not in _KINDS:
        members = {
            "__str__": lambda self: self.message,
            "__module__": kind.__module__,
            "__doc__": kind.__doc__,
        }
        _KINDS[kind] = type(kind.__name__, (kind, MilvusException), members)

    refusal = _KINDS[kind]()
    is_input_error = isinstance(error, InvalidInput)
    MilvusException.__init__(
        refusal, ErrorCode.UNEXPECTED_ERROR, str(error), is_input_error=is_input_error
    )
    vars(refusal).update(vars(error))
    refusal.args = error.args
    return refusal


T = TypeVar("T")


@dataclass(frozen=True)
class LoadBank:
    """Read a bank from the database; the outcome is a StoredBank.

    Not a case of InStore, because tasks of one client that need the same bank wait for one reading.
    """

    reference: BankReference


@dataclass(frozen=True)
class InStore:
    """Work on the database through a store; the outcome is the value that `work` returns.

    A store has a connection of its own, which opens with the first such step.
    """

    work: Callable[[MilvusStore], Any]


@dataclass(frozen=True)
class LearnSchema:
    """Make pymilvus read the schema of a collection again.

    pymilvus caches schemas, and servers before 2.6 do not report a change.
    """

    collection: str


Effect = LoadBank | InStore | Compute | Pause | LearnSchema
"""Steps that are no request of the user's own client."""
Step = Ask | Effect
Operation = Generator[Step, Any, T]
"""Yields steps, is resumed with their outcomes or errors, and returns its result."""


class PlainConnection:
    """A plain MilvusClient for stores and query samples, which connects when first needed, and never
    again once it was closed.

    Threads may share it.
    """

    def __init__(self, uri: str, db_name: str, timeout: float | None, **options: Any) -> None:
        timeout = CONNECT_SECONDS if timeout is None else timeout
        # The client itself has created the database, if there was none.
        self._connect = partial(connect, uri, timeout=timeout, create=True, **options)
        self._database = db_name
        self._client: MilvusClient | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def client(self) -> MilvusClient:
        """Return the client. Raises ServerUnavailable, and MilvusException, as pymilvus does, once it
        was closed: a thread that is still at work would open a connection that nobody closes.
        """
        with self._lock:
            if self._is_closed:
                raise MilvusException(message=ExceptionsMessage.ConnectFirst)
            if self._client is None:
                self._client = self._connect(db_name=self._database)
            return self._client

    def store(self) -> MilvusStore:
        from milvus_hubness.milvus.store.milvus_store import MilvusStore

        return MilvusStore(self.client())

    def use_database(self, database: str) -> None:
        self._database = database
        self._disconnect()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        with self._lock:
            client = self._client
            self._client = None
        if client is not None:
            client.close()
