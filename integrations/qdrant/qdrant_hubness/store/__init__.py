"""Qdrant behind the protocol that the jobs of milvus_hubness are written against."""

from qdrant_hubness.store.requests import connect
from qdrant_hubness.store.store import QdrantStore

__all__ = ["QdrantStore", "connect"]
