"""Hybrid search and learned re-rankers: several result lists become one. No I/O.

Milvus merges by rank, or by weighted scores that it first normalises by metric. It would weigh a
field wrongly whose index has the metric IP while the user's metric is COSINE or L2: the client
merges such answers by the user's metric.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pymilvus import AnnSearchRequest
from pymilvus.exceptions import ParamError

from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.overrides import RAW
from milvus_hubness.correction.rerank import Adaptive, GloballyCorrected
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.errors import InvalidInput, UnsupportedOperation
from milvus_hubness.milvus.client.messages import Question, SearchRequest
from milvus_hubness.milvus.client.rewrite import (
    Reading,
    Rewrite,
    add_raw_scores,
    copied,
    keep,
    raised,
    rescore,
)

SIMILARITIES = frozenset({"IP", "COSINE", "BM25", "MHJACCARD"})
"""The metrics under which a greater score is better."""
DEFAULT_RRF_K = 60


@dataclass(frozen=True)
class Ranker:
    """How a hybrid search merges answers."""

    strategy: str
    """`rrf`, `weighted`, or another one that only the server can apply."""
    weights: tuple[float, ...] = ()
    """The weight of each answer, if the strategy is `weighted`."""
    normalise: bool = True
    """Whether scores are first brought to the range from 0 to 1."""
    k: float = DEFAULT_RRF_K
    """The constant of reciprocal rank fusion."""

    @classmethod
    def of(cls, ranker: Any) -> Ranker:
        """Read pymilvus's RRFRanker, WeightedRanker, or a rerank Function; None is the server's own
        ranker, by ranks. Raises ParamError, as pymilvus does, for other values.
        """
        if ranker is None:
            return cls("rrf")
        if not (hasattr(ranker, "dict") or hasattr(ranker, "params")):
            raise ParamError(message="The hybrid search rerank must be a Function or a Ranker.")

        if hasattr(ranker, "dict"):
            result = ranker.dict()
            strategy = result["strategy"]
            params = result["params"]
            normalise = True
        else:
            params = dict(getattr(ranker, "params", None) or {})
            strategy = str(params.get("reranker", "")).lower()
            normalise = False

        weights = params.get("weights", ())
        if isinstance(weights, str):
            weights = json.loads(weights)
        return cls(
            strategy,
            tuple(map(float, weights)),
            bool(params.get("norm_score", normalise)),
            float(params.get("k", DEFAULT_RRF_K)),
        )


def require_profile(profile: str | None, states: Sequence[CollectionState]) -> None:
    """Raises InvalidInput if none of these fields has the profile.

    A field without it is searched by its active profile.
    """
    if profile is None or not states:
        return
    # A value that is no text need not be hashable.
    if isinstance(profile, str) and any(profile in state.profiles for state in states):
        return

    fields = " or ".join(dict.fromkeys(repr(state.field) for state in states))
    names = ", ".join(dict.fromkeys(name for state in states for name in state.profiles))
    raise InvalidInput(f"no profile {profile!r} for field {fields}: choose one of {names}")


def must_merge(ranker: Ranker, corrected: Sequence[tuple[Rewrite, Question]]) -> bool:
    """Whether the client must merge the answers, because the server cannot.

    corrected: the requests on corrected fields. Raises UnsupportedOperation if the client cannot
    merge them either.
    """
    in_products = all(rewrite.state.metric == "IP" for rewrite, _ in corrected)
    in_one_request = all(
        not rewrite.codec.needs_candidates
        and not rewrite.is_gated(question)
        and len(rewrite.apart(question)) == 1
        for rewrite, question in corrected
    )
    if in_one_request and (in_products or ranker.strategy == "rrf"):
        return False
    if ranker.strategy not in ("rrf", "weighted"):
        raise UnsupportedOperation(
            f"the ranker {ranker.strategy!r} runs on the server only, which has other scores for "
            "corrected fields of metric COSINE or L2, with a gate, or with biases outside them: use "
            "RRFRanker or WeightedRanker"
        )

    return True


def rewritten(request: AnnSearchRequest, rewrite: Rewrite, question: Question) -> AnnSearchRequest:
    """Return the request for the augmented vectors. Raises as Rewrite.ask does."""
    queries = rewrite.queries(question)
    return AnnSearchRequest(
        data=rewrite.codec.pack_queries(queries, rewrite.weights(question)),
        anns_field=rewrite.state.field,
        param=rewrite.search_params(question),
        limit=request.limit,
        expr=request.expr,
        expr_params=request.expr_params,
    )


def merge(
    answers: Sequence[Any],
    metrics: Sequence[str],
    ranker: Ranker,
    page: slice,
    round_decimal: int = -1,
) -> Any:
    """Merge the answers to several requests into the first one, in place, and return it.

    metrics: of each answer. A weighted ranker without normalisation leaves scores as they are, but
    reverses L2 distances if other answers have similarities. Raises InvalidInput if the numbers of
    weights and requests differ, or the numbers of queries of the requests.
    """
    query_counts = [len(answer) for answer in answers]
    if len(set(query_counts)) > 1:
        raise InvalidInput(
            f"the requests have {', '.join(map(str, query_counts))} queries: give each request of a "
            "hybrid search as many"
        )
    if ranker.strategy == "weighted" and len(ranker.weights) != len(answers):
        raise InvalidInput(f"{len(ranker.weights)} weights for {len(answers)} requests")

    conversions, ascending = _score_conversions(ranker, metrics)
    for number, first in enumerate(answers[0]):
        scores: dict[Any, float] = {}
        by_key: dict[Any, Any] = {}
        for i, answer in enumerate(answers):
            for rank, hit in enumerate(answer[number]):
                by_key.setdefault(hit.id, hit)
                if ranker.strategy == "rrf":
                    share = 1 / (ranker.k + rank + 1)
                else:
                    share = ranker.weights[i] * conversions[i](hit["distance"])
                scores[hit.id] = scores.get(hit.id, 0.0) + share

        # Milvus too orders equal scores by key.
        sign = 1 if ascending else -1
        in_order = sorted((sign * score, key) for key, score in scores.items())
        best = [key for _, key in in_order[page]]
        keep(first, [by_key[key] for key in best])
        rescore(first, [scores[key] for key in best], round_decimal)

    return answers[0]


def _score_conversions(
    ranker: Ranker, metrics: Sequence[str]
) -> tuple[list[Callable[[float], float]], bool]:
    """Return the conversion of each answer's scores for a weighted sum.

    Also returns whether small sums are best.
    """
    if ranker.strategy == "weighted" and not ranker.normalise and SIMILARITIES.isdisjoint(metrics):
        return [float] * len(metrics), True

    conversions = _NORMALISED if ranker.normalise else _UNCHANGED
    return [conversions.get(metric, _similarity_of) for metric in metrics], False


def _similarity_of(distance: float) -> float:
    """Return a similarity from 0 to 1 for a distance, as Milvus computes it."""
    return 1 - 2 * math.atan(distance) / math.pi


# Milvus Lite reports BM25 scores with the sign reversed; BM25 itself is never negative.
_UNCHANGED: dict[str, Callable[[float], float]] = {
    **dict.fromkeys(SIMILARITIES, float),
    "BM25": abs,
}
_NORMALISED: dict[str, Callable[[float], float]] = {
    "COSINE": lambda score: (1 + score) / 2,
    "IP": lambda score: 0.5 + math.atan(score) / math.pi,
    "BM25": lambda score: 2 * math.atan(abs(score)) / math.pi,
    "MHJACCARD": lambda score: 0.5 + math.atan(score) / math.pi,
}


def reranked(
    rewrite: Rewrite, question: Question, how: Adaptive | GloballyCorrected
) -> SearchRequest:
    """Return the request that answers a question for its re-ranker.

    It has derived queries, or asks for candidates to rank. Hits that an Adaptive ranks have its
    score, and greater is better under every metric. A GloballyCorrected ranks raw candidates, which
    keep their scores. Raises as `Rewrite.ask` does, and DimensionMismatch if an Adaptive is for
    vectors of another dimension.
    """
    if isinstance(how, Adaptive):
        how.expect_dim(rewrite.state.dim)

    queries = rewrite.queries(question)
    if isinstance(how, Adaptive) and how.direct:
        return rewrite.ask(replace(question, data=how.direct_queries(queries), rerank=None))

    fields = rewrite.fields_for(question, with_vector=True)
    limit = question.pool(how)
    for_candidates = replace(
        question,
        limit=limit,
        offset=0,
        search_params=raised(copied(question.search_params or {}), limit),
        output_fields=fields.requested,
        round_decimal=-1,
        overrides=question.overrides if isinstance(how, Adaptive) else RAW,
        rerank=None,
        with_raw_score=False,
    )
    # The candidates keep their stored vectors, from which `_rank` computes.
    search_request = replace(rewrite, reading=Reading(())).ask(for_candidates)

    def answer(results: Any, *biases: Mapping[Any, float]) -> Any:
        candidates = search_request.answer(results, *biases)
        _rank(rewrite, question, how, queries, candidates)
        return rewrite.reading.hits_out(candidates, fields)

    return replace(search_request, answer=answer, works=True)


def _rank(
    rewrite: Rewrite,
    question: Question,
    how: Adaptive | GloballyCorrected,
    queries: Floats,
    candidates: Any,
) -> None:
    """Sort the candidates of each query by their re-ranker and cut them to the page, in place."""
    layout = rewrite.codec.layout
    vectors = [rewrite.vectors_of(hits) for hits in candidates]
    if isinstance(how, Adaptive):
        adapted = how.scores(queries, vectors)
    elif question.bank is not None:
        bank = layout.reduce_queries(question.bank)
        reduced = layout.reduce_queries(queries)

    for i, hits in enumerate(candidates):
        if not hits:
            continue

        raw: Any = np.asarray(hits.distances, np.float64)
        scores = raw
        if isinstance(how, Adaptive):
            raw = rewrite.codec.raw_scores(vectors[i], queries[i])
            subtracted = (scores - raw) / 2 if layout.metric == "L2" else raw - scores
            scores = adapted[i] - how.correction * subtracted
            order = np.argsort(-scores, kind="stable")[question.page]
        else:
            items = layout.reduce_items(vectors[i])
            order = how.order(items @ reduced[i], items, bank)[question.page]

        keep(hits, [hits[number] for number in order])
        rescore(hits, scores[order], question.round_decimal)
        if question.with_raw_score:
            add_raw_scores(hits, raw[order], question.round_decimal)
