"""What the clients do, sync and async alike. No I/O: see milvus_hubness.client.steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from qdrant_client import models

from milvus_hubness.client.steps import Ask
from milvus_hubness.codec.arrays import Floats
from milvus_hubness.errors import InvalidInput, UnsupportedOperation
from qdrant_hubness.client.cached_state import CachedState
from qdrant_hubness.client.rewrite import DEFAULT_LIMIT, Answered, Named, Rewriting, picked_by_mmr, points_named
from qdrant_hubness.client.state_cache import Operation
from qdrant_hubness.client.writes import Writing
from qdrant_hubness.store.rows import UNNAMED, named

Options = dict[str, Any]


class Operations(Writing):
    """Reads and queries, over the writes."""

    # -- points by id -------------------------------------------------------------------------------------

    def retrieve(self, collection: str, ids: Sequence[Any], options: Options) -> Operation[list[Any]]:
        """As QdrantClient.retrieve."""

        def call(cached: CachedState) -> Operation[tuple[list[Any], CachedState]]:
            return (yield Ask("retrieve", (collection, ids), options)), cached

        found, cached = yield from self.reading(collection, call, _some_vectors)
        asked = payload_keys(options["with_payload"])
        return [cached.shown(each, asked) for each in found]

    def scroll(self, collection: str, options: Options) -> Operation[tuple[list[Any], Any]]:
        """As QdrantClient.scroll."""
        offsets: list[Any] = []

        def call(cached: CachedState) -> Operation[tuple[list[Any], CachedState]]:
            records, offset = yield Ask("scroll", (collection,), options)
            offsets.append(offset)
            return records, cached

        found, cached = yield from self.reading(collection, call, _some_vectors)
        asked = payload_keys(options["with_payload"])
        return [cached.shown(each, asked) for each in found], offsets[-1]

    def described(self, collection: str) -> Operation[Any]:
        """As QdrantClient.get_collection."""

        def call(cached: CachedState) -> Operation[Any]:
            return cached.described((yield Ask("get_collection", (collection,))))

        return self.as_it_is(collection, call)

    def matrix(self, method: str, collection: str, args: tuple[Any, ...], options: Options) -> Operation[Any]:
        """A method that compares points with each other. Raises UnsupportedOperation where their vectors are
        in augmented form."""
        cached = yield from self.cached_state(collection)
        if (options.get("using") or UNNAMED) in cached.in_vectors:
            raise UnsupportedOperation(f"{method} would compare stored vectors, with their biases in them")
        return (yield Ask(method, (collection, *args), options))

    # -- queries ------------------------------------------------------------------------------------------

    def query(
        self,
        collection: str,
        request: models.QueryRequest,
        options: Options,
        strength: float | None,
        profile: str | None,
    ) -> Operation[Any]:
        """As QdrantClient.query_points."""

        def send(requests: Sequence[models.QueryRequest]) -> Operation[list[Any]]:
            return [(yield Ask("query_points", (collection,), {**arguments(requests[0]), **options}))]

        return (yield from self._queried(collection, [request], send, strength, profile))[0]

    def batch(
        self,
        collection: str,
        requests: Sequence[models.QueryRequest],
        options: Options,
        strength: float | None,
        profile: str | None,
    ) -> Operation[list[Any]]:
        """As QdrantClient.query_batch_points."""

        def send(requests: Sequence[models.QueryRequest]) -> Operation[list[Any]]:
            return (yield Ask("query_batch_points", (collection, requests), options))

        return self._queried(collection, requests, send, strength, profile)

    def _queried(
        self,
        collection: str,
        requests: Sequence[models.QueryRequest],
        send: Callable[[Sequence[models.QueryRequest]], Operation[list[Any]]],
        strength: float | None,
        profile: str | None,
    ) -> Operation[list[Any]]:
        def call(cached: CachedState) -> Operation[list[Any]]:
            sent, answered = [], []
            for request in requests:
                most = (request.limit or DEFAULT_LIMIT) + (request.offset or 0)
                found = yield from self._rewritten(collection, cached, request, most, strength, profile)
                sent.append(found[0])
                answered.append(found[1])
            shown = []
            responses = yield from send(sent)
            for request, answer, response in zip(requests, answered, responses, strict=True):
                points = yield from self._diverse(collection, cached, answer, response.points)
                asked = payload_keys(request.with_payload)
                points = [cached.shown(answer.scored(each), asked) for each in points]
                shown.append(response.model_copy(update={"points": points}))
            return shown

        return self.as_it_is(collection, call)

    def groups(
        self,
        collection: str,
        request: models.QueryRequest,
        group_by: str,
        group_size: int,
        options: Options,
        strength: float | None,
        profile: str | None,
    ) -> Operation[Any]:
        """As QdrantClient.query_points_groups."""

        def call(cached: CachedState) -> Operation[Any]:
            limit = (request.limit or DEFAULT_LIMIT) * group_size
            sent, answered = yield from self._rewritten(collection, cached, request, limit, strength, profile)
            if answered.mmr is not None:
                raise UnsupportedOperation("mmr of a corrected vector in groups")
            result = {name: each for name, each in arguments(sent).items() if name != "offset"}
            sizes = {"group_by": group_by, "group_size": group_size}
            found = yield Ask("query_points_groups", (collection,), {**result, **sizes, **options})
            beside = yield from self._look_up_cached(options.get("with_lookup"))
            asked = payload_keys(request.with_payload)
            groups = [
                group.model_copy(
                    update={
                        "hits": [cached.shown(answered.scored(hit), asked) for hit in group.hits],
                        "lookup": beside.shown(group.lookup) if group.lookup is not None else None,
                    }
                )
                for group in found.groups
            ]
            return found.model_copy(update={"groups": groups})

        return self.as_it_is(collection, call)

    def _look_up_cached(self, lookup: Any) -> Operation[CachedState]:
        if lookup is None:
            return CachedState("")
        return (yield from self.cached_state(lookup if isinstance(lookup, str) else lookup.collection))

    def _rewritten(
        self,
        collection: str,
        cached: CachedState,
        request: models.QueryRequest,
        most: int,
        strength: float | None,
        profile: str | None,
    ) -> Operation[tuple[models.QueryRequest, Answered]]:
        weight = self.strength if strength is None else strength
        if weight is not None and not np.isfinite(weight):
            raise InvalidInput(f"strength must be finite, got {weight!r}")
        wanted = points_named(request, cached)
        vectors = yield from self._by_pointof(collection, cached, wanted)
        return Rewriting(cached, vectors, weight, profile).request(request, most=most)

    def _by_pointof(
        self, collection: str, cached: CachedState, points: Iterable[Named]
    ) -> Operation[dict[Named, Floats]]:
        """What the user gave for points that a query names. Raises InvalidInput naming one without it."""
        by_point: dict[Named, Any] = {}
        by_place: dict[tuple[str | None, str], list[Any]] = {}
        for place, field, id in points:
            by_place.setdefault((place, field), []).append(id)
        for (place, field), ids in by_place.items():
            state = cached if place is None else (yield from self.cached_state(place))
            options = {"with_payload": False, "with_vectors": [field] if field else True}
            records = yield Ask("retrieve", (place or collection, ids), options)
            vectors = {record.id: named(state.stripped(record.vector)).get(field) for record in records}
            for id in ids:
                if vectors.get(id) is None:
                    raise InvalidInput(f"point {id!r} of {place or collection!r} has no vector {field!r}")
                by_point[place, field, id] = vectors[id]
        return by_point

    def _diverse(
        self, collection: str, cached: CachedState, answered: Answered, hits: list[Any]
    ) -> Operation[list[Any]]:
        mmr = answered.mmr
        if mmr is None or not hits:
            return hits
        points = [(None, mmr.field, point.id) for point in hits]
        vectors = yield from self._by_pointof(collection, cached, points)
        return picked_by_mmr(mmr, hits, np.array([vectors[point] for point in points], np.float32))


def _some_vectors(answer: tuple[list[Any], CachedState]) -> list[Any]:
    return [point.vector for point in answer[0][:1]]


def arguments(request: models.QueryRequest) -> Options:
    """What query_points takes for a request."""
    named_otherwise = {"filter": "query_filter", "params": "search_params", "with_vector": "with_vectors"}
    result = {named_otherwise.get(name, name): value for name, value in request if name != "shard_key"}
    result["limit"] = result["limit"] or DEFAULT_LIMIT
    if request.shard_key is not None:
        result["shard_key_selector"] = request.shard_key
    return result


def request_of(query: Any, **result: Any) -> models.QueryRequest:
    """The arguments of query_points as a request."""
    return models.QueryRequest.model_construct(query=_plain(query), **result)


def _plain(query: Any) -> Any:
    return query.tolist() if isinstance(query, np.ndarray) else query


def payload_keys(with_payload: Any) -> frozenset[str]:
    """The keys that a call asks for by name."""
    if isinstance(with_payload, models.PayloadSelectorInclude):
        return frozenset(with_payload.include)
    return frozenset(with_payload) if isinstance(with_payload, list | tuple) else frozenset()
