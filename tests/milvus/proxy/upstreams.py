"""Upstreams that tests command: one that is no Milvus, and one that stands between a proxy and Milvus."""

import threading
from concurrent import futures

import grpc

from milvus_hubness.milvus.proxy.admission import QUESTION
from milvus_hubness.milvus.proxy.messages import request_of


class FakeUpstream:
    """calls: (path, metadata, seconds left) of each but those that ask whether a token is valid, whose metadata are in
    `asked`. tokens: authorizations that it takes; None takes all. A call of Slow, or of a method that is held, waits
    until it is cancelled, Fail ends with details and trailing metadata, Enough with a word of its own, neither
    listening. Others are answered as `answers` says, by method, or echo, streams message by message."""

    def __init__(self, answers=(), tokens=None, threads=4):
        self.tokens = tokens
        self.calls, self.held, self.answers = [], {"Slow"}, dict(answers)
        self.asked = []
        self.cancelled = threading.Event()
        self.server = grpc.server(
            futures.ThreadPoolExecutor(threads),
            handlers=[Handler(self)],
            options=[("grpc.max_receive_message_length", -1)],
        )
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def stop(self):
        self.cancelled.set()
        self.server.stop(0).wait()


class Handler(grpc.GenericRpcHandler):
    def __init__(self, upstream):
        self.upstream = upstream

    def service(self, details):
        def answer(messages, context):
            metadata = dict(context.invocation_metadata())
            if details.method == QUESTION:
                self.upstream.asked.append(metadata)
                if "asking" in self.upstream.held:
                    self.upstream.cancelled.wait(20)
            if (
                self.upstream.tokens is not None
                and metadata.get("authorization") not in self.upstream.tokens
            ):
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "auth check failure")
            if details.method == QUESTION:
                yield from messages
                return
            self.upstream.calls.append((details.method, metadata, context.time_remaining()))
            context.send_initial_metadata([("first", "1")])
            context.set_trailing_metadata([("last", "2"), ("last-bin", b"\x00\xff")])
            method = details.method.rpartition("/")[2]
            if method in self.upstream.held:
                context.add_callback(self.upstream.cancelled.set)
                self.upstream.cancelled.wait(20)
            if details.method.endswith("Fail"):
                context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")
            if details.method.endswith("Enough"):
                yield b"enough"
                return
            yield from (
                [self.upstream.answers[method]] if method in self.upstream.answers else messages
            )

        return grpc.stream_stream_rpc_method_handler(answer)


class Relay:
    """Between a proxy and Milvus: notes the calls that reach it, and does not answer those that it holds.

    calls: (method, collection, seconds left) of each, collection None where a request names none. held,
    unavailable: what is not answered until `released` is set, and what is answered with UNAVAILABLE, as
    (method, collection). What was cancelled by then is not passed on: `cancelled` is set.
    """

    def __init__(self, address):
        self.calls, self.held, self.unavailable = [], set(), set()
        self.released, self.cancelled = threading.Event(), threading.Event()
        self.channel = grpc.insecure_channel(address)
        self.server = grpc.server(futures.ThreadPoolExecutor(64), handlers=[RelayHandler(self)])
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def reached(self, method, collection):
        """The seconds that each of these calls had left."""
        return [left for *call, left in self.calls if call == [method, collection]]

    def stop(self):
        self.released.set()
        self.server.stop(0).wait()
        self.channel.close()


class RelayHandler(grpc.GenericRpcHandler):
    def __init__(self, relay):
        self.relay = relay

    def service(self, details):
        method = details.method.rpartition("/")[2]

        def answer(message, context):
            relay = self.relay
            call = method, getattr(request_of(method, message), "collection_name", None)
            relay.calls.append((*call, context.time_remaining()))
            if call in relay.unavailable:
                context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
            if call in relay.held:
                context.add_callback(lambda: relay.released.is_set() or relay.cancelled.set())
                relay.released.wait(60)
                if not context.is_active():
                    context.abort(grpc.StatusCode.CANCELLED, "nobody waits")
            metadata = [pair for pair in context.invocation_metadata() if pair[0] != "user-agent"]
            return relay.channel.unary_unary(details.method)(message, metadata=metadata, timeout=60)

        return grpc.unary_unary_rpc_method_handler(answer)
