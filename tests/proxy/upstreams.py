"""An upstream that is no Milvus: it tells what reaches it, and answers as it is told to."""

import threading
from concurrent import futures

import grpc


class FakeUpstream:
    """calls: (path, metadata, seconds left) of each. A call of Slow waits until it is cancelled, Fail ends
    with details and trailing metadata, Enough with a word of its own, neither listening; others echo, streams
    message by message."""

    def __init__(self):
        self.calls = []
        self.cancelled = threading.Event()
        self.server = grpc.server(futures.ThreadPoolExecutor(4), handlers=[Handler(self)])
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def stop(self):
        self.server.stop(0).wait()


class Handler(grpc.GenericRpcHandler):
    def __init__(self, upstream):
        self.upstream = upstream

    def service(self, details):
        def answer(messages, context):
            metadata = dict(context.invocation_metadata())
            self.upstream.calls.append((details.method, metadata, context.time_remaining()))
            context.send_initial_metadata([("first", "1")])
            context.set_trailing_metadata([("last", "2"), ("last-bin", b"\x00\xff")])
            if details.method.endswith("Slow"):
                context.add_callback(self.upstream.cancelled.set)
                self.upstream.cancelled.wait(20)
            if details.method.endswith("Fail"):
                context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")
            if details.method.endswith("Enough"):
                yield b"enough"
                return
            yield from messages

        return grpc.stream_stream_rpc_method_handler(answer)
