"""Sizes of a QuARI network, and which of its parts are there."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from milvus_hubness.errors import InvalidParameter
from milvus_hubness.kernels.arguments import finite_number, whole_number

Form = Literal["published", "residual", "anchored"]


@dataclass(frozen=True)
class QuariConfig:
    """What a `Quari` is built from.

    dim: d, of queries and gallery items. rank: r, how many products u_j v_jᵀ make T. width: of a token; a
    multiple of heads. layers: of the shared transformer; steps: L, how often it is applied. feedforward and
    hidden: width inside the transformer's and the decoders' MLPs, as multiples of `width`. dropout: in the
    transformer, while training.

    form: how T and q' come of what the decoders say of a query,
        "published"  T = Σ u_j v_jᵀ                             q' as decoded
        "residual"   T = I + Σ u_j v_jᵀ                         q' = q + decoded
        "anchored"   T = S + Σ u_j v_jᵀ                         q' = W q + decoded
    with S and W (d, d) learned for all queries. The last two start at the identity. anchors: how many
    eigenvectors of SᵀS tell ‖S r‖ of a candidate; from `dim` on it is exact.
    memory: how many training pairs the network remembers, by which q' is moved towards what pairs near to the
    query lacked (`quari.memory`); 0, as published, is none, and so it is for the published form.
    adapt_query and adapt_gallery: False leaves q' = q, or T = I (ablations).

    Raises InvalidParameter.
    """

    dim: int
    rank: int = 64
    width: int = 64
    layers: int = 4
    steps: int = 2
    heads: int = 4
    feedforward: int = 2
    hidden: int = 2
    dropout: float = 0.1
    form: Form = "residual"
    anchors: int = 64
    memory: int = 0
    adapt_query: bool = True
    adapt_gallery: bool = True

    def __post_init__(self) -> None:
        for name in ("dim", "rank", "width", "layers", "steps", "heads", "feedforward", "hidden", "anchors"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        object.__setattr__(self, "memory", whole_number("memory", self.memory, at_least=0))
        if self.width % self.heads or self.width % 2:
            raise InvalidParameter(f"width must be even and a multiple of heads = {self.heads}: {self.width}")
        if not 0 <= finite_number("dropout", self.dropout) < 1:
            raise InvalidParameter(f"dropout must be from 0 to below 1, not {self.dropout!r}")
        if self.form not in get_args(Form):
            raise InvalidParameter(f"form must be one of {', '.join(get_args(Form))}, not {self.form!r}")
        for name in ("adapt_query", "adapt_gallery"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(f"{name} must be true or false, not {getattr(self, name)!r}")
        if not (self.adapt_query or self.adapt_gallery):
            raise InvalidParameter("adapt_query and adapt_gallery are both off: nothing is left to learn")
        if self.memory and (self.form == "published" or not self.adapt_query):
            raise InvalidParameter("memory is for a query that is adapted, and not for the published form")

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, kept: dict[str, Any]) -> QuariConfig:
        """The config that gave this `to_dict`. Raises InvalidParameter."""
        try:
            return cls(**kept)
        except TypeError as error:
            raise InvalidParameter(f"no sizes of a network: {error}") from None
