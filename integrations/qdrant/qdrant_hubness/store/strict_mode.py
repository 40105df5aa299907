"""Which limits of strict mode no job can keep, and which make it slow: a plan says both. No I/O."""

from __future__ import annotations

from typing import Any

from qdrant_client import models

from qdrant_hubness.store import schema
from qdrant_hubness.store.limits import UNLIMITED, Limits
from qdrant_hubness.store.rows import vector_words

COPY_CONDITIONS = 1
ENABLED_CONDITIONS = 2
"""Conditions of the filter for points without a bias: an enabled collection also looks for points
without a mark.
"""


def obstacles(
    described: Any, field: str, *, points: int, width: int, keys: int, conditions: int
) -> list[str]:
    """Return the limits of strict mode that a job cannot keep, each with the remedy.

    points: their number in the collection. width: of the augmented vectors of `field`. keys,
    conditions: the numbers of payload keys that get an index, and of conditions in a filter.
    """
    limits = Limits.of(described)
    reasons = []
    if limits.conditions < conditions:
        reasons.append(
            _reason(
                "filter_max_conditions",
                limits.conditions,
                "a filter for points without a bias has it",
            )
        )

    indexed = len(described.payload_schema or {}) + keys
    if limits.indexes < indexed:
        why = f"{keys} more payload index{'es' * (keys != 1)} would make {indexed}"
        reasons.append(_reason("max_payload_index_count", limits.indexes, why))

    # A copy has the vectors of the source, of which one is wider.
    dense = schema.dense(described)
    if width and field in dense:
        sizes = {name: params.size for name, params in dense.items()} | {field: width}
        needed = 4 * points * sum(sizes.values())
        if limits.vector_bytes < needed:
            why = f"the copy's vectors take {needed:,}"
            reasons.append(_reason("max_collection_vector_size_bytes", limits.vector_bytes, why))

    if not limits.allows_exact and field in dense and _links(described, dense[field]) == 0:
        reasons.append(
            f"{vector_words(field)} has no graph (hnsw_config.m is 0), and strict mode forbids the "
            "exact searches by which the copy is verified: raise m, or set search_allow_exact to "
            "true"
        )

    return reasons


def _reason(name: str, limit: int, why: str) -> str:
    return f"strict mode limits {name} to {limit:,}, and {why}: raise it with update_collection"


def _links(described: Any, params: models.VectorParams) -> int | None:
    """Return the m of a vector's graph, which 0 turns off."""
    for config in (params.hnsw_config, described.config.hnsw_config):
        # A vector's own setting comes first.
        if config is not None and config.m is not None:
            return int(config.m)
    return None


def remarks(described: Any, points: int) -> list[str]:
    """Return remarks about limits that make a copy slow."""
    # Other limits cost a job nothing: it asks for less at once.
    limits = Limits.of(described)
    if limits.writes_per_minute == UNLIMITED or not points:
        return []

    minutes = -(-points // max(1, limits.writes_per_minute))
    return [
        f"strict mode allows to write {limits.writes_per_minute:,} points a minute "
        f"(write_rate_limit): the job takes {minutes:,} minute{'s' * (minutes != 1)} or more"
    ]
