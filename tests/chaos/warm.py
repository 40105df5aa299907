"""What the processes of trials need, imported once by the process from which they are forked."""

import gc

import scipy.sparse

import milvus_hubness
from milvus_hubness.cli import enable, migrate, refresh
from tests.chaos import jobs, places

__all__ = ["enable", "jobs", "migrate", "places", "refresh", "scipy"]

for name in dir(milvus_hubness):
    getattr(milvus_hubness, name)
# No collection in a forked process walks, and copies, what all of them share.
gc.collect()
gc.freeze()
