"""Clients of Qdrant to which corrected collections look as if they had never been changed."""

from qdrant_hubness.client.aio import AsyncHubnessQdrantClient
from qdrant_hubness.client.sync import HubnessQdrantClient

__all__ = ["AsyncHubnessQdrantClient", "HubnessQdrantClient"]
