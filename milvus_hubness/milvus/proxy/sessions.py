"""The callers of the proxy: their threads, and one session for each user of a database."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from math import inf
from threading import Lock
from time import monotonic
from typing import Any, TypeVar

import grpc
from pymilvus import MilvusClient
from pymilvus.client.abstract import CollectionSchema
from pymilvus.grpc_gen import milvus_pb2

from milvus_hubness.clients.steps import Ask, Compute, Pause
from milvus_hubness.milvus.client.methods import DEFAULT_BANK_BUDGET
from milvus_hubness.milvus.client.operations import Operations
from milvus_hubness.milvus.client.steps import InStore, LearnSchema, LoadBank, Step
from milvus_hubness.milvus.proxy.endings import CallEnded
from milvus_hubness.milvus.proxy.headers import Identity
from milvus_hubness.milvus.proxy.messages import Send, TimeOfWrite
from milvus_hubness.milvus.proxy.options import ProxyOptions
from milvus_hubness.milvus.pymilvus_private import (
    connection_of,
    forget_schema,
    last_write_of,
    open_channels_with,
)
from milvus_hubness.milvus.store.milvus_store import MilvusStore
from milvus_hubness.milvus.store.server import connect

T = TypeVar("T")

THREADS = 8
"""Threads in the pool of one collection. They start when there is work for them."""


class Caller:
    """The deadline of one call of the proxy, `seconds` from now, and the upstream calls that
    threads make for it.
    """

    def __init__(self, seconds: float | None) -> None:
        self._deadline = inf if seconds is None else monotonic() + seconds
        self._cancelled = False
        self._running: set[Any] = set()
        self._lock = Lock()

    def remaining(self) -> float | None:
        """Return the seconds until the deadline; None without one.

        Raises CallEnded after it or once cancelled.
        """
        seconds = self._deadline - monotonic()
        if self._cancelled or seconds <= 0:
            reason = "the caller's deadline has passed, or the call was cancelled"
            raise CallEnded(grpc.StatusCode.DEADLINE_EXCEEDED, reason)
        return None if seconds == inf else seconds

    def start(
        self, send: Callable[..., Any], request: Any, timeout: float | None, options: Any
    ) -> Any:
        """Return the future of an upstream call that ends no later than this call.

        Raises CallEnded.
        """
        with self._lock:
            limits = [seconds for seconds in (timeout, self.remaining()) if seconds is not None]
            call = send(request, timeout=min(limits, default=None), **options)
            self._running.add(call)

        call.add_done_callback(self._running.discard)
        return call

    def cancel(self) -> None:
        """Cancel the running upstream calls, and start no more."""
        with self._lock:
            self._cancelled = True
        for call in list(self._running):
            call.cancel()


_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)


class CallerChannel:
    """A gRPC channel for pymilvus, whose unary calls end
    with the caller of their thread and have its identity.

    pymilvus itself applies a timeout to every attempt of a request, so an operation may take many
    times as long. identity: the entries of the metadata by which Milvus knows the caller.
    """

    def __init__(self, channel: grpc.Channel, identity: Identity) -> None:
        self._channel = channel
        self._identity = identity

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def unary_unary(self, *args: Any, **options: Any) -> _CallerCallable:
        return _CallerCallable(self._channel.unary_unary(*args, **options), self._identity)


class _CallerCallable:
    def __init__(self, method: grpc.UnaryUnaryMultiCallable, identity: Identity) -> None:
        self._method = method
        self._identity = identity

    def future(self, request: Any, timeout: float | None = None, **options: Any) -> Any:
        caller = _caller.get() or Caller(None)
        options["metadata"] = (*(options.get("metadata") or ()), *self._identity)
        return caller.start(self._method.future, request, timeout, options)

    def with_call(
        self, request: Any, timeout: float | None = None, **options: Any
    ) -> tuple[Any, Any]:
        call = self.future(request, timeout, **options)
        return call.result(), call

    def __call__(self, request: Any, timeout: float | None = None, **options: Any) -> Any:
        return self.with_call(request, timeout, **options)[0]


class CollectionPool:
    """The running calls on one collection, and threads for their blocking parts."""

    def __init__(self) -> None:
        self.calls = 0
        self.threads = ThreadPoolExecutor(THREADS, "hubness-proxy")

    async def run(self, caller: Caller, work: Callable[[], T]) -> T:
        """Run `work` in a thread for this caller and return its result.

        If cancelled, cancels the upstream calls and waits: the pool counts the call as long as it
        occupies a thread.
        """
        context = copy_context()
        context.run(_caller.set, caller)
        running = self.threads.submit(context.run, work)
        future = asyncio.wrap_future(running)
        # asyncio logs an exception that nobody reads.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            caller.cancel()
            if not running.cancel():
                await asyncio.wait({future})
            raise

        return future.result()


class CollectionPools:
    """A pool for each collection with running calls,
    at most `limit` of them, for use in one event loop.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pools: defaultdict[str, CollectionPool] = defaultdict(CollectionPool)

    def __len__(self) -> int:
        return len(self._pools)

    @contextmanager
    def entered(self, collection: str) -> Iterator[CollectionPool]:
        """Yield the pool for one more call on the collection; the last call drops it.

        Raises CallEnded.
        """
        pool = self._pools[collection]
        if pool.calls >= self._limit:
            raise CallEnded(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"collection {collection!r} has {pool.calls} running calls of this user, the "
                "limit of the proxy: call again later, or start the proxy with a larger "
                "--max-calls",
            )

        pool.calls += 1
        try:
            yield pool
        finally:
            pool.calls -= 1
            if not pool.calls:
                del self._pools[collection]
                pool.threads.shutdown(wait=False)


