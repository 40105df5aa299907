"""Hubness correction for cross-modal search, inside Milvus."""

from importlib.metadata import version

from milvus_hubness.banks import QueryBank
from milvus_hubness.client import HubnessClient
from milvus_hubness.correction import Correction
from milvus_hubness.errors import (
    AlreadyCorrected,
    BankTooSmall,
    CannotMigrate,
    CollectionExists,
    CollectionNotFound,
    DimensionMismatch,
    EmptyBank,
    EmptyCollection,
    FaissConflict,
    HubnessError,
    InvalidInput,
    InvalidParameter,
    NonFiniteVectors,
    NotAdvised,
    NotCorrected,
    ServerUnavailable,
    StateError,
    StoreError,
    UnfinishedMigration,
    UnknownStateVersion,
    UnreadableFile,
    UnsupportedOperation,
    VerificationFailed,
    ZeroVectors,
)
from milvus_hubness.estimators import (
    CSLS,
    NNN,
    Blend,
    DistributionNormalization,
    DualBankSinkhorn,
    DualInvertedSoftmax,
    Estimator,
    FittedBias,
    InvertedSoftmax,
    Sinkhorn,
)
from milvus_hubness.jobs import diagnose, migrate, plan_migration, refresh, rollback, status, tune
from milvus_hubness.layout import Layout
from milvus_hubness.rerank import DynamicGate, GloballyCorrected
from milvus_hubness.stores import MilvusStore, connect

__version__ = version("milvus-hubness")

__all__ = [
    "CSLS",
    "NNN",
    "AlreadyCorrected",
    "BankTooSmall",
    "Blend",
    "CannotMigrate",
    "CollectionExists",
    "CollectionNotFound",
    "Correction",
    "DimensionMismatch",
    "DistributionNormalization",
    "DualBankSinkhorn",
    "DualInvertedSoftmax",
    "DynamicGate",
    "EmptyBank",
    "EmptyCollection",
    "Estimator",
    "FaissConflict",
    "FittedBias",
    "GloballyCorrected",
    "HubnessClient",
    "HubnessError",
    "InvalidInput",
    "InvalidParameter",
    "InvertedSoftmax",
    "Layout",
    "MilvusStore",
    "NonFiniteVectors",
    "NotAdvised",
    "NotCorrected",
    "QueryBank",
    "ServerUnavailable",
    "Sinkhorn",
    "StateError",
    "StoreError",
    "UnfinishedMigration",
    "UnknownStateVersion",
    "UnreadableFile",
    "UnsupportedOperation",
    "VerificationFailed",
    "ZeroVectors",
    "connect",
    "diagnose",
    "migrate",
    "plan_migration",
    "refresh",
    "rollback",
    "status",
    "tune",
]
