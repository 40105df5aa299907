"""The server: what it answers in place of Milvus Lite, and where it listens."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc
from milvus_lite.adapter.grpc.servicer import MilvusServicer
from milvus_lite.db import MilvusLite
from pymilvus.grpc_gen import common_pb2, milvus_pb2, milvus_pb2_grpc

VERSION = "2.6.19"
CODE_NOT_FOUND = 100
CODE_PARAMETER_INVALID = 1100
ALIAS_SECONDS = 30.0
"""For how long a real server was seen to describe former aliases, at least."""
MESSAGE_BYTES = 256 * 2**20
DEFAULT_GROUP = "__default_resource_group"

Name = tuple[str, str]
"""A database and the real name of a collection."""


class CachingServer:
    """The server, over a temporary folder.

    alias_seconds: for how long a description shows the aliases of the cache. clock: of the cache.
    """

    def __init__(
        self,
        *,
        alias_seconds: float = ALIAS_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.alias_seconds = alias_seconds
        self.clock = clock
        self.before_late_write: Callable[[], object] = lambda: None
        """What happens between the read and the write of a partial upsert."""
        self._folder = ""
        self._port = 0

    @staticmethod
    def unavailable() -> str | None:
        return None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="caching-milvus-")
        self._lite = MilvusLite(self._folder)
        self._listener = grpc.server(
            futures.ThreadPoolExecutor(max_workers=10),
            options=[
                ("grpc.max_receive_message_length", MESSAGE_BYTES),
                ("grpc.max_send_message_length", MESSAGE_BYTES),
                # Milvus Lite hangs up on clients that ping it, and a server does not.
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 1),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.so_reuseport", 0),
            ],
        )
        servicer = _CachingProxy(self._lite, self)
        milvus_pb2_grpc.add_MilvusServiceServicer_to_server(servicer, self._listener)
        self._port = self._listener.add_insecure_port("127.0.0.1:0")
        self._listener.start()

    def stop(self) -> None:
        self._listener.stop(grace=1).wait()
        self._lite.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> CachingServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


class _CachingProxy(MilvusServicer):  # type: ignore[misc]
    """The requests that a server answers otherwise than Milvus Lite."""

    def __init__(self, lite: MilvusLite, server: CachingServer) -> None:
        super().__init__(lite)
        self._server = server
        self._numbers = itertools.count(450_000_000_000_000_001)
        self._ids: dict[Name, int] = {}
        self._described_aliases: dict[int, tuple[float, list[str]]] = {}
        """By the number of a collection, when its aliases were read, and which there were."""
        self._names = threading.RLock()
        """A server changes names in one step; Milvus Lite closes a collection first."""

    def Connect(self, request: Any, context: Any) -> Any:
        answer = super().Connect(request, context)
        answer.server_info.build_tags = VERSION
        answer.server_info.deploy_mode = "STANDALONE"
        return answer

    def GetVersion(self, request: Any, context: Any) -> Any:
        return milvus_pb2.GetVersionResponse(status=_status(), version=VERSION)

    def CreateCollection(self, request: Any, context: Any) -> Any:
        status = super().CreateCollection(request, context)
        if not status.error_code:
            self._aliases_in_cache(self._name(request, context))
        return status

    def DescribeCollection(self, request: Any, context: Any) -> Any:
        answer = super().DescribeCollection(request, context)
        if answer.status.error_code == common_pb2.CollectionNotExists:
            database, name = self._name(request, context)
            reason = f"can't find collection[database={database}][collection={name}]"
            missing = _status(error_code=common_pb2.CollectionNotExists, reason=reason)
            return milvus_pb2.DescribeCollectionResponse(status=missing)
        if not answer.status.error_code:
            name = (self._name(request, context)[0], answer.collection_name)
            answer.collectionID = self._id(name)
            answer.aliases.extend(self._aliases_in_cache(name))
        return answer

    def ListAliases(self, request: Any, context: Any) -> Any:
        name = self._name(request, context)
        if request.collection_name and not self._exists(name):
            return milvus_pb2.ListAliasesResponse(status=_not_found(name))
        return super().ListAliases(request, context)

    def Flush(self, request: Any, context: Any) -> Any:
        database = self._database_name(request, context)
        for collection in request.collection_names:
            if not self._exists((database, collection)):
                return milvus_pb2.FlushResponse(status=_not_found((database, collection)))
        return super().Flush(request, context)

    def DropCollection(self, request: Any, context: Any) -> Any:
        with self._names:
            name = self._name(request, context)
            if aliases := self._aliases(name):
                reason = (
                    f"unable to drop the collection [{name[1]}] because it has associated aliases "
                    f"{aliases}, please remove all aliases before dropping the collection"
                )
                return _status(CODE_PARAMETER_INVALID, common_pb2.UnexpectedError, reason)
            status = super().DropCollection(request, context)
            if not status.error_code:
                self._ids.pop(name, None)
            return status

    def RenameCollection(self, request: Any, context: Any) -> Any:
        with self._names:
            database = self._database_name(request, context)
            former = (database, self._db.resolve_collection_name(request.oldName, database))
            was_loaded = self._is_loaded(former)
            status = super().RenameCollection(request, context)
            if not status.error_code:
                self._ids[database, request.newName] = self._id(former)
                del self._ids[former]
                if was_loaded:
                    self._db.get_collection(request.newName, database_name=database).load()
            return status

    def GetReplicas(self, request: Any, context: Any) -> Any:
        replica = milvus_pb2.ReplicaInfo(
            replicaID=1,
            collectionID=request.collectionID,
            resource_group_name=DEFAULT_GROUP,
        )
        return milvus_pb2.GetReplicasResponse(status=_status(), replicas=[replica])

    def _get_collection(self, request: Any, context: Any) -> Any:
        with self._names:
            collection = super()._get_collection(request, context)
        if not isinstance(request, milvus_pb2.UpsertRequest):
            return collection
        if request.partial_update:
            return _UpdatedInPart(collection, self._server)
        return _Replaced(collection)

    def _name(self, request: Any, context: Any) -> Name:
        database = self._database_name(request, context)
        return database, self._db.resolve_collection_name(request.collection_name, database)

    def _exists(self, name: Name) -> bool:
        database, collection = name
        return bool(self._db.has_collection(collection, database))

    def _id(self, name: Name) -> int:
        with self._names:
            if name not in self._ids:
                self._ids[name] = next(self._numbers)
            return self._ids[name]

    def _aliases(self, name: Name) -> list[str]:
        database, collection = name
        if not self._exists(name):
            return []
        return list(self._db.list_aliases(collection, database_name=database))

    def _aliases_in_cache(self, name: Name) -> list[str]:
        """Return the aliases that the collection had when they were read last."""
        number = self._id(name)
        read_at, aliases = self._described_aliases.get(number, (-float("inf"), []))
        if self._server.clock() - read_at >= self._server.alias_seconds:
            aliases = self._aliases(name)
            self._described_aliases[number] = (self._server.clock(), aliases)
        return aliases

    def _is_loaded(self, name: Name) -> bool:
        database, collection = name
        if not self._exists(name):
            return False
        found = self._db.get_collection(collection, database_name=database)
        return bool(found.load_state == "loaded")


class _Replaced:
    """A collection of Milvus Lite in which an upsert replaces the whole row."""

    def __init__(self, collection: Any) -> None:
        self._collection = collection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collection, name)

    def upsert(self, records: list[dict[str, Any]], **options: Any) -> Any:
        return self._collection.insert(records, **options)


class _UpdatedInPart(_Replaced):
    """A collection in which time passes between the read and the write of a partial upsert."""

    def __init__(self, collection: Any, server: CachingServer) -> None:
        super().__init__(collection)
        self._server = server

    def upsert(self, records: list[dict[str, Any]], **options: Any) -> Any:
        # Milvus Lite reads the rows and merges; what it inserts then comes to `insert` below.
        return type(self._collection).upsert(self, records, **options)

    def insert(self, records: list[dict[str, Any]], **options: Any) -> Any:
        self._server.before_late_write()
        return self._collection.insert(records, **options)


def _status(code: int = 0, error_code: int = 0, reason: str = "") -> common_pb2.Status:
    return common_pb2.Status(code=code, error_code=error_code, reason=reason)


def _not_found(name: Name) -> common_pb2.Status:
    database, collection = name
    reason = f"collection not found[database={database}][collection={collection}]"
    return _status(CODE_NOT_FOUND, common_pb2.CollectionNotExists, reason)
