"""QdrantStore: the protocol of milvus_hubness.milvus.store for Qdrant."""

from qdrant_hubness.store.requests import connect
from qdrant_hubness.store.store import QdrantStore

__all__ = ["QdrantStore", "connect"]
