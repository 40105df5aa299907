"""Checks of requests, and rows, hits and descriptions in the user's form. No I/O."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from pymilvus.client.check import check_id_and_data, check_pass_param
from pymilvus.exceptions import ParamError

from milvus_hubness.codec.arrays import Floats, returned
from milvus_hubness.codec.base import RowCodec
from milvus_hubness.errors import (
    InvalidParameter,
    UnsupportedOperation,
)
from milvus_hubness.job_properties import (
    DUAL_WRITE_PROPERTY,
    ONLINE_BANKS_PROPERTY,
    TUNING_PROPERTY,
    WRITE_INTENTS_PROPERTY,
)
from milvus_hubness.rerank import Adaptive, GloballyCorrected
from milvus_hubness.state import PROPERTY, CollectionState
from milvus_hubness.stores.records import is_fence

LOOK_AT_SCORES = ("ranker", "function_chains", "search_aggregation")
"""Arguments that make the server compute with scores."""
ORDERED = (*LOOK_AT_SCORES, "order_by_fields")
"""Arguments that need the final order of the hits on the server."""
GROUPED = ("group_by_field", "group_by_fields")
"""Arguments that make the server return the best hits of each group."""
ITERATED = ("iterator", "search_iter_v2")
"""Arguments that make the server answer page by page."""
IN_BACKGROUND = ("_async", "_callback")
RANGE_BOUNDS = ("radius", "range_filter")

Kind = tuple[Any, ...]
"""The part of a search that stays the same when only its data, filter, timeout and the like differ."""


def kind_of(question: Question, options: Mapping[str, Any]) -> Kind | None:
    """Return the kind of a search; None if it has unusual arguments, or some that pymilvus may refuse."""
    limit, names, strength = question.limit, question.output_fields, question.strength
    usual = (
        type(limit) is int
        and _are_dense(question.data)
        and (names is None or _are_names(names))
        and (strength is None or type(strength) in (float, int))
        and question.rerank is None
        and question.candidates is None
        and "offset" not in options
        and "round_decimal" not in options
    )
    if not usual:
        return None
    for name in (*LOOK_AT_SCORES, *IN_BACKGROUND):
        if options.get(name) is not None:
            return None
    return (
        options.get("anns_field"),
        limit,
        None if names is None else tuple(names),
        repr(question.search_params) if question.search_params else "",
        strength,
        question.profile,
        bool(question.with_raw_score),
    )


def expect_question(
    data: Any,
    ids: Any,
    output_fields: Any,
    search_params: Any,
    options: Mapping[str, Any],
) -> None:
    """Check a search.

    Raises ParamError in the same cases as pymilvus, and InvalidParameter for bounds that are not numbers.
    """
    check_id_and_data([ids] if isinstance(ids, int | str) else ids, data)
    check_pass_param(output_fields=output_fields, round_decimal=options.get("round_decimal", -1))
    params = search_params or {}
    inner = params.get("params", {}) if isinstance(params, Mapping) else params
    if not isinstance(inner, Mapping):
        raise ParamError(message=f"Search params must be a dict, got {type(inner)}")
    if "offset" in options and "offset" in params:
        raise ParamError(message="Provide offset both in kwargs and param, expect just one")
    offset = options.get("offset") or params.get("offset")
    if offset is not None and not isinstance(offset, int):
        raise ParamError(message=f"wrong type for offset, expect int, got {type(offset)}")
    for place in (params, inner):
        for name in RANGE_BOUNDS:
            _expect_number(name, place.get(name))


def expect_whole_hits(output_fields: Any, fields: Collection[str], options: Mapping[str, Any]) -> None:
    """Check that the client can decode the answer.

    fields: the corrected fields of the collection. Raises UnsupportedOperation for futures, and for buckets
    whose hits have vectors.
    """
    if fields and (name := looked_at(options, IN_BACKGROUND)):
        raise UnsupportedOperation(f"{name} on a corrected collection: use AsyncHubnessClient")
    if fields and looked_at(options, ("namespace",)):
        raise UnsupportedOperation("namespace on a corrected collection, which has none: leave it out")
    named = output_fields if isinstance(output_fields, list) else []
    vectors = [name for name in named if name in fields or (fields and name == "*")]
    if vectors and looked_at(options, ("search_aggregation",)):
        raise UnsupportedOperation(
            f"search_aggregation with output field {vectors[0]!r}: buckets would hold stored vectors with "
            "their biases: name other fields, and get the vectors by key"
        )


def looked_at(options: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Return the first of these arguments that is set."""
    return next((name for name in names if options.get(name) not in (None, False, "", [])), None)


