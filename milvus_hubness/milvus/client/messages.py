"""Requests of users and their checks. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pymilvus import AnnSearchRequest
from pymilvus.client.check import check_id_and_data, check_pass_param
from pymilvus.exceptions import ParamError

from milvus_hubness.clients.steps import Ask
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.overrides import NONE, Overrides
from milvus_hubness.correction.rerank import Adaptive, GloballyCorrected
from milvus_hubness.errors import InvalidParameter, UnsupportedOperation
from milvus_hubness.milvus.pymilvus_private import IN_BACKGROUND

if TYPE_CHECKING:
    from milvus_hubness.milvus.client.side_memory import SideBiases

USE_SCORES = ("ranker", "function_chains", "search_aggregation")
"""Arguments that make the server compute with scores."""
ORDERED = (*USE_SCORES, "order_by_fields")
"""Arguments that need the final order of the hits on the server."""
GROUPED = ("group_by_field", "group_by_fields")
"""Arguments that make the server return the best hits of each group."""
ITERATED = ("iterator", "search_iter_v2")
"""Arguments that make the server answer page by page."""
CHECKED_EACH_TIME = (*USE_SCORES, *IN_BACKGROUND, "namespace", "is_embedding_list")
"""Arguments for which a search may be refused, so that none is prepared with them."""
RANGE_BOUNDS = ("radius", "range_filter")
"""Search parameters that bound the scores of hits."""
ENDS_OF_RANGE = {"COSINE": {"range_filter": 1.0, "radius": -1.0}, "L2": {"range_filter": 0.0}}
"""The ends of the range of scores, by metric and bound: without a correction, no score is beyond
them."""
SEARCHED_AT_LEAST = ("ef", "search_list", "reorder_k", "itopk_size")
"""Search parameters of indexes that must be at least the number of hits, or the server refuses:
those of HNSW, DISKANN, SCANN and CAGRA."""
QUICK_FORM = (
    "dimension",
    "primary_field_name",
    "id_type",
    "vector_field_name",
    "metric_type",
    "auto_id",
)
"""Arguments of MilvusClient.create_collection that define a collection without a schema."""

Bias = Literal["compute", "pending"]
"""Whether a new row gets its own bias at once, or the mean bias until the next refresh."""

OF_SEARCHES = ("strength", "kinds", "profile", "rerank", "candidates", "with_raw_score")
"""Arguments that clients of this package add to searches."""
OF_CLIENTS = ("strength", "kinds", "state_ttl", "bank_budget", "sample_queries")
"""Arguments that clients of this package add to the constructor."""


def expect_question(
    data: Any, ids: Any, output_fields: Any, search_params: Any, options: Mapping[str, Any]
) -> None:
    """Raises ParamError as pymilvus does, and InvalidParameter for bounds that are not numbers."""
    if isinstance(ids, np.ndarray):
        raise ParamError(message="ids must be a list of keys, got an array")
    check_id_and_data([ids] if isinstance(ids, int | str) else ids, data)
    check_pass_param(output_fields=output_fields, round_decimal=options.get("round_decimal", -1))

    params = search_params or {}
    inner = params.get("params", {}) if isinstance(params, Mapping) else params
    if not isinstance(inner, Mapping):
        raise ParamError(message=f"Search params must be a dict, got {type(inner)}")

    offset_in(options, params)

    # pymilvus takes bounds in either of the two.
    for mapping in (params, inner):
        for name in RANGE_BOUNDS:
            bound_in(mapping, name)


def offset_in(options: Mapping[str, Any], params: Mapping[str, Any]) -> int:
    """Return the offset that the arguments or the parameters of a search name, 0 for none.

    Raises ParamError as pymilvus does.
    """
    if "offset" in options and "offset" in params:
        raise ParamError(message="Provide offset both in kwargs and param, expect just one")

    offset = options.get("offset") or params.get("offset")
    if offset is not None and not isinstance(offset, int):
        raise ParamError(message=f"wrong type for offset, expect int, got {type(offset)}")
    return offset or 0


def expect_limit(limit: Any) -> None:
    """Raise ParamError, as pymilvus does, unless `limit` is a whole number of at least 1."""
    check_pass_param(limit=limit)


def page_of(limit: int, offset: int) -> slice:
    """Return the ranks of the hits to return, where the client or the proxy ranks them.

    No server sees these numbers, and a slice counts negative ones from the end. Raises
    InvalidParameter for a page that begins before the first hit or has none.
    """
    if limit < 1 or offset < 0:
        raise InvalidParameter(
            f"a page of {limit} hits from offset {offset} on is none: limit must be at least 1, and "
            "offset at least 0"
        )
    return slice(offset, offset + limit)


def bound_in(params: Mapping[str, Any], name: str) -> float | None:
    """Return a bound of a range search; None if it is not set. Raises InvalidParameter."""
    bound = params.get(name)
    try:
        return None if bound is None else float(bound)
    except (TypeError, ValueError, OverflowError):
        raise InvalidParameter(f"{name} must be a number, got {bound!r}") from None


def checked_decimals(round_decimal: Any) -> int:
    """Return the number of decimals to which scores are rounded, −1 for none.

    Raises ParamError, as pymilvus does, for one that Milvus refuses.
    """
    check_pass_param(round_decimal=round_decimal)
    return int(round_decimal)


def expect_whole_hits(
    output_fields: Any, fields: Collection[str], options: Mapping[str, Any]
) -> None:
    """Raises UnsupportedOperation for answers that the client cannot decode.

    fields: the corrected fields.
    """
    if fields and (name := first_set(options, IN_BACKGROUND)):
        raise UnsupportedOperation(f"{name} on a corrected collection: use AsyncHubnessClient")
    if fields and first_set(options, ("namespace",)):
        raise UnsupportedOperation(
            "namespace on a corrected collection, which has none: leave it out"
        )

    named = output_fields if isinstance(output_fields, list) else []
    vectors = [name for name in named if name in fields or (fields and name == "*")]
    if vectors and first_set(options, ("search_aggregation",)):
        raise UnsupportedOperation(
            f"search_aggregation with output field {vectors[0]!r}: buckets would hold stored "
            "vectors with their biases: name other fields, and get the vectors by key"
        )


def first_set(options: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Return the first of these arguments that is set."""
    unset: list[Any] = [None, False, "", []]
    return next((name for name in names if options.get(name) not in unset), None)


