"""Rewrites searches and their answers for one corrected field, in clients and the proxy. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.bounds import LARGEST
from milvus_hubness.correction.codec.arrays import (
    Floats,
    decode,
    returned,
    rounded,
)
from milvus_hubness.correction.codec.base import RowCodec
from milvus_hubness.correction.codec.senders import QueryWeights
from milvus_hubness.correction.rerank import Adaptive
from milvus_hubness.correction.rerank.rerankers import gate
from milvus_hubness.correction.state import CollectionState, Profile
from milvus_hubness.errors import InvalidInput, InvalidParameter, UnsupportedOperation
from milvus_hubness.milvus.client.messages import (
    ENDS_OF_RANGE,
    GROUPED,
    ITERATED,
    ORDERED,
    RANGE_BOUNDS,
    SEARCHED_AT_LEAST,
    USE_SCORES,
    Question,
    SearchRequest,
    bound_in,
    first_set,
    normalises_scores,
)
from milvus_hubness.milvus.pymilvus_private import ORIGINAL_ROW, unread_columns

RAW_SCORE = "raw_score"
"""The name of a hit's uncorrected score."""
MAX_QUERIES = 16_384
"""Largest number of queries in a request to Milvus, unless its configuration has another one."""

Row = MutableMapping[str, Any]

Asking = Callable[[npt.ArrayLike], SearchRequest]
"""Builds the request of a search for any queries."""


@dataclass(slots=True)
class FieldRequest:
    """The fields to request from the server, and those to remove from the answer."""

    requested: list[str] | None
    """The output_fields of the request."""
    hidden: tuple[str, ...]
    """The fields to remove."""


@dataclass(frozen=True)
class Reading:
    """Decodes the rows of a collection."""

    states: tuple[CollectionState, ...]
    """The states of all its corrected fields."""

    def fields(self, output_fields: list[str] | None, *, default_all: bool = False) -> FieldRequest:
        """Return the fields to request so that vectors
        can be decoded, and the fields to hide again.

        default_all: no output_fields means every field, as for query and get. An argument that is
        not a list passes unchanged, so that pymilvus refuses it.
        """
        if output_fields is not None and not isinstance(output_fields, list):
            return FieldRequest(output_fields, ())

        named = list(output_fields or [])
        hidden = tuple(name for name in self._hidden if name not in named)
        if "*" not in named:
            needed = [
                name
                for codec in self._codecs
                if codec.field in named
                for name in codec.decoding_fields
            ]
            named += [name for name in needed if name in hidden]

        if named:
            return FieldRequest(named, hidden)

        return FieldRequest(["*"] if default_all else output_fields, hidden)

    def rows_out(
        self, rows: Iterable[Row], fields: FieldRequest, *, strict_float32: bool = False
    ) -> None:
        """Convert rows to the user's form, in place: the user's vectors, and no hidden fields.

        strict_float32: vectors become lists of NumPy's float32. Raises StateError if the stored
        vectors have another width than the collection state names.
        """
        # pymilvus may keep the columns of the answer, and make rows of them when they are read. All
        # vectors of a column are decoded at once, which costs less than one by one.
        unread = unread_columns(rows)
        raw = list(list.__iter__(cast("list[Row]", rows))) if unread is not None else []
        is_decoded = unread is not None and self._columns_out(unread, raw, fields)
        self._read_rows_out(raw if is_decoded else list(rows), fields, strict_float32)

    def _read_rows_out(
        self, rows: Sequence[Row], fields: FieldRequest, strict_float32: bool = False
    ) -> None:
        """Convert rows as `rows_out` does, but for the vectors that are still in columns."""
        for codec in self._codecs:
            with_vector = [row for row in rows if row.get(codec.field) is not None]
            if not with_vector or codec.leaves_vectors:
                continue

            vectors = returned(codec.vectors_of(with_vector), codec.dtype)
            for row, vector in zip(with_vector, vectors, strict=True):
                in_list = isinstance(vector, bytes) and isinstance(row[codec.field], list)
                row[codec.field] = [vector] if in_list else vector
                if strict_float32 and codec.dtype == "float32":
                    row[codec.field] = list(np.asarray(vector, np.float32))

        for row in rows:
            for name in fields.hidden:
                row.pop(name, None)

    def need_no_conversion(self, fields: FieldRequest) -> bool:
        """Whether hits with the requested fields need no conversion."""
        requested = fields.requested
        if not isinstance(requested, list) or not requested or "*" in requested:
            return False
        return self.changed.isdisjoint(requested)

    def hits_out(self, results: Any, fields: FieldRequest) -> Any:
        """Convert the rows of hits to the user's form, in place."""
        if not any(map(_have_fields, results)):
            return results
        if results and not any(getattr(hits, "has_materialized", True) for hits in results):
            rows = [hit["entity"] for hits in results for hit in list.__iter__(hits)]
            if self._columns_out(results[0].lazy_field_data, rows, fields):
                self._read_rows_out(rows, fields)
                return results

        for hits in results:
            # All hits of one query have the same fields.
            if hits and not self.changed.isdisjoint(hits[0]["entity"]):
                self._read_rows_out([hit["entity"] for hit in hits], fields)

        return results

    def _columns_out(
        self, unread: Iterable[Any], rows: Sequence[Row], fields: FieldRequest
    ) -> bool:
        """Decode vectors of rows that are still in columns of the answer.

        pymilvus takes them out of these when a row is read. Returns False, and leaves all as it is,
        if the columns are not those of float32 vectors of all rows.
        """
        columns = {column.field_name: column.vectors for column in unread}
        codecs = [
            codec for codec in self._codecs if codec.field in columns and not codec.leaves_vectors
        ]
        if not columns.keys().isdisjoint(fields.hidden) or any(ORIGINAL_ROW in row for row in rows):
            return False

        for codec in codecs:
            count = len(columns[codec.field].float_vector.data)
            if count != len(rows) * columns[codec.field].dim or any(
                row.get(codec.field) is not None for row in rows
            ):
                return False

        for codec in codecs:
            column = columns[codec.field]
            stored = floats_in(column.float_vector).reshape(-1, column.dim)
            put_floats(column.float_vector, codec.vectors_in(stored, rows))
            column.dim = codec.layout.dim

        return True

    @cached_property
    def _codecs(self) -> tuple[RowCodec, ...]:
        return tuple(state.codec for state in self.states)

    @cached_property
    def _hidden(self) -> tuple[str, ...]:
        return tuple(name for codec in self._codecs for name in codec.hidden_fields)

    @cached_property
    def changed(self) -> frozenset[str]:
        """The fields that hold augmented vectors, and the hidden fields."""
        return frozenset([*self._hidden, *(state.field for state in self.states)])


