"""MaxSim by centroids: a share of the work, with an error that is measured.

The tokens of the bank's queries fall into clusters. The largest product of a centroid with a document's
tokens stands for that of each query token of its cluster, so that a document is compared with
centroids, of which there are fewer than tokens, and a bank query sums up what its tokens look up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from milvus_hubness.correction.kernels.checks import whole_number
from milvus_hubness.correction.kernels.libraries import import_faiss
from milvus_hubness.correction.kernels.maxsim import (
    MEMORY_BYTES,
    Numbers,
    Scores,
    maxsim,
    maxsim_tiles,
)
from milvus_hubness.correction.kernels.multi_vectors import MultiVectors, Tokens
from milvus_hubness.correction.kernels.token_rows import TokenRows
from milvus_hubness.errors import InvalidParameter

CENTROIDS = 1_024
"""Default number of centroids, at most one for two tokens of the bank."""
TRAINED_TOKENS = 16
"""Tokens of the bank for each centroid on which k-means runs, drawn at random."""
ITERATIONS = 4
"""Iterations of k-means: more of them cost more than they gain."""
SAMPLED_DOCUMENTS = 64
"""Documents on which the error is measured, spread evenly."""


class CentroidError(NamedTuple):
    """How far scores by centroids are from exact ones, on a sample of documents and all queries."""

    documents: int
    """Number of documents of the sample."""

    mean: float
    """Mean of the exact score less the one by centroids; it changes no ranking."""

    deviation: float
    """Standard deviation of that difference."""

    correlation: float
    """Of exact scores with those by centroids."""

    spread: float
    """Standard deviation of a query's exact scores over the documents, to compare with."""


@dataclass(frozen=True, eq=False)
class Centroids:
    """Clusters of the tokens of queries, which stand for them in scores of documents."""

    queries: MultiVectors
    """The queries whose scores are approximated."""

    centroids: Tokens = field(repr=False)
    """(k, d), the means of the clusters."""

    cluster_of: Numbers = field(repr=False)
    """(total,), the cluster of each token of the queries."""

    @classmethod
    def of(cls, queries: MultiVectors, count: int = CENTROIDS, *, seed: int = 0) -> Centroids:
        """Cluster the tokens of queries by k-means.

        count: of centroids, at most half of the tokens. Equal seeds give equal centroids on one
        machine. Raises InvalidParameter.
        """
        total = len(queries.tokens)
        count = whole_number("count", count)
        if total < 2:
            raise InvalidParameter(f"{queries.what} has {total} token: centroids need at least 2")
        count = min(count, total // 2)

        faiss = import_faiss()
        drawn = np.random.default_rng(seed).permutation(total)[: TRAINED_TOKENS * count]
        means = faiss.Kmeans(
            queries.dim,
            count,
            niter=ITERATIONS,
            seed=seed,
            # FAISS would draw from the sample again, and warn of few tokens for each centroid.
            max_points_per_centroid=TRAINED_TOKENS,
            min_points_per_centroid=1,
        )
        means.train(np.ascontiguousarray(queries.tokens[np.sort(drawn)]))
        _, nearest = means.index.search(queries.tokens, 1)
        clusters, cluster_of = np.unique(nearest[:, 0], return_inverse=True)

        # The mean of all its tokens, not only of those that k-means has seen.
        sums = np.zeros((len(clusters), queries.dim))
        np.add.at(sums, cluster_of, queries.tokens)
        sizes = np.bincount(cluster_of)[:, None]
        return cls(queries, (sums / sizes).astype(np.float32), cluster_of.reshape(-1))

    def __len__(self) -> int:
        return len(self.centroids)

    def documents(self, documents: MultiVectors) -> TokenRows:
        """Return documents whose scores of these queries are approximate.

        They stand where a gallery does, in the fit on a bank of these queries and as the documents
        that get biases. Scores of other queries are exact.
        """
        self.queries.expect_dim(documents.dim, documents.what)
        return replace(TokenRows.documents(documents), centroids=self)

    def scores(self, documents: MultiVectors, *, device: str = "auto") -> Scores:
        """Return approximate MaxSim of documents and all queries, float32 (n, n_queries).

        Raises DimensionMismatch, InvalidParameter.
        """
        scores = np.empty((len(documents), len(self.queries)), np.float32)
        for rows, tile in self.tiles(documents, np.arange(len(self.queries)), device=device):
            scores[rows] = tile
        return scores

    def tiles(
        self,
        documents: MultiVectors,
        numbers: Numbers,
        *,
        device: str = "auto",
        memory_bytes: int = MEMORY_BYTES,
    ) -> Iterator[tuple[slice, Scores]]:
        """Yield slices of the documents with their scores of some queries, as `maxsim_tiles` does."""
        # Each centroid is a query of one token.
        singles = MultiVectors(self.centroids, np.arange(len(self) + 1), what=self.queries.what)
        lookup = self._lookup[numbers]
        # The scores are there twice, in the order of the queries and in that of the documents.
        height = max(1, memory_bytes // (8 * max(1, len(numbers))))
        options: dict[str, Any] = {"device": device, "memory_bytes": memory_bytes}
        for start in range(0, len(documents), height):
            block = documents[start : start + height]
            for part, best in maxsim_tiles(block, singles, **options):
                rows = slice(start + part.start, start + part.stop)
                yield rows, np.ascontiguousarray((lookup @ best.T).T, np.float32)

    @cached_property
    def _lookup(self) -> Any:
        """Return the share of each query's tokens in each cluster, sparse (n_queries, k)."""
        # The import takes a while, which a search service does without.
        from scipy.sparse import csr_array

        shares = np.repeat(1 / self.queries.lengths, self.queries.lengths).astype(np.float32)
        shape = len(self.queries), len(self)
        return csr_array((shares, self.cluster_of, self.queries.offsets), shape=shape)

    def error_on(
        self, documents: MultiVectors, *, sampled: int = SAMPLED_DOCUMENTS, device: str = "auto"
    ) -> CentroidError:
        """Return the error of the scores, measured on a sample of the documents."""
        count = min(whole_number("sampled", sampled), len(documents))
        places = np.linspace(0, len(documents) - 1, count, dtype=np.int64)
        sample = documents[places]
        exact = maxsim(self.queries, sample, device=device).T.astype(np.float64)
        approximate = self.scores(sample, device=device).astype(np.float64)
        difference = exact - approximate
        has_both = min(exact.std(), approximate.std()) > 0
        return CentroidError(
            documents=count,
            mean=float(difference.mean()),
            deviation=float(difference.std()),
            correlation=float(np.corrcoef(exact.ravel(), approximate.ravel())[0, 1])
            if has_both
            else 0.0,
            spread=float(np.sqrt(exact.var(0).mean())),
        )
