"""Hubness correction for Qdrant: migrate, refresh and search corrected collections."""

from qdrant_hubness.client import AsyncHubnessQdrantClient, HubnessQdrantClient
from qdrant_hubness.store import QdrantStore, connect

__all__ = ["AsyncHubnessQdrantClient", "HubnessQdrantClient", "QdrantStore", "connect"]
