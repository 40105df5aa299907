"""Queries of corrected collections, turned into queries that Qdrant answers with corrected scores. No I/O.

In the augmented form < r , b > a vector q is asked as < q , −w >, whatever kind of query it is part of. Points that a
query names by id are asked by the vector that the user gave them: their stored one would ask for its own bias. Where
biases lie in payloads, candidates are fetched and a formula takes w times the bias off."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from qdrant_client import models

from milvus_hubness.codec.arrays import Floats, decode
from milvus_hubness.errors import InvalidInput, UnsupportedOperation
from milvus_hubness.state import CollectionState, Profile
from qdrant_hubness.client.cached_state import CachedState
from qdrant_hubness.store.rows import UNNAMED

Named = tuple[str | None, str, Any]
"""A point that a query names: the collection to look it up in, None for the one that is asked; the vector; the id."""
Vectors = Mapping[Named, Floats]
"""Of such points, as the user knows them."""

DEFAULT_LIMIT = 10
_AVERAGES = (None, models.RecommendStrategy.AVERAGE_VECTOR)


def is_id(value: Any) -> bool:
    """Whether a query's input names a point."""
    return isinstance(value, int | str | uuid.UUID)


def _id(value: Any) -> Any:
    return str(value) if isinstance(value, uuid.UUID) else value


def _inputs(query: Any) -> list[Any]:
    """All that a query holds of vectors and of points that stand for theirs."""
    if query is None:
        return []
    if isinstance(query, models.NearestQuery):
        return [query.nearest]
    if isinstance(query, models.RecommendQuery):
        return [*(query.recommend.positive or []), *(query.recommend.negative or [])]
    if isinstance(query, models.DiscoverQuery):
        return [query.discover.target, *_pairs(query.discover.context)]
    if isinstance(query, models.ContextQuery):
        return _pairs(query.context)
    if isinstance(query, models.RelevanceFeedbackQuery):
        feedback = query.relevance_feedback
        return [feedback.target, *(each.example for each in feedback.feedback)]
    return [] if _needs_no_vector(query) else [query]


def _pairs(context: Any) -> list[Any]:
    pairs = context if isinstance(context, list) else [context]
    return [each for pair in pairs if pair is not None for each in (pair.positive, pair.negative)]


def _needs_no_vector(query: Any) -> bool:
    return isinstance(
        query, models.OrderByQuery | models.FusionQuery | models.RrfQuery | models.FormulaQuery | models.SampleQuery
    )


def points_named(request: Any, cached: CachedState) -> set[Named]:
    """The points of which a request, or a prefetch, needs the vectors as the user knows them."""
    points: set[Named] = set()
    look, using = request.lookup_from, request.using or UNNAMED
    if using in cached.in_vectors or look is not None:
        field = (look.vector if look and look.vector is not None else using) or UNNAMED
        points = {
            (look.collection if look else None, field, _id(part)) for part in _inputs(request.query) if is_id(part)
        }
    return points.union(*(points_named(part, cached) for part in prefetches(request)))


def prefetches(request: Any) -> list[Any]:
    """Those of a request or of a prefetch."""
    inner = request.prefetch
    return [] if inner is None else list(inner) if isinstance(inner, Sequence) else [inner]


@dataclass(frozen=True)
class Answered:
    """How the answer of a rewritten request is read. state, query, strength: of a distance that is to be told
    from the products; None where scores stand as they are. mmr: what is still to be picked by it."""

    state: CollectionState | None = None
    query: Floats | None = None
    strength: float = 1.0
    mmr: Mmr | None = None

    def scored(self, point: Any) -> Any:
        """The point with its score in the user's metric."""
        if self.state is None or self.query is None:
            return point
        squared = self.state.codec.decode_scores([[point.score]], self.query[None], self.strength)[0, 0]
        return point.model_copy(update={"score": _rooted(float(squared))})


@dataclass(frozen=True)
class Mmr:
    """Maximal marginal relevance among candidates, by their corrected scores and the vectors as the user
    knows them. field: whose."""

    field: str
    diversity: float
    limit: int
    offset: int


def _rooted(squared: float) -> float:
    """The distance of a squared one; corrected, that may be below 0, as the distance then is."""
    return float(np.copysign(np.sqrt(abs(squared)), squared))


