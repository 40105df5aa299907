"""Hubness correction for Qdrant: collections migrated, refreshed and searched with corrected scores."""

from qdrant_hubness.client import AsyncHubnessQdrantClient, HubnessQdrantClient
from qdrant_hubness.store import QdrantStore, connect

__all__ = ["AsyncHubnessQdrantClient", "HubnessQdrantClient", "QdrantStore", "connect"]
