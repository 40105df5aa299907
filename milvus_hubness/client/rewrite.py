"""Requests rewritten into requests, responses into responses. No I/O: every client and proxy shares this."""

from __future__ import annotations

import copy
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction import hidden_columns, read_back
from milvus_hubness.errors import DimensionMismatch, InvalidInput, InvalidParameter, UnsupportedOperation
from milvus_hubness.layout import Floats
from milvus_hubness.state import HIDDEN_FIELDS, NORM_FIELD, PROPERTY, CollectionState

Row = MutableMapping[str, Any]

_STORED_METRIC = "IP"
_RANGE = ("radius", "range_filter")


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
        weight = profile.strength if strength is None else float(strength)
        queries = self.state.layout.require_finite(data, "query")
        return SearchRequest(
            data=list(self.state.layout.wrap(queries, weight, slot=profile.slot)),
            queries=queries,
            strength=weight,
            search_params=self._search_params(search_params or {}, queries),
            fields=self.fields(output_fields),
            round_decimal=round_decimal,
        )

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

    def _search_params(self, given: dict[str, Any], queries: Floats) -> dict[str, Any]:
        params = copy.deepcopy(given)
        metric = params.pop("metric_type", None)
        if metric and metric.upper() != self.state.metric:
            raise InvalidParameter(
                f"metric type not match: expected {self.state.metric}, search_params say {metric}"
            )
        for place in (params, params.get("params") or {}):
            for name in _RANGE:
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
            for hit, score in zip(hits, scores.tolist(), strict=True):
                hit["distance"] = round(score, request.round_decimal) if request.round_decimal >= 0 else score
            self.entities_out((hit["entity"] for hit in hits), request.fields)
        return results

    def entities_out(self, entities: Iterable[Row], fields: FieldRequest) -> None:
        """Rows as the user knows them, changed in place."""
        rows = list(entities)
        with_vector = [row for row in rows if row.get(self.state.field) is not None]
        if with_vector:
            stored = np.asarray([row[self.state.field] for row in with_vector], np.float32)
            vectors = read_back(self.state, stored, with_vector).tolist()
            for row, vector in zip(with_vector, vectors, strict=True):
                row[self.state.field] = vector
        for row in rows:
            for name in fields.hidden:
                row.pop(name, None)

    def description_out(self, description: dict[str, Any]) -> dict[str, Any]:
        """describe_collection as of the collection the user made."""
        fields = [field for field in description["fields"] if field["name"] not in self.state.hidden_fields]
        for field in fields:
            if field["name"] == self.state.field:
                field["params"] = {**field["params"], "dim": self.state.dim}
        properties = {name: value for name, value in description["properties"].items() if name != PROPERTY}
        return {**description, "fields": fields, "properties": properties}

    def index_out(self, index: dict[str, Any] | None) -> dict[str, Any] | None:
        """describe_index with the metric the user knows."""
        if index and index.get("field_name") == self.state.field:
            return {**index, "metric_type": self.state.metric}
        return index
