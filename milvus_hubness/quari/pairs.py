"""Labelled pairs, semi-positives and settings of QuARI training."""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks.bank import as_vectors
from milvus_hubness.errors import BankTooSmall, DimensionMismatch, InvalidInput, InvalidParameter
from milvus_hubness.kernels import topk
from milvus_hubness.kernels.operands import finite_number, positive_number, whole_number

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Queries and the gallery item that answers each; several queries may share one item.

    queries (n, d), gallery (g, d): finite numbers, stored at unit length. answers (n,): the number of each
    query's item; by default item i answers query i. left_out: number of pairs without a direction, where the
    query or the item is all zeros; nothing can be learned from them.

    Raises DimensionMismatch, NonFiniteVectors, and InvalidInput if the numbers of queries and answers differ,
    an answer is no item, or no pair is left.
    """

    queries: Vectors = field(repr=False)
    gallery: Vectors = field(repr=False)
    answers: npt.NDArray[np.int64] | None = field(default=None, repr=False)
    left_out: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        queries, gallery = as_vectors(self.queries, "the queries"), as_vectors(self.gallery, "the gallery")
        if queries.shape[1] != gallery.shape[1]:
            raise DimensionMismatch(
                f"the queries have dimension {queries.shape[1]}, the gallery has {gallery.shape[1]}"
            )
        answers = np.arange(len(gallery)) if self.answers is None else np.asarray(self.answers)
        if len(answers) != len(queries) or answers.ndim != 1:
            raise InvalidInput(f"{len(queries)} queries are paired with {len(answers)} answers")
        if answers.dtype.kind not in "iu" or answers.size == 0:
            raise InvalidInput("answers must be the numbers of gallery items, one for each of some queries")
        if answers.min() < 0 or answers.max() >= len(gallery):
            raise InvalidInput(f"answers must be among the {len(gallery)} gallery items")
        queries, gallery = unit(queries), unit(gallery)
        usable = np.any(queries, axis=1) & np.any(gallery[answers], axis=1)
        if not usable.any():
            raise InvalidInput("no pair has a direction: all queries, or all of their answers, are zero")
        object.__setattr__(self, "queries", queries[usable])
        object.__setattr__(self, "gallery", gallery)
        object.__setattr__(self, "answers", answers[usable].astype(np.int64))
        object.__setattr__(self, "left_out", int((~usable).sum()))

    def __len__(self) -> int:
        return len(self.queries)

    @property
    def dim(self) -> int:
        """The dimension d."""
        return int(self.queries.shape[1])

    @property
    def of(self) -> npt.NDArray[np.int64]:
        """The `answers` (n,), which are never None once the pairs are made."""
        answers: npt.NDArray[np.int64] = np.asarray(self.answers)
        return answers

    @property
    def fingerprint(self) -> str:
        """Return a fingerprint of all data of the pairs, to compare them with others."""
        digest = hashlib.sha256()
        for part in (self.queries, self.gallery, self.of):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()[:16]

    def split(self, share: float, seed: int) -> tuple[Pairs, Pairs]:
        """Return pairs to train on, and about this share of them to validate on. An item that answers, with
        all its queries, is in only one part; items that answer nothing are in both.

        Raises InvalidParameter, and BankTooSmall if a part would have fewer than two items that answer.
        """
        share = finite_number("share", share)
        asked = np.unique(self.of)
        order = np.random.default_rng(seed).permutation(asked)
        held = round(share * len(order))
        if held < 2 or len(order) - held < 2:
            raise BankTooSmall(f"{len(order)} answered items cannot be split at {share:g} into two sides")
        return self._without(order[:held]), self._without(order[held:])

    def _without(self, items: npt.NDArray[np.int64]) -> Pairs:
        left = np.setdiff1d(np.arange(len(self.gallery)), items)
        here = ~np.isin(self.of, items)
        return Pairs(self.queries[here], self.gallery[left], np.searchsorted(left, self.of[here]))


def unit(rows: Vectors) -> Vectors:
    """Return (n, d) the rows at length 1; zero rows stay zero."""
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return np.ascontiguousarray(rows / np.where(lengths > 0, lengths, 1), np.float32)


class SemiPositives(NamedTuple):
    """Semi-positives of all items. items: (n, keep) int64, numbers of gallery items, best first. weights: (n,
    keep) float32, the share of each in a softmax over all neighbours."""

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
    """Return the semi-positives of every gallery item, as a possible right answer.

    gallery (n, d) of unit rows. An exact search finds each item's `neighbors` nearest other items; of the
    softmax over their cosines, at the temperature, the first `keep` weights are kept. The paper does not say
    whose neighbours it means, nor at what temperature. Here they are those of the answer, not of the query,
    whose neighbours are the errors to correct; and the temperature is that of the loss.

    If the gallery has fewer than neighbors + 1 items, all others count as neighbours. Raises BankTooSmall if
    it has fewer than keep + 1, InvalidParameter for keep > neighbors or numbers out of range.
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


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of a training; the defaults are the paper's.

    epochs: at most. patience: number of epochs without a better validation MRR that end the training earlier.
    batch: pairs in a step. learning_rate, least_rate: start and end of the cosine schedule. weight_decay: of
    AdamW. anchor_epochs: number of first epochs in which only the static maps of the anchored form learn,
    without weight decay, on a cosine schedule that begins at anchor_rate; the best of these maps are the
    start of the other epochs. temperature: τ. noise: factor of the U[0, 1]·N(0, 1) noise on queries; at 1 and
    u = 1 it is as long as the query. semi_positives: number kept of the `neighbors` nearest items of each
    answer; 0 is the plain loss. clip: maximum norm of the gradient; 0 clips nothing, as published. seed: of
    all random draws. mixed_precision: bfloat16 in the network if it trains on CUDA; on the CPU it is always
    float32.

    Raises InvalidParameter.
    """

    epochs: int = 100
    patience: int = 10
    batch: int = 320
    learning_rate: float = 1e-5
    least_rate: float = 2e-7
    anchor_epochs: int = 0
    anchor_rate: float = 3e-4
    weight_decay: float = 1e-2
    temperature: float = 0.07
    noise: float = 1.0
    semi_positives: int = 2
    neighbors: int = 100
    clip: float = 0.0
    seed: int = 0
    mixed_precision: bool = True

    def __post_init__(self) -> None:
        for name in ("epochs", "patience", "neighbors"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        object.__setattr__(self, "batch", whole_number("batch", self.batch, at_least=2))
        object.__setattr__(self, "seed", whole_number("seed", self.seed, at_least=0))
        first = whole_number("anchor_epochs", self.anchor_epochs, at_least=0, at_most=self.epochs)
        object.__setattr__(self, "anchor_epochs", first)
        kept = whole_number("semi_positives", self.semi_positives, at_least=0, at_most=self.neighbors)
        object.__setattr__(self, "semi_positives", kept)
        for name in ("learning_rate", "anchor_rate", "temperature"):
            object.__setattr__(self, name, positive_number(name, getattr(self, name)))
        for name in ("least_rate", "weight_decay", "noise", "clip"):
            value = finite_number(name, getattr(self, name))
            if value < 0:
                raise InvalidParameter(f"{name} must not be below 0: {value!r}")
            object.__setattr__(self, name, value)
        if self.least_rate > self.learning_rate:
            raise InvalidParameter(
                f"least_rate {self.least_rate:g} is above learning_rate {self.learning_rate:g}"
            )
        if not isinstance(self.mixed_precision, bool):
            raise InvalidParameter(f"mixed_precision must be true or false, not {self.mixed_precision!r}")

    def rate(self, step: int, steps_an_epoch: int) -> float:
        """Return the learning rate of a step, from 0: half a cosine from learning_rate to least_rate. The
        anchor epochs have their own, from anchor_rate down in the same proportion."""
        begin, first = steps_an_epoch * self.epochs, steps_an_epoch * self.anchor_epochs
        start, count, scale = first, begin - first, 1.0
        if step < first:
            start, count, scale = 0, first, self.anchor_rate / self.learning_rate
        fallen = (1 - math.cos(math.pi * (step - start) / max(1, count - 1))) / 2
        return scale * (self.learning_rate + (self.least_rate - self.learning_rate) * fallen)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, kept: dict[str, Any]) -> TrainingSettings:
        """Return the settings that gave this `to_dict`. Raises InvalidParameter."""
        try:
            return cls(**kept)
        except TypeError as error:
            raise InvalidParameter(f"no settings of a training: {error}") from None
