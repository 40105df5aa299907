"""Whether Milvus knows the caller: learned before
a message is received, and remembered for seconds.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import nullcontext
from time import monotonic
from typing import NamedTuple

import grpc

from milvus_hubness.milvus.proxy.endings import CallEnded
from milvus_hubness.milvus.proxy.headers import Identity, Metadata

QUESTION = "/milvus.proto.milvus.MilvusService/GetVersion"
"""Milvus checks the token of every method, and this one needs no privilege and changes nothing."""

VALID_SECONDS = 10.0
"""Each call is checked again by Milvus, which gets its token: this only decides what is received.
"""

REFUSED_SECONDS = 1.0
"""A refusal holds for less long: the token may have been made valid meanwhile."""

ASK_SECONDS = 10.0
"""Longest wait for Milvus's answer."""

MOST_REMEMBERED = 1_024
"""Callers whose answers are remembered."""

MOST_QUESTIONS = 16
"""Questions to Milvus at the same time about callers that it has not taken before; others wait."""

MOST_STRANGERS = 256
"""Calls of such callers that wait for Milvus's answer; further ones are refused."""

STATUS_CODES_OF_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
"""How Milvus ends a call that it does not allow: nothing has changed."""


class Refusal(NamedTuple):
    """Milvus's answer about a caller that it does not take."""

    code: grpc.StatusCode
    details: str


class Remembered:
    """Answers about callers for some seconds, `most` of them. The oldest is dropped first."""

    def __init__(self, seconds: float, most: int = MOST_REMEMBERED) -> None:
        self._seconds = seconds
        self._most = most
        self._answers: OrderedDict[Identity, tuple[float, Refusal | None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def put(self, caller: Identity, answer: Refusal | None) -> None:
        self._answers.pop(caller, None)
        self._answers[caller] = (monotonic() + self._seconds, answer)
        while len(self._answers) > self._most:
            self._answers.popitem(last=False)

    def get(self, caller: Identity) -> tuple[float, Refusal | None] | None:
        answer = self._answers.get(caller)
        return answer if answer is not None and monotonic() < answer[0] else None

    def __contains__(self, caller: Identity) -> bool:
        """Whether there was an answer, which may be too old."""
        return caller in self._answers

    def drop(self, caller: Identity) -> None:
        self._answers.pop(caller, None)


class Admission:
    """Asks Milvus about callers, once for all calls that wait for the same answer.

    ask_seconds: longest wait for it. valid_seconds: how long the answer holds.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        upstream: str,
        ask_seconds: float = ASK_SECONDS,
        valid_seconds: float = VALID_SECONDS,
    ) -> None:
        self._ask = channel.unary_unary(QUESTION)
        self._upstream = upstream
        self._ask_seconds = ask_seconds
        self._valid = Remembered(valid_seconds)
        # Apart, so that invalid tokens push no valid one out.
        self._refused = Remembered(REFUSED_SECONDS)
        self._running: dict[Identity, asyncio.Task[Refusal | None]] = {}
        self._turns = asyncio.Semaphore(MOST_QUESTIONS)
        self._strangers = 0

    async def expect_valid(self, caller: Identity, metadata: Metadata) -> None:
        """Return once Milvus has taken a call of this caller.

        Raises CallEnded with its refusal.

        caller: the entries of `metadata` by which Milvus
        may know the caller, of which gRPC takes 16 KiB.
        """
        if self._valid.get(caller):
            return

        remembered = self._refused.get(caller)
        refusal = remembered[1] if remembered else await self._answer_about(caller, metadata)
        if refusal is not None:
            raise CallEnded(refusal.code, refusal.details)

    def close(self) -> None:
        """Ask no more."""
        for task in self._running.values():
            task.cancel()

    async def _answer_about(self, caller: Identity, metadata: Metadata) -> Refusal | None:
        if caller in self._valid:
            return await self._answer(caller, metadata)

        # All that Milvus has not taken yet have together what one user has.
        if self._strangers == MOST_STRANGERS:
            reason = (
                f"{MOST_STRANGERS} calls wait until Milvus knows their tokens, the limit of the "
                "proxy: call again later"
            )
            # Clients repeat a call that was UNAVAILABLE.
            raise CallEnded(grpc.StatusCode.UNAVAILABLE, reason)

        self._strangers += 1
        try:
            return await self._answer(caller, metadata)
        finally:
            self._strangers -= 1

    def forget(self, caller: Identity) -> None:
        """Ask again at the next call of this caller: Milvus has just refused its token."""
        self._valid.drop(caller)

    async def _answer(self, caller: Identity, metadata: Metadata) -> Refusal | None:
        task = self._running.get(caller)
        if task is None:
            task = asyncio.create_task(self._asking(caller, metadata))
            self._running[caller] = task
        # The first of the callers may cancel its call; others wait for the same answer.
        return await asyncio.shield(task)

    async def _asking(self, caller: Identity, metadata: Metadata) -> Refusal | None:
        try:
            # Users whose answer is only too old wait for no stranger.
            async with nullcontext() if caller in self._valid else self._turns:
                await self._ask(b"", metadata=metadata or None, timeout=self._ask_seconds)
        except grpc.aio.AioRpcError as error:
            return self._refusal(caller, error)
        else:
            self._valid.put(caller, None)
            return None
        finally:
            del self._running[caller]

    def _refusal(self, caller: Identity, error: grpc.aio.AioRpcError) -> Refusal:
        code = error.code()
        details = error.details() or ""
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            # The caller's own deadline may be far: clients repeat a call that was UNAVAILABLE.
            code = grpc.StatusCode.UNAVAILABLE
            details = (
                f"Milvus at {self._upstream} did not say within {self._ask_seconds:.0f} s whether "
                "the token is valid: call again later"
            )

        refusal = Refusal(code, details)
        if code in STATUS_CODES_OF_REFUSALS:
            self._refused.put(caller, refusal)
        return refusal
