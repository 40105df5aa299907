"""Turns to receive a message: who waits for others' messages, and for how long."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import NamedTuple, TypeVar

import grpc

from milvus_hubness.milvus.proxy.endings import CallEnded
from milvus_hubness.milvus.proxy.headers import Identity

T = TypeVar("T")

PATIENCE_SECONDS = 0.5
"""So long a call waits for a user that has several turns; then the one that began first ends."""

LONG_PATIENCE_SECONDS = 5.0
"""So long it waits for messages of its own user, and for users that have one turn each."""

CHECK_SECONDS = 0.1
"""Between two looks at who waits, as long as somebody does."""


class Turn:
    """One message that arrives."""

    def __init__(self, user: Identity) -> None:
        self.user = user
        self.began = monotonic()
        self.reason: str | None = None
        self._task: asyncio.Task[object] | None = None

    def end(self, reason: str) -> None:
        """Give the message up. The call ends with that reason."""
        self.reason = reason
        if self._task is not None:
            self._task.cancel()

    async def read(self, read: Callable[[], Awaitable[T]], seconds: float) -> T:
        """Return what arrives within that time. Raises CallEnded."""
        self._task = asyncio.current_task()
        reason = f"the message did not arrive within {seconds:g} s"
        timer = asyncio.get_running_loop().call_later(seconds, self.end, reason)
        try:
            if self.reason is None:
                return await read()
        except asyncio.CancelledError:
            if self.reason is None:
                raise
        finally:
            self._task = None
            timer.cancel()

        # Not the caller's cancellation, but `end`'s: the call ends with a reason.
        raise CallEnded(grpc.StatusCode.RESOURCE_EXHAUSTED, self.reason) from None


class _Waiting(NamedTuple):
    turn: asyncio.Future[Turn]
    since: float


class Turns:
    """Turns of users, `total` at a time and `most` of one user.

    The next is the user's who has the fewest. A message that does not arrive holds nobody up for
    long: gRPC does not say whether it has begun, so whoever waits ends the turn of another.
    arrival_seconds: longest time in which a message arrives, and longest wait for a turn.
    """

    def __init__(self, total: int, most: int, arrival_seconds: float) -> None:
        self._total = total
        self._most = most
        self._arrival_seconds = arrival_seconds

        self._running: dict[Identity, list[Turn]] = {}
        self._waiting: dict[Identity, deque[_Waiting]] = {}
        self._count = 0
        self._check: asyncio.TimerHandle | None = None

    async def receive(self, user: Identity, read: Callable[[], Awaitable[T]]) -> T:
        """Return a user's next message, received in turn. Raises CallEnded."""
        turn = self._begun(user) if self._is_free(user) else await self._waited(user)
        try:
            return await turn.read(read, self._arrival_seconds)
        finally:
            self._end(turn)

    def _is_free(self, user: Identity) -> bool:
        return self._count < self._total and len(self._running.get(user, ())) < self._most

    def _begun(self, user: Identity) -> Turn:
        turn = Turn(user)
        self._running.setdefault(user, []).append(turn)
        self._count += 1
        return turn

    def _end(self, turn: Turn) -> None:
        running = self._running[turn.user]
        running.remove(turn)
        if not running:
            del self._running[turn.user]
        self._count -= 1
        self._pass_on()

    async def _waited(self, user: Identity) -> Turn:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(loop.create_future(), monotonic())
        self._waiting.setdefault(user, deque()).append(waiting)
        if self._check is None:
            self._check = loop.call_later(CHECK_SECONDS, self._look)
        try:
            return await waiting.turn
        except asyncio.CancelledError:
            # The turn may have come at the same time.
            came = waiting.turn.done() and not waiting.turn.cancelled()
            if came and waiting.turn.exception() is None:
                self._end(waiting.turn.result())
            raise

    def _pass_on(self) -> None:
        """Give the free turns to those who wait."""
        while self._count < self._total:
            users = [user for user in self._waiting if self._is_free(user)]
            if not users:
                return

            user = min(users, key=lambda user: len(self._running.get(user, ())))
            queue = self._waiting.pop(user)
            waiting = queue.popleft()
            if queue:
                # At the end: users with as many turns take the next one by one.
                self._waiting[user] = queue
            if not waiting.turn.done():
                waiting.turn.set_result(self._begun(user))

    def _look(self) -> None:
        """End turns that others wait for too long, and the waits of those who have waited longest."""
        now = monotonic()
        for user, queue in list(self._waiting.items()):
            while queue and (queue[0].turn.done() or self._is_over(queue[0], now)):
                queue.popleft()
            if not queue:
                del self._waiting[user]
            else:
                self._end_for(user, now - queue[0].since, now)

        self._check = None
        if self._waiting:
            self._check = asyncio.get_running_loop().call_later(CHECK_SECONDS, self._look)

    def _is_over(self, waiting: _Waiting, now: float) -> bool:
        if now - waiting.since < self._arrival_seconds:
            return False

        reason = f"other messages of this user did not arrive within {self._arrival_seconds:g} s"
        waiting.turn.set_exception(CallEnded(grpc.StatusCode.RESOURCE_EXHAUSTED, reason))
        return True

    def _end_for(self, user: Identity, waited: float, now: float) -> None:
        """End a turn that this user has waited for too long: one of its own, or of who has the most."""
        count = len(self._running.get(user, ()))
        holder = user
        patience = LONG_PATIENCE_SECONDS
        if count < self._most:
            holder = max(self._running, key=lambda other: len(self._running[other]))
            if len(self._running[holder]) > 1:
                patience = PATIENCE_SECONDS
            if len(self._running[holder]) <= count:
                return

        turn = min(self._running[holder], key=lambda turn: turn.began)
        if turn.reason is None and min(waited, now - turn.began) >= patience:
            turn.end(
                f"the message did not arrive within {patience:g} s, and other calls waited for it: "
                "send it at once, or call again later"
            )