def normalises_scores(ranker: Any) -> bool:
    """Whether a ranker normalises scores by the metric of the field."""
    functions = getattr(ranker, "functions", None) or [ranker]
    for function in functions:
        params = getattr(function, "params", None) or {}
        if str(params.get("norm_score", "")).lower() == "true":
            return True
    return False


def expect_reranker(rerank: GloballyCorrected | Adaptive | None, candidates: int | None) -> None:
    """Raises InvalidParameter if `rerank` is no re-ranker, and if `candidates` is no positive integer,
    or if nothing uses it.
    """
    if not isinstance(rerank, GloballyCorrected | Adaptive | None) or isinstance(rerank, type):
        raise InvalidParameter(
            f"rerank takes GloballyCorrected(...) or a QuariReranker, not {rerank!r}"
        )
    if candidates is None:
        return
    if rerank is None or (isinstance(rerank, Adaptive) and rerank.direct):
        raise InvalidParameter("candidates needs a re-ranker: pass one as rerank")
    if isinstance(candidates, bool) or not isinstance(candidates, int) or candidates < 1:
        raise InvalidParameter(
            f"candidates must be a whole number of at least 1, not {candidates!r}"
        )


@dataclass(slots=True)
class Question:
    """A search as the user requested it."""

    data: npt.ArrayLike
    """The queries."""
    limit: int
    offset: int = 0
    search_params: Mapping[str, Any] | None = None
    output_fields: list[str] | None = None
    round_decimal: int = -1
    overrides: Overrides = NONE
    """How the search is corrected, where it says so."""
    rerank: GloballyCorrected | Adaptive | None = None
    """A GloballyCorrected ranks raw candidates against `bank`, an Adaptive corrected candidates."""
    candidates: int | None = None
    """How many candidates the re-ranker gets; None uses its own number."""
    bank: Floats | None = None
    """The queries of the bank, (m, d)."""
    activated: AbstractSet[Any] = frozenset()
    """Keys that open the gate, if the search is gated."""
    with_raw_score: bool = False
    """Hits have their uncorrected scores, too."""
    filter: str = ""
    ids: Any = None
    """Keys of rows to search with, in place of `data`."""

    def pool(self, how: GloballyCorrected | Adaptive) -> int:
        """Return how many candidates a re-ranker needs: at least up to the end of the page."""
        return max(self.candidates or how.candidates, int(self.page.stop))

    @property
    def page(self) -> slice:
        """The ranks of the hits to return. Raises InvalidParameter, see `page_of`."""
        return page_of(self.limit, self.offset)


