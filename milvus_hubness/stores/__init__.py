"""Databases that hold corrected collections, behind one small protocol."""

from milvus_hubness.stores.base import Batch, CollectionInfo, Key, Store, StoredBank, VectorField
from milvus_hubness.stores.milvus import MilvusStore, connect

__all__ = ["Batch", "CollectionInfo", "Key", "MilvusStore", "Store", "StoredBank", "VectorField", "connect"]
