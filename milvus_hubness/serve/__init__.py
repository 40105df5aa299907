"""The service that keeps the biases of several collections up to date."""

from milvus_hubness.serve.config_file import ConfigFile, database_faults, file_faults
from milvus_hubness.serve.first_config import first_config
from milvus_hubness.serve.reconcile import OpenStore
from milvus_hubness.serve.service import Service
from milvus_hubness.serve.worker import ServicePolicy

__all__ = [
    "ConfigFile",
    "OpenStore",
    "Service",
    "ServicePolicy",
    "database_faults",
    "file_faults",
    "first_config",
]
