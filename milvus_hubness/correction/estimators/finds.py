"""What each bank query of a fit has in the gallery: the mean of its ten best scores."""

from __future__ import annotations

import numpy as np

from milvus_hubness.correction.banks.bank import Vectors
from milvus_hubness.correction.estimators.base import FittedBias
from milvus_hubness.correction.estimators.blend import Blend
from milvus_hubness.correction.estimators.relative_nnn import RelativeNNN


def gallery_scores(fitted: FittedBias) -> Vectors | None:
    """Return f (m,) of RelativeNNN, or of the first one in a Blend; None for other estimators."""
    estimator = fitted.estimator
    if isinstance(estimator, Blend):
        parts = list(estimator.with_columns())
    else:
        parts = [(estimator, slice(0, estimator.potentials))]

    for part, columns in parts:
        if isinstance(part, RelativeNNN) and part.discount > 0:
            scores = fitted.potentials[:, columns][:, 0] / -part.discount
            return np.asarray(scores, np.float32)
    return None
