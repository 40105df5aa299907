"""Query-adaptive retrieval: a network that learns, from pairs of frozen embeddings, how to see the gallery
for each query (QuARI; Xing, Stylianou, Pless and Jacobs, 2025).
"""

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
