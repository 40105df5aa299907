"""Operations, and the steps that those of every database have.

An operation is a generator: it yields what it needs of the outside world as a step, and is resumed
with the outcome. So it does no I/O itself, and the same operation runs in a synchronous and in an
asynchronous client, each of which runs steps its own way. A client of a database adds its requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

CUT_OVER_SECONDS = 5.0
"""Longest time, in seconds, for which a name moves to a copy, and for which a former copy serves on
after the states that lead to it have expired.
"""

Operation = Generator[Any, Any, T]
"""Yields steps, is resumed with their outcomes or errors, and returns its result."""


@dataclass(slots=True)
class Ask:
    """Call a method of the database's own client; the outcome is its answer."""

    method: str
    """The name of the method."""
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments by name."""


@dataclass(frozen=True)
class Compute:
    """Run long work outside the event loop; the outcome is the value that `work` returns."""

    work: Callable[[], Any]


@dataclass(frozen=True)
class Pause:
    """Wait for `seconds`, without a thread in asyncio."""

    seconds: float


def drive(operation: Operation[Any], answer: Callable[[Any], Any]) -> Any:
    """Run an operation and return its result.

    answer: runs one step and returns its outcome. The operation receives its exceptions, and is closed
    by what is no `Exception`, such as KeyboardInterrupt: what it undoes, it undoes then, and not when
    Python drops the generator.
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
        return done.value
    finally:
        operation.close()


async def drive_async(operation: Operation[Any], answer: Callable[[Any], Awaitable[Any]]) -> Any:
    """Run an operation as `drive` does, with awaited answers. Other tasks may run meanwhile.

    A task that is cancelled closes its operation.
    """
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
        return done.value
    finally:
        operation.close()
