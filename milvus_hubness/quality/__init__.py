"""Is there hubness, and does correcting it help: measures and their confidence intervals."""

from milvus_hubness.quality.bootstrap import Interval, confidence_interval, paired_difference
from milvus_hubness.quality.hubness import (
    HubnessSummary,
    antihubs,
    hubness_summary,
    k_occurrence,
    kurtosis,
    robin_hood,
    skewness,
    top_hubs,
)
from milvus_hubness.quality.ranking import PositiveRanks, ranks
from milvus_hubness.quality.recall import RecallGate, measure_recall
from milvus_hubness.quality.retrieval import (
    average_precisions,
    hits,
    ndcgs,
    recall_at_k,
    reciprocal_ranks,
    retrieval_summary,
)
from milvus_hubness.quality.search import nearest
from milvus_hubness.quality.soundness import Suspicion, suspicions
from milvus_hubness.quality.tuning import Tuning, tune

__all__ = [
    "HubnessSummary",
    "Interval",
    "PositiveRanks",
    "RecallGate",
    "Suspicion",
    "Tuning",
    "antihubs",
    "average_precisions",
    "confidence_interval",
    "hits",
    "hubness_summary",
    "k_occurrence",
    "kurtosis",
    "measure_recall",
    "ndcgs",
    "nearest",
    "paired_difference",
    "ranks",
    "recall_at_k",
    "reciprocal_ranks",
    "retrieval_summary",
    "robin_hood",
    "skewness",
    "suspicions",
    "top_hubs",
    "tune",
]
