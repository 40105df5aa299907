"""Banks as people name them: a file, or collection:NAME."""

from __future__ import annotations

from milvus_hubness.banks import QueryBank
from milvus_hubness.stores.base import Store

COLLECTION_PREFIX = "collection:"
WHERE_FROM = 'see "Where do I get reference queries?" in the README'


def read_bank(store: Store, spec: str, column: str | None = None) -> QueryBank:
    """column: the array, column or vector field, needed where there are several. Raises what QueryBank.load
    and the store raise."""
    if spec.startswith(COLLECTION_PREFIX):
        return store.read_vectors(spec.removeprefix(COLLECTION_PREFIX), column)
    return QueryBank.load(spec, column)
