"""A convex mix of estimators: b(r) = Σ_e w_e · b_e(r), w_e ≥ 0, Σ_e w_e = 1. A method of this package."""

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
from milvus_hubness.correction.estimators.sinkhorn import Sinkhorn
from milvus_hubness.correction.kernels.checks import finite_number
from milvus_hubness.errors import InvalidParameter


class BlendDiagnostics(NamedTuple):
    """Diagnostics of the parts, in their order."""

    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Blend(Estimator, alias="blend"):
    """b(r) = Σ_e w_e · b_e(r) over fitted estimators e.

    estimators: at least one. weights: one each, not negative, with sum 1. strength: by default the
    agreement ρ of the bank's halves. The default, ρ · (½ RelativeNNN(8) + ½
    Sinkhorn(temperature=0.375)), is the choice without labelled pairs.
    """

    estimators: Sequence[Estimator] = (RelativeNNN(8), Sinkhorn(temperature=0.375))
    weights: Sequence[float] = (0.5, 0.5)
    strength: Strength = field(default="agreement", repr=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("estimators", "weights"):
            values = getattr(self, name)
            if not isinstance(values, Iterable):
                raise InvalidParameter(f"{name} must be a list, not {values!r}")
            object.__setattr__(self, name, tuple(values))
        for part in self.estimators:
            if not isinstance(part, Estimator):
                raise InvalidParameter(f"a Blend is of estimators; {part!r} is none")
        weights = tuple(finite_number("a weight", weight) for weight in self.weights)
        object.__setattr__(self, "weights", weights)
        if not self.estimators or len(self.estimators) != len(weights):
            raise InvalidParameter(
                f"a Blend needs one weight per estimator, not {len(weights)} for {len(self.estimators)}"
            )
        if min(weights) < 0 or not math.isclose(sum(weights), 1, abs_tol=1e-6):
            raise InvalidParameter(
                f"weights must not be negative and have the sum 1, not {weights}"
            )

    @property
    def needs_gallery(self) -> bool:
        return super().needs_gallery or any(part.needs_gallery for part in self.estimators)

    @property
    def needs_target_bank(self) -> bool:
        return any(part.needs_target_bank for part in self.estimators)

    @property
    def potentials(self) -> int:
        return sum(part.potentials for part in self.estimators)

    def _fit(self, bank: QueryBank, inputs: FitInputs) -> FittedBias:
        start = (
            None if inputs.start is None else check_potentials(bank, inputs.start, self.potentials)
        )
        fits = [
            part.fit(
                bank,
                gallery=inputs.gallery,
                target_bank=inputs.target_bank,
                start=start[:, columns] if start is not None and part.potentials else None,
            )
            for part, columns in self.parts()
        ]
        return self._mixed(bank, fits)

    def restore(
        self, bank: BankLike, potentials: npt.ArrayLike, *, target_bank: BankLike | None = None
    ) -> FittedBias:
        bank = QueryBank.of(bank)
        whole = check_potentials(bank, potentials, self.potentials)
        fits = [
            part.restore(bank, whole[:, columns], target_bank=target_bank)
            for part, columns in self.parts()
        ]
        return self._mixed(bank, fits)

    def unmeasured(self) -> Blend:
        return replace(
            self, estimators=tuple(part.unmeasured() for part in self.estimators), agreement=None
        )

    def clamped(self, bank_size: int) -> Blend:
        return replace(self, estimators=tuple(part.clamped(bank_size) for part in self.estimators))

    def parts(self) -> Iterator[tuple[Estimator, slice]]:
        """Yield each estimator with its columns of the potentials."""
        start = 0
        for part in self.estimators:
            end = start + part.potentials
            yield part, slice(start, end)
            start = end

    def _mixed(self, bank: QueryBank, parts: Sequence[FittedBias]) -> FittedBias:
        def mixed(biases: Sequence[Vectors]) -> npt.NDArray[np.float64]:
            return np.asarray(self.weights) @ np.stack(biases).astype(np.float64)

        def formula(*, are_new: bool) -> Formula:
            def of_vectors(items: Vectors) -> Numbers:
                return mixed(
                    [part.new_bias(items) if are_new else part.bias(items) for part in parts]
                )

            def of_products(products: Numbers) -> Numbers:
                return mixed([part.bias_of_products(products, are_new=are_new) for part in parts])

            every_part_has_it = all(part.takes_products for part in parts)
            return Formula(of_vectors, of_products if every_part_has_it else None)

        return FittedBias(
            estimator=replace(self, estimators=tuple(part.estimator for part in parts)),
            bank=bank,
            formula=formula(are_new=False),
            diagnostics=BlendDiagnostics(tuple(part.diagnostics for part in parts)),
            potentials=np.hstack([part.potentials for part in parts]),
            new_formula=formula(are_new=True),
        )
