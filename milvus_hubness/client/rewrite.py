"""Requests rewritten into requests, responses into responses. No I/O: every client and proxy shares this."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.client.hits import hide, keep, rescore
from milvus_hubness.client.hits import rerank as reorder
from milvus_hubness.correction import hidden_columns, read_back
from milvus_hubness.errors import DimensionMismatch, InvalidInput, InvalidParameter, UnsupportedOperation
from milvus_hubness.layout import Floats
from milvus_hubness.rerank import GloballyCorrected
from milvus_hubness.rerank.dynamic import gate
from milvus_hubness.state import HIDDEN_FIELDS, NORM_FIELD, PROPERTY, TUNING_PROPERTY, CollectionState

Row = MutableMapping[str, Any]

RANGE_BOUNDS = ("radius", "range_filter")


@dataclass(frozen=True)
class FieldRequest:
    """requested: what to ask the server for. hidden: fields to take out of what comes back."""

    requested: list[str] | None
    hidden: tuple[str, ...]


@dataclass(frozen=True)
class SearchRequest:
    """data: (m, width) asked vectors. queries: (m, d) as the user gave them. round_decimal: −1 for none."""

    data: list[Floats]
    queries: Floats
    strength: float
    search_params: dict[str, Any]
    fields: FieldRequest
    round_decimal: int


@dataclass(frozen=True)
class Asked:
    """What to send to the server, and `answer`, which makes of its results those the user asked for.

    options: further arguments of the search. biases_of: where the answer needs the biases of the rows that
    were found, the collection that holds them; `answer` then takes them, by key, beside the results.
    """

    data: Any
    limit: int
    offset: int
    search_params: dict[str, Any]
    output_fields: list[str] | None
    answer: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    biases_of: str | None = None


@dataclass(frozen=True)
class Rewrite:
    """Both directions for one corrected collection."""

    state: CollectionState

    # -- rows in --------------------------------------------------------------------------------------

    def vectors_of(self, rows: Sequence[Row]) -> Floats:
        """(n, d) the rows' vectors, fit to be stored.

        Raises DimensionMismatch, NonFiniteVectors, ZeroVectors naming the rows; InvalidInput where a row sets
        a field of ours.
        """
        for i, row in enumerate(rows):
            if taken := [name for name in HIDDEN_FIELDS if name in row]:
                raise InvalidInput(f"row {i} sets {taken[0]!r}, which is computed from the bank")
        given = [row[self.state.field] for row in rows]
        for i, vector in enumerate(given):
            if np.shape(vector) != (self.state.dim,):
                raise DimensionMismatch(
                    f"row {i}: {self.state.field!r} must be a list of {self.state.dim} numbers, "
                    f"got shape {np.shape(vector)}"
                )
        return self.state.layout.require_sound(given)

    def rows_in(
        self, rows: Sequence[Row], vectors: Floats, biases: Floats, epoch: int
    ) -> list[dict[str, Any]]:
        """The rows as they are stored, the biases (n,) in every slot."""
        stored = self.state.layout.augment(vectors, biases)
        hidden = hidden_columns(self.state, vectors, biases, epoch)
        return [
            {**row, self.state.field: vector, **columns}
            for row, vector, columns in zip(rows, stored, hidden, strict=True)
        ]

    # -- questions --------------------------------------------------------------------------------------

    def is_about_corrected(self, anns_field: str | None) -> bool:
        """Whether a search on `anns_field` (the only vector field, where none is named) is ours."""
        return not anns_field or anns_field == self.state.field

    def search(
        self,
        data: npt.ArrayLike,
        search_params: dict[str, Any] | None,
        output_fields: list[str] | None,
        strength: float | None,
        round_decimal: int = -1,
    ) -> SearchRequest:
        """The wrapped request. Raises DimensionMismatch, InvalidInput, InvalidParameter."""
        profile = self.state.profile
        weight = self.strength(strength)
        queries = self.state.layout.require_finite(data, "query")
        return SearchRequest(
            data=list(self.state.layout.wrap(queries, weight, slot=profile.slot)),
            queries=queries,
            strength=weight,
            search_params=self._search_params(search_params or {}, queries),
            fields=self.fields(output_fields),
            round_decimal=round_decimal,
        )

    def strength(self, asked: float | None) -> float:
        """w: what was asked for, else the collection's own. Raises InvalidParameter."""
        weight = self.state.profile.strength if asked is None else float(asked)
        if not math.isfinite(weight):
            raise InvalidParameter(f"strength must be finite, got {asked!r}")
        return weight

    def is_gated(self, strength: float | None) -> bool:
        """Whether a search at this strength is corrected for some queries only."""
        return self.state.profile.gate is not None and self.strength(strength) != 0

    def ask(
        self,
        data: npt.ArrayLike,
        search_params: dict[str, Any] | None,
        output_fields: list[str] | None,
        *,
        strength: float | None,
        limit: int,
        offset: int = 0,
        round_decimal: int = -1,
        rerank: GloballyCorrected | None = None,
        bank: Floats | None = None,
        activated: AbstractSet[Any] = frozenset(),
    ) -> Asked:
        """The one request that answers a search: corrected, gated, or raw candidates for `rerank`.

        bank (m, d): the bank's queries, for `rerank`. activated: keys, where the search is gated. Raises as
        `search` does.
        """
        if rerank is not None and bank is not None:
            request = self.candidates(data, search_params, output_fields, round_decimal)
            page = slice(offset, offset + limit)
            return self._asked(
                request,
                max(rerank.candidates, limit + offset),
                0,
                lambda results: self.reranked_out(results, request, rerank, bank, page),
            )
        corrected = self.search(data, search_params, output_fields, strength, round_decimal)
        if not self.is_gated(strength):
            return self._asked(corrected, limit, offset, lambda results: self.hits_out(results, corrected))
        raw = self.search(data, search_params, output_fields, 0.0, round_decimal)
        return self._asked(
            replace(corrected, data=[*raw.data, *corrected.data]),
            limit + offset,
            0,
            lambda results: self.gated_out(results, raw, corrected, activated, offset),
        )

    def _asked(self, request: SearchRequest, limit: int, offset: int, answer: Callable[[Any], Any]) -> Asked:
        return Asked(request.data, limit, offset, request.search_params, request.fields.requested, answer)

    def fields(self, output_fields: list[str] | None, *, default_all: bool = False) -> FieldRequest:
        """What to ask for so that vectors can be read back, and what to hide again.

        default_all: no output_fields means every field, as query and get take it.
        """
        named = list(output_fields or [])
        hidden = tuple(name for name in self.state.hidden_fields if name not in named)
        reads_vector = self.state.field in named and "*" not in named
        if reads_vector and NORM_FIELD in hidden:
            return FieldRequest([*named, NORM_FIELD], hidden)
        return FieldRequest(named or (["*"] if default_all else output_fields), hidden)

    def candidates(
        self,
        data: npt.ArrayLike,
        search_params: dict[str, Any] | None,
        output_fields: list[str] | None,
        round_decimal: int = -1,
    ) -> SearchRequest:
        """A raw request that brings each hit's stored vector along."""
        wanted = list(output_fields or [])
        request = self.search(data, search_params, [*wanted, self.state.field], 0.0, round_decimal)
        if self.state.field in wanted or "*" in wanted:
            return request
        fields = replace(request.fields, hidden=(*request.fields.hidden, self.state.field))
        return replace(request, fields=fields)

    def _search_params(self, given: dict[str, Any], queries: Floats) -> dict[str, Any]:
        params = copy.deepcopy(given)
        metric = params.pop("metric_type", None)
        if metric and metric.upper() != self.state.metric:
            raise InvalidParameter(
                f"metric type not match: expected {self.state.metric}, search_params say {metric}"
            )
        for place in (params, params.get("params") or {}):
            for name in RANGE_BOUNDS:
                if place.get(name) is not None:
                    place[name] = self._range_bound(place[name], queries)
        return params

    def _range_bound(self, bound: float, queries: Floats) -> float:
        if self.state.metric == "L2" and len(queries) > 1:
            raise UnsupportedOperation(
                "a range search under L2 takes one query at a time on a corrected collection"
            )
        return float(self.state.layout.products(bound, queries[0]))

    # -- answers ----------------------------------------------------------------------------------------

    def hits_out(self, results: Any, request: SearchRequest) -> Any:
        """Search results in the user's metric and with the user's fields, changed in place."""
        for hits, query in zip(results, request.queries, strict=True):
            scores = self.state.layout.scores(
                [[hit["distance"] for hit in hits]], query[None, :], request.strength
            )[0]
            rescore(hits, scores, request.round_decimal)
            self.entities_out((hit["entity"] for hit in hits), request.fields)
        return results

    def gated_out(
        self,
        results: Any,
        raw: SearchRequest,
        corrected: SearchRequest,
        activated: AbstractSet[Any],
        skip: int,
    ) -> Any:
        """The answers to raw and corrected questions in turn, in place: for each query those that the gate
        lets through, less the first `skip`."""
        before = self.hits_out(results[: len(raw.queries)], raw)
        after = self.hits_out(results[len(raw.queries) :], corrected)
        best = [hits[0].id if hits else None for hits in before]
        results[:] = gate(before, after, best, activated)
        for hits in results:
            keep(hits, hits[skip:])
        return results

    def reranked_out(
        self, results: Any, request: SearchRequest, rerank: GloballyCorrected, bank: Floats, page: slice
    ) -> Any:
        """Raw candidates with their stored vectors, in place in the order of `rerank`, cut to `page`.

        bank (m, d): the queries, as the user gave them.
        """
        layout = self.state.layout

        def vectors_of(hits: list[Any]) -> Floats:
            entities = [hit["entity"] for hit in hits]
            stored = np.array([entity[self.state.field] for entity in entities], np.float32)
            return read_back(self.state, stored.reshape(-1, layout.width), entities)

        reorder(results, request.queries, layout, rerank, bank, page, vectors_of)
        return self.hits_out(results, request)

    def entities_out(self, entities: Iterable[Row], fields: FieldRequest) -> None:
        """Rows as the user knows them, changed in place."""
        rows = list(entities)
        with_vector = [row for row in rows if row.get(self.state.field) is not None]
        if with_vector:
            stored = np.asarray([row[self.state.field] for row in with_vector], np.float32)
            vectors = read_back(self.state, stored, with_vector).tolist()
            for row, vector in zip(with_vector, vectors, strict=True):
                row[self.state.field] = vector
        hide(rows, fields.hidden)

    def description_out(self, description: dict[str, Any]) -> dict[str, Any]:
        """describe_collection as of the collection the user made."""
        fields = [each for each in description["fields"] if each["name"] not in self.state.hidden_fields]
        for each in fields:
            if each["name"] == self.state.field:
                each["params"] = {**each["params"], "dim": self.state.dim}
        properties = {
            name: value
            for name, value in description["properties"].items()
            if name not in (PROPERTY, TUNING_PROPERTY)
        }
        return {**description, "fields": fields, "properties": properties}

    def index_out(self, index: dict[str, Any] | None) -> dict[str, Any] | None:
        """describe_index with the metric the user knows."""
        if index and index.get("field_name") == self.state.field:
            return {**index, "metric_type": self.state.metric}
        return index
