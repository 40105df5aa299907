"""Training and judging of a QuARI network, from a file of pairs and the rows of a collection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks import QueryBank
from milvus_hubness.errors import InvalidInput
from milvus_hubness.jobs.gallery import read_gallery
from milvus_hubness.jobs.pairs import QUERY_COLUMN, read_pairs
from milvus_hubness.jobs.progress import Progress, silent
from milvus_hubness.layout import Floats
from milvus_hubness.quari import Pairs, QuariReranker
from milvus_hubness.quari.evaluate import Evaluation, evaluate
from milvus_hubness.stores.base import Store

ITEM_COLUMN = "item"

OpenStore = Callable[[], Store]


@dataclass(frozen=True, eq=False)
class Labelled:
    """queries (n, d), gallery (g, d), answers (n,): numbers of items. search_request, stored: with the
    collection's similarity as their inner product, and biases (g,), where there is a collection."""

    queries: Floats
    gallery: Floats
    answers: npt.NDArray[np.int64]
    asked: Floats | None = None
    stored: Floats | None = None
    biases: Floats | None = None

    @property
    def pairs(self) -> Pairs:
        """To train on. Raises as Pairs does."""
        return Pairs(self.queries, self.gallery, self.answers)

    def evaluate(self, reranker: QuariReranker) -> Evaluation:
        """What the network is worth on them. Raises DimensionMismatch, InvalidInput."""
        reranker.expect_dim(self.queries.shape[1])
        return evaluate(
            reranker,
            self.queries,
            self.gallery,
            self.answers,
            query_vectors=self.asked,
            stored=self.stored,
            bias=self.biases,
        )


def read_labelled(
    path: str,
    collection: str | None = None,
    *,
    open_store: OpenStore | None = None,
    field: str | None = None,
    progress: Progress = silent,
) -> Labelled:
    """Pairs of a .npz, .parquet or .arrow file: `query` (n, d), and beside it either `item` (n, d), the
    vector of each one's answer, or with a collection `key` (n,), of the row that answers.

    Equal items are one. Raises UnreadableFile, InvalidInput, DimensionMismatch, and what reading the
    collection raises.
    """
    if collection is None:
        queries = QueryBank.load(path, QUERY_COLUMN)
        items = QueryBank.load(path, ITEM_COLUMN)
        if len(queries) != len(items):
            raise InvalidInput(f"{path} has {len(queries)} queries for {len(items)} items")
        gallery, answers = np.unique(items.vectors, axis=0, return_inverse=True)
        return Labelled(queries.vectors, gallery, answers.astype(np.int64))
    if open_store is None:
        raise InvalidInput("a collection needs a store to be read from")
    queries, keys = read_pairs(path)
    store = open_store()
    rows = read_gallery(store, store.info(collection), field, progress=progress)
    queries.expect_dim(rows.layout.dim, "the field")
    return Labelled(
        queries.vectors,
        rows.vectors,
        rows.positions(keys),
        rows.layout.reduce_queries(queries.vectors),
        rows.layout.reduce_items(rows.vectors),
        rows.biases,
    )
