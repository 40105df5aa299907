"""How much is in memory: turns to receive, a budget for large messages, and a number of parts."""

import gc
import threading
import tracemalloc

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pymilvus import MilvusClient
from pymilvus.grpc_gen import common_pb2, milvus_pb2, schema_pb2

from milvus_hubness.milvus.proxy import intake
from milvus_hubness.milvus.proxy.wire import count_parts
from tests.milvus.proxy.hostile import DIM
from tests.milvus.proxy.raw_calls import OTHER, SERVICE, UNLIMITED, VALID, by, refused
from tests.milvus.proxy.running import ProxyHere, eventually
from tests.support.galleries import vectors

MIB = 1 << 20


@pytest.fixture
def proxy(upstream):
    with ProxyHere(upstream.address, max_message=MIB, max_in_flight=2 * MIB) as here:
        yield here
        upstream.cancelled.set()


def padded(size, method="Query"):
    """A request of that size, with an unknown field."""
    request = milvus_pb2.QueryRequest(collection_name="c").SerializeToString()
    length = size - len(request) - 6
    return request + b"\xfa\x3f" + varint(length) + bytes(length)


def varint(number):
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


@pytest.mark.parametrize("held", ["Flush", "DescribeCollection"])
def test_a_user_has_half_of_the_budget(upstream, proxy, channel, held):
    """A call that is passed on, and one that waits for the state of its collection."""
    method = "Flush" if held == "Flush" else "Query"
    upstream.held.add(held)
    upstream.answers["ShowCollections"] = b"done"
    call, large = channel.unary_unary(SERVICE + method), padded(900_000)
    waiting = call.future(large, metadata=by(VALID), timeout=30)
    eventually(lambda: upstream.calls[0])
    error = refused(lambda: call(large, metadata=by(VALID), timeout=15))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "--max-in-flight-mib" in error.details()
    assert "\n" not in error.details()
    flush = channel.unary_unary(SERVICE + "ShowCollections")
    assert flush(b"small", metadata=by(VALID), timeout=15) == b"done"
    assert flush(large, metadata=by(OTHER), timeout=15) == b"done"
    waiting.cancel()
    assert eventually(lambda: flush(large, metadata=by(VALID), timeout=15)) == b"done"

    def nothing_is_held():
        assert proxy.proxy.intake.held == 0

    eventually(nothing_is_held)


def test_all_users_have_the_budget_together(upstream, channel):
    upstream.held.add("Flush")
    flush, large = channel.unary_unary(SERVICE + "Flush"), bytes(900_000)
    waiting = [flush.future(large, metadata=by(user), timeout=30) for user in (VALID, OTHER)]
    eventually(lambda: upstream.calls[1])
    error = refused(lambda: flush(large, metadata=by("dGhpcmQ="), timeout=15))
    assert (error.code(), "all users have" in error.details()) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        True,
    )
    for call in waiting:
        call.cancel()


@pytest.mark.parametrize("method", ["Insert", "Upsert", "Delete", "Import"])
def test_what_is_done_is_answered_whatever_is_held(upstream, channel, method):
    """A refusal would have the caller write its rows a second time."""
    described = milvus_pb2.DescribeCollectionResponse(collection_name="c")
    described.schema.fields.add(name="id", is_primary_key=True)
    upstream.answers["DescribeCollection"] = described.SerializeToString()
    count = 1_900 if method == "Import" else 60_000
    keys = schema_pb2.IDs(int_id=schema_pb2.LongArray(data=range(count)))
    upstream.answers[method] = milvus_pb2.MutationResult(IDs=keys).SerializeToString()
    upstream.held.add("Flush")
    waiting = channel.unary_unary(SERVICE + "Flush").future(
        bytes(MIB - 2_000), metadata=by(VALID), timeout=30
    )
    eventually(lambda: upstream.calls[0])
    request = milvus_pb2.DeleteRequest(collection_name="c").SerializeToString()
    answer = channel.unary_unary(SERVICE + method)(request, metadata=by(VALID), timeout=15)
    assert len(milvus_pb2.MutationResult.FromString(answer).IDs.int_id.data) == count
    waiting.cancel()


