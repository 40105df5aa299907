"""What people call the columns of queries, of keys and of counts in their files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from milvus_hubness.basics.defaults import (
    GRADE_COLUMN,
    KEY_COLUMN,
    QUERY_COLUMN,
    QUERY_ID_COLUMN,
    WEIGHT_COLUMN,
)
from milvus_hubness.errors import InvalidInput, name_some

QUERY_NAMES = (
    *(QUERY_COLUMN, "queries", "query_vector", "query_vectors"),
    *("query_embedding", "query_embeddings", "vector", "vectors"),
    *("embedding", "embeddings", "emb", "embs"),
)
"""Names of a column with the vectors of queries. Of several that hold vectors, the first is taken."""

ITEM_NAMES = (
    *("item", "items", "vector", "vectors", "embedding", "embeddings", "emb", "embs", "gallery"),
    *("item_vector", "item_embedding", "image_embedding", "document_embedding"),
)
"""Names of a column with the vectors of items."""

KEY_NAMES = (
    *(KEY_COLUMN, "keys", "id", "ids", "label", "labels", "pk", "item_id", "item_ids"),
    *("doc_id", "product_id", "corpus_id", "positive", "positives", "target", "targets"),
)
"""Names of a column with the keys of right rows. Of several, `key` or `keys` is taken."""

FURTHER_KEY_NAMES = (
    *("sku", "skus", "asin", "isbn", "gtin", "ean", "uuid", "guid", "slug", "docid", "document_id"),
    *("article_id", "image_id", "photo_id", "asset_id", "object_id", "listing_id"),
    *("product", "products", "item", "items", "doc", "docs", "article", "asset"),
)
"""Names of a column with keys where none has one of KEY_NAMES."""

KEY_OPTION = "--key-column"
"""The option of commands that names the column of keys."""

MOST_COLUMNS = 12
"""Most columns of a file that a message lists."""

COUNT_NAMES = ("count", "counts")
"""Names of a column with how often users sent each query of a bank."""

USUAL_NAMES = {
    GRADE_COLUMN: (GRADE_COLUMN, "grades", "relevance"),
    WEIGHT_COLUMN: (WEIGHT_COLUMN, "weights", *COUNT_NAMES),
    QUERY_ID_COLUMN: (QUERY_ID_COLUMN, "query_ids", "qid"),
}
"""Further columns of judgements: our name, and what it may be called."""


def named_so(names: Sequence[str], usual: Iterable[str]) -> list[str]:
    """Return those of the names that are usual ones, in the order of these, in any case of letters."""
    by_lower: dict[str, list[str]] = {}
    for name in names:
        by_lower.setdefault(name.lower(), []).append(name)
    return [name for each in usual for name in by_lower.get(each, ())]


def vectors_named(
    names: Sequence[str], usual: Iterable[str], holds_vectors: Callable[[str], bool]
) -> str | None:
    """Return the name of the column of vectors by its usual name.

    Without one that holds vectors, it is the first of such a name, whose fault is then the one to
    name; None without any.
    """
    # A column `query` may hold texts, with the vectors in `embedding`.
    candidates = named_so(names, usual)
    return next(filter(holds_vectors, candidates), candidates[0] if candidates else None)


def listed(names: Sequence[str]) -> str:
    """Return the columns of a file for a message."""
    return name_some(list(map(repr, names)), MOST_COLUMNS) or "none"


def key_named(
    names: Sequence[str],
    source: str,
    chosen: str | None = None,
    *,
    holds_vectors: Callable[[str], bool] = lambda name: False,
) -> str | None:
    """Return the name of the column of keys; None without one.

    chosen: by the caller. Raises InvalidInput if there is no such column, and for several that may
    be meant.
    """
    if chosen is not None:
        if chosen in names:
            return chosen
        raise InvalidInput(f"{source} has no column {chosen!r}: it has {listed(names)}")

    # Vectors of items may be called `item`, and so may keys.
    candidates = named_so(names, KEY_NAMES) or [
        name for name in named_so(names, FURTHER_KEY_NAMES) if not holds_vectors(name)
    ]
    if not candidates:
        return None
    if candidates[0].lower() in KEY_NAMES[:2] or len(candidates) == 1:
        return candidates[0]
    raise InvalidInput(
        f"{source} has several columns that may hold the keys of right rows, "
        f"{listed(candidates)}: name that which does with {KEY_OPTION}, or rename it to {KEY_COLUMN!r}"
    )
