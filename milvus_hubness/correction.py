"""A fitted estimator applied to the vectors of one collection. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks.bank import BankLike, QueryBank
from milvus_hubness.codec.arrays import Floats
from milvus_hubness.codec.base import RowBiases
from milvus_hubness.codec.index_hints import NEAR, columns, evenly, lying
from milvus_hubness.codec.layout import Layout
from milvus_hubness.errors import ZeroVectors
from milvus_hubness.estimators import Estimator, FittedBias, to_dict
from milvus_hubness.estimators.base import TargetBank
from milvus_hubness.kernels import topk
from milvus_hubness.state import BankReference, CollectionState, Profile


@dataclass(frozen=True)
class Correction:
    """Biases of a collection's vectors, in its own metric.

    mean_bias: c, subtracted from every bias so that the stored column stays near zero, which costs an ANN index less
    recall; no ranking changes. are_new: whether the items were added together after the fit, see `FittedBias.new_bias`.
    """

    layout: Layout
    fitted: FittedBias
    mean_bias: float = 0.0
    are_new: bool = False

    @classmethod
    def fit(
        cls,
        layout: Layout,
        estimator: Estimator,
        bank: BankLike,
        *,
        gallery: npt.ArrayLike | None = None,
        target_bank: BankLike | None = None,
        start: Floats | None = None,
        fit: Callable[..., FittedBias] | None = None,
    ) -> Correction:
        """Fit the estimator on the bank, gallery (n, d) and target bank.

        The layout reduces them to inner products. start: potentials of an earlier fit on this bank, for
        iterative estimators. fit: a function called in place of the estimator's own `fit`; its first argument
        is the estimator. Raises DimensionMismatch, BankTooSmall, ZeroVectors for a bank of zero vectors only,
        and InvalidInput if the estimator needs an argument that is missing.
        """
        bank = QueryBank.of(bank)
        if not bank.vectors.any():
            raise ZeroVectors(
                f"the bank from {bank.source} holds only zero vectors, which say nothing of any item: give "
                "queries as the application asks them"
            )
        reduced = _reduced_bank(layout, bank)
        others: dict[str, Any] = {
            "gallery": None if gallery is None else layout.reduce_items(_valid(layout, gallery)),
            "target_bank": None if target_bank is None else reduced_targets(layout, target_bank),
        }
        if start is not None and start.shape == (len(reduced), estimator.potentials):
            others["start"] = start
        if fit is not None:
            return cls(layout, fit(estimator, reduced, **others))
        return cls(layout, estimator.fit(reduced, **others))

    @classmethod
    def restore(
        cls,
        layout: Layout,
        estimator: Estimator,
        bank: BankLike,
        potentials: Floats,
        *,
        target_bank: BankLike | None = None,
        mean_bias: float = 0.0,
    ) -> Correction:
        """Restore an earlier fit from its bank and potentials, without the gallery. Raises as `fit` does."""
        targets = None if target_bank is None else reduced_targets(layout, target_bank)
        fitted = estimator.restore(_reduced_bank(layout, bank), potentials, target_bank=targets)
        return cls(layout, fitted, mean_bias)

    def locality_hints(self, vectors: npt.ArrayLike) -> Floats:
        """Return the numbers of the layout's c locality hint columns for vectors (n, d), float32 (n, c).

        They come from the nearest bank queries of each vector; 0 for vectors that can have no bias.
        """
        rows = np.asarray(vectors, np.float32)
        valid = ~self.layout.invalid(rows)
        found = np.zeros((len(rows), self.layout.locality_hint_count), np.float32)
        if found.size and valid.any():
            landmarks, there = self._landmarks
            near = topk(self.layout.reduce_items(rows[valid]), landmarks, min(NEAR, len(landmarks)))
            found[valid] = columns(there[np.asarray(near.indices)], self.layout.reach)
        return found

    @cached_property
    def _landmarks(self) -> tuple[Floats, Floats]:
        """Queries of the bank, and their coordinates along the axes of the locality hint columns."""
        landmarks = evenly(self.fitted.bank.vectors)
        return landmarks, lying(landmarks, self.layout.locality_directions)

    def centred(self, vectors: npt.ArrayLike) -> Floats:
        """Return b(r) − c of vectors (n, d), float32 (n,).

        It is 0 for rows that are not finite or, under COSINE, zero.
        """
        rows = np.asarray(vectors, np.float32)
        valid = ~self.layout.invalid(rows)
        biases = np.zeros(len(rows), np.float32)
        if valid.any():
            told = self.fitted.new_bias if self.are_new else self.fitted.bias
            biases[valid] = told(self.layout.reduce_items(rows[valid])) - np.float32(self.mean_bias)
        return biases


def row_biases(
    corrections: Mapping[int, Correction], vectors: Floats, state: CollectionState, epoch: int | None
) -> RowBiases:
    """Return the biases of vectors (n, d) from the corrections by slot, and their locality hints.

    Slots that share a correction share its biases. The hints are those of the active profile.
    """
    distinct = {id(correction): correction for correction in corrections.values()}
    biases = {number: correction.centred(vectors) for number, correction in distinct.items()}
    by_slot = {slot: biases[id(correction)] for slot, correction in corrections.items()}
    return RowBiases(by_slot, epoch, corrections[state.profile.slot].locality_hints(vectors))


def initial_state(
    layout: Layout,
    estimator: Estimator,
    bank: BankReference,
    *,
    mean_bias: float = 0.0,
    strength: float = 1.0,
    gate: int | None = None,
    gate_targets: int | None = None,
    **others: Any,
) -> CollectionState:
    """Return the first state of a field: one profile, refreshed now. others: further fields of the state."""
    profile = Profile(
        estimator=to_dict(estimator),
        slot=0,
        standby=1,
        mean_bias=mean_bias,
        strength=strength,
        gate=gate,
        gate_targets=gate_targets,
        bank=bank,
        epoch=1,
        refreshed_at=datetime.now(timezone.utc),
    )
    return CollectionState(layout=layout, profiles={"default": profile}, **others)


def _reduced_bank(layout: Layout, bank: BankLike) -> QueryBank:
    bank = QueryBank.of(bank)
    bank.expect_dim(layout.dim, "the field")
    return QueryBank(layout.reduce_queries(bank.vectors), source=bank.source)


def reduced_targets(layout: Layout, bank: BankLike) -> TargetBank:
    """Reduce a target bank to inner products.

    Raises DimensionMismatch, and EmptyBank if it has no valid row.
    """
    bank = QueryBank.of(bank)
    bank.expect_dim(layout.dim, "the field")
    rows = _valid(layout, bank.vectors)
    return TargetBank(layout.reduce_items(rows), bank.source, asking=layout.reduce_queries(rows))


def _valid(layout: Layout, vectors: npt.ArrayLike) -> Floats:
    """Return the rows that are finite and, under COSINE, not zero."""
    rows = np.asarray(vectors, np.float32)
    return rows[~layout.invalid(rows)]
