"""What re-ranking of candidates max_miss_rate: corrected answers that the raw search does not bring up."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from milvus_hubness.banks import Vectors
from milvus_hubness.kernels.devices import full_precision
from milvus_hubness.kernels.operands import as_tensor
from milvus_hubness.quality.trials import DEPTH

LADDER = (50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 16_384)
"""Numbers of candidates that are tried. Milvus answers a search with at most the last."""

TILE_SCORES = 1 << 25


def raw_places(
    queries: Vectors, items: Vectors, biases: Vectors, *, strength: float = 1.0
) -> npt.NDArray[np.int64]:
    """(m, 10) where the raw ranking puts each of a query's exact corrected top 10, from 1; ties count for it.

    queries (m, d) and items (n, d) float32 with the score as their inner product, biases (n,); fewer columns
    where there are fewer items. Memory: some 2^25 scores at a time.
    """
    cpu = torch.device("cpu")
    query_vectors, gallery, subtracted = (
        as_tensor(each, torch.float32, cpu) for each in (queries, items, biases)
    )
    depth = min(DEPTH, len(gallery))
    found = [torch.empty((0, depth), dtype=torch.int64)]
    with full_precision(cpu):
        for part in torch.split(query_vectors, max(1, TILE_SCORES // max(1, len(gallery)))):
            scores = part @ gallery.T
            best = torch.topk(scores - strength * subtracted, depth, dim=1).indices
            own = torch.gather(scores, 1, best)
            found.append(torch.stack([(scores > each[:, None]).sum(1) + 1 for each in own.T], dim=1))
    return torch.cat(found).numpy()


def missed_share(places: npt.ArrayLike, candidates: int) -> float:
    """The share of places beyond that many candidates."""
    return float((np.asarray(places) > candidates).mean())


def enough_candidates(places: npt.ArrayLike, allowed: float) -> int:
    """The least of LADDER that misses no more than `allowed`; its last where none does."""
    return next((each for each in LADDER if missed_share(places, each) <= allowed), LADDER[-1])
