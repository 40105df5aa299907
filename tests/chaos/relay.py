"""A gRPC relay between one client process and Milvus: holds, delays, duplicates and drops single calls."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from pymilvus.grpc_gen import milvus_pb2

Edge = Literal["request", "response"]

THREADS = 48
FORWARD_SECONDS = 60.0
"""The deadline of a forwarded call: a call whose caller has given up is still delivered."""
OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
]
FENCE = "__lease_"
"""Jobs address `products` as `products__lease_<token>_<hex>`."""
_NAMES = ("collection_name", "oldName", "alias")


@dataclass(frozen=True)
class Call:
    """One call that arrived at a relay. seconds: of time.monotonic(). rows: that the request writes."""

    seconds: float
    process: str
    method: str
    collection: str
    rows: int = 0


@cache
def _request_class(method: str) -> Any:
    service = milvus_pb2.DESCRIPTOR.services_by_name["MilvusService"]
    found = service.methods_by_name.get(method)
    return GetMessageClass(found.input_type) if found else None


def _described(method: str, body: bytes) -> tuple[str, int]:
    """The name of the collection (or alias) that a request addresses, and the number of rows it writes."""
    request_class = _request_class(method)
    try:
        request = request_class.FromString(body) if request_class else None
    except DecodeError:
        request = None
    names = [getattr(request, name, "") for name in _NAMES] + list(
        getattr(request, "collection_names", [])
    )
    return next(filter(None, names), ""), int(getattr(request, "num_rows", 0))


def base_name(collection: str) -> str:
    """The name of a collection without the suffix of a fencing alias."""
    return collection.partition(FENCE)[0]


@dataclass(eq=False)
class Rule:
    """What happens to one call: the `nth` of `method` (a name, or several with `|` between them) on
    `collection`, as `base_name` has it; "" for any, `name*` for all that begin so.

    reached: set when that call is there. delivered: set when Milvus has answered it, or its second copy."""

    method: str
    collection: str = ""
    nth: int = 1
    edge: Edge = "request"
    seconds: float | None = None
    reached: threading.Event = field(default_factory=threading.Event)
    delivered: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    call: Call | None = None
    error: str = ""
    _seen: int = 0

    def takes(self, call: Call) -> bool:
        """Count a call that matches. Whether it is the one that this rule is about."""
        if call.method not in self.method.split("|") or not self._addresses(call.collection):
            return False
        self._seen += 1
        if self._seen == self.nth:
            self.call = call
        return self._seen == self.nth

    def _addresses(self, name: str) -> bool:
        if self.collection.endswith("*"):
            return name.startswith(self.collection[:-1])
        return self.collection in ("", base_name(name))

    def wait_held(self, timeout: float) -> bool:
        """Whether the call arrives within so many seconds."""
        return self.reached.wait(timeout)

    def release(self, timeout: float = FORWARD_SECONDS) -> bool:
        """Deliver now what is held, and wait until Milvus has answered. Whether anything was held."""
        self.go_on.set()
        return self.reached.is_set() and self.delivered.wait(timeout)

    def handle(self, forward: Callable[[], bytes]) -> bytes:
        """Return the response for the caller."""
        raise NotImplementedError

    def forward(self, forward: Callable[[], bytes]) -> bytes:
        """Deliver the call, whatever comes of it."""
        try:
            return forward()
        except grpc.RpcError as error:
            self.error = f"{error.code().name}: {error.details()}"
            raise
        finally:
            self.delivered.set()


class Hold(Rule):
    """The request waits before Milvus has it, or the response before the caller has it, until released."""

    def handle(self, forward: Callable[[], bytes]) -> bytes:
        if self.edge == "response":
            answer = self.forward(forward)
            self.reached.set()
            self.go_on.wait()
            return answer
        self.reached.set()
        self.go_on.wait(self.seconds)
        return self.forward(forward)


class Duplicate(Rule):
    """Milvus gets the request twice: the second time after `seconds`, or when released."""

    def handle(self, forward: Callable[[], bytes]) -> bytes:
        answer = forward()
        threading.Thread(target=self._again, args=(forward,), daemon=True).start()
        self.reached.set()
        return answer

    def _again(self, forward: Callable[[], bytes]) -> None:
        self.go_on.wait(self.seconds)
        with contextlib.suppress(grpc.RpcError):
            self.forward(forward)


class Unavailable(grpc.RpcError):
    """What the caller of a dropped call gets."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "the relay dropped this call"

    def trailing_metadata(self) -> tuple[()]:
        return ()


class Drop(Rule):
    """The request is lost, or the response is: the caller gets UNAVAILABLE, and pymilvus tries again."""

    def handle(self, forward: Callable[[], bytes]) -> bytes:
        try:
            if self.edge == "response":
                forward()
        finally:
            self.reached.set()
            self.delivered.set()
        raise Unavailable


