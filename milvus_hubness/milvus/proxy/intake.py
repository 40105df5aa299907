"""How much is in memory for the callers at a time: their calls, requests and answers.

gRPC receives a message whole once the handler reads it, and says nothing of its size before. So
calls take turns to receive, and until then gRPC's flow control holds back all but the first 64 KiB.
Messages count against a budget until their call ends, and so do the parts that they are made of: a
message of two bytes becomes an object of a hundred. A call ends when its answer has been taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from time import monotonic
from typing import Any

import grpc

from milvus_hubness.milvus.proxy.connections import Connection
from milvus_hubness.milvus.proxy.endings import CallEnded
from milvus_hubness.milvus.proxy.headers import Identity
from milvus_hubness.milvus.proxy.options import CALLS_OF_USER
from milvus_hubness.milvus.proxy.shares import Shares, Shortage
from milvus_hubness.milvus.proxy.turns import Turns
from milvus_hubness.milvus.proxy.wire import count_parts

MIB = 1 << 20
"""Bytes of a mebibyte."""

LARGE = 256 << 10
"""Bytes from which on a message is parsed in a thread."""

RECEIVING = 8
"""Calls that receive their message at the same time."""

RECEIVING_OF_USER = 2
"""Those of one user."""

ARRIVAL_SECONDS = 20.0
"""Within this time a message arrives: 64 MiB at 27 Mbit/s."""

ANSWERS_OF_USER = 2
"""Answers of Milvus to calls of one user that arrive at the same time."""

TAKING_SECONDS = 10.0
"""Within this time a client takes an answer, and a second more for each BYTES_A_SECOND."""

BYTES_A_SECOND = 1 << 20

ROOM_SECONDS = 5.0
"""Longest wait of an answer until the client has taken others."""

ROOM_CHECK_SECONDS = 0.05
"""Between two looks."""

COPIES = 2
"""An answer that is not taken is in memory twice: Python's bytes, and gRPC's."""

SMALL_ANSWER = 4 << 10
"""Bytes of an answer that no shortage keeps back: the call may have begun something, as an import."""

PART_BYTES = 100
"""Memory of a part of a message; protobuf takes 35 (a text) to 80 (a message)."""

USERS = 4
"""So many users with all the calls that one may have are the most."""

ASSURED_CALLS = 64
"""Calls that a user may have however many others have."""

MOST_STREAMS = 32
"""Calls of methods that take a stream of messages, or that Milvus may have tomorrow, of which a
user may have half; their messages take no turns.
"""

ASSURED_STREAMS = 2

ASSURED_SHARE = 64
"""A user may have this part of the budget however much others have: 4 of 256 MiB."""

MOST_PARTS = 100_000
MOST_PARTS_OF_WRITES = 1_000_000
"""Parts of a message. Parsing one takes up to 200 ns, in which no other thread runs."""

LARGE_THREADS = 1
"""Threads that parse, rewrite and write large messages.

