"""Clients that speak the protocol and mean harm: what another user still gets while they go on, by counting.

How long the other waits, and how much memory the proxy takes, is measured by benchmarks/hostile_proxy.py.
"""

import asyncio
import errno
import os
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import pytest
from pymilvus.grpc_gen import milvus_pb2, schema_pb2

from milvus_hubness.milvus.proxy import admission, connections, intake
from milvus_hubness.milvus.proxy.connections import CROWDED, Connections
from milvus_hubness.milvus.proxy.headers import identity_in
from milvus_hubness.milvus.proxy.options import CALLS_OF_CONNECTION, CALLS_OF_USER
from milvus_hubness.milvus.proxy.shares import Shares
from tests.milvus.proxy.raw_calls import OTHER, SERVICE, UNLIMITED, VALID, by, refused
from tests.milvus.proxy.running import ProxyHere, ProxyProcess, eventually
from tests.milvus.proxy.upstreams import FakeUpstream
from tests.support.http2 import Http2

CALL_SECONDS = 15
MIB = 1 << 20


@pytest.fixture
def upstream():
    here = FakeUpstream(tokens={VALID, OTHER}, threads=32)
    yield here
    here.stop()


def call(address, token, method="Flush", message=b"x"):
    """A call on a connection of its own, as a client that begins makes it."""
    options = [("grpc.use_local_subchannel_pool", 1), *UNLIMITED]
    with grpc.insecure_channel(address, options) as channel:
        return channel.unary_unary(SERVICE + method)(
            message, metadata=by(token), timeout=CALL_SECONDS
        )


def caller(token):
    return identity_in(tuple(by(token)))


def expect(is_so):
    assert is_so


# -- calls that never send their message ----------------------------------------------------------------------


USERS = [VALID, "dGhpcmQ=", "Zm91cnRo", "ZmlmdGg="]


@pytest.mark.parametrize("method", ["Search", "Flush"])
@pytest.mark.parametrize("users", [1, 2, 4])
def test_silent_calls_with_a_header_each_hold_up_no_other_user(upstream, users, method):
    """The other's call is answered while they stand. Four users have all turns, so one of theirs ends for it."""
    upstream.tokens.update(USERS)
    with ProxyHere(upstream.address) as proxy, Http2(proxy.address) as silent:
        for number in range(32):
            silent.begin(SERVICE + method, by(USERS[number % users], ("x-foo", str(number))))
        eventually(lambda: expect(proxy.proxy.intake.calls.held == 32))
        assert call(proxy.address, OTHER) == b"x"
        eventually(lambda: expect(proxy.proxy.intake.calls.held >= (31 if users == 4 else 32)))


def test_a_message_that_stops_before_its_end_ends_for_others(upstream):
    upstream.tokens.update(USERS)
    with ProxyHere(upstream.address) as proxy, ExitStack() as stack:
        for token in USERS * 2:
            slow = stack.enter_context(Http2(proxy.address))
            slow.send(slow.begin(SERVICE + "Insert", by(token)), bytes(MIB), missing=1)
        eventually(lambda: expect(proxy.proxy.intake.calls.held == 8))
        assert call(proxy.address, OTHER) == b"x"


def test_a_user_has_a_number_of_calls_and_others_have_theirs(upstream):
    """On connections of which each has fewer than one may have."""
    count = CALLS_OF_USER // CALLS_OF_CONNECTION + 1
    each = CALLS_OF_USER // count + 10
    with ProxyHere(upstream.address) as proxy, ExitStack() as stack:
        connections = [stack.enter_context(Http2(proxy.address)) for _ in range(count)]
        for connection in connections:
            for number in range(each):
                connection.begin(SERVICE + "Search", by(VALID, ("x-foo", str(number))))
        eventually(lambda: expect(proxy.proxy.intake.calls.held_by(caller(VALID)) == CALLS_OF_USER))
        assert call(proxy.address, OTHER) == b"x"
        error = refused(lambda: call(proxy.address, VALID))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"{CALLS_OF_USER:,} calls" in error.details()
        assert len(proxy.proxy.sessions.recent) == 0


def test_one_user_cannot_have_all_streams(upstream):
    half = intake.MOST_STREAMS // 2
    path = SERVICE + "CreateReplicateStream"
    with ProxyHere(upstream.address) as proxy, Http2(proxy.address) as silent:
        for _ in range(intake.MOST_STREAMS):
            silent.begin(path, by(VALID))
        eventually(lambda: expect(proxy.proxy.intake.streams.held == half))
        with grpc.insecure_channel(proxy.address) as channel:
            stream = channel.stream_stream(path)(iter([b"one"]), metadata=by(OTHER), timeout=15)
            assert list(stream) == [b"one"]


def test_what_is_assured_is_not_taken_by_others():
    shares = Shares(total=10, most=6, assured=2)
    shares.add("one", 6)
    shares.add("two", 4)
    assert shares.shortage("one", 1) == ("this user has", 6, 6)
    assert shares.shortage("three", 2) is None
    assert shares.shortage("three", 3) == ("all users have", 10, 10)
    shares.add("one", -6)
    assert shares.shortage("three", 6) is None


# -- answers that nobody takes ----------------------------------------------------------------------------------


def plain_collection():
    plain = milvus_pb2.DescribeCollectionResponse(collection_name="c")
    plain.schema.fields.add(fieldID=100, name="id", data_type=5, is_primary_key=True)
    return plain.SerializeToString()


