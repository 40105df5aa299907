"""What many biases of one gallery do to the same queries, from one pass over the scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from milvus_hubness.banks import Vectors
from milvus_hubness.kernels.devices import full_precision
from milvus_hubness.kernels.operands import Operands, as_tensor
from milvus_hubness.quality.hubness import k_occurrence, robin_hood

DEPTH = 10


class Outcome(NamedTuple):
    """ranks (n_biases, n_queries) of each query's best positive, from 1, as `quality.ranks` has it;
    (n_biases, 0) where no positives were given.

    found (n_biases, n_queries, 10): the items that the query finds first, fewer where there are fewer.
    """

    ranks: npt.NDArray[np.int32]
    found: npt.NDArray[np.int32]

    def of(self, queries: npt.NDArray[np.int64]) -> Outcome:
        """The same of these queries only."""
        return Outcome(self.ranks[:, queries], self.found[:, queries])

    @property
    def hits(self) -> npt.NDArray[np.float64]:
        """(n_biases, n_queries) 1 where a positive comes first, else 0."""
        first: npt.NDArray[np.float64] = (self.ranks == 1).astype(np.float64)
        return first


def assess(
    queries: Vectors,
    gallery: Vectors,
    biases: Sequence[Vectors],
    positives: Sequence[npt.NDArray[np.int64]] | None = None,
    *,
    device: str = "auto",
) -> Outcome:
    """The outcome of each bias (n_items,) for queries (n_queries, d) on a gallery (n_items, d).

    positives: for each query the numbers of its items. Holds a tile of at least one row of scores.
    """
    operands = Operands.of(queries, gallery, device)
    depth = min(DEPTH, len(gallery))
    found = np.empty((len(biases), len(queries), depth), np.int32)
    ranks = np.empty((len(biases), 0 if positives is None else len(queries)), np.int32)
    stacked = as_tensor(np.stack(biases), operands.bank.dtype, operands.device)
    wanted = None if positives is None else torch.from_numpy(_padded(positives)).to(operands.device)
    rows, _ = operands.tile_shape(columns=len(gallery))
    with full_precision(operands.device):
        for part, tile in operands.rows(rows):
            scores = tile @ operands.bank.T
            largest = scores.abs().amax(1, keepdim=True)
            for which, bias in enumerate(stacked):
                corrected = scores - bias
                found[which, part] = corrected.topk(depth, dim=1).indices.cpu().numpy()
                if wanted is not None:
                    own = corrected.gather(1, wanted[part]).amax(1, keepdim=True)
                    margin = 4 * torch.finfo(scores.dtype).eps * torch.maximum(largest, bias.abs().max())
                    ranks[which, part] = 1 + (corrected > own + margin).sum(1).cpu().numpy()
    return Outcome(ranks, found)


def unevenness(outcome: Outcome, n_items: int) -> npt.NDArray[np.float64]:
    """(n_biases,) the Robin Hood index of N_10: what share of the answers hubs have too many."""
    return np.array([robin_hood(k_occurrence(found, n_items, found.shape[1])) for found in outcome.found])


def _padded(positives: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """(n_queries, most) the items of each query, the first of them again where it has fewer."""
    most = max(len(one) for one in positives)
    return np.stack([np.concatenate([one, np.repeat(one[:1], most - len(one))]) for one in positives])
