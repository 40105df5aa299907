"""Hybrid searches of corrected collections, by columns. No I/O: see `client.steps`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from milvus_hubness.client import hybrid
from milvus_hubness.client.beside import rewrite_of
from milvus_hubness.client.knowledge import CachedState
from milvus_hubness.client.rewrite import Question, Rewrite
from milvus_hubness.client.steps import Operation
from milvus_hubness.errors import InvalidInput, UnsupportedOperation
from milvus_hubness.proxy.joining import joined
from milvus_hubness.proxy.parameters import Overrides, SearchParameters
from milvus_hubness.proxy.picking import hits_of, pick
from milvus_hubness.proxy.reading import ColumnReading, pairs_of
from milvus_hubness.proxy.searching import WireSearching, rewritten_request
from milvus_hubness.proxy.steps import Send
from milvus_hubness.state import CollectionState

DEFAULT_LIMIT = 10
_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}


class WireHybrid(WireSearching):
    """HybridSearch."""

    def hybrid_wire(self, request: Any, overrides: Overrides) -> Operation[Any]:
        """A SearchResults for a HybridSearchRequest, each request in it on a corrected field by the corrected
        score.

        overrides: where the requests themselves say nothing. Raises as `search_wire` does, and
        UnsupportedOperation where answers must be merged here and cannot be.
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
                hybrid.require_profile(named, [state for state in states if state])
            for place, (state, own) in enumerate(zip(states, overrides_of_parts, strict=True)):
                if state is None:
                    continue
                rewrite = rewrite_of(state, cached.reading)
                part = request.requests[place]
                question = yield from self._question(cached, state, part, _of(own, state))
                asked.append((rewrite, question, sent.requests[place]))
            ranker = _ranker(request)
            if hybrid.must_merge(ranker, [(rewrite, question) for rewrite, question, _ in asked]):
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
        ranker: hybrid.Ranker,
        request: Any,
    ) -> Operation[Any]:
        """A search for each request, and their answers merged."""
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
        chosen = hybrid.merge(parts, metrics, ranker, page, -1 if decimals is None else int(decimals))
        pick(first.results, chosen)
        return first


def _of(overrides: Overrides, state: CollectionState | None) -> Overrides:
    """The overrides for one of several fields, of which this need not have the profile."""
    return Overrides(
        overrides.strength, overrides.profile if state and overrides.profile in state.profiles else None
    )


def _alone(part: Any, request: Any) -> Any:
    """One request of a hybrid search as a search of its own, without what it says of its correction. pymilvus
    gives each the offset and the decimals of the whole."""
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


def _ranker(request: Any) -> hybrid.Ranker:
    """What merges the answers. Raises InvalidInput where that cannot be read."""
    try:
        if request.function_score.functions:
            [function] = request.function_score.functions
            params = {name: _plain(value) for name, value in pairs_of(function.params).items()}
            strategy, normalise = str(params.get("reranker", "")).lower(), False
        else:
            result = pairs_of(request.rank_params)
            params = json.loads(result.get("params") or "{}")
            strategy, normalise = str(_plain(result.get("strategy", "rrf"))).lower(), True
        return hybrid.Ranker(
            strategy,
            tuple(map(float, params.get("weights", ()))),
            bool(params.get("norm_score", normalise)),
            float(params.get("k", hybrid.DEFAULT_RRF_K)),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidInput(f"the ranker of a hybrid search cannot be read: {error}") from None


def _plain(word: str) -> Any:
    """What clients write as JSON, and Python's as it writes itself; else the word."""
    try:
        return json.loads(_OF_PYTHON.get(word, word))
    except ValueError:
        return word
