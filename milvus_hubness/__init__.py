"""Hubness correction for cross-modal search, inside Milvus."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from milvus_hubness import errors as _errors

_ERRORS = [name for name, kind in vars(_errors).items() if isinstance(kind, type) and issubclass(kind, Exception)]
globals().update({name: getattr(_errors, name) for name in _ERRORS})

if TYPE_CHECKING:
    from milvus_hubness.banks.bank import QueryBank as QueryBank
    from milvus_hubness.client.aio import AsyncHubnessClient as AsyncHubnessClient
    from milvus_hubness.client.matching import Matches as Matches
    from milvus_hubness.client.new_collections import CorrectionConfig as CorrectionConfig
    from milvus_hubness.client.sync import HubnessClient as HubnessClient
    from milvus_hubness.codec.layout import Layout as Layout
    from milvus_hubness.correction import Correction as Correction
    from milvus_hubness.enable.enable import disable as disable
    from milvus_hubness.enable.enable import enable as enable
    from milvus_hubness.enable.plan import plan_enable as plan_enable
    from milvus_hubness.errors import *  # noqa: F403
    from milvus_hubness.estimators import CSLS as CSLS
    from milvus_hubness.estimators import NNN as NNN
    from milvus_hubness.estimators import Blend as Blend
    from milvus_hubness.estimators import DistributionNormalization as DistributionNormalization
    from milvus_hubness.estimators import DualBankSinkhorn as DualBankSinkhorn
    from milvus_hubness.estimators import DualInvertedSoftmax as DualInvertedSoftmax
    from milvus_hubness.estimators import Estimator as Estimator
    from milvus_hubness.estimators import FittedBias as FittedBias
    from milvus_hubness.estimators import InvertedSoftmax as InvertedSoftmax
    from milvus_hubness.estimators import RelativeNNN as RelativeNNN
    from milvus_hubness.estimators import Sinkhorn as Sinkhorn
    from milvus_hubness.migration.clean import clean as clean
    from milvus_hubness.migration.migrator import cutover as cutover
    from milvus_hubness.migration.migrator import migrate as migrate
    from milvus_hubness.migration.migrator import resume as resume
    from milvus_hubness.migration.migrator import rollback as rollback
    from milvus_hubness.migration.plan import MigrationOptions as MigrationOptions
    from milvus_hubness.migration.plan import plan_migration as plan_migration
    from milvus_hubness.quality.collections import diagnose as diagnose
    from milvus_hubness.quality.collections import tune as tune
    from milvus_hubness.quari.reranker import LinearMaps as LinearMaps
    from milvus_hubness.quari.reranker import QuariReranker as QuariReranker
    from milvus_hubness.refresh.plan import RefreshOptions as RefreshOptions
    from milvus_hubness.refresh.run import RefreshResult as RefreshResult
    from milvus_hubness.refresh.run import refresh as refresh
    from milvus_hubness.refresh.status import status as status
    from milvus_hubness.rerank import DynamicGate as DynamicGate
    from milvus_hubness.rerank import GloballyCorrected as GloballyCorrected
    from milvus_hubness.stores.milvus import MilvusStore as MilvusStore
    from milvus_hubness.stores.milvus_server import connect as connect

_NAMES = {
    "banks.bank": "QueryBank",
    "client.aio": "AsyncHubnessClient",
    "client.matching": "Matches",
    "client.new_collections": "CorrectionConfig",
    "client.sync": "HubnessClient",
    "codec.layout": "Layout",
    "correction": "Correction",
    "enable.enable": "disable enable",
    "enable.plan": "plan_enable",
    "estimators": (
        "CSLS NNN Blend DistributionNormalization DualBankSinkhorn "
        "DualInvertedSoftmax Estimator FittedBias InvertedSoftmax RelativeNNN Sinkhorn"
    ),
    "migration.clean": "clean",
    "migration.migrator": "cutover migrate resume rollback",
    "migration.plan": "MigrationOptions plan_migration",
    "quality.collections": "diagnose tune",
    "quari.reranker": "LinearMaps QuariReranker",
    "refresh.plan": "RefreshOptions",
    "refresh.run": "RefreshResult refresh",
    "refresh.status": "status",
    "rerank": "DynamicGate GloballyCorrected",
    "stores.milvus": "MilvusStore",
    "stores.milvus_server": "connect",
}
"""The names that are imported when they are first used, by the module that defines them."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("milvus-hubness")
    elif name in _MODULES:
        with _errors.naming_extras():
            value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_MODULES, *_ERRORS, "__version__"])


class _Package(ModuleType):
    """Python binds each imported submodule to a name of its package; `enable` and `refresh` stay functions."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _MODULES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
