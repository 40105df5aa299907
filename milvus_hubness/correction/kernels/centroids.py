"""MaxSim by centroids: a share of the work, with an error that is measured.

The tokens of the bank's queries fall into clusters. The largest product of a centroid with a document's
tokens stands for that of each query token of its cluster, so that a document is compared with
centroids, of which there are fewer than tokens, and a bank query sums up what its tokens look up. The
scores of a document's best queries, which decide its bias, are then computed exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from milvus_hubness.basics.requirements import naming_extras
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

CENTROIDS = 2_048
"""Default number of centroids; there is at most one for two tokens of the bank."""
REFINED = 48
"""Default number of the best bank queries of each document whose scores are exact."""
FINDS = 10
"""Best documents of each query whose scores are exact, if there are `LEAST_DOCUMENTS`."""
LEAST_DOCUMENTS = 200
"""Documents below which those would be too many of all."""
GROUP = 32
"""Centroids of a coarse cluster: tokens are first divided among clusters, then within each."""
TRAINED_TOKENS = 64
"""Tokens for each coarse cluster on which k-means runs, drawn at random."""
ITERATIONS = 3
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

    refined: int = REFINED
    """Of each document, the scores of so many queries, the best by centroids, are computed exactly.
    The others get the mean difference of these."""

    @classmethod
    def of(
        cls,
        queries: MultiVectors,
        count: int = CENTROIDS,
        *,
        refined: int = REFINED,
        seed: int = 0,
    ) -> Centroids:
        """Cluster the tokens of queries by k-means.

        count: of centroids, about, and at most half of the tokens. Equal seeds give equal centroids
        on one machine. Raises InvalidParameter.
        """
        total = len(queries.tokens)
        count = whole_number("count", count)
        refined = whole_number("refined", refined, at_least=0)
        if total < 2:
            raise InvalidParameter(f"{queries.what} has {total} token: centroids need at least 2")

        cluster_of = _clusters(queries.tokens, min(count, total // 2), seed)
        return cls(queries, _means(queries.tokens, cluster_of), cluster_of, refined)

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
        # Of few queries, all would be refined.
        if len(numbers) <= 2 * self.refined:
            some = self.queries[numbers]
            yield from maxsim_tiles(documents, some, device=device, memory_bytes=memory_bytes)
            return

        # Each centroid is a query of one token.
        singles = MultiVectors(self.centroids, np.arange(len(self) + 1), what=self.queries.what)
        lookup = self._lookup[numbers]
        # The scores, a copy of them, and flags.
        height = max(1, memory_bytes // (9 * max(1, len(numbers))))
        options: dict[str, Any] = {"device": device, "memory_bytes": memory_bytes}
        for start in range(0, len(documents), height):
            block = documents[start : start + height]
            scores = np.empty((len(block), len(numbers)), np.float32)
            for rows, best in maxsim_tiles(block, singles, **options):
                scores[rows] = (lookup @ best.T).T
            if self.refined:
                self._refine(scores, block, numbers)
            yield slice(start, start + len(block)), scores

    def _refine(self, scores: Scores, documents: MultiVectors, numbers: Numbers) -> None:
        """Replace the best scores (n, m) of each document by exact ones, and shift its others.

        Of many documents, the best scores of each query are replaced too. A mean of tokens has a
        smaller product than the tokens of a cluster have in the mean, so that all others would be
        too low. numbers: (m,), of the queries.
        """
        limits = np.partition(scores, -self.refined, axis=1)[:, -self.refined, None]
        is_best = scores >= limits
        if len(documents) >= LEAST_DOCUMENTS:
            is_best |= scores >= np.partition(scores, -FINDS, axis=0)[-FINDS]

        for number, (row, best) in enumerate(zip(scores, is_best, strict=True)):
            columns = np.flatnonzero(best)
            some = self.queries[numbers[columns]]
            # So small a product, of tokens gathered on the host, is NumPy's wherever the rest is.
            best_products = (some.tokens @ documents[number].T).max(1)
            sums = np.add.reduceat(best_products, some.offsets[:-1], dtype=np.float64)
            exact = (sums / some.lengths).astype(np.float32)
            row += (exact - row[columns]).mean(dtype=np.float64)
            row[columns] = exact

    @cached_property
    def _lookup(self) -> Any:
        """Return the share of each query's tokens in each cluster, sparse (n_queries, k)."""
        # The import takes a while, which a search service does without.
        with naming_extras():
            from scipy.sparse import csr_array

        shares = np.repeat(1 / self.queries.lengths, self.queries.lengths).astype(np.float32)
        shape = len(self.queries), len(self)
        return csr_array((shares, self.cluster_of, self.queries.offsets), shape=shape)

    def error_on(
        self, documents: MultiVectors, *, sampled: int = SAMPLED_DOCUMENTS, device: str = "auto"
    ) -> CentroidError:
        """Return the error of the scores, measured on a sample of the documents."""
        count = min(whole_number("sampled", sampled), len(documents))
        sampled_rows = np.linspace(0, len(documents) - 1, count, dtype=np.int64)
        sample = documents[sampled_rows]
        exact = maxsim(self.queries, sample, device=device).T.astype(np.float64)
        approximate = self.scores(sample, device=device).astype(np.float64)
        difference = exact - approximate
        both_vary = min(exact.std(), approximate.std()) > 0
        # Equal scores have no correlation with any others.
        correlation = 0.0
        if both_vary:
            correlation = float(np.corrcoef(exact.ravel(), approximate.ravel())[0, 1])
        return CentroidError(
            documents=count,
            mean=float(difference.mean()),
            deviation=float(difference.std()),
            correlation=correlation,
            spread=float(np.sqrt(exact.var(0).mean())),
        )


