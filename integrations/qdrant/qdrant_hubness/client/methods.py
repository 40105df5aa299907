"""The methods of qdrant-client that both clients override. The async client returns awaitables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeVar, cast

from qdrant_client import QdrantClient, models

from milvus_hubness.extending import Ask, Operation, Overrides, expect_arguments
from qdrant_hubness.client.operations import Operations, request_of
from qdrant_hubness.client.points import Call, points_of

OF_QUERIES = ("strength", "kinds", "profile")
"""Arguments that clients of this package add to queries."""
OF_CLIENTS = ("strength", "kinds", "state_ttl", "bank_budget")
"""Arguments that clients of this package add to the constructor."""


T = TypeVar("T", bound=Callable[..., Any])


def by_position(method: T) -> T:
    """Let a method take its further arguments by position, too, as qdrant-client's method does."""
    theirs = _positions_of(getattr(QdrantClient, method.__name__))
    names = theirs[len(_positions_of(method)) :]

    @wraps(method)
    def call(self: Methods, *args: Any, **options: Any) -> Any:
        own_count = len(theirs) - len(names)
        further = args[own_count:]
        if not further:
            return method(self, *args, **options)

        if len(further) > len(names):
            raise TypeError(f"{method.__name__} takes at most {len(theirs)} arguments by position")
        named = dict(zip(names, further, strict=False))
        if twice := sorted(named.keys() & options.keys()):
            raise TypeError(f"{method.__name__} got multiple values for argument {twice[0]!r}")
        return method(self, *args[:own_count], **options, **named)

    return cast(T, call)


