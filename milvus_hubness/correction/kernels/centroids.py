"""MaxSim by centroids: a share of the work, with an error that is measured.

The tokens of the bank's queries fall into clusters. The largest product of a centroid with a document's
tokens stands for that of each query token of its cluster, so that a document is compared with
centroids, of which there are fewer than tokens, and a bank query sums up what its tokens look up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.kernels.checks import whole_number
from milvus_hubness.correction.kernels.libraries import import_faiss
from milvus_hubness.correction.kernels.maxsim import maxsim, maxsim_tiles
from milvus_hubness.correction.kernels.multi_vectors import MultiVectors, Tokens
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

    cluster_of: npt.NDArray[np.int64] = field(repr=False)
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

    def scores(
        self, documents: MultiVectors, *, device: str = "auto", **memory: Any
    ) -> npt.NDArray[np.float32]:
        """Return approximate MaxSim of documents and all queries, float32 (n, n_queries).

        memory: as `maxsim_tiles` takes it. Raises DimensionMismatch, InvalidParameter.
        """
        scores = np.empty((len(documents), len(self.queries)), np.float32)
        # Each centroid is a query of one token.
        singles = MultiVectors(self.centroids, np.arange(len(self) + 1), what=self.queries.what)
        lookup = self._lookup()
        for rows, best in maxsim_tiles(documents, singles, device=device, **memory):
            scores[rows] = (lookup @ best.T).T
        return scores

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