def _clusters(tokens: Tokens, count: int, seed: int) -> Numbers:
    """Return the cluster of each token (t,), numbered from 0 without a gap, about `count` of them.

    Each of a few coarse clusters is divided by itself: tokens are compared with the centroids of
    one coarse cluster only.
    """
    drawn = np.random.default_rng(seed).permutation(len(tokens))
    coarse_count = max(1, count // GROUP)
    sample = tokens[np.sort(drawn[: TRAINED_TOKENS * coarse_count])]
    coarse = _nearest(sample, coarse_count, seed, tokens)

    clusters = np.empty(len(tokens), np.int64)
    first = 0
    for cluster in range(coarse_count):
        members = np.flatnonzero(coarse == cluster)
        if not len(members):
            continue
        share = max(1, min(len(members), round(count * len(members) / len(tokens))))
        inside = tokens[members]
        clusters[members] = first + _nearest(inside, share, seed, inside)
        first += share
    return np.unique(clusters, return_inverse=True)[1].reshape(-1)


def _nearest(sample: Tokens, count: int, seed: int, tokens: Tokens) -> Numbers:
    """Return the number of the nearest mean of each token, of k-means on a sample."""
    if count == 1:
        return np.zeros(len(tokens), np.int64)
    faiss = import_faiss()
    means = faiss.Kmeans(
        sample.shape[1],
        count,
        niter=ITERATIONS,
        seed=seed,
        # FAISS would draw a part of the sample, and warn of few tokens for each mean.
        max_points_per_centroid=len(sample),
        min_points_per_centroid=1,
    )
    means.train(np.ascontiguousarray(sample))
    _, nearest = means.index.search(np.ascontiguousarray(tokens), 1)
    return np.asarray(nearest[:, 0], np.int64)


def _means(tokens: Tokens, cluster_of: Numbers) -> Tokens:
    """Return the mean of the tokens of each cluster, (k, d)."""
    order = np.argsort(cluster_of, kind="stable")
    sizes = np.bincount(cluster_of)
    starts = np.cumsum(sizes) - sizes
    sums = np.add.reduceat(tokens[order], starts, axis=0, dtype=np.float64)
    return np.asarray(sums / sizes[:, None], np.float32)
