"""Rewrites searches whose candidates the client re-ranks. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.milvus.client.messages import RANGE_BOUNDS, Question, SearchRequest
from milvus_hubness.milvus.client.rewrite import (
    Asking,
    FieldRequest,
    Reading,
    Rewrite,
    add_raw_scores,
    copied,
    keep,
    parameters_in,
    raised,
    rescore,
    with_inner_bounds,
)
from milvus_hubness.milvus.client.side_memory import SideBiases

MEASURED_DEPTH = 10
"""The number of results for which a job measures how many candidates are needed."""
MAX_CANDIDATES = 16_384
"""Largest number of hits in an answer of Milvus."""


@dataclass(frozen=True)
class CandidateRewrite(Rewrite):
    """Rewrites requests and responses of a field whose biases are in a side collection.

    Searches request candidates and correct their scores.
    """

    def apart(self, question: Question) -> list[Question]:
        # The client itself checks the bounds of a range search.
        return [question]

    def asking(self, question: Question, *, exact: bool = False) -> Asking | None:
        if self.is_gated(question):
            return None
        return lambda data: self.ask(replace(question, data=data))

    def ask(self, question: Question) -> SearchRequest:
        """Return the request for the candidates, whose biases `SearchRequest.answer` takes.

        Raises as Rewrite.ask does.
        """
        queries = self.queries(question)
        weights = self.weights(question)
        data = self.codec.pack_queries(queries, weights)
        requested = self.without_metric(copied(question.search_params or {}))
        fields = self.reading.fields(question.output_fields)
        if weights.strength == 0:
            return self._uncorrected(question, data, requested, fields)

        candidates = self._candidates(question)
        params = raised(with_inner_bounds(requested, self.state.metric), candidates)
        bounds = _without_bounds(params)
        gated = self.is_gated(question)
        profile = self.profile(question)

        def answer(results: Any, biases: Mapping[Any, float] | None = None) -> Any:
            for hits, query in zip(results, queries, strict=True):
                is_corrected = not gated or (bool(hits) and hits[0].id in question.activated)
                weight = weights.strength if is_corrected else 0.0
                of_hits = _biases(hits, biases)
                self._rank(hits, query, of_hits, weight, bounds, question)

            return self.reading.hits_out(results, fields)

        return SearchRequest(
            data,
            candidates,
            0,
            params,
            fields.requested,
            answer,
            biases_of=SideBiases.of(self.state, profile),
        )

    def _uncorrected(
        self, question: Question, data: list[Any], params: dict[str, Any], fields: FieldRequest
    ) -> SearchRequest:
        def answer(results: Any) -> Any:
            for hits in results if question.with_raw_score else ():
                add_raw_scores(hits, hits.distances)
            return self.reading.hits_out(results, fields)

        page = (question.limit, question.offset)
        return SearchRequest(data, *page, params, fields.requested, answer, _rounding(question))

    def _candidates(self, question: Question) -> int:
        """Return the number of candidates: that measured for ten results, scaled to the results."""
        measured = self.codec.candidates
        last_rank = int(question.page.stop)
        scaled = min(measured * last_rank // MEASURED_DEPTH, MAX_CANDIDATES)
        return max(measured, scaled, last_rank)

    def _rank(
        self,
        hits: Any,
        query: Floats,
        biases: list[float],
        weight: float,
        bounds: dict[str, float],
        question: Question,
    ) -> None:
        """Correct the scores of one query's candidates, and keep those of the page, in place."""
        raw = np.array(hits.distances, np.float64)
        scores = self.codec.decode_scores(raw, query[None, :], weight, biases)
        order = np.argsort(scores if self.state.metric == "L2" else -scores, kind="stable")
        within = order.tolist()
        if bounds:
            within = [i for i in within if _within(scores[i], bounds, self.state.metric)]
        best = within[question.page]
        keep(hits, [hits[i] for i in best])
        rescore(hits, scores[best], question.round_decimal)
        if question.with_raw_score:
            add_raw_scores(hits, raw[best], question.round_decimal)


def rewrite_of(state: CollectionState, reading: Reading) -> Rewrite:
    """Return the rewrite of searches on the field of this state."""
    kind = CandidateRewrite if state.codec.needs_candidates else Rewrite
    return kind(state, reading)


def _biases(hits: Any, biases: Mapping[Any, float] | None) -> list[float]:
    """Return the bias of each hit, by its key; 0 is the mean bias."""
    by_key = biases or {}
    return [by_key.get(key, 0.0) for key in hits.ids]


def _rounding(question: Question) -> dict[str, Any]:
    return {"round_decimal": question.round_decimal} if question.round_decimal >= 0 else {}


def _without_bounds(params: dict[str, Any]) -> dict[str, float]:
    """Remove the bounds of a range search from its parameters, and return them.

    They apply to corrected scores, which the server does not have.
    """
    bounds: dict[str, float] = {}
    for mapping in parameters_in(params):
        for name in RANGE_BOUNDS:
            if mapping.get(name) is not None:
                bounds[name] = float(mapping.pop(name))
    return bounds


def _within(score: float, bounds: Mapping[str, float], metric: str) -> bool:
    """Whether a score is within Milvus's bounds: beyond radius, and up to range_filter."""
    sign = -1.0 if metric == "L2" else 1.0
    radius = bounds.get("radius")
    if radius is not None and sign * score <= sign * radius:
        return False

    range_filter = bounds.get("range_filter")
    return range_filter is None or not sign * score > sign * range_filter
