"""Search and hybrid search on corrected collections, by columns. No I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from pymilvus.grpc_gen import common_pb2

from milvus_hubness.client import ranking
from milvus_hubness.client.messages import (
    GROUPED,
    ORDERED,
    FieldRequest,
    Question,
    SearchRequest,
    expect_whole_hits,
)
from milvus_hubness.client.operations import Operations
from milvus_hubness.client.other_locations import RerankingRewrite, rewrite_of
from milvus_hubness.client.rewrite import Rewrite
from milvus_hubness.client.state_cache import CachedState
from milvus_hubness.client.steps import Operation
from milvus_hubness.codec.arrays import Floats
from milvus_hubness.codec.half_precision import BYTES, Dtype, decode
from milvus_hubness.errors import DimensionMismatch, InvalidInput, UnsupportedOperation
from milvus_hubness.proxy.columns import hits_of, joined, keys_of, pick
from milvus_hubness.proxy.messages import ColumnReading, Overrides, SearchParameters, Send, pairs_of
from milvus_hubness.state import CollectionState

PLACEHOLDERS: dict[Dtype, int] = {
    "float32": common_pb2.PlaceholderType.FloatVector,
    "float16": common_pb2.PlaceholderType.Float16Vector,
    "bfloat16": common_pb2.PlaceholderType.BFloat16Vector,
}


class WireSearching(Operations):
    """The rewritten Search call."""

    def search_wire(self, request: Any, overrides: Overrides) -> Operation[Any]:
        """Answer a SearchRequest with a SearchResults, ranked by the corrected score.

        overrides: settings for a request that has none of its own. Raises DimensionMismatch, InvalidInput,
        InvalidParameter, and UnsupportedOperation if the server would use scores before they are corrected.
        """
        given = SearchParameters(request.search_params)
        requested = given.overrides.over(overrides)

        def call(cached: CachedState) -> Operation[Any]:
            expect_whole_hits(list(request.output_fields), cached.states, options_of(request))
            state = cached.searched(given.field)
            if state is None:
                return (yield from self._uncorrected(cached, request))
            question = yield from self._question(cached, state, request, requested)
            rewrite = rewrite_of(state, cached.reading)
            rewrite.expect_answerable(
                replace(question, offset=given.number("offset", 0)), options_of(request)
            )
            answer = self._in_the_servers_order
            if _reorders(rewrite, question):
                question = yield from self._of_candidates(cached, rewrite, question, request)
                answer = self._in_an_order_of_ours
            answers = []
            for each in rewrite.apart(question):
                response, fields = yield from answer(cached, rewrite, each, request)
                ColumnReading(tuple(cached.states.values())).columns_out(response.results, fields)
                answers.append(response)
            if request.WhichOneof("search_input") != "ids":
                self._sample(cached, state, question.profile, question.data)
            return joined(answers)

        return self._as_it_is(request.collection_name, None, call)

    def _uncorrected(self, cached: CachedState, request: Any) -> Operation[Any]:
        if not cached.states:
            return (yield Send("Search", request))
        sent, given = _copy(request), SearchParameters(request.search_params)
        named = cached.uncorrected({"anns_field": given.field}).get("anns_field")
        if named:
            given.name_field(named)
        given.write(sent.search_params)
        fields = cached.reading.fields(list(request.output_fields))
        sent.output_fields[:] = fields.requested or []
        response = yield Send("Search", sent)
        ColumnReading(tuple(cached.states.values())).columns_out(response.results, fields)
        return response

    def _question(
        self, cached: CachedState, state: CollectionState, request: Any, overrides: Overrides
    ) -> Operation[Question]:
        given = SearchParameters(request.search_params)
        if request.search_by_primary_keys:
            raise UnsupportedOperation(
                "a search whose filter names the rows to search with: give ids instead"
            )
        if request.WhichOneof("search_input") == "ids":
            level = level_of(request)
            as_asked = {} if level is None else {"consistency_level": level}
            keys = keys_of(request.ids)
            found = yield from self._vectors(request.collection_name, cached, state, keys, as_asked)
            queries: Any = decode(found, state.dtype)
        else:
            queries = queries_in(request.placeholder_group, state)
        return Question(
            queries,
            limit=given.number("topk", 0),
            search_params=given.for_rewrite(),
            output_fields=list(request.output_fields),
            round_decimal=given.number("round_decimal", -1),
            strength=self._strength if overrides.strength is None else overrides.strength,
            profile=overrides.profile,
        )

    def _of_candidates(
        self, cached: CachedState, rewrite: Rewrite, question: Question, request: Any
    ) -> Operation[Question]:
        """Return the question with its page and, if it is gated, with its bank."""
        given = SearchParameters(request.search_params)
        if given.has("iterator"):
            raise UnsupportedOperation(
                f"iterators cannot follow the corrected order of field {rewrite.state.field!r}, whose "
                "searches are gated or whose biases lie beside its vectors: iterate with hubness_strength 0"
            )
        question = replace(question, offset=given.number("offset", 0))
        if rewrite.is_gated(question):
            state, profile = rewrite.state, question.profile
            bank = yield from self._bank(request.collection_name, state, profile or state.active)
            question = replace(question, bank=bank.queries.vectors, activated=bank.activated)
        return question

    def _in_the_servers_order(
        self, cached: CachedState, rewrite: Rewrite, question: Question, request: Any
    ) -> Operation[tuple[Any, FieldRequest]]:
        """Return an answer in the order of the server, and the fields to hide."""
        fields = rewrite.reading.fields(question.output_fields)
        sent = rewritten_request(request, rewrite, question)
        sent.output_fields[:] = fields.requested or []
        response = yield Send("Search", sent)
        _score(response.results, rewrite, question)
        return response, fields

    def _in_an_order_of_ours(
        self, cached: CachedState, rewrite: Rewrite, question: Question, request: Any
    ) -> Operation[tuple[Any, FieldRequest]]:
        """Return an answer whose rows the proxy sorts or filters, and the fields to hide."""
        search_request, state = rewrite.ask(question), rewrite.state
        response = yield Send("Search", _sent(request, rewrite, search_request))
        hits = hits_of(
            response.results, () if search_request.biases_of or not state.reranking else state.slot_fields
        )
        if search_request.biases_of:
            keys = list(dict.fromkeys(keys_of(response.results.ids)))
            as_asked = {"consistency_level": level_of(request)}
            biases = yield from self._side_biases(search_request.biases_of, cached.key_field, keys, as_asked)
            chosen = search_request.answer(hits, biases)
        else:
            chosen = search_request.answer(hits)
        pick(response.results, chosen)
        return response, rewrite.reading.fields(question.output_fields)


def level_of(request: Any) -> int | None:
    """Return the consistency level of a request; None for that of the collection."""
    return None if request.use_default_consistency else int(request.consistency_level)


def _reorders(rewrite: Rewrite, question: Question) -> bool:
    """Whether the server's order differs from the requested one."""
    beside = isinstance(rewrite, RerankingRewrite) and rewrite.strength(question) != 0
    return beside or rewrite.is_gated(question)


