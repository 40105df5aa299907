"""Semi-positives: items so near to a right answer that they should not count as wrong ones (QuARI; Xing et
al., 2025, section 3)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.errors import BankTooSmall
from milvus_hubness.kernels import topk
from milvus_hubness.kernels.arguments import positive_number, whole_number


class SemiPositives(NamedTuple):
    """items (n, keep) int64: numbers of gallery items, best first. weights (n, keep) float32: of each, its
    share of a softmax over all the neighbours that were looked at."""

    items: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]


def mine(
    gallery: npt.NDArray[np.float32],
    *,
    neighbors: int = 100,
    keep: int = 2,
    temperature: float = 0.07,
    device: str = "auto",
) -> SemiPositives:
    """The semi-positives of every gallery item, as the right answer that it may be.

    gallery (n, d) of unit rows. By exact search each item's `neighbors` nearest others are found; of the
    softmax over their cosines, at the temperature, the first `keep` weights are kept. The paper does not say
    whose neighbours are meant, nor at what temperature: here those of the answer, not of the query, whose
    neighbours are the errors to be unlearned; and the temperature of the loss.

    Where the gallery has fewer than neighbors + 1 items, all others are looked at. Raises BankTooSmall
    where it has fewer than keep + 1, InvalidParameter for keep > neighbors or numbers out of range.
    """
    keep = whole_number("keep", keep)
    neighbors = whole_number("neighbors", neighbors, at_least=keep)
    temperature = positive_number("temperature", temperature)
    if len(gallery) <= keep:
        raise BankTooSmall(f"{keep} semi-positives need more than {keep} gallery items, not {len(gallery)}")
    near = min(neighbors, len(gallery) - 1)
    found = topk(gallery, gallery, near + 1, device=device)
    own = np.arange(len(gallery))[:, None] == found.indices
    own[~own.any(1), -1] = True  # more than `near` items coincide with this one: any of them stands for it
    others, cosines = found.indices[~own].reshape(-1, near), found.values[~own].reshape(-1, near)
    shares = np.exp((cosines - cosines[:, :1]) / temperature)
    shares /= shares.sum(1, keepdims=True)
    return SemiPositives(np.ascontiguousarray(others[:, :keep]), shares[:, :keep].astype(np.float32))
