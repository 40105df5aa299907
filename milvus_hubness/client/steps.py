"""The effects that an operation asks for, the loops that run them, and errors in pymilvus's terms.

pymilvus logs an error with its traceback before it raises it. If a collection was switched to another form
just before, the client sends the request again in that form: the record tells of a failure that is none.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pymilvus.exceptions import ErrorCode, MilvusException

from milvus_hubness.errors import HubnessError, InvalidInput
from milvus_hubness.state import BankReference
from milvus_hubness.stores.milvus import MilvusStore

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


@contextmanager
def held_errors(collection: str) -> Iterator[list[Exception]]:
    """Hold the records back within the block, and yield a list for the errors that it recovers from.

    At its end one record of level INFO stands for those of these errors; all others are logged. If the block
    raises, all are.
    """
    outer, held, recovered = _records.get(), list[logging.LogRecord](), list[Exception]()
    _records.set(held)
    try:
        yield recovered
    except BaseException:
        recovered.clear()
        raise
    finally:
        _records.set(outer)
        for record in held:
            if not any(str(error) in record.getMessage() for error in recovered):
                _pymilvus.handle(record)
        if recovered:
            reason = " ".join(str(getattr(recovered[-1], "message", recovered[-1])).split())
            _log.info(
                "collection %r changed while a request was on its way (%s): the request was sent again",
                collection,
                reason,
            )


@contextmanager
def refusing() -> Iterator[None]:
    """What is raised of ours within is raised as a MilvusException as well."""
    try:
        yield
    except HubnessError as error:
        raise as_milvus(error) from error


_KINDS: dict[type[HubnessError], type[HubnessError]] = {}


def as_milvus(error: HubnessError) -> HubnessError:
    """The same error as a MilvusException as well: of both kinds, with the same message."""
    kind = type(error)
    if issubclass(kind, MilvusException):
        return error
    refusal = _of_both(kind)()
    is_input_error = isinstance(error, InvalidInput)
    MilvusException.__init__(refusal, ErrorCode.UNEXPECTED_ERROR, str(error), is_input_error=is_input_error)
    refusal.args = error.args
    return refusal


def _of_both(kind: type[HubnessError]) -> type[HubnessError]:
    """One class for each of ours, of the same name."""
    if kind not in _KINDS:
        result = {
            "__str__": lambda self: self.message,
            "__module__": kind.__module__,
            "__doc__": kind.__doc__,
        }
        _KINDS[kind] = type(kind.__name__, (kind, MilvusException), result)
    return _KINDS[kind]


T = TypeVar("T")


@dataclass(slots=True)
class Ask:
    """A call of a method of pymilvus's own client."""

    method: str
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadBank:
    """Read a bank from the database: its outcome is a StoredBank."""

    reference: BankReference


@dataclass(frozen=True)
class InStore:
    """Work on the database through a store: its outcome is what that returns."""

    work: Callable[[MilvusStore], Any]


@dataclass(frozen=True)
class Compute:
    """Work long enough to leave an event loop free for others meanwhile."""

    work: Callable[[], Any]


@dataclass(frozen=True)
class Pause:
    """Wait so many seconds."""

    seconds: float


@dataclass(frozen=True)
class LearnSchema:
    """Have pymilvus ask anew for the schema by which it packs a collection's rows. It remembers the former
    while servers before 2.6 do not tell it of a change."""

    collection: str


Step = Ask | LoadBank | InStore | Compute | Pause | LearnSchema
Operation = Generator[Step, Any, T]


def drive(operation: Operation[T], answer: Callable[[Step], Any]) -> T:
    """The operation's result. `answer` answers its steps; what that raises is raised within the operation."""
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
    """As `drive`, where answers are awaited. Whoever else runs meanwhile may drive operations of its own."""
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
