"""What is not one number per item, done on top of the search."""

from milvus_hubness.rerank.adaptive import Adaptive
from milvus_hubness.rerank.dual_dynamic import DualDynamicGate
from milvus_hubness.rerank.dynamic import DynamicGate
from milvus_hubness.rerank.globally_corrected import GloballyCorrected

__all__ = ["Adaptive", "DualDynamicGate", "DynamicGate", "GloballyCorrected"]
