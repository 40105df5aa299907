"""What pymilvus refuses to send, refused in its words before anything is rewritten. No I/O."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
from pymilvus.client.check import check_id_and_data, check_pass_param
from pymilvus.exceptions import ParamError

from milvus_hubness.errors import InvalidParameter, UnsupportedOperation
from milvus_hubness.rerank import Adaptive, GloballyCorrected

LOOK_AT_SCORES = ("ranker", "function_chains", "search_aggregation")
"""Arguments by which the server computes with scores."""
ORDERED = (*LOOK_AT_SCORES, "order_by_fields")
"""Those for which its order of the hits must be the final one."""
GROUPED = ("group_by_field", "group_by_fields")
"""Those by which it keeps the best hits of each group."""
ITERATED = ("iterator", "search_iter_v2")
"""Those by which it answers a page after the other."""
IN_BACKGROUND = ("_async", "_callback")
RANGE_BOUNDS = ("radius", "range_filter")

Manner = tuple[Any, ...]
"""What searches have in common that differ only in their data, filter, timeout and the like."""


def manner_of(
    data: Any,
    limit: Any,
    output_fields: Any,
    search_params: Any,
    strength: float | None,
    profile: str | None,
    with_raw_score: bool,
    options: Mapping[str, Any],
) -> Manner | None:
    """None where it asks for anything unusual, or for what pymilvus may refuse."""
    usual = (
        type(limit) is int
        and _are_dense(data)
        and (output_fields is None or _are_names(output_fields))
        and (strength is None or type(strength) in (float, int))
        and "offset" not in options
        and "round_decimal" not in options
    )
    if not usual:
        return None
    for name in (*LOOK_AT_SCORES, *IN_BACKGROUND):
        if options.get(name) is not None:
            return None
    names = None if output_fields is None else tuple(output_fields)
    result = repr(search_params) if search_params else ""
    return (options.get("anns_field"), limit, names, result, strength, profile, bool(with_raw_score))


def expect_question(
    data: Any,
    ids: Any,
    output_fields: Any,
    search_params: Any,
    options: Mapping[str, Any],
) -> None:
    """Raises ParamError where pymilvus does, and InvalidParameter for bounds that are no numbers."""
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
    """Raises UnsupportedOperation for answers that cannot be decoded: futures, and buckets whose hits bring
    vectors. fields: the corrected ones of the collection."""
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
    """Return the first of these arguments that is given."""
    return next((name for name in names if options.get(name) not in (None, False, "", [])), None)


def normalises_scores(ranker: Any) -> bool:
    """Whether a ranker squashes scores by the metric of the field."""
    functions = getattr(ranker, "functions", None) or [ranker]
    params = [getattr(each, "params", None) or {} for each in functions]
    return any(str(each.get("norm_score", "")).lower() == "true" for each in params)


def _are_dense(data: Any) -> bool:
    """Whether pymilvus takes it as queries, seen at a glance."""
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
    """Raises InvalidParameter for a strength that is no finite number; None is valid."""
    number = isinstance(strength, numbers.Real) and not isinstance(strength, bool)
    if strength is not None and not (number and math.isfinite(strength)):
        raise InvalidParameter(f"strength must be a finite number, not {strength!r}")


def expect_state_ttl(seconds: Any) -> None:
    """Raises InvalidParameter for a time that is no number of at least 0."""
    number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
    if not (number and seconds >= 0):
        raise InvalidParameter(f"state_ttl must be a number of seconds of at least 0, not {seconds!r}")


def expect_candidates(rerank: GloballyCorrected | Adaptive | None, candidates: int | None) -> None:
    """Raises InvalidParameter for a number of candidates that nothing looks at, or that is none."""
    if candidates is None:
        return
    if rerank is None or (isinstance(rerank, Adaptive) and rerank.direct):
        raise InvalidParameter("candidates are of a re-ranker that looks at them: give one as rerank")
    if isinstance(candidates, bool) or not isinstance(candidates, int) or candidates < 1:
        raise InvalidParameter(f"candidates must be a whole number of at least 1, not {candidates!r}")