def options_of(request: Any) -> dict[str, Any]:
    """Return the arguments of a SearchRequest for ranking, sorting or grouping, by pymilvus's names."""
    given = SearchParameters(request.search_params)
    options = {name: given.value(name) for name in (*ORDERED, *GROUPED)}
    options["group_size"] = given.number("group_size", 1)
    if functions := request.function_score.functions:
        each_one = [SimpleNamespace(params=pairs_of(function.params)) for function in functions]
        options["ranker"] = SimpleNamespace(functions=each_one)
    options["function_chains"] = list(request.function_chains)
    options["search_aggregation"] = request.HasField("search_aggregation") or None
    return options


def queries_in(group: bytes, state: CollectionState) -> Floats:
    """Return the queries of a placeholder group, (m, d). Raises InvalidInput, DimensionMismatch."""
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
    """Return queries, arrays of float32 or bytes of half-precision numbers, as a placeholder group."""
    values = [value if isinstance(value, bytes) else value.tobytes() for value in vectors]
    placeholder = common_pb2.PlaceholderValue(tag="$0", type=PLACEHOLDERS[dtype], values=values)
    packed: bytes = common_pb2.PlaceholderGroup(placeholders=[placeholder]).SerializeToString()
    return packed


def rewritten_request(request: Any, rewrite: Rewrite, question: Question) -> Any:
    """Return the request for the augmented vectors, with unchanged output fields.

    Raises as Rewrite.ask does.
    """
    search_request = rewrite.ask(question)
    return _put(request, rewrite, search_request.data, search_request.search_params)


