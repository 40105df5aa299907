"""Clients that speak the original dimension and metric of corrected collections."""

from milvus_hubness.client.sync import HubnessClient

__all__ = ["HubnessClient"]
