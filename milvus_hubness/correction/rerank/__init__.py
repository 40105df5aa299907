"""Re-rankers: corrections after the search that one bias per item cannot express."""

from milvus_hubness.correction.rerank.rerankers import Adaptive, DynamicGate, GloballyCorrected

__all__ = ["Adaptive", "DynamicGate", "GloballyCorrected"]