def _put(request: Any, rewrite: Rewrite, data: list[Any], search_params: Mapping[str, Any]) -> Any:
    sent, given = _copy(request), SearchParameters(request.search_params)
    given.take(search_params)
    if not request.HasField("search_aggregation"):  # Else hits are in buckets; the server rounds them.
        given.put("round_decimal", -1)
    if given.field or rewrite.state.second_vector:
        given.name_field(rewrite.state.searched_field)
    given.write(sent.search_params)
    sent.placeholder_group = placeholder_group(data, rewrite.state.dtype)
    sent.nq = len(data)
    return sent


def _sent(request: Any, rewrite: Rewrite, search_request: SearchRequest) -> Any:
    sent = _put(request, rewrite, search_request.data, search_request.search_params)
    given = SearchParameters(sent.search_params)
    given.put("topk", search_request.limit)
    given.put("offset", search_request.offset)
    given.write(sent.search_params)
    sent.output_fields[:] = search_request.output_fields or []
    return sent


def _score(results: Any, rewrite: Rewrite, question: Question) -> None:
    """Convert scores to the user's metric, rounded as requested, in place."""
    if rewrite.state.metric != "L2" and question.round_decimal < 0:
        return
    scores = np.array(results.scores, np.float64)
    if rewrite.state.metric == "L2" and rewrite.state.reranking is None:
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


DEFAULT_LIMIT = 10
_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}


