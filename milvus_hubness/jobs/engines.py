"""What computes the biases of a refresh: this process, or the database, by its own search over the bank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction import Correction
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.estimators import CSLS, NNN
from milvus_hubness.estimators.nearest import Nearest
from milvus_hubness.layout import Floats
from milvus_hubness.state import BankReference
from milvus_hubness.stores.base import Store

Engine = Literal["local", "server"]
WINDOW = 16_384


@dataclass(frozen=True)
class Served(Correction):
    """As exact as the index that the bank has there. scores: (m, k) of vectors (m, d), falling."""

    scores: Callable[[Floats, int], Floats] = field(kw_only=True)

    def centred(self, vectors: npt.ArrayLike) -> Floats:
        rows = np.asarray(vectors, np.float32)
        sound = ~self.layout.unsound(rows)
        biases = np.zeros(len(rows), np.float32)
        estimator = self.fitted.estimator
        if sound.any() and isinstance(estimator, NNN | CSLS):
            found = self.scores(rows[sound], estimator.k).astype(np.float64)
            none = np.empty(0)
            near = Nearest(found, 0, none, np.empty((*found.shape, 0)), none)
            biases[sound] = estimator.from_nearest(near).biases - self.centre
        return biases


def on_engine(correction: Correction, engine: Engine, store: Store, bank: BankReference) -> Correction:
    """Raises InvalidParameter where the server cannot tell the biases: it can those of NNN and CSLS, whose k
    does not exceed the 16,384 hits that it gives at most."""
    if engine == "local":
        return correction
    estimator = correction.fitted.estimator
    if engine != "server":
        raise InvalidParameter(f'engine is "local" or "server", not {engine!r}')
    if not isinstance(estimator, NNN | CSLS) or estimator.k > WINDOW:
        raise InvalidParameter(
            f"the server tells biases of NNN and CSLS with k up to {WINDOW:,}, not of {estimator!r}"
        )
    return Served(
        correction.layout,
        correction.fitted,
        correction.centre,
        scores=lambda rows, k: store.bank_scores(bank, rows, k),
    )
