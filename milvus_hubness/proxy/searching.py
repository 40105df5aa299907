"""Search requests on corrected collections and their answers, by columns. No I/O: see `client.steps`."""

from __future__ import annotations

from typing import Any

import numpy as np
from pymilvus.grpc_gen import common_pb2

from milvus_hubness.client.beside import BesideRewrite, rewrite_of
from milvus_hubness.client.knowledge import Known
from milvus_hubness.client.operations import Operations
from milvus_hubness.client.reading import FieldRequest
from milvus_hubness.client.rewrite import Question, Rewrite
from milvus_hubness.client.steps import Operation
from milvus_hubness.errors import DimensionMismatch, InvalidInput, UnsupportedOperation
from milvus_hubness.halves import BYTES, Dtype, decode
from milvus_hubness.layout import Floats
from milvus_hubness.proxy.joining import joined
from milvus_hubness.proxy.parameters import SearchParameters, Wish
from milvus_hubness.proxy.reading import ColumnReading
from milvus_hubness.proxy.steps import Send
from milvus_hubness.state import CollectionState

PLACEHOLDERS: dict[Dtype, int] = {
    "float32": common_pb2.PlaceholderType.FloatVector,
    "float16": common_pb2.PlaceholderType.Float16Vector,
    "bfloat16": common_pb2.PlaceholderType.BFloat16Vector,
}


class WireSearching(Operations):
    """Search."""

    def search_wire(self, request: Any, wish: Wish) -> Operation[Any]:
        """A SearchResults for a SearchRequest, ranked by the corrected score where its field carries biases.

        wish: where the request itself says nothing. Raises DimensionMismatch, InvalidInput, InvalidParameter,
        and UnsupportedOperation for what nobody but HubnessClient can answer.
        """
        given = SearchParameters(request.search_params)
        asked_for = given.wish.over(wish)

        def call(known: Known) -> Operation[Any]:
            state = known.searched(given.field)
            if state is None:
                return (yield from self._uncorrected(known, request))
            question = yield from self._question(known, state, request, asked_for)
            rewrite = rewrite_of(state, known.reading)
            self._expect_servable(rewrite, question, request)
            answers = []
            for each in rewrite.apart(question):
                sent, fields = _rewritten(request, rewrite, each)
                response = yield Send("Search", sent)
                _score(response.results, rewrite, each)
                ColumnReading(tuple(known.states.values())).columns_out(response.results, fields)
                answers.append(response)
            self._sample(known, state, question.profile, question.data)
            return joined(answers)

        return self._as_it_is(request.collection_name, None, call)

    def _uncorrected(self, known: Known, request: Any) -> Operation[Any]:
        if not known.states:
            return (yield Send("Search", request))
        sent, given = _copy(request), SearchParameters(request.search_params)
        named = known.uncorrected({"anns_field": given.field}).get("anns_field")
        if named:
            given.name_field(named)
        given.write(sent.search_params)
        fields = known.reading.fields(list(request.output_fields))
        sent.output_fields[:] = fields.requested or []
        response = yield Send("Search", sent)
        ColumnReading(tuple(known.states.values())).columns_out(response.results, fields)
        return response

    def _question(
        self, known: Known, state: CollectionState, request: Any, wish: Wish
    ) -> Operation[Question]:
        given = SearchParameters(request.search_params)
        if request.WhichOneof("search_input") == "ids":
            kept = request.ids.WhichOneof("id_field")
            keys = list(getattr(request.ids, kept).data) if kept else []
            found = yield from self._vectors(request.collection_name, known, state, keys, {})
            queries: Any = decode(found, state.dtype)
        else:
            queries = queries_in(request.placeholder_group, state)
        return Question(
            queries,
            limit=given.number("topk", 0),
            search_params=given.for_rewrite(),
            output_fields=list(request.output_fields),
            round_decimal=given.number("round_decimal", -1),
            strength=self._strength if wish.strength is None else wish.strength,
            profile=wish.profile,
        )

    def _expect_servable(self, rewrite: Rewrite, question: Question, request: Any) -> None:
        if request.search_by_primary_keys:
            raise UnsupportedOperation("searching by primary keys: name them as ids")
        if isinstance(rewrite, BesideRewrite) and rewrite.strength(question) != 0:
            raise UnsupportedOperation(
                f"the biases of field {rewrite.state.field!r} lie beside its vectors, which the proxy does "
                "not search: use HubnessClient, migrate the collection, or search with hubness_strength 0"
            )
        if rewrite.is_gated(question):
            raise UnsupportedOperation(
                f"searches of field {rewrite.state.field!r} are gated, which the proxy does not do: use "
                "HubnessClient, or search with hubness_strength 0"
            )


