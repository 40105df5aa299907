"""Quality: measures of hubness and retrieval, tuning, diagnosis and reports."""

from milvus_hubness.quality.bank_checks import Suspicion, suspicions
from milvus_hubness.quality.measures import (
    HubnessSummary,
    Interval,
    PositiveRanks,
    antihubs,
    average_precisions,
    confidence_interval,
    hits,
    hubness_summary,
    k_occurrence,
    kurtosis,
    ndcgs,
    nearest,
    paired_difference,
    ranks,
    recall_at_k,
    reciprocal_ranks,
    retrieval_summary,
    robin_hood,
    skewness,
)
from milvus_hubness.quality.recall import RecallGate, measure_recall
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
    "tune",
]
