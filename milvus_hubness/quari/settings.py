"""How a QuARI network is trained."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from milvus_hubness.errors import InvalidParameter
from milvus_hubness.kernels.arguments import finite_number, positive_number, whole_number


@dataclass(frozen=True)
class TrainingSettings:
    """The paper's settings unless set otherwise.

    epochs: at most; patience: how many without a better validation MRR end it before. batch: pairs in a step.
    learning_rate, least_rate: where the cosine begins and ends. weight_decay: of AdamW.
    anchor_epochs: at first, in which only the static maps of the anchored form learn, without weight decay,
    on a cosine of their own from anchor_rate; the best of them stay, and are where the others begin.
    temperature: τ. noise: of the U[0, 1]·N(0, 1) on queries; at 1 and u = 1 it is as long as the query.
    semi_positives: kept of the `neighbors` nearest items of each answer; 0 is the plain loss. clip: the
    gradient's norm at most; 0 clips nothing, as published. seed: of everything that is drawn.
    mixed_precision: bfloat16 in the network where it trains on CUDA; on the CPU it is always float32.

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
        """The learning rate of a step, from 0: half a cosine from learning_rate to least_rate; over the
        anchor epochs one of its own, from anchor_rate down in the same proportion."""
        begin, first = steps_an_epoch * self.epochs, steps_an_epoch * self.anchor_epochs
        start, count, scale = first, begin - first, 1.0
        if step < first:
            start, count, scale = 0, first, self.anchor_rate / self.learning_rate
        fallen = (1 - math.cos(math.pi * (step - start) / max(1, count - 1))) / 2
        return scale * (self.learning_rate + (self.least_rate - self.learning_rate) * fallen)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, kept: dict[str, Any]) -> TrainingSettings:
        """The settings that gave this `to_dict`. Raises InvalidParameter."""
        try:
            return cls(**kept)
        except TypeError as error:
            raise InvalidParameter(f"no settings of a training: {error}") from None
