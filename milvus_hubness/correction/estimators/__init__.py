"""Estimators: each method computes one number per item, which is subtracted from its scores."""

from importlib import import_module

from milvus_hubness.basics.estimator_names import own_estimators
from milvus_hubness.correction.estimators.base import Estimator, FittedBias, from_dict, to_dict
from milvus_hubness.correction.estimators.blend import Blend
from milvus_hubness.correction.estimators.csls import CSLS
from milvus_hubness.correction.estimators.distribution_normalization import (
    DistributionNormalization,
)
from milvus_hubness.correction.estimators.dual_inverted_softmax import DualInvertedSoftmax
from milvus_hubness.correction.estimators.inverted_softmax import InvertedSoftmax
from milvus_hubness.correction.estimators.nnn import NNN
from milvus_hubness.correction.estimators.relative_nnn import RelativeNNN
from milvus_hubness.correction.estimators.sinkhorn import DualBankSinkhorn, Sinkhorn
from milvus_hubness.correction.estimators.with_demand import DEFAULT_ESTIMATOR, WithDemand

__all__ = [
    "CSLS",
    "DEFAULT_ESTIMATOR",
    "NNN",
    "Blend",
    "DistributionNormalization",
    "DualBankSinkhorn",
    "DualInvertedSoftmax",
    "Estimator",
    "FittedBias",
    "InvertedSoftmax",
    "RelativeNNN",
    "Sinkhorn",
    "WithDemand",
    "from_dict",
    "to_dict",
]

# Each class registers itself as it is defined, also one that is not named above.
for _estimator in own_estimators():
    import_module(_estimator.module)
