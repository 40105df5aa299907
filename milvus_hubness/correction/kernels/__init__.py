"""The two primitives of the estimators, top-k mean and log-sum-exp, and the kernels that compute them."""

from milvus_hubness.correction.kernels.primitives import (
    TopK,
    kernel_for,
    logsumexp,
    topk,
    topk_mean,
)

__all__ = ["TopK", "kernel_for", "logsumexp", "topk", "topk_mean"]
