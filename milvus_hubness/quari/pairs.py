"""Labelled pairs of frozen embeddings, to train and to judge on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks import as_vectors
from milvus_hubness.errors import BankTooSmall, DimensionMismatch, InvalidInput
from milvus_hubness.kernels.arguments import finite_number

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Queries and the gallery item that answers each; several queries may share one.

    queries (n, d), gallery (g, d): of finite numbers, kept at unit length. answers (n,): the number of each
    query's item; by default item i answers query i. left_out: how many pairs were without a direction, the
    query or the item being all zeros, from which nothing can be learned.

    Raises DimensionMismatch, NonFiniteVectors, and InvalidInput where queries and answers are of unequal
    number, an answer is no item, or no pair is left.
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
        """d."""
        return int(self.queries.shape[1])

    @property
    def of(self) -> npt.NDArray[np.int64]:
        """(n,) `answers`, which are never None once the pairs are made."""
        answers: npt.NDArray[np.int64] = np.asarray(self.answers)
        return answers

    @property
    def fingerprint(self) -> str:
        """Of all that is in the pairs, to tell whether others are the same."""
        digest = hashlib.sha256()
        for part in (self.queries, self.gallery, self.of):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()[:16]

    def split(self, share: float, seed: int) -> tuple[Pairs, Pairs]:
        """Pairs to train on, and about this share of them to validate on. An item that answers, with all its
        queries, is on one side only; items that answer nothing are on both.

        Raises InvalidParameter, and BankTooSmall where a side would have fewer than two items that answer.
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
    """(n, d) the rows at length 1; zero rows as they are."""
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return np.ascontiguousarray(rows / np.where(lengths > 0, lengths, 1), np.float32)
