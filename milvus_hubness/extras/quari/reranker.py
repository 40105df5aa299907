"""Re-ranking by a trained QuARI network, and its evaluation on labelled pairs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from milvus_hubness.basics.defaults import MEMORY, QUERY_COLUMN
from milvus_hubness.basics.progress import Progress
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.kernels.checks import convert_fields, finite_number, whole_number
from milvus_hubness.correction.kernels.operands import as_tensor, full_precision
from milvus_hubness.correction.kernels.policy import resolve_device
from milvus_hubness.errors import DimensionMismatch, EncoderMismatch, InvalidInput
from milvus_hubness.extras.quari.checkpoint import Checkpoint
from milvus_hubness.extras.quari.model import Adaptation, Quari, cosines, transformed_queries
from milvus_hubness.extras.quari.pairs import Pairs, unit
from milvus_hubness.extras.quari.settings import QuariConfig, TrainingSettings
from milvus_hubness.extras.quari.train import train
from milvus_hubness.jobs.common.gallery import read_gallery
from milvus_hubness.jobs.common.judgements import Judgements
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.quality.measures import nearest, paired_difference
from milvus_hubness.quality.retrieval import PositiveRanks, hits, ranks, retrieval_summary
from milvus_hubness.quality.right_items import RightItems

if TYPE_CHECKING:
    from typing import Self  # Python 3.10 does not have it.

QUERIES_AT_ONCE = 16
"""Number of queries whose adaptations, r·d numbers each, are in memory at once."""


@dataclass(frozen=True)
class QuariReranker:
    """A re-ranker for `HubnessClient.search(..., rerank=…)`. Raises InvalidParameter."""

    network: Quari = field(repr=False, compare=False)
    """The trained network, in evaluation mode."""
    candidates: int = 1000
    """Number of re-ranked items of the corrected search."""
    correction: float = 0.0
    """β of the score cos(q', T r) − β·w·(b(r) − c), which subtracts the search's own bias once
    more, in the space before adaptation. With 0 the corrected search chooses the candidates and the
    network ranks them."""
    direct: bool = False
    """Whether to search the index for Tᵀq' in place of q, without candidates, with the biases at
    the search's strength."""
    device: str = "cpu"
    """Device of torch on which the network is."""

    def __post_init__(self) -> None:
        convert_fields(self, whole_number, "candidates")
        convert_fields(self, finite_number, "correction")
        object.__setattr__(self, "network", self.network.to(resolve_device(self.device)).eval())

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, encoder: str | None = None, **options: Any
    ) -> Self:
        """Return a re-ranker with the network of a file that `train` saved.

        options: the other fields, by name. Raises UnreadableFile, EncoderMismatch if the network is
        for another encoder, InvalidParameter.
        """
        checkpoint = Checkpoint.load(path)
        # Vectors of another encoder may have the same dimension, and would be ranked at random.
        if encoder is not None and encoder != checkpoint.encoder:
            trained_for = "an encoder that it does not name"
            if checkpoint.encoder:
                trained_for = repr(checkpoint.encoder)
            raise EncoderMismatch(f"the network was trained for {trained_for}, not for {encoder!r}")

        return cls(checkpoint.network(), **options)

    @property
    def dim(self) -> int:
        return self.network.config.dim

    def expect_dim(self, dim: int) -> None:
        """Raise DimensionMismatch if the network is for vectors of another dimension."""
        if dim != self.dim:
            raise DimensionMismatch(
                f"the network is for dimension {self.dim}, the vectors have {dim}"
            )

    def scores(self, queries: Floats, items: Sequence[Floats]) -> list[Floats]:
        """Return cos(q', T r) of each query with its own items, m arrays (c_i,).

        One product per query scores its items, without a copy. Zero items have cosine 0.

        queries: (m, d). items: m arrays (c_i, d). Raises DimensionMismatch.
        """
        for items_of_query in items:
            self.expect_dim(items_of_query.shape[1])

        scores: list[Floats] = []
        for batch, adaptation in self._adaptations(queries):
            for number, items_of_query in enumerate(items[batch]):
                # A slice, not a number, since `cosines` takes several queries.
                row = slice(number, number + 1)
                of_query = adaptation._replace(
                    query=adaptation.query[row], U=adaptation.U[row], V=adaptation.V[row]
                )
                candidates = as_tensor(items_of_query, torch.float32, adaptation.query.device)
                scores.append(cosines(of_query, candidates)[0].cpu().numpy())

        return scores

    def direct_queries(self, queries: Floats) -> Floats:
        """Return Tᵀq' of queries (m, d), at the lengths of the queries, (m, d).

        The index then scores q'·T r without the length of T r, by which it cannot divide. Raises
        DimensionMismatch.
        """
        transformed = np.empty_like(queries)
        for batch, adaptation in self._adaptations(queries):
            transformed[batch] = transformed_queries(adaptation).cpu().numpy()

        # The biases are those of queries of these lengths: longer ones would outweigh them.
        lengths = np.linalg.norm(queries, axis=1, keepdims=True)
        norms = np.linalg.norm(transformed, axis=1, keepdims=True)
        return np.asarray(transformed * (lengths / np.where(norms > 0, norms, 1)), np.float32)

    def _adaptations(self, queries: Floats) -> Iterator[tuple[slice, Adaptation]]:
        """Yield batches of the queries (m, d) as slices, with the adaptation to each batch."""
        self.expect_dim(queries.shape[1])
        device = next(self.network.parameters()).device
        for start in range(0, len(queries), QUERIES_AT_ONCE):
            batch = slice(start, start + QUERIES_AT_ONCE)
            # The caller's scores are computed before the generator goes on, so within both.
            with full_precision(device), torch.inference_mode():
                yield batch, self.network(as_tensor(queries[batch], torch.float32, device))


