"""Rewrites requests and responses of the other bias locations. No I/O."""

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
from milvus_hubness.codec.half_precision import decode
from milvus_hubness.rerank import GloballyCorrected
from milvus_hubness.state import EPOCH_FIELD, SIDE_FIELD, CollectionState


@dataclass(frozen=True)
class SecondVectorRewrite(Rewrite):
    """Rows carry the vectors as the user gave them, and beside these the augmented form, which is searched.
    Answers that need vectors take the former."""

    def vectors_found(self, hits: list[Any]) -> Floats:
        return self._own([hit["entity"] for hit in hits])

    def _loaded(self, entities: Sequence[Row]) -> Floats:
        own = self._own(entities)
        return self.layout.augment(own, np.zeros(len(own), np.float32))

    def _own(self, entities: Sequence[Row]) -> Floats:
        """(n, d) the vectors of n rows, as the user gave them."""
        found = decode([entity[self.state.field] for entity in entities], self.state.dtype)
        return found.reshape(-1, self.state.dim)


MEASURED_DEPTH = 10
MAX_CANDIDATES = 16_384
"""What Milvus answers a search with at most."""


@dataclass(frozen=True)
class RerankingRewrite(Rewrite):
    """For vectors that are stored as the user gave them: candidates are fetched and their scores corrected.

    chains: the server runs function chains, which correct where the biases are fields; elsewhere
    `SearchRequest.answer` does.
    """

    chains: bool = False

    @property
    def side(self) -> str | None:
        """The collection that holds the biases, None where fields do."""
        return self.state.reranking.side if self.state.reranking else None

    # -- rows in --------------------------------------------------------------------------------------

    def rows_in(
        self,
        rows: Sequence[Row],
        vectors: Floats,
        biases: Mapping[int, Floats],
        epoch: int,
        locality_hints: Floats | None = None,
    ) -> list[dict[str, Any]]:
        """The rows with their biases (n,) in the slots, where these are fields; else as they are."""
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
        """What goes into the side collection for rows of these keys."""
        return [
            {key_field: key, SIDE_FIELD: own, EPOCH_FIELD: epoch}
            for key, own in zip(keys, _by_row(biases, self.state.slots), strict=True)
        ]

    # -- questions --------------------------------------------------------------------------------------

    def ranks_candidates(self, question: Question) -> bool:
        """As Rewrite.ranks_candidates: also where a correction is asked for."""
        return self.strength(question) != 0 or super().ranks_candidates(question)

    @property
    def serves_products(self) -> bool:
        """False: the server has the user's own vectors and metric."""
        return False

    def encoded_queries(self, question: Question, queries: Floats, weight: float) -> list[Any]:
        """The queries as they are."""
        return self.state.form.encode_queries(queries)

    def apart(self, question: Question) -> list[Question]:
        """As one: the bounds of a range search are looked at here."""
        return [question]

    def asking(self, question: Question) -> Asking | None:
        """None: what is asked, and of how many candidates, is decided anew each time."""
        return None

    def ask(self, question: Question) -> SearchRequest:
        """The request for the candidates, or for the answer itself where no correction is asked for or the
        server applies it. Raises as Rewrite.ask does."""
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
        """As many for each result asked for as were measured to do for ten."""
        measured = self.state.reranking.candidates if self.state.reranking else 0
        last = int(question.page.stop)
        return max(measured, min(measured * last // MEASURED_DEPTH, MAX_CANDIDATES), last)

    def _with_slot(self, fields: FieldRequest) -> list[str]:
        wanted = fields.requested or []
        slot = self.state.slot_fields[self.state.profile.slot]
        return wanted if slot in wanted or "*" in wanted else [*wanted, slot]

    @property
    def _sign(self) -> float:
        """What a bias counts in the user's metric: scores fall by it, squared distances grow by twice it."""
        return 2.0 if self.state.metric == "L2" else -1.0

    # -- answers ----------------------------------------------------------------------------------------

    def score_out(self, hits: Any, query: Floats, weight: float, round_decimal: int = -1) -> None:
        """Scores as the server gave them, in the user's metric already."""
        rescore(hits, hits.distances, round_decimal)

    def _correct(
        self,
        hits: Any,
        biases: Mapping[Any, Sequence[float]] | None,
        weight: float,
        bounds: Mapping[str, float],
        activated: AbstractSet[Any] | None,
    ) -> None:
        """Raw candidates with corrected scores in their order, in place. Rows without a bias have the mean's.

        biases: the slots of each key; None where hits bring their own. activated: where the search is gated,
        the keys that open the gate.
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
        """(n, d) the vectors of n hits."""
        return self._loaded([hit["entity"] for hit in hits])


def rewrite_of(state: CollectionState, reading: Reading, *, chains: bool = False) -> Rewrite:
    """The rewrite for where this state says that the biases lie."""
    if state.second_vector:
        return SecondVectorRewrite(state, reading)
    return Rewrite(state, reading) if state.reranking is None else RerankingRewrite(state, reading, chains)


def _by_row(biases: Mapping[int, Floats], slots: int) -> list[list[float]]:
    """Of every row its bias in each slot."""
    rows: list[list[float]] = np.column_stack([biases[slot] for slot in range(slots)]).tolist()
    return rows


def _rounding(question: Question) -> dict[str, Any]:
    return {"round_decimal": question.round_decimal} if question.round_decimal >= 0 else {}


def _without_bounds(params: dict[str, Any]) -> dict[str, float]:
    """The bounds of a range search, taken out of its parameters: they hold for corrected scores."""
    bounds: dict[str, float] = {}
    for place in (params, params.get("params") or {}):
        for name in RANGE_BOUNDS:
            if place.get(name) is not None:
                bounds[name] = float(place.pop(name))
    return bounds


def _within(score: float, bounds: Mapping[str, float], metric: str) -> bool:
    """As Milvus takes them: radius is the far bound and excluded, range_filter the near one."""
    sign = -1.0 if metric == "L2" else 1.0
    far, near = bounds.get("radius"), bounds.get("range_filter")
    beyond = far is not None and sign * score <= sign * far
    return not beyond and not (near is not None and sign * score > sign * near)
