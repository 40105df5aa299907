"""How far the optimiser of a collection is, which builds its graphs. No I/O."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from qdrant_client import models

from milvus_hubness import StoreError
from milvus_hubness.extending import Standing, log

BUSY_SECONDS = 120.0
"""How long a job waits for an optimiser that writes keep from getting further."""


class Optimiser:
    """Looks at the optimiser of one collection for `wait_until`.

    busy_seconds: after this time without progress while others write, the job goes on: every search
    finds all points, those without a graph by comparing with each.
    """

    def __init__(
        self,
        collection: str,
        *,
        busy_seconds: float = BUSY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._collection = collection
        self._busy_seconds = busy_seconds
        self._clock = clock
        self._fewest_left = float("inf")
        self._progress_at = clock()
        self._counts: set[tuple[int, int]] = set()
        """Numbers of indexed vectors and of points since the last progress."""

    def standing(self, described: Any) -> Standing | None:
        """Return how far the optimiser is, from the result of get_collection; None if there is
        nothing to wait for.

        Raises StoreError if it has failed.
        """
        if described.status == models.CollectionStatus.RED:
            raise StoreError(
                f"Qdrant cannot optimise {self._collection!r}: {_problem_of(described)}: see the "
                "server's log, repair what it names, and run the command again"
            )

        if described.status == models.CollectionStatus.GREEN:
            return None

        indexed = described.indexed_vectors_count or 0
        points = described.points_count or 0
        left = float(points - indexed)
        self._counts.add((indexed, points))
        if left < self._fewest_left:
            self._fewest_left = left
            self._progress_at = self._clock()
            self._counts = {(indexed, points)}

        # Without writes the counts stand still, and only a lasting wait says something.
        text = f"{indexed:,} vectors of {points:,} points are indexed"
        has_writes = len(self._counts) > 1
        if has_writes and self._clock() - self._progress_at >= self._busy_seconds:
            log.warning(
                "writes keep the optimiser of %r busy (%s): this goes on; searches find all "
                "points, and are slower until there are fewer writes",
                self._collection,
                text,
            )
            return None

        return Standing(text, left)


def _problem_of(described: Any) -> str:
    """Return the error of the optimiser in one line."""
    error = getattr(described.optimizer_status, "error", None)
    return " ".join(str(error or "it gives no reason").split())
