"""QdrantStore: `milvus_hubness.extending.Store` for Qdrant."""

from qdrant_hubness.store.requests import connect
from qdrant_hubness.store.store import QdrantStore

__all__ = ["QdrantStore", "connect"]
