"""What the processes of trials need, imported once by the process from which they are forked."""

import gc
from importlib import import_module

import prometheus_client
import scipy.sparse

import milvus_hubness
from milvus_hubness import cli
from tests.chaos import jobs, places

__all__ = ["jobs", "places", "prometheus_client", "scipy"]

for name in set(cli.MODULES.values()) & {"enable", "migrate", "refresh"}:
    import_module(f"milvus_hubness.cli.{name}")
for name in dir(milvus_hubness):
    getattr(milvus_hubness, name)
# No collection in a forked process walks, and copies, what all of them share.
gc.collect()
gc.freeze()
