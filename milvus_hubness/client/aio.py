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
    """Wrap `method` of AsyncMilvusClient so that the client drops its cached states afterwards."""

    @functools.wraps(method)
    async def call(self: AsyncHubnessClient, *args: Any, **kwargs: Any) -> Any:
        try:
            return await method(self, *args, **kwargs)
        finally:
            self._operations.forget()

    return call


class AsyncHubnessClient(EscapedKeys, AsyncMilvusClient):
    """An AsyncMilvusClient that searches corrected collections by the corrected score.

    Use it wherever an AsyncMilvusClient is used. It extends AsyncMilvusClient as HubnessClient extends
    MilvusClient. Tasks may share it. Biases are computed in threads. Banks are read in threads as well, over
    a plain MilvusClient that connects when the first bank is needed.

    strength: w of every search that names none; None uses the strength of each collection (1.0 unless
    changed). state_ttl: TTL of the cached collection state, in seconds; keep it below the time between two
    refreshes. bank_budget: bytes of query banks that the client holds in memory; for a larger bank, a search
    on the server finds enough of a new row's nearest queries to compute its bias to 0.3% of tau.
    sample_queries: share of queries sampled for online banks; None uses the share of each collection, False
    samples none. A sample has the query's vector, its profile and the time; no search waits for it.
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
        """Write samples over a separate connection, because the sampler writes from a thread."""
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
        """Read the bank once for all tasks that wait for it."""
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

    # -- writes ---------------------------------------------------------------------------------------

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
        """Insert rows as AsyncMilvusClient.insert does, and compute the bias of each from the bank.

        bias="pending" gives rows the mean bias until the next refresh. Raises BankTooLarge if the bank
        neither fits into bank_budget nor can be searched on the server, and DimensionMismatch,
        NonFiniteVectors and, under COSINE, ZeroVectors, each naming the rows.
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
        """Upsert rows as AsyncMilvusClient.upsert does, and compute the bias of rows that have a vector.

        A partial update without a vector leaves the vector and the bias as they are. Raises as `insert` does.
        """
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
        """Write new rows of a corrected collection to Parquet files for a bulk import, and return the paths.

        Each row has its bias. Raises as `insert` does, and UnsupportedOperation if the biases are in a side
        collection or a job works on the collection.
        """
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
        """Delete rows as AsyncMilvusClient.delete does."""
        return await self._run(
            self._operations.delete(collection_name, ids, timeout, filter, partition_name, kwargs)
        )

    # -- searches and reads -----------------------------------------------------------------------------

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
        """Search as AsyncMilvusClient.search does, ranked by the corrected score.

        strength: w; 1 is the full correction, 0 gives the raw ranking and the raw scores. profile: name of
        the bias profile. rerank: fetch more raw candidates and rank them against the bank; with a
        QuariReranker, fetch more corrected candidates and rank them by its model. candidates: how many
        candidates; None uses the number of the re-ranker. with_raw_score: give each hit its uncorrected score
        as "raw_score". On a field that is not corrected, all of these have no effect, except a QuariReranker.

        Raises DimensionMismatch, InvalidInput, InvalidParameter, and UnsupportedOperation for a QuariReranker
        on a field that is not corrected.
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
        """Query as AsyncMilvusClient.query does."""
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
        """Get rows as AsyncMilvusClient.get does."""
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
        """Search as AsyncMilvusClient.hybrid_search does, with corrected scores on corrected fields.

        Merges answers in the client, and raises UnsupportedOperation, in the same cases as
        HubnessClient.hybrid_search.
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
        """Iterate over a query as MilvusClient.query_iterator does.

        Use it as `async for page in client.query_iterator(...)`. Without output_fields rows have every field,
        as from `query`. Invalid arguments raise the same errors as in MilvusClient; iterator_cp_file and
        element_filter raise UnsupportedOperation.
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
        """Read the state of a corrected field from the collection.

        anns_field: the field; it may be None if only one field is corrected. Returns None if the field is not
        corrected, and if no field is named but several are corrected.
        """
        self._operations.forget(collection_name)
        return (await self._run(self._operations.cached_state(collection_name))).state_of(anns_field)

    async def describe_collection(
        self, collection_name: str, timeout: float | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Describe the collection as AsyncMilvusClient.describe_collection does, as the user created it."""
        return await self._run(self._operations.describe_collection(collection_name, timeout, kwargs))

    async def describe_index(
        self, collection_name: str, index_name: str, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Describe an index as AsyncMilvusClient.describe_index does, with the user's metric."""
        return await self._run(self._operations.describe_index(collection_name, index_name, timeout, kwargs))

    async def list_indexes(
        self, collection_name: str, field_name: str | None = "", **kwargs: Any
    ) -> list[str]:
        """List indexes as AsyncMilvusClient.list_indexes does, without that of a hidden vector field."""
        return await self._run(self._operations.list_indexes(collection_name, field_name, kwargs))

    # -- operations that invalidate the cached state ------------------------------------------------------

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
        """Create a collection as AsyncMilvusClient.create_collection does.

        hubness: fields to correct from their first row on. Raises as HubnessClient.create_collection does.
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
        """Create an index as AsyncMilvusClient.create_index does.

        Raises as HubnessClient.create_index does.
        """
        await self._run(self._operations.create_index(collection_name, index_params, timeout, kwargs))

    async def list_collections(
        self, timeout: float | None = None, *, include_internal: bool = False, **kwargs: Any
    ) -> list[str]:
        """List collections as AsyncMilvusClient.list_collections does, without internal ones.

        include_internal: list the collections that this package created for its own use too.
        """
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
        """List aliases as AsyncMilvusClient.list_aliases does, without the aliases that jobs write through.

        include_internal: list these too.
        """
        return shown_aliases(await super().list_aliases(collection_name, timeout, **kwargs), include_internal)

    async def load_collection(
        self, collection_name: str, timeout: float | None = None, **kwargs: Any
    ) -> None:
        """Load as AsyncMilvusClient.load_collection does; load_fields need not name the hidden fields."""
        await self._run(self._operations.load("load_collection", (collection_name,), timeout, kwargs))

    async def load_partitions(
        self,
        collection_name: str,
        partition_names: str | list[str],
        timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Load as AsyncMilvusClient.load_partitions does; load_fields need not name the hidden fields."""
        args = (collection_name, partition_names)
        await self._run(self._operations.load("load_partitions", args, timeout, kwargs))

    async def drop_collection(self, collection_name: str, timeout: float | None = None, **kwargs: Any) -> Any:
        """Drop a collection as AsyncMilvusClient.drop_collection does.

        Its bank, its biases and its job records are dropped too. Raises LeaseHeld while a job works on it,
        and UnsupportedOperation while its writes also go to a copy.
        """
        call = Ask("drop_collection", (collection_name, timeout), kwargs)
        return await self._run(self._operations.drop_collection(collection_name, call, timeout))

    async def truncate_collection(
        self, collection_name: str, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Truncate a collection as AsyncMilvusClient.truncate_collection does, with its biases.

        Raises as `drop_collection` does, and UnsupportedOperation if an unfinished refresh would restore the
        rows.
        """
        call = Ask("truncate_collection", (collection_name, timeout), kwargs)
        return await self._run(self._operations.truncate_collection(collection_name, call, timeout))

    async def drop_partition(
        self, collection_name: str, partition_name: str, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Drop a partition as AsyncMilvusClient.drop_partition does. Raises as `truncate_collection` does."""
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
        """Rename a collection as AsyncMilvusClient.rename_collection does.

        Raises as `truncate_collection` does, and UnsupportedOperation for a corrected collection and another
        database.
        """
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
        """Restore a snapshot as AsyncMilvusClient.restore_snapshot does.

        Raises UnsupportedOperation for a corrected collection if target_db_name is another database, or if
        its biases are in a side collection.
        """
        names = (snapshot_name, source_collection_name, target_collection_name)
        call = Ask("restore_snapshot", (*names, source_db_name, target_db_name, timeout), kwargs)
        database = target_db_name if target_db_name != source_db_name else ""
        return await self._run(
            self._operations.restore_snapshot(source_collection_name, database, call, timeout)
        )

    alter_alias = _retried(AsyncMilvusClient.alter_alias)
    drop_alias = _retried(AsyncMilvusClient.drop_alias)

    async def use_database(self, db_name: str, **kwargs: Any) -> None:
        """Switch the database as AsyncMilvusClient.use_database does."""
        await super().use_database(db_name, **kwargs)
        if self._sampler is not None:
            await asyncio.to_thread(self._sampler.discard)
        self._writing = None
        self._plain_db = db_name
        self._operations.forget()
        await self._close_plain()

    @property
    def hubness_samples(self) -> Sampled:
        """Counts of the queries that this client sampled for online banks."""
        return self._sampler.counts if self._sampler is not None else Sampled(0, 0, 0)

    async def close(self) -> None:
        """Close as AsyncMilvusClient.close does, and wait at most two seconds to write the query samples."""
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
