"""What an operation asks of the outside world, and the loops that answer it. An operation is a generator: it
yields steps, is sent their outcomes, and returns what the caller gets. So one truth serves every client."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from milvus_hubness.state import BankReference

T = TypeVar("T")


@dataclass(frozen=True)
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
class Compute:
    """Work long enough to leave an event loop free for others meanwhile."""

    work: Callable[[], Any]


Step = Ask | LoadBank | Compute
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
