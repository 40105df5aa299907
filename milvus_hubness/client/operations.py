"""What a client does on corrected collections, step by step. No I/O: see `steps`."""

from __future__ import annotations

from milvus_hubness.client.catalog import Catalog
from milvus_hubness.client.mirror import DualWriting
from milvus_hubness.client.searches import Searching


class Operations(DualWriting, Searching, Catalog):
    """All of it, over one memory."""
