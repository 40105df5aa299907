"""The gRPC server of the proxy: it relays calls as bytes or rewrites them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import cache, partial
from time import monotonic
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from pymilvus.exceptions import MilvusException

from milvus_hubness.client.methods import drive_async
from milvus_hubness.errors import HubnessError, InvalidParameter, ServerUnavailable
from milvus_hubness.logs import log
from milvus_hubness.proxy import messages
from milvus_hubness.proxy.operations import OUTDATES, REWRITTEN, SEARCHES
from milvus_hubness.proxy.options import ProxyOptions
from milvus_hubness.proxy.sessions import Caller, Sessions

Context = Any
"""grpc.aio's ServicerContext."""

Ending = tuple[grpc.StatusCode, str | None, messages.Metadata]
"""The status of a call, its details and the trailing metadata."""

_SEND_FAILED = "Internal error from Core"
"""gRPC's details of a call whose messages could not be sent (set_internal_error, aio/call.pyx.pxi)."""

_STATUS_SECONDS = 2.0
"""Seconds that the proxy then waits for the upstream's own status."""

_SERVICE = "/milvus.proto.milvus.MilvusService/"


class ProxyHandler(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Handler of every method. A method that is not rewritten passes as a stream, which works for any method."""

    def __init__(self, channel: grpc.aio.Channel, sessions: Sessions) -> None:
        self._channel, self._sessions = channel, sessions
        self._unary = cache(channel.unary_unary)
        self._handlers = {
            _SERVICE + method: grpc.unary_unary_rpc_method_handler(partial(self._rewritten, method))
            for method in (*REWRITTEN, *SEARCHES)
        }

    def service(self, details: Any) -> Any:
        path: str = details.method
        return self._handlers.get(path) or grpc.stream_stream_rpc_method_handler(partial(self._streamed, path))

    async def _streamed(self, path: str, stream: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        call = self._channel.stream_stream(path)(
            stream, metadata=messages.passed_on(context.invocation_metadata()), timeout=context.time_remaining()
        )
        first: list[Ending] = []
        call.add_done_callback(lambda it: first.append(_at_hand(_ending(it))))
        try:
            await context.send_initial_metadata(messages.passed_on(await call.initial_metadata()))
            with suppress(grpc.aio.AioRpcError):
                async for message in call:
                    yield message
            code, details, trailing = await _status_of(call, first)
            if code != grpc.StatusCode.OK:
                await context.abort(code, details or "", trailing)
            context.set_trailing_metadata(trailing)
        finally:
            call.cancel()
            self._forget_after(path)

    def _forget_after(self, path: str) -> None:
        if OUTDATES.fullmatch(path.removeprefix(_SERVICE)):
            self._sessions.forget()

    async def _rewritten(self, method: str, message: bytes, context: Context) -> bytes:
        last: list[Any] = []
        received = context.invocation_metadata()
        metadata = messages.passed_on(received) or None

        async def send(request: Any, with_bytes: bool = False) -> Any:
            name, timeout = messages.method_of(request), context.time_remaining()
            call = self._unary(_SERVICE + name)(request.SerializeToString(), metadata=metadata, timeout=timeout)
            if name == method:
                last[:] = [call]
            answer = await call
            response = messages.response_of(name, answer)
            status = messages.status_in(response)
            if status.code or status.error_code:
                raise messages.Refused(response, status)
            return (response, answer) if with_bytes else response

        try:
            response = await self._operated(method, message, dict(received), Caller(context.time_remaining()), send)
        except grpc.RpcError as error:
            await _abort(context, error)
        except ServerUnavailable as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except DecodeError:
            await context.abort(grpc.StatusCode.INTERNAL, f"cannot parse the request of {method}")
        except Exception as error:
            if not isinstance(error, HubnessError | MilvusException):
                log.exception("%s failed", method)
            response = messages.refusal(method, error)
            if isinstance(error, messages.Refused) and isinstance(error.response, type(response)):
                response = error.response
        self._forget_after(method)
        for call in last:
            with suppress(grpc.aio.AioRpcError):
                if initial := messages.passed_on(await call.initial_metadata()):
                    await context.send_initial_metadata(initial)
                context.set_trailing_metadata(messages.passed_on(await call.trailing_metadata()))
        return response if isinstance(response, bytes) else bytes(response.SerializeToString())

    async def _operated(self, method: str, message: bytes, headers: dict[str, Any], caller: Caller, send: Any) -> Any:
        request = messages.request_of(method, message)
        database = getattr(request, "db_name", "") or messages.header(headers, "dbname")
        session = self._sessions.of(messages.header(headers, "authorization"), database)
        collection = request.oldName if method == "RenameCollection" else request.collection_name
        with session.pools.entered(str(collection)) as pool:
            if method in SEARCHES:
                operation = SEARCHES[method](session.operations, request, messages.overrides_in(headers))
            else:
                operation = REWRITTEN[method](session.operations, request)
            return await drive_async(operation, lambda step: session.answer(step, caller, pool, send))


async def _status_of(call: Any, first: list[Ending]) -> Ending:
    """Return the status of a stream that has ended. first: its status at that moment. If the upstream ends a stream
    early, gRPC may report its own write failure in place of the upstream's status at first: both are watched."""
    deadline = monotonic() + _STATUS_SECONDS
    while (end := await _ending(call))[1] == _SEND_FAILED and monotonic() <= deadline:
        if first[0][1] != _SEND_FAILED:
            return first[0]
        await asyncio.sleep(0.005)
    return end


async def _ending(call: Any) -> Ending:
    return await call.code(), await call.details(), messages.passed_on(await call.trailing_metadata())


def _at_hand(answer: Any) -> Any:
    """Return the result of a coroutine that has nothing to wait for."""
    try:
        answer.send(None)
    except StopIteration as returned:
        return returned.value
    raise RuntimeError("the status of an ended call is not available")


async def _abort(context: Context, error: Any) -> NoReturn:
    """End a call with the status of the upstream call."""
    await context.abort(error.code(), error.details() or "", messages.passed_on(error.trailing_metadata()))
    raise error


class Proxy:
    """A gRPC proxy in front of one Milvus; corrected collections behave as with HubnessClient, in any language. async
    with Proxy(ProxyOptions("localhost:19530")): await stopped.wait()"""

    def __init__(self, options: ProxyOptions) -> None:
        self.options = options
        self.port = options.port
        self.sessions = Sessions(options)
        self._server: grpc.aio.Server | None = None
        self._channel: grpc.aio.Channel | None = None

    async def start(self) -> None:
        """Listen; `port` is then the actual port. Raises InvalidParameter for an unusable address or certificate."""
        self._channel = self.options.open_channel(grpc.aio)
        handler = ProxyHandler(self._channel, self.sessions)
        self._server = grpc.aio.server(handlers=[handler], options=self.options.server_options())
        address = f"{self.options.host}:{self.options.port}"
        with suppress(RuntimeError):
            self.port = 0
            if self.options.tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                credentials = grpc.ssl_server_credentials([self.options.tls])
                self.port = self._server.add_secure_port(address, credentials)
        if not self.port:
            await self._channel.close()
            raise InvalidParameter(f"cannot listen on {address}: choose a free port, and a certificate of its key")
        await self._server.start()

    async def stop(self) -> None:
        """Accept no more calls, wait `drain` seconds for running ones, and close the connections."""
        if self._server is not None:
            await self._server.stop(self.options.drain)
        if self._channel is not None:
            await self._channel.close()
        await asyncio.to_thread(self.sessions.close)

    async def __aenter__(self) -> Proxy:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()