class LinearMaps(QuariReranker):
    """A re-ranker by cos(q', S r), with one linear map S of all items.

    q' is W q, with one map W of all queries, moved by the remembered pairs near q (`quari.model`).
    On this project's data no network ranks better. `load` and `QuariReranker.load` read its file.
    """

    @classmethod
    def fit(
        cls,
        pairs: Pairs,
        settings: TrainingSettings | None = None,
        *,
        memory: int = MEMORY,
        path: str | os.PathLike[str] | None = None,
        encoder: str | None = None,
        **options: Any,
    ) -> Self:
        """Learn the maps from labelled pairs, as `train` does, by default with
        `TrainingSettings.linear`.

        memory: number of remembered pairs, at most. path: the file to write. encoder: its encoder.
        options: the other fields of the re-ranker, by name. Raises as `train` does.
        """
        config = QuariConfig(pairs.dim, memory=memory)
        settings = settings or TrainingSettings.linear()
        checkpoint = train(pairs, config, settings, path=path, encoder=encoder)
        return cls(checkpoint.network(), **options)


ITEM_COLUMN = "item"
"""The array, or column, of the answers' vectors in a file of labelled pairs."""


@dataclass(frozen=True, eq=False)
class Labelled:
    """Labelled pairs, and the search whose candidates are re-ranked."""

    queries: Floats
    """(n, d), as the network takes them."""
    gallery: Floats
    """(g, d), as the network takes them."""
    right: RightItems
    """The right items of the queries, which are to be among those of the gallery."""
    query_vectors: Floats | None = None
    """(n, d'): queries whose inner product with `stored` is the similarity; by default the cosine.
    """
    stored: Floats | None = None
    """(g, d'): their counterpart for the gallery."""
    biases: Floats | None = None
    """(g,): subtracted by the search that chooses the candidates."""
    kind: str = ""
    """The kinds by whose means searches of the collection compare, a field or "auto"; empty for none."""

    @property
    def pairs(self) -> Pairs:
        """A pair of each query with each of its answers, to learn from.

        Raises as `Pairs` does.
        """
        queries = np.repeat(self.queries, self.right.counts, axis=0)
        return Pairs(queries, self.gallery, self.right.items)

    def rankings(self, reranker: QuariReranker) -> tuple[dict[str, PositiveRanks], float]:
        """Return the ranks of the answers by name, and the ms of re-ranking per query.

        All searches are exact, in memory. The names are raw, corrected (only with biases) and
        reranked. An answer that is no candidate has its former rank. Raises DimensionMismatch, and
        InvalidInput for fewer than two pairs, and for a collection whose searches compare by kind.
        """
        if self.kind:
            raise InvalidInput(
                f"searches of this collection compare by the kinds of {self.kind!r}, by which no "
                "re-ranking is evaluated: name the collection that it was copied from"
            )
        reranker.expect_dim(self.queries.shape[1])
        if len(self.queries) < 2:
            raise InvalidInput(f"an evaluation needs at least two pairs, not {len(self.queries)}")

        query_vectors = unit(self.queries) if self.query_vectors is None else self.query_vectors
        stored = unit(self.gallery) if self.stored is None else self.stored
        rankings = {"raw": ranks(query_vectors, stored, self.right)}
        if self.biases is not None:
            rankings["corrected"] = ranks(query_vectors, stored, self.right, self.biases)

        count = min(reranker.candidates, len(stored))
        candidates = nearest(query_vectors, stored, count, self.biases)
        # The last one is the search that chooses the candidates.
        *_, searched = rankings.values()
        reranked, seconds = self._reranked(reranker, candidates, searched)
        rankings["reranked"] = searched._replace(ranks=reranked)
        return rankings, 1000 * seconds / len(self.queries)

    def _reranked(
        self,
        reranker: QuariReranker,
        candidates: npt.NDArray[np.int64],
        searched: PositiveRanks,
    ) -> tuple[npt.NDArray[np.int64], float]:
        """Return the ranks of the answers after re-ranking, and the seconds that it took.

        candidates: (n, c). searched: the ranks in the search that chose them.
        """
        reranked = searched.ranks.copy()
        seconds = 0.0
        for start in range(0, len(self.queries), QUERIES_AT_ONCE):
            batch = slice(start, start + QUERIES_AT_ONCE)
            chosen = candidates[batch]
            vectors = list(self.gallery[chosen])

            started = time.perf_counter()
            scores = np.stack(reranker.scores(self.queries[batch], vectors))
            seconds += time.perf_counter() - started
            if self.biases is not None and reranker.correction:
                scores = scores - reranker.correction * self.biases[chosen]

            bounds = self.right.starts[start : start + len(chosen) + 1]
            of_batch = slice(bounds[0], bounds[-1])
            answers = self.right.items[of_batch]
            before = _wrong_before(scores, chosen, answers, bounds - bounds[0])

            # Right items are before each other in this order: each is behind those that it lists
            # before. One that was not among the candidates stays behind all of them.
            nth = np.arange(len(before)) - np.repeat(bounds[:-1] - bounds[0], np.diff(bounds))
            behind = np.maximum(searched.ranks[of_batch], chosen.shape[1] + 1)
            reranked[of_batch] = np.where(before >= 0, 1 + before + nth, behind)
        return reranked, seconds

    def evaluate(self, reranker: QuariReranker) -> dict[str, Any]:
        """Return R@k, MRR, mAP@10 and nDCG@10 of each of the `rankings`, 0 … 1, and the gains.

        Gains are the changes of R@1 by re-ranking, against the other rankings, with 95% intervals
        over the queries.
        """
        rankings, milliseconds = self.rankings(reranker)
        hits_at_1 = {name: hits(ranks, 1) for name, ranks in rankings.items()}
        reranked = hits_at_1.pop("reranked")
        gains = {
            name: paired_difference(searched, reranked)._asdict()
            for name, searched in hits_at_1.items()
        }

        return {
            "queries": len(self.queries),
            "candidates": min(reranker.candidates, len(self.gallery)),
            "milliseconds": milliseconds,
            **{name: retrieval_summary(ranks) for name, ranks in rankings.items()},
            "gain": gains,
        }


