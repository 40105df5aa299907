"""Rewrites requests and responses of the `vector` bias location. No I/O: clients and the proxy share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.client.messages import (
    GROUPED,
    ITERATED,
    LOOK_AT_SCORES,
    ORDERED,
    RANGE_BOUNDS,
    Asking,
    AskingOne,
    FieldRequest,
    Question,
    Reading,
    Row,
    SearchRequest,
    expect_strength,
    keep,
    looked_at,
    normalises_scores,
    rerank,
    rescale,
    rescore,
)
from milvus_hubness.codec.arrays import Floats
from milvus_hubness.codec.half_precision import StorageFormat, decode, rounded, unpacked
from milvus_hubness.codec.layout import Layout
from milvus_hubness.correction import hidden_columns, read_back
from milvus_hubness.errors import DimensionMismatch, InvalidInput, InvalidParameter, UnsupportedOperation
from milvus_hubness.rerank import Adaptive, GloballyCorrected
from milvus_hubness.rerank.rerankers import gate
from milvus_hubness.state import CollectionState, Profile

RAW_SCORE = "raw_score"


SEARCHED_AT_LEAST = ("ef", "search_list")
"""Parameters of graph indexes that must be at least the number of results."""


@dataclass(frozen=True)
class Rewrite:
    """Rewrites requests and responses of one corrected field.

    reading: decodes the rows of the whole collection, with all its fields.
    """

    state: CollectionState
    reading: Reading

    @cached_property
    def layout(self) -> Layout:
        """The columns of the augmented vectors."""
        return self.state.layout

    @cached_property
    def form(self) -> StorageFormat:
        """The storage format of these columns in the field."""
        return self.state.form

    # -- writes ---------------------------------------------------------------------------------------

    def vectors_of(self, rows: Sequence[Row], *, valid: bool = True) -> Floats:
        """Return the vectors of the rows, float32 (n, d).

        valid: require vectors that can have a bias. Raises DimensionMismatch, NonFiniteVectors and
        ZeroVectors naming the rows; InvalidInput if a row sets a hidden field.
        """
        for i, row in enumerate(rows):
            if taken := [name for name in self.state.hidden_fields if name in row]:
                raise InvalidInput(f"row {i} sets {taken[0]!r}, which is computed from the bank")
        given = [unpacked(row[self.state.field], self.state.dtype) for row in rows]
        for i, vector in enumerate(given):
            if (shape := _shape(vector)) != (self.state.dim,):
                raise DimensionMismatch(
                    f"row {i}: {self.state.field!r} must be a list of {self.state.dim} numbers, "
                    f"got {'lists of several lengths' if shape is None else f'shape {shape}'}"
                )
        vectors = self._as_kept(given)
        return self.state.require_storable(vectors) if valid else self.layout.rows(vectors)

    def rows_in(
        self,
        rows: Sequence[Row],
        vectors: Floats,
        biases: Mapping[int, Floats],
        epoch: int,
        locality_hints: Floats | None = None,
    ) -> list[dict[str, Any]]:
        """Return the rows as they are stored.

        biases: (n,) by slot; other slots are 0. locality_hints: (n, c) numbers of the locality hint columns.
        """
        slots = np.zeros((len(vectors), self.state.slots), np.float32)
        for slot, column in biases.items():
            slots[:, slot] = column
        stored = self.form.encode_rows(self.layout.augment(vectors, slots, locality_hints))
        hidden = hidden_columns(self.state, vectors, slots[:, self.state.shown_slot], epoch)
        return [
            {**row, self.state.searched_field: vector, **columns}
            for row, vector, columns in zip(rows, stored, hidden, strict=True)
        ]

    # -- searches ---------------------------------------------------------------------------------------

    def profile(self, question: Question) -> Profile:
        """Return the bias profile of a question. Raises InvalidInput."""
        return self.state.profile_of(question.profile)

    def strength(self, question: Question) -> float:
        """Return w of the question, or else of its profile. Raises InvalidInput, InvalidParameter."""
        profile = self.profile(question)
        expect_strength(question.strength)
        return profile.strength if question.strength is None else float(question.strength)

    def is_gated(self, question: Question) -> bool:
        """Whether a gate limits the correction to some queries."""
        return self.profile(question).gate is not None and self.strength(question) != 0

    def ranks_candidates(self, question: Question) -> bool:
        """Whether the client fetches more hits than requested and ranks them."""
        how = question.rerank
        return how is not None and not (isinstance(how, Adaptive) and how.direct)

    def expect_answerable(self, question: Question, options: Mapping[str, Any]) -> None:
        """Check that the server can answer the question.

        options: further arguments of the search. Raises UnsupportedOperation if the server would rank, sort
        or group hits by scores that differ from those of the answer.
        """
        field = f"of field {self.state.field!r}"
        if looked_at(options, ("is_embedding_list",)):
            raise UnsupportedOperation(f"is_embedding_list {field}, which holds one vector per row")
        if self.ranks_candidates(question):
            if name := looked_at(options, (*ORDERED, *GROUPED, *ITERATED)):
                raise UnsupportedOperation(
                    f"{name} would see uncorrected scores {field}, as candidates are ranked by the client: "
                    "search with strength=0 and without rerank, or migrate the collection"
                )
        elif self.is_gated(question):
            if name := looked_at(options, (*ORDERED, *ITERATED)):
                raise UnsupportedOperation(
                    f"{name} {field}, whose searches are gated by the order of scores: search with "
                    "strength=0, or with a profile that has no gate"
                )
            if question.offset and looked_at(options, GROUPED) and options.get("group_size") not in (None, 1):
                raise UnsupportedOperation(
                    f"group_size with an offset {field}, whose searches are gated: ask for the first page"
                )
        if question.with_raw_score and looked_at(options, ("search_aggregation",)):
            raise UnsupportedOperation(
                "search_aggregation has no room for raw scores: leave with_raw_score out"
            )
        if self.serves_products:
            self._expect_products(options, field)

    @property
    def serves_products(self) -> bool:
        """Whether the server ranks by inner products of augmented vectors, whatever the user's metric."""
        return True

    def _expect_products(self, options: Mapping[str, Any], field: str) -> None:
        if self.state.metric == "L2" and (name := looked_at(options, LOOK_AT_SCORES)):
            raise UnsupportedOperation(
                f"{name} computes with scores on the server, which has inner products {field} in place of L2 "
                "distances: rank the answer in the application, or correct with the biases in fields"
            )
        if self.state.metric == "COSINE" and normalises_scores(options.get("ranker")):
            raise UnsupportedOperation(
                f"a ranker with norm_score {field}: the server would normalise inner products in place of "
                "cosines: leave norm_score out"
            )

    def queries(self, question: Question) -> Floats:
        """Return the queries as the user gave them, float32 (m, d).

        Raises DimensionMismatch, NonFiniteVectors, InvalidInput.
        """
        return self.layout.require_finite(self._as_kept(question.data), "query")

    def encoded_queries(self, question: Question, queries: Floats, weight: float) -> list[Any]:
        """Return the augmented queries in the storage format of the field."""
        query_vectors = self.layout.encode_queries(queries, weight, slot=self.profile(question).slot)
        return self.form.encode_queries(query_vectors)

    def apart(self, question: Question) -> list[Question]:
        """Split the question into parts that one request each can answer.

        Under L2 the bounds of a range search become different inner products for every query.
        """
        if self.state.metric != "L2" or not question.search_params:
            return [question]
        places = _places(question.search_params)
        if not any(place.get(name) is not None for place in places for name in RANGE_BOUNDS):
            return [question]
        return [replace(question, data=[query]) for query in self.queries(question)]

    def ask(self, question: Question) -> SearchRequest:
        """Return the one request that answers a search: corrected, gated, or raw candidates to be re-ranked.

        Raises DimensionMismatch, InvalidInput, InvalidParameter.
        """
        if asking := self.asking(question):
            return asking(question.data)
        queries = self.queries(question)
        params = self.search_params(question.search_params, queries)
        if isinstance(question.rerank, GloballyCorrected) and question.bank is not None:
            return self._reranked(question, question.rerank, question.bank, queries, params)
        return self._gated(question, queries, params)

    def asking(self, question: Question) -> Asking | None:
        """Return a function that builds the request of this question for any data.

        The function ignores the question's own data and raises as `ask` does. Returns None if candidates are
        to be re-ranked, or if a gate limits the correction to some queries. Raises InvalidInput,
        InvalidParameter.
        """
        weight = self.strength(question)
        if question.rerank is not None or self.is_gated(question):
            return None
        slot = self.profile(question).slot
        fields = self.fields_for(question, with_vector=question.with_raw_score)

        def ask(data: npt.ArrayLike) -> SearchRequest:
            def answer(results: Any) -> Any:
                self._score(results, queries, weight, question)
                return self.reading.hits_out(results, fields)

            queries = self.layout.rows(self._as_kept(data))
            params = self.search_params(question.search_params, queries)
            encoded = self.form.encode_queries(self.layout.encode_queries(queries, weight, slot=slot))
            return SearchRequest(encoded, question.limit, question.offset, params, fields.requested, answer)

        return ask

    def asking_one(self, question: Question) -> AskingOne | None:
        """Return a faster function that builds the request for one query, a list of numbers or an array.

        Returns None if the request needs more than joined bytes. Under COSINE the query is sent without
        division by its length, so the scores from the server are in proportion to that length: nothing else
        may use them.
        """
        if self.state.metric == "L2" or question.round_decimal >= 0 or question.with_raw_score:
            return None
        bounds = _places(question.search_params)
        if self.state.dtype != "float32" or any(
            place.get(name) is not None for place in bounds for name in RANGE_BOUNDS
        ):
            return None
        weight, slot = self.strength(question), self.profile(question).slot
        fields = self.fields_for(question, with_vector=False)
        nothing = np.zeros((1, self.state.dim), np.float32)

        def ask(query: list[float] | Floats) -> SearchRequest | None:
            wrapped = self.layout.encode_query(query, weight, slot=slot)
            if wrapped is None:
                return None
            search_request, length = wrapped

            def answer(results: Any) -> Any:
                if length != 1:
                    for hits in results:
                        rescale(hits, length)
                return self.reading.hits_out(results, fields)

            params = self.search_params(question.search_params, nothing)
            return SearchRequest(
                [search_request], question.limit, question.offset, params, fields.requested, answer
            )

        return ask

    def _scores_are_products(self, question: Question) -> bool:
        """Whether the scores from the server are the scores that the user asks for."""
        return self.state.metric != "L2" and question.round_decimal < 0 and not question.with_raw_score

    def search_params(self, given: Mapping[str, Any] | None, queries: Floats) -> dict[str, Any]:
        """Return the search parameters for augmented vectors.

        They have no metric, and range bounds as inner products. Raises InvalidParameter if the given
        parameters name another metric than the field's.
        """
        if not given:
            return {}
        params = copied(given)
        metric = params.pop("metric_type", None)
        if metric and str(metric).upper() != self.state.metric:
            raise InvalidParameter(
                f"metric type not match: expected {self.state.metric}, search_params say {metric}"
            )
        for place in (params, params.get("params") or {}):
            for name in RANGE_BOUNDS:
                if place.get(name) is not None:
                    place[name] = self._range_bound(place[name], queries)
        return params

    def _gated(
        self,
        question: Question,
        queries: Floats,
        params: dict[str, Any],
    ) -> SearchRequest:
        """Return one request that has every query twice, raw and corrected."""
        weight = self.strength(question)
        fields = self.fields_for(question, with_vector=question.with_raw_score)

        def answer(results: Any) -> Any:
            before, after = results[: len(queries)], results[len(queries) :]
            self._score(before, queries, 0.0, question)
            self._score(after, queries, weight, question)
            best = [hits[0].id if hits else None for hits in before]
            results[:] = gate(before, after, best, question.activated)
            for hits in results:
                keep(hits, hits[question.offset :])
            return self.reading.hits_out(results, fields)

        data = [
            *self.encoded_queries(question, queries, 0.0),
            *self.encoded_queries(question, queries, weight),
        ]
        return SearchRequest(data, question.page.stop, 0, params, fields.requested, answer)

    def _reranked(
        self,
        question: Question,
        how: GloballyCorrected,
        bank: Floats,
        queries: Floats,
        params: dict[str, Any],
    ) -> SearchRequest:
        fields = self.fields_for(question, with_vector=True)

        def answer(results: Any) -> Any:
            self._score(results, queries, 0.0, replace(question, with_raw_score=False))
            rerank(results, queries, self.layout, how, bank, question.page, self.vectors_found)
            if question.with_raw_score:
                for hits in results:
                    add_raw_scores(hits, hits.distances)
            return self.reading.hits_out(results, fields)

        data, limit = self.encoded_queries(question, queries, 0.0), question.pool(how)
        return SearchRequest(data, limit, 0, raised(params, limit), fields.requested, answer)

    def fields_for(self, question: Question, *, with_vector: bool) -> FieldRequest:
        """Return the fields that a search requests.

        with_vector: whether the answer needs the stored vectors, shown to the user or not.
        """
        if not with_vector:
            return self.reading.fields(question.output_fields)
        wanted = list(question.output_fields or [])
        if self.state.field in wanted or "*" in wanted:
            return self.reading.fields(question.output_fields)
        fields = self.reading.fields([*wanted, self.state.field])
        return FieldRequest(fields.requested, (*fields.hidden, self.state.field))

    def _range_bound(self, bound: float, queries: Floats) -> float:
        return float(self.layout.products(bound, queries[0]))

    # -- answers ----------------------------------------------------------------------------------------

    def _score(self, results: Any, queries: Floats, weight: float, question: Question) -> None:
        """Convert the scores to the user's metric, in place."""
        if self._scores_are_products(question):
            return
        for hits, query in zip(results, queries, strict=True):
            self.score_out(hits, query, weight, question.round_decimal)
            if question.with_raw_score:
                raw = self._raw_scores(hits, query)
                add_raw_scores(
                    hits, raw.round(question.round_decimal) if question.round_decimal >= 0 else raw
                )

    def score_out(self, hits: Any, query: Floats, weight: float, round_decimal: int = -1) -> None:
        """Convert the inner products of one query's hits to scores of the user's metric, in place."""
        if self.state.metric != "L2" and round_decimal < 0:
            return
        products = [[hit["distance"] for hit in hits]]
        rescore(hits, self.layout.scores(products, query[None, :], weight)[0], round_decimal)

    def _raw_scores(self, hits: Any, query: Floats) -> npt.NDArray[np.float64]:
        layout = self.layout
        products = (
            self._loaded([hit["entity"] for hit in hits]) @ layout.encode_queries(query[None, :], 0.0)[0]
        )
        scores: npt.NDArray[np.float64] = layout.scores(products[None, :], query[None, :], 0.0)[0]
        return scores

    def vectors_found(self, hits: list[Any]) -> Floats:
        """Return the vectors of n hits as the user gave them, (n, d)."""
        entities = [hit["entity"] for hit in hits]
        return read_back(self.state, self._loaded(entities), entities)

    def _loaded(self, entities: Sequence[Row]) -> Floats:
        """Return the augmented vectors of n hits, (n, width), in the columns of the layout."""
        form = self.form
        found = decode([entity[self.state.field] for entity in entities], form.dtype)
        return form.joined(found.reshape(-1, form.width))

    def _as_kept(self, given: Any) -> Any:
        """Return the user's vectors, rounded to the dtype of the field."""
        if self.state.dtype == "float32" or not isinstance(given, list | tuple | np.ndarray):
            return given
        return rounded(decode(given, self.state.dtype), self.state.dtype)


