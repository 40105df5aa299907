"""The two primitives that every estimator is made of, and their relatives."""

from milvus_hubness.kernels.dense import TopK, logsumexp, topk, topk_mean
from milvus_hubness.kernels.devices import resolve_device
from milvus_hubness.kernels.ivf import ApproximateMean, IvfIndex, topk_mean_ivf

__all__ = [
    "ApproximateMean",
    "IvfIndex",
    "TopK",
    "logsumexp",
    "resolve_device",
    "topk",
    "topk_mean",
    "topk_mean_ivf",
]