A second one would only make searches wait longer.
"""


class Intake:
    """The calls of one proxy, and their messages."""

    def __init__(
        self,
        budget: int,
        calls_of_user: int = CALLS_OF_USER,
        *,
        large: int = LARGE,
        arrival_seconds: float = ARRIVAL_SECONDS,
        taking_seconds: float = TAKING_SECONDS,
    ) -> None:
        self.large = large
        """Bytes above which a message is parsed in a thread."""

        self.taking_seconds = taking_seconds
        self.calls = Shares(USERS * calls_of_user, calls_of_user, ASSURED_CALLS)
        self.streams = Shares(MOST_STREAMS, MOST_STREAMS // 2, ASSURED_STREAMS)
        self.bytes = Shares(budget, budget // 2, budget // ASSURED_SHARE)
        self.turns = Turns(RECEIVING, RECEIVING_OF_USER, arrival_seconds)
        self.threads = ThreadPoolExecutor(LARGE_THREADS, "hubness-proxy-large")
        self._answers: dict[Identity, _AnswerTurns] = {}

    @property
    def held(self) -> int:
        """Bytes of messages, with their parts."""
        return self.bytes.held

    def held_by(self, user: Identity, connection: Connection) -> Held:
        """Return what one more call of this user holds. Raises CallEnded."""
        if shortage := self.calls.shortage(user, 1):
            raise CallEnded(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{shortage.who} {shortage.held:,} calls in the proxy, the limit is "
                f"{shortage.limit:,}: call again later, or call less at once",
            )

        return Held(self, user, connection)

    @asynccontextmanager
    async def answering(self, user: Identity) -> AsyncIterator[None]:
        """Take a turn to receive one of Milvus's answers to this user's calls."""
        turns = self._answers.setdefault(user, _AnswerTurns(ANSWERS_OF_USER))
        turns.calls += 1
        try:
            async with turns:
                yield
        finally:
            turns.calls -= 1
            if not turns.calls:
                del self._answers[user]

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)


class _AnswerTurns(asyncio.Semaphore):
    """The turns of one user. calls: those that have one or wait."""

    calls = 0


def _exhausted(shortage: Shortage, size: int) -> CallEnded:
    return CallEnded(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"{shortage.who} {shortage.held / MIB:.0f} of {shortage.limit / MIB:.0f} MiB for messages "
        f"in the proxy, and this call needs {size / MIB:.0f} more: take the answers, call again "
        "later, send less at once, or start the proxy with a larger --max-in-flight-mib",
    )


class Held:
    """What one call holds in memory."""

    def __init__(self, intake: Intake, user: Identity, connection: Connection) -> None:
        self._intake = intake
        self._user = user
        self._connection = connection
        self.size = 0
        self.is_large = False
        self._is_stream = False
        self._has_ended = False
        self._taking: asyncio.TimerHandle | None = None
        intake.calls.add(user, 1)
        connection.begin(user)

    def open_stream(self) -> None:
        """Count a call that may have many messages. Raises CallEnded."""
        if shortage := self._intake.streams.shortage(self._user, 1):
            raise CallEnded(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{shortage.who} {shortage.held} streams of requests in the proxy, the limit is "
                f"{shortage.limit}: call again later",
            )

        self._intake.streams.add(self._user, 1)
        self._is_stream = True

    def end(self) -> None:
        """Hold nothing any more: the call has ended, and its answer has been taken."""
        if self._has_ended:
            return

        self._has_ended = True
        self.hold(0)
        self._taken()
        self._intake.calls.add(self._user, -1)
        self._intake.streams.add(self._user, -int(self._is_stream))
        self._connection.end()

    async def receive(self, read: Callable[[], Awaitable[Any]]) -> Any:
        """Return the message of a call, or gRPC's end of messages. Raises CallEnded."""
        message = await self._intake.turns.receive(self._user, read)
        self.count(message)
        return message

    def count(self, message: Any) -> None:
        """Count a message that has arrived. Raises CallEnded if it is too much."""
        if isinstance(message, bytes):
            self.is_large = self.is_large or len(message) > self._intake.large
            self._take(len(message))

    def count_answer(self, size: int) -> None:
        """Count an answer of Milvus, which may be larger than any request. Raises CallEnded.

        Where nothing else is held, an answer of any size is passed on, and a small one always.
        """
        held = COPIES * size
        shortage = self._intake.bytes.shortage(self._user, held)
        if shortage and size > SMALL_ANSWER and self._intake.held > self.size:
            raise _exhausted(shortage, held)

        self.hold_answer(size)

    def hold_answer(self, size: int) -> None:
        """Count an answer that is passed on however much is held: what the caller wrote is stored,
        and a refusal would have it written again.
        """
        size *= COPIES
        self.is_large = self.is_large or size > self._intake.large
        self.hold(self.size + size)

    def count_parts(self, parts: int) -> None:
        """Count the objects that parsing will make. Raises CallEnded."""
        self._take(parts * PART_BYTES)

    def hold(self, size: int) -> None:
        """Hold so many bytes, and no longer what was held before."""
        self._intake.bytes.add(self._user, size - self.size)
        self.size = size

    async def find_room(self, size: int) -> None:
        """Count an answer as soon as the client has taken others. Raises CallEnded."""
        until = monotonic() + ROOM_SECONDS
        while True:
            try:
                self.count_answer(size)
                return
            except CallEnded:
                if monotonic() > until:
                    raise

            await asyncio.sleep(ROOM_CHECK_SECONDS)

    def give(self, answer: bytes) -> None:
        """Have the client take an answer in time; its connection is closed otherwise."""
        seconds = self._intake.taking_seconds + len(answer) / BYTES_A_SECOND
        self._taking = asyncio.get_running_loop().call_later(seconds, self._connection.close)

    @contextmanager
    def giving(self, answer: bytes) -> Iterator[None]:
        """Hold one of several answers until the client has taken it in time."""
        self.give(answer)
        yield
        self._taken()
        self.hold(self.size - COPIES * len(answer))

    def _taken(self) -> None:
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None

    def _take(self, size: int) -> None:
        if shortage := self._intake.bytes.shortage(self._user, size):
            raise _exhausted(shortage, size)

        self.hold(self.size + size)


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
