"""What a client does on corrected collections, step by step. No I/O: see `steps`."""

from __future__ import annotations

from milvus_hubness.client.searches import Searching
from milvus_hubness.client.writes import Writing


class Operations(Writing, Searching):
    """All of it, over one memory."""