class WireHybrid(WireSearching):
    """The rewritten HybridSearch call."""

    def hybrid_wire(self, request: Any, overrides: Overrides) -> Operation[Any]:
        """Answer a HybridSearchRequest with a SearchResults, with corrected scores on corrected fields.

        overrides: settings for requests that have none of their own. Raises as `search_wire` does, and
        UnsupportedOperation if the proxy must merge answers and cannot.
        """
        overrides_of_parts = [
            SearchParameters(each.search_params).overrides.over(overrides) for each in request.requests
        ]

        def call(cached: CachedState) -> Operation[Any]:
            if not cached.states:
                return (yield Send("HybridSearch", request))
            sent = type(request)()
            sent.CopyFrom(request)
            asked: list[tuple[Rewrite, Question, Any]] = []
            states = [
                cached.searched(SearchParameters(each.search_params).field) for each in request.requests
            ]
            for named in {each.profile for each in overrides_of_parts}:
                ranking.require_profile(named, [state for state in states if state])
            for place, (state, own) in enumerate(zip(states, overrides_of_parts, strict=True)):
                if state is None:
                    continue
                rewrite = rewrite_of(state, cached.reading)
                part = request.requests[place]
                question = yield from self._question(cached, state, part, _of(own, state))
                asked.append((rewrite, question, sent.requests[place]))
            ranker = _ranker(request)
            if ranking.must_merge(ranker, [(rewrite, question) for rewrite, question, _ in asked]):
                return (yield from self._merged_here(cached, states, overrides_of_parts, ranker, request))
            for rewrite, question, part in asked:
                part.CopyFrom(rewritten_request(part, rewrite, question))
            fields = cached.reading.fields(list(request.output_fields))
            sent.output_fields[:] = fields.requested or []
            response = yield Send("HybridSearch", sent)
            ColumnReading(tuple(cached.states.values())).columns_out(response.results, fields)
            for rewrite, question, _ in asked:
                self._sample(cached, rewrite.state, question.profile, question.data)
            return response

        return self._as_it_is(request.collection_name, None, call)

    def _merged_here(
        self,
        cached: CachedState,
        states: Sequence[CollectionState | None],
        overrides_of_parts: Sequence[Overrides],
        ranker: ranking.Ranker,
        request: Any,
    ) -> Operation[Any]:
        """Search once for each request and merge the answers."""
        result = {name: _plain(value) for name, value in pairs_of(request.rank_params).items()}
        if result.get("group_by_field"):
            raise UnsupportedOperation(
                "grouping a hybrid search whose answers are merged by the proxy: fields of metric COSINE or "
                "L2 with a weighted ranker, gates, and biases beside vectors are; use an RRF ranker on others"
            )
        answers: list[Any] = []
        metrics: list[str] = []
        for state, own, each in zip(states, overrides_of_parts, request.requests, strict=True):
            answers.append((yield from self.search_wire(_alone(each, request), _of(own, state))))
            if state:
                metrics.append(state.metric)
                continue
            given = SearchParameters(each.search_params)
            field = given.field or ""
            metrics.append((yield from self._metric(request.collection_name, field, given.metric, None)))
        counts = [len(answer.results.topks) for answer in answers]
        first = joined(answers)
        found, parts = hits_of(first.results), []
        for count in counts:
            parts.append(found[:count])
            found = found[count:]
        offset = int(result.get("offset") or 0)
        page = slice(offset, offset + int(result.get("limit") or DEFAULT_LIMIT))
        decimals = result.get("round_decimal")
        chosen = ranking.merge(parts, metrics, ranker, page, -1 if decimals is None else int(decimals))
        pick(first.results, chosen)
        return first


def _of(overrides: Overrides, state: CollectionState | None) -> Overrides:
    """Return the overrides for one of several fields, without a profile that the field does not have."""
    return Overrides(
        overrides.strength, overrides.profile if state and overrides.profile in state.profiles else None
    )


def _alone(part: Any, request: Any) -> Any:
    """Return one request of a hybrid search as a separate search, without its correction settings.

    pymilvus gives each request the offset and the decimals of the whole search; they are reset.
    """
    alone = type(part)()
    alone.CopyFrom(part)
    given = SearchParameters(part.search_params)
    given.put("offset", 0)
    given.put("round_decimal", -1)
    given.write(alone.search_params)
    alone.collection_name, alone.db_name = request.collection_name, request.db_name
    alone.output_fields[:] = request.output_fields
    alone.partition_names[:] = part.partition_names or request.partition_names
    for name in ("guarantee_timestamp", "consistency_level", "use_default_consistency"):
        setattr(alone, name, getattr(request, name))
    if request.HasField("namespace"):
        alone.namespace = request.namespace
    return alone


def _ranker(request: Any) -> ranking.Ranker:
    """Return the ranker of a request. Raises InvalidInput if it cannot be parsed."""
    try:
        if request.function_score.functions:
            [function] = request.function_score.functions
            params = {name: _plain(value) for name, value in pairs_of(function.params).items()}
            strategy, normalise = str(params.get("reranker", "")).lower(), False
        else:
            result = pairs_of(request.rank_params)
            params = json.loads(result.get("params") or "{}")
            strategy, normalise = str(_plain(result.get("strategy", "rrf"))).lower(), True
        return ranking.Ranker(
            strategy,
            tuple(map(float, params.get("weights", ()))),
            bool(params.get("norm_score", normalise)),
            float(params.get("k", ranking.DEFAULT_RRF_K)),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidInput(f"the ranker of a hybrid search cannot be read: {error}") from None


def _plain(word: str) -> Any:
    """Parse a value that clients write as JSON or as Python does; other words stay text."""
    try:
        return json.loads(_OF_PYTHON.get(word, word))
    except ValueError:
        return word
