"""Who is heard: a token is known to be valid before a message is received, and two entries of one are refused."""

import base64
import threading
import time

import grpc
import pytest
from pymilvus.grpc_gen import common_pb2, milvus_pb2

from milvus_hubness.milvus.proxy.admission import Refusal, Remembered
from milvus_hubness.milvus.proxy.headers import identity_in, passed_on
from milvus_hubness.milvus.proxy.options import ProxyOptions
from milvus_hubness.milvus.proxy.sessions import (
    MAX_SESSIONS_OF_USER,
    CallerChannel,
    Sessions,
)
from tests.milvus.proxy.raw_calls import INVALID, OTHER, SERVICE, VALID, by, refused
from tests.milvus.proxy.running import ProxyHere, eventually
from tests.milvus.proxy.upstreams import FakeUpstream

METHODS = ["Search", "Insert", "Flush", "CreateReplicateStream", "OfTomorrow"]
"""Rewritten, passed on with one message, and passed on as streams."""


@pytest.fixture
def upstream():
    here = FakeUpstream(tokens={VALID, OTHER})
    yield here
    here.stop()


@pytest.mark.parametrize(
    "metadata", [[], by(INVALID), by("?")], ids=["none", "invalid", "no base64"]
)
@pytest.mark.parametrize("method", METHODS)
def test_a_stranger_is_refused_before_it_has_sent_anything(upstream, channel, method, metadata):
    """Only the beginning of the call is sent: who reads the message first waits for ever."""
    ended = threading.Event()

    def nothing():
        ended.wait(20)
        yield b""

    call = channel.stream_stream(SERVICE + method)(nothing(), metadata=metadata, timeout=15)
    error = refused(lambda: list(call))
    ended.set()
    assert error.code() == grpc.StatusCode.UNAUTHENTICATED
    assert error.details() == "auth check failure"
    assert upstream.calls == []


@pytest.mark.parametrize("method", METHODS)
def test_megabytes_of_a_stranger_do_not_reach_milvus(upstream, channel, method):
    call = channel.unary_unary(SERVICE + method)
    error = refused(lambda: call(bytes(30 << 20), metadata=by(INVALID), timeout=15))
    assert error.code() == grpc.StatusCode.UNAUTHENTICATED
    assert upstream.calls == []


def test_milvus_is_asked_once_for_many_calls_of_a_user(upstream, channel):
    flush = channel.unary_unary(SERVICE + "Flush")
    calls = [flush.future(b"x", metadata=by(VALID), timeout=15) for _ in range(20)]
    assert {call.result() for call in calls} == {b"x"}
    assert len(upstream.asked) == 1
    assert flush(b"x", metadata=by(OTHER), timeout=15) == b"x"
    assert [asked["authorization"] for asked in upstream.asked] == [VALID, OTHER]


def test_a_refusal_is_remembered_for_a_moment_only(upstream, channel):
    flush = channel.unary_unary(SERVICE + "Flush")
    for _ in range(5):
        refused(lambda: flush(b"x", metadata=by(INVALID), timeout=15))
    assert len(upstream.asked) <= 2
    upstream.tokens.add(INVALID)  # An administrator adds the user.
    assert eventually(lambda: flush(b"x", metadata=by(INVALID), timeout=15), seconds=5) == b"x"


@pytest.mark.parametrize("method", ["Flush", "Query"])
def test_a_token_that_is_revoked_is_asked_about_at_the_next_call(upstream, channel, method):
    flush = channel.unary_unary(SERVICE + "Flush")
    assert flush(b"x", metadata=by(VALID), timeout=15) == b"x"
    upstream.tokens.remove(VALID)
    call = channel.unary_unary(SERVICE + method)
    for asked in (1, 2):  # The first call reaches Milvus, which refuses it; the second does not.
        error = refused(lambda: call(b"", metadata=by(VALID), timeout=15))
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        assert len(upstream.asked) == asked


def test_an_upstream_that_does_not_say_is_unavailable(upstream):
    upstream.held.add("asking")
    with (
        ProxyHere(upstream.address, timing={"ask_seconds": 0.5}) as proxy,
        grpc.insecure_channel(proxy.address) as channel,
    ):
        error = refused(
            lambda: channel.unary_unary(SERVICE + "Search")(b"", metadata=by(VALID), timeout=15)
        )
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "whether the token is valid" in error.details()
        upstream.held.clear()
        flush = channel.unary_unary(SERVICE + "Flush")
        assert eventually(lambda: flush(b"x", metadata=by(VALID), timeout=15)) == b"x"


def test_a_bounded_number_of_callers_is_remembered():
    remembered = Remembered(0.2, most=3)
    for i in range(10):
        remembered.put(bytes([i]), None)
    assert len(remembered) == 3
    assert remembered.get(bytes([0])) is None
    remembered.put(b"refused", Refusal(grpc.StatusCode.UNAUTHENTICATED, "not you"))
    assert remembered.get(b"refused")[1].details == "not you"
    time.sleep(0.3)
    assert remembered.get(b"refused") is None


@pytest.mark.parametrize(
    "name", ["authorization", "dbname", "hubness-strength", "hubness-kinds", "hubness-profile"]
)
@pytest.mark.parametrize("method", METHODS)
def test_two_entries_of_which_one_counts_are_refused(upstream, channel, method, name):
    twice = [(name, VALID), (name, OTHER)]
    metadata = twice if name == "authorization" else by(VALID, *twice)
    error = refused(
        lambda: channel.unary_unary(SERVICE + method)(b"", metadata=metadata, timeout=15)
    )
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert name in error.details()
    assert (upstream.calls, upstream.asked) == ([], [])


