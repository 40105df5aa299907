"""AsyncHubnessClient: HubnessClient for asyncio."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from pymilvus import AsyncMilvusClient
from pymilvus.client.constants import UNLIMITED

from milvus_hubness.milvus.client.collection_methods import CollectionMethods
from milvus_hubness.milvus.client.methods import Methods, drive_async
from milvus_hubness.milvus.client.steps import (
    Effect,
    InStore,
    LearnSchema,
    LoadBank,
    Pause,
    refusing,
)
from milvus_hubness.milvus.pymilvus_private import connection_of

if TYPE_CHECKING:
    from milvus_hubness.correction.banks.stored import StoredBank
    from milvus_hubness.correction.state import BankReference
    from milvus_hubness.milvus.client.operations import AsyncQueryIterator


class AsyncHubnessClient(Methods, AsyncMilvusClient):
    """An AsyncMilvusClient that searches corrected collections by the corrected score.

    Use it wherever an AsyncMilvusClient is used. It extends AsyncMilvusClient as HubnessClient extends
    MilvusClient, with the same arguments. Tasks may share it. Biases are computed in threads. Banks are read
    in threads as well, over a plain MilvusClient that connects when the first bank is needed.
    """

    _drive = staticmethod(drive_async)

    @functools.cached_property
    def _loading(self) -> dict[BankReference, asyncio.Task[StoredBank]]:
        return {}

    async def _perform(self, step: Effect) -> Any:
        if isinstance(step, LoadBank):
            return await self._load_bank(step.reference)
        if isinstance(step, InStore):
            work = step.work
            return await asyncio.to_thread(lambda: work(self._plain.store()))
        if isinstance(step, Pause):
            return await asyncio.sleep(step.seconds)
        if isinstance(step, LearnSchema):
            return self._learn_schema(await connection_of(self), step.collection)
        return await asyncio.to_thread(step.work)

    async def _load_bank(self, reference: BankReference) -> StoredBank:
        """Read the bank once for all tasks that wait for it."""
        loading = self._loading.get(reference)
        if loading is None:
            read = asyncio.to_thread(lambda: self._plain.store().load_bank(reference))
            loading = self._loading[reference] = asyncio.create_task(read)
            loading.add_done_callback(lambda _: self._loading.pop(reference))
        return await asyncio.shield(loading)

    async def list_collections(
        self, timeout: float | None = None, *, include_internal: bool = False, **kwargs: Any
    ) -> list[str]:
        """List collections as AsyncMilvusClient does; include_internal lists those of this package, too."""
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

        Use it as `async for page in client.query_iterator(...)`. Without output_fields rows have every field,
        as from `query`. Invalid arguments raise the same errors as in MilvusClient; iterator_cp_file and
        element_filter raise UnsupportedOperation.
        """
        from milvus_hubness.milvus.client.operations import AsyncQueryIterator

        arguments = {
            "filter": filter,
            "partition_names": partition_names,
            "timeout": timeout,
            **kwargs,
        }
        with refusing():
            pages = self._operations.pages
            return AsyncQueryIterator(
                pages, self._run, collection_name, batch_size, limit, output_fields, arguments
            )

    async def use_database(self, db_name: str, **kwargs: Any) -> None:
        """Switch the database as AsyncMilvusClient.use_database does."""
        await super().use_database(db_name, **kwargs)
        await asyncio.to_thread(self._leave_database, db_name)

    async def close(self) -> None:
        """Close as AsyncMilvusClient.close does, and wait at most two seconds to write the query samples."""
        if self._sampler is not None:
            await asyncio.to_thread(self._sampler.close)
        await super().close()
        self._operations.states.forget()
        await asyncio.to_thread(self._plain.close)


def _coroutine(method: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return a method of Methods as a coroutine function, as AsyncMilvusClient's methods are."""

    @functools.wraps(method)
    async def call(self: AsyncHubnessClient, *args: Any, **kwargs: Any) -> Any:
        return await method(self, *args, **kwargs)

    return call


def _without(
    name: str, method: Callable[..., Coroutine[Any, Any, Any]]
) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return the method without one parameter, which AsyncMilvusClient does not have."""
    signature = inspect.signature(method)
    place = list(signature.parameters).index(name)

    @functools.wraps(method)
    async def call(*args: Any, **kwargs: Any) -> Any:
        return await method(
            *args[:place], *([None] if args[place:] else []), *args[place:], **kwargs
        )

    left = [parameter for parameter in signature.parameters.values() if parameter.name != name]
    call.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
    return call


for _name, _method in (vars(CollectionMethods) | vars(Methods)).items():
    if inspect.isfunction(_method) and not _name.startswith("_"):
        setattr(AsyncHubnessClient, _name, _coroutine(_method))
AsyncHubnessClient.search = _without("highlighter", AsyncHubnessClient.search)  # type: ignore[method-assign]
