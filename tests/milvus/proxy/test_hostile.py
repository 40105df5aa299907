"""Malformed and hostile messages: each is answered with a status, no traceback is logged, others search on."""

import grpc
import numpy as np
import pytest
from pymilvus import MilvusClient
from pymilvus.grpc_gen import common_pb2, milvus_pb2

from milvus_hubness.milvus.proxy import messages
from milvus_hubness.milvus.pymilvus_private import connection_of
from tests.milvus.proxy.hostile import DIM, as_json, hostile_messages, search_of
from tests.milvus.proxy.raw_calls import SERVICE, UNLIMITED
from tests.milvus.proxy.running import ProxyHere, ProxyProcess
from tests.support.galleries import vectors
from tests.support.reranked import Enabled

CALL_SECONDS = 15
EVERY = 20
"""Hostile calls between two searches of the other user."""


def send_all(address, target, calls):
    """Send hostile calls of one user between the searches of another. Return what is wrong, one line each."""
    query = vectors(np.random.default_rng(8), 1, DIM)
    client = MilvusClient(f"http://{address}", token="other:user")

    def found():
        [hits] = client.search(target, data=query, limit=10, filter="id < 60", timeout=CALL_SECONDS)
        return hits.ids

    expected, wrong = found(), []
    with grpc.insecure_channel(address, UNLIMITED) as channel:
        for number, call in enumerate(calls):
            method, message, metadata = call
            try:
                answer = channel.unary_unary(SERVICE + method)(
                    message, metadata=metadata, timeout=CALL_SECONDS
                )
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                    wrong.append(f"no answer: {as_json(call)}")
                if "Unexpected" in error.details():  # gRPC's, about a handler that raised.
                    wrong.append(f"{error.details()}: {as_json(call)}")
            else:
                if b"Error: " in answer and len(answer) > 10_000:
                    wrong.append(f"a refusal of {len(answer)} bytes: {as_json(call)}")
            if number % EVERY == 0 and found() != expected:
                wrong.append(f"another answer after {as_json(call)}")
    if found() != expected:
        wrong.append("another answer in the end")
    client.close()
    return wrong


def traceback_in(records):
    return [
        record.getMessage()
        for record in records
        if record.exc_info or "Traceback" in record.getMessage()
    ]


def test_hostile_messages_are_answered(lite, target, caplog, record_property):
    calls = hostile_messages(target, seed=1, count=150)
    with ProxyHere(lite.uri.removeprefix("http://")) as proxy:
        assert send_all(proxy.address, target, calls) == []
    assert traceback_in(caplog.records) == []
    record_property("counts", f"hostile messages: {len(calls)} answered")


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, 3])
def test_many_hostile_messages_are_answered(lite, target, seed, capfd, record_property):
    """By the command, whose standard error is all that it logs."""
    calls = hostile_messages(target, seed, count=900)
    with ProxyProcess(lite.uri.removeprefix("http://")) as proxy:
        assert send_all(proxy.address, target, calls) == []
        assert proxy.stop() == 0
    logged = capfd.readouterr().err
    lines = len(logged.splitlines())
    record_property(
        "counts", f"hostile messages, seed {seed}: {len(calls)} answered, {lines} lines logged"
    )
    assert "Traceback" not in logged
    assert len(calls) > 800


WRONG_DECIMALS = ("7", "-2", "10000000000", "9" * 400)
"""Milvus rounds to -1, for none, up to 6 decimals."""


def test_decimals_that_milvus_refuses(lite, target):
    """Where the proxy rounds, it refuses as pymilvus does: NumPy has an OverflowError from 2^31 on."""
    with (
        ProxyHere(lite.uri.removeprefix("http://")) as proxy,
        grpc.insecure_channel(proxy.address) as channel,
    ):
        for decimals in WRONG_DECIMALS:
            hybrid = milvus_pb2.HybridSearchRequest(
                collection_name=target, requests=[search_of(target)] * 2
            )
            merged = {
                "strategy": "weighted",
                "params": '{"weights": [0.5, 0.5]}',
                "limit": "3",
                "round_decimal": decimals,
            }
            hybrid.rank_params.extend(
                common_pb2.KeyValuePair(key=name, value=value) for name, value in merged.items()
            )
            for method, message in (
                ("Search", search_of(target, {"round_decimal": decimals})),
                ("HybridSearch", hybrid),
            ):
                answer = channel.unary_unary(SERVICE + method)(
                    message.SerializeToString(), timeout=CALL_SECONDS
                )
                status = milvus_pb2.SearchResults.FromString(answer).status
                assert f"`round_decimal` value {decimals[:7]}" in status.reason, (method, status)


@pytest.mark.parametrize("request_type", [milvus_pb2.InsertRequest, milvus_pb2.UpsertRequest])
def test_a_number_of_rows_alone_makes_no_rows(lite, request_type):
    """Where biases are beside the vectors, the proxy makes an object of each."""
    enabled = Enabled(lite, "IP")
    request = request_type(collection_name=enabled.name, num_rows=5_000_000)
    method = messages.method_of(request)
    with grpc.insecure_channel(connection_of(enabled.client).server_address) as channel:
        answer = channel.unary_unary(SERVICE + method)(
            request.SerializeToString(), timeout=CALL_SECONDS
        )
    status = milvus_pb2.MutationResult.FromString(answer).status
    assert "cannot have 5,000,000 rows" in status.reason


def test_a_failure_that_nobody_foresaw_is_logged_in_some_lines(lite, target, caplog, monkeypatch):
    """One line each, five in ten seconds: whoever may call could fill a disk."""

    def broken(*args):
        raise KeyError("a\nkey" * 1_000)

    monkeypatch.setattr("milvus_hubness.milvus.proxy.messages.overrides_in", broken)
    message = search_of(target).SerializeToString()
    with (
        ProxyHere(lite.uri.removeprefix("http://")) as proxy,
        grpc.insecure_channel(proxy.address) as channel,
    ):
        for _ in range(12):
            assert b"KeyError" in channel.unary_unary(SERVICE + "Search")(
                message, timeout=CALL_SECONDS
            )
    lines = [record.getMessage() for record in caplog.records if record.name == "milvus_hubness"]
    assert len(lines) == 5
    assert all(
        line.startswith("Search failed: KeyError") and "\n" not in line and len(line) < 500
        for line in lines
    )
    assert traceback_in(caplog.records) == []
