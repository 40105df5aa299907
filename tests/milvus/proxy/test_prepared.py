"""Searches on corrected fields: what is sent for a request, the first time and later, and what comes back."""

import json
import tracemalloc

import grpc
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pymilvus.exceptions import MilvusException
from pymilvus.grpc_gen import common_pb2, milvus_pb2, schema_pb2

from milvus_hubness import NNN, Layout
from milvus_hubness.correction.codec.arrays import BYTES, encode, rounded
from milvus_hubness.correction.codec.parts import BiasSlots
from milvus_hubness.correction.codec.senders import QueryWeights
from milvus_hubness.correction.fitted import initial_state
from milvus_hubness.correction.overrides import NONE, Overrides
from milvus_hubness.correction.state import BankReference
from milvus_hubness.errors import DimensionMismatch, NonFiniteVectors
from milvus_hubness.milvus.client.operations import Operations
from milvus_hubness.milvus.client.rewrite import with_inner_bounds
from milvus_hubness.milvus.client.searches import MAX_PREPARED
from milvus_hubness.milvus.client.steps import LearnSchema
from milvus_hubness.milvus.proxy.messages import Send
from milvus_hubness.milvus.proxy.searching import PLACEHOLDERS, queries_in, search
from tests.milvus.proxy.running import ProxyHere, eventually
from tests.milvus.proxy.upstreams import FakeUpstream

DIM, NAME = 6, "c"
FIELDS = [{"name": "id", "is_primary": True}, {"name": "vector"}, {"name": "group"}]
CHANGED = ("search_params", "placeholder_group", "output_fields")
FIXED = {"field": "vector", "suffix": "", "dtype": "float32", "source": NAME, "phase": "ready"}
SEARCH = "/milvus.proto.milvus.MilvusService/Search"


def corrected(metric="COSINE", dtype="float32"):
    reference = BankReference(collection="b", generation="01", fingerprint="", count=9, size=9)
    fixed = {**FIXED, "dtype": dtype}
    return initial_state(
        Layout(DIM, metric, BiasSlots(2)), NNN(4), reference, strength=0.75, **fixed
    )


def answer_to(request, columns=()):
    """One hit for each query."""
    results = schema_pb2.SearchResultData(
        num_queries=request.nq,
        top_k=1,
        topks=[1] * request.nq,
        scores=[0.5] * request.nq,
        fields_data=columns,
    )
    results.ids.int_id.data.extend(range(request.nq))
    return milvus_pb2.SearchResults(status=common_pb2.Status(), results=results)


class Server:
    """A client's operations before a server with one corrected collection, and the requests that reached it. named: the
    output fields of its answers. Queries of another width than the field's are refused."""

    def __init__(self, state, columns=(), named=()):
        self.operations, self.columns, self.named, self.sent = (
            Operations(NONE, 60.0, 1 << 20),
            columns,
            named,
            [],
        )
        self.become(state)

    def become(self, state):
        self.state, self.description = (
            state,
            {"fields": FIELDS, "properties": {"hubness": state.to_json()}},
        )

    @property
    def prepared(self):
        return self.operations.states.remembered(NAME).prepared

    def search(self, request, overrides=NONE):
        operation = search(self.operations, request, overrides)
        try:
            step = next(operation)
            while True:
                try:
                    outcome = self._outcome(step)
                except MilvusException as error:
                    step = operation.throw(error)
                else:
                    step = operation.send(outcome)
        except StopIteration as done:
            return done.value

    def _outcome(self, step):
        if not isinstance(step, Send):
            return None if isinstance(step, LearnSchema) else self.description
        request, with_bytes = step.args
        self.sent.append(request)
        [placeholder] = common_pb2.PlaceholderGroup.FromString(
            request.placeholder_group
        ).placeholders
        if len(placeholder.values[0]) != self.state.codec.form.width * BYTES[self.state.dtype]:
            raise MilvusException(65535, "vector dimension mismatch")
        answer = answer_to(request, self.columns)
        answer.results.output_fields[:] = self.named
        return (answer, answer.SerializeToString()) if with_bytes else answer


