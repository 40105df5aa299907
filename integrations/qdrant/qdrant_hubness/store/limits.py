"""What strict mode of a collection allows in one request. No I/O."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

UNLIMITED = 2**62


@dataclass(frozen=True)
class Limits:
    """Limits of the requests to one collection. A collection without strict mode has none."""

    rows_per_read: int = UNLIMITED
    """Points that a request may ask for."""

    rows_per_write: int = UNLIMITED
    """Points that a request may write."""

    searches: int = UNLIMITED
    """Searches in one request."""

    hits: int = UNLIMITED
    """Points that a search may ask for, as may each of its prefetches."""

    conditions: int = UNLIMITED
    """Conditions in a filter."""

    indexes: int = UNLIMITED
    """Payload indexes of the collection."""

    vector_bytes: int = UNLIMITED
    """Bytes of all vectors of the collection."""

    writes_per_minute: int = UNLIMITED
    """Points that may be written in a minute."""

    allows_exact: bool = True
    """Whether counts and searches may be exact."""

    needs_indexes: bool = False
    """Whether a filter of a read needs an index of each key in it."""

    @classmethod
    def of(cls, described: Any) -> Limits:
        """Return the limits of a collection, from the result of get_collection."""
        config = getattr(described.config, "strict_mode_config", None)
        if config is None or not config.enabled:
            return cls()

        # A request that costs more than a minute's rate is never carried out.
        reads = _least(config.max_query_limit, config.read_rate_limit)
        return cls(
            rows_per_read=max(1, reads),
            rows_per_write=max(1, _least(config.upsert_max_batchsize, config.write_rate_limit)),
            searches=max(
                1, _least(getattr(config, "search_max_batchsize", None), config.read_rate_limit)
            ),
            hits=_least(config.max_query_limit),
            conditions=_least(config.filter_max_conditions),
            indexes=_least(getattr(config, "max_payload_index_count", None)),
            vector_bytes=_least(config.max_collection_vector_size_bytes),
            writes_per_minute=_least(config.write_rate_limit),
            allows_exact=config.search_allow_exact is not False,
            needs_indexes=config.unindexed_filtering_retrieve is False,
        )


def _least(*limits: int | None) -> int:
    return min((limit for limit in limits if limit is not None), default=UNLIMITED)


NO_LIMITS = Limits()

RECENT_SECONDS = 5.0
"""How long limits count as those of a moment ago."""


class RecentLimits:
    """The limits of collections as they were a moment ago, by names or aliases."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limits: dict[str, tuple[float, Limits]] = {}

    def put(self, collection: str, limits: Limits) -> Limits:
        """Keep and return the limits of a collection that was just described."""
        self._limits[collection] = (self._clock(), limits)
        return limits

    def get(self, collection: str) -> Limits | None:
        """Return the limits of a collection if they are recent."""
        described_at, limits = self._limits.get(collection, (-math.inf, NO_LIMITS))
        return limits if self._clock() - described_at < RECENT_SECONDS else None

    def forget(self, collection: str) -> None:
        self._limits.pop(collection, None)
