"""What strict mode of a collection forbids, in the server's texts, and its rates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from uuid import UUID

from qdrant_client import models

from tests.qdrant.strict.answers import Refused
from tests.qdrant.strict.collection import StrictCollection

ANY_TYPE = ("bool", "datetime", "float", "geo", "integer", "keyword", "text", "uuid")
SECONDS_PER_MINUTE = 60


class Limits:
    """Strict mode of one collection, for one request. Raises Refused."""

    def __init__(self, collection: StrictCollection) -> None:
        self._collection = collection
        config = collection.settings.strict_mode_config
        self._config = (
            config if config is not None and config.enabled else models.StrictModeConfig()
        )

    # -- reads -------------------------------------------------------------------------------

    def query(self, request: Any, *, rows_per_hit: int = 1) -> None:
        """Check a query or a prefetch, and those in it. rows_per_hit: for groups, their size."""
        prefetch = request.prefetch
        inner = prefetch if isinstance(prefetch, list) else [] if prefetch is None else [prefetch]
        for part in inner:
            self.query(part)
        if isinstance(request.query, models.FormulaQuery):
            self._formula(request.query.formula)
        elif request.query is not None and not inner:
            self._full_scan(request)
        default = 10
        self._limit(
            "limit", (request.limit or default) * rows_per_hit, self._config.max_query_limit
        )
        self.read_filter(request.filter)
        if request.params is not None:
            self._exact(request.params.exact)
            self._limit("hnsw_ef", request.params.hnsw_ef, self._config.search_max_hnsw_ef)

    def group_by(self, key: str) -> None:
        is_checked = self._config.unindexed_filtering_retrieve is False
        if is_checked and self._collection.index_type(key) is None:
            raise _forbidden(
                f'Index required but not found for "{key}"',
                "Create an index supporting `match` for this key.",
            )

    def batch(self, size: int) -> None:
        self._limit("search limit", size, self._config.search_max_batchsize)

    def scroll(self, limit: int | None, where: models.Filter | None) -> None:
        self._limit("limit", limit, self._config.max_query_limit)
        self.read_filter(where)

    def count(self, *, exact: bool, where: models.Filter | None) -> None:
        self.read_filter(where)
        self._exact(exact)

    def read_filter(self, where: models.Filter | None) -> None:
        self._filter(where, self._config.unindexed_filtering_retrieve)

    # -- writes ------------------------------------------------------------------------------

    def upsert(self, size: int) -> None:
        self._limit("upsert limit", size, self._config.upsert_max_batchsize)

    def update_vectors(self, size: int) -> None:
        self._limit("update limit", size, self._config.upsert_max_batchsize)

    def write_filter(self, where: models.Filter | None) -> None:
        self._filter(where, self._config.unindexed_filtering_update)

    # -- rates -------------------------------------------------------------------------------

    @property
    def reads_per_minute(self) -> int | None:
        return self._config.read_rate_limit

    @property
    def writes_per_minute(self) -> int | None:
        return self._config.write_rate_limit

    # -- helpers -----------------------------------------------------------------------------

    def _limit(self, name: str, value: int | None, limit: int | None) -> None:
        if limit is not None and value is not None and value > limit:
            raise _forbidden(
                f'Limit exceeded {value} > {limit} for "{name}"',
                f'Reduce the "{name}" parameter to or below {limit}.',
            )

    def _exact(self, exact: bool | None) -> None:
        if exact and self._config.search_allow_exact is False:
            raise _forbidden("Exact search disabled!", "Set exact=false.")

    def _full_scan(self, request: Any) -> None:
        if self._config.search_allow_exact is not False or isinstance(
            request.query, models.FusionQuery | models.OrderByQuery | models.SampleQuery
        ):
            return
        using = request.using or ""
        if using in self._collection.sparse_vectors:
            return
        own = self._collection.get_vector_params(using).hnsw_config
        shared = self._collection.settings.hnsw_config
        links = [
            config.m for config in (own, shared) if config is not None and config.m is not None
        ]
        if links and links[0] == 0:
            where = f" on '{using}'" if using else ""
            raise _forbidden(
                f"Request is forbidden{where} because global vector indexing is disabled (hnsw_config.m = 0)",
                "Use tenant-specific filter, enable global vector indexing or enable strict mode "
                "`search_allow_exact` option",
            )

    def _filter(self, where: models.Filter | None, unindexed: bool | None) -> None:
        if where is None:
            return
        conditions = list(conditions_of(where))
        if unindexed is False:
            for key, types in filter(None, map(_required_index, conditions)):
                self._indexed(key, types, "filter")
        most = self._config.filter_max_conditions
        if most is not None and len(conditions) > most:
            raise _forbidden(
                f"Filter condition limit reached ({len(conditions)} > {most})",
                "Reduce the amount of conditions of your filter.",
            )

    def _formula(self, formula: Any) -> None:
        if self._config.unindexed_filtering_retrieve is False:
            for name in _variables(formula):
                self._indexed(name, ("float", "integer"), "formula expression")

    def _indexed(self, key: str, types: tuple[str, ...], kind: str) -> None:
        if self._collection.index_type(key) not in types:
            raise _forbidden(
                f'Index required but not found for "{key}" of one of the following types: [{", ".join(sorted(types))}]',
                f"Create an index for this key or use a different {kind}.",
            )


class Bucket:
    """Tokens of one kind of request to a collection: `limit` of them come back in a minute."""

    def __init__(self, name: str, limit: int, now: float) -> None:
        self.limit = limit
        self._name = name
        self._tokens = float(limit)
        self._at = now

    def take(self, cost: int, now: float) -> None:
        """Take tokens. Raises Refused, with the time to wait if waiting helps."""
        if cost > self.limit:
            raise Refused(
                429,
                f"Rate limiting exceeded: {self._name} rate limit exceeded, request larger than "
                "rate limiter capacity, please try to split your request.",
            )
        per_second = self.limit / SECONDS_PER_MINUTE
        self._tokens = min(float(self.limit), self._tokens + (now - self._at) * per_second)
        self._at = now
        if cost > self._tokens:
            seconds = math.ceil((cost - self._tokens) / per_second)
            raise Refused(
                429,
                f"Rate limiting exceeded: {self._name} rate limit exceeded: Operation requires "
                f"{cost} tokens but only {self._tokens:.1f} were available. Retry after {seconds}s",
                retry_after=seconds,
            )
        self._tokens -= cost


def conditions_of(where: models.Filter | None) -> Iterator[Any]:
    """Yield the conditions of a filter that are no filters themselves."""
    if where is None:
        return
    groups = [where.must, where.should, where.must_not]
    groups.append(where.min_should.conditions if where.min_should else None)
    for group in groups:
        for condition in group if isinstance(group, list) else [group] if group else []:
            if isinstance(condition, models.Filter):
                yield from conditions_of(condition)
            else:
                yield condition


def _required_index(condition: Any) -> tuple[str, tuple[str, ...]] | None:
    """Return the key of a condition, and the types of index that serve it; None without a key."""
    if isinstance(condition, models.IsEmptyCondition):
        return condition.is_empty.key, ANY_TYPE
    if isinstance(condition, models.IsNullCondition):
        return condition.is_null.key, ANY_TYPE
    if not isinstance(condition, models.FieldCondition):
        return None
    return condition.key, _types_of(condition)


def _types_of(condition: models.FieldCondition) -> tuple[str, ...]:
    match = condition.match
    if isinstance(match, models.MatchText | models.MatchPhrase | models.MatchTextAny):
        return ("text",)
    if match is not None:
        values = match.model_dump()
        value = next(iter(values.values()))
        sample = value[0] if isinstance(value, list) and value else value
        return _types_of_value(sample)
    if isinstance(condition.range, models.DatetimeRange):
        return ("datetime",)
    if condition.range is not None:
        return ("float", "integer")
    if condition.geo_radius or condition.geo_bounding_box or condition.geo_polygon:
        return ("geo",)
    return ANY_TYPE


def _types_of_value(value: Any) -> tuple[str, ...]:
    if isinstance(value, bool):
        return ("bool",)
    if isinstance(value, int):
        return ("integer",)
    try:
        UUID(str(value))
    except ValueError:
        return ("keyword",)
    return ("keyword", "uuid")


def _variables(formula: Any) -> Iterator[str]:
    """Yield the keys of payloads that a formula reads."""
    if isinstance(formula, str):
        if not formula.startswith("$score"):
            yield formula
    elif isinstance(formula, list):
        for part in formula:
            yield from _variables(part)
    elif hasattr(formula, "model_dump"):
        for part in formula.__dict__.values():
            yield from _variables(part)


def _forbidden(problem: str, remedy: str) -> Refused:
    return Refused(400, f"Bad request: {problem}. Help: {remedy}")
