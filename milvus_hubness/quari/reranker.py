"""Re-ranking by a trained network: cos(q', T r) over the candidates of a corrected search (QuARI; Xing et
al., 2025, section 3)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from milvus_hubness.errors import DimensionMismatch
from milvus_hubness.kernels.arguments import finite_number, whole_number
from milvus_hubness.kernels.devices import full_precision, resolve_device
from milvus_hubness.kernels.operands import as_tensor
from milvus_hubness.quari.checkpoint import Checkpoint
from milvus_hubness.quari.model import Quari
from milvus_hubness.quari.scoring import cosines, transformed_queries

Floats = npt.NDArray[np.float32]

QUERIES_AT_ONCE = 16


@dataclass(frozen=True)
class QuariReranker:
    """Give it to `HubnessClient.search(..., rerank=…)`.

    network: trained, for the dimension of the vectors that are searched. candidates: how many items of the
    corrected search are looked at. correction: β of the score cos(q', T r) − β·w·(b(r) − c), the search's own
    bias once more, in the space before it is adapted; 0 leaves the corrected search to choose the candidates
    and the network to rank them. direct: no candidates at all; Tᵀq' is asked of the index in the place of q,
    with the biases at the search's strength. device: of the arithmetic.

    Raises InvalidParameter.
    """

    network: Quari = field(repr=False, compare=False)
    candidates: int = 1000
    correction: float = 0.0
    direct: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        object.__setattr__(self, "candidates", whole_number("candidates", self.candidates))
        object.__setattr__(self, "correction", finite_number("correction", self.correction))
        object.__setattr__(self, "network", self.network.to(resolve_device(self.device)).eval())

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        encoder: str | None = None,
        candidates: int = 1000,
        correction: float = 0.0,
        direct: bool = False,
        device: str = "cpu",
    ) -> QuariReranker:
        """One with the network of a file that `train` wrote. encoder: what made the vectors that will be
        searched. Raises UnreadableFile, EncoderMismatch where the network is not for it, InvalidParameter."""
        kept = Checkpoint.load(path)
        kept.expect_encoder(encoder)
        return cls(kept.network(), candidates, correction, direct, device)

    @property
    def dim(self) -> int:
        """d of the queries and the items."""
        return self.network.config.dim

    def expect_dim(self, dim: int) -> None:
        """Raises DimensionMismatch unless the network is for vectors of this dimension."""
        if dim != self.dim:
            raise DimensionMismatch(f"the network is for dimension {self.dim}, the vectors have {dim}")

    def scores(self, queries: Floats, items: Sequence[Floats]) -> list[Floats]:
        """cos(q', T r) of each query (m, d) with its own items, m arrays (c_i, d): m arrays (c_i,).

        16 queries share a pass through the network; then each has one product with its items, where they
        lie. Items without a direction have cosine 0. Raises DimensionMismatch.
        """
        self._expect_rows(queries, *items)
        found: list[Floats] = []
        for start in range(0, len(queries), QUERIES_AT_ONCE):
            with self._at_work() as device:
                query_vectors = as_tensor(queries[start : start + QUERIES_AT_ONCE], torch.float32, device)
                adaptation = self.network(query_vectors)
                for which, own in enumerate(items[start : start + QUERIES_AT_ONCE]):
                    one = slice(which, which + 1)
                    alone = adaptation._replace(
                        query=adaptation.query[one], U=adaptation.U[one], V=adaptation.V[one]
                    )
                    candidates = as_tensor(own, torch.float32, device)
                    found.append(cosines(alone, candidates)[0].cpu().numpy())
        return found

    def direct_queries(self, queries: Floats) -> Floats:
        """(m, d) Tᵀq' of queries (m, d), each as long as its query was: q'·T r without the length of T r,
        which an index cannot divide by. Raises DimensionMismatch."""
        self._expect_rows(queries)
        lengths = np.linalg.norm(queries, axis=1, keepdims=True)
        found = np.empty_like(queries)
        for start in range(0, len(queries), QUERIES_AT_ONCE):
            part = slice(start, start + QUERIES_AT_ONCE)
            with self._at_work() as device:
                query_vectors = as_tensor(queries[part], torch.float32, device)
                found[part] = transformed_queries(self.network(query_vectors)).cpu().numpy()
        norms = np.linalg.norm(found, axis=1, keepdims=True)
        return np.asarray(found * (lengths / np.where(norms > 0, norms, 1)), np.float32)

    @contextmanager
    def _at_work(self) -> Iterator[torch.device]:
        device = next(self.network.parameters()).device
        with full_precision(device), torch.inference_mode():
            yield device

    def _expect_rows(self, *rows: Floats) -> None:
        for some in rows:
            if some.ndim != 2 or some.shape[1] != self.dim:
                raise DimensionMismatch(
                    f"the network is for dimension {self.dim}, the vectors have shape {some.shape}"
                )
