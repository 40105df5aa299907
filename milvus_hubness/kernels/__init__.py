"""The two primitives that every estimator is made of, and their relatives."""

from milvus_hubness.kernels.approximate import ApproximateBank
from milvus_hubness.kernels.devices import kernel_on, resolve_device
from milvus_hubness.kernels.ivf import ApproximateMean, IvfIndex, topk_mean_ivf
from milvus_hubness.kernels.primitives import TopK, logsumexp, topk, topk_mean

__all__ = [
    "ApproximateBank",
    "ApproximateMean",
    "IvfIndex",
    "TopK",
    "kernel_on",
    "logsumexp",
    "resolve_device",
    "topk",
    "topk_mean",
    "topk_mean_ivf",
]
