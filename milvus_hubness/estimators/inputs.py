"""The other inputs of a fit, checked against the bank."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks import BankLike, QueryBank, Vectors, as_vectors
from milvus_hubness.errors import InvalidInput
from milvus_hubness.estimators.base import no_potentials


@dataclass(frozen=True, eq=False)
class TargetBank(QueryBank):
    """Items under a metric that reduces items and queries to different vectors, as L2 is reduced to IP.

    vectors: (t, d) as items, to be balanced against the bank. asking: (t, d) float32 as queries, whose inner
    products with items are similarities.
    """

    asking: Vectors = field(default_factory=lambda: np.empty((0, 0), np.float32), repr=False)


def check_potentials(bank: QueryBank, potentials: npt.ArrayLike, columns: int) -> Vectors:
    """`potentials` as float32 (|bank|, columns); raises InvalidInput for another shape, NonFiniteVectors."""
    shape = np.shape(potentials)
    if shape != (len(bank), columns):
        raise InvalidInput(f"potentials must have shape ({len(bank)}, {columns}), not {shape}")
    return as_vectors(potentials, "the potentials") if columns else no_potentials(bank)


def require_gallery(bank: QueryBank, gallery: npt.ArrayLike | None, who: str) -> Vectors:
    """The gallery as float32 (n, d), n ≥ 1; raises InvalidInput without one, DimensionMismatch."""
    if gallery is None:
        raise InvalidInput(f"{who} is fitted on the gallery: pass gallery=…")
    return _beside(bank, as_vectors(gallery, "the gallery"), "the gallery")


def require_target_bank(bank: QueryBank, target_bank: BankLike | None, who: str) -> Vectors:
    """The target bank as float32 (n, d), n ≥ 1; raises InvalidInput without one, DimensionMismatch."""
    if target_bank is None:
        raise InvalidInput(f"{who} needs a bank of items beside that of queries: pass target_bank=…")
    if isinstance(target_bank, QueryBank):
        target_bank = target_bank.vectors
    return _beside(bank, as_vectors(target_bank, "the target bank"), "the target bank")


def require_asking_targets(bank: QueryBank, target_bank: BankLike | None, who: str) -> Vectors:
    """As `require_target_bank`, the targets as queries."""
    items = require_target_bank(bank, target_bank, who)
    return target_bank.asking if isinstance(target_bank, TargetBank) else items


def _beside(bank: QueryBank, vectors: Vectors, what: str) -> Vectors:
    bank.expect_dim(vectors.shape[1], what)
    if len(vectors) == 0:
        raise InvalidInput(f"{what} is empty")
    return vectors