def _wrong_before(
    scores: Floats,
    chosen: npt.NDArray[np.int64],
    answers: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Return how many wrong candidates are before each right one; for each query in ascending order.

    scores, chosen: (n, c), of the candidates and their numbers. answers: those of query i are
    answers[starts[i]:starts[i + 1]]. Right items that are no candidates have −1, and come last.
    """
    query = np.repeat(np.arange(len(chosen)), np.diff(starts))
    is_answer = chosen[query] == answers[:, None]
    is_right = np.logical_or.reduceat(is_answer, starts[:-1])

    # Items with the answer's own score rank before it: a network that scores all items alike must
    # not seem perfect.
    answer_scores = np.where(is_answer, scores[query], -np.inf).max(1)
    before = ((scores[query] >= answer_scores[:, None]) & ~is_right[query]).sum(1)

    is_candidate = is_answer.any(1)
    order = np.lexsort((before, ~is_candidate, query))
    in_order: npt.NDArray[np.int64] = np.where(is_candidate, before, -1)[order]
    return in_order


def read_labelled(
    path: str,
    collection: str | None,
    open_store: Callable[[], Store],
    field: str | None,
    progress: Progress,
    pairs_queries: str | None = None,
) -> Labelled:
    """Read labelled pairs.

    Without a collection, an .npz, .parquet or .arrow file has `query` (n, d) and `item` (n, d), the
    vectors of the answers; equal queries are one with several answers. With one, it is a file or
    folder of judgements, whose grades and weights do not count. pairs_queries: the vectors of
    queries that it names by id.

    Raises UnreadableFile, InvalidInput, DimensionMismatch, and as a read of the collection does.
    """
    if collection is None:
        queries = QueryBank.load(path, QUERY_COLUMN)
        items = QueryBank.load(path, ITEM_COLUMN)
        if len(queries) != len(items):
            raise InvalidInput(
                f"{path} has {len(queries)} queries for {len(items)} items: give each query its "
                "item"
            )

        # Equal items become one: none of them is a wrong answer to the other's query.
        gallery, numbers = np.unique(items.vectors, axis=0, return_inverse=True)
        judged = Judgements.of(queries, numbers)
        right = RightItems.of(judged.positions(range(len(gallery))))
        return Labelled(judged.queries.vectors, gallery, right)

    judgements = Judgements.load(path, pairs_queries)
    store = open_store()
    info = store.info(collection)
    rows = read_gallery(store, info, field, progress=progress)
    judgements.queries.expect_dim(rows.layout.dim, "the field")
    judged = judgements.within(rows.keys, info.name)

    return Labelled(
        queries=judged.queries.vectors,
        gallery=rows.vectors,
        right=RightItems.of(judged.positions(rows.keys)),
        query_vectors=rows.layout.reduce_queries(judged.queries.vectors),
        stored=rows.layout.reduce_items(rows.vectors),
        biases=rows.biases,
        kind=state.kind if (state := info.state_of(field)) is not None else "",
    )