MAX_SESSIONS = 64
"""Largest number of sessions, apart from those with running calls.

The least recently used one is dropped first.
"""

MAX_SESSIONS_OF_USER = 8
"""Those of one user, for as many databases."""

IDLE_BANKS = 256 << 20
"""Bytes of the banks of all sessions but the one that has just loaded another."""

Sending = Callable[..., Awaitable[Any]]
"""Sends a request message, and returns the outcome of `Send`. Raises messages.Refused."""


class Session:
    """One user of one database. Its caches are never shared with another user."""

    def __init__(
        self,
        options: ProxyOptions,
        identity: Identity,
        database: str,
        make_room: Callable[[Session], None],
    ) -> None:
        self._options = options
        self._make_room = make_room
        self._identity = identity
        self._database = database
        self._lock = Lock()
        self._client: MilvusClient | None = None
        self.operations = Operations(
            options.overrides,
            options.state_ttl,
            DEFAULT_BANK_BUDGET,
            self._connected,
        )
        self.pools = CollectionPools(options.max_calls)

    async def answer(self, step: Step, caller: Caller, pool: CollectionPool, send: Sending) -> Any:
        """Return the outcome of a step of an operation for this caller.

        Raises CallEnded after its deadline.
        """
        caller.remaining()
        if isinstance(step, Send):
            return await send(*step.args)
        if isinstance(step, TimeOfWrite):
            return 0 if self._client is None else last_write_of(self._client, *step.args)
        if isinstance(step, Pause):
            return await asyncio.sleep(step.seconds)
        if isinstance(step, LearnSchema):
            return self._learn_schema(step.collection)
        if isinstance(step, Ask) and step.method == "describe_collection":
            request = milvus_pb2.DescribeCollectionRequest(
                collection_name=step.args[0], db_name=self._database
            )
            return CollectionSchema(raw=await send(request)).dict()

        if isinstance(step, LoadBank):
            self._make_room(self)
        return await pool.run(caller, lambda: self._run(step))

    def close(self) -> None:
        self.operations.close()
        if self._client is not None:
            self._client.close()

    def _run(self, step: Ask | LoadBank | InStore | Compute) -> Any:
        if isinstance(step, Compute):
            return step.work()
        if isinstance(step, Ask):
            return getattr(self._connected(), step.method)(*step.args, **step.options)

        store = MilvusStore(self._connected())
        return store.load_bank(step.reference) if isinstance(step, LoadBank) else step.work(store)

    def _connected(self) -> MilvusClient:
        with self._lock:
            if self._client is None:
                scheme = "https" if self._options.upstream_tls else "http"
                client = connect(
                    f"{scheme}://{self._options.upstream}",
                    db_name=self._database,
                    channel=self._channel(),
                    # pymilvus would share the connection with the clients of other users.
                    dedicated=True,
                )
                # The channel that pymilvus was given is not
                # used after the upstream was unreachable.
                open_channels_with(client, self._channel)
                self._client = client

            return self._client

    def _channel(self, address: str | None = None) -> CallerChannel:
        return CallerChannel(self._options.open_channel(grpc), self._identity)

    def _learn_schema(self, collection: str) -> None:
        if self._client is not None:
            forget_schema(self._client, connection_of(self._client), collection)


class Sessions:
    """The sessions in use and the most recent others."""

    def __init__(self, options: ProxyOptions) -> None:
        self._options = options
        self.recent: OrderedDict[tuple[Identity, str], Session] = OrderedDict()

    def of(self, identity: Identity, database: str) -> Session:
        """Return the session of a user of a database. identity: as in `headers.identity_in`."""
        name = (identity, database)
        if name not in self.recent:
            self.recent[name] = Session(self._options, identity, database, self._make_room)
            self._drop_idle(
                [other for other in self.recent if other[0] == identity], MAX_SESSIONS_OF_USER
            )
            self._drop_idle(list(self.recent), MAX_SESSIONS)

        self.recent.move_to_end(name)
        return self.recent[name]

    def _drop_idle(self, names: list[tuple[Identity, str]], most: int) -> None:
        """Drop the first of these but `most`; the newest, and those with running calls, stay."""
        idle = [name for name in names[:-1] if not self.recent[name].pools]
        for name in idle[: max(0, len(names) - most)]:
            asyncio.get_running_loop().run_in_executor(None, self.recent.pop(name).close)

    def _make_room(self, loading: Session) -> None:
        """Drop the banks of the sessions that were used longest ago, where all have too many."""
        others = [session.operations.biases.banks for session in self.recent.values()]
        others.remove(loading.operations.biases.banks)
        excess = sum(banks.size for banks in others) - IDLE_BANKS
        for banks in others:
            if excess <= 0:
                return

            excess -= banks.size
            banks.clear()

    def forget(self) -> None:
        """Drop the cached states of every session."""
        for session in self.recent.values():
            session.operations.states.forget()

    def close(self) -> None:
        for session in self.recent.values():
            session.close()
        self.recent.clear()
