"""A convex mix of estimators: b(r) = Σ_e w_e · b_e(r), w_e ≥ 0, Σ_e w_e = 1.

A method of this package.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.banks.bank import BankLike, QueryBank, Vectors
from milvus_hubness.correction.estimators.base import (
    Estimator,
    FitInputs,
    FittedBias,
    Formula,
    Strength,
    check_potentials,
)
from milvus_hubness.correction.estimators.products import Numbers
from milvus_hubness.correction.estimators.relative_nnn import RelativeNNN
from milvus_hubness.correction.estimators.sinkhorn import Sinkhorn, neighbors_for, shared_fits
from milvus_hubness.correction.kernels.checks import finite_number
from milvus_hubness.correction.kernels.token_rows import is_token_rows
from milvus_hubness.errors import InvalidParameter


class BlendDiagnostics(NamedTuple):
    """Diagnostics of a Blend."""

    by_estimator: tuple[Any, ...]
    """Those of its estimators, in their order."""


@dataclass(frozen=True)
class Blend(Estimator, alias="blend"):
    """b(r) = Σ_e w_e · b_e(r) over fitted estimators e.

    The default, ρ · (½ RelativeNNN(8) + ½ Sinkhorn(temperature=0.375)), is the choice without
    labelled pairs.
    """

    estimators: Sequence[Estimator] = (RelativeNNN(8), Sinkhorn(temperature=0.375))
    """At least one."""
    weights: Sequence[float] = (0.5, 0.5)
    """One for each estimator, not negative, with sum 1."""
    strength: Strength = field(default="agreement", repr=False, kw_only=True)
    """By default the agreement ρ of the bank's halves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # JSON has lists, but a frozen estimator is hashable only with tuples.
        for name in ("estimators", "weights"):
            values = getattr(self, name)
            if not isinstance(values, Iterable):
                raise InvalidParameter(f"{name} must be a list, not {values!r}")
            object.__setattr__(self, name, tuple(values))

        for estimator in self.estimators:
            if not isinstance(estimator, Estimator):
                raise InvalidParameter(f"a Blend is of estimators; {estimator!r} is none")
        weights = tuple(finite_number("a weight", weight) for weight in self.weights)
        object.__setattr__(self, "weights", weights)

        if not self.estimators or len(self.estimators) != len(weights):
            raise InvalidParameter(
                f"a Blend needs one weight per estimator, not {len(weights)} for "
                f"{len(self.estimators)}"
            )
        if min(weights) < 0 or not math.isclose(sum(weights), 1, abs_tol=1e-6):
            raise InvalidParameter(
                f"weights must not be negative and have the sum 1, not {weights}"
            )

    @property
    def needs_gallery(self) -> bool:
        return super().needs_gallery or any(
            estimator.needs_gallery for estimator in self.estimators
        )

    @property
    def needs_target_bank(self) -> bool:
        return any(estimator.needs_target_bank for estimator in self.estimators)

    @property
    def potentials(self) -> int:
        return sum(estimator.potentials for estimator in self.estimators)

    @property
    def share(self) -> float:
        shares = [estimator.share for estimator in self.estimators]
        return self.factor_on_formula * float(np.dot(self.weights, shares))

    def gallery_scores(self, potentials: Vectors) -> Vectors | None:
        for estimator, columns in self.with_columns():
            scores = estimator.gallery_scores(potentials[:, columns])
            if scores is not None:
                return scores
        return None

    def gallery_biases(
        self, bank: BankLike, gallery: Vectors, target_bank: BankLike | None = None
    ) -> Vectors:
        if self.strength == "agreement":
            return super().gallery_biases(bank, gallery, target_bank)
        biases = [each.gallery_biases(bank, gallery, target_bank) for each in self.estimators]
        weights = self.strength * np.asarray(self.weights)
        return np.asarray(weights @ np.stack(biases).astype(np.float64), np.float32)

    def _fit(self, bank: QueryBank, inputs: FitInputs) -> FittedBias:
        start = None
        if inputs.start is not None:
            start = check_potentials(bank, inputs.start, self.potentials)

        # Each that starts from potentials of its own needs passes of its own, but few of them.
        together = shared_fits(self.estimators, bank, inputs) if start is None else {}
        fits = []
        for number, (estimator, columns) in enumerate(self.with_columns()):
            if number in together:
                fits.append(together[number])
                continue
            own_start = None
            if start is not None and estimator.potentials:
                own_start = start[:, columns]
            fitted = estimator.fit(
                bank, gallery=inputs.gallery, target_bank=inputs.target_bank, start=own_start
            )
            fits.append(fitted)
        return self._mixed(bank, fits)

    def _restore(
        self, bank: QueryBank, potentials: Vectors, target_bank: BankLike | None
    ) -> FittedBias:
        fits = [
            estimator.restore(bank, potentials[:, columns], target_bank=target_bank)
            for estimator, columns in self.with_columns()
        ]
        return self._mixed(bank, fits)

    def unmeasured(self) -> Blend:
        estimators = tuple(estimator.unmeasured() for estimator in self.estimators)
        return replace(self, estimators=estimators, agreement=None)

    def clamped(self, bank_size: int) -> Blend:
        estimators = tuple(estimator.clamped(bank_size) for estimator in self.estimators)
        return replace(self, estimators=estimators)

    def with_columns(self) -> Iterator[tuple[Estimator, slice]]:
        """Yield each estimator with its columns of the potentials."""
        start = 0
        for estimator in self.estimators:
            end = start + estimator.potentials
            yield estimator, slice(start, end)
            start = end

    def _mixed(self, bank: QueryBank, fits: Sequence[FittedBias]) -> FittedBias:
        """Return the fit whose biases are the weighted sum of those of the fits."""

        def mixed(biases: Sequence[Vectors]) -> npt.NDArray[np.float64]:
            return np.asarray(self.weights) @ np.stack(biases).astype(np.float64)

        def formula(*, are_new: bool) -> Formula:
            def of_vectors(items: Vectors) -> Numbers:
                return mixed([fit.new_bias(items) if are_new else fit.bias(items) for fit in fits])

            def of_products(products: Numbers) -> Numbers:
                return mixed([fit.bias_of_products(products, are_new=are_new) for fit in fits])

            # One estimator that needs vectors makes the others' products useless.
            all_take_products = all(fit.takes_products for fit in fits)
            return Formula(of_vectors, of_products if all_take_products else None)

        return FittedBias(
            # With what each fit measured, so that the Blend can be restored as it was fitted.
            estimator=replace(self, estimators=tuple(fit.estimator for fit in fits)),
            bank=bank,
            formula=formula(are_new=False),
            diagnostics=BlendDiagnostics(tuple(fit.diagnostics for fit in fits)),
            potentials=np.hstack([fit.potentials for fit in fits]),
            new_formula=formula(are_new=True),
        )


def default_blend_in_full(bank: QueryBank, items: Vectors) -> Blend:
    """Return the default Blend at full strength, as a look at a bank fits it on items (n, d): see
    `neighbors_for`.
    """
    relative, sinkhorn = Blend().estimators
    assert isinstance(sinkhorn, Sinkhorn), "it is a part of the default"
    # Scores of several vectors are computed once and stored, and take far longer than the iterations.
    if not is_token_rows(items):
        sinkhorn = replace(sinkhorn, neighbors=neighbors_for(len(bank) * len(items)))
    return Blend((relative, sinkhorn), strength=1.0).clamped(len(bank))
