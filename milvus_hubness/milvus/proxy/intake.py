"""How much of the callers' messages is in memory at a time.

gRPC receives a message whole once the handler reads it, and says nothing of its size before. So
calls take turns to receive, and until then gRPC's flow control holds back all but the first 64 KiB.
Large messages count against a budget until their call ends, and so do the parts that they are made
of: a message of two bytes becomes an object of a hundred.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc

from milvus_hubness.milvus.proxy.endings import CallEnded
from milvus_hubness.milvus.proxy.headers import Metadata
from milvus_hubness.milvus.proxy.wire import count_parts

T = TypeVar("T")

MIB = 1 << 20
"""Bytes of a mebibyte."""

LARGE = 256 << 10
"""Bytes from which on a message counts and is parsed in a thread."""

RECEIVING = 8
"""Calls that receive their message at the same time, half of them of one user."""

ARRIVAL_SECONDS = 60.0
"""Within this time a message arrives: 64 MiB at 9 Mbit/s."""

PART_BYTES = 100
"""Memory of a part of a message; protobuf takes 35 (a text) to 80 (a message)."""

MOST_STREAMS = 32
"""Calls of methods that take a stream of messages, or that Milvus may have tomorrow; their messages
take no turns.
"""

MOST_PARTS = 100_000
MOST_PARTS_OF_WRITES = 1_000_000
"""Parts of a message. Parsing one takes up to 200 ns, in which no other thread runs."""

LARGE_THREADS = 1
"""Threads that parse, rewrite and write large messages.

A second one would only make searches wait longer.
"""


class _Turns(asyncio.Semaphore):
    """The turns of one user. calls: those that have one or wait."""

    calls = 0


class Intake:
    """The messages of one proxy."""

    def __init__(
        self, budget: int, *, large: int = LARGE, arrival_seconds: float = ARRIVAL_SECONDS
    ) -> None:
        self._budget = budget
        """Bytes of large messages that may be in memory."""

        self.large = large
        """Bytes above which a message counts and is parsed in a thread."""

        self._arrival_seconds = arrival_seconds
        """Time within which a message arrives."""

        self._held: Counter[Metadata] = Counter()
        self._total = 0
        self.streams = 0
        """Running calls of `open_stream`."""

        self._turns = asyncio.Semaphore(RECEIVING)
        self._turns_of: dict[Metadata, _Turns] = {}
        self.threads = ThreadPoolExecutor(LARGE_THREADS, "hubness-proxy-large")

    @property
    def held(self) -> int:
        """Bytes of large messages, with their parts."""
        return self._total

    def held_by(self, user: Metadata) -> Held:
        """Return what one more call of this user holds: nothing yet."""
        return Held(self, user)

    async def receive(self, user: Metadata, read: Callable[[], Awaitable[T]]) -> T:
        """Return a user's next message, received in turn. Raises CallEnded."""
        turns = self._turns_of.get(user)
        if turns is None:
            turns = _Turns(RECEIVING // 2)
            self._turns_of[user] = turns
        turns.calls += 1
        try:
            # A user with many calls waits for its own, and not in the way of others.
            async with turns, self._turns:
                return await _in_time(read, self._arrival_seconds)
        finally:
            turns.calls -= 1
            if not turns.calls:
                del self._turns_of[user]

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)

    def take(self, user: Metadata, size: int) -> None:
        """Count `size` more bytes of a user, who may have half the budget. Raises CallEnded."""
        share = self._budget // 2
        if self._held[user] + size > share:
            raise _exhausted("this user has", self._held[user], size, share)
        if self._total + size > self._budget:
            raise _exhausted("all users have", self._total, size, self._budget)

        self._add(user, size)

    def take_answer(self, user: Metadata, size: int, held_by_call: int) -> None:
        """Count an answer to a call that holds that many bytes. Raises CallEnded.

        Where nothing else is held, an answer of any size is passed on.
        """
        if self._total > held_by_call and self._total + size > self._budget:
            raise _exhausted("all users have", self._total, size, self._budget)

        self._add(user, size)

    def open_stream(self) -> None:
        """Count a call that may have many messages. Raises CallEnded."""
        if self.streams == MOST_STREAMS:
            raise CallEnded(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the proxy passes on {MOST_STREAMS} streams of requests, its limit: call again "
                "later",
            )

        self.streams += 1

    def give_back(self, user: Metadata, size: int, *, is_stream: bool) -> None:
        self._add(user, -size)
        self.streams -= is_stream

    def _add(self, user: Metadata, size: int) -> None:
        self._total += size
        self._held[user] += size
        if not self._held[user]:
            del self._held[user]


def _exhausted(who: str, held: int, size: int, limit: int) -> CallEnded:
    return CallEnded(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"{who} {held / MIB:.0f} of {limit / MIB:.0f} MiB for large messages in the proxy, and "
        f"this call needs {size / MIB:.0f} more: call again later, send less at once, or start "
        "the proxy with a larger --max-in-flight-mib",
    )


class Held:
    """What one call holds in memory."""

    def __init__(self, intake: Intake, user: Metadata) -> None:
        self._intake = intake
        self._user = user
        self.size = 0
        self.is_large = False
        self._is_stream = False

    def open_stream(self) -> None:
        """Count a call that may have many messages. Raises CallEnded."""
        self._intake.open_stream()
        self._is_stream = True

    def give_back(self) -> None:
        """Hold nothing any more: the call has ended."""
        self._intake.give_back(self._user, self.size, is_stream=self._is_stream)
        self.size = 0
        self._is_stream = False

    async def receive(self, read: Callable[[], Awaitable[Any]]) -> Any:
        """Return the next message of a call, or gRPC's end of messages. Raises CallEnded."""
        message = await self._intake.receive(self._user, read)
        self.count(message)
        return message

    def count(self, message: Any) -> None:
        """Count a message that has arrived. Raises CallEnded if it is too much."""
        if isinstance(message, bytes) and len(message) > self._intake.large:
            self.is_large = True
            self._take(len(message))

    def count_answer(self, answer: bytes) -> None:
        """Count an answer of Milvus, which may be larger than any request. Raises CallEnded."""
        if len(answer) > self._intake.large:
            self._intake.take_answer(self._user, len(answer), held_by_call=self.size)
            self.size += len(answer)

    def count_parts(self, parts: int) -> None:
        """Count the objects that parsing will make. Raises CallEnded."""
        self._take(parts * PART_BYTES)

    def _take(self, size: int) -> None:
        self._intake.take(self._user, size)
        self.size += size


async def _in_time(read: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Return what arrives within that time. Raises CallEnded."""
    task = asyncio.current_task()
    expired: list[bool] = []

    def expire() -> None:
        expired.append(True)
        if task is not None:
            task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, expire)
    try:
        return await read()
    except asyncio.CancelledError:
        if not expired:
            raise

        reason = f"the message did not arrive within {seconds:.0f} s"
        # Not the caller's cancellation, but the timer's: the call ends with a reason.
        raise CallEnded(grpc.StatusCode.RESOURCE_EXHAUSTED, reason) from None
    finally:
        timer.cancel()


def expect_few_parts(method: str, descriptor: Any, message: bytes, most: int) -> int:
    """Return the number of parts of a message. Raises CallEnded for more than `most`."""
    parts = count_parts(descriptor, message, most)
    if parts > most:
        raise CallEnded(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"a request of {method} may have {most:,} parts (names, texts, parameters, queries), "
            "and this one has more: send it in several calls",
        )

    return parts
