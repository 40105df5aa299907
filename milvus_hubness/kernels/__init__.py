"""The two primitives of the estimators, top-k mean and log-sum-exp, and related functions."""

from milvus_hubness.kernels.approximate import ApproximateBank
from milvus_hubness.kernels.primitives import TopK, kernel_on, logsumexp, resolve_device, topk, topk_mean

__all__ = ["ApproximateBank", "TopK", "kernel_on", "logsumexp", "resolve_device", "topk", "topk_mean"]