@pytest.mark.parametrize("method", ["Query", "ShowCollections"])
def test_answers_count_until_they_are_taken(upstream, method):
    """The user of those has half of the budget, then waits, and loses its connection; another gets such an answer."""
    texts = schema_pb2.StringArray(data=["x" * MIB])
    answer = milvus_pb2.QueryResults(collection_name="c", output_fields=["text"])
    answer.fields_data.add(type=21, scalars=schema_pb2.ScalarField(string_data=texts))
    upstream.answers["DescribeCollection"] = plain_collection()
    upstream.answers[method] = answer.SerializeToString()
    request = milvus_pb2.QueryRequest(collection_name="c").SerializeToString()
    with ProxyHere(
        upstream.address, max_message=MIB, max_in_flight=12 * MIB, timing={"taking_seconds": 3.0}
    ) as proxy:
        with Http2(proxy.address, window=0) as unread:
            for _ in range(20):
                unread.send(unread.begin(SERVICE + method, by(VALID)), request)

            eventually(lambda: expect(proxy.proxy.intake.bytes.held_by(caller(VALID)) > 4 * MIB))
            assert len(call(proxy.address, OTHER, method, request)) > MIB
            assert proxy.proxy.intake.bytes.held_by(caller(VALID)) <= 6 * MIB
            with pytest.raises((EOFError, ConnectionError)):
                unread.take_all()
        eventually(lambda: expect(proxy.proxy.intake.held == 0))
        # A call is counted until its end has been told, shortly after its answer.
        eventually(lambda: expect(proxy.proxy.intake.calls.held == 0))


# -- connections --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, VALID], ids=["no token", "one user"])
def test_idle_connections_make_room_for_others(upstream, token):
    """Idle ones of who has the most are closed. A running call of another user goes on, and new ones connect."""
    with (
        ProxyHere(upstream.address, timing={"most_connections": 64}) as proxy,
        grpc.insecure_channel(proxy.address) as channel,
        ExitStack() as stack,
    ):
        running = channel.unary_unary(SERVICE + "Slow").future(b"", metadata=by(OTHER), timeout=60)
        eventually(lambda: upstream.calls[0])
        for _ in range(80):
            idle = stack.enter_context(Http2(proxy.address))
            if token is not None:
                with suppress(OSError):  # One too many is closed at once.
                    idle.send(idle.begin(SERVICE + "Flush", by(token)), b"x")

        assert eventually(lambda: call(proxy.address, OTHER)) == b"x"
        eventually(lambda: expect(len(list(proxy.proxy.connections.open_files())) < 64 * CROWDED))
        assert not running.done()
        running.cancel()


@pytest.mark.long
def test_a_process_of_1024_files_has_room_for_others(upstream):
    """The command, with connections that have sent nothing at all."""
    with ProxyProcess(upstream.address, files=1_024) as proxy, ExitStack() as stack:
        assert call(proxy.address, OTHER) == b"x"
        address, _, port = proxy.address.rpartition(":")
        for _ in range(1_050):
            stack.enter_context(socket.create_connection((address, int(port))))
        assert eventually(lambda: call(proxy.address, OTHER)) == b"x"
        [memory] = [
            line
            for line in Path(f"/proc/{proxy.process.pid}/status").read_text().splitlines()
            if line.startswith("VmHWM")
        ]
        assert int(memory.split()[1]) < 512 * 1024


@pytest.mark.parametrize("mapped", ["ipv4:127.0.0.1:5000", "ipv6:%5B::ffff:127.0.0.1%5D:5000"])
def test_a_connection_has_one_name(mapped):
    connections = Connections(64)
    assert connections.of(mapped) is connections.of("ipv4:127.0.0.1:5000")
    assert connections.of("ipv6:%5B::1%5D:5000") is not connections.of(mapped)
    assert connections.of("unix:/tmp/socket") is not connections.of("unix:/tmp/socket")


async def test_connections_are_watched_again_after_no_file_could_be_opened(monkeypatch):
    watched, list_files = Connections(64), os.listdir
    looks = []

    def out_of_files(path):
        looks.append(path)
        if len(looks) <= 2:
            raise OSError(errno.EMFILE, "Too many open files", path)
        return list_files(path)

    monkeypatch.setattr(connections.os, "listdir", out_of_files)
    watching = asyncio.create_task(watched.watch())
    while len(looks) <= 2 and not watching.done():
        await asyncio.sleep(0.01)
    assert not watching.done()
    watching.cancel()


# -- wrong tokens -------------------------------------------------------------------------------------------------


def test_tokens_that_milvus_has_not_taken_share_some_calls():
    """Milvus does not say. Who was taken before is answered, and strangers beyond some are sent away."""
    upstream = FakeUpstream(tokens={VALID, OTHER}, threads=2 * admission.MOST_QUESTIONS)
    with (
        ProxyHere(upstream.address, timing={"valid_seconds": 0.0}) as proxy,
        Http2(proxy.address) as strangers,
        Http2(proxy.address, seconds=0.5) as one_more,
    ):
        assert call(proxy.address, OTHER) == b"x"
        upstream.held.add("asking")
        for number in range(admission.MOST_STRANGERS):
            strangers.begin(SERVICE + "Search", by(f"invented{number}"))
        while b"until Milvus knows their tokens" not in one_more.statuses:
            one_more.begin(SERVICE + "Search", by("one more"))
            with suppress(TimeoutError):
                one_more.take()
        error = refused(lambda: call(proxy.address, VALID))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        upstream.held.clear()
        assert call(proxy.address, OTHER) == b"x"
        eventually(lambda: expect(proxy.proxy.intake.calls.held == 0))
        upstream.stop()