def _positions_of(method: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that a method takes by position, without `self`."""
    parameters = signature(method).parameters.values()
    return [each.name for each in parameters if each.kind is Parameter.POSITIONAL_OR_KEYWORD][1:]


class Methods(ABC):
    """Each method has the arguments of qdrant-client's method of that name."""

    _operations: Operations

    @abstractmethod
    def _run(self, operation: Operation[Any]) -> Any: ...

    # -- queries -----------------------------------------------------------------------------------

    @by_position
    def query_points(
        self,
        collection_name: str,
        query: Any = None,
        using: str | None = None,
        prefetch: Any = None,
        query_filter: Any = None,
        search_params: Any = None,
        limit: int = 10,
        offset: int | None = None,
        with_payload: Any = True,
        with_vectors: Any = False,
        score_threshold: float | None = None,
        lookup_from: Any = None,
        *,
        strength: float | None = None,
        kinds: float | None = None,
        profile: str | None = None,
        **options: Any,
    ) -> Any:
        """As QdrantClient.query_points.

        strength: w; 0 for a search without biases. kinds: 1 compares vectors with the means of their
        kinds, where the vector has kinds; 0 does not. profile: the bias profile to use.
        """
        expect_arguments(options, OF_QUERIES)
        request = request_of(
            query,
            using=using,
            prefetch=prefetch,
            filter=query_filter,
            params=search_params,
            limit=limit,
            offset=offset,
            with_payload=with_payload,
            with_vector=with_vectors,
            score_threshold=score_threshold,
            lookup_from=lookup_from,
        )
        return self._run(
            self._operations.query(
                collection_name, request, options, Overrides(strength, kinds, profile)
            )
        )

    @by_position
    def query_batch_points(
        self,
        collection_name: str,
        requests: Sequence[models.QueryRequest],
        *,
        strength: float | None = None,
        kinds: float | None = None,
        profile: str | None = None,
        **options: Any,
    ) -> Any:
        """As QdrantClient.query_batch_points; strength, kinds and profile as for query_points."""
        expect_arguments(options, OF_QUERIES)
        # An attempt may be repeated, and an iterator has its requests once.
        listed = list(requests)
        return self._run(
            self._operations.batch(
                collection_name, listed, options, Overrides(strength, kinds, profile)
            )
        )

    @by_position
    def query_points_groups(
        self,
        collection_name: str,
        group_by: str,
        query: Any = None,
        using: str | None = None,
        prefetch: Any = None,
        query_filter: Any = None,
        search_params: Any = None,
        limit: int = 10,
        group_size: int = 3,
        with_payload: Any = True,
        with_vectors: Any = False,
        score_threshold: float | None = None,
        with_lookup: Any = None,
        lookup_from: Any = None,
        *,
        strength: float | None = None,
        kinds: float | None = None,
        profile: str | None = None,
        **options: Any,
    ) -> Any:
        """As QdrantClient.query_points_groups; strength, kinds and profile as for query_points."""
        expect_arguments(options, OF_QUERIES)
        request = request_of(
            query,
            using=using,
            prefetch=prefetch,
            filter=query_filter,
            params=search_params,
            limit=limit,
            with_payload=with_payload,
            with_vector=with_vectors,
            score_threshold=score_threshold,
            lookup_from=lookup_from,
        )
        options["with_lookup"] = with_lookup
        return self._run(
            self._operations.groups(
                collection_name,
                request,
                group_by,
                group_size,
                options,
                Overrides(strength, kinds, profile),
            )
        )

    @by_position
    def search_matrix_pairs(
        self,
        collection_name: str,
        query_filter: Any = None,
        limit: int = 3,
        sample: int = 10,
        using: str | None = None,
        **options: Any,
    ) -> Any:
        """As QdrantClient.search_matrix_pairs.

        Raises UnsupportedOperation for augmented vectors.
        """
        options |= {"query_filter": query_filter, "limit": limit, "sample": sample, "using": using}
        return self._run(self._operations.matrix("search_matrix_pairs", collection_name, options))

    @by_position
    def search_matrix_offsets(
        self,
        collection_name: str,
        query_filter: Any = None,
        limit: int = 3,
        sample: int = 10,
        using: str | None = None,
        **options: Any,
    ) -> Any:
        """As QdrantClient.search_matrix_offsets.

        Raises UnsupportedOperation for augmented vectors.
        """
        options |= {"query_filter": query_filter, "limit": limit, "sample": sample, "using": using}
        return self._run(self._operations.matrix("search_matrix_offsets", collection_name, options))

    # -- reads -------------------------------------------------------------------------------------

    @by_position
    def retrieve(
        self,
        collection_name: str,
        ids: Sequence[Any],
        with_payload: Any = True,
        with_vectors: Any = False,
        **options: Any,
    ) -> Any:
        """As QdrantClient.retrieve."""
        options |= {"with_payload": with_payload, "with_vectors": with_vectors}
        return self._run(self._operations.retrieve(collection_name, ids, options))

    @by_position
    def scroll(
        self,
        collection_name: str,
        scroll_filter: Any = None,
        limit: int = 10,
        order_by: Any = None,
        offset: Any = None,
        with_payload: Any = True,
        with_vectors: Any = False,
        **options: Any,
    ) -> Any:
        """As QdrantClient.scroll."""
        options |= {
            "scroll_filter": scroll_filter,
            "limit": limit,
            "order_by": order_by,
            "offset": offset,
            "with_payload": with_payload,
            "with_vectors": with_vectors,
        }
        return self._run(self._operations.scroll(collection_name, options))

    def get_collection(self, collection_name: str, **kwargs: Any) -> Any:
        """As QdrantClient.get_collection, with the sizes and distances before the correction."""
        return self._run(self._operations.described(collection_name))

    # -- operations that invalidate the cached states ----------------------------------------------

    def create_collection(self, *args: Any, **options: Any) -> Any:
        """As QdrantClient.create_collection."""
        return self._changing_names("create_collection", args, options)

    def recreate_collection(self, *args: Any, **options: Any) -> Any:
        """As QdrantClient.recreate_collection."""
        return self._changing_names("recreate_collection", args, options)

    def update_collection(self, *args: Any, **options: Any) -> Any:
        """As QdrantClient.update_collection."""
        return self._changing_names("update_collection", args, options)

    def delete_collection(self, *args: Any, **options: Any) -> Any:
        """As QdrantClient.delete_collection."""
        return self._changing_names("delete_collection", args, options)

    def update_collection_aliases(self, *args: Any, **options: Any) -> Any:
        """As QdrantClient.update_collection_aliases."""
        return self._changing_names("update_collection_aliases", args, options)

    def recover_snapshot(self, *args: Any, **options: Any) -> Any:
        """As QdrantClient.recover_snapshot."""
        return self._changing_names("recover_snapshot", args, options)

    # -- writes ------------------------------------------------------------------------------------

    @by_position
    def upsert(self, collection_name: str, points: Any, wait: bool = True, **options: Any) -> Any:
        """As QdrantClient.upsert; each point gets its bias from the bank.

        Raises DimensionMismatch, NonFiniteVectors and, for Cosine, ZeroVectors, which name points
        by their position; DualWriteFailed if only the copy was not written.
        """
        return self._write(collection_name, "upsert", points=points, wait=wait, **options)

    @by_position
    def update_vectors(
        self,
        collection_name: str,
        points: Sequence[models.PointVectors],
        wait: bool = True,
        **options: Any,
    ) -> Any:
        """As QdrantClient.update_vectors; raises as `upsert` does."""
        return self._write(collection_name, "update_vectors", points=points, wait=wait, **options)

    @by_position
    def delete_vectors(
        self,
        collection_name: str,
        vectors: Sequence[str],
        points: Any,
        wait: bool = True,
        **options: Any,
    ) -> Any:
        """As QdrantClient.delete_vectors."""
        return self._write(
            collection_name, "delete_vectors", vectors=vectors, points=points, wait=wait, **options
        )

    @by_position
    def delete(
        self, collection_name: str, points_selector: Any, wait: bool = True, **options: Any
    ) -> Any:
        """As QdrantClient.delete."""
        return self._write(
            collection_name, "delete", points_selector=points_selector, wait=wait, **options
        )

    @by_position
    def set_payload(
        self,
        collection_name: str,
        payload: dict[str, Any],
        points: Any,
        key: str | None = None,
        wait: bool = True,
        **options: Any,
    ) -> Any:
        """As QdrantClient.set_payload."""
        return self._write(
            collection_name,
            "set_payload",
            payload=payload,
            points=points,
            key=key,
            wait=wait,
            **options,
        )

    @by_position
    def overwrite_payload(
        self,
        collection_name: str,
        payload: dict[str, Any],
        points: Any,
        wait: bool = True,
        **options: Any,
    ) -> Any:
        """As QdrantClient.overwrite_payload. Biases in payloads are lost until the next refresh."""
        return self._write(
            collection_name,
            "overwrite_payload",
            payload=payload,
            points=points,
            wait=wait,
            **options,
        )

    @by_position
    def delete_payload(
        self,
        collection_name: str,
        keys: Sequence[str],
        points: Any,
        wait: bool = True,
        **options: Any,
    ) -> Any:
        """As QdrantClient.delete_payload."""
        return self._write(
            collection_name, "delete_payload", keys=keys, points=points, wait=wait, **options
        )

    @by_position
    def clear_payload(
        self, collection_name: str, points_selector: Any, wait: bool = True, **options: Any
    ) -> Any:
        """As QdrantClient.clear_payload. Biases in payloads are lost until the next refresh."""
        return self._write(
            collection_name, "clear_payload", points_selector=points_selector, wait=wait, **options
        )

    @by_position
    def batch_update_points(
        self,
        collection_name: str,
        update_operations: Sequence[Any],
        wait: bool = True,
        **options: Any,
    ) -> Any:
        """As QdrantClient.batch_update_points.

        Corrected collections get one request per operation.
        """
        options["wait"] = wait
        return self._run(self._operations.batch_update(collection_name, update_operations, options))

    @by_position
    def upload_points(
        self, collection_name: str, points: Iterable[Any], batch_size: int = 64, **options: Any
    ) -> Any:
        """As QdrantClient.upload_points, with its `wait`, `max_retries` and conditions.

        This process sends all batches: `parallel` and `method` have no effect. Each batch goes to
        the copy as well from the moment at which a migration announces it.
        """
        return self._run(self._operations.upload(collection_name, points, batch_size, options))

    @by_position
    def upload_collection(
        self,
        collection_name: str,
        vectors: Any,
        payload: Iterable[dict[str, Any]] | None = None,
        ids: Iterable[Any] | None = None,
        batch_size: int = 64,
        **options: Any,
    ) -> Any:
        """As QdrantClient.upload_collection, with the options of this client's `upload_points`."""
        points = points_of(vectors, payload, ids)
        return self._run(self._operations.upload(collection_name, points, batch_size, options))

    def _write(self, collection: str, method: str, **options: Any) -> Any:
        return self._run(self._operations.write_one(collection, Call(method, options)))

    def _changing_names(self, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return self._run(self._operations.forgetting(Ask(method, args, options)))