def normalises_scores(ranker: Any) -> bool:
    """Whether a ranker normalises scores by the metric of the field."""
    functions = getattr(ranker, "functions", None) or [ranker]
    params = [getattr(each, "params", None) or {} for each in functions]
    return any(str(each.get("norm_score", "")).lower() == "true" for each in params)


def _are_dense(data: Any) -> bool:
    """Whether pymilvus accepts `data` as queries, by a quick check of types."""
    if isinstance(data, np.ndarray):
        return data.ndim > 1
    if not isinstance(data, list):
        return False
    for vector in data:
        kind = type(vector)
        if kind is not list and kind is not np.ndarray:
            return False
    return True


def _are_names(output_fields: Any) -> bool:
    return isinstance(output_fields, list) and all(type(name) is str and name for name in output_fields)


def _expect_number(name: str, bound: Any) -> None:
    try:
        float(bound or 0.0)
    except (TypeError, ValueError):
        raise InvalidParameter(f"{name} must be a number, got {bound!r}") from None


def expect_strength(strength: Any) -> None:
    """Check a strength: None or a finite number. Raises InvalidParameter."""
    number = isinstance(strength, numbers.Real) and not isinstance(strength, bool)
    if strength is not None and not (number and math.isfinite(strength)):
        raise InvalidParameter(f"strength must be a finite number, not {strength!r}")


def expect_state_ttl(seconds: Any) -> None:
    """Check a TTL: a number of at least 0. Raises InvalidParameter."""
    number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
    if not (number and seconds >= 0):
        raise InvalidParameter(f"state_ttl must be a number of seconds of at least 0, not {seconds!r}")


def expect_candidates(rerank: GloballyCorrected | Adaptive | None, candidates: int | None) -> None:
    """Check a number of candidates.

    Raises InvalidParameter if it is not a positive integer, or if no re-ranker uses it.
    """
    if candidates is None:
        return
    if rerank is None or (isinstance(rerank, Adaptive) and rerank.direct):
        raise InvalidParameter("candidates needs a re-ranker: pass one as rerank")
    if isinstance(candidates, bool) or not isinstance(candidates, int) or candidates < 1:
        raise InvalidParameter(f"candidates must be a whole number of at least 1, not {candidates!r}")


def keep(hits: Any, kept: list[Any]) -> None:
    """Reduce `hits` to the hits in `kept`, in that order, in all three lists of pymilvus's hits."""
    hits[:] = kept
    hits.ids = [hit.id for hit in kept]
    hits.distances = [hit["distance"] for hit in kept]


def rescore(hits: Any, scores: npt.ArrayLike, round_decimal: int = -1) -> None:
    """Give each hit its score, rounded to `round_decimal` decimals unless that is −1."""
    values = np.asarray(scores, np.float64)
    hits.distances = (values.round(round_decimal) if round_decimal >= 0 else values).tolist()
    for hit, score in zip(hits, hits.distances, strict=True):
        hit["distance"] = score


def rescale(hits: Any, length: float) -> None:
    """Divide the scores of one query's hits by its length."""
    hits.distances = [score / length for score in hits.distances]
    for hit, score in zip(list.__iter__(hits), hits.distances, strict=True):
        hit["distance"] = score


Row = MutableMapping[str, Any]

_OURS = {PROPERTY, TUNING_PROPERTY, DUAL_WRITE_PROPERTY, WRITE_INTENTS_PROPERTY, ONLINE_BANKS_PROPERTY}
"""Properties of collections that belong to this package."""


def is_ours(property: str) -> bool:
    """Whether a collection property belongs to this package."""
    return property in _OURS or property.startswith(f"{PROPERTY}.")


@dataclass(slots=True)
class FieldRequest:
    """requested: fields to request from the server. hidden: fields to remove from the answer."""

    requested: list[str] | None
    hidden: tuple[str, ...]


