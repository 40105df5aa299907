"""Databases with corrected collections, behind one protocol."""

from milvus_hubness.banks.generations import Batch, Key, StoredBank
from milvus_hubness.stores.milvus import MilvusStore
from milvus_hubness.stores.milvus_server import connect
from milvus_hubness.stores.protocols import Store
from milvus_hubness.stores.records import CollectionInfo, VectorField

__all__ = ["Batch", "CollectionInfo", "Key", "MilvusStore", "Store", "StoredBank", "VectorField", "connect"]
