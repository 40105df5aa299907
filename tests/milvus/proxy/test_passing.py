"""What goes by the proxy unseen, and what goes along with it."""

import time

import grpc
import pytest
from pymilvus import MilvusClient
from pymilvus.exceptions import MilvusException

from tests.milvus.proxy.raw_calls import SERVICE
from tests.milvus.proxy.running import LiteServer, ProxyHere, eventually


@pytest.mark.parametrize(
    "path", [SERVICE + "Flush", SERVICE + "OfTomorrow", "/grpc.health.v1.Health/Check"]
)
def test_bytes_and_metadata_pass_both_ways(upstream, channel, path):
    message = bytes(range(256))
    sent = [
        ("authorization", "cm9vdDpNaWx2dXM="),
        ("dbname", "elsewhere"),
        ("trace-bin", b"\x00\x01"),
    ]
    response, call = channel.unary_unary(path).with_call(message, metadata=sent, timeout=20)
    assert response == message
    assert ("first", "1") in call.initial_metadata()
    assert {("last", "2"), ("last-bin", b"\x00\xff")} <= set(call.trailing_metadata())
    [(reached, metadata, left)] = upstream.calls
    assert reached == path
    assert dict(sent).items() <= metadata.items()
    assert 5 < left < 21  # gRPC sends it rounded up.


def test_streams_pass_message_by_message(channel):
    stream = channel.stream_stream(SERVICE + "CreateReplicateStream")
    messages = [b"one", b"", b"three" * 1000]
    assert list(stream(iter(messages), timeout=20)) == messages
    assert list(channel.unary_stream(SERVICE + "DumpMessages")(b"one", timeout=20)) == [b"one"]


@pytest.mark.parametrize("size", [0, 3 << 20])
@pytest.mark.parametrize("path", [SERVICE + "Fail", "/grpc.health.v1.Health/Fail"])
def test_statuses_pass_with_details_and_metadata(channel, path, size):
    for _ in range(
        20
    ):  # The upstream's word and the failure to write the rest to it come in either order.
        with pytest.raises(grpc.RpcError) as failed:
            channel.unary_unary(path)(bytes(size), timeout=20)
        assert failed.value.code() == grpc.StatusCode.PERMISSION_DENIED
        assert failed.value.details() == "not you"
        assert ("last", "2") in failed.value.trailing_metadata()


def test_an_upstream_may_end_well_before_all_is_said(channel):
    for _ in range(20):
        call = channel.stream_stream("/grpc.health.v1.Health/Enough")
        assert list(call(iter([bytes(3 << 20)] * 2), timeout=20)) == [b"enough"]


def test_a_deadline_holds_here_and_there(upstream, channel):
    began = time.monotonic()
    with pytest.raises(grpc.RpcError) as failed:
        channel.unary_unary(SERVICE + "Slow")(b"", timeout=1)
    assert failed.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert upstream.cancelled.wait(10)
    assert time.monotonic() - began < 10


def test_who_cancels_cancels_there(upstream, channel):
    call = channel.unary_unary(SERVICE + "Slow").future(b"", timeout=60)
    eventually(lambda: upstream.calls[0])
    call.cancel()
    assert upstream.cancelled.wait(10)


def test_messages_may_come_compressed(channel):
    call = channel.unary_unary(SERVICE + "Flush")
    assert call(b"x" * 10_000, compression=grpc.Compression.Gzip, timeout=20) == b"x" * 10_000


def test_a_message_beyond_the_limit_is_refused(upstream):
    with ProxyHere(upstream.address, max_message=1 << 20) as proxy:
        options = [("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(proxy.address, options) as channel:
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(SERVICE + "Insert")(bytes(2 << 20), timeout=20)
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert channel.unary_unary(SERVICE + "Flush")(b"small", timeout=20) == b"small"
    assert [path for path, _, _ in upstream.calls] == [SERVICE + "Flush"]


def test_an_upstream_that_dies_is_unavailable_until_it_is_back(tmp_path):
    server = LiteServer(tmp_path / "lite.db").start()
    with ProxyHere(server.address) as proxy:
        client = eventually(lambda: MilvusClient(proxy.uri))
        client.create_collection("here", 8)
        server.kill()
        with grpc.insecure_channel(proxy.address) as channel:
            for method in ("Search", "ShowCollections"):
                with pytest.raises(grpc.RpcError) as failed:
                    channel.unary_unary(SERVICE + method)(b"", timeout=20)
                assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
        server.start()
        assert eventually(client.list_collections) == ["here"]
        client.load_collection("here")
        assert eventually(lambda: client.search("here", [[0.5] * 8])) == [[]]
        client.close()
    server.kill()


def test_what_is_no_request_is_refused(channel):
    with pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(SERVICE + "Search")(b"\xff\xff", timeout=20)
    assert refused.value.code() == grpc.StatusCode.INTERNAL


def test_a_client_that_finds_nobody_hears_so_as_from_milvus(upstream):
    with ProxyHere(upstream.address) as proxy:
        upstream.stop()
        with pytest.raises(MilvusException):
            MilvusClient(proxy.uri, timeout=2)
