"""Late interaction: rows of many vectors each, and MaxSim, the score between them.

    MultiVectors.from_list(arrays)      rows of (t_i, d) tokens as one ragged array
    usable(arrays)                      (n,) whether a row has tokens, all of them finite
    maxsim(queries, documents)          (n_queries, n_documents), the mean over a query's tokens of
                                        the largest inner product with a document's tokens
    maxsim_tiles(documents, queries)    the same in tiles of whole documents, in bounded memory

    Blend().fit(bank, gallery=documents)  as every estimator, on `MultiVectors`: b on that scale
    fitted.bias(documents)                (n,), also of new documents
    Centroids.of(bank).documents(docs)    documents whose biases cost a share of the exact ones
    tune, judge_bank, ranks, nearest      take `MultiVectors` where they take vectors

A database returns the sum over a query's tokens: the mean times their number. Biases are on the
scale of the mean, so that no query needs to know its length: with ⟨d_i, b⟩ in every token of a
document and −1 behind every token of a query, the sum is that of the corrected scores.
"""

from milvus_hubness.correction.kernels.centroids import CentroidError, Centroids
from milvus_hubness.correction.kernels.maxsim import maxsim, maxsim_tiles
from milvus_hubness.correction.kernels.multi_vectors import MultiVectors, usable

__all__ = ["CentroidError", "Centroids", "MultiVectors", "maxsim", "maxsim_tiles", "usable"]