class Late(Rule):
    """The caller gets UNAVAILABLE, and Milvus gets the request after `seconds`, or when released."""

    def handle(self, forward: Callable[[], bytes]) -> bytes:
        threading.Thread(target=self._later, args=(forward,), daemon=True).start()
        self.reached.set()
        raise Unavailable

    def _later(self, forward: Callable[[], bytes]) -> None:
        self.go_on.wait(self.seconds)
        with contextlib.suppress(grpc.RpcError):
            self.forward(forward)


class Rules:
    """The calls of one process, and what happens to some of them. process: its name in the log of calls."""

    def __init__(self, process: str) -> None:
        self.process = process
        self.calls: list[Call] = []
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._closed = False

    def deliver(self, call: Call, forward: Callable[[], Any]) -> Any:
        """Deliver a call as the rules say; return its answer. Raises Unavailable for one that is lost."""
        with self._lock:
            self.calls.append(call)
            # Each rule counts for itself.
            due = [rule for rule in self._rules if rule.takes(call)]
        return due[0].handle(forward) if due else forward()

    def _release_all(self) -> None:
        self._closed = True
        for rule in self._rules:
            rule.go_on.set()

    def hold(self, method: str, collection: str = "", nth: int = 1, edge: Edge = "request") -> Hold:
        """Hold this call until it is released."""
        return self.add(Hold(method, collection, nth, edge))

    def delay(self, method: str, collection: str = "", nth: int = 1, *, seconds: float) -> Hold:
        """Deliver this call so many seconds later."""
        return self.add(Hold(method, collection, nth, "request", seconds))

    def duplicate(
        self, method: str, collection: str = "", nth: int = 1, *, seconds: float | None = None
    ) -> Duplicate:
        """Deliver this call twice: again after so many seconds, or when released."""
        return self.add(Duplicate(method, collection, nth, seconds=seconds))

    def late(
        self, method: str, collection: str = "", nth: int = 1, *, seconds: float | None = None
    ) -> Late:
        """Fail this call, and deliver it after so many seconds, or when released."""
        return self.add(Late(method, collection, nth, seconds=seconds))

    def drop(self, method: str, collection: str = "", nth: int = 1, edge: Edge = "request") -> Drop:
        """Lose the request or the response of this call."""
        return self.add(Drop(method, collection, nth, edge))

    def add(self, rule: Any) -> Any:
        with self._lock:
            self._rules.append(rule)
        return rule

    def written(self, collection: str) -> Iterator[Call]:
        """Calls that wrote rows of this collection."""
        for call in list(self.calls):
            if (
                call.method in ("Insert", "Upsert", "Delete")
                and base_name(call.collection) == collection
            ):
                yield call


class Relay(Rules, grpc.GenericRpcHandler):
    """One process's way to Milvus, from `with` to its end. upstream: host:port. Calls still held at the end are
    delivered to nobody."""

    def __init__(self, upstream: str, process: str) -> None:
        super().__init__(process)
        self._channel = grpc.insecure_channel(upstream, options=OPTIONS)
        self._pool = ThreadPoolExecutor(THREADS, f"relay-{process}")
        self._server = grpc.server(self._pool, handlers=(self,), options=OPTIONS)
        self._port = self._server.add_insecure_port("127.0.0.1:0")

    def __enter__(self) -> Relay:
        self._server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._release_all()
        self._server.stop(0).wait()
        self._pool.shutdown(wait=True)
        self._channel.close()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    # -- gRPC ---------------------------------------------------------------------------------------------

    def service(self, details: Any) -> Any:
        path, metadata = details.method, details.invocation_metadata

        def handle(body: bytes, context: Any) -> bytes:
            return self._handle(path, metadata, body, context)

        return grpc.unary_unary_rpc_method_handler(handle)

    def _handle(self, path: str, metadata: Iterable[Any], body: bytes, context: Any) -> bytes:
        method = path.rpartition("/")[2]
        collection, rows = _described(method, body)
        call = Call(time.monotonic(), self.process, method, collection, rows)
        passed_on = [
            pair for pair in metadata if not pair[0].startswith((":", "grpc-", "user-agent"))
        ]

        def forward() -> bytes:
            if self._closed:
                raise Unavailable
            invoke = self._channel.unary_unary(path)
            return bytes(
                invoke(body, timeout=FORWARD_SECONDS, metadata=passed_on, wait_for_ready=True)
            )

        try:
            return bytes(self.deliver(call, forward))
        except grpc.RpcError as error:
            context.set_trailing_metadata(tuple(error.trailing_metadata() or ()))
            context.abort(error.code(), error.details())
            raise
