"""The effects of an operation, the loops that run them, and errors as MilvusException.

pymilvus logs an error with its traceback before it raises it. If the format of a collection changed just
before a request, the client recovers from that error and sends the request again. `HeldErrors` removes the
log records of such errors.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from pymilvus import MilvusClient
from pymilvus.exceptions import ErrorCode, MilvusException

from milvus_hubness.errors import HubnessError, InvalidInput
from milvus_hubness.state import BankReference
from milvus_hubness.stores.milvus import MilvusStore
from milvus_hubness.stores.milvus_server import connect

CONNECT_SECONDS = 10.0

_records: ContextVar[list[logging.LogRecord] | None] = ContextVar("held_errors", default=None)
_pymilvus, _log = logging.getLogger("pymilvus.decorators"), logging.getLogger("milvus_hubness")


class _Hold(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        held = _records.get()
        if held is None or record.levelno < logging.ERROR:
            return True
        held.append(record)
        return False


_pymilvus.addFilter(_Hold())


class HeldErrors:
    """Holds back error records of pymilvus in a block.

    The block adds to `recovered` the errors that it recovers from. At its end one record of level INFO
    replaces the records of these errors; all others are logged. If the block raises, all records are logged.
    """

    __slots__ = ("_collection", "_outer", "_records", "recovered")

    def __init__(self, collection: str) -> None:
        self._collection = collection
        self._records: list[logging.LogRecord] = []
        self.recovered: list[Exception] = []

    def __enter__(self) -> HeldErrors:
        self._outer = _records.get()
        _records.set(self._records)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        _records.set(self._outer)
        recovered = self.recovered if kind is None else []
        for record in self._records:
            if not any(str(error) in record.getMessage() for error in recovered):
                _pymilvus.handle(record)
        if recovered:
            reason = " ".join(str(getattr(recovered[-1], "message", recovered[-1])).split())
            _log.info(
                "collection %r changed while a request was on its way (%s): the request was sent again",
                self._collection,
                reason,
            )


@contextmanager
def refusing() -> Iterator[None]:
    """Convert each HubnessError of the block to an error that is also a MilvusException."""
    try:
        yield
    except HubnessError as error:
        raise as_milvus(error) from error


def raising_as_milvus(operation: Operation[T]) -> Operation[T]:
    """Run an operation; its errors are also MilvusExceptions."""
    try:
        return (yield from operation)
    except HubnessError as error:
        raise as_milvus(error) from error


_KINDS: dict[type[HubnessError], type[HubnessError]] = {}


def as_milvus(error: HubnessError) -> HubnessError:
    """Return an error of both types, HubnessError and MilvusException, with the same message."""
    kind = type(error)
    if issubclass(kind, MilvusException):
        return error
    refusal = _of_both(kind)()
    is_input_error = isinstance(error, InvalidInput)
    MilvusException.__init__(refusal, ErrorCode.UNEXPECTED_ERROR, str(error), is_input_error=is_input_error)
    refusal.args = error.args
    return refusal


def _of_both(kind: type[HubnessError]) -> type[HubnessError]:
    """Return one class for each HubnessError class.

    It is a subclass of that class and of MilvusException, with the same name.
    """
    if kind not in _KINDS:
        result = {"__str__": lambda self: self.message, "__module__": kind.__module__, "__doc__": kind.__doc__}
        _KINDS[kind] = type(kind.__name__, (kind, MilvusException), result)
    return _KINDS[kind]


T = TypeVar("T")


@dataclass(slots=True)
class Ask:
    """Call a method of pymilvus's own client."""

    method: str
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadBank:
    """Read a bank from the database; the outcome is a StoredBank."""

    reference: BankReference


@dataclass(frozen=True)
class InStore:
    """Work on the database through a store; the outcome is the value that `work` returns."""

    work: Callable[[MilvusStore], Any]


@dataclass(frozen=True)
class Compute:
    """Run long work outside the event loop."""

    work: Callable[[], Any]


@dataclass(frozen=True)
class Pause:
    """Wait for `seconds`."""

    seconds: float


@dataclass(frozen=True)
class LearnSchema:
    """Make pymilvus fetch again the schema by which it packs a collection's rows.

    pymilvus caches the former schema, because servers before 2.6 do not report a change.
    """

    collection: str


Effect = LoadBank | InStore | Compute | Pause | LearnSchema
Step = Ask | Effect
Operation = Generator[Step, Any, T]


def drive(operation: Operation[T], answer: Callable[[Step], Any]) -> T:
    """Run an operation and return its result.

    answer: runs one step; its exceptions are raised within the operation.
    """
    try:
        step = next(operation)
        while True:
            try:
                outcome = answer(step)
            except Exception as error:
                step = operation.throw(error)
            else:
                step = operation.send(outcome)
    except StopIteration as done:
        result: T = done.value
        return result


async def drive_async(operation: Operation[T], answer: Callable[[Step], Awaitable[Any]]) -> T:
    """Run an operation as `drive` does, with awaited answers. Other tasks may run operations meanwhile."""
    try:
        step = next(operation)
        while True:
            try:
                outcome = await answer(step)
            except Exception as error:
                step = operation.throw(error)
            else:
                step = operation.send(outcome)
    except StopIteration as done:
        result: T = done.value
        return result


class PlainConnection:
    """A plain MilvusClient for stores and query samples, which connects when it is first needed.

    Threads may share it. The arguments are those of MilvusClient.
    """

    def __init__(self, uri: str, *, db_name: str, timeout: float | None, **options: Any) -> None:
        self._connect = partial(connect, uri, timeout=CONNECT_SECONDS if timeout is None else timeout, **options)
        self._database = db_name
        self._client: MilvusClient | None = None
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether it has connected."""
        return self._client is not None

    def client(self) -> MilvusClient:
        """Return the client. Raises ServerUnavailable."""
        with self._lock:
            if self._client is None:
                self._client = self._connect(db_name=self._database)
            return self._client

    def store(self) -> MilvusStore:
        """Return a store over the client."""
        return MilvusStore(self.client())

    def use_database(self, database: str) -> None:
        """Connect to another database from now on."""
        self._database = database
        self.close()

    def close(self) -> None:
        """Close the connection, if there is one."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()