@dataclass(frozen=True)
class Reading:
    """Decodes the rows of a collection. states: of every corrected field of the collection."""

    states: tuple[CollectionState, ...]

    def fields(self, output_fields: list[str] | None, *, default_all: bool = False) -> FieldRequest:
        """Return the fields to request so that vectors can be decoded, and the fields to hide again.

        default_all: no output_fields means every field, as for query and get. An argument that is not a list
        passes unchanged, so that pymilvus refuses it.
        """
        if output_fields is not None and not isinstance(output_fields, list):
            return FieldRequest(output_fields, ())
        named = list(output_fields or [])
        hidden = tuple(name for name in self._hidden if name not in named)
        if "*" not in named:
            needed = [
                name for codec in self._codecs if codec.field in named for name in codec.decoding_fields
            ]
            named += [name for name in needed if name in hidden]
        return FieldRequest(named or (["*"] if default_all else output_fields), hidden)

    def rows_out(self, rows: Iterable[Row], fields: FieldRequest, *, strict_float32: bool = False) -> None:
        """Convert rows to the user's form, in place.

        They get the vectors that the user gave and lose the hidden fields. strict_float32: vectors become
        lists of NumPy's float32. Raises StateError if the stored vectors have another width than the state
        says.
        """
        rows = list(rows)
        for codec in self._codecs:
            with_vector = [row for row in rows if row.get(codec.field) is not None]
            if not with_vector or codec.leaves_vectors:
                continue
            for row, vector in zip(
                with_vector, returned(codec.vectors_of(with_vector), codec.dtype), strict=True
            ):
                in_list = isinstance(vector, bytes) and isinstance(row[codec.field], list)
                row[codec.field] = [vector] if in_list else vector
                if strict_float32 and codec.dtype == "float32":
                    row[codec.field] = list(np.asarray(vector, np.float32))
        for row in rows:
            for name in fields.hidden:
                row.pop(name, None)

    def hits_out(self, results: Any, fields: FieldRequest) -> Any:
        """Convert the rows of hits to the user's form, in place.

        All hits of one query have the same fields.
        """
        for hits in results:
            if hits and not self._changed.isdisjoint(hits[0]["entity"]):
                self.rows_out((hit["entity"] for hit in hits), fields)
        return results

    @cached_property
    def _codecs(self) -> tuple[RowCodec, ...]:
        return tuple(state.codec for state in self.states)

    @cached_property
    def _hidden(self) -> tuple[str, ...]:
        return tuple(name for codec in self._codecs for name in codec.hidden_fields)

    @cached_property
    def _changed(self) -> frozenset[str]:
        """The fields that hold augmented vectors, and the hidden fields."""
        return frozenset([*self._hidden, *(state.field for state in self.states)])

    def description_out(self, description: dict[str, Any]) -> dict[str, Any]:
        """Convert the result of describe_collection to the collection that the user created."""
        ours = set(self._hidden)
        dims = {state.field: state.dim for state in self.states}
        fields = [each for each in description["fields"] if each["name"] not in ours]
        for each in fields:
            if each["name"] in dims:
                each["params"] = {**each["params"], "dim": dims[each["name"]]}
        properties = {name: value for name, value in description["properties"].items() if not is_ours(name)}
        shown = {**description, "fields": fields, "properties": properties}
        if "aliases" in description:
            shown["aliases"] = [alias for alias in description["aliases"] if not is_fence(alias)]
        return shown

    def index_out(self, index: dict[str, Any] | None) -> dict[str, Any] | None:
        """Convert the result of describe_index to the user's metric."""
        metrics = {state.field: state.metric for state in self.states}
        if index and index.get("field_name") in metrics:
            return {**index, "metric_type": metrics[index["field_name"]]}
        return index


@dataclass(slots=True)
class Question:
    """A search as the user requested it.

    strength: w; None uses that of the profile. profile: name of a bias profile; None uses the active one.
    rerank: a GloballyCorrected re-ranker ranks raw candidates against `bank` (m, d), the bank's queries; an
    Adaptive one ranks corrected candidates. candidates: how many; None uses the number of the re-ranker.
    activated: keys that open the gate, if the search is gated. with_raw_score: give each hit its uncorrected
    score too.
    """

    data: npt.ArrayLike
    limit: int
    offset: int = 0
    search_params: Mapping[str, Any] | None = None
    output_fields: list[str] | None = None
    round_decimal: int = -1
    strength: float | None = None
    profile: str | None = None
    rerank: GloballyCorrected | Adaptive | None = None
    candidates: int | None = None
    bank: Floats | None = None
    activated: AbstractSet[Any] = frozenset()
    with_raw_score: bool = False

    def pool(self, how: GloballyCorrected | Adaptive) -> int:
        """Return how many candidates to fetch for a re-ranker: at least up to the end of the page."""
        return max(self.candidates or how.candidates, int(self.page.stop))

    @property
    def page(self) -> slice:
        """The requested ranks, counted from the best hit."""
        return slice(self.offset, self.offset + self.limit)


@dataclass(slots=True)
class SearchRequest:
    """A request for the server, and `answer`, which converts its results for the user.

    options: further arguments of the search. biases_of: the side collection, if the answer needs biases from
    it; `answer` then takes them, by key, after the results. works: whether `answer` computes for long.
    """

    data: Any
    limit: int
    offset: int
    search_params: dict[str, Any]
    output_fields: list[str] | None
    answer: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    biases_of: str | None = None
    works: bool = False


Asking = Callable[[npt.ArrayLike], SearchRequest]
