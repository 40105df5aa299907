"""A fitted estimator at work on the vectors of one collection. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks import BankLike, QueryBank
from milvus_hubness.cells import NEAR, columns, evenly, lying
from milvus_hubness.errors import ZeroVectors
from milvus_hubness.estimators import Estimator, FittedBias, Transport, restore, to_dict
from milvus_hubness.estimators.inputs import TargetBank
from milvus_hubness.halves import Dtype, rounded
from milvus_hubness.kernels import topk
from milvus_hubness.layout import Floats, Layout
from milvus_hubness.state import BankReference, Beside, CollectionState, Profile


@dataclass(frozen=True)
class Correction:
    """Biases of a collection's vectors, in its own metric.

    centre: c, taken off every bias so that the stored column stays near zero, which costs an ANN index less
    recall; no ranking changes. are_new: whether the items came together after the fit, see
    `FittedBias.new_bias`.
    """

    layout: Layout
    fitted: FittedBias
    centre: float = 0.0
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
        """The estimator fitted on bank, gallery (n, d) and target bank as the layout's metric sees them.

        start: potentials of an earlier fit on this bank, for estimators that iterate. fit: what fits in place
        of the estimator's own, which it is given first. Raises DimensionMismatch, BankTooSmall,
        ZeroVectors for a bank of nothing else, and InvalidInput where the estimator needs what is not given.
        """
        bank = QueryBank.of(bank)
        if not bank.vectors.any():
            raise ZeroVectors(
                f"the bank from {bank.source} holds only zero vectors, which say nothing of any item: give "
                "queries as the application asks them"
            )
        reduced = _reduced_bank(layout, bank)
        others: dict[str, Any] = {
            "gallery": None if gallery is None else layout.reduce_items(_sound(layout, gallery)),
            "target_bank": None if target_bank is None else reduced_targets(layout, target_bank),
        }
        if isinstance(estimator, Transport):
            fits = start is not None and start.shape == (len(reduced), estimator.potentials)
            others["start"] = start if fits else None
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
        centre: float = 0.0,
    ) -> Correction:
        """An earlier fit from what was kept of it, without the gallery. Raises as `fit` does."""
        targets = None if target_bank is None else reduced_targets(layout, target_bank)
        fitted = restore(estimator, _reduced_bank(layout, bank), potentials, target_bank=targets)
        return cls(layout, fitted, centre)

    def cells(self, vectors: npt.ArrayLike) -> Floats:
        """(n, c) float32 what the layout's c cell columns hold for vectors (n, d), from their nearest bank
        queries; 0 where no bias can be computed."""
        rows = np.asarray(vectors, np.float32)
        sound = ~self.layout.unsound(rows)
        found = np.zeros((len(rows), self.layout.cell_count), np.float32)
        if found.size and sound.any():
            landmarks, there = self._landmarks
            near = topk(self.layout.reduce_items(rows[sound]), landmarks, min(NEAR, len(landmarks)))
            found[sound] = columns(there[np.asarray(near.indices)], self.layout.reach)
        return found

    @cached_property
    def _landmarks(self) -> tuple[Floats, Floats]:
        """Queries of the bank, and where they lie along the axes of the cell columns."""
        landmarks = evenly(self.fitted.bank.vectors)
        return landmarks, lying(landmarks, self.layout.cell_axes)

    def centred(self, vectors: npt.ArrayLike) -> Floats:
        """(n,) float32 b(r) − c of vectors (n, d); 0 where a row is zero under COSINE or not finite."""
        rows = np.asarray(vectors, np.float32)
        sound = ~self.layout.unsound(rows)
        biases = np.zeros(len(rows), np.float32)
        if sound.any():
            told = self.fitted.new_bias if self.are_new else self.fitted.bias
            biases[sound] = told(self.layout.reduce_items(rows[sound])) - np.float32(self.centre)
        return biases


def initial_state(
    layout: Layout,
    estimator: Estimator,
    bank: BankReference,
    *,
    field: str,
    suffix: str,
    dtype: Dtype,
    source: str,
    phase: Literal["copying", "ready"] = "ready",
    centre: float = 0.0,
    strength: float = 1.0,
    gate: int | None = None,
    gate_targets: int | None = None,
    beside: Beside | None = None,
    stored_in: str | None = None,
) -> CollectionState:
    """What a collection says of a field whose biases are its first: one profile, refreshed now."""
    profile = Profile(
        estimator=to_dict(estimator),
        slot=0,
        standby=1,
        centre=centre,
        strength=strength,
        gate=gate,
        gate_targets=gate_targets,
        bank=bank,
        epoch=1,
        refreshed_at=datetime.now(timezone.utc),
    )
    return CollectionState(
        field=field,
        suffix=suffix,
        metric=layout.metric,
        dim=layout.dim,
        slots=layout.slots,
        multiple_of=layout.multiple_of,
        dtype=dtype,
        offset=layout.offset,
        scale=layout.scale,
        anchor=layout.anchor,
        pull=layout.pull,
        cells=layout.cells,
        reach=layout.reach,
        mean=layout.mean,
        source=source,
        phase=phase,
        profiles={"default": profile},
        beside=beside,
        stored_in=stored_in,
    )


def _reduced_bank(layout: Layout, bank: BankLike) -> QueryBank:
    bank = QueryBank.of(bank)
    bank.expect_dim(layout.dim, "the field")
    return QueryBank(layout.reduce_queries(bank.vectors), source=bank.source)


def reduced_targets(layout: Layout, bank: BankLike) -> TargetBank:
    """A target bank as the layout's metric sees it. Raises DimensionMismatch, and EmptyBank where none of its
    rows is sound."""
    bank = QueryBank.of(bank)
    bank.expect_dim(layout.dim, "the field")
    rows = _sound(layout, bank.vectors)
    return TargetBank(layout.reduce_items(rows), bank.source, asking=layout.reduce_queries(rows))


def _sound(layout: Layout, vectors: npt.ArrayLike) -> Floats:
    """Items an estimator may learn from: rows without a direction or with NaN teach nothing."""
    rows = np.asarray(vectors, np.float32)
    return rows[~layout.unsound(rows)]


def hidden_columns(
    state: CollectionState, vectors: npt.ArrayLike, biases: npt.ArrayLike, epoch: int
) -> list[dict[str, Any]]:
    """The scalar fields that go beside each stored vector: bias, epoch and, under COSINE, the norm."""
    values = np.asarray(biases, np.float32).tolist()
    columns = [{state.bias_field: bias, state.epoch_field: epoch} for bias in values]
    if state.norm_field:
        for column, norm in zip(columns, state.layout.norms(vectors).tolist(), strict=True):
            column[state.norm_field] = norm
    return columns


def read_back(state: CollectionState, stored: npt.ArrayLike, hidden: Sequence[Mapping[str, Any]]) -> Floats:
    """(n, d) the vectors that the user gave, from stored ones (n, width) and the columns beside them."""
    norms = [columns[state.norm_field] for columns in hidden] if state.norm_field else None
    return rounded(state.layout.strip(stored, norms), state.dtype)
