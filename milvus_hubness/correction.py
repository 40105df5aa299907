"""A fitted estimator applied to the vectors of one collection. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks.bank import BankLike, QueryBank
from milvus_hubness.codec.arrays import Floats
from milvus_hubness.codec.half_precision import Dtype, rounded
from milvus_hubness.codec.index_hints import NEAR, columns, evenly, lying
from milvus_hubness.codec.layout import Layout
from milvus_hubness.errors import ZeroVectors
from milvus_hubness.estimators import Estimator, FittedBias, Transport, restore, to_dict
from milvus_hubness.estimators.base import TargetBank
from milvus_hubness.kernels import topk
from milvus_hubness.state import BankReference, CandidateReranking, CollectionState, Profile


@dataclass(frozen=True)
class Correction:
    """Biases of a collection's vectors, in its own metric.

    mean_bias: c, taken off every bias so that the stored column stays near zero, which costs an ANN index
    less recall; no ranking changes. are_new: whether the items came together after the fit, see
    `FittedBias.new_bias`."""

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
            "gallery": None if gallery is None else layout.reduce_items(_valid(layout, gallery)),
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
        mean_bias: float = 0.0,
    ) -> Correction:
        """An earlier fit from what was kept of it, without the gallery. Raises as `fit` does."""
        targets = None if target_bank is None else reduced_targets(layout, target_bank)
        fitted = restore(estimator, _reduced_bank(layout, bank), potentials, target_bank=targets)
        return cls(layout, fitted, mean_bias)

    def locality_hints(self, vectors: npt.ArrayLike) -> Floats:
        """(n, c) float32 what the layout's c locality hint columns hold for vectors (n, d), from their
        nearest bank queries; 0 where no bias can be computed."""
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
        """Queries of the bank, and where they lie along the axes of the locality hint columns."""
        landmarks = evenly(self.fitted.bank.vectors)
        return landmarks, lying(landmarks, self.layout.locality_directions)

    def centred(self, vectors: npt.ArrayLike) -> Floats:
        """(n,) float32 b(r) − c of vectors (n, d); 0 where a row is zero under COSINE or not finite."""
        rows = np.asarray(vectors, np.float32)
        valid = ~self.layout.invalid(rows)
        biases = np.zeros(len(rows), np.float32)
        if valid.any():
            told = self.fitted.new_bias if self.are_new else self.fitted.bias
            biases[valid] = told(self.layout.reduce_items(rows[valid])) - np.float32(self.mean_bias)
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
    mean_bias: float = 0.0,
    strength: float = 1.0,
    gate: int | None = None,
    gate_targets: int | None = None,
    reranking: CandidateReranking | None = None,
    second_vector: str | None = None,
) -> CollectionState:
    """What a collection says of a field whose biases are its first: one profile, refreshed now."""
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
        locality_hints=layout.locality_hints,
        reach=layout.reach,
        mean=layout.mean,
        source=source,
        phase=phase,
        profiles={"default": profile},
        reranking=reranking,
        second_vector=second_vector,
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
    rows = _valid(layout, bank.vectors)
    return TargetBank(layout.reduce_items(rows), bank.source, asking=layout.reduce_queries(rows))


def _valid(layout: Layout, vectors: npt.ArrayLike) -> Floats:
    """Items an estimator may learn from: rows without a direction or with NaN teach nothing."""
    rows = np.asarray(vectors, np.float32)
    return rows[~layout.invalid(rows)]


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
    return rounded(state.layout.decode_vectors(stored, norms), state.dtype)
