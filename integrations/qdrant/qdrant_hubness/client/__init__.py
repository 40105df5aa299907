"""Clients of Qdrant that search corrected collections and hide their augmented vectors."""

from qdrant_hubness.client.aio import AsyncHubnessQdrantClient
from qdrant_hubness.client.sync import HubnessQdrantClient

__all__ = ["AsyncHubnessQdrantClient", "HubnessQdrantClient"]
