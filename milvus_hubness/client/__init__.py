"""Clients that use the original dimension and metric of corrected collections."""

from milvus_hubness.client.aio import AsyncHubnessClient
from milvus_hubness.client.new_collections import CorrectionConfig
from milvus_hubness.client.sync import HubnessClient

__all__ = ["AsyncHubnessClient", "CorrectionConfig", "HubnessClient"]