def request_for(state, queries, pairs=(), **options):
    values = [
        value if isinstance(value, bytes) else value.tobytes()
        for value in encode(queries, state.dtype)
    ]
    placeholder = common_pb2.PlaceholderValue(
        tag="$0", type=PLACEHOLDERS[state.dtype], values=values
    )
    group = common_pb2.PlaceholderGroup(placeholders=[placeholder]).SerializeToString()
    request = milvus_pb2.SearchRequest(
        collection_name=NAME,
        placeholder_group=group,
        nq=len(queries),
        dsl_type=common_pb2.BoolExprV1,
        **options,
    )
    for key, value in pairs:
        request.search_params.add(key=key, value=value)
    return request


numbers = st.floats(-4, 4, width=16).map(lambda number: round(number, 2))
STATES = st.builds(
    corrected,
    st.sampled_from(["IP", "COSINE", "L2"]),
    st.sampled_from(["float32", "float16", "bfloat16"]),
)
QUERIES = st.lists(
    st.lists(numbers, min_size=DIM, max_size=DIM).filter(any), min_size=1, max_size=3
)
INNER = st.fixed_dictionaries(
    {},
    optional={
        "ef": st.integers(1, 99),
        "hubness_strength": st.sampled_from([0.25, 0.0]),
        "hubness_kinds": st.sampled_from([0.25, 0]),
        "radius": numbers,
    },
)
PAIRS = st.fixed_dictionaries(
    {"topk": st.integers(1, 50).map(str)},
    optional={
        "anns_field": st.just("vector"),
        "metric_type": st.just(None),
        "offset": st.integers(0, 9).map(str),
        "round_decimal": st.sampled_from(["-1", "3"]),
        "ignore_growing": st.just("False"),
        "hubness_strength": st.just("0.5"),
        "hubness_kinds": st.just("0"),
        "group_by_field": st.just("group"),
    },
)
OPTIONS = st.fixed_dictionaries(
    {"output_fields": st.lists(st.sampled_from(["id", "group", "vector", "*"]), unique=True)},
    optional={
        "dsl": st.sampled_from(["", "group > 3"]),
        "guarantee_timestamp": st.integers(0, 9),
        "partition_names": st.just(["p"]),
        "consistency_level": st.sampled_from([0, 2]),
        "use_default_consistency": st.booleans(),
        "expr_template_values": st.just({"a": schema_pb2.TemplateValue(int64_val=3)}),
    },
)


@example(corrected(), [[3.0] * DIM], [[0.5] * DIM], {"topk": "1"}, {}, {"output_fields": []}, None)
@given(STATES, QUERIES, QUERIES, PAIRS, INNER, OPTIONS, st.sampled_from([None, 0.5]))
def test_only_what_the_correction_needs_is_changed(
    state, first, second, pairs, inner, options, header
):
    if state.metric == "L2":
        inner.pop("radius", None)  # Bounds of distances are converted query by query.
    pairs = {name: state.metric if value is None else value for name, value in pairs.items()}
    server, overrides = Server(state), Overrides(header)
    for data in (first, second):
        queries = rounded(np.array(data, np.float32), state.dtype)
        request = request_for(
            state, queries, {**pairs, "params": json.dumps(inner)}.items(), **options
        )
        before = request.SerializeToString(deterministic=True)
        server.search(request, overrides)
        assert request.SerializeToString(deterministic=True) == before
        expect_rewritten(server.sent[-1], request, state, queries, {**pairs}, {**inner}, header)
        options = {**options, "dsl": "group < 7", "guarantee_timestamp": 17}
    assert len(server.sent) == 2


