"""Rewrites requests and responses of the other bias locations. No I/O.

These are `second_vector`, `fields` and `side_collection`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
from pymilvus.function_chain import FunctionChain, FunctionChainStage, col, fn

from milvus_hubness.client.messages import (
    RANGE_BOUNDS,
    Asking,
    FieldRequest,
    Question,
    Reading,
    Row,
    SearchRequest,
    keep,
    rescore,
)
from milvus_hubness.client.rewrite import RAW_SCORE, Rewrite, raised
from milvus_hubness.codec.arrays import Floats
from milvus_hubness.codec.base import EPOCH_FIELD
from milvus_hubness.codec.fields import SIDE_FIELD
from milvus_hubness.codec.half_precision import decode
from milvus_hubness.rerank import GloballyCorrected
from milvus_hubness.state import CollectionState


@dataclass(frozen=True)
class SecondVectorRewrite(Rewrite):
    """Rewrites requests and responses of the bias location `second_vector`.

    Rows have the vectors as the user gave them, and in a second field the augmented vectors, which are
    searched. Answers return the former.
    """

    def vectors_found(self, hits: list[Any]) -> Floats:
        return self._own([hit["entity"] for hit in hits])

    def _loaded(self, entities: Sequence[Row]) -> Floats:
        own = self._own(entities)
        return self.layout.augment(own, np.zeros(len(own), np.float32))

    def _own(self, entities: Sequence[Row]) -> Floats:
        """Return the vectors of n rows, as the user gave them, (n, d)."""
        found = decode([entity[self.state.field] for entity in entities], self.state.dtype)
        return found.reshape(-1, self.state.dim)


MEASURED_DEPTH = 10
MAX_CANDIDATES = 16_384
"""Largest number of hits in an answer of Milvus."""


@dataclass(frozen=True)
class RerankingRewrite(Rewrite):
    """Rewrites requests and responses of the bias locations `fields` and `side_collection`.

    Vectors are stored as the user gave them; searches fetch candidates and correct their scores. chains: the
    server runs function chains, which correct the scores if the biases are in fields; otherwise
    `SearchRequest.answer` does.
    """

    chains: bool = False

    @property
    def side(self) -> str | None:
        """The side collection with the biases; None if they are in fields."""
        return self.state.reranking.side if self.state.reranking else None

    # -- writes ---------------------------------------------------------------------------------------

    def rows_in(
        self,
        rows: Sequence[Row],
        vectors: Floats,
        biases: Mapping[int, Floats],
        epoch: int,
        locality_hints: Floats | None = None,
    ) -> list[dict[str, Any]]:
        """Return the rows with their biases (n,) in the slot fields.

        The rows are unchanged if a side collection has the biases.
        """
        if self.side:
            return [dict(row) for row in rows]
        fields = self.state.slot_fields
        return [
            {**row, **dict(zip(fields, own, strict=True)), self.state.epoch_field: epoch}
            for row, own in zip(rows, _by_row(biases, len(fields)), strict=True)
        ]

    def side_rows(
        self, key_field: str, keys: Sequence[Any], biases: Mapping[int, Floats], epoch: int
    ) -> list[dict[str, Any]]:
        """Return the entries of the side collection for rows with these keys."""
        return [
            {key_field: key, SIDE_FIELD: own, EPOCH_FIELD: epoch}
            for key, own in zip(keys, _by_row(biases, self.state.slots), strict=True)
        ]

    # -- searches ---------------------------------------------------------------------------------------

    def ranks_candidates(self, question: Question) -> bool:
        """Whether the client ranks candidates: as in Rewrite, and also for every corrected search."""
        return self.strength(question) != 0 or super().ranks_candidates(question)

    @property
    def serves_products(self) -> bool:
        """False: the server has the user's own vectors and metric."""
        return False

    def encoded_queries(self, question: Question, queries: Floats, weight: float) -> list[Any]:
        """Return the queries without augmentation."""
        return self.state.form.encode_queries(queries)

    def apart(self, question: Question) -> list[Question]:
        """Return the question unsplit: the client checks the bounds of a range search."""
        return [question]

    def asking(self, question: Question) -> Asking | None:
        """Return None: the request and its number of candidates are computed for each search."""
        return None

    def ask(self, question: Question) -> SearchRequest:
        """Return the request for the candidates.

        It is the request for the answer itself if the search is not corrected or the server applies the
        correction. Raises as Rewrite.ask does.
        """
        queries, weight = self.queries(question), self.strength(question)
        params = copy.deepcopy(dict(question.search_params or {}))
        if isinstance(question.rerank, GloballyCorrected) and question.bank is not None:
            return self._reranked(question, question.rerank, question.bank, queries, params)
        fields = self.reading.fields(question.output_fields)
        if weight == 0:
            return self._plain(question, queries, params, fields)
        params = raised(params, self._candidates(question))
        bounds = _without_bounds(params)
        gated = self.is_gated(question)
        if self.chains and not (self.side or bounds or gated or question.with_raw_score):
            return self._chained(question, queries, weight, params, fields)

        def answer(results: Any, biases: Mapping[Any, Sequence[float]] | None = None) -> Any:
            for hits in results:
                self._correct(hits, biases, weight, bounds, question.activated if gated else None)
                keep(hits, hits[question.page])
                self._score_hits(hits, question)
            return self.reading.hits_out(results, fields)

        requested = fields.requested if self.side else self._with_slot(fields)
        return SearchRequest(
            self.encoded_queries(question, queries, weight),
            self._candidates(question),
            0,
            params,
            requested,
            answer,
            biases_of=self.side,
        )

    def _plain(
        self, question: Question, queries: Floats, params: dict[str, Any], fields: FieldRequest
    ) -> SearchRequest:
        def answer(results: Any) -> Any:
            if question.with_raw_score:
                for hits in results:
                    for hit in hits:
                        hit[RAW_SCORE] = hit["distance"]
            return self.reading.hits_out(results, fields)

        return SearchRequest(
            self.encoded_queries(question, queries, 0.0),
            question.limit,
            question.offset,
            params,
            fields.requested,
            answer,
            _rounding(question),
        )

    def _chained(
        self,
        question: Question,
        queries: Floats,
        weight: float,
        params: dict[str, Any],
        fields: FieldRequest,
    ) -> SearchRequest:
        corrected = fn.num_combine(
            col("$score"),
            col(self.state.slot_fields[self.profile(question).slot]),
            mode="weighted",
            weights=[1.0, self._sign * weight],
        )
        chain = (
            FunctionChain(FunctionChainStage.L2_RERANK)
            .map("$score", corrected)
            .sort(col("$score"), desc=self.state.metric != "L2")
            .limit(question.limit, question.offset)
        )
        return SearchRequest(
            self.encoded_queries(question, queries, weight),
            self._candidates(question),
            0,
            params,
            fields.requested,
            lambda results: self.reading.hits_out(results, fields),
            {"function_chains": chain, **_rounding(question)},
        )

    def _candidates(self, question: Question) -> int:
        """Return how many candidates to fetch.

        It is the number measured for ten results, scaled to the requested results.
        """
        measured = self.state.reranking.candidates if self.state.reranking else 0
        last = int(question.page.stop)
        return max(measured, min(measured * last // MEASURED_DEPTH, MAX_CANDIDATES), last)

    def _with_slot(self, fields: FieldRequest) -> list[str]:
        wanted = fields.requested or []
        slot = self.state.slot_fields[self.state.profile.slot]
        return wanted if slot in wanted or "*" in wanted else [*wanted, slot]

    @property
    def _sign(self) -> float:
        """Factor of a bias in the user's metric.

        Scores fall by the bias; squared distances grow by twice the bias.
        """
        return 2.0 if self.state.metric == "L2" else -1.0

    # -- answers ----------------------------------------------------------------------------------------

    def score_out(self, hits: Any, query: Floats, weight: float, round_decimal: int = -1) -> None:
        """Set the scores from the server, which are in the user's metric already."""
        rescore(hits, hits.distances, round_decimal)

    def _correct(
        self,
        hits: Any,
        biases: Mapping[Any, Sequence[float]] | None,
        weight: float,
        bounds: Mapping[str, float],
        activated: AbstractSet[Any] | None,
    ) -> None:
        """Correct the scores of raw candidates and sort them, in place.

        Rows without a bias get the mean bias. biases: the slots of each key; None if the hits have their own.
        activated: the keys that open the gate, if the search is gated.
        """
        if activated is not None and (not hits or hits[0].id not in activated):
            weight = 0.0
        slot = self.state.profile.slot
        if biases is None:
            own = [hit["entity"].get(self.state.slot_fields[slot]) or 0.0 for hit in hits]
        else:
            own = [biases[hit.id][slot] if hit.id in biases else 0.0 for hit in hits]
        raw = np.array([hit["distance"] for hit in hits], np.float64)
        scores = raw + self._sign * weight * np.array(own, np.float64)
        order = np.argsort(scores if self.state.metric == "L2" else -scores, kind="stable")
        for hit, score in zip(hits, raw.tolist(), strict=True):
            hit[RAW_SCORE] = score
        rescore(hits, scores)
        keep(hits, [hits[i] for i in order if _within(scores[i], bounds, self.state.metric)])

    def _score_hits(self, hits: Any, question: Question) -> None:
        rescore(hits, hits.distances, question.round_decimal)
        for hit in hits:
            raw = hit.pop(RAW_SCORE)
            if question.with_raw_score:
                hit[RAW_SCORE] = round(raw, question.round_decimal) if question.round_decimal >= 0 else raw

    def vectors_found(self, hits: list[Any]) -> Floats:
        """Return the vectors of n hits, (n, d)."""
        return self._loaded([hit["entity"] for hit in hits])


def rewrite_of(state: CollectionState, reading: Reading, *, chains: bool = False) -> Rewrite:
    """Return the rewrite for the bias location of this state."""
    if state.second_vector:
        return SecondVectorRewrite(state, reading)
    return Rewrite(state, reading) if state.reranking is None else RerankingRewrite(state, reading, chains)


def _by_row(biases: Mapping[int, Floats], slots: int) -> list[list[float]]:
    """Return the biases of each row, one per slot."""
    rows: list[list[float]] = np.column_stack([biases[slot] for slot in range(slots)]).tolist()
    return rows


def _rounding(question: Question) -> dict[str, Any]:
    return {"round_decimal": question.round_decimal} if question.round_decimal >= 0 else {}


def _without_bounds(params: dict[str, Any]) -> dict[str, float]:
    """Remove the bounds of a range search from its parameters, and return them.

    They apply to corrected scores.
    """
    bounds: dict[str, float] = {}
    for place in (params, params.get("params") or {}):
        for name in RANGE_BOUNDS:
            if place.get(name) is not None:
                bounds[name] = float(place.pop(name))
    return bounds


def _within(score: float, bounds: Mapping[str, float], metric: str) -> bool:
    """Whether a score is within the bounds, as Milvus defines them.

    radius is the far bound and excluded, range_filter the near bound.
    """
    sign = -1.0 if metric == "L2" else 1.0
    far, near = bounds.get("radius"), bounds.get("range_filter")
    beyond = far is not None and sign * score <= sign * far
    return not beyond and not (near is not None and sign * score > sign * near)
