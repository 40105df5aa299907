"""AsyncHubnessClient: HubnessClient for asyncio."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pymilvus import AnnSearchRequest, AsyncMilvusClient, CollectionSchema, DataType, MilvusClient
from pymilvus.client.constants import UNLIMITED
from pymilvus.milvus_client.index import IndexParams

from milvus_hubness.banks.generations import StoredBank
from milvus_hubness.client.biases import Bias
from milvus_hubness.client.catalog import shown_aliases
from milvus_hubness.client.new_collections import CorrectionConfig, NewCollection
from milvus_hubness.client.operations import AsyncQueryIterator, PagedOperations
from milvus_hubness.client.query_samples import WRITE_SECONDS, Sampled, sampler_for
from milvus_hubness.client.state_cache import PERHAPS_OUTDATED, Failed
from milvus_hubness.client.steps import (
    Ask,
    InStore,
    LearnSchema,
    LoadBank,
    Operation,
    Pause,
    Step,
    T,
    drive_async,
    refusing,
)
from milvus_hubness.client.sync import DEFAULT_BANK_BUDGET
from milvus_hubness.rerank import Adaptive, GloballyCorrected
from milvus_hubness.state import STATE_TTL, BankReference, CollectionState
from milvus_hubness.stores.milvus import MilvusStore
from milvus_hubness.stores.milvus_banks import Sample, put_samples
from milvus_hubness.stores.milvus_server import EscapedKeys, connect

CONNECT_SECONDS = 10.0


def _retried(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """`method` of AsyncMilvusClient, which makes remembered states wrong."""

    @functools.wraps(method)
    async def call(self: AsyncHubnessClient, *args: Any, **kwargs: Any) -> Any:
        try:
            return await method(self, *args, **kwargs)
        finally:
            self._operations.forget()

    return call


class AsyncHubnessClient(EscapedKeys, AsyncMilvusClient):
    """Use it wherever an AsyncMilvusClient is used. It is to that what HubnessClient is to MilvusClient.

    Tasks may share it. Biases are computed in threads, and banks are read there over a plain MilvusClient,
    which is connected when the first one is needed.

    strength: w of every search that names none; None takes each collection's own (1.0 unless changed).
    state_ttl: seconds for which what a collection says of its biases is believed without asking again; keep
    it below the time between two refreshes. bank_budget: bytes of banks that are kept in memory; of a larger
    one the server's own search finds as many of a new row's nearest queries as tell its bias to 0.3% of tau.
    sample_queries: the share of queries sampled for online banks; None for what each collection says,
    False for none. Of a query its vector is kept, its profile and the time; no search waits for it.
    """

    def __init__(
        self,
        uri: str = "http://localhost:19530",
        user: str = "",
        password: str = "",
        db_name: str = "",
        token: str = "",
        timeout: float | None = None,
        *,
        strength: float | None = None,
        state_ttl: float = STATE_TTL,
        bank_budget: int = DEFAULT_BANK_BUDGET,
        sample_queries: float | None = None,
        **kwargs: Any,
    ) -> None:
        with refusing():
            self._sampler = sampler_for(sample_queries, self._put_samples)
        super().__init__(uri, user, password, db_name, token, timeout, **kwargs)
        self._connect_plainly = functools.partial(
            connect,
            uri,
            token,
            timeout=CONNECT_SECONDS if timeout is None else timeout,
            user=user,
            password=password,
            **kwargs,
        )
        self._plain: MilvusClient | None = None
        self._plain_db = db_name
        self._plain_lock = asyncio.Lock()
        self._loading: dict[BankReference, asyncio.Task[StoredBank]] = {}
        self._operations = PagedOperations(strength, state_ttl, bank_budget, self._sampler)
        self._writing: MilvusClient | None = None

    def _put_samples(self, samples_collection: str, samples: Sequence[Sample]) -> None:
        """Over a connection of its own, as the sampler writes from a thread."""
        if self._writing is None:
            self._writing = self._connect_plainly(db_name=self._plain_db)
        put_samples(self._writing, samples_collection, samples, WRITE_SECONDS)

    async def _run(self, operation: Operation[T]) -> T:
        with refusing():
            return await drive_async(operation, self._answer)

    async def _answer(self, step: Step) -> Any:
        if isinstance(step, Ask):
            return await getattr(super(), step.method)(*step.args, **step.options)
        if isinstance(step, LoadBank):
            return await self._bank(step.reference)
        if isinstance(step, InStore):
            return await self._in_store(step.work)
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        if isinstance(step, LearnSchema):
            database = self._generate_call_context().get_db_name()
            (await self._get_connection())._invalidate_schema(step.collection, db_name=database)
            return None
        return await asyncio.to_thread(step.work)

    async def _bank(self, reference: BankReference) -> StoredBank:
        """Read once for all tasks that wait for it."""
        loading = self._loading.get(reference)
        if loading is None:
            read = self._in_store(lambda store: store.load_bank(reference))
            loading = self._loading[reference] = asyncio.create_task(read)
            loading.add_done_callback(lambda _: self._loading.pop(reference))
        return await asyncio.shield(loading)

    async def _in_store(self, work: Callable[[MilvusStore], T]) -> T:
        async with self._plain_lock:
            if self._plain is None:
                self._plain = await asyncio.to_thread(self._connect_plainly, db_name=self._plain_db)
            plain = self._plain
        return await asyncio.to_thread(lambda: work(MilvusStore(plain)))

    # -- rows in --------------------------------------------------------------------------------------

    async def insert(
        self,
        collection_name: str,
        data: dict[str, Any] | list[dict[str, Any]],
        timeout: float | None = None,
        partition_name: str | None = "",
        *,
        bias: Bias = "compute",
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As AsyncMilvusClient.insert; each new row gets its bias from the bank, or with bias="pending" the
        mean one until the next refresh.

        Raises BankTooLarge where the bank neither fits into bank_budget nor can be searched instead, and
        DimensionMismatch, NonFiniteVectors and, under COSINE, ZeroVectors, each naming the rows.
        """
        return await self._run(
            self._operations.write("insert", collection_name, data, timeout, partition_name, bias, kwargs)
        )

    async def upsert(
        self,
        collection_name: str,
        data: dict[str, Any] | list[dict[str, Any]],
        timeout: float | None = None,
        partition_name: str | None = "",
        *,
        bias: Bias = "compute",
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As AsyncMilvusClient.upsert; rows that bring a vector get its bias. A partial update without one
        keeps the vector and the bias as they are. Raises as `insert` does."""
        return await self._run(
            self._operations.write("upsert", collection_name, data, timeout, partition_name, bias, kwargs)
        )

    async def write_import_files(
        self,
        collection_name: str,
        data: Iterable[dict[str, Any]],
        folder: str | Path,
        timeout: float | None = None,
        *,
        bias: Bias = "compute",
    ) -> list[str]:
        """Write new rows of a corrected collection to Parquet files for a bulk import, each with its bias,
        and return the paths. Raises as `insert` does, and UnsupportedOperation where biases are in a side
        collection or a job works on the collection."""
        return await self._run(
            self._operations.write_import_files(collection_name, data, Path(folder), bias, timeout)
        )

    async def delete(
        self,
        collection_name: str,
        ids: list[Any] | str | int | None = None,
        timeout: float | None = None,
        filter: str | None = None,
        partition_name: str | None = None,
        **kwargs: Any,
    ) -> dict[str, int]:
        """As AsyncMilvusClient.delete."""
        return await self._run(
            self._operations.delete(collection_name, ids, timeout, filter, partition_name, kwargs)
        )

    # -- questions --------------------------------------------------------------------------------------

    async def search(
        self,
        collection_name: str,
        data: Any = None,
        filter: str = "",
        limit: int = 10,
        output_fields: list[str] | None = None,
        search_params: dict[str, Any] | None = None,
        timeout: float | None = None,
        partition_names: list[str] | None = None,
        anns_field: str | None = None,
        ranker: Any = None,
        function_chains: Any = None,
        ids: Any = None,
        search_aggregation: Any = None,
        *,
        strength: float | None = None,
        profile: str | None = None,
        rerank: GloballyCorrected | Adaptive | None = None,
        candidates: int | None = None,
        with_raw_score: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As AsyncMilvusClient.search, ranked by the corrected score.

        strength: w; 1 is the full correction, 0 the raw ranking and the raw scores. profile: the set of
        biases to take, by name. rerank: fetch more raw candidates and rank those against the bank instead;
        or, with a QuariReranker, more corrected ones, and rank those by what it has learned. candidates:
        how many these are; None for what the re-ranker says.
        with_raw_score: give each hit its uncorrected score as "raw_score". All are of no effect on a field
        that carries no biases, but for a QuariReranker. Raises DimensionMismatch, InvalidInput,
        InvalidParameter, and for a QuariReranker on such a field UnsupportedOperation.
        """
        options: dict[str, Any] = {
            "timeout": timeout,
            "partition_names": partition_names,
            "anns_field": anns_field,
            "ranker": ranker,
            "function_chains": function_chains,
            "search_aggregation": search_aggregation,
            **kwargs,
        }
        failed = None
        if ids is None and rerank is None and candidates is None:
            quick = self._operations.search_like_before(
                collection_name,
                data,
                filter,
                limit,
                output_fields,
                search_params,
                options,
                strength=strength,
                profile=profile,
                with_raw_score=with_raw_score,
            )
            if quick is not None:
                try:
                    return quick.answer(await super().search(*quick.args, **quick.options))
                except PERHAPS_OUTDATED as error:
                    failed = Failed(quick.cached, error)
        return await self._run(
            self._operations.search(
                collection_name,
                data,
                filter,
                limit,
                output_fields,
                search_params,
                options,
                ids=ids,
                strength=strength,
                profile=profile,
                rerank=rerank,
                candidates=candidates,
                with_raw_score=with_raw_score,
                failed=failed,
            )
        )

    async def query(
        self,
        collection_name: str,
        filter: str = "",
        output_fields: list[str] | None = None,
        timeout: float | None = None,
        ids: Any = None,
        partition_names: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As AsyncMilvusClient.query."""
        return await self._run(
            self._operations.query(
                collection_name, filter, output_fields, timeout, ids, partition_names, kwargs
            )
        )

    async def get(
        self,
        collection_name: str,
        ids: Any,
        output_fields: list[str] | None = None,
        timeout: float | None = None,
        partition_names: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As AsyncMilvusClient.get."""
        return await self._run(
            self._operations.get(collection_name, ids, output_fields, timeout, partition_names, kwargs)
        )

    async def hybrid_search(
        self,
        collection_name: str,
        reqs: list[AnnSearchRequest],
        ranker: Any,
        limit: int = 10,
        output_fields: list[str] | None = None,
        timeout: float | None = None,
        partition_names: list[str] | None = None,
        *,
        strength: float | None = None,
        profile: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """As AsyncMilvusClient.hybrid_search, each request on a corrected field by the corrected score.

        Answers are merged here, and UnsupportedOperation raised, where HubnessClient.hybrid_search does so.
        """
        options = {"timeout": timeout, "partition_names": partition_names, **kwargs}
        return await self._run(
            self._operations.hybrid_search(
                collection_name,
                reqs,
                ranker,
                limit,
                output_fields,
                options,
                strength=strength,
                profile=profile,
            )
        )

    def query_iterator(
        self,
        collection_name: str,
        batch_size: int = 1000,
        limit: int | None = UNLIMITED,
        filter: str | None = "",
        output_fields: list[str] | None = None,
        partition_names: list[str] | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> AsyncQueryIterator:
        """MilvusClient.query_iterator for asyncio: `async for page in client.query_iterator(...)`.

        Without output_fields rows come with every field, as from `query`. Wrong arguments raise what they do
        there, iterator_cp_file and element_filter UnsupportedOperation.
        """
        with refusing():
            return AsyncQueryIterator(
                self._operations,
                self._run,
                collection_name,
                batch_size,
                limit,
                filter,
                output_fields,
                partition_names,
                timeout,
                kwargs,
            )

    # -- descriptions -----------------------------------------------------------------------------------

    async def hubness_state(
        self, collection_name: str, anns_field: str | None = None
    ) -> CollectionState | None:
        """What the collection knows about a field's biases now; None where that carries none, and where none
        is named of several that do."""
        self._operations.forget(collection_name)
        return (await self._run(self._operations.cached_state(collection_name))).state_of(anns_field)

    async def describe_collection(
        self, collection_name: str, timeout: float | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As AsyncMilvusClient.describe_collection, of the collection as the user made it."""
        return await self._run(self._operations.describe_collection(collection_name, timeout, kwargs))

    async def describe_index(
        self, collection_name: str, index_name: str, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """As AsyncMilvusClient.describe_index, with the user's metric."""
        return await self._run(self._operations.describe_index(collection_name, index_name, timeout, kwargs))

    async def list_indexes(
        self, collection_name: str, field_name: str | None = "", **kwargs: Any
    ) -> list[str]:
        """As AsyncMilvusClient.list_indexes, without that of a second field that holds the augmented form."""
        return await self._run(self._operations.list_indexes(collection_name, field_name, kwargs))

    # -- what makes a remembered state wrong --------------------------------------------------------------

    async def create_collection(
        self,
        collection_name: str,
        dimension: int | None = None,
        primary_field_name: str = "id",
        id_type: str | DataType = "int",
        vector_field_name: str = "vector",
        metric_type: str = "COSINE",
        auto_id: bool = False,
        timeout: float | None = None,
        schema: CollectionSchema | None = None,
        index_params: IndexParams | None = None,
        *,
        hubness: CorrectionConfig | Sequence[CorrectionConfig] | None = None,
        **kwargs: Any,
    ) -> None:
        """As AsyncMilvusClient.create_collection. hubness: fields to correct from their first row on.

        Raises as HubnessClient.create_collection does.
        """
        new = NewCollection(
            dimension,
            primary_field_name,
            id_type,
            vector_field_name,
            metric_type,
            auto_id,
            schema,
            index_params,
        )
        try:
            await self._run(
                self._operations.create_collection(collection_name, new, hubness, timeout, kwargs)
            )
        finally:
            self._operations.forget()

    async def create_index(
        self, collection_name: str, index_params: IndexParams, timeout: float | None = None, **kwargs: Any
    ) -> None:
        """As AsyncMilvusClient.create_index. Raises as HubnessClient.create_index does."""
        await self._run(self._operations.create_index(collection_name, index_params, timeout, kwargs))

    async def list_collections(
        self, timeout: float | None = None, *, include_internal: bool = False, **kwargs: Any
    ) -> list[str]:
        """As AsyncMilvusClient.list_collections, without the collections that this package creates beside the
        user's. include_internal: with them."""
        names = await super().list_collections(timeout, **kwargs)
        return names if include_internal else await self._run(self._operations.list_collections(names))

    async def list_aliases(
        self,
        collection_name: str = "",
        timeout: float | None = None,
        *,
        include_internal: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As AsyncMilvusClient.list_aliases, without those by which jobs write. include_internal: with
        them."""
        return shown_aliases(await super().list_aliases(collection_name, timeout, **kwargs), include_internal)

    async def load_collection(
        self, collection_name: str, timeout: float | None = None, **kwargs: Any
    ) -> None:
        """As AsyncMilvusClient.load_collection; load_fields need not name the hidden fields."""
        await self._run(self._operations.load("load_collection", (collection_name,), timeout, kwargs))

    async def load_partitions(
        self,
        collection_name: str,
        partition_names: str | list[str],
        timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        """As AsyncMilvusClient.load_partitions; load_fields need not name the hidden fields."""
        args = (collection_name, partition_names)
        await self._run(self._operations.load("load_partitions", args, timeout, kwargs))

    async def drop_collection(self, collection_name: str, timeout: float | None = None, **kwargs: Any) -> Any:
        """As AsyncMilvusClient.drop_collection; its bank, biases and notes go too.

        Raises LeaseHeld while a job works on it, UnsupportedOperation while its writes go to a copy as well.
        """
        call = Ask("drop_collection", (collection_name, timeout), kwargs)
        return await self._run(self._operations.drop_collection(collection_name, call, timeout))

    async def truncate_collection(
        self, collection_name: str, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """As AsyncMilvusClient.truncate_collection, with the biases. Raises as `drop_collection` does, and
        UnsupportedOperation where a refresh was stopped that would bring rows back."""
        call = Ask("truncate_collection", (collection_name, timeout), kwargs)
        return await self._run(self._operations.truncate_collection(collection_name, call, timeout))

    async def drop_partition(
        self, collection_name: str, partition_name: str, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """As AsyncMilvusClient.drop_partition. Raises as `truncate_collection` does."""
        call = Ask("drop_partition", (collection_name, partition_name, timeout), kwargs)
        return await self._run(self._operations.drop_partition(collection_name, call, timeout))

    async def rename_collection(
        self,
        old_name: str,
        new_name: str,
        target_db: str | None = "",
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """As AsyncMilvusClient.rename_collection. Raises as `truncate_collection` does, and
        UnsupportedOperation for a corrected one and another database."""
        call = Ask("rename_collection", (old_name, new_name, target_db, timeout), kwargs)
        return await self._run(self._operations.rename_collection(old_name, target_db, call, timeout))

    async def restore_snapshot(
        self,
        snapshot_name: str,
        source_collection_name: str,
        target_collection_name: str,
        source_db_name: str = "",
        target_db_name: str = "",
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """As AsyncMilvusClient.restore_snapshot. Raises UnsupportedOperation for a corrected collection and
        another database, and where its biases are in a side collection."""
        names = (snapshot_name, source_collection_name, target_collection_name)
        call = Ask("restore_snapshot", (*names, source_db_name, target_db_name, timeout), kwargs)
        database = target_db_name if target_db_name != source_db_name else ""
        return await self._run(
            self._operations.restore_snapshot(source_collection_name, database, call, timeout)
        )

    alter_alias = _retried(AsyncMilvusClient.alter_alias)
    drop_alias = _retried(AsyncMilvusClient.drop_alias)

    async def use_database(self, db_name: str, **kwargs: Any) -> None:
        """As AsyncMilvusClient.use_database."""
        await super().use_database(db_name, **kwargs)
        if self._sampler is not None:
            await asyncio.to_thread(self._sampler.discard)
        self._writing = None
        self._plain_db = db_name
        self._operations.forget()
        await self._close_plain()

    @property
    def hubness_samples(self) -> Sampled:
        """What became of the queries that this client sampled for online banks."""
        return self._sampler.counts if self._sampler is not None else Sampled(0, 0, 0)

    async def close(self) -> None:
        """As AsyncMilvusClient.close, once the queries that were sampled are written, for which it waits two
        seconds at most."""
        if self._sampler is not None:
            await asyncio.to_thread(self._sampler.close)
            if self._writing is not None:
                await asyncio.to_thread(self._writing.close)
        await super().close()
        self._operations.forget()
        await self._close_plain()

    async def _close_plain(self) -> None:
        async with self._plain_lock:
            plain, self._plain = self._plain, None
            if plain is not None:
                await asyncio.to_thread(plain.close)
