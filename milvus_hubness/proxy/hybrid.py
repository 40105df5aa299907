"""Hybrid searches of corrected collections, by columns. No I/O: see `client.steps`."""

from __future__ import annotations

import json
from typing import Any

from milvus_hubness.client import hybrid
from milvus_hubness.client.beside import rewrite_of
from milvus_hubness.client.knowledge import Known
from milvus_hubness.client.rewrite import Question, Rewrite
from milvus_hubness.client.steps import Operation
from milvus_hubness.errors import InvalidInput, UnsupportedOperation
from milvus_hubness.proxy.parameters import SearchParameters, Wish
from milvus_hubness.proxy.reading import ColumnReading, pairs_of
from milvus_hubness.proxy.searching import WireSearching, rewritten_request
from milvus_hubness.proxy.steps import Send


class WireHybrid(WireSearching):
    """HybridSearch."""

    def hybrid_wire(self, request: Any, wish: Wish) -> Operation[Any]:
        """A SearchResults for a HybridSearchRequest, each request in it on a corrected field by the corrected
        score.

        wish: where the requests themselves say nothing. Raises as `search_wire` does, and
        UnsupportedOperation where the server cannot merge the answers as it would have on the user's metric.
        """
        wishes = [SearchParameters(each.search_params).wish.over(wish) for each in request.requests]

        def call(known: Known) -> Operation[Any]:
            if not known.states:
                return (yield Send("HybridSearch", request))
            sent = type(request)()
            sent.CopyFrom(request)
            asked: list[tuple[Rewrite, Question]] = []
            states = [known.searched(SearchParameters(each.search_params).field) for each in request.requests]
            for named in {each.profile for each in wishes}:
                hybrid.require_profile(named, [state for state in states if state])
            for place, (state, own) in enumerate(zip(states, wishes, strict=True)):
                if state is None:
                    continue
                profile = own.profile if own.profile in state.profiles else None
                rewrite = rewrite_of(state, known.reading)
                each = request.requests[place]
                question = yield from self._question(known, state, each, Wish(own.strength, profile))
                self._expect_servable(rewrite, question, each)
                asked.append((rewrite, question))
                sent.requests[place].CopyFrom(rewritten_request(each, rewrite, question))
            if hybrid.must_merge(_ranker(request), asked):
                raise UnsupportedOperation(
                    "the proxy does not merge answers, as corrected fields of metric COSINE or L2 with a "
                    "weighted ranker, or with a range under L2, need: use an RRF ranker, or HubnessClient"
                )
            fields = known.reading.fields(list(request.output_fields))
            sent.output_fields[:] = fields.requested or []
            response = yield Send("HybridSearch", sent)
            ColumnReading(tuple(known.states.values())).columns_out(response.results, fields)
            for rewrite, question in asked:
                self._sample(known, rewrite.state, question.profile, question.data)
            return response

        return self._as_it_is(request.collection_name, None, call)


def _ranker(request: Any) -> hybrid.Ranker:
    """What merges the answers. Raises InvalidInput where that cannot be read."""
    try:
        if request.function_score.functions:
            [function] = request.function_score.functions
            told = dict(pairs_of(function.params))
            return hybrid.Ranker(str(told.get("reranker", "")).lower())
        told = dict(pairs_of(request.rank_params))
        params = json.loads(told.get("params") or "{}")
        weights = tuple(map(float, params.get("weights", ())))
        return hybrid.Ranker(told.get("strategy", "rrf").lower(), weights)
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidInput(f"the ranker of a hybrid search cannot be read: {error}") from None