def expect_rewritten(sent, request, state, queries, pairs, inner, header):
    for parameters in (pairs, inner):
        parameters.pop("hubness_kinds", None)
    strength = pairs.pop("hubness_strength", None)
    strength = next(
        s for s in (strength, inner.pop("hubness_strength", None), header, 0.75) if s is not None
    )
    expected = b"".join(
        map(
            bytes,
            state.codec.pack_queries(queries, QueryWeights(float(strength), state.profile.slot)),
        )
    )
    [placeholder] = common_pb2.PlaceholderGroup.FromString(sent.placeholder_group).placeholders
    assert placeholder.type == PLACEHOLDERS[state.dtype]
    if state.dtype == "float32":
        got = np.frombuffer(b"".join(placeholder.values), "<f4")
        np.testing.assert_allclose(got, np.frombuffer(expected, "<f4"), rtol=3e-7, atol=1e-9)
    else:
        assert b"".join(placeholder.values) == expected
    params = {pair.key: pair.value for pair in sent.search_params}
    assert len(params) == len(sent.search_params)
    # A bound at the end of the metric's range bounds nothing, as corrected scores pass it.
    assert json.loads(params.pop("params")) == with_inner_bounds(inner, state.layout.metric)
    pairs.pop("metric_type", None)
    assert params == {**pairs, "round_decimal": "-1"}
    assert set(sent.output_fields) - set(request.output_fields) <= set(state.codec.decoding_fields)
    assert set(request.output_fields) <= set(sent.output_fields)
    for one in (sent, request := milvus_pb2.SearchRequest.FromString(request.SerializeToString())):
        for name in CHANGED:
            one.ClearField(name)
    assert sent == request


def test_searches_of_one_kind_are_prepared_once_and_others_apart(monkeypatch):
    """Kinds differ by parameters, fields and overrides, not by the filter or the number of queries."""
    from milvus_hubness.milvus.proxy import searching

    parsed, server = [], Server(corrected())
    parse = searching.SearchParameters
    monkeypatch.setattr(
        searching, "SearchParameters", lambda *args: parsed.append(args) or parse(*args)
    )

    def search_with(pairs=(("topk", "3"),), overrides=NONE, count=1, **options):
        before = len(parsed)
        server.search(
            request_for(server.state, np.ones((count, DIM), np.float32), pairs, **options),
            overrides,
        )
        return len(parsed) - before

    assert search_with() == 1
    assert search_with() == search_with(dsl="group > 1") == search_with(count=2) == 0
    assert search_with((("topk", "4"),)) == 1
    assert search_with(overrides=Overrides(0.5)) == search_with(output_fields=["group"]) == 1
    assert search_with(overrides=Overrides(0.5)) == search_with() == 0


@pytest.mark.parametrize("prepared", [False, True])
def test_queries_that_cannot_be_searched_are_refused_each_time(prepared):
    server = Server(corrected())
    if prepared:
        server.search(request_for(server.state, np.ones((1, DIM), np.float32)))
    sent = len(server.sent)
    for queries, refusal in (
        (np.ones((1, DIM + 1), np.float32), DimensionMismatch),
        (np.full((1, DIM), np.nan, np.float32), NonFiniteVectors),
        (np.array([[1.0] * DIM, [np.inf] * DIM], np.float32), NonFiniteVectors),
    ):
        with pytest.raises(refusal):
            server.search(request_for(server.state, queries))
    assert len(server.sent) == sent


def test_rows_with_hidden_fields_are_converted_and_others_pass_as_bytes():
    bias = schema_pb2.FieldData(field_name="hubness_bias", scalars={"float_data": {"data": [0.5]}})
    group = schema_pb2.FieldData(field_name="group", scalars={"long_data": {"data": [7]}})
    request = request_for(corrected(), np.ones((1, DIM), np.float32), output_fields=["group"])
    assert isinstance(Server(corrected(), [group]).search(request), bytes)
    shown = Server(corrected(), [group, bias]).search(request)
    assert [column.field_name for column in shown.results.fields_data] == ["group"]
    empty = Server(corrected(), named=["group", "hubness_bias"]).search(
        request
    )  # An answer without hits has no columns.
    assert list(empty.results.output_fields) == ["group"]


def test_prepared_searches_are_limited_in_number_and_size():
    """However many kinds users think of, and without the queries that each was asked first."""
    server = Server(corrected())
    one, many = np.ones((1, DIM), np.float32), np.ones((10_000, DIM), np.float32)
    server.search(
        request_for(server.state, one, output_fields=["group"], partition_names=["p" * 100_000])
    )
    assert not server.prepared
    tracemalloc.start()
    for limit in range(1, 21):
        server.search(request_for(server.state, many, [("topk", str(limit))]))
        server.sent.clear()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < many.nbytes
    for limit in range(1, MAX_PREPARED + 50):
        server.search(request_for(server.state, one, [("topk", str(limit))]))
    assert len(server.prepared) == MAX_PREPARED
    assert isinstance(server.search(request_for(server.state, one, [("topk", "9999")])), bytes)


