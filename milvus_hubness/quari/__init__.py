"""Query-adaptive retrieval (QuARI): a network that adapts frozen embeddings of the gallery to each query,
learned from labelled pairs (Xing, Stylianou, Pless and Jacobs, 2025)."""

from milvus_hubness.quari.checkpoint import Checkpoint, Epoch
from milvus_hubness.quari.model import Adaptation, Quari, QuariConfig
from milvus_hubness.quari.pairs import Pairs, TrainingSettings
from milvus_hubness.quari.reranker import QuariReranker
from milvus_hubness.quari.train import train, validate

__all__ = [
    "Adaptation",
    "Checkpoint",
    "Epoch",
    "Pairs",
    "Quari",
    "QuariConfig",
    "QuariReranker",
    "TrainingSettings",
    "train",
    "validate",
]
