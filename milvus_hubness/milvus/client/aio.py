"""AsyncHubnessClient: HubnessClient for asyncio."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ParamSpec

from pymilvus import AsyncMilvusClient
from pymilvus.client.constants import UNLIMITED

from milvus_hubness.clients.steps import Pause, drive_async
from milvus_hubness.errors import HubnessError
from milvus_hubness.milvus.client.held_errors import HeldErrors
from milvus_hubness.milvus.client.methods import Methods
from milvus_hubness.milvus.client.steps import (
    Effect,
    InStore,
    LearnSchema,
    LoadBank,
    Operation,
    as_milvus,
    refusing,
)
from milvus_hubness.milvus.pymilvus_private import connection_of

if TYPE_CHECKING:
    from milvus_hubness.correction.banks.stored import StoredBank
    from milvus_hubness.correction.rerank import Adaptive, GloballyCorrected
    from milvus_hubness.correction.state import BankReference
    from milvus_hubness.milvus.client.operations import AsyncQueryIterator


P = ParamSpec("P")


def _coroutine(method: Callable[P, Any]) -> Callable[P, Coroutine[Any, Any, Any]]:
    """Return a method of `Methods` as a coroutine function, as AsyncMilvusClient's methods are.

    The method itself returns an awaitable, which is not enough for libraries that look whether a
    function is a coroutine function.
    """

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        return await method(*args, **kwargs)

    return call


KEPT_SECONDS = 0.1
"""How long a bank that was read is still given to tasks that ask for it."""


def _forget(
    loading: dict[BankReference, asyncio.Task[StoredBank]],
    reference: BankReference,
    done: asyncio.Task[StoredBank],
) -> None:
    """Give a reading that has ended to no further task."""
    # After a failure the next task reads again. A bank that was read is in a cache as soon as the tasks
    # that wait for it go on.
    has_failed = done.cancelled() or done.exception() is not None
    seconds = 0 if has_failed else KEPT_SECONDS
    asyncio.get_running_loop().call_later(seconds, loading.pop, reference, None)


class AsyncHubnessClient(Methods, AsyncMilvusClient):
    """An AsyncMilvusClient that searches corrected collections by the corrected score.

    Use it wherever an AsyncMilvusClient is used. It extends AsyncMilvusClient as HubnessClient
    extends MilvusClient, with the same arguments. Tasks may share it. Biases are computed in
    threads. Banks are read in threads as well, over a plain MilvusClient that connects when the
    first bank is needed.
    """

    # -- the methods that both clients share ------------------------------------------------------

    insert = _coroutine(Methods.insert)
    upsert = _coroutine(Methods.upsert)
    delete = _coroutine(Methods.delete)
    write_import_files = _coroutine(Methods.write_import_files)
    match = _coroutine(Methods.match)
    query = _coroutine(Methods.query)
    get = _coroutine(Methods.get)
    hybrid_search = _coroutine(Methods.hybrid_search)

    hubness_state = _coroutine(Methods.hubness_state)
    describe_collection = _coroutine(Methods.describe_collection)
    describe_index = _coroutine(Methods.describe_index)
    list_aliases = _coroutine(Methods.list_aliases)
    create_collection = _coroutine(Methods.create_collection)
    create_index = _coroutine(Methods.create_index)
    load_collection = _coroutine(Methods.load_collection)
    load_partitions = _coroutine(Methods.load_partitions)
    drop_collection = _coroutine(Methods.drop_collection)
    truncate_collection = _coroutine(Methods.truncate_collection)
    drop_partition = _coroutine(Methods.drop_partition)
    rename_collection = _coroutine(Methods.rename_collection)
    restore_snapshot = _coroutine(Methods.restore_snapshot)
    create_alias = _coroutine(Methods.create_alias)
    alter_alias = _coroutine(Methods.alter_alias)
    drop_alias = _coroutine(Methods.drop_alias)

    async def search(  # type: ignore[override]
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
        kinds: float | None = None,
        profile: str | None = None,
        rerank: GloballyCorrected | Adaptive | None = None,
        candidates: int | None = None,
        with_raw_score: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Search as HubnessClient.search does.

        AsyncMilvusClient.search, by whose positions the arguments are named, has no highlighter.
        """
        return await super().search(
            collection_name,
            data,
            filter,
            limit,
            output_fields,
            search_params,
            timeout,
            partition_names,
            anns_field,
            ranker,
            function_chains,
            ids=ids,
            search_aggregation=search_aggregation,
            strength=strength,
            kinds=kinds,
            profile=profile,
            rerank=rerank,
            candidates=candidates,
            with_raw_score=with_raw_score,
            **kwargs,
        )

    # -- steps of operations ----------------------------------------------------------------------

    async def _run(self, operation: Operation[Any]) -> Any:
        """Run an operation; its HubnessError is raised as a MilvusException too."""
        try:
            with HeldErrors():
                return await drive_async(operation, self._answer)
        except HubnessError as error:
            raise as_milvus(error) from error

    @functools.cached_property
    def _loading(self) -> dict[BankReference, asyncio.Task[StoredBank]]:
        """The readings of banks that are running. Made late, as `__init__` is that of `Methods`."""
        return {}

    async def _perform(self, step: Effect) -> Any:
        if isinstance(step, LoadBank):
            return await self._load_bank(step.reference)
        if isinstance(step, InStore):
            return await asyncio.to_thread(self._work_in_store, step)
        if isinstance(step, Pause):
            return await asyncio.sleep(step.seconds)
        if isinstance(step, LearnSchema):
            return self._learn_schema(await connection_of(self), step.collection)

        # Compute: NumPy releases Python's lock meanwhile, so other tasks go on.
        return await asyncio.to_thread(step.work)

    def _work_in_store(self, step: InStore) -> Any:
        return step.work(self._plain.store())

    async def _load_bank(self, reference: BankReference) -> StoredBank:
        """Read the bank once for all tasks that wait for it."""
        loading = self._loading.get(reference)
        if loading is None:
            read = asyncio.to_thread(lambda: self._plain.store().load_bank(reference))
            loading = asyncio.create_task(read)
            self._loading[reference] = loading
            loading.add_done_callback(functools.partial(_forget, self._loading, reference))

        # A task that is cancelled ends its own wait, not the reading.
        return await asyncio.shield(loading)

    # -- methods that differ from those of MilvusClient -------------------------------------------

    async def list_collections(
        self, timeout: float | None = None, *, include_internal: bool = False, **kwargs: Any
    ) -> list[str]:
        """List collections as AsyncMilvusClient does.

        include_internal: list the collections of this package, too.
        """
        operation = self._operations.catalog.list_collections((timeout,), kwargs, include_internal)
        names: list[str] = await self._run(operation)
        return names

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

        Use it as `async for page in client.query_iterator(...)`. Without output_fields rows have
        every field, as from `query`. Invalid arguments raise the same errors as in MilvusClient;
        iterator_cp_file and element_filter raise UnsupportedOperation.
        """
        from milvus_hubness.milvus.client.operations import AsyncQueryIterator

        arguments = {
            "filter": filter,
            "partition_names": partition_names,
            "timeout": timeout,
            **kwargs,
        }
        with refusing():
            return AsyncQueryIterator(
                self._operations.pages,
                self._run,
                collection_name,
                batch_size,
                limit,
                output_fields,
                arguments,
            )

    async def use_database(self, db_name: str, **kwargs: Any) -> None:
        """Switch the database as AsyncMilvusClient.use_database does."""
        await super().use_database(db_name, **kwargs)
        await asyncio.to_thread(self._leave_database, db_name)

    async def close(self) -> None:
        """Close as AsyncMilvusClient.close does.

        It waits at most two seconds until the query samples are written.
        """
        await asyncio.to_thread(self._operations.close)
        await super().close()
        self._operations.states.forget()
        await asyncio.to_thread(self._plain.close)
