"""AsyncHubnessQdrantClient: HubnessQdrantClient for asyncio."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from qdrant_client import AsyncQdrantClient

from milvus_hubness.extending import (
    STATE_TTL,
    Ask,
    Operation,
    Overrides,
    Pause,
    drive_async,
    expect_arguments,
)
from qdrant_hubness.client.methods import OF_CLIENTS, Methods
from qdrant_hubness.client.operations import Operations
from qdrant_hubness.client.sync import DEFAULT_BANK_BUDGET
from qdrant_hubness.store.requests import is_local

P = ParamSpec("P")


def _coroutine(method: Callable[P, Any]) -> Callable[P, Coroutine[Any, Any, Any]]:
    """Return a method of `Methods` as a coroutine function, as AsyncQdrantClient's methods are.

    The method itself returns an awaitable, which is not enough for libraries that look whether a
    function is a coroutine function.
    """

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        return await method(*args, **kwargs)

    return call


class AsyncHubnessQdrantClient(Methods, AsyncQdrantClient):
    """HubnessQdrantClient for asyncio, in place of AsyncQdrantClient: every method is awaited."""

    query_points = _coroutine(Methods.query_points)
    query_batch_points = _coroutine(Methods.query_batch_points)
    query_points_groups = _coroutine(Methods.query_points_groups)
    search_matrix_pairs = _coroutine(Methods.search_matrix_pairs)
    search_matrix_offsets = _coroutine(Methods.search_matrix_offsets)
    retrieve = _coroutine(Methods.retrieve)
    scroll = _coroutine(Methods.scroll)
    get_collection = _coroutine(Methods.get_collection)
    create_collection = _coroutine(Methods.create_collection)
    recreate_collection = _coroutine(Methods.recreate_collection)
    update_collection = _coroutine(Methods.update_collection)
    delete_collection = _coroutine(Methods.delete_collection)
    update_collection_aliases = _coroutine(Methods.update_collection_aliases)
    recover_snapshot = _coroutine(Methods.recover_snapshot)
    upsert = _coroutine(Methods.upsert)
    update_vectors = _coroutine(Methods.update_vectors)
    delete_vectors = _coroutine(Methods.delete_vectors)
    delete = _coroutine(Methods.delete)
    set_payload = _coroutine(Methods.set_payload)
    overwrite_payload = _coroutine(Methods.overwrite_payload)
    delete_payload = _coroutine(Methods.delete_payload)
    clear_payload = _coroutine(Methods.clear_payload)
    batch_update_points = _coroutine(Methods.batch_update_points)
    upload_points = _coroutine(Methods.upload_points)
    upload_collection = _coroutine(Methods.upload_collection)

    def __init__(
        self,
        *args: Any,
        client: AsyncQdrantClient | None = None,
        strength: float | None = None,
        kinds: float | None = None,
        state_ttl: float = STATE_TTL,
        bank_budget: int = DEFAULT_BANK_BUDGET,
        **kwargs: Any,
    ) -> None:
        # Before anything is opened, as a refusal leaves no client that could close it.
        expect_arguments(kwargs, OF_CLIENTS)
        operations = Operations(Overrides(strength, kinds), state_ttl, bank_budget)
        if client is None:
            super().__init__(*args, **kwargs)
        else:
            # With the connections of the given client, which stays the owner.
            self.__dict__.update(client.__dict__)
            self._shared = client

        self._shares = client is not None
        operations.connect(local=is_local(self))
        self._operations = operations

    async def close(self, grpc_grace: float | None = None, **kwargs: Any) -> None:
        """As AsyncQdrantClient.close; the argument `client` stays open."""
        if not self._shares:
            await super().close(grpc_grace, **kwargs)

    async def _run(self, operation: Operation[Any]) -> Any:
        return await drive_async(operation, self._answer)

    async def _answer(self, step: Any) -> Any:
        if isinstance(step, Ask):
            answer = getattr(super(Methods, self), step.method)(*step.args, **step.options)
            return await answer if hasattr(answer, "__await__") else answer

        if isinstance(step, Pause):
            return await asyncio.sleep(step.seconds)
        return await asyncio.to_thread(step.work)
