"""The operations of both clients, sync and async.
No I/O: see `Operation` in milvus_hubness.extending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from qdrant_client import models

from milvus_hubness import InvalidInput, UnsupportedOperation
from milvus_hubness.extending import Ask, Floats, Operation, expect_factor
from qdrant_hubness.client.cached_state import CachedState
from qdrant_hubness.client.rewrite import (
    Decoding,
    Named,
    Rewriter,
    as_returned,
    limit_of,
    picked_by_mmr,
    points_named,
)
from qdrant_hubness.client.writes import Writing
from qdrant_hubness.store.rows import UNNAMED, named, vector_words

Options = dict[str, Any]


class Operations(Writing):
    """Reads and queries, over the writes."""

    # -- points by id ------------------------------------------------------------------------------

    def retrieve(
        self, collection: str, ids: Sequence[Any], options: Options
    ) -> Operation[list[Any]]:
        """As QdrantClient.retrieve."""

        def call(cached: CachedState) -> Operation[tuple[list[Any], CachedState]]:
            name = cached.real_name or collection
            return (yield Ask("retrieve", (name, ids), options)), cached

        records, cached = yield from self.retrying_by_width(collection, call, _some_vectors)
        requested = payload_keys(options["with_payload"])
        return [cached.shown(record, requested) for record in records]

    def scroll(self, collection: str, options: Options) -> Operation[tuple[list[Any], Any]]:
        """As QdrantClient.scroll."""
        offsets: list[Any] = []

        def call(cached: CachedState) -> Operation[tuple[list[Any], CachedState]]:
            name = cached.real_name or collection
            records, offset = yield Ask("scroll", (name,), options)
            offsets.append(offset)
            return records, cached

        records, cached = yield from self.retrying_by_width(collection, call, _some_vectors)
        requested = payload_keys(options["with_payload"])
        return [cached.shown(record, requested) for record in records], offsets[-1]

    def described(self, collection: str) -> Operation[Any]:
        """As QdrantClient.get_collection."""

        def call(cached: CachedState) -> Operation[Any]:
            return cached.described((yield Ask("get_collection", (collection,))))

        return self.retrying(collection, None, call)

    def matrix(self, method: str, collection: str, options: Options) -> Operation[Any]:
        """As the method of QdrantClient, which compares points.

        Raises UnsupportedOperation for augmented vectors.
        """
        cached = yield from self.cached_state(collection)
        if (options["using"] or UNNAMED) in cached.in_vectors:
            raise UnsupportedOperation(
                f"{method} would compare augmented vectors, which have the biases in them: use the "
                "source collection"
            )
        return (yield Ask(method, (collection,), options))

    # -- queries -----------------------------------------------------------------------------------

    def query(
        self,
        collection: str,
        request: models.QueryRequest,
        options: Options,
        strength: float | None,
        kinds: float | None,
        profile: str | None,
    ) -> Operation[Any]:
        """As QdrantClient.query_points."""

        def send(name: str, requests: Sequence[models.QueryRequest]) -> Operation[list[Any]]:
            sent = {**arguments(requests[0]), **options}
            return [(yield Ask("query_points", (name,), sent))]

        return (yield from self._queried(collection, [request], send, strength, kinds, profile))[0]

    def batch(
        self,
        collection: str,
        requests: Sequence[models.QueryRequest],
        options: Options,
        strength: float | None,
        kinds: float | None,
        profile: str | None,
    ) -> Operation[list[Any]]:
        """As QdrantClient.query_batch_points."""

        def send(name: str, requests: Sequence[models.QueryRequest]) -> Operation[list[Any]]:
            # Augmented queries have more digits than the user's, so a request may become too large.
            answers = yield from self.divided(
                name,
                [requests],
                lambda some: Ask("query_batch_points", (name, some), options),
                is_added=False,
            )
            return [response for responses in answers for response in responses]

        return self._queried(collection, requests, send, strength, kinds, profile)

    def _queried(
        self,
        collection: str,
        requests: Sequence[models.QueryRequest],
        send: Callable[[str, Sequence[models.QueryRequest]], Operation[list[Any]]],
        strength: float | None,
        kinds: float | None,
        profile: str | None,
    ) -> Operation[list[Any]]:
        def call(cached: CachedState) -> Operation[list[Any]]:
            rewriter = self._rewriter(collection, cached, strength, kinds, profile)
            if len(requests) > 1:
                rewriter = replace(rewriter, encoded=rewriter.encoded_together(requests))

            sent = []
            decodings = []
            for request in requests:
                # Candidates up to the end of the page.
                most = limit_of(request) + (request.offset or 0)
                rewritten, decoding = yield from self._rewritten(
                    collection, rewriter, request, most
                )
                sent.append(rewritten)
                decodings.append(decoding)

            responses = yield from send(cached.real_name or collection, sent)

            answers = []
            for request, decoding, response in zip(requests, decodings, responses, strict=True):
                points = yield from self._diverse(collection, cached, decoding, response.points)
                requested = payload_keys(request.with_payload)
                # The answer was made for this call, and nobody else has it.
                response.points = [
                    cached.shown(decoding.scored(point), requested) for point in points
                ]
                answers.append(response)

            return answers

        return self.retrying(collection, None, call)

    def groups(
        self,
        collection: str,
        request: models.QueryRequest,
        group_by: str,
        group_size: int,
        options: Options,
        strength: float | None,
        kinds: float | None,
        profile: str | None,
    ) -> Operation[Any]:
        """As QdrantClient.query_points_groups."""

        def call(cached: CachedState) -> Operation[Any]:
            limit = limit_of(request) * group_size
            rewriter = self._rewriter(collection, cached, strength, kinds, profile)
            sent, decoding = yield from self._rewritten(collection, rewriter, request, limit)
            if decoding.mmr is not None:
                raise UnsupportedOperation(
                    "a corrected vector does not support mmr in groups: use query_points"
                )

            # Groups have no offset.
            grouped = {name: value for name, value in arguments(sent).items() if name != "offset"}
            grouped |= {"group_by": group_by, "group_size": group_size, **options}
            name = cached.real_name or collection
            response = yield Ask("query_points_groups", (name,), grouped)

            lookup_state = yield from self._lookup_state(options.get("with_lookup"))
            requested = payload_keys(request.with_payload)
            groups = []
            for group in response.groups:
                hits = [cached.shown(decoding.scored(hit), requested) for hit in group.hits]
                lookup = None
                if group.lookup is not None:
                    lookup = lookup_state.shown(group.lookup)
                groups.append(group.model_copy(update={"hits": hits, "lookup": lookup}))

            return response.model_copy(update={"groups": groups})

        return self.retrying(collection, None, call)

    def _lookup_state(self, lookup: Any) -> Operation[CachedState]:
        if lookup is None:
            return CachedState()

        collection = lookup if isinstance(lookup, str) else lookup.collection
        return (yield from self.cached_state(collection))

    def _rewriter(
        self,
        collection: str,
        cached: CachedState,
        strength: float | None,
        kinds: float | None,
        profile: str | None,
    ) -> Rewriter:
        """Return the rewriter of requests that name no points.

        Raises InvalidInput for the strength and for the factor of kinds.
        """
        weight = self.strength if strength is None else strength
        if weight is not None and not np.isfinite(weight):
            raise InvalidInput(f"strength must be finite, got {weight!r}")
        factor = self.kinds if kinds is None else kinds
        expect_factor(factor)
        return Rewriter(cached, collection, {}, weight, profile, factor)

    def _rewritten(
        self, collection: str, rewriter: Rewriter, request: models.QueryRequest, most: int
    ) -> Operation[tuple[models.QueryRequest, Decoding]]:
        points = points_named(request, rewriter.cached_state, collection)
        if points:
            vectors = yield from self._users_vectors(collection, rewriter.cached_state, points)
            rewriter = replace(rewriter, vectors=vectors)
        return rewriter.request(request, most=most)

    def _users_vectors(
        self, collection: str, cached: CachedState, points: Iterable[Named]
    ) -> Operation[dict[Named, Floats]]:
        """Return the user's vectors of these points.

        Raises InvalidInput if one does not exist or has none.
        """
        # One request for each collection and vector. None stands for the searched collection.
        ids_by_source: dict[tuple[str | None, str], list[Any]] = {}
        for other, field, id in points:
            ids_by_source.setdefault((other, field), []).append(id)

        vector_of: dict[Named, Any] = {}
        for (other, field), ids in ids_by_source.items():
            state = cached if other is None else (yield from self.cached_state(other))
            source = state.real_name or other or collection
            names = [field] if field else True
            records = yield from self.retrieved(source, ids, with_payload=False, with_vectors=names)
            vectors = {
                as_returned(record.id): named(state.decoded(record.vector)).get(field)
                for record in records
            }
            for id in ids:
                vector = vectors.get(as_returned(id))
                if vector is None:
                    raise InvalidInput(
                        f"point {id!r} of {source!r} does not have {vector_words(field)}: name "
                        "another point"
                    )

                vector_of[other, field, id] = vector

        return vector_of

    def _diverse(
        self, collection: str, cached: CachedState, decoding: Decoding, hits: list[Any]
    ) -> Operation[list[Any]]:
        """Return the points of an answer, chosen by MMR if the query requests that."""
        mmr = decoding.mmr
        if mmr is None or not hits:
            return hits

        points = [(None, mmr.field, point.id) for point in hits]
        vectors = yield from self._users_vectors(collection, cached, points)
        return picked_by_mmr(mmr, hits, np.array([vectors[point] for point in points], np.float32))


def _some_vectors(answer: tuple[list[Any], CachedState]) -> list[Any]:
    return [point.vector for point in answer[0][:1]]


def arguments(request: models.QueryRequest) -> Options:
    """Return the arguments of query_points for a request."""
    renamed = {"filter": "query_filter", "params": "search_params", "with_vector": "with_vectors"}
    options = {renamed.get(name, name): value for name, value in request if name != "shard_key"}
    options["limit"] = limit_of(request)
    if request.shard_key is not None:
        options["shard_key_selector"] = request.shard_key
    return options


def request_of(query: Any, **options: Any) -> models.QueryRequest:
    """Return the arguments of query_points as a request."""
    plain = query.tolist() if isinstance(query, np.ndarray) else query
    return models.QueryRequest.model_construct(query=plain, **options)


def payload_keys(with_payload: Any) -> frozenset[str]:
    """Return the keys that the argument `with_payload` names."""
    if isinstance(with_payload, models.PayloadSelectorInclude):
        return frozenset(with_payload.include)
    return frozenset(with_payload) if isinstance(with_payload, list | tuple) else frozenset()
