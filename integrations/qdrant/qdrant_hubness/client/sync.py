"""HubnessQdrantClient: a QdrantClient that hides the augmented vectors of corrected collections."""

from __future__ import annotations

import time
from typing import Any

from qdrant_client import QdrantClient

from milvus_hubness.extending import (
    STATE_TTL,
    Ask,
    Operation,
    Overrides,
    Pause,
    drive,
    expect_arguments,
)
from qdrant_hubness.client.methods import OF_CLIENTS, Methods
from qdrant_hubness.client.operations import Operations
from qdrant_hubness.store.requests import is_local, turn

DEFAULT_BANK_BUDGET = 1 << 30


class _PlainClient(QdrantClient):
    """A QdrantClient on the connection or the local data of another client, which stays open."""

    def __init__(self, client: QdrantClient) -> None:
        self.__dict__.update(vars(client))
        self._shared = client

    def close(self, grpc_grace: float | None = None, **kwargs: Any) -> None:
        """Do nothing: the other client closes the connection."""


class HubnessQdrantClient(Methods, QdrantClient):  # type: ignore[misc]
    """A replacement of QdrantClient, which corrects searches of corrected collections.

    Calls about other collections pass unchanged. Upserts, queries and reads of a corrected one have
    its original size and distance. Scores and thresholds are s(q, r) − w·(b(r) − c), with c the
    mean bias, for Cosine and Dot; for Euclid the root of the squared distance plus 2w·(b − c),
    negative if that sum is. Returned vectors are unit for Cosine.

    client: a client whose connection or local data to use, instead of the arguments of
    QdrantClient. strength: w of queries without one; None for that of the collection (1.0 unless
    changed). kinds: the factor of kinds of queries without one; None for 1. state_ttl: seconds for
    which the state of a collection stays cached; choose less than the time between two refreshes.
    bank_budget: bytes of banks in memory. Raises InvalidParameter for settings that cannot be meant.
    Its methods raise UnsupportedOperation for operations that corrected collections do not support.
    """

    def __init__(
        self,
        *args: Any,
        client: QdrantClient | None = None,
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
            self.__dict__.update(client.__dict__)
            self._shared = client

        self._shares = client is not None
        operations.connect(local=is_local(self))
        self._operations = operations

    def close(self, grpc_grace: float | None = None, **kwargs: Any) -> None:
        """As QdrantClient.close; the argument `client` stays open."""
        if not getattr(self, "_shares", True):
            super().close(grpc_grace, **kwargs)

    def plain_client(self) -> QdrantClient:
        """Return a QdrantClient of the same connection or local data, which shows collections as
        they are stored.
        """
        return _PlainClient(self)

    def _run(self, operation: Operation[Any]) -> Any:
        return drive(operation, self._answer)

    def _answer(self, step: Any) -> Any:
        if isinstance(step, Ask):
            with turn(self):
                return getattr(super(Methods, self), step.method)(*step.args, **step.options)
        if isinstance(step, Pause):
            return time.sleep(step.seconds)
        return step.work()
