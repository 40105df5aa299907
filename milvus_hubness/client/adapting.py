"""Requests and responses of searches that a learned re-ranker follows. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from milvus_hubness.client.hits import keep, rescore
from milvus_hubness.client.reading import Reading
from milvus_hubness.client.rewrite import Question, Rewrite, SearchRequest, add_raw_scores, copied, raised
from milvus_hubness.rerank import Adaptive


def adapted(rewrite: Rewrite, question: Question, how: Adaptive) -> SearchRequest:
    """The search that answers a question, as its re-ranker wants it: for the queries that it makes of the
    user's, or for candidates with their vectors, which it ranks.

    Ranked hits have the re-ranker's score, under every metric the more the better. Raises as `Rewrite.ask`
    does, and DimensionMismatch where the re-ranker is for other vectors.
    """
    how.expect_dim(rewrite.state.dim)
    queries = rewrite.queries(question)
    if how.direct:
        return rewrite.ask(replace(question, data=how.direct_queries(queries), rerank=None))
    fields = rewrite.fields_for(question, with_vector=True)
    limit = question.pool(how)
    candidates = replace(
        question,
        limit=limit,
        offset=0,
        search_params=raised(copied(question.search_params or {}), limit),
        output_fields=fields.requested,
        round_decimal=-1,
        rerank=None,
        with_raw_score=False,
    )
    search_request = replace(rewrite, reading=Reading(())).ask(candidates)

    def answer(results: Any, *biases: Mapping[Any, Sequence[float]]) -> Any:
        found = search_request.answer(results, *biases)
        vectors = [rewrite.vectors_found(list(hits)) for hits in found]
        scores = how.scores(queries, vectors)
        for hits, query, items, own in zip(found, queries, vectors, scores, strict=True):
            if hits:
                _rank(rewrite, hits, query, items, own, question, how.correction)
        return rewrite.reading.hits_out(found, fields)

    return replace(search_request, answer=answer, works=True)


def _rank(
    rewrite: Rewrite, hits: Any, query: Any, items: Any, scores: Any, question: Question, correction: float
) -> None:
    """The hits of one query in the order of their scores, cut to the page, in place."""
    layout = rewrite.layout
    raw = layout.reduce_items(items) @ layout.reduce_queries(query[None, :])[0]
    if correction:
        result = np.asarray(hits.distances, np.float64)
        subtracted = raw + result / 2 if layout.metric == "L2" else raw - result
        scores = scores - correction * subtracted
    order = np.argsort(-scores, kind="stable")[question.page]
    keep(hits, [hits[i] for i in order])
    rescore(hits, scores[order], question.round_decimal)
    if question.with_raw_score:
        shown = np.asarray(-2 * raw[order] if layout.metric == "L2" else raw[order], np.float64)
        add_raw_scores(hits, shown.round(question.round_decimal) if question.round_decimal >= 0 else shown)