@dataclass(frozen=True)
class Rewrite:
    """Rewrites requests and responses of one corrected field, whose scores the server ranks."""

    state: CollectionState
    reading: Reading

    @cached_property
    def codec(self) -> RowCodec:
        return self.state.codec

    def profile(self, question: Question) -> Profile:
        """Return the bias profile of a question. Raises InvalidInput."""
        return self.state.profile_of(question.overrides.profile)

    def weights(self, question: Question) -> QueryWeights:
        """Return what the question's searches send beside its queries.

        Raises InvalidInput, InvalidParameter.
        """
        return self.state.query_weights(self.profile(question), question.overrides)

    def is_gated(self, question: Question) -> bool:
        return self.profile(question).gate is not None and self.weights(question).strength != 0

    def ranks_candidates(self, question: Question) -> bool:
        """Whether the client fetches more hits than requested and ranks them."""
        if self.codec.needs_candidates and self.weights(question).strength != 0:
            return True

        how = question.rerank
        return how is not None and not (isinstance(how, Adaptive) and how.direct)

    def expect_answerable(self, question: Question, options: Mapping[str, Any]) -> None:
        """Raises UnsupportedOperation if the server would use scores other than the answer's.

        It does where it ranks, sorts or groups hits. options: further arguments of the search.
        """
        field = f"of field {self.state.field!r}"
        if first_set(options, ("is_embedding_list",)):
            raise UnsupportedOperation(f"is_embedding_list {field}, which holds one vector per row")
        if self.ranks_candidates(question):
            if name := first_set(options, (*ORDERED, *GROUPED, *ITERATED)):
                raise UnsupportedOperation(
                    f"{name} would see uncorrected scores {field}, as candidates are ranked by the "
                    "client: search with strength=0 and without rerank, or migrate the collection"
                )
        elif self.is_gated(question):
            if name := first_set(options, (*ORDERED, *ITERATED)):
                raise UnsupportedOperation(
                    f"{name} {field}, whose searches are gated by the order of scores: search "
                    "with strength=0, or with a profile that has no gate"
                )

            if (
                question.offset
                and first_set(options, GROUPED)
                and options.get("group_size") not in (None, 1)
            ):
                raise UnsupportedOperation(
                    f"group_size with an offset {field}, whose searches are gated: ask for the "
                    "first page"
                )

        if question.with_raw_score and first_set(options, ("search_aggregation",)):
            raise UnsupportedOperation(
                "search_aggregation has no room for raw scores: leave with_raw_score out"
            )

        # From here on: the server has scores of another metric than the user's.
        if self.codec.served_metric == self.state.metric:
            return
        if self.state.metric == "L2" and (name := first_set(options, USE_SCORES)):
            raise UnsupportedOperation(
                f"{name} computes with scores on the server, which has inner products {field} in "
                "place of L2 distances: rank the answer in the application"
            )

        if self.state.metric == "COSINE" and normalises_scores(options.get("ranker")):
            raise UnsupportedOperation(
                f"a ranker with norm_score {field}: the server would normalise inner products in "
                "place of cosines: leave norm_score out"
            )

    def queries(self, question: Question) -> Floats:
        """Return the user's queries, float32 (m, d).

        Raises DimensionMismatch, NonFiniteVectors, InvalidInput.
        """
        return self.codec.layout.require_finite(rounded_vectors(question.data, self.state), "query")

    def apart(self, question: Question) -> list[Question]:
        """Split the question into parts that one request each can answer.

        A gate asks each query twice, and a request has a greatest number of queries.
        """
        if self.bounds_differ(question):
            return [replace(question, data=[query]) for query in self.queries(question)]

        data: Any = question.data
        at_once = MAX_QUERIES // 2
        if self.is_gated(question) and len(data) > at_once:
            starts = range(0, len(data), at_once)
            return [replace(question, data=data[start : start + at_once]) for start in starts]

        return [question]

    def ask(self, question: Question) -> SearchRequest:
        """Return the one request that answers a search without a re-ranker, corrected or gated.

        Raises DimensionMismatch, InvalidInput, InvalidParameter.
        """
        if self.is_gated(question):
            return self._gated(question)
        return self._asking(question)(question.data)

    def asking(self, question: Question) -> Asking | None:
        """Return a function that builds the request of this question for any other data.

        It raises as `ask` does. Returns None if the request depends on its queries in more than
        their vectors: if a gate limits the correction to some, or if bounds differ.
        """
        if self.is_gated(question) or self.bounds_differ(question):
            return None
        return self._asking(question, packed=True)

    def bounds_differ(self, question: Question) -> bool:
        """Whether the bounds of a range search differ for every query, so that each needs a request.

        They do if the server ranks L2 by inner products.
        """
        return self.state.metric == "L2" != self.codec.served_metric and _has_bounds(
            question.search_params
        )

    def _asking(self, question: Question, *, packed: bool = False) -> Asking:
        """packed: whether the queries of requests may be bytes."""
        weights = self.weights(question)
        fields = self.fields_for(question, with_vector=question.with_raw_score)
        params = self.search_params(question)
        pack = self.codec.query_packer(weights, packed=packed)
        has_scores = self.scores_are_products(question)
        is_answer = has_scores and self.reading.need_no_conversion(fields)
        is_rounded = self.state.dtype != "float32"

        def ask(data: npt.ArrayLike) -> SearchRequest:
            queries = rounded_vectors(data, self.state) if is_rounded else data

            def answer(results: Any) -> Any:
                if not has_scores:
                    rows = self.codec.layout.rows(queries)
                    self._score(results, rows, weights.strength, question)
                return self.reading.hits_out(results, fields)

            # pymilvus and the proxy may change the parameters of a request.
            return SearchRequest(
                pack(queries),
                question.limit,
                question.offset,
                copied(params) if params else {},
                fields.requested,
                _unchanged if is_answer else answer,
            )

        return ask

    def scores_are_products(self, question: Question) -> bool:
        """Whether the server's scores are the answer's, unless the client ranks candidates."""
        return (
            self.codec.layout.metric != "L2"
            and question.round_decimal < 0
            and not question.with_raw_score
        )

    def without_metric(self, params: dict[str, Any]) -> dict[str, Any]:
        """Remove the metric from parameters of a search, in place, and return them.

        pymilvus takes it in either place, and its iterators put it into both. Raises
        InvalidParameter for another metric than the field's.
        """
        for mapping in parameters_in(params):
            metric = mapping.pop("metric_type", None)
            if metric and str(metric).upper() != self.state.metric:
                raise InvalidParameter(
                    f"metric type not match: expected {self.state.metric}, not {metric} of "
                    "search_params"
                )

        return params

    def search_params(self, question: Question) -> dict[str, Any]:
        """Return parameters without the metric, with range bounds in the server's scores.

        A bound at the end of the metric's range is no bound: corrected scores pass it.
        Raises InvalidParameter for another metric than the field's, and InvalidInput if bounds
        differ and the question has several queries.
        """
        requested = question.search_params
        if not requested:
            return {}

        params = self.without_metric(with_inner_bounds(requested, self.state.metric))
        if self.bounds_differ(question):
            queries = self.queries(question)
            if len(queries) != 1:
                raise InvalidInput(
                    f"{len(queries)} queries at once with the bounds of a range search of field "
                    f"{self.state.field!r}, which differ for each: pass one query"
                )

            for mapping in parameters_in(params):
                for name in RANGE_BOUNDS:
                    if mapping.get(name) is not None:
                        bound = self.codec.layout.products(mapping[name], queries[0])
                        mapping[name] = float(bound)

        return params

    def _gated(self, question: Question) -> SearchRequest:
        """Return one request that has every query twice, raw and corrected."""
        queries = self.queries(question)
        weights = self.weights(question)
        params = self.search_params(question)
        fields = self.fields_for(question, with_vector=question.with_raw_score)

        def answer(results: Any) -> Any:
            raw = results[: len(queries)]
            corrected = results[len(queries) :]
            self._score(raw, queries, 0.0, question)
            self._score(corrected, queries, weights.strength, question)

            # A query is corrected if its raw nearest row is one that opens the gate.
            nearest = [hits[0].id if hits else None for hits in raw]
            results[:] = gate(raw, corrected, nearest, question.activated)
            for hits in results:
                keep(hits, hits[question.offset :])
            return self.reading.hits_out(results, fields)

        data = [
            *self.codec.pack_queries(queries, weights._replace(strength=0.0)),
            *self.codec.pack_queries(queries, weights),
        ]
        return SearchRequest(data, question.page.stop, 0, params, fields.requested, answer)

    def fields_for(self, question: Question, *, with_vector: bool) -> FieldRequest:
        """Return the fields that a search requests.

        with_vector: the answer needs the stored vectors.
        """
        named = list(question.output_fields or [])
        if not with_vector or self.state.field in named or "*" in named:
            return self.reading.fields(question.output_fields)

        fields = self.reading.fields([*named, self.state.field])
        return FieldRequest(fields.requested, (*fields.hidden, self.state.field))

    def _score(self, results: Any, queries: Floats, strength: float, question: Question) -> None:
        """Convert the scores to the user's metric, in place."""
        if self.scores_are_products(question):
            return

        for hits, query in zip(results, queries, strict=True):
            products = [[hit["distance"] for hit in list.__iter__(hits)]]
            scores = self.codec.decode_scores(products, query[None, :], strength)[0]
            rescore(hits, scores, question.round_decimal)
            if question.with_raw_score:
                raw = self.codec.raw_scores(self.vectors_of(hits), query)
                add_raw_scores(hits, raw, question.round_decimal)

    def vectors_of(self, hits: Sequence[Any]) -> Floats:
        """Return the user's vectors (n, d) of hits that have them."""
        return self.codec.vectors_of([hit["entity"] for hit in hits])