def queries_in(group: bytes, state: CollectionState) -> Floats:
    """(m, d) the queries of a placeholder group. Raises InvalidInput, DimensionMismatch."""
    placeholders = common_pb2.PlaceholderGroup.FromString(group).placeholders
    values = [value for each in placeholders for value in each.values]
    kinds = {each.type for each in placeholders}
    if not values or kinds != {PLACEHOLDERS[state.dtype]}:
        named = common_pb2.PlaceholderType.Name(PLACEHOLDERS[state.dtype])
        raise InvalidInput(f"field {state.field!r} is searched with queries of type {named}")
    size = state.dim * BYTES[state.dtype]
    for value in values:
        if len(value) != size:
            raise DimensionMismatch(
                f"vector dimension mismatch: expected vector size(byte) {size}, actual {len(value)}"
            )
    if state.dtype == "float32":
        return np.frombuffer(b"".join(values), "<f4").reshape(-1, state.dim)
    return decode(values, state.dtype)


def placeholder_group(vectors: list[Any], dtype: Dtype) -> bytes:
    """Queries, arrays of float32 or bytes of halves, as the protocol has them."""
    values = [value if isinstance(value, bytes) else value.tobytes() for value in vectors]
    placeholder = common_pb2.PlaceholderValue(tag="$0", type=PLACEHOLDERS[dtype], values=values)
    packed: bytes = common_pb2.PlaceholderGroup(placeholders=[placeholder]).SerializeToString()
    return packed


def rewritten_request(request: Any, rewrite: Rewrite, question: Question) -> Any:
    """The request as it is asked of the stored vectors, its output fields as they were. Raises as
    Rewrite.ask does."""
    asked = rewrite.ask(question)
    sent, given = _copy(request), SearchParameters(request.search_params)
    given.take(asked.search_params)
    given.put("round_decimal", -1)
    if given.field or rewrite.state.stored_in:
        given.name_field(rewrite.state.searched_field)
    given.write(sent.search_params)
    sent.placeholder_group = placeholder_group(asked.data, rewrite.state.dtype)
    sent.nq = len(asked.data)
    return sent


def _rewritten(request: Any, rewrite: Rewrite, question: Question) -> tuple[Any, FieldRequest]:
    fields = rewrite.reading.fields(question.output_fields)
    sent = rewritten_request(request, rewrite, question)
    sent.output_fields[:] = fields.requested or []
    return sent, fields


def _score(results: Any, rewrite: Rewrite, question: Question) -> None:
    """Scores in the user's metric, rounded as asked, in place."""
    if rewrite.state.metric != "L2" and question.round_decimal < 0:
        return
    scores = np.array(results.scores, np.float64)
    if rewrite.state.metric == "L2" and rewrite.state.beside is None:
        weight, queries, start = rewrite.strength(question), rewrite.queries(question), 0
        for number, count in enumerate(results.topks):
            of_one = slice(start, start + count)
            query = queries[number : number + 1]
            scores[of_one] = rewrite.layout.scores(scores[None, of_one], query, weight)[0]
            start += count
    results.scores[:] = (
        scores.round(question.round_decimal) if question.round_decimal >= 0 else scores
    ).tolist()


def _copy(request: Any) -> Any:
    copy = type(request)()
    copy.CopyFrom(request)
    return copy
