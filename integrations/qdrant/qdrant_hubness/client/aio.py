"""AsyncHubnessQdrantClient: HubnessQdrantClient for asyncio."""

from __future__ import annotations

import asyncio
from typing import Any

from qdrant_client import AsyncQdrantClient

from milvus_hubness.extending import STATE_TTL, Ask, Pause, drive_async
from qdrant_hubness.client.methods import Methods
from qdrant_hubness.client.operations import Operations
from qdrant_hubness.client.state_cache import Operation, T
from qdrant_hubness.client.sync import DEFAULT_BANK_BUDGET
from qdrant_hubness.store.requests import is_local


class AsyncHubnessQdrantClient(Methods, AsyncQdrantClient):  # type: ignore[misc]
    """HubnessQdrantClient for asyncio, in place of AsyncQdrantClient: every method is awaited."""

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
        if client is None:
            super().__init__(*args, **kwargs)
        else:
            # With the connections of the given client, which stays the owner.
            self.__dict__.update(client.__dict__)
            self._shared = client

        self._shares = client is not None
        self._operations = Operations(strength, kinds, state_ttl, bank_budget, local=is_local(self))

    async def close(self, grpc_grace: float | None = None, **kwargs: Any) -> None:
        """As AsyncQdrantClient.close; the argument `client` stays open."""
        if not self._shares:
            await super().close(grpc_grace, **kwargs)

    async def _run(self, operation: Operation[T]) -> T:
        return await drive_async(operation, self._answer)

    async def _answer(self, step: Any) -> Any:
        if isinstance(step, Ask):
            answer = getattr(super(Methods, self), step.method)(*step.args, **step.options)
            return await answer if hasattr(answer, "__await__") else answer

        if isinstance(step, Pause):
            return await asyncio.sleep(step.seconds)
        return await asyncio.to_thread(step.work)
