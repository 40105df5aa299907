"""Work on whole collections: plan, migrate, verify, refresh, status."""

from milvus_hubness.jobs.diagnose import diagnose
from milvus_hubness.jobs.migrate import MigrationResult, Rollback, migrate, rollback
from milvus_hubness.jobs.plan import MigrationPlan, plan_migration
from milvus_hubness.jobs.refresh import RefreshResult, refresh
from milvus_hubness.jobs.status import Status, status
from milvus_hubness.jobs.tune import tune
from milvus_hubness.jobs.verify import Verification, verify

__all__ = [
    "MigrationPlan",
    "MigrationResult",
    "RefreshResult",
    "Rollback",
    "Status",
    "Verification",
    "diagnose",
    "migrate",
    "plan_migration",
    "refresh",
    "rollback",
    "status",
    "tune",
    "verify",
]
