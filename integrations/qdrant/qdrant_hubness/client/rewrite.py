"""Queries of corrected collections, rewritten so that Qdrant answers with corrected scores. No I/O.

Every vector q in a query becomes the augmented query <q, −w>. A point that a query names by id is
replaced by its user's vector, because the bias in its augmented vector would enter the scores.
Biases in payloads are subtracted by a formula over candidates.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, get_args

import numpy as np
from qdrant_client import models

from milvus_hubness import InvalidInput, MultiVectors, UnsupportedOperation
from milvus_hubness.extending import (
    NUMBER_KEYS,
    SLOT_KEYS,
    CollectionState,
    Floats,
    Overrides,
    Profile,
    packed_vectors,
)
from qdrant_hubness.client.cached_state import CachedState
from qdrant_hubness.store import schema
from qdrant_hubness.store.rows import UNNAMED, Uncopied, queries_of

Named = tuple[str | None, str, Any]
"""A point that a query names: its collection, None
for the searched one; the name of the vector; the id.
"""

Vectors = Mapping[Named, Floats]
"""The user's vectors (d,) of such points."""

DEFAULT_LIMIT = 10
"""Points of an answer to a request that names no limit, as on the server."""

_AVERAGES = (None, models.RecommendStrategy.AVERAGE_VECTOR)
"""The strategies that search for one vector, which the client can compute itself."""


def limit_of(request: Any) -> int:
    """Return the number of points that a request, or a prefetch, asks for."""
    # Qdrant refuses 0, which names a number.
    limit: int = DEFAULT_LIMIT if request.limit is None else request.limit
    return limit


def is_id(value: Any) -> bool:
    """Whether an input of a query is the id of a point."""
    return isinstance(value, int | str | uuid.UUID)


def _id(value: Any) -> Any:
    return str(value) if isinstance(value, uuid.UUID) else value


def as_returned(id: Any) -> Any:
    """Return an id as a server returns it, which reads UUIDs without hyphens and in capitals, too."""
    if not isinstance(id, str):
        return id
    try:
        return str(uuid.UUID(id))
    except ValueError:
        return id


def _inputs(query: Any) -> list[Any]:
    """Return the vectors and the ids of points in a query."""
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
        return [feedback.target, *(item.example for item in feedback.feedback)]

    return [] if _needs_no_vector(query) else [query]


def _pairs(context: Any) -> list[Any]:
    pairs = context if isinstance(context, list) else [context]
    return [item for pair in pairs if pair is not None for item in (pair.positive, pair.negative)]


def _needs_no_vector(query: Any) -> bool:
    return isinstance(
        query,
        models.OrderByQuery
        | models.FusionQuery
        | models.RrfQuery
        | models.FormulaQuery
        | models.SampleQuery,
    )


def points_named(request: Any, cached: CachedState, searched: str) -> set[Named]:
    """Return the points whose user's vectors a request, or a prefetch, needs.

    searched: the name of the collection as the user gave it.
    """
    points: set[Named] = set()
    if (request.using or UNNAMED) in cached.in_vectors or request.lookup_from is not None:
        collection, field = _source_of(request, (searched, cached.name))
        points = {
            (collection, field, _id(value)) for value in _inputs(request.query) if is_id(value)
        }
    inner = (points_named(prefetch, cached, searched) for prefetch in prefetches(request))
    return points.union(*inner)


def _source_of(request: Any, searched: Collection[str]) -> tuple[str | None, str]:
    """Return the collection and the vector that ids in a request's query refer to.

    searched: the names of the searched collection, which a request may name as any other one.
    """
    lookup = request.lookup_from
    using = request.using or UNNAMED
    if lookup is None:
        return None, using

    field = using if lookup.vector is None else lookup.vector
    return None if lookup.collection in searched else lookup.collection, field or UNNAMED


def prefetches(request: Any) -> list[Any]:
    """Return the prefetches of a request or of a prefetch."""
    inner = request.prefetch
    if inner is None:
        return []
    return list(inner) if isinstance(inner, Sequence) else [inner]