def add_raw_scores(hits: Any, scores: Sequence[float] | npt.NDArray[np.float64]) -> None:
    """Give each hit its uncorrected score."""
    for hit, score in zip(hits, scores, strict=True):
        hit[RAW_SCORE] = float(score)


def _shape(vector: Any) -> tuple[int, ...] | None:
    """Return the shape of a vector; None if it has lists of several lengths."""
    try:
        shape: tuple[int, ...] = np.shape(vector)
    except ValueError:
        return None
    return shape


def _places(params: Mapping[str, Any] | None) -> tuple[Mapping[str, Any], ...]:
    """Return the mappings that may have search parameters: the outer one and its "params"."""
    return (params, params.get("params") or {}) if params else ()


def copied(params: Mapping[str, Any]) -> dict[str, Any]:
    """Copy search parameters, including those of the index."""
    inner = params.get("params")
    return {**params, "params": dict(inner)} if inner else dict(params)


def raised(params: dict[str, Any], limit: int) -> dict[str, Any]:
    """Raise the given parameters of a graph search to `limit`, in place, and return the parameters.

    limit: the number of results that are fetched, which may exceed the number that the user asks for.
    """
    for place in (params, params.get("params") or {}):
        for name in SEARCHED_AT_LEAST:
            if isinstance(place.get(name), int):
                place[name] = max(place[name], limit)
    return params
