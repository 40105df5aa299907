"""Search and hybrid search on corrected collections, for the proxy. No I/O.

A search is rewritten as HubnessClient rewrites it: augmented queries in place of the user's, and
candidates ranked by the corrected score where the server cannot rank them. Answers stay columns, as
the server sent them; only hits that are ranked again become objects.

A user often repeats a search with other queries. Where only the queries then change, the rewriting
is prepared once, and kept with the cached state (`_direct`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
from pymilvus.grpc_gen import common_pb2, milvus_pb2

from milvus_hubness.correction.codec.arrays import BYTES, Dtype, Floats, decode
from milvus_hubness.correction.overrides import Overrides
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.errors import (
    DimensionMismatch,
    InvalidInput,
    UnsupportedOperation,
)
from milvus_hubness.milvus.client import ranking
from milvus_hubness.milvus.client.candidates import rewrite_of
from milvus_hubness.milvus.client.messages import (
    GROUPED,
    ORDERED,
    AnsweredSearch,
    Question,
    SearchRequest,
    checked_decimals,
    expect_whole_hits,
    page_of,
)
from milvus_hubness.milvus.client.operations import Operations
from milvus_hubness.milvus.client.parts import REFUSALS, in_two
from milvus_hubness.milvus.client.rewrite import Rewrite
from milvus_hubness.milvus.client.searches import MAX_PREPARED
from milvus_hubness.milvus.client.state_cache import CachedState
from milvus_hubness.milvus.client.steps import Operation
from milvus_hubness.milvus.proxy.columns import MOST_JSON, hits_of, joined, json_in, keys_of, pick
from milvus_hubness.milvus.proxy.messages import (
    FIELD,
    METRIC,
    SearchParameters,
    Send,
    addressed,
    columns_out,
    pairs_of,
)
from milvus_hubness.milvus.store.server import exceeds_limit

DEFAULT_LIMIT = 10
"""Hits of a hybrid search that names no limit."""

_VARYING = ("base", "dsl", "expr_template_values", "guarantee_timestamp", "nq", "placeholder_group")
"""Fields of a SearchRequest that do not change how a search is rewritten."""

MAX_PATTERN_BYTES = 8_192
"""Largest pattern of a search that is prepared: one of a request is as large as its user makes it."""

_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}
"""Values as pymilvus writes them, and as JSON has them."""

PLACEHOLDERS: dict[Dtype, int] = {
    "float32": common_pb2.PlaceholderType.FloatVector,
    "float16": common_pb2.PlaceholderType.Float16Vector,
    "bfloat16": common_pb2.PlaceholderType.BFloat16Vector,
}


def search(operations: Operations, request: Any, overrides: Overrides) -> Operation[Any]:
    """Answer a SearchRequest, ranked by the corrected score, with a message or its bytes.

    overrides: settings for a request without its own. Queries that exceed a limit together are sent
    in parts, as HubnessClient does.

    Raises DimensionMismatch, InvalidInput, InvalidParameter, and UnsupportedOperation if the server
    would use scores before they are corrected.
    """
    try:
        return (yield from _search_at_once(operations, request, overrides))
    except REFUSALS as error:
        parts = _parts_of(request)
        if len(parts) < 2 or not exceeds_limit(error):
            raise

        cached = yield from operations.states.cached_state(request.collection_name)
        if cached.state_of(SearchParameters(request, overrides).value(FIELD)) is None:
            raise

    return (yield from _joined(search(operations, part, overrides) for part in parts))


def _joined(searches: Iterable[Operation[Any]]) -> Operation[Any]:
    """Run searches, and return one answer to all of their queries."""
    answers = []
    for operation in searches:
        answer = yield from operation
        answers.append(
            milvus_pb2.SearchResults.FromString(answer) if isinstance(answer, bytes) else answer
        )
    return joined(answers)


def _parts_of(request: Any) -> list[Any]:
    """Return the request for each half of its queries, or itself if it cannot be divided."""
    group = common_pb2.PlaceholderGroup.FromString(request.placeholder_group)
    if len(group.placeholders) != 1 or len(group.placeholders[0].values) < 2:
        return [request]

    [placeholder] = group.placeholders
    parts = []
    for values in in_two(list(placeholder.values)):
        queries = deepcopy(placeholder)
        queries.values[:] = values
        part = deepcopy(request)
        part.placeholder_group = common_pb2.PlaceholderGroup(
            placeholders=[queries]
        ).SerializeToString()
        part.nq = len(values)
        parts.append(part)

    return parts


def _search_at_once(operations: Operations, request: Any, overrides: Overrides) -> Operation[Any]:
    call = partial(_search_on, operations, request, overrides)
    return operations.states.retrying(request.collection_name, None, call)


def _search_on(
    operations: Operations, request: Any, overrides: Overrides, cached: CachedState
) -> Operation[Any]:
    """Search by this collection state."""
    if not cached.states:
        response, content = yield Send(addressed(request, cached), with_bytes=True)
        if now := (yield from _corrected_since(operations, request, cached, response)):
            return (yield from _search_on(operations, request, overrides, now))

        _notify(operations, cached, request)
        return content

    # Most searches repeat a former one with other queries, and end here.
    pattern = _pattern_of(request, overrides)
    if direct := cached.prepared.get(pattern):
        return (yield from direct(request))

    params = SearchParameters(request, overrides)
    options = _options(params)
    expect_whole_hits(list(request.output_fields), cached.states, options)
    state = cached.state_of(params.value(FIELD))
    if state is None:
        return (yield from _uncorrected(operations, cached, request))

    question = yield from _question(operations, cached, state, params)
    rewrite = rewrite_of(state, cached.reading)
    rewrite.expect_answerable(question, options)
    is_gated = rewrite.is_gated(question)
    if (is_gated or rewrite.ranks_candidates(question)) and params.value("iterator") is not None:
        raise UnsupportedOperation(
            f"iterators cannot follow the corrected order of field {state.field!r}, whose "
            "searches are gated or whose candidates are re-ranked: iterate with "
            "hubness_strength 0"
        )

    by_ids = request.WhichOneof("search_input") == "ids"
    if not by_ids and (direct := _direct(operations, cached, rewrite, question, params)):
        if len(pattern[0]) <= MAX_PATTERN_BYTES and len(cached.prepared) < MAX_PREPARED:
            cached.prepared[pattern] = direct
        return (yield from direct(request))

    if is_gated:
        profile = rewrite.profile(question)
        bank = yield from operations.biases.bank(request.collection_name, state, profile)
        question = replace(question, bank=bank.queries.vectors, activated=bank.activated)

    # Of some searches, one request cannot answer all queries: see `apart`.
    answers = []
    for part in rewrite.apart(question):
        answers.append((yield from _answer(operations, cached, rewrite, part, params)))
    if not by_ids:
        operations.searches.notify(cached, partial(AnsweredSearch, state.field, question.data))
    return joined(answers)


def _corrected_since(
    operations: Operations, request: Any, cached: CachedState, response: Any
) -> Operation[CachedState | None]:
    """Return the new state if the response is not of the uncorrected collection of `cached`."""
    columns = response.results.fields_data
    names = [column.field_name for column in columns]
    return operations.states.corrected_since(request.collection_name, cached, None, columns, names)


def _pattern_of(request: Any, overrides: Overrides) -> tuple[bytes, Overrides]:
    """Return the part of a search that stays the same
    when only the queries, the filter and the like differ.
    """
    fixed = deepcopy(request)
    for name in _VARYING:
        fixed.ClearField(name)
    return fixed.SerializeToString(deterministic=True), overrides


def _direct(
    operations: Operations,
    cached: CachedState,
    rewrite: Rewrite,
    question: Question,
    params: SearchParameters,
) -> Callable[[Any], Operation[Any]] | None:
    """Return a function that answers any search of this pattern: only the queries, the parameters and
    the output fields of the request change.

    Returns None unless the server's hits and scores are the user's.
    """
    # What is prepared lasts, so it must not hold the queries of the first search.
    ask = rewrite.asking(replace(question, data=()))
    if ask is None or rewrite.ranks_candidates(question):
        return None
    if not rewrite.scores_are_products(question):
        return None

    state = rewrite.state
    fields = rewrite.reading.fields(question.output_fields)
    rewritten = _rewritten(params, rewrite, ask(question.data))
    del question
    fixed = milvus_pb2.SearchRequest(
        search_params=rewritten.search_params, output_fields=rewritten.output_fields
    )

    def answer(request: Any) -> Operation[Any]:
        queries = queries_in(request.placeholder_group, state)
        sent = deepcopy(request)
        sent.collection_name = cached.real_name
        sent.ClearField("search_params")
        sent.ClearField("output_fields")
        sent.MergeFrom(fixed)
        _put_queries(sent, ask(queries).data, state)
        response, content = yield Send(sent, with_bytes=True)
        operations.searches.notify(cached, partial(AnsweredSearch, state.field, queries))
        return response if columns_out(cached, response.results, fields) else content

    return answer


def _uncorrected(operations: Operations, cached: CachedState, request: Any) -> Operation[Any]:
    answer = yield from send_for_rows(cached, SearchParameters(request).sent())
    _notify(operations, cached, request)
    return answer


def _notify(operations: Operations, cached: CachedState, request: Any) -> None:
    """Let the listener know of an answered search that nothing corrects."""

    def answered() -> AnsweredSearch:
        group = common_pb2.PlaceholderGroup.FromString(request.placeholder_group)
        queries = [value for placeholder in group.placeholders for value in placeholder.values]
        return AnsweredSearch(SearchParameters(request).value(FIELD), queries)

    if request.WhichOneof("search_input") != "ids":
        operations.searches.notify(cached, answered)


def send_for_rows(cached: CachedState, sent: Any) -> Operation[Any]:
    """Send a request that has the user's output fields;
    return the answer with converted rows, or its bytes.
    """
    fields = cached.reading.fields(list(sent.output_fields))
    sent.output_fields[:] = fields.requested or []
    response, content = yield Send(addressed(sent, cached), with_bytes=True)
    return (
        response if columns_out(cached, getattr(response, "results", response), fields) else content
    )


def _question(
    operations: Operations, cached: CachedState, state: CollectionState, params: SearchParameters
) -> Operation[Question]:
    request = params.request
    if request.search_by_primary_keys:
        raise UnsupportedOperation(
            "search_by_primary_keys on a corrected collection: search with ids"
        )

    if request.WhichOneof("search_input") == "ids":
        stored = yield from operations.searches.vectors(
            request.collection_name, cached, state, keys_of(request.ids), _level(request)
        )
        queries: Any = decode(stored, state.dtype)
    else:
        queries = queries_in(request.placeholder_group, state)

    # The server rounds the scores of an aggregation.
    is_rounded_here = not request.HasField("search_aggregation")
    decimals = checked_decimals(params.number("round_decimal", -1))
    return Question(
        queries,
        limit=params.number("topk", 0),
        offset=params.number("offset", 0),
        search_params=params.for_rewrite(),
        output_fields=list(request.output_fields),
        round_decimal=decimals if is_rounded_here else -1,
        overrides=params.overrides.over(operations.searches.overrides),
    )


def _answer(
    operations: Operations,
    cached: CachedState,
    rewrite: Rewrite,
    question: Question,
    params: SearchParameters,
) -> Operation[Any]:
    """Send a search, and return its answer with the hits and the scores that the user expects."""
    request = params.request
    search_request = rewrite.ask(question)
    response = yield Send(addressed(_rewritten(params, rewrite, search_request), cached))

    # In an aggregation, hits are in buckets, and their scores are the user's.
    if not request.HasField("search_aggregation"):
        hits = hits_of(response.results)
        if of := search_request.biases_of:
            keys = dict.fromkeys(keys_of(response.results.ids))
            biases = yield from operations.searches.side_biases(cached, of, keys, _level(request))
            chosen = search_request.answer(hits, biases)
        else:
            chosen = search_request.answer(hits)

        pick(response.results, chosen)

    columns_out(cached, response.results, rewrite.reading.fields(question.output_fields))
    return response


def hybrid_search(operations: Operations, request: Any, overrides: Overrides) -> Operation[Any]:
    """Answer a HybridSearchRequest as `search` does, with corrected scores on corrected fields.

    Raises as it does, and UnsupportedOperation if the proxy must merge answers and cannot.
    """
    try:
        return (yield from _hybrid_search_at_once(operations, request, overrides))
    except REFUSALS as error:
        divided = [_parts_of(part) for part in request.requests]
        if {len(parts) for parts in divided} != {2} or not exceeds_limit(error):
            raise

        cached = yield from operations.states.cached_state(request.collection_name)
        if all(
            cached.state_of(SearchParameters(part).value(FIELD)) is None
            for part in request.requests
        ):
            raise

    wholes = []
    for parts in zip(*divided, strict=True):
        whole = deepcopy(request)
        del whole.requests[:]
        whole.requests.extend(parts)
        wholes.append(whole)

    return (yield from _joined(hybrid_search(operations, whole, overrides) for whole in wholes))


def _hybrid_search_at_once(
    operations: Operations, request: Any, overrides: Overrides
) -> Operation[Any]:
    def call(cached: CachedState) -> Operation[Any]:
        if not cached.states:
            response, content = yield Send(addressed(request, cached), with_bytes=True)
            if now := (yield from _corrected_since(operations, request, cached, response)):
                return (yield from call(now))

            for part in request.requests:
                _notify(operations, cached, part)
            return content

        params = [SearchParameters(part, overrides) for part in request.requests]
        states = [cached.state_of(part.value(FIELD)) for part in params]
        for profile in {part.overrides.profile for part in params}:
            ranking.require_profile(profile, [state for state in states if state])

        # By the number of the part; parts on uncorrected fields stay as they are.
        questions: dict[int, tuple[Rewrite, Question]] = {}
        for i, (state, part) in enumerate(zip(states, params, strict=True)):
            if state is None or part.overrides.profile not in state.profiles:
                part.overrides = part.overrides._replace(profile=None)
            if state is not None:
                question = yield from _question(operations, cached, state, part)
                questions[i] = rewrite_of(state, cached.reading), question

        ranker = _ranker(request)
        if ranking.must_merge(ranker, list(questions.values())):
            return (yield from _merged_here(operations, cached, states, params, ranker, request))

        sent = deepcopy(request)
        for i, (rewrite, question) in questions.items():
            sent.requests[i].CopyFrom(_rewritten(params[i], rewrite, rewrite.ask(question)))
        response = yield from send_for_rows(cached, sent)
        for i, part in enumerate(request.requests):
            if i in questions:
                rewrite, question = questions[i]
                answered = partial(AnsweredSearch, rewrite.state.field, question.data)
                operations.searches.notify(cached, answered)
            else:
                _notify(operations, cached, part)
        return response

    return operations.states.retrying(request.collection_name, None, call)


def _merged_here(
    operations: Operations,
    cached: CachedState,
    states: Sequence[CollectionState | None],
    parts: Sequence[SearchParameters],
    ranker: ranking.Ranker,
    request: Any,
) -> Operation[Any]:
    params = _parsed(request.rank_params)
    decimals = checked_decimals(params.get("round_decimal", -1))
    if params.get("group_by_field"):
        raise UnsupportedOperation(
            "grouping a hybrid search whose answers the proxy merges: with a gate, with candidate "
            "re-ranking, and with a weighted ranker on fields of metric COSINE or L2; elsewhere "
            "use an RRF ranker"
        )

    answers: list[Any] = []
    metrics: list[str] = []
    for state, part in zip(states, parts, strict=True):
        # By the state of the whole: parts from two copies would be merged by unlike scores.
        alone = _alone(part.request, request)
        answer = yield from _search_on(operations, alone, part.overrides, cached)
        answers.append(
            milvus_pb2.SearchResults.FromString(answer) if isinstance(answer, bytes) else answer
        )
        metric = state.metric if state else part.value(METRIC)
        if not metric:
            metric = yield from operations.states.metric(
                request.collection_name, cached, part.value(FIELD) or "", None
            )
        metrics.append(str(metric).upper())

    # Joined, all parts have one numbering of rows, so that hits of any part can be picked.
    counts = [len(answer.results.topks) for answer in answers]
    first = joined(answers)
    hits = iter(hits_of(first.results))
    hits_of_parts = [list(islice(hits, count)) for count in counts]

    limit = int(params.get("limit") or DEFAULT_LIMIT)
    page = page_of(limit, int(params.get("offset") or 0))
    chosen = ranking.merge(hits_of_parts, metrics, ranker, page, decimals)
    pick(first.results, chosen)
    return first


def _level(request: Any) -> dict[str, int | None]:
    """Return the consistency level of a request, as an
    argument of pymilvus; None is that of the collection.
    """
    if request.use_default_consistency:
        return {"consistency_level": None}
    return {"consistency_level": int(request.consistency_level)}


def _options(params: SearchParameters) -> dict[str, Any]:
    """Return the arguments of a SearchRequest for
    ranking, sorting or grouping, by pymilvus's names.
    """
    request = params.request
    options = {name: params.value(name) for name in (*ORDERED, *GROUPED)}
    options["group_size"] = params.number("group_size", 1)
    if functions := request.function_score.functions:
        rankers = [SimpleNamespace(params=pairs_of(function.params)) for function in functions]
        options["ranker"] = SimpleNamespace(functions=rankers)
    options["function_chains"] = list(request.function_chains)
    options["search_aggregation"] = request.HasField("search_aggregation") or None
    return options


def queries_in(group: bytes, state: CollectionState) -> Floats:
    """Return the queries of a placeholder group, (m, d). Raises InvalidInput, DimensionMismatch."""
    placeholders = common_pb2.PlaceholderGroup.FromString(group).placeholders
    values = [value for placeholder in placeholders for value in placeholder.values]
    if not values or {placeholder.type for placeholder in placeholders} != {
        PLACEHOLDERS[state.dtype]
    }:
        type_name = common_pb2.PlaceholderType.Name(PLACEHOLDERS[state.dtype])
        raise InvalidInput(f"field {state.field!r} takes queries of type {type_name} only")

    size = state.dim * BYTES[state.dtype]
    if wrong := [len(value) for value in values if len(value) != size]:
        raise DimensionMismatch(
            f"vector dimension mismatch: expected vector size(byte) {size}, actual {wrong[0]}"
        )

    if state.dtype == "float32":
        return np.frombuffer(b"".join(values), "<f4").reshape(-1, state.dim)

    return decode(values, state.dtype)


def _rewritten(params: SearchParameters, rewrite: Rewrite, search_request: SearchRequest) -> Any:
    """Return a SearchRequest message for the augmented vectors. Changes the parameters."""
    params.take(search_request.search_params)
    # In an aggregation, hits are in buckets; the server rounds them.
    if not params.request.HasField("search_aggregation"):
        params.put("round_decimal", search_request.options.get("round_decimal", -1))
    params.put("topk", search_request.limit)
    if search_request.offset or params.value("offset") is not None:
        params.put("offset", search_request.offset)

    sent = params.sent()
    _put_queries(sent, search_request.data, rewrite.state)
    sent.output_fields[:] = search_request.output_fields or []
    return sent


def _put_queries(sent: Any, encoded: Sequence[Any], state: CollectionState) -> None:
    queries = [query if isinstance(query, bytes) else query.tobytes() for query in encoded]
    placeholder = common_pb2.PlaceholderValue(
        tag="$0", type=PLACEHOLDERS[state.dtype], values=queries
    )
    sent.placeholder_group = common_pb2.PlaceholderGroup(
        placeholders=[placeholder]
    ).SerializeToString()
    sent.nq = len(queries)


def _alone(part: Any, request: Any) -> Any:
    """Return one request of a hybrid search as a separate search, without its correction settings,
    and without the offset and the decimals, which pymilvus takes from the whole search.
    """
    params = SearchParameters(part)
    params.put("offset", 0)
    params.put("round_decimal", -1)
    alone = params.sent()
    alone.collection_name = request.collection_name
    alone.db_name = request.db_name
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
        functions = request.function_score.functions
        rankers = [
            ranking.Ranker.of(SimpleNamespace(params=_parsed(function.params)))
            for function in functions
        ]
        if len(rankers) == 1:
            return rankers[0]
        if rankers:
            # Only the server applies several functions.
            return ranking.Ranker(" and ".join(ranker.strategy for ranker in rankers))

        pairs = pairs_of(request.rank_params)
        params = json_in(pairs.get("params") or "{}", "params of the ranker")
        strategy = str(_plain(pairs.get("strategy", "rrf"))).lower()
        return ranking.Ranker.of(
            SimpleNamespace(dict=lambda: {"strategy": strategy, "params": params})
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidInput(f"the ranker of a hybrid search cannot be read: {error}") from None


def _parsed(pairs: Any) -> dict[str, Any]:
    return {name: _plain(value) for name, value in pairs_of(pairs).items()}


def _plain(text: str) -> Any:
    """Parse a value that clients write as JSON or as Python does; other values stay text."""
    if len(text) > MOST_JSON:
        return text

    try:
        return json.loads(_PYTHON_LITERALS.get(text, text))
    except (ValueError, RecursionError):
        return text