@dataclass(frozen=True)
class Rewriting:
    """strength: w, None for each profile's own. profile: which set of biases, None for the active one.
    vectors: of the points that `points_named` told of."""

    cached_state: CachedState
    vectors: Vectors
    strength: float | None = None
    profile: str | None = None

    def request(self, request: models.QueryRequest, *, most: int) -> tuple[models.QueryRequest, Answered]:
        """A request as it is to be sent, and how its answer is read. most: points that it may be answered
        with, its offset counted. Raises UnsupportedOperation for what a corrected vector cannot be asked."""
        state = self.cached_state.state_of(request.using)
        asked, answered = self._rewritten(request, state, most, is_top=True)
        return asked, answered

    def _rewritten(
        self, request: Any, state: CollectionState | None, most: int, *, is_top: bool
    ) -> tuple[Any, Answered]:
        inner = prefetches(request)
        changed: dict[str, Any] = {}
        if inner:
            self._require_mergeable(request.query, inner)
            changed["prefetch"] = [
                self._rewritten(
                    each, self.cached_state.state_of(each.using), each.limit or DEFAULT_LIMIT, is_top=False
                )[0]
                for each in inner
            ]
        query = request.query
        if query is None or _needs_no_vector(query):
            return request.model_copy(update=changed), Answered()
        if request.lookup_from is not None or (state is not None and not state.codec.leaves_vectors):
            query, excluded = self._looked_up(request)
            changed["query"], changed["lookup_from"] = query, None
            if excluded:
                changed["filter"] = _without(request.filter, excluded)
        if state is None:
            return request.model_copy(update=changed), Answered()
        weight = self._weight(state)
        if state.codec.needs_candidates:
            return self._by_formula(request.model_copy(update=changed), state, weight, most), Answered()
        return self._in_vectors(request, changed, query, state, weight, is_top=is_top)

    def _in_vectors(
        self, request: Any, changed: dict[str, Any], query: Any, state: CollectionState, weight: float, *, is_top: bool
    ) -> tuple[Any, Answered]:
        wrap = self._wrapped(state, weight)
        if not isinstance(query, models.NearestQuery):
            if state.metric == "L2":
                raise UnsupportedOperation(
                    f"{type(query).__name__} compares similarities of several vectors, which are none under "
                    "Euclid in augmented form: ask for the nearest, or recommend by the average vector"
                )
            changed["query"] = _mapped(query, wrap)
            return request.model_copy(update=changed), Answered()
        vector = as_vector(query.nearest)
        changed["query"] = models.NearestQuery(nearest=wrap(vector))
        answered = Answered()
        if state.metric == "L2":
            answered = Answered(state, state.layout.rows(vector[None])[0], weight)
            if request.score_threshold is not None:
                squared = request.score_threshold * abs(request.score_threshold)
                changed["score_threshold"] = float(state.layout.products(squared, vector))
        if query.mmr is not None:
            if not is_top or state.metric == "L2" or request.prefetch:
                raise UnsupportedOperation(
                    "mmr of a corrected vector: neither in a prefetch, nor over one, nor under Euclid"
                )
            limit, offset = request.limit or DEFAULT_LIMIT, request.offset or 0
            diversity = 0.5 if query.mmr.diversity is None else query.mmr.diversity
            answered = Answered(mmr=Mmr(request.using or UNNAMED, diversity, limit, offset))
            changed |= {"limit": query.mmr.candidates_limit or limit + offset, "offset": None}
        return request.model_copy(update=changed), answered

    def _require_mergeable(self, query: Any, inner: Sequence[Any]) -> None:
        """Raises UnsupportedOperation where scores of prefetches would be merged that are not the user's."""
        merges = (isinstance(query, models.FusionQuery) and query.fusion == models.Fusion.DBSF) or isinstance(
            query, models.FormulaQuery
        )
        for each in inner:
            state = self.cached_state.state_of(each.using)
            if merges and state is not None and state.metric == "L2" and not _needs_no_vector(each.query):
                raise UnsupportedOperation(
                    "the scores of a corrected Euclid vector are products until the answer is read: merge "
                    "them by reciprocal ranks"
                )

    def _looked_up(self, request: Any) -> tuple[Any, list[Any]]:
        """The query with vectors in place of the points it names, and those of them that it leaves out."""
        look, using = request.lookup_from, request.using or UNNAMED
        field = (look.vector if look and look.vector is not None else using) or UNNAMED
        collection = look.collection if look else None
        excluded: list[Any] = []

        def resolved(value: Any) -> Any:
            if not is_id(value):
                return value
            if collection is None:
                excluded.append(_id(value))
            return self.vectors[collection, field, _id(value)]

        query = _mapped(request.query, resolved)
        if isinstance(query, models.RecommendQuery) and query.recommend.strategy in _AVERAGES:
            query = models.NearestQuery.model_construct(nearest=_average(query.recommend).tolist(), mmr=None)
        return query, excluded

    def _weight(self, state: CollectionState) -> float:
        return self._profile(state).strength if self.strength is None else float(self.strength)

    def _profile(self, state: CollectionState) -> Profile:
        return state.profile_of(self.profile)

    def _wrapped(self, state: CollectionState, weight: float) -> Callable[[Any], list[float]]:
        slot = self._profile(state).slot

        def wrap(value: Any) -> list[float]:
            encoded = state.codec.pack_queries(as_vector(value)[None], weight, slot=slot)
            query_vector: list[float] = decode(encoded, state.dtype)[0].tolist()
            return query_vector

        return wrap

    def _by_formula(self, request: Any, state: CollectionState, weight: float, most: int) -> Any:
        """The candidates of a request, and a formula that takes their biases off."""
        if weight == 0:
            return request
        query = request.query
        is_average = isinstance(query, models.RecommendQuery) and query.recommend.strategy in _AVERAGES
        is_nearest = not isinstance(query, get_args(models.Query)) or (
            isinstance(query, models.NearestQuery) and query.mmr is None
        )
        if not (is_average or is_nearest):
            raise UnsupportedOperation(
                f"a {type(query).__name__} with biases in payloads is not supported: search for the nearest, "
                "recommend by the average vector, or pass strength=0"
            )
        candidates = models.Prefetch(
            prefetch=request.prefetch,
            query=query,
            using=request.using,
            filter=request.filter,
            params=request.params,
            limit=max(most, state.codec.candidates),
            lookup_from=request.lookup_from,
        )
        field = state.codec.slot_field(self._profile(state).slot) or ""
        formula = models.SumExpression(sum=["$score", models.MultExpression(mult=[-weight, field])])
        changed = {
            "prefetch": candidates,
            "query": models.FormulaQuery(formula=formula, defaults={field: 0.0}),
            "using": None,
            "lookup_from": None,
        }
        return request.model_copy(update=changed)