def test_a_prepared_search_ends_with_the_state_that_it_is_for():
    """Whether the state is read again in time, or because the server refuses the queries."""
    before = corrected()
    request, server = request_for(before, np.eye(1, DIM, dtype=np.float32)), Server(before)
    server.search(request)
    refreshed = before.profile.model_copy(update={"slot": 1})
    server.become(before.model_copy(update={"profiles": {before.active: refreshed}}))
    server.operations.states.forget(NAME)
    server.search(request)
    server.become(
        initial_state(
            Layout(DIM, "COSINE", BiasSlots(20)), NNN(4), before.profile.bank, strength=0.5, **FIXED
        )
    )
    server.search(request)
    weights = [
        np.frombuffer(placeholder.values[0], np.float32)[DIM:]
        for sent in server.sent
        for placeholder in common_pb2.PlaceholderGroup.FromString(
            sent.placeholder_group
        ).placeholders
    ]
    assert [(values.argmin(), values.min()) for values in weights] == [
        (0, -0.75),
        (1, -0.75),
        (1, -0.75),
        (0, -0.5),
    ]
    assert [len(values) for values in weights] == [10, 10, 10, 26]


# -- through a proxy -------------------------------------------------------------------------------------


@pytest.fixture
def upstream():
    description = milvus_pb2.DescribeCollectionResponse(collection_name=NAME)
    for name in ("id", "vector"):
        description.schema.fields.add(
            name=name, is_primary_key=name == "id", data_type=5 if name == "id" else 101
        )
    description.properties.add(key="hubness", value=corrected().to_json())
    here = FakeUpstream({"DescribeCollection": description.SerializeToString()})
    yield here
    here.stop()


@pytest.fixture
def call(upstream):
    with ProxyHere(upstream.address) as proxy, grpc.insecure_channel(proxy.address) as channel:
        yield channel.unary_unary(SEARCH)


REQUEST = request_for(corrected(), np.ones((1, DIM), np.float32)).SerializeToString()


def test_an_answer_passes_byte_for_byte(upstream, call):
    """Also what the protocol of this proxy does not know, and in any order."""
    content = b"\xfa\x7f\x03new" + answer_to(milvus_pb2.SearchRequest(nq=1)).SerializeToString()
    upstream.answers["Search"] = content
    for _ in range(2):
        assert call(REQUEST, timeout=20) == content


def test_a_refusal_of_milvus_is_passed_on(upstream, call):
    status = common_pb2.Status(code=100, reason="not here", error_code=4)
    upstream.answers["Search"] = milvus_pb2.SearchResults(status=status).SerializeToString()
    for _ in range(2):
        assert milvus_pb2.SearchResults.FromString(call(REQUEST, timeout=20)).status == status


def test_a_search_has_the_deadline_of_its_caller_and_ends_with_it(upstream, call):
    upstream.held.add("Search")
    with pytest.raises(grpc.RpcError) as failed:
        call(REQUEST, timeout=1)
    assert failed.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert {path: left < 2 for path, _, left in upstream.calls}[SEARCH]
    assert upstream.cancelled.wait(10)


def test_a_search_that_is_cancelled_is_cancelled_upstream(upstream, call):
    upstream.held.add("Search")
    running = call.future(REQUEST)
    eventually(lambda: {path: left for path, _, left in upstream.calls}[SEARCH])
    running.cancel()
    assert upstream.cancelled.wait(10)
    assert all(left > 1e9 for _, _, left in upstream.calls)  # No deadline is gRPC's longest time.


def test_queries_of_half_precision_are_read_as_numbers():
    state = corrected(dtype="float16")
    request = request_for(state, np.full((2, DIM), 0.5, np.float32))
    assert queries_in(request.placeholder_group, state).tolist() == [[0.5] * DIM] * 2
