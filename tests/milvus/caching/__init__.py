"""A Milvus 2.6 in this process, over Milvus Lite, whose proxy answers from a cache as that of a real one was seen to.

It speaks gRPC to an unchanged pymilvus, so that errors are those that pymilvus makes of a server's answers. In what
2.6.19 does otherwise than Milvus Lite:

- DescribeCollection of a missing name answers `code 0, error_code 4`, all other requests `code 100, error_code 4`.
- A description shows the aliases that the collection had when the cache was filled; ListAliases shows those of now.
- A partial upsert reads the whole row, and writes the whole row later; another upsert replaces the row.
- A collection has a number, which stays when it is renamed; it stays loaded, too; with aliases it cannot be dropped.

Indexes, filters and searches are those of Milvus Lite.
"""

from tests.milvus.caching.server import CachingServer

__all__ = ["CachingServer"]
