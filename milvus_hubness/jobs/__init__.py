"""Work on whole collections: plan, migrate, verify, enable, refresh, status."""

from milvus_hubness.jobs.diagnose import diagnose
from milvus_hubness.jobs.enable import Enabled, EnablePlan, disable, enable, plan_enable
from milvus_hubness.jobs.migrate import MigrationResult, Rollback, migrate, rollback
from milvus_hubness.jobs.plan import MigrationPlan, plan_migration
from milvus_hubness.jobs.refresh import RefreshResult, refresh
from milvus_hubness.jobs.status import Status, status
from milvus_hubness.jobs.tune import tune
from milvus_hubness.jobs.verify import Verification, verify

__all__ = [
    "EnablePlan",
    "Enabled",
    "MigrationPlan",
    "MigrationResult",
    "RefreshResult",
    "Rollback",
    "Status",
    "Verification",
    "diagnose",
    "disable",
    "enable",
    "migrate",
    "plan_enable",
    "plan_migration",
    "refresh",
    "rollback",
    "status",
    "tune",
    "verify",
]