def _mapped(query: Any, change: Callable[[Any], Any]) -> Any:
    """A query with each of its inputs changed."""
    if isinstance(query, models.NearestQuery):
        return models.NearestQuery.model_construct(nearest=change(query.nearest), mmr=query.mmr)
    if isinstance(query, models.RecommendQuery):
        given = query.recommend
        recommend = given.model_copy(
            update={
                "positive": [change(each) for each in given.positive or []],
                "negative": [change(each) for each in given.negative or []],
            }
        )
        return query.model_copy(update={"recommend": recommend})
    if isinstance(query, models.DiscoverQuery):
        discover = query.discover
        changed = {"target": change(discover.target), "context": _mapped_pairs(discover.context, change)}
        return query.model_copy(update={"discover": discover.model_copy(update=changed)})
    if isinstance(query, models.ContextQuery):
        return query.model_copy(update={"context": _mapped_pairs(query.context, change)})
    if isinstance(query, models.RelevanceFeedbackQuery):
        feedback = query.relevance_feedback
        result = [each.model_copy(update={"example": change(each.example)}) for each in feedback.feedback]
        changed = {"target": change(feedback.target), "feedback": result}
        return query.model_copy(update={"relevance_feedback": feedback.model_copy(update=changed)})
    return models.NearestQuery.model_construct(nearest=change(query), mmr=None)


def _mapped_pairs(context: Any, change: Callable[[Any], Any]) -> Any:
    pairs = context if isinstance(context, list) else [] if context is None else [context]
    return [
        each.model_copy(update={"positive": change(each.positive), "negative": change(each.negative)}) for each in pairs
    ]


def _average(recommend: Any) -> Floats:
    """(d,) what Qdrant asks for where it recommends by the average vector."""
    if not recommend.positive:
        raise InvalidInput("a recommendation by the average vector needs a positive example")
    mean: Floats = np.mean([as_vector(each) for each in recommend.positive], axis=0, dtype=np.float32)
    if recommend.negative:
        mean = 2 * mean - np.mean([as_vector(each) for each in recommend.negative], axis=0, dtype=np.float32)
    return mean


def as_vector(value: Any) -> Floats:
    try:
        found = np.asarray(value, np.float32)
    except (TypeError, ValueError):
        found = np.empty((0, 0), np.float32)
    if found.ndim != 1:
        raise UnsupportedOperation(
            f"a corrected vector is searched with a list of numbers or a point's id, not with {type(value).__name__}"
        )
    return found


def _without(where: Any, ids: Sequence[Any]) -> models.Filter:
    """The filter, and none of these points."""
    left_out = models.HasIdCondition(has_id=list(dict.fromkeys(ids)))
    if where is None:
        return models.Filter(must_not=[left_out])
    there = where.must_not
    others = [] if there is None else list(there) if isinstance(there, list) else [there]
    changed: models.Filter = where.model_copy(update={"must_not": [*others, left_out]})
    return changed


def picked_by_mmr(mmr: Mmr, points: Sequence[Any], vectors: Floats) -> list[Any]:
    """Which of the candidates, best first, are answered with. vectors (n, d): as the user knows them, unit
    under Cosine."""
    relevance = np.array([point.score for point in points])
    similarity = vectors @ vectors.T
    left, chosen = list(range(len(points))), [0] if points else []
    left = left[1:]
    while left and len(chosen) < mmr.limit + mmr.offset:
        crowded = similarity[np.ix_(left, chosen)].max(axis=1)
        worth = (1 - mmr.diversity) * relevance[left] - mmr.diversity * crowded
        chosen.append(left.pop(int(np.argmax(worth))))
    return [points[i] for i in chosen[mmr.offset :]]