@dataclass(frozen=True)
class Decoding:
    """How to decode the answer of a rewritten request."""

    state: CollectionState | None = None
    """The state by which scores become distances; None if the scores are final."""

    query: Floats | None = None
    """The user's query (d,) of such scores."""

    strength: float = 1.0
    """w of that query."""

    mmr: Mmr | None = None
    """The selection among the answer's points that is still to be made."""

    def scored(self, point: Any) -> Any:
        """Return the point with its score in the user's metric."""
        if self.state is None or self.query is None:
            return point

        squared = self.state.codec.decode_scores([[point.score]], self.query[None], self.strength)
        score = _rooted(float(squared[0, 0]))
        return point.model_copy(update={"score": score})


@dataclass(frozen=True)
class Mmr:
    """Maximal marginal relevance of candidates, by corrected scores and the user's vectors."""

    field: str
    """The name of the vector."""

    diversity: float
    """Share of the similarity to chosen points, against that of the corrected score; 0 to 1."""

    limit: int
    """Number of points of the answer."""

    offset: int
    """Number of chosen points before them."""


def _rooted(squared: float) -> float:
    """Return the root of a squared distance, with its sign: a corrected one may be negative."""
    return float(np.copysign(np.sqrt(abs(squared)), squared))


@dataclass(frozen=True)
class Rewriter:
    """Rewrites requests."""

    cached_state: CachedState
    """The state of the searched collection."""

    searched: str
    """The name of that collection as the user gave it, possibly an alias."""

    vectors: Vectors
    """The user's vectors of all points that the request names, see `points_named`."""

    overrides: Overrides
    """How the queries are corrected, where they say so."""

    encoded: Mapping[int, Uncopied] = field(default_factory=dict)
    """Augmented queries that were made together, see `encoded_together`."""

    def encoded_together(self, requests: Sequence[models.QueryRequest]) -> dict[int, Uncopied]:
        """Return the augmented queries of the plain
        vectors in these requests, by `id` of the vector.

        One matrix costs less than its rows one by one. Vectors that are left out here, or refused,
        are so when their request is rewritten.
        """
        by_field: dict[str | None, list[Any]] = {}
        for request in requests:
            query = request.query
            value = query.nearest if isinstance(query, models.NearestQuery) else query
            if type(value) is list:
                by_field.setdefault(request.using, []).append(value)

        encoded: dict[int, Uncopied] = {}
        for using, values in by_field.items():
            state = self.cached_state.state_of(using)
            if state is None or state.codec.leaves_vectors:
                continue

            rows = packed_vectors(values, state.dim)
            if rows is not None and np.isfinite(rows).all():
                queries = self._encode(state, rows)
                encoded |= {
                    id(value): Uncopied(query) for value, query in zip(values, queries, strict=True)
                }

        return encoded

    def request(
        self, request: models.QueryRequest, *, most: int
    ) -> tuple[models.QueryRequest, Decoding]:
        """Return the request to send, and how to decode its answer.

        most: the points of the answer and of the offset.

        Raises UnsupportedOperation for queries that a corrected vector cannot answer.
        """
        rewritten: tuple[models.QueryRequest, Decoding] = self._rewritten(
            request, self.cached_state.state_of(request.using), most, is_top=True
        )
        return rewritten

    def _rewritten(
        self, request: Any, state: CollectionState | None, most: int, *, is_top: bool
    ) -> tuple[Any, Decoding]:
        changed: dict[str, Any] = {}
        inner = prefetches(request)
        if inner:
            self._require_mergeable(request.query, inner)
            changed["prefetch"] = [self._rewritten_prefetch(prefetch) for prefetch in inner]

        query = request.query
        if query is None or _needs_no_vector(query):
            return request.model_copy(update=changed), Decoding()

        # Where the stored vectors are augmented, or of another collection, an id does not do.
        is_augmented = state is not None and not state.codec.leaves_vectors
        if is_augmented or request.lookup_from is not None:
            query, excluded = self._with_vectors(request)
            changed["query"] = query
            changed["lookup_from"] = None
            if excluded:
                changed["filter"] = _without(request.filter, excluded)

        if state is None:
            return request.model_copy(update=changed), Decoding()

        if state.codec.needs_candidates:
            plain = request.model_copy(update=changed)
            return self._by_formula(plain, state, most), Decoding()

        return self._in_vectors(request, changed, query, state, is_top=is_top)

    def _rewritten_prefetch(self, prefetch: Any) -> Any:
        state = self.cached_state.state_of(prefetch.using)
        limit = limit_of(prefetch)
        rewritten, _ = self._rewritten(prefetch, state, limit, is_top=False)
        return rewritten

    def _in_vectors(
        self,
        request: Any,
        changed: dict[str, Any],
        query: Any,
        state: CollectionState,
        *,
        is_top: bool,
    ) -> tuple[Any, Decoding]:
        encode = self._encoder(state)
        if not isinstance(query, models.NearestQuery):
            if state.metric == "L2":
                raise UnsupportedOperation(
                    f"a corrected Euclid vector does not support {type(query).__name__}, which "
                    "compares the scores of several vectors: search for the nearest, or recommend "
                    "by the average vector"
                )

            changed["query"] = _mapped(query, encode)
            return request.model_copy(update=changed), Decoding()

        changed["query"] = models.NearestQuery.model_construct(nearest=encode(query.nearest))
        decoding = Decoding()
        if state.metric == "L2":
            # The copy is searched by inner product, so thresholds become products, and the scores
            # of the answer become distances again.
            vector = as_vector(query.nearest)
            strength = self._strength(state)
            decoding = Decoding(state, state.layout.rows(vector[None])[0], strength)
            if request.score_threshold is not None:
                squared = request.score_threshold * abs(request.score_threshold)
                changed["score_threshold"] = float(state.layout.products(squared, vector))

        if query.mmr is not None:
            is_possible = is_top and state.metric != "L2" and not state.layout.multi_vectors
            if not is_possible or request.prefetch:
                raise UnsupportedOperation(
                    "a corrected vector does not support mmr in a prefetch, over one, with Euclid, or "
                    "for multivectors: leave it out"
                )

            # Qdrant would compare augmented vectors: it returns the candidates, and the client
            # selects among them.
            limit = limit_of(request)
            offset = request.offset or 0
            if limit < 1 or offset < 0:
                raise InvalidInput(
                    f"{limit} points from offset {offset} on are none to choose: limit must be at "
                    "least 1, and offset at least 0"
                )
            diversity = 0.5 if query.mmr.diversity is None else query.mmr.diversity
            decoding = Decoding(mmr=Mmr(request.using or UNNAMED, diversity, limit, offset))
            changed["limit"] = query.mmr.candidates_limit or limit + offset
            changed["offset"] = None

        return request.model_copy(update=changed), decoding

    def _require_mergeable(self, query: Any, inner: Sequence[Any]) -> None:
        """Raise UnsupportedOperation if the query merges
        scores of prefetches that are still products.
        """
        is_dbsf = isinstance(query, models.FusionQuery) and query.fusion == models.Fusion.DBSF
        if not is_dbsf and not isinstance(query, models.FormulaQuery):
            return

        for prefetch in inner:
            state = self.cached_state.state_of(prefetch.using)
            is_euclid = state is not None and state.metric == "L2"
            if is_euclid and not _needs_no_vector(prefetch.query):
                raise UnsupportedOperation(
                    "a query cannot merge the scores of a corrected Euclid vector, which Qdrant "
                    "computes as products: merge by reciprocal ranks"
                )

    def _with_vectors(self, request: Any) -> tuple[Any, list[Any]]:
        """Return the query with vectors in place of
        ids, and the ids that its answer must leave out.
        """
        collection, field = _source_of(request, (self.searched, self.cached_state.name))
        excluded: list[Any] = []

        def resolved(value: Any) -> Any:
            if not is_id(value):
                return value

            # Qdrant leaves the points out that a query names. It no longer sees their ids.
            if collection is None:
                excluded.extend((_id(value), as_returned(_id(value))))
            return self.vectors[collection, field, _id(value)]

        query = _mapped(request.query, resolved)
        if isinstance(query, models.RecommendQuery) and query.recommend.strategy in _AVERAGES:
            if any(len(np.shape(example)) > 1 for example in _inputs(query)):
                raise UnsupportedOperation(
                    "a corrected multivector does not support the strategy average_vector, as several "
                    "vectors have no average: recommend by best_score or sum_scores"
                )
            query = models.NearestQuery.model_construct(
                nearest=_average(query.recommend).tolist(), mmr=None
            )
        return query, excluded

    def _profile(self, state: CollectionState) -> Profile:
        return state.profile_of(self.overrides.profile)

    def _strength(self, state: CollectionState) -> float:
        return state.query_weights(self._profile(state), self.overrides).strength

    def _encoder(self, state: CollectionState) -> Callable[[Any], list[float]]:
        """Return the function that encodes a vector as an augmented query."""

        def encode(value: Any) -> list[float]:
            together = self.encoded.get(id(value))
            return together or Uncopied(self._encode(state, as_rows(state, [value]))[0])

        return encode

    def _encode(self, state: CollectionState, rows: Floats) -> list[list[float]]:
        """Return the augmented queries of vectors (n, d),
        rounded as the vectors of the field are stored.
        """
        weights = state.query_weights(self._profile(state), self.overrides)
        packed_queries = state.codec.pack_queries(rows, weights)
        return queries_of(state.codec.form, packed_queries)

    def _by_formula(self, request: Any, state: CollectionState, most: int) -> Any:
        """Return a request for candidates, from whose scores a formula subtracts their biases."""
        strength = self._strength(state)
        if strength == 0:
            return request

        query = request.query
        is_average = (
            isinstance(query, models.RecommendQuery) and query.recommend.strategy in _AVERAGES
        )
        is_nearest = not isinstance(query, get_args(models.Query)) or (
            isinstance(query, models.NearestQuery) and query.mmr is None
        )
        if not (is_average or is_nearest):
            raise UnsupportedOperation(
                f"a {type(query).__name__} with biases in payloads is not supported: search for "
                "the nearest, recommend by the average vector, or pass strength=0"
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
        # A point without a bias of this generation in its payload counts as one with the mean bias,
        # 0: so does a condition that does not hold.
        profile = self._profile(state)
        key = SLOT_KEYS[profile.slot] + state.suffix
        number_key = NUMBER_KEYS[profile.slot] + state.suffix
        is_of_generation = schema.numbered(number_key, profile.generation)
        bias = models.MultExpression(mult=[-strength, key, is_of_generation])
        formula = models.SumExpression(sum=["$score", bias])
        changed = {
            "prefetch": candidates,
            "query": models.FormulaQuery(formula=formula, defaults={key: 0.0}),
            "using": None,
            "lookup_from": None,
        }
        return request.model_copy(update=changed)


def _mapped(query: Any, change: Callable[[Any], Any]) -> Any:
    """Return the query with `change` applied to its vectors and ids."""
    if isinstance(query, models.NearestQuery):
        return models.NearestQuery.model_construct(nearest=change(query.nearest), mmr=query.mmr)
    if isinstance(query, models.RecommendQuery):
        recommend = query.recommend
        examples = {
            "positive": [change(example) for example in recommend.positive or []],
            "negative": [change(example) for example in recommend.negative or []],
        }
        return query.model_copy(update={"recommend": recommend.model_copy(update=examples)})

    if isinstance(query, models.DiscoverQuery):
        discover = query.discover
        changed = {
            "target": change(discover.target),
            "context": _mapped_pairs(discover.context, change),
        }
        return query.model_copy(update={"discover": discover.model_copy(update=changed)})

    if isinstance(query, models.ContextQuery):
        return query.model_copy(update={"context": _mapped_pairs(query.context, change)})
    if isinstance(query, models.RelevanceFeedbackQuery):
        feedback = query.relevance_feedback
        items = [
            item.model_copy(update={"example": change(item.example)}) for item in feedback.feedback
        ]
        changed = {"target": change(feedback.target), "feedback": items}
        return query.model_copy(update={"relevance_feedback": feedback.model_copy(update=changed)})

    return models.NearestQuery.model_construct(nearest=change(query), mmr=None)


def _mapped_pairs(context: Any, change: Callable[[Any], Any]) -> Any:
    pairs = context if isinstance(context, list) else [] if context is None else [context]
    return [
        pair.model_copy(
            update={"positive": change(pair.positive), "negative": change(pair.negative)}
        )
        for pair in pairs
    ]


def _average(recommend: Any) -> Floats:
    """Return the query vector (d,) by which Qdrant recommends with the strategy average_vector."""
    if not recommend.positive:
        raise InvalidInput(
            "the recommendation by the average vector has no positive example: add one"
        )

    mean: Floats = np.mean(
        [as_vector(example) for example in recommend.positive], axis=0, dtype=np.float32
    )
    if recommend.negative:
        negatives = [as_vector(example) for example in recommend.negative]
        mean = 2 * mean - np.mean(negatives, axis=0, dtype=np.float32)
    return mean


def as_rows(state: CollectionState, values: Sequence[Any]) -> Floats:
    """Return vectors of a field as the user gives them, (n, d) or multi-vectors.

    As for Qdrant, one vector where a field has several is a row of one. Raises UnsupportedOperation,
    InvalidInput and DimensionMismatch.
    """
    if not state.layout.multi_vectors:
        return np.stack([as_vector(value) for value in values])
    rows = [as_tokens(value) for value in values]
    return cast(Floats, MultiVectors.from_list(rows, what="the vectors"))


def as_tokens(value: Any) -> Any:
    """Return several vectors as they are, and one vector as a list of it.

    Raises UnsupportedOperation for other values, such as texts that a server embeds.
    """
    if not hasattr(value, "__len__") or isinstance(value, str | dict):
        raise UnsupportedOperation(
            f"a corrected multivector takes no {type(value).__name__}: pass lists of numbers, or to "
            "search the id of a point"
        )
    is_one = len(value) > 0 and np.ndim(value[0]) == 0
    return [value] if is_one else value


def as_vector(value: Any) -> Floats:
    try:
        vector = np.asarray(value, np.float32)
    except (TypeError, ValueError):
        vector = np.empty((0, 0), np.float32)

    if vector.ndim != 1:
        raise UnsupportedOperation(
            f"a corrected vector cannot be searched with {type(value).__name__}: pass a list of "
            "numbers or a point's id"
        )

    return vector


def _without(where: Any, ids: Sequence[Any]) -> models.Filter:
    """Return a filter that also excludes these points."""
    excluded = models.HasIdCondition(has_id=list(dict.fromkeys(ids)))
    if where is None:
        return models.Filter(must_not=[excluded])

    others = where.must_not
    if others is None:
        others = []
    elif not isinstance(others, list):
        others = [others]
    changed: models.Filter = where.model_copy(update={"must_not": [*others, excluded]})
    return changed


def picked_by_mmr(mmr: Mmr, points: Sequence[Any], vectors: Floats) -> list[Any]:
    """Return the points that MMR selects of these n candidates, best first.

    vectors: (n, d) the user's, unit for Cosine.
    """
    if not points:
        return []

    relevance = np.array([point.score for point in points])
    similarity = vectors @ vectors.T

    # The most relevant point is always chosen first.
    chosen = [0]
    left = list(range(1, len(points)))
    while left and len(chosen) < mmr.limit + mmr.offset:
        nearest_chosen = similarity[np.ix_(left, chosen)].max(axis=1)
        gain = (1 - mmr.diversity) * relevance[left] - mmr.diversity * nearest_chosen
        best = int(np.argmax(gain))
        chosen.append(left.pop(best))

    return [points[i] for i in chosen[mmr.offset :]]