@dataclass(frozen=True, slots=True)
class HybridQuestion:
    """A hybrid search as the user requested it."""

    requests: Sequence[AnnSearchRequest]
    ranker: Any
    """That of pymilvus, which merges the answers."""
    limit: int
    output_fields: list[str] | None = None
    overrides: Overrides = NONE
    """As in `Question`, of all requests on corrected fields."""


class AnsweredSearch(NamedTuple):
    """What was searched, once it is answered."""

    field: str | None
    """None for the only one that the collection has."""
    queries: Any
    """As the caller gave them."""


@dataclass(slots=True)
class SearchRequest:
    """A request for the server, and the conversion of its results for the user."""

    data: Any
    """The encoded queries."""
    limit: int
    offset: int
    search_params: dict[str, Any]
    output_fields: list[str] | None
    answer: Callable[..., Any]
    """Converts the results for the user, in place."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the search."""
    biases_of: SideBiases | None = None
    """The biases of a side collection, if `answer` also takes them, by key, after the results."""
    works: bool = False
    """Whether `answer` may take long, and so must not run in an event loop."""


@dataclass(frozen=True)
class Write:
    """An insert or an upsert, as the caller requested it."""

    method: str
    """`insert` or `upsert`."""
    collection: str
    data: Any
    """Rows, or a single row."""
    timeout: float | None = None
    partition_name: str | None = ""
    bias: Bias = "compute"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the method."""

    @property
    def rows(self) -> Any:
        """The rows, as a list if the data are valid."""
        return [self.data] if isinstance(self.data, dict) else self.data

    @property
    def adds(self) -> bool:
        """Whether it may add to existing values, so that it must not run twice."""
        return bool(self.options.get("field_ops"))

    @property
    def in_part(self) -> bool:
        """Whether it changes only some fields of existing rows."""
        return self.adds or bool(self.options.get("partial_update"))

    def as_upsert(self, key_field: str) -> Write:
        """Return the same rows as an upsert, which accepts a key once: the last row of a key stays."""
        rows = self.rows
        if isinstance(rows, list) and all(key_field in row for row in rows):
            rows = list({row[key_field]: row for row in rows}.values())
        return replace(self, method="upsert", data=rows)


@dataclass(frozen=True)
class Deletion:
    """A deletion, as the caller requested it."""

    collection: str
    ids: Any = None
    timeout: float | None = None
    filter: str | None = None
    partition_name: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of MilvusClient.delete."""

    @property
    def by_filter(self) -> bool:
        """Whether a filter alone names the rows."""
        return bool(self.filter) and not (self.ids or self.options.get("pks"))

    def ask(self) -> Ask:
        """Return the request of this deletion."""
        args = (self.collection, self.ids, self.timeout, self.filter, self.partition_name)
        return Ask("delete", args, dict(self.options))
