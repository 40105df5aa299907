"""Labelled pairs, semi-positives and settings of QuARI training."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks.bank import as_vectors
from milvus_hubness.defaults import ANCHOR_EPOCHS, EPOCHS
from milvus_hubness.errors import BankTooSmall, DimensionMismatch, InvalidInput, InvalidParameter
from milvus_hubness.kernels import topk
from milvus_hubness.kernels.primitives import convert_fields, finite_number, positive_number, whole_number

Vectors = npt.NDArray[np.float32]


class Pairs:
    """Queries and the gallery item that answers each; several queries may share one item.

    queries (n, d), gallery (g, d): finite numbers, stored at unit length. answers (n,): the number of each
    query's item; by default item i answers query i. left_out: number of pairs from which nothing can be learned,
    because the query or the item is all zeros.

    Raises DimensionMismatch, NonFiniteVectors, and InvalidInput if the numbers of queries and answers differ,
    an answer is no item, or no pair is left.
    """

    def __init__(self, queries: npt.ArrayLike, gallery: npt.ArrayLike, answers: npt.ArrayLike | None = None) -> None:
        query_vectors, items = as_vectors(queries, "the queries"), as_vectors(gallery, "the gallery")
        if query_vectors.shape[1] != items.shape[1]:
            raise DimensionMismatch(
                f"the queries have dimension {query_vectors.shape[1]}, the gallery has {items.shape[1]}"
            )
        numbers = np.arange(len(items)) if answers is None else np.asarray(answers)
        if len(numbers) != len(query_vectors) or numbers.ndim != 1:
            raise InvalidInput(f"{len(query_vectors)} queries are paired with {len(numbers)} answers")
        if numbers.dtype.kind not in "iu" or numbers.size == 0:
            raise InvalidInput("answers must be the numbers of gallery items, one for each query")
        if numbers.min() < 0 or numbers.max() >= len(items):
            raise InvalidInput(f"answers must be among the {len(items)} gallery items")
        query_vectors, self.gallery = unit(query_vectors), unit(items)
        usable = query_vectors.any(axis=1) & self.gallery[numbers].any(axis=1)
        if not usable.any():
            raise InvalidInput("no pair has a direction: all queries, or all of their answers, are zero")
        self.queries: Vectors = query_vectors[usable]
        self.answers: npt.NDArray[np.int64] = numbers[usable].astype(np.int64)
        self.left_out = int((~usable).sum())

    def __len__(self) -> int:
        return len(self.queries)

    @property
    def dim(self) -> int:
        """The dimension d."""
        return int(self.queries.shape[1])

    @property
    def fingerprint(self) -> str:
        """Return a fingerprint of all data of the pairs, to compare them with others."""
        digest = hashlib.sha256()
        for part in (self.queries, self.gallery, self.answers):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()[:16]

    def split(self, share: float, seed: int) -> tuple[Pairs, Pairs]:
        """Return pairs to train on, and about this share of them to validate on.

        An item that answers, with all its queries, is in only one part; items that answer nothing are in both.
        Raises InvalidParameter, and BankTooSmall if a part would have fewer than two items that answer.
        """
        order = np.random.default_rng(seed).permutation(np.unique(self.answers))
        held_out = round(finite_number("share", share) * len(order))
        if held_out < 2 or len(order) - held_out < 2:
            raise BankTooSmall(f"{len(order)} answered items cannot be split at {share:g} into two sides")
        return self._without(order[:held_out]), self._without(order[held_out:])

    def _without(self, items: npt.NDArray[np.int64]) -> Pairs:
        rest = np.setdiff1d(np.arange(len(self.gallery)), items)
        pairs = ~np.isin(self.answers, items)
        return Pairs(self.queries[pairs], self.gallery[rest], np.searchsorted(rest, self.answers[pairs]))


def unit(rows: Vectors) -> Vectors:
    """Return (n, d) the rows at length 1; zero rows stay zero."""
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return np.ascontiguousarray(rows / np.where(lengths > 0, lengths, 1), np.float32)


class SemiPositives(NamedTuple):
    """Semi-positives of all items.

    items: (n, keep) int64, numbers of gallery items, best first. weights: (n, keep) float32, the share of each in a
    softmax over all neighbours.
    """

    items: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]


def mine(
    gallery: Vectors, *, neighbors: int = 100, keep: int = 2, temperature: float = 0.07, device: str = "auto"
) -> SemiPositives:
    """Return the semi-positives of every gallery item, as a possible right answer.

    gallery (n, d) of unit rows. An exact search returns each item's `neighbors` nearest other items; of the softmax
    over their cosines, at the temperature, the first `keep` weights are used. The paper does not say whose neighbours
    it means, nor at what temperature. Here they are those of the answer, not of the query, whose neighbours are the
    errors to correct; and the temperature is that of the loss.

    If the gallery has fewer than neighbors + 1 items, all others count as neighbours. Raises BankTooSmall if
    it has fewer than keep + 1, InvalidParameter for keep > neighbors or numbers out of range.
    """
    keep = whole_number("keep", keep, at_least=0)
    neighbors = whole_number("neighbors", neighbors, at_least=max(1, keep))
    temperature = positive_number("temperature", temperature)
    if len(gallery) <= keep:
        raise BankTooSmall(f"{keep} semi-positives need more than {keep} gallery items, not {len(gallery)}")
    if keep == 0:
        return SemiPositives(np.zeros((len(gallery), 0), np.int64), np.zeros((len(gallery), 0), np.float32))
    near = min(neighbors, len(gallery) - 1)
    nearest = topk(gallery, gallery, near + 1, device=device)
    own = np.arange(len(gallery))[:, None] == nearest.indices
    own[~own.any(1), -1] = True  # More than `near` items coincide with this one: drop any of them instead.
    others, cosines = nearest.indices[~own].reshape(-1, near), nearest.values[~own].reshape(-1, near)
    shares = np.exp((cosines - cosines[:, :1]) / temperature)
    shares /= shares.sum(1, keepdims=True)
    return SemiPositives(np.ascontiguousarray(others[:, :keep]), shares[:, :keep].astype(np.float32))


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of a training; the defaults are the paper's.

    epochs: at most. patience: number of epochs without a better validation MRR that end the training earlier. batch:
    pairs in a step. learning_rate, least_rate: start and end of the cosine schedule. weight_decay: of AdamW.
    anchor_epochs: number of first epochs in which only the static maps of the anchored form learn, without weight
    decay, on a cosine schedule that begins at anchor_rate; the best of these maps start the other epochs. temperature:
    τ. noise: factor of the U[0, 1]·N(0, 1) noise on queries; at 1 and u = 1 it is as long as the query. semi_positives:
    how many of the `neighbors` nearest items of each answer count; 0 is the plain loss. seed: of all random draws.

    Raises InvalidParameter.
    """

    epochs: int = EPOCHS
    patience: int = 10
    batch: int = 320
    learning_rate: float = 1e-5
    least_rate: float = 2e-7
    anchor_epochs: int = ANCHOR_EPOCHS
    anchor_rate: float = 3e-4
    weight_decay: float = 1e-2
    temperature: float = 0.07
    noise: float = 1.0
    semi_positives: int = 2
    neighbors: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        convert_fields(self, whole_number, "epochs", "patience", "neighbors")
        convert_fields(self, whole_number, "batch", at_least=2)
        convert_fields(self, whole_number, "seed", at_least=0)
        convert_fields(self, whole_number, "anchor_epochs", at_least=0, at_most=self.epochs)
        convert_fields(self, whole_number, "semi_positives", at_least=0, at_most=self.neighbors)
        convert_fields(self, positive_number, "learning_rate", "anchor_rate", "temperature")
        convert_fields(self, finite_number, "least_rate", "weight_decay", "noise")
        for name in ("least_rate", "weight_decay", "noise"):
            if getattr(self, name) < 0:
                raise InvalidParameter(f"{name} must not be below 0: {getattr(self, name)!r}")
        if self.least_rate > self.learning_rate:
            raise InvalidParameter(f"least_rate {self.least_rate:g} is above learning_rate {self.learning_rate:g}")

    def rate(self, step: int, steps_per_epoch: int) -> float:
        """Return the learning rate of a step, from 0: half a cosine from learning_rate to least_rate.

        The anchor epochs have their own schedule, from anchor_rate down in the same proportion.
        """
        start, end, scale = steps_per_epoch * self.anchor_epochs, steps_per_epoch * self.epochs, 1.0
        if step < start:
            start, end, scale = 0, start, self.anchor_rate / self.learning_rate
        fallen = (1 - math.cos(math.pi * (step - start) / max(1, end - start - 1))) / 2
        return scale * (self.learning_rate + (self.least_rate - self.learning_rate) * fallen)
