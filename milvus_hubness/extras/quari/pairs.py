"""Labelled pairs and semi-positives of QuARI training."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.banks.bank import as_vectors
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.kernels import topk
from milvus_hubness.correction.kernels.checks import finite_number
from milvus_hubness.errors import BankTooSmall, DimensionMismatch, InvalidInput
from milvus_hubness.extras.quari.settings import TrainingSettings


class Pairs:
    """Queries and the gallery item that answers each; several queries may share one item.

    queries (n, d), gallery (g, d): stored at unit length. answers (n,): the number of each query's
    item; by default item i answers query i. left_out: number of pairs whose query or item is all
    zeros, which teach nothing.

    Raises DimensionMismatch, NonFiniteVectors, and InvalidInput if the numbers of queries and
    answers differ, an answer is no item, or no pair is left.
    """

    def __init__(
        self, queries: npt.ArrayLike, gallery: npt.ArrayLike, answers: npt.ArrayLike | None = None
    ) -> None:
        query_vectors = as_vectors(queries, "the queries")
        items = as_vectors(gallery, "the gallery")
        if query_vectors.shape[1] != items.shape[1]:
            raise DimensionMismatch(
                f"the queries have dimension {query_vectors.shape[1]}, the gallery has "
                f"{items.shape[1]}"
            )

        numbers = np.arange(len(items)) if answers is None else np.asarray(answers)
        if len(numbers) != len(query_vectors) or numbers.ndim != 1:
            raise InvalidInput(
                f"{len(query_vectors)} queries have {len(numbers)} answers: give one for each"
            )
        if numbers.dtype.kind not in "iu" or numbers.size == 0:
            raise InvalidInput("answers must be the numbers of gallery items, one for each query")
        if numbers.min() < 0 or numbers.max() >= len(items):
            raise InvalidInput(f"answers must be among the {len(items)} gallery items")

        query_vectors = unit(query_vectors)
        self.gallery = unit(items)
        usable = query_vectors.any(axis=1) & self.gallery[numbers].any(axis=1)
        if not usable.any():
            raise InvalidInput("no pair can be learned from: its query or its answer is all zeros")

        self.queries: Floats = query_vectors[usable]
        self.answers: npt.NDArray[np.int64] = numbers[usable].astype(np.int64)
        self.left_out = int((~usable).sum())

    def __len__(self) -> int:
        return len(self.queries)

    @property
    def dim(self) -> int:
        return int(self.queries.shape[1])

    @property
    def fingerprint(self) -> str:
        """Digest of all data of the pairs."""
        digest = hashlib.sha256()
        for part in (self.queries, self.gallery, self.answers):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()[:16]

    def split(self, share: float, seed: int) -> tuple[Pairs, Pairs]:
        """Return pairs to train on, and about this share of them to validate on.

        An item that answers, with all its queries, is in only one part; items that answer nothing
        are in both. Raises InvalidParameter, and BankTooSmall if a part would have fewer than two
        items that answer.
        """
        order = np.random.default_rng(seed).permutation(np.unique(self.answers))
        held_out = round(finite_number("share", share) * len(order))
        if held_out < 2 or len(order) - held_out < 2:
            raise BankTooSmall(
                f"{len(order)} answered items are too few for a split at {share:g}: each side "
                "needs two"
            )

        return self._without(order[:held_out]), self._without(order[held_out:])

    def _without(self, items: npt.NDArray[np.int64]) -> Pairs:
        rest = np.setdiff1d(np.arange(len(self.gallery)), items)
        pairs = ~np.isin(self.answers, items)
        return Pairs(
            self.queries[pairs], self.gallery[rest], np.searchsorted(rest, self.answers[pairs])
        )


def unit(rows: Floats) -> Floats:
    """Return (n, d) the rows at length 1; zero rows stay zero."""
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return np.ascontiguousarray(rows / np.where(lengths > 0, lengths, 1), np.float32)


def mine(
    gallery: Floats, settings: TrainingSettings, device: str = "auto"
) -> tuple[npt.NDArray[np.int64], Floats]:
    """Return the semi-positives of every gallery item, as a possible right answer.

    gallery (n, d): unit rows. Returns numbers of items, best first, and their weights, (n,
    semi_positives) each: of a softmax over the cosines of each item's `neighbors` nearest other
    items, or all others if there are fewer, the first weights. The paper does not say whose
    neighbours it means, nor at what temperature. Here they are those of the answer, not of the
    query, whose neighbours are the errors to correct; and the temperature is that of the loss.

    Raises BankTooSmall if the gallery has fewer than semi_positives + 1 items.
    """
    keep = settings.semi_positives
    count = len(gallery)
    if count <= keep:
        raise BankTooSmall(f"{count} gallery items are too few for {keep} semi_positives: add some")
    if keep == 0:
        return np.zeros((count, 0), np.int64), np.zeros((count, 0), np.float32)

    near = min(settings.neighbors, count - 1)
    nearest = topk(gallery, gallery, near + 1, device=device)
    own = np.arange(count)[:, None] == nearest.indices
    own[~own.any(1), -1] = (
        True  # More than `near` items coincide with this one: drop any of them instead.
    )
    others = nearest.indices[~own].reshape(-1, near)
    cosines = nearest.values[~own].reshape(-1, near)
    shares = np.exp((cosines - cosines[:, :1]) / settings.temperature)
    shares /= shares.sum(1, keepdims=True)

    return np.ascontiguousarray(others[:, :keep]), shares[:, :keep].astype(np.float32)