def _have_fields(hits: Any) -> bool:
    """Whether the hits of a query have more than their keys and scores."""
    return bool(hits) and bool(
        getattr(hits, "lazy_field_data", None) or list.__getitem__(hits, 0)["entity"]
    )


def _unchanged(results: Any) -> Any:
    """Return results that are the user's as they are."""
    return results


def floats_in(array: Any) -> Floats:
    """Return the numbers of a FloatArray of Milvus's protocol, which has them as in memory.

    To read them one by one would take many times as long.
    """
    array.DiscardUnknownFields()
    message = array.SerializeToString()
    return np.frombuffer(message, "<f4", offset=len(message) - 4 * len(array.data))


def put_floats(array: Any, numbers: npt.ArrayLike) -> None:
    """Set the numbers of a FloatArray."""
    packed = np.ascontiguousarray(numbers, "<f4")

    # The message is a tag, its length in groups of seven bits, and the numbers.
    size = packed.nbytes
    length = bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    array.ParseFromString(b"".join([b"\n", length, bytes([size]), packed.data]))


def keep(hits: Any, chosen: list[Any]) -> None:
    """Reduce `hits` to the chosen ones, in that order, in all three lists of pymilvus's hits."""
    hits[:] = chosen
    hits.ids = [hit.id for hit in chosen]
    hits.distances = [hit["distance"] for hit in chosen]


