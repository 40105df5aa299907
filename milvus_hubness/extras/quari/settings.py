"""The sizes of linear maps and of QuARI's network, and the settings of their training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from milvus_hubness.basics.defaults import EPOCHS, FORM, MAP_EPOCHS
from milvus_hubness.basics.words import expect_word
from milvus_hubness.correction.kernels.checks import (
    convert_fields,
    finite_number,
    positive_number,
    whole_number,
)
from milvus_hubness.errors import InvalidParameter

MOST_STEPS = 1_024
"""Maximum number of layers, and of steps."""
Form = Literal["linear", "published"]
"""What maps queries and items: two learned matrices, or the authors' network."""
MAPS = {"epochs": MAP_EPOCHS, "learning_rate": 3e-4, "least_rate": 6e-6, "weight_decay": 0.0}


@dataclass(frozen=True)
class QuariConfig:
    """The sizes and options of a `Quari`. Raises InvalidParameter."""

    dim: int
    """d, the dimension of the vectors."""
    rank: int = 64
    """r, the number of products u_j v_jᵀ in T. Of the network."""
    width: int = 512
    """Width of a token: even, and a multiple of `heads`. Of the network."""
    layers: int = 4
    """Number of layers of the shared transformer. Of the network."""
    steps: int = 4
    """L, how often the transformer is applied. Of the network."""
    heads: int = 8
    """Number of attention heads. Of the network."""
    dropout: float = 0.1
    """Dropout in training. Of the network."""
    form: Form = FORM
    """What maps queries and items (`quari.model`). "linear": T = S and q' = W q, with S and W (d,
    d) learned for all queries, from the identity. "published": the authors' network; the defaults
    of its fields are those of their code (github.com/mvrl/QuARI)."""
    directions: int = 64
    """Number of eigenvectors of SᵀS that approximate ‖S r‖ of a candidate, exact from `dim` on. Of
    linear maps."""
    memory: int = 0
    """Number of training pairs whose errors move q', at most as many as there are. Of linear maps.
    """
    map_scale: float = 0.8
    """a in T = I + a Σ u_j v_jᵀ / (‖U‖ ‖V‖). Of the network."""
    query_weight: float = 0.5
    """c in q' = c q + (1 − c) decoded. Of the network."""

    @classmethod
    def published(cls, dim: int, **changed: Any) -> QuariConfig:
        """Return the sizes and options of the authors' network. changed: other fields, by name."""
        return cls(dim, form="published", **changed)

    def __post_init__(self) -> None:
        # A checkpoint's sizes are claims of a file: later arithmetic may rely on whole numbers.
        convert_fields(self, whole_number, "dim", "rank", "width", "heads", "directions")
        convert_fields(self, whole_number, "layers", "steps", at_most=MOST_STEPS)
        convert_fields(self, whole_number, "memory", at_least=0)

        # Positions are pairs of a sine and a cosine, and each head has an equal share of a token.
        if self.width % self.heads or self.width % 2:
            raise InvalidParameter(
                f"width must be even and a multiple of heads = {self.heads}: {self.width}"
            )
        if not 0 <= finite_number("dropout", self.dropout) < 1:
            raise InvalidParameter(f"dropout must be from 0 to below 1, not {self.dropout!r}")
        expect_word("form", self.form, Form)
        if self.memory and self.form != "linear":
            raise InvalidParameter(f"memory is for the form linear, not for {self.form}")

        convert_fields(self, finite_number, "map_scale", "query_weight")
        if not 0 <= self.query_weight < 1 or self.map_scale < 0:
            raise InvalidParameter(
                "query_weight must be from 0 to below 1, and map_scale not below 0"
            )


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of a training. Raises InvalidParameter.

    The defaults are the paper's; `linear` has those for linear maps.
    """

    epochs: int = EPOCHS
    """Maximum number of epochs."""
    patience: int = 10
    """Number of epochs without a better validation MRR that end the training earlier."""
    batch: int = 320
    """Number of pairs in a step."""
    learning_rate: float = 1e-5
    """Start of the cosine schedule."""
    least_rate: float = 2e-7
    """End of the cosine schedule."""
    weight_decay: float = 1e-2
    """Weight decay of AdamW."""
    temperature: float = 0.07
    """τ of the loss."""
    noise: float = 1.0
    """Factor of the U[0, 1]·N(0, 1) noise on queries, which at 1 is as long as a query, or for the
    published network as large in each coordinate."""
    semi_positives: int = 2
    """How many of the `neighbors` nearest items of each answer count; 0 is the plain loss."""
    neighbors: int = 100
    """Number of nearest items among which the weights of semi-positives are shared."""
    seed: int = 0
    """Seed of the order of batches, of the noise and of the pairs held out."""

    @classmethod
    def linear(cls, **changed: Any) -> TrainingSettings:
        """Return the settings for linear maps: fewer and larger steps, without weight decay.

        changed: other fields, by name.
        """
        return cls(**{**MAPS, **changed})

    def __post_init__(self) -> None:
        convert_fields(self, whole_number, "epochs", "patience", "neighbors")
        convert_fields(self, whole_number, "batch", at_least=2)
        convert_fields(self, whole_number, "seed", at_least=0)
        # After `neighbors`, which must be a number to be a limit.
        convert_fields(self, whole_number, "semi_positives", at_least=0, at_most=self.neighbors)

        convert_fields(self, positive_number, "learning_rate", "temperature")
        convert_fields(self, finite_number, "least_rate", "weight_decay", "noise")
        for name in ("least_rate", "weight_decay", "noise"):
            if getattr(self, name) < 0:
                raise InvalidParameter(f"{name} must not be below 0: {getattr(self, name)!r}")

        if self.least_rate > self.learning_rate:
            raise InvalidParameter(
                f"least_rate {self.least_rate:g} is above learning_rate {self.learning_rate:g}"
            )

    def rate(self, step: int, steps_per_epoch: int) -> float:
        """Return the learning rate of a step, from 0.

        It falls along half a cosine from learning_rate to least_rate.
        """
        last_step = max(1, steps_per_epoch * self.epochs - 1)
        fallen = (1 - math.cos(math.pi * step / last_step)) / 2
        return self.learning_rate + (self.least_rate - self.learning_rate) * fallen