@pytest.mark.parametrize("method", ["Search", "Flush"])
def test_messages_that_never_come_hold_up_no_other_user(upstream, method):
    gone = threading.Event()

    def nothing():
        gone.wait(30)
        yield b""

    with (
        ProxyHere(upstream.address, timing={"arrival_seconds": 1.0}) as proxy,
        grpc.insecure_channel(proxy.address, UNLIMITED) as channel,
    ):
        begun = [
            channel.stream_stream(SERVICE + method)(nothing(), metadata=by(VALID), timeout=30)
            for _ in range(intake.RECEIVING)
        ]
        assert channel.unary_unary(SERVICE + "Flush")(b"x", metadata=by(OTHER), timeout=0.9) == b"x"
        errors = [refused(lambda call=call: list(call)) for call in begun]
        gone.set()
        assert {error.code() for error in errors} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert "did not arrive within" in errors[0].details()
        assert channel.unary_unary(SERVICE + "Flush")(b"x", metadata=by(VALID), timeout=15) == b"x"


def test_a_call_without_a_message_ends(channel):
    call = channel.stream_stream(SERVICE + "Search")(iter(()), metadata=by(VALID), timeout=15)
    assert refused(lambda: list(call)).code() == grpc.StatusCode.INVALID_ARGUMENT


# -- parts ----------------------------------------------------------------------------------------------------


def empty(descriptor, name, count):
    number = descriptor.fields_by_name[name].number
    return bytes([number << 3 | 2, 0]) * count


def many_parts():
    placeholders = empty(common_pb2.PlaceholderGroup.DESCRIPTOR, "placeholders", 300_000)
    hybrid = milvus_pb2.HybridSearchRequest(
        collection_name="c", requests=[milvus_pb2.SearchRequest(placeholder_group=placeholders)]
    )
    return {
        "Search": empty(milvus_pb2.SearchRequest.DESCRIPTOR, "search_params", 300_000),
        "Query": empty(milvus_pb2.QueryRequest.DESCRIPTOR, "output_fields", 300_000),
        "HybridSearch": hybrid.SerializeToString(),
        "Delete": empty(milvus_pb2.DeleteRequest.DESCRIPTOR, "hash_keys", 300_000),
    }


@pytest.mark.parametrize("method", list(many_parts()))
def test_small_parts_of_a_large_message_are_counted_before_it_is_parsed(upstream, channel, method):
    error = refused(lambda: channel.unary_unary(SERVICE + method)(many_parts()[method], timeout=15))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "100,000 parts" in error.details()
    assert upstream.calls == []


@st.composite
def inserts(draw):
    texts = draw(st.lists(st.text(max_size=3), max_size=20))
    arrays = [schema_pb2.ScalarField(long_data=schema_pb2.LongArray(data=[1])) for _ in texts]
    request = milvus_pb2.InsertRequest(collection_name="c", num_rows=len(texts))
    request.fields_data.add(
        scalars=schema_pb2.ScalarField(string_data=schema_pb2.StringArray(data=texts))
    )
    request.fields_data.add(
        scalars=schema_pb2.ScalarField(array_data=schema_pb2.ArrayArray(data=arrays))
    )
    return request, len(texts)


@given(inserts())
def test_each_field_of_each_message_is_a_part(case):
    request, rows = case
    # The name, a number unless it is 0, and two columns of three nested messages; texts; arrays with a list each.
    expected = 1 + bool(rows) + 2 * 3 + rows + 3 * rows
    assert count_parts(request.DESCRIPTOR, request.SerializeToString(), 10_000) == expected


@given(st.binary(max_size=60))
def test_any_bytes_are_counted(data):
    assert 0 <= count_parts(milvus_pb2.InsertRequest.DESCRIPTOR, data, 1_000) <= len(data)


def test_the_count_stops_beyond_the_most():
    message = empty(milvus_pb2.SearchRequest.DESCRIPTOR, "search_params", 10_000)
    assert count_parts(milvus_pb2.SearchRequest.DESCRIPTOR, message, 99) == 100


