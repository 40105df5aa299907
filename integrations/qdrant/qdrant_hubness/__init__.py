"""Hubness correction for Qdrant: migrate, refresh and search corrected collections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qdrant_hubness.client import AsyncHubnessQdrantClient, HubnessQdrantClient
    from qdrant_hubness.store import QdrantStore, connect

__all__ = ["AsyncHubnessQdrantClient", "HubnessQdrantClient", "QdrantStore", "connect"]


def __getattr__(name: str) -> Any:
    """Import what is used, when it is used: the command needs no clients, which load pymilvus."""
    if name in ("AsyncHubnessQdrantClient", "HubnessQdrantClient"):
        from qdrant_hubness import client as module
    elif name in ("QdrantStore", "connect"):
        from qdrant_hubness import store as module  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    value = getattr(module, name)
    globals()[name] = value
    return value
