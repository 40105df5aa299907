"""Requests of pymilvus to a Milvus Lite of the same process, which are answered without a connection.

Two thirds of what a request to Milvus Lite costs are gRPC in Python: a socket, and two threads that wait for each
other. Here the message is written, read and handed to the same method of Milvus Lite, and its answer likewise. What it
does not answer goes over the connection as ever, and so does all that other processes, asyncio and the proxy ask.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc
from milvus_lite.adapter.grpc import server
from milvus_lite.adapter.grpc.servicer import MilvusServicer
from pymilvus.client.grpc_handler import GrpcHandler
from pymilvus.grpc_gen.milvus_pb2_grpc import (
    MilvusServiceServicer,
    add_MilvusServiceServicer_to_server,
)

Methods = dict[str, grpc.RpcMethodHandler]
_methods: dict[str, Methods] = {}
"""By address: the methods of each Milvus Lite that runs here."""


class OneAtATime(MilvusServicer):  # type: ignore[misc]
    """Milvus Lite answers one request after the other, whichever way it comes."""

    def __init__(self, database: Any) -> None:
        super().__init__(database)
        self.turn = threading.RLock()
        database.servicer = self


def _in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def answer(self: OneAtATime, request: Any, context: Any) -> Any:
        with self.turn:
            return method(self, request, context)

    return answer


ANSWERED = frozenset(
    name
    for name in vars(MilvusServicer)
    if name in vars(MilvusServiceServicer) and not name.startswith("_")
)
for _name in ANSWERED:
    setattr(OneAtATime, _name, _in_turn(getattr(MilvusServicer, _name)))


class Answered(NamedTuple):
    """What stands for the call of an answer that has arrived, as gRPC's own future does."""

    response: Any

    def result(self, timeout: float | None = None) -> Any:
        return self.response

    def exception(self, timeout: float | None = None) -> None:
        return None

    def done(self) -> bool:
        return True

    def cancelled(self) -> bool:
        return False

    def cancel(self) -> bool:
        return False

    def add_done_callback(self, then: Callable[[Any], None]) -> None:
        then(self)

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK

    def details(self) -> str:
        return ""

    def initial_metadata(self) -> tuple[()]:
        return ()

    def trailing_metadata(self) -> tuple[()]:
        return ()


class NotAnswered(Exception):
    """Milvus Lite has no such method, or refuses the request with a code of gRPC."""


class Context:
    """What a method of Milvus Lite sees of a call: its metadata, and a place for a code of gRPC."""

    def __init__(self, metadata: Any) -> None:
        self._metadata = tuple(metadata or ())

    def invocation_metadata(self) -> tuple[Any, ...]:
        return self._metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        raise NotAnswered

    def set_details(self, details: str) -> None:
        raise NotAnswered


class NearCall:
    """A method of the stub: asks Milvus Lite itself, and over the connection what it does not answer."""

    def __init__(self, address: str, method: str, far: Any, write: Any, read: Any) -> None:
        self._address = address
        self._name = method.rpartition("/")[2]
        self._far = far
        self._write = write
        self._read = read

    def _ask(self, request: Any, metadata: Any) -> Any:
        method = _methods.get(self._address, {}).get(self._name)
        if method is None:
            raise NotAnswered
        received = method.request_deserializer(self._write(request))
        answer = method.unary_unary(received, Context(metadata))
        return self._read(method.response_serializer(answer))

    def __call__(self, request: Any, timeout: Any = None, metadata: Any = None, **how: Any) -> Any:
        try:
            return self._ask(request, metadata)
        except NotAnswered:
            return self._far(request, timeout=timeout, metadata=metadata, **how)

    def with_call(self, request: Any, timeout: Any = None, metadata: Any = None, **how: Any) -> Any:
        try:
            answer = self._ask(request, metadata)
        except NotAnswered:
            return self._far.with_call(request, timeout=timeout, metadata=metadata, **how)
        return answer, Answered(answer)

    def future(self, request: Any, timeout: Any = None, metadata: Any = None, **how: Any) -> Any:
        try:
            return Answered(self._ask(request, metadata))
        except NotAnswered:
            return self._far.future(request, timeout=timeout, metadata=metadata, **how)


class NearChannel(grpc.Channel):  # type: ignore[misc]
    """A connection of pymilvus, which answers at once what a Milvus Lite of this process can."""

    def __init__(self, channel: Any, address: str) -> None:
        self._channel = channel
        self._address = address

    def unary_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        *rest: Any,
        **more: Any,
    ) -> NearCall:
        far = self._channel.unary_unary(
            method, request_serializer, response_deserializer, *rest, **more
        )
        return NearCall(self._address, method, far, request_serializer, response_deserializer)

    def unary_stream(self, *args: Any, **more: Any) -> Any:
        return self._channel.unary_stream(*args, **more)

    def stream_unary(self, *args: Any, **more: Any) -> Any:
        return self._channel.stream_unary(*args, **more)

    def stream_stream(self, *args: Any, **more: Any) -> Any:
        return self._channel.stream_stream(*args, **more)

    def subscribe(self, callback: Any, try_to_connect: bool | None = False) -> None:
        if self._address in _methods:
            # Nobody connects before there is something to send: Milvus Lite hangs up on idle clients.
            callback(grpc.ChannelConnectivity.READY)
        else:
            self._channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        self._channel.unsubscribe(callback)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> NearChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Registered:
    """Takes the methods that Milvus Lite would register with a server of gRPC."""

    def __init__(self) -> None:
        self.methods: Methods = {}

    def add_generic_rpc_handlers(self, _: Any) -> None:
        pass

    def add_registered_method_handlers(self, _: str, handlers: Methods) -> None:
        self.methods = {name: handlers[name] for name in ANSWERED}


def answer_without_a_connection() -> None:
    """Have all clients of pymilvus in this process ask a Milvus Lite of this process directly."""
    start, connect = server.start_server_in_thread, GrpcHandler._create_grpc_channel

    def started(*args: Any, **options: Any) -> Any:
        running, database, port = start(*args, **options)
        registered = _Registered()
        add_MilvusServiceServicer_to_server(database.servicer, registered)
        address = f"127.0.0.1:{port}"
        _methods[address] = registered.methods
        stop = running.stop

        def stopped(*args: Any, **options: Any) -> Any:
            _methods.pop(address, None)
            return stop(*args, **options)

        running.stop = stopped
        return running, database, port

    def connected(self: Any, address: str | None = None) -> Any:

        return NearChannel(connect(self, address), address or self._address)

    server.MilvusServicer = OneAtATime
    server.start_server_in_thread = started
    GrpcHandler._create_grpc_channel = connected