def rescore(hits: Any, scores: npt.ArrayLike, round_decimal: int = -1) -> None:
    """Set the score of each hit, rounded to `round_decimal` decimals unless that is −1."""
    hits.distances = _rounded(scores, round_decimal).tolist()
    for hit, score in zip(list.__iter__(hits), hits.distances, strict=True):
        hit["distance"] = score


def add_raw_scores(hits: Any, scores: npt.ArrayLike, round_decimal: int = -1) -> None:
    """Set the uncorrected score of each hit, rounded as `rescore` does."""
    for hit, score in zip(hits, _rounded(scores, round_decimal), strict=True):
        hit[RAW_SCORE] = float(score)


def _rounded(scores: npt.ArrayLike, round_decimal: int) -> npt.NDArray[np.float64]:
    values = np.asarray(scores, np.float64)
    return values.round(round_decimal) if round_decimal >= 0 else values


def rounded_vectors(vectors: Any, state: CollectionState) -> Any:
    """Return the user's vectors, rounded to the dtype of the field."""
    if state.dtype == "float32" or not isinstance(vectors, list | tuple | np.ndarray):
        return vectors
    return rounded(decode(vectors, state.dtype), state.dtype)


def parameters_in(params: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """Return the mappings that may have search parameters: the outer one and its "params"."""
    return (params, params.get("params") or {}) if params else ()


def _has_bounds(params: Mapping[str, Any] | None) -> bool:
    return any(
        mapping.get(name) is not None for mapping in parameters_in(params) for name in RANGE_BOUNDS
    )


def with_inner_bounds(params: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Copy search parameters, without bounds at the ends of the metric's range.

    Raises InvalidParameter for a bound that is no number.
    """
    params = copied(params)
    mappings = parameters_in(params)
    for mapping in mappings:
        for name in RANGE_BOUNDS:
            # pymilvus writes no numbers of NumPy.
            if isinstance(mapping.get(name), np.generic):
                mapping[name] = bound_in(mapping, name)

    sign = -1.0 if metric == "L2" else 1.0
    for name, end in ENDS_OF_RANGE.get(metric, {}).items():
        direction = sign if name == "range_filter" else -sign
        for mapping in mappings:
            bound = bound_in(mapping, name)
            if bound is None or direction * (bound - end) < 0:
                continue

            # Milvus reads a range_filter only together with a radius.
            if name == "radius" and any(each.get("range_filter") is not None for each in mappings):
                mapping[name] = -LARGEST
            else:
                del mapping[name]

    return params


def copied(params: Mapping[str, Any]) -> dict[str, Any]:
    """Copy search parameters, including those of the index."""
    inner = params.get("params")
    return {**params, "params": dict(inner)} if inner else dict(params)


def raised(params: dict[str, Any], limit: int) -> dict[str, Any]:
    """Raise the parameters of an index to the number of hits, in place, and return them.

    Numbers stay numbers, and texts texts. What is no whole number stays, for the server to refuse.
    """
    for mapping in parameters_in(params):
        for name in SEARCHED_AT_LEAST:
            value = mapping.get(name)
            try:
                is_too_small = value is not None and int(value) < limit
            except (TypeError, ValueError, OverflowError):
                continue

            if is_too_small:
                mapping[name] = str(limit) if isinstance(value, str) else limit

    return params
