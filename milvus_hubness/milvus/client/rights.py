"""The rights that a write needs on a side collection, checked before its first request. No I/O.

A write to a collection with a side collection goes to both. If the second one refused it, an insert
would have stored its row already, without a bias, and whoever repeated it would double the row.
"""

from __future__ import annotations

from typing import Literal

import grpc
from pymilvus import DataType
from pymilvus.exceptions import MilvusException

from milvus_hubness.clients.steps import Ask
from milvus_hubness.correction.codec.base import EPOCH_FIELD
from milvus_hubness.correction.codec.beside import SIDE_FIELD, SIDE_WIDTH
from milvus_hubness.errors import StoreError
from milvus_hubness.jobs.store.ownership import CollectionId, Helper
from milvus_hubness.milvus.client.held_errors import recovered_from
from milvus_hubness.milvus.client.state_cache import CachedState, StateCache
from milvus_hubness.milvus.client.steps import Operation
from milvus_hubness.milvus.store import schema as milvus_schema
from milvus_hubness.milvus.store.rights import NO_PARTITION, is_denied
from milvus_hubness.milvus.store.server import is_lite, message_of

Method = Literal["upsert", "delete"]
_CHECKED = "the rights on the side collection of %r were checked by a request without effect (%s)"


class SideRights:
    """Which rights on side collections the server has granted to this client."""

    def __init__(self, states: StateCache) -> None:
        self._states = states
        self._granted: set[tuple[CollectionId, Helper, Method]] = set()

    def expect(self, cached: CachedState, method: Method, timeout: float | None) -> Operation[None]:
        """Raise StoreError unless this client may write to the side collections of a collection.

        The first write checks it; later ones cost nothing.
        """
        yield from self._states.expect_sides(cached, timeout)
        for side in cached.sides:
            right = (cached.collection_id, side, method)
            if right not in self._granted:
                yield from self._ask(cached, side.collection, method, timeout)
                self._granted.add(right)

    def forget(self) -> None:
        """Ask again before the next write: the server has refused one."""
        self._granted.clear()

    def _ask(
        self, cached: CachedState, side: str, method: Method, timeout: float | None
    ) -> Operation[None]:
        # Milvus Lite has no users.
        if is_lite((yield from self._states.server_version())):
            return

        owner = cached.collection_id.name
        request = yield from _request_without_effect(side, method, timeout)
        try:
            yield request
        except (MilvusException, grpc.RpcError) as error:
            if is_denied(error):
                raise StoreError(
                    f"nothing was written to {owner!r}: its biases are in {side!r}, which this user "
                    f"may not change: {message_of(error)}. Grant the right, and write again"
                ) from error

            # The partition is missing, or the collection: the write itself reports that.
            recovered_from(error, owner, _CHECKED)


def _request_without_effect(side: str, method: Method, timeout: float | None) -> Operation[Ask]:
    """Return a request that needs the right of a method. Servers look at rights before anything else."""
    in_no_partition = {"partition_name": NO_PARTITION}
    described = yield Ask("describe_collection", (side, timeout))
    key_field = milvus_schema.key_field(described)
    is_number = key_field["type"] == DataType.INT64
    key = 0 if is_number else "0"
    if method == "delete":
        return Ask("delete", (side, [key], timeout), in_no_partition)

    row = {key_field["name"]: key, SIDE_FIELD: [0.0] * SIDE_WIDTH, EPOCH_FIELD: 0}
    return Ask("upsert", (side, [row], timeout), in_no_partition)
