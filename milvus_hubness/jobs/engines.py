"""What computes biases for a refresh or a migration: this process, the database by its own search over the
bank, or the workers of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks import QueryBank
from milvus_hubness.beyond import RayBiases
from milvus_hubness.correction import Correction, reduced_targets
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.estimators import CSLS, NNN, Estimator
from milvus_hubness.estimators.nearest import Nearest
from milvus_hubness.layout import Floats
from milvus_hubness.state import BankReference
from milvus_hubness.stores.base import Store

Engine = Literal["local", "server", "ray"]
WINDOW = 16_384


@dataclass(frozen=True)
class Served(Correction):
    """As exact as the index that the bank has there. scores: (m, k) of vectors (m, d), falling."""

    scores: Callable[[Floats, int], Floats] = field(kw_only=True)

    def centred(self, vectors: npt.ArrayLike) -> Floats:
        rows = np.asarray(vectors, np.float32)
        valid = ~self.layout.invalid(rows)
        biases = np.zeros(len(rows), np.float32)
        estimator = self.fitted.estimator
        if valid.any() and isinstance(estimator, NNN | CSLS):
            found = self.scores(rows[valid], estimator.k).astype(np.float64)
            none = np.empty(0)
            near = Nearest(found, 0, none, np.empty((*found.shape, 0)), none)
            biases[valid] = estimator.from_nearest(near).biases - self.mean_bias
        return biases


@dataclass(frozen=True)
class Spread(Correction):
    """workers: (n,) biases of items (n, d) as the layout's metric sees them."""

    workers: Callable[[Floats], Floats] = field(kw_only=True)

    def centred(self, vectors: npt.ArrayLike) -> Floats:
        if self.are_new:
            return super().centred(vectors)
        rows = np.asarray(vectors, np.float32)
        valid = ~self.layout.invalid(rows)
        biases = np.zeros(len(rows), np.float32)
        if valid.any():
            result = self.workers(self.layout.reduce_items(rows[valid]))
            biases[valid] = result - np.float32(self.mean_bias)
        return biases


def require_engine(engine: Engine, estimator: Estimator) -> None:
    """Raises InvalidParameter as `on_engine` does."""
    if engine not in get_args(Engine):
        raise InvalidParameter(f'engine is "local", "server" or "ray", not {engine!r}')
    result = isinstance(estimator, NNN | CSLS) and estimator.k <= WINDOW
    if engine == "server" and not result:
        raise InvalidParameter(
            f"the server tells biases of NNN and CSLS with k up to {WINDOW:,}, not of {estimator!r}"
        )


def on_engine(
    correction: Correction,
    engine: Engine,
    store: Store,
    bank: BankReference,
    targets: QueryBank | None = None,
) -> Correction:
    """targets: the target bank that the database keeps with the bank. Raises InvalidParameter where the
    server cannot tell the biases: it can those of NNN and CSLS, whose k does not exceed the 16,384 hits that
    it gives at most; and MissingExtra for "ray" where Ray is not installed."""
    require_engine(engine, correction.fitted.estimator)
    if engine == "local":
        return correction
    if engine == "ray":
        reduced = None if targets is None else reduced_targets(correction.layout, targets)
        workers = RayBiases(correction.fitted, target_bank=reduced)
        return Spread(correction.layout, correction.fitted, correction.mean_bias, workers=workers)
    return Served(
        correction.layout,
        correction.fitted,
        correction.mean_bias,
        scores=lambda rows, k: store.bank_scores(bank, rows, k),
    )