def test_two_entries_of_others_pass(upstream, channel):
    further = [("cookie", "a=1"), ("cookie", "b=2")]
    assert (
        channel.unary_unary(SERVICE + "Flush")(b"x", metadata=by(VALID, *further), timeout=15)
        == b"x"
    )


# -- what a refused call leaves as it is ----------------------------------------------------------------------


@pytest.mark.parametrize("refusal", ["token", "privilege"])
@pytest.mark.parametrize("method", ["DropCollection", "AlterAlias"])
def test_a_refused_call_empties_no_cache(upstream, method, refusal):
    """Rewritten, and passed on. Milvus refuses a token before it reads the message, a privilege in its answer."""
    plain = milvus_pb2.DescribeCollectionResponse(collection_name="kept")
    plain.schema.fields.add(fieldID=100, name="id", data_type=5, is_primary_key=True)
    upstream.answers["DescribeCollection"] = plain.SerializeToString()
    with (
        ProxyHere(upstream.address, state_ttl=3_600) as proxy,
        grpc.insecure_channel(proxy.address) as channel,
    ):

        def call(method, token, request):
            send = channel.unary_unary(SERVICE + method)
            return send(request.SerializeToString(), metadata=by(token), timeout=15)

        def states_read_for_a_query():
            before = len(upstream.calls)
            call("Query", VALID, milvus_pb2.QueryRequest(collection_name="kept"))
            return sum(path.endswith("DescribeCollection") for path, *_ in upstream.calls[before:])

        request = milvus_pb2.DropCollectionRequest(collection_name="other")
        if method == "AlterAlias":
            request = milvus_pb2.AlterAliasRequest(collection_name="other", alias="alias")
        assert [states_read_for_a_query(), states_read_for_a_query()] == [1, 0]
        # A drop also asks for the ledger, which is not there.
        missing = common_pb2.Status(code=100, error_code=4, reason="collection not found")
        upstream.answers["DescribeCollection"] = milvus_pb2.DescribeCollectionResponse(
            status=missing
        ).SerializeToString()

        if refusal == "token":
            refused(lambda: call(method, INVALID, request))
        else:
            upstream.answers[method] = common_pb2.Status(code=65_535).SerializeToString()
            assert common_pb2.Status.FromString(call(method, OTHER, request)).code == 65_535
        assert states_read_for_a_query() == 0

        upstream.answers[method] = common_pb2.Status().SerializeToString()
        assert common_pb2.Status.FromString(call(method, OTHER, request)).code == 0
        assert states_read_for_a_query() == 1


# -- who is one caller --------------------------------------------------------------------------------------

MEMBER = base64.b64encode(b"@@milvus-member@@").decode()
OF_ONE_CALLER = [
    [("x-foo", "1")],
    [("cookie", "session=1"), ("token-bin", b"\x00\xff")],
    [("dbname", "invented")],
    [("sourceid", "invented")],
    [("sourceid", base64.b64encode(b"another").decode())],
    [("client-request-id", "17"), ("identifier", "5"), ("traceparent", "00-1-2-01")],
]


def identity(*entries):
    return identity_in(passed_on(entries))


@pytest.mark.parametrize("further", OF_ONE_CALLER, ids=lambda further: further[0][0])
def test_no_entry_that_a_caller_may_invent_makes_another_caller(further):
    assert identity(*by(VALID, *further)) == identity(*by(VALID))


@pytest.mark.parametrize("spelt", ["YTpwcB==", "YTpwcC==", "YTpwcP=="])
def test_a_token_in_another_spelling_is_the_same_caller(spelt):
    """The last character of base64 may have bits at which Milvus does not look."""
    assert base64.b64encode(b"a:pp") == b"YTpwcA=="
    assert identity(*by(spelt)) == identity(*by("YTpwcA=="))


def test_tokens_and_parts_of_milvus_are_callers_of_their_own():
    callers = {
        identity(),
        identity(*by(VALID)),
        identity(*by(OTHER)),
        identity(*by("no base64?")),
        identity(("sourceid", MEMBER)),
        identity(*by(VALID, ("sourceid", MEMBER))),
    }
    assert len(callers) == 6


async def test_a_caller_has_a_session_for_each_of_some_databases():
    sessions = Sessions(ProxyOptions("localhost:1"))
    one = sessions.of(identity(*by(VALID)), "")
    assert sessions.of(identity(*by(VALID, ("x-foo", "1"))), "") is one
    others = sessions.of(identity(*by(OTHER)), "")
    assert others is not one
    for i in range(100):
        sessions.of(identity(*by(VALID, ("x-foo", str(i)))), f"invented{i}")
    assert len(sessions.recent) == 1 + MAX_SESSIONS_OF_USER
    assert sessions.of(identity(*by(OTHER)), "") is others


def test_the_proxys_own_calls_have_the_token_of_the_caller(upstream):
    caller = identity(*by(VALID, ("sourceid", MEMBER), ("x-foo", "1")))
    with grpc.insecure_channel(upstream.address) as channel:
        call = CallerChannel(channel, caller).unary_unary(SERVICE + "Flush")
        assert call(b"x", timeout=15, metadata=[("dbname", "here")]) == b"x"
    [(_, metadata, _)] = upstream.calls
    expected = {"authorization": VALID, "dbname": "here", "sourceid": MEMBER}
    assert metadata.items() >= expected.items()
    assert "x-foo" not in metadata
