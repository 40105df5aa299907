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

    Raises DimensionMismatch, NonFiniteVectors, and InvalidInput if the numbers of queries and
    answers differ, an answer is no item, or no pair is left.
    """

    queries: Floats
    """(n, d), at length 1."""
    gallery: Floats
    """(g, d), at length 1; zero items stay zero."""
    answers: npt.NDArray[np.int64]
    """(n,): the number of each query's item; by default item i answers query i."""
    left_out: int
    """Number of pairs whose query or item is all zeros, which teach nothing."""

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

        # Cosines see no length, but a zero vector has no direction to learn.
        query_vectors = unit(query_vectors)
        self.gallery = unit(items)
        usable = query_vectors.any(axis=1) & self.gallery[numbers].any(axis=1)
        if not usable.any():
            raise InvalidInput("no pair can be learned from: its query or its answer is all zeros")

        self.queries = query_vectors[usable]
        self.answers = numbers[usable].astype(np.int64)
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
        for array in (self.queries, self.gallery, self.answers):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]

    def split(self, share: float, seed: int) -> tuple[Pairs, Pairs]:
        """Return pairs to train on, and about this share of them to validate on.

        An item that answers, with all its queries, is on one side only; items that answer nothing
        are on both. Raises InvalidParameter, and BankTooSmall if a side would have fewer than two
        items that answer.
        """
        # By item, not by pair: a network that has seen an item answer one query is no stranger to
        # it, and its validation by another query would be too good.
        order = np.random.default_rng(seed).permutation(np.unique(self.answers))
        held_out = round(finite_number("share", share) * len(order))
        # A ranking of one item has no wrong answer.
        if held_out < 2 or len(order) - held_out < 2:
            raise BankTooSmall(
                f"{len(order)} answered items are too few for a split at {share:g}: each side "
                "needs two"
            )

        return self._without(order[:held_out]), self._without(order[held_out:])

    def _without(self, items: npt.NDArray[np.int64]) -> Pairs:
        """Return the pairs that these items do not answer, with a gallery without the items."""
        rest = np.setdiff1d(np.arange(len(self.gallery)), items)
        stays = ~np.isin(self.answers, items)
        # `rest` ascends, so the place of an item in it is the item's new number.
        answers = np.searchsorted(rest, self.answers[stays])
        return Pairs(self.queries[stays], self.gallery[rest], answers)


def unit(rows: Floats) -> Floats:
    """Return the rows (n, d) at length 1; zero rows stay zero."""
    # In float64, since the squares of large float32 numbers overflow.
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return np.ascontiguousarray(rows / np.where(lengths > 0, lengths, 1), np.float32)


def mine(
    gallery: Floats, settings: TrainingSettings, device: str = "auto"
) -> tuple[npt.NDArray[np.int64], Floats]:
    """Return the semi-positives of every gallery item, as a possible right answer.

    Returns numbers of items, best first, and their weights, (n, semi_positives) each: of a softmax
    over the cosines of each item's `neighbors` nearest other items, or all others if there are
    fewer, the first weights.

    The paper does not say whose neighbours it means, nor at what temperature. Here they are those
    of the answer, not of the query, whose neighbours are the errors to correct; and the temperature
    is that of the loss.

    gallery: (n, d) unit rows. Raises BankTooSmall if the gallery has fewer than semi_positives + 1
    items.
    """
    semi_positives = settings.semi_positives
    count = len(gallery)
    if count <= semi_positives:
        raise BankTooSmall(
            f"{count} gallery items are too few for {semi_positives} semi_positives: add some"
        )
    if semi_positives == 0:
        return np.zeros((count, 0), np.int64), np.zeros((count, 0), np.float32)

    # One more than needed, since an item is its own nearest.
    neighbors = min(settings.neighbors, count - 1)
    nearest = topk(gallery, gallery, neighbors + 1, device=device)
    is_itself = np.arange(count)[:, None] == nearest.indices
    # If more items than that coincide with this one, it may be missing: any of them is left out in
    # its place.
    is_itself[~is_itself.any(1), -1] = True

    others = nearest.indices[~is_itself].reshape(-1, neighbors)
    cosines = nearest.values[~is_itself].reshape(-1, neighbors)
    shares = np.exp((cosines - cosines[:, :1]) / settings.temperature)
    shares /= shares.sum(1, keepdims=True)

    numbers = np.ascontiguousarray(others[:, :semi_positives])
    return numbers, shares[:, :semi_positives].astype(np.float32)
