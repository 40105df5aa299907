"""What is not one number per item, done on top of the search."""

from milvus_hubness.rerank.rerankers import Adaptive, DualDynamicGate, DynamicGate, GloballyCorrected

__all__ = ["Adaptive", "DualDynamicGate", "DynamicGate", "GloballyCorrected"]
