"""What an operation asks of the outside world, and the loops that answer it. An operation is a generator: it
yields steps, is sent their outcomes, and returns what the caller gets. So one truth serves every client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from milvus_hubness.state import BankReference
from milvus_hubness.stores.milvus import MilvusStore

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
