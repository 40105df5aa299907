"""Users of databases: what is remembered for each, and each one's own connection for what takes more than
passing messages on."""

from __future__ import annotations

import asyncio
import base64
import binascii
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pymilvus import MilvusClient
from pymilvus.client.abstract import CollectionSchema
from pymilvus.grpc_gen import milvus_pb2

from milvus_hubness.client.sampling import WRITE_SECONDS, sampler_for
from milvus_hubness.client.steps import Ask, InStore, LearnSchema, LoadBank, Pause, Step
from milvus_hubness.errors import InvalidInput
from milvus_hubness.proxy.callers import Caller, CallerChannel, CollectionPool, CollectionPools
from milvus_hubness.proxy.operations import WireOperations
from milvus_hubness.proxy.options import ProxyOptions
from milvus_hubness.proxy.steps import Send
from milvus_hubness.stores.milvus import MilvusStore
from milvus_hubness.stores.milvus_rpc import connect
from milvus_hubness.stores.milvus_traffic import Sample, put_samples

MOST = 64
"""So many sessions are kept, and those with calls under way; the one used longest ago goes first."""

Sending = Callable[[str, Any], Awaitable[Any]]
"""Sends a request message on by the method's name, and returns the response message. Raises Refused."""


class Session:
    """One user of one database. Nothing that is remembered here is told to another user."""

    def __init__(self, options: ProxyOptions, token: str, database: str) -> None:
        self._options, self._token, self._database = options, token, database
        self._lock = threading.Lock()
        self._client: MilvusClient | None = None
        self._sampler = sampler_for(None, self._put_samples)
        self.operations = WireOperations(
            options.strength, options.state_ttl, options.bank_budget, self._sampler
        )
        self.pools = CollectionPools(options.max_calls)

    async def answer(self, step: Step, caller: Caller, pool: CollectionPool, send: Sending) -> Any:
        """Return the outcome of a step of an operation.

        caller: who waits for it. pool: of the collection. send: sends a request message on. Raises CallEnded
        where the caller's deadline has passed.
        """
        caller.remaining()
        if isinstance(step, Send):
            return await send(step.method, step.request)
        if isinstance(step, Pause):
            return await asyncio.sleep(step.seconds)
        if isinstance(step, Ask):
            if step.method == "describe_collection":
                request = milvus_pb2.DescribeCollectionRequest(
                    collection_name=step.args[0], db_name=self._database
                )
                return CollectionSchema(raw=await send("DescribeCollection", request)).dict()
            return await pool.run(caller, lambda: self._ask(step))
        if isinstance(step, LoadBank):
            reference = step.reference
            return await pool.run(caller, lambda: MilvusStore(self._connected()).load_bank(reference))
        if isinstance(step, InStore):
            work = step.work
            return await pool.run(caller, lambda: work(MilvusStore(self._connected())))
        if isinstance(step, LearnSchema):
            return self._learn_schema(step.collection)
        return await pool.run(caller, step.work)

    def close(self) -> None:
        """Write what was sampled, and hang up."""
        if self._sampler is not None:
            self._sampler.close()
        if self._client is not None:
            self._client.close()

    def _ask(self, step: Ask) -> Any:
        return getattr(self._connected(), step.method)(*step.args, **step.options)

    def _connected(self) -> MilvusClient:
        with self._lock:
            if self._client is None:
                own: dict[str, Any] = {"channel": self._channel(), "dedicated": True}
                client = connect(self._options.uri, self._token, self._database, **own)
                # pymilvus opens another channel where the upstream was away.
                client._get_connection()._create_grpc_channel = self._channel
                self._client = client
            return self._client

    def _channel(self, address: str | None = None) -> CallerChannel:
        return CallerChannel(self._options.open_blocking_channel())

    def _learn_schema(self, collection: str) -> None:
        if self._client is not None:
            database = self._client._generate_call_context().get_db_name()
            self._client._get_connection()._invalidate_schema(collection, db_name=database)

    def _put_samples(self, samples_collection: str, samples: Sequence[Sample]) -> None:
        put_samples(self._connected(), samples_collection, samples, WRITE_SECONDS)


class Sessions:
    """Those of late."""

    def __init__(self, options: ProxyOptions) -> None:
        self._options = options
        self._kept: OrderedDict[tuple[str, str], Session] = OrderedDict()

    def of(self, authorization: str, database: str) -> Session:
        """Return the session of a user of a database. Raises InvalidInput where the header is none of
        Milvus's."""
        name = (authorization, database)
        session = self._kept.pop(name, None)
        if session is None:
            session = Session(self._options, _token(authorization), database)
            idle = [other for other, kept in self._kept.items() if not kept.pools]
            for other in idle[: max(0, len(self._kept) + 1 - MOST)]:
                asyncio.get_running_loop().run_in_executor(None, self._kept.pop(other).close)
        self._kept[name] = session
        return session

    def forget(self) -> None:
        """Have every session ask anew the collection states."""
        for session in self._kept.values():
            session.operations.forget()

    def close(self) -> None:
        """Every one."""
        for session in self._kept.values():
            session.close()
        self._kept.clear()


def _token(authorization: str) -> str:
    """What pymilvus sends so."""
    try:
        return base64.b64decode(authorization, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise InvalidInput("the authorization header is not in base64, as Milvus takes it") from None
