"""The public names, for type checkers, and for `__init__.py`, which imports each when it is first used."""

from milvus_hubness.api.enable import disable as disable
from milvus_hubness.api.enable import enable as enable
from milvus_hubness.api.migration import clean as clean
from milvus_hubness.api.migration import cutover as cutover
from milvus_hubness.api.migration import migrate as migrate
from milvus_hubness.api.migration import plan_correction as plan_correction
from milvus_hubness.api.migration import resume as resume
from milvus_hubness.api.migration import rollback as rollback
from milvus_hubness.api.refresh import adopt as adopt
from milvus_hubness.api.refresh import refresh as refresh
from milvus_hubness.api.refresh import status as status
from milvus_hubness.api.reports import check as check
from milvus_hubness.api.reports import diagnose as diagnose
from milvus_hubness.api.reports import tune as tune
from milvus_hubness.basics.files.runs import to_run as to_run
from milvus_hubness.basics.files.runs import write_run as write_run
from milvus_hubness.correction.banks.bank import QueryBank as QueryBank
from milvus_hubness.correction.codec.layout import Layout as Layout
from milvus_hubness.correction.codec.multi_vectors import MultiVectorLayout as MultiVectorLayout
from milvus_hubness.correction.estimators import CSLS as CSLS
from milvus_hubness.correction.estimators import NNN as NNN
from milvus_hubness.correction.estimators import Blend as Blend
from milvus_hubness.correction.estimators import (
    DistributionNormalization as DistributionNormalization,
)
from milvus_hubness.correction.estimators import DualBankSinkhorn as DualBankSinkhorn
from milvus_hubness.correction.estimators import DualInvertedSoftmax as DualInvertedSoftmax
from milvus_hubness.correction.estimators import Estimator as Estimator
from milvus_hubness.correction.estimators import FittedBias as FittedBias
from milvus_hubness.correction.estimators import InvertedSoftmax as InvertedSoftmax
from milvus_hubness.correction.estimators import RelativeNNN as RelativeNNN
from milvus_hubness.correction.estimators import Sinkhorn as Sinkhorn
from milvus_hubness.correction.estimators import WithDemand as WithDemand
from milvus_hubness.correction.fitted import Correction as Correction
from milvus_hubness.correction.multi_vectors import Centroids as Centroids
from milvus_hubness.correction.multi_vectors import MultiVectors as MultiVectors
from milvus_hubness.correction.multi_vectors import maxsim as maxsim
from milvus_hubness.correction.rerank import DynamicGate as DynamicGate
from milvus_hubness.correction.rerank import GloballyCorrected as GloballyCorrected
from milvus_hubness.errors import *  # noqa: F403
from milvus_hubness.extras.quari.reranker import LinearMaps as LinearMaps
from milvus_hubness.extras.quari.reranker import QuariReranker as QuariReranker
from milvus_hubness.jobs.common.gallery import Gallery as Gallery
from milvus_hubness.jobs.common.judgements import Judgements as Judgements
from milvus_hubness.jobs.common.recipe import Recipe as Recipe
from milvus_hubness.jobs.enable.plan import Beside as Beside
from milvus_hubness.jobs.migration.options import MigrationOptions as MigrationOptions
from milvus_hubness.jobs.migration.plan import Copy as Copy
from milvus_hubness.jobs.refresh.options import RefreshOptions as RefreshOptions
from milvus_hubness.jobs.refresh.result import RefreshResult as RefreshResult
from milvus_hubness.milvus.client.aio import AsyncHubnessClient as AsyncHubnessClient
from milvus_hubness.milvus.client.matching import Matches as Matches
from milvus_hubness.milvus.client.new_collections import CorrectionConfig as CorrectionConfig
from milvus_hubness.milvus.client.sync import HubnessClient as HubnessClient
from milvus_hubness.milvus.store.milvus_store import MilvusStore as MilvusStore
from milvus_hubness.milvus.store.server import connect as connect
from milvus_hubness.quality.tuning import compare as compare
from milvus_hubness.reports.check import Check as Check
from milvus_hubness.reports.experiment import experiment_report as experiment_report
from milvus_hubness.reports.report import Detail as Detail
from milvus_hubness.reports.runs import RunFiles as RunFiles

__version__: str