def test_a_message_nested_without_end_is_counted():
    number = milvus_pb2.HybridSearchRequest.DESCRIPTOR.fields_by_name["requests"].number
    nested = b""
    for _ in range(300):
        nested = bytes([number << 3 | 2]) + varint(len(nested)) + nested
    assert count_parts(milvus_pb2.HybridSearchRequest.DESCRIPTOR, nested, 1_000) <= 300


# -- on a corrected collection ----------------------------------------------------------------------------------


def test_large_messages_are_answered_as_small_ones(lite, target):
    """Any message is large here, so threads parse, rewrite and write it."""
    upstream = lite.uri.removeprefix("http://")
    queries = vectors(np.random.default_rng(7), 3, DIM)

    def answers(key, **timing):
        with ProxyHere(upstream, timing=timing) as proxy:
            client = MilvusClient(proxy.uri)
            row = {"id": key, "vector": queries[0], "group": 1}
            assert client.insert(target, row)["insert_count"] == 1
            found = client.search(target, data=queries, limit=5, output_fields=["group", "vector"])
            [seen] = client.query(target, filter=f"id == {key}", output_fields=["vector"])
            assert client.delete(target, ids=[key])
            with pytest.raises(Exception, match="dimension"):
                client.search(target, data=[[0.5] * (DIM + 1)])
            client.close()
        return [
            [(hit.id if hit.id != key else "new", hit.distance) for hit in hits] for hits in found
        ], seen["vector"]

    expected = answers(900)
    found = answers(901, large=0)
    assert [[key for key, _ in hits] for hits in found[0]] == [
        [key for key, _ in hits] for hits in expected[0]
    ]
    np.testing.assert_allclose(found[1], expected[1])


def wrong_dimension(target):
    placeholder = common_pb2.PlaceholderValue(
        tag="$0", type=common_pb2.PlaceholderType.FloatVector, values=[bytes(4 * 250_000)] * 4
    )
    group = common_pb2.PlaceholderGroup(placeholders=[placeholder]).SerializeToString()
    request = milvus_pb2.SearchRequest(collection_name=target, placeholder_group=group, nq=4)
    return "Search", request.SerializeToString()


def malformed(target):
    return "Search", wrong_dimension(target)[1] + b"\xff"


def no_collection(target):
    return "Query", milvus_pb2.QueryRequest(
        collection_name="nowhere", expr="x" * 4_000_000
    ).SerializeToString()


def wrong_rows(target):
    request = milvus_pb2.InsertRequest(collection_name=target, num_rows=3)
    numbers = schema_pb2.FloatArray(data=[1.0] * 1_000_000)
    request.fields_data.add(
        field_name="vector", vectors=schema_pb2.VectorField(dim=DIM, float_vector=numbers)
    )
    return "Insert", request.SerializeToString()


@pytest.mark.parametrize("large", [0, 1 << 30], ids=["in threads", "on the loop"])
@pytest.mark.parametrize("kind", [wrong_dimension, malformed, no_collection, wrong_rows])
def test_a_call_that_failed_leaves_nothing_in_memory(lite, target, kind, large):
    """Without a garbage collection: an error whose frames hold it and the request is a circle."""
    method, message = kind(target)
    with (
        ProxyHere(lite.uri.removeprefix("http://"), timing={"large": large}) as proxy,
        grpc.insecure_channel(proxy.address, UNLIMITED) as channel,
    ):
        call = channel.unary_unary(SERVICE + method)

        def fail():
            try:
                answer = call(message, timeout=20)
            except grpc.RpcError as error:
                return error.code()
            return milvus_pb2.SearchResults.FromString(answer).status.reason

        assert fail()
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(5):
                fail()

            def freed():
                kept = [
                    trace.size
                    for trace in tracemalloc.take_snapshot().traces
                    if trace.size > 500_000
                ]
                assert kept == []

            eventually(freed, seconds=3)
        finally:
            tracemalloc.stop()
            gc.enable()
