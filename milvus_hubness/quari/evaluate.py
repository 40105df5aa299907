"""What a network is worth on labelled pairs: raw, corrected, and corrected candidates that it re-ranked."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.errors import InvalidInput
from milvus_hubness.quality import nearest, paired_difference, ranks, retrieval_summary
from milvus_hubness.quality.ranking import PositiveRanks
from milvus_hubness.quality.retrieval import hits
from milvus_hubness.quari.pairs import Vectors, unit
from milvus_hubness.quari.reranker import QUERIES_AT_ONCE, QuariReranker

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Of n queries the place, from 1, of each one's answer; all (n,) int64. corrected: None without biases.
    milliseconds: of the re-ranking, per query, on one machine as it was then."""

    raw: Places
    corrected: Places | None
    reranked: Places
    candidates: int
    milliseconds: float

    def to_dict(self) -> dict[str, Any]:
        """R@k, MRR, mAP@10 and nDCG@10 of each ranking, 0 … 1, and what re-ranking changes R@1 by against
        the others, with 95% intervals over the queries."""
        rankings = {"raw": self.raw, "corrected": self.corrected, "reranked": self.reranked}
        there = {name: places for name, places in rankings.items() if places is not None}
        first = {name: hits(as_ranks(places), 1) for name, places in there.items()}
        return {
            "queries": len(self.raw),
            "candidates": self.candidates,
            "milliseconds": self.milliseconds,
            **{name: retrieval_summary(as_ranks(places)) for name, places in there.items()},
            "gain": {
                name: paired_difference(before, first["reranked"])._asdict()
                for name, before in first.items()
                if name != "reranked"
            },
        }


def evaluate(
    reranker: QuariReranker,
    queries: Vectors,
    gallery: Vectors,
    answers: npt.NDArray[np.int64],
    *,
    query_vectors: Vectors | None = None,
    stored: Vectors | None = None,
    bias: npt.NDArray[np.float32] | None = None,
) -> Evaluation:
    """Exact searches in memory. queries (n, d), n ≥ 2; gallery (g, d); answers (n,): numbers of items.

    asked (n, d') and stored (g, d'): with the similarity as their inner product, the cosine unless given.
    bias (g,): what the search subtracts, and so where its candidates come from. An answer that is no
    candidate keeps the place it had. Raises DimensionMismatch, InvalidInput.
    """
    if len(queries) < 2:
        raise InvalidInput(f"an evaluation needs at least two pairs, not {len(queries)}")
    query_vectors = unit(queries) if query_vectors is None else query_vectors
    stored = unit(gallery) if stored is None else stored
    raw = ranks(query_vectors, stored, answers).best
    before = raw if bias is None else ranks(query_vectors, stored, answers, bias).best
    count = min(reranker.candidates, len(gallery))
    candidates = nearest(query_vectors, stored, count, bias)
    after, seconds = before.copy(), 0.0
    for start in range(0, len(queries), QUERIES_AT_ONCE):
        part = slice(start, start + QUERIES_AT_ONCE)
        chosen = candidates[part]
        vectors = list(gallery[chosen])
        started = time.perf_counter()
        scores = np.stack(reranker.scores(queries[part], vectors))
        seconds += time.perf_counter() - started
        if bias is not None and reranker.correction:
            scores = scores - reranker.correction * bias[chosen]
        is_answer = chosen == answers[part, None]
        own = np.where(is_answer, scores, -np.inf).max(1)
        better = ((scores >= own[:, None]) & ~is_answer).sum(1)
        after[part] = np.where(is_answer.any(1), 1 + better, np.maximum(before[part], count + 1))
    corrected = None if bias is None else before
    return Evaluation(raw, corrected, after, count, 1000 * seconds / len(queries))


def as_ranks(places: Places) -> PositiveRanks:
    """As the measures of `quality` take them, one answer a query."""
    return PositiveRanks(places, np.arange(len(places) + 1))
