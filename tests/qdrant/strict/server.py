"""The server: what each request does, by its method and path."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import unquote

import httpx
from pydantic import TypeAdapter, ValidationError
from qdrant_client import QdrantClient, models
from qdrant_client.local.qdrant_local import QdrantLocal

from tests.qdrant.strict.answers import Refused, refusal_of, result_of
from tests.qdrant.strict.collection import PART, StrictCollection
from tests.qdrant.strict.grpc_errors import OVER_GRPC, as_grpc, as_grpc_async
from tests.qdrant.strict.limits import Bucket, Limits, conditions_of

VERSION = "1.18.1"
REQUEST_BYTES = 33_554_432
WRITES = models.UpdateResult(operation_id=0, status=models.UpdateStatus.COMPLETED)

Handler = Callable[..., Any]


class StrictServer(QdrantLocal):
    """A server, whose clients `client` makes.

    request_bytes: the largest request over REST. shards: of collections whose creator names no
    number. strict_mode: of collections that are created without one. yellow_seconds: for how long
    the status is YELLOW after a write. clock: of the rates. seed: of the order in which points of
    update_vectors are taken. part: points that are changed together, up to that with a missing one; None for the
    local mode, which changes all that exist.
    """

    def __init__(
        self,
        *,
        request_bytes: int = REQUEST_BYTES,
        shards: int = 1,
        strict_mode: models.StrictModeConfig | None = None,
        yellow_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        version: str = VERSION,
        seed: int = 0,
        part: int | None = PART,
    ) -> None:
        super().__init__(":memory:")
        self.request_bytes = request_bytes
        self.shards = shards
        self.strict_mode = strict_mode
        self.yellow_seconds = yellow_seconds
        self.clock = clock
        self.version = version
        self.seed = seed
        self.part = part
        self.requests: list[tuple[str, str, int]] = []
        """Method, path and bytes of each request."""
        self._buckets: dict[tuple[str, str], Bucket] = {}
        self._lock = threading.RLock()
        self._routes = [
            (method, re.compile(f"{path}/?"), body and TypeAdapter(body), handler)
            for method, path, body, handler in self._table()
        ]

    def client(self, cls: type = QdrantClient, *, over: str = "rest", **options: Any) -> Any:
        """Return a client of this class, sync or async. over: "rest" or "grpc"."""
        headers = {OVER_GRPC: "yes"} if over == "grpc" else {}
        made = cls(
            url="http://strict:6333",
            transport=httpx.MockTransport(self.answer),
            check_compatibility=False,
            headers=headers,
            **options,
        )
        if over == "grpc":
            is_async = hasattr(made.http.client, "_async_client")
            made.http.client.add_middleware(as_grpc_async if is_async else as_grpc)
        return made

    def answer(self, request: httpx.Request) -> httpx.Response:
        """Return the answer to a request."""
        path = unquote(request.url.raw_path.partition(b"?")[0].decode())
        body = request.read()
        is_grpc = OVER_GRPC in request.headers
        with self._lock:
            self.requests.append((request.method, path, len(body)))
            try:
                if len(body) > self.request_bytes and not is_grpc:
                    raise Refused(
                        400,
                        f"Payload error: JSON payload ({len(body)} bytes) is larger than allowed "
                        f"(limit: {self.request_bytes} bytes).",
                    )
                for method, pattern, adapter, handler in self._routes:
                    found = pattern.fullmatch(path)
                    if found and method == request.method:
                        arguments = found.groups()
                        if adapter:
                            arguments = (*arguments, adapter.validate_json(body))
                        result = handler(*arguments)
                        return result_of(result, is_exact=is_grpc)
                raise Refused(404, "")
            except ValidationError as error:
                text = f"Format error in JSON body: {error.errors()[0]['msg']}"
                return Refused(400, text).response()
            except (Refused, ValueError, KeyError, AssertionError, TypeError) as error:
                return refusal_of(error).response()

    def _table(self) -> Iterable[tuple[str, str, Any, Handler]]:
        """Method, path, type of the body, and handler. More special paths come first."""
        one = "/collections/([^/]+)"
        points = f"{one}/points"
        return (
            ("GET", "/", None, self._version),
            ("GET", "/collections", None, self.get_collections),
            ("POST", "/collections/aliases", models.ChangeAliasesOperation, self._aliases),
            ("GET", "/aliases", None, self.get_aliases),
            ("GET", f"{one}/aliases", None, self._aliases_of),
            ("GET", f"{one}/exists", None, self._exists),
            ("GET", one, None, self._described),
            ("PUT", one, models.CreateCollection, self._create),
            ("PATCH", one, models.UpdateCollection, self._change),
            ("DELETE", one, None, self.delete_collection),
            ("PUT", f"{one}/index", models.CreateFieldIndex, self._create_index),
            ("DELETE", f"{one}/index/(.+)", None, self._delete_index),
            ("PUT", points, models.PointInsertOperations, self._upsert),
            ("POST", points, models.PointRequest, self._retrieve),
            ("POST", f"{points}/delete", models.PointsSelector, self._delete),
            ("PUT", f"{points}/vectors", models.UpdateVectors, self._update_vectors),
            ("POST", f"{points}/vectors/delete", models.DeleteVectors, self._delete_vectors),
            ("POST", f"{points}/payload", models.SetPayload, self._set_payload),
            ("PUT", f"{points}/payload", models.SetPayload, self._overwrite_payload),
            ("POST", f"{points}/payload/delete", models.DeletePayload, self._delete_payload),
            ("POST", f"{points}/payload/clear", models.PointsSelector, self._clear_payload),
            ("POST", f"{points}/batch", models.UpdateOperations, self._batch),
            ("POST", f"{points}/scroll", models.ScrollRequest, self._scroll),
            ("POST", f"{points}/count", models.CountRequest, self._count),
            ("POST", f"{points}/query", models.QueryRequest, self._query),
            ("POST", f"{points}/query/batch", models.QueryRequestBatch, self._query_batch),
            ("POST", f"{points}/query/groups", models.QueryGroupsRequest, self._groups),
            ("POST", f"{points}/search/matrix/pairs", models.SearchMatrixRequest, self._pairs),
            ("POST", f"{points}/search/matrix/offsets", models.SearchMatrixRequest, self._offsets),
            ("POST", f"{one}/facet", models.FacetRequest, self._facet),
        )

    # -- collections -------------------------------------------------------------------------

    def _version(self) -> models.VersionInfo:
        return models.VersionInfo(title="qdrant - vector search engine", version=self.version)

    def _create(self, name: str, settings: models.CreateCollection) -> bool:
        self.create_collection(
            name, settings.vectors, settings.sparse_vectors, metadata=settings.metadata
        )
        if settings.strict_mode_config is None and self.strict_mode is not None:
            settings = settings.model_copy(update={"strict_mode_config": self.strict_mode})
        self.collections[name] = StrictCollection(
            settings, self.shards, f"{self.seed} {name}", self.part
        )
        return True

    def _change(self, name: str, change: models.UpdateCollection) -> bool:
        self.update_collection(name, change.sparse_vectors, change.metadata, change.vectors)
        self._of(name).change_settings(change)
        return True

    def _described(self, name: str) -> models.CollectionInfo:
        return self._of(name).described(self.yellow_seconds)

    def _exists(self, name: str) -> models.CollectionExistence:
        return models.CollectionExistence(exists=self.collection_exists(name))

    def _aliases(self, change: models.ChangeAliasesOperation) -> bool:
        return self.update_collection_aliases(change.actions)

    def _aliases_of(self, name: str) -> models.CollectionsAliasesResponse:
        self._of(name)
        return self.get_collection_aliases(name)

    def _create_index(self, name: str, request: models.CreateFieldIndex) -> Any:
        self._of(name).create_payload_index(request.field_name, request.field_schema)
        return WRITES

    def _delete_index(self, name: str, field: str) -> Any:
        self._of(name).delete_payload_index(field)
        return WRITES

    # -- writes ------------------------------------------------------------------------------

    def _upsert(self, name: str, request: Any) -> Any:
        is_batch = isinstance(request, models.PointsBatch)
        points = request.batch if is_batch else request.points
        size = len(points.ids) if is_batch else len(points)
        limits = self._writing(name, size)
        limits.upsert(size)
        self._of(name).upsert(points, request.update_filter, request.update_mode)
        return WRITES

    def _update_vectors(self, name: str, request: models.UpdateVectors) -> Any:
        self._writing(name, len(request.points)).update_vectors(len(request.points))
        self._of(name).update_vectors(request.points, request.update_filter)
        return WRITES

    def _delete_vectors(self, name: str, request: models.DeleteVectors) -> Any:
        selector = self._selected(name, request)
        self._of(name).delete_vectors(request.vector, selector)
        return WRITES

    def _set_payload(self, name: str, request: models.SetPayload) -> Any:
        selector = self._selected(name, request)
        self._of(name).set_payload(request.payload, selector, request.key)
        return WRITES

    def _overwrite_payload(self, name: str, request: models.SetPayload) -> Any:
        selector = self._selected(name, request)
        self._of(name).overwrite_payload(request.payload, selector)
        return WRITES

    def _delete_payload(self, name: str, request: models.DeletePayload) -> Any:
        selector = self._selected(name, request)
        self._of(name).delete_payload(request.keys, selector)
        return WRITES

    def _clear_payload(self, name: str, request: models.PointsSelector) -> Any:
        self._of(name).clear_payload(self._selected(name, request))
        return WRITES

    def _delete(self, name: str, request: models.PointsSelector) -> Any:
        self._of(name).delete(self._selected(name, request))
        return WRITES

    def _batch(self, name: str, request: models.UpdateOperations) -> list[Any]:
        """A server stops at the operation that fails."""
        return [self._operation(name, operation) for operation in request.operations]

    def _operation(self, name: str, operation: Any) -> Any:
        handlers: dict[type, tuple[str, Handler]] = {
            models.UpsertOperation: ("upsert", self._upsert),
            models.DeleteOperation: ("delete", self._delete),
            models.SetPayloadOperation: ("set_payload", self._set_payload),
            models.OverwritePayloadOperation: ("overwrite_payload", self._overwrite_payload),
            models.DeletePayloadOperation: ("delete_payload", self._delete_payload),
            models.ClearPayloadOperation: ("clear_payload", self._clear_payload),
            models.UpdateVectorsOperation: ("update_vectors", self._update_vectors),
            models.DeleteVectorsOperation: ("delete_vectors", self._delete_vectors),
        }
        attribute, handler = handlers[type(operation)]
        return handler(name, getattr(operation, attribute))

    def _selected(self, name: str, request: Any) -> Any:
        """Return the ids or the filter of a request, if the collection allows it."""
        where = getattr(request, "filter", None)
        ids = getattr(request, "points", None)
        cost = len(ids) if ids is not None else 1 + len(list(conditions_of(where)))
        limits = self._writing(name, cost)
        limits.write_filter(where)
        if ids is None and where is None:
            raise Refused(400, "Bad request: No filter or points provided")
        return where if ids is None else list(ids)

    def _writing(self, name: str, cost: int) -> Limits:
        collection = self._of(name)
        limits = Limits(collection)
        self._take("Write", name, limits.writes_per_minute, cost)
        collection.last_write = time.monotonic()
        return limits

    # -- reads -------------------------------------------------------------------------------

    def _retrieve(self, name: str, request: models.PointRequest) -> list[Any]:
        self._reading(name, len(request.ids))
        payload = True if request.with_payload is None else request.with_payload
        return self._of(name).retrieve(request.ids, payload, request.with_vector)

    def _scroll(self, name: str, request: models.ScrollRequest) -> dict[str, Any]:
        default = 10
        limit = request.limit or default
        self._reading(name, 1, request.filter).scroll(limit, request.filter)
        records, offset = self._of(name).scroll(
            request.filter,
            limit,
            _order_of(request.order_by),
            request.offset,
            True if request.with_payload is None else request.with_payload,
            request.with_vector,
        )
        return {"points": records, "next_page_offset": offset}

    def _count(self, name: str, request: models.CountRequest) -> models.CountResult:
        exact = request.exact is not False
        self._reading(name, 1, request.filter).count(exact=exact, where=request.filter)
        return self._of(name).count(request.filter)

    def _facet(self, name: str, request: models.FacetRequest) -> models.FacetResponse:
        limits = self._reading(name, 1, request.filter)
        limits.count(exact=bool(request.exact), where=request.filter)
        return self.facet(name, request.key, request.filter, request.limit or 10)

    def _query(self, name: str, request: models.QueryRequest) -> models.QueryResponse:
        self._reading(name, 1, request.filter).query(request)
        return self._answered(name, request)

    def _query_batch(self, name: str, request: models.QueryRequestBatch) -> list[Any]:
        limits = self._reading(name, len(request.searches))
        limits.batch(len(request.searches))
        for search in request.searches:
            limits.query(search)
        return [self._answered(name, search) for search in request.searches]

    def _answered(self, name: str, request: models.QueryRequest) -> models.QueryResponse:
        """Answer a query exactly: the parameters of indexes have no meaning here."""
        return self.query_points(
            name,
            request.query,
            request.using,
            request.prefetch,
            request.filter,
            None,
            request.limit or 10,
            request.offset,
            request.with_payload or False,
            request.with_vector or False,
            request.score_threshold,
            request.lookup_from,
        )

    def _groups(self, name: str, request: models.QueryGroupsRequest) -> models.GroupsResult:
        size = request.group_size or 3
        limits = self._reading(name, 1, request.filter)
        limits.query(request, rows_per_hit=size)
        limits.group_by(request.group_by)
        return self.query_points_groups(
            name,
            request.group_by,
            request.query,
            request.using,
            request.prefetch,
            request.filter,
            None,
            request.limit or 10,
            size,
            request.with_payload or False,
            request.with_vector or False,
            request.score_threshold,
            request.with_lookup,
            request.lookup_from,
        )

    def _pairs(self, name: str, request: models.SearchMatrixRequest) -> Any:
        return self.search_matrix_pairs(name, *_matrix(request))

    def _offsets(self, name: str, request: models.SearchMatrixRequest) -> Any:
        return self.search_matrix_offsets(name, *_matrix(request))

    # -- helpers -----------------------------------------------------------------------------

    def _of(self, name: str) -> StrictCollection:
        collection = self._get_collection(name)
        assert isinstance(collection, StrictCollection)
        return collection

    def _reading(self, name: str, cost: int, where: models.Filter | None = None) -> Limits:
        limits = Limits(self._of(name))
        self._take("Read", name, limits.reads_per_minute, cost + len(list(conditions_of(where))))
        return limits

    def _take(self, kind: str, name: str, limit: int | None, cost: int) -> None:
        if limit is None:
            return
        place = (self.aliases.get(name, name), kind)
        if place not in self._buckets or self._buckets[place].limit != limit:
            self._buckets[place] = Bucket(kind, limit, self.clock())
        self._buckets[place].take(cost, self.clock())


def _order_of(order: Any) -> Any:
    return models.OrderBy(key=order) if isinstance(order, str) else order


def _matrix(request: models.SearchMatrixRequest) -> tuple[Any, ...]:
    return request.filter, request.limit or 3, request.sample or 10, request.using
