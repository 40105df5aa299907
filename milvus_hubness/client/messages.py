"""Requests of users, their checks, and descriptions in the user's form. No I/O."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
from pymilvus.client.check import check_id_and_data, check_pass_param
from pymilvus.exceptions import ParamError

from milvus_hubness.codec.arrays import Floats
from milvus_hubness.errors import InvalidParameter, UnsupportedOperation
from milvus_hubness.rerank import Adaptive, GloballyCorrected
from milvus_hubness.state import PROPERTY, CollectionState
from milvus_hubness.stores.records import (
    DUAL_WRITE_PROPERTY,
    ONLINE_BANKS_PROPERTY,
    TUNING_PROPERTY,
    WRITE_INTENTS_PROPERTY,
    is_fence,
)

USE_SCORES = ("ranker", "function_chains", "search_aggregation")
"""Arguments that make the server compute with scores."""
ORDERED = (*USE_SCORES, "order_by_fields")
"""Arguments that need the final order of the hits on the server."""
GROUPED = ("group_by_field", "group_by_fields")
"""Arguments that make the server return the best hits of each group."""
ITERATED = ("iterator", "search_iter_v2")
"""Arguments that make the server answer page by page."""
IN_BACKGROUND = ("_async", "_callback")
RANGE_BOUNDS = ("radius", "range_filter")


def expect_question(data: Any, ids: Any, output_fields: Any, search_params: Any, options: Mapping[str, Any]) -> None:
    """Raises ParamError in the same cases as pymilvus, and InvalidParameter for bounds that are not numbers."""
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
            try:
                float(place.get(name) or 0.0)
            except (TypeError, ValueError):
                raise InvalidParameter(f"{name} must be a number, got {place[name]!r}") from None


def expect_whole_hits(output_fields: Any, fields: Collection[str], options: Mapping[str, Any]) -> None:
    """Raises UnsupportedOperation for answers that the client cannot decode. fields: the corrected fields."""
    if fields and (name := first_set(options, IN_BACKGROUND)):
        raise UnsupportedOperation(f"{name} on a corrected collection: use AsyncHubnessClient")
    if fields and first_set(options, ("namespace",)):
        raise UnsupportedOperation("namespace on a corrected collection, which has none: leave it out")
    named = output_fields if isinstance(output_fields, list) else []
    vectors = [name for name in named if name in fields or (fields and name == "*")]
    if vectors and first_set(options, ("search_aggregation",)):
        raise UnsupportedOperation(
            f"search_aggregation with output field {vectors[0]!r}: buckets would hold stored vectors with "
            "their biases: name other fields, and get the vectors by key"
        )


def first_set(options: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Return the first of these arguments that is set."""
    return next((name for name in names if options.get(name) not in (None, False, "", [])), None)


def normalises_scores(ranker: Any) -> bool:
    """Whether a ranker normalises scores by the metric of the field."""
    functions = getattr(ranker, "functions", None) or [ranker]
    params = [getattr(function, "params", None) or {} for function in functions]
    return any(str(own.get("norm_score", "")).lower() == "true" for own in params)


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
    """Raises InvalidParameter if `candidates` is not a positive integer, or if no re-ranker uses it."""
    if candidates is None:
        return
    if rerank is None or (isinstance(rerank, Adaptive) and rerank.direct):
        raise InvalidParameter("candidates needs a re-ranker: pass one as rerank")
    if isinstance(candidates, bool) or not isinstance(candidates, int) or candidates < 1:
        raise InvalidParameter(f"candidates must be a whole number of at least 1, not {candidates!r}")


_OURS = {PROPERTY, TUNING_PROPERTY, DUAL_WRITE_PROPERTY, WRITE_INTENTS_PROPERTY, ONLINE_BANKS_PROPERTY}


def is_ours(property: str) -> bool:
    return property in _OURS or property.startswith(f"{PROPERTY}.")


def description_out(states: Collection[CollectionState], description: dict[str, Any]) -> dict[str, Any]:
    """Convert the result of describe_collection to the collection that the user created."""
    ours = {name for state in states for name in state.codec.hidden_fields}
    dims = {state.field: state.dim for state in states}
    fields = [entry for entry in description["fields"] if entry["name"] not in ours]
    for entry in fields:
        if entry["name"] in dims:
            entry["params"] = {**entry["params"], "dim": dims[entry["name"]]}
    properties = {name: value for name, value in description["properties"].items() if not is_ours(name)}
    shown = {**description, "fields": fields, "properties": properties}
    if "aliases" in description:
        shown["aliases"] = [alias for alias in description["aliases"] if not is_fence(alias)]
    return shown


def index_out(states: Collection[CollectionState], index: dict[str, Any] | None) -> dict[str, Any] | None:
    """Convert the result of describe_index to the user's metric."""
    metrics = {state.field: state.metric for state in states}
    if index and index.get("field_name") in metrics:
        return {**index, "metric_type": metrics[index["field_name"]]}
    return index


@dataclass(slots=True)
class Question:
    """A search as the user requested it.

    strength: w; None uses that of the profile. profile: name of a bias profile; None uses the active one. rerank: a
    GloballyCorrected re-ranker ranks raw candidates against `bank` (m, d), the bank's queries; an Adaptive one ranks
    corrected candidates. candidates: how many; None uses the number of the re-ranker. activated: keys that open the
    gate, if the search is gated. with_raw_score: hits have their uncorrected scores too.
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
        """Return how many candidates a re-ranker needs: at least up to the end of the page."""
        return max(self.candidates or how.candidates, int(self.page.stop))

    @property
    def page(self) -> slice:
        return slice(self.offset, self.offset + self.limit)


@dataclass(slots=True)
class SearchRequest:
    """A request for the server, and `answer`, which converts its results for the user, perhaps for long (`works`).

    biases_of: the side collection, if `answer` also takes biases by key from it, after the results.
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
