"""Work on whole collections: plan, migrate, verify, enable, refresh, status."""

from milvus_hubness.jobs.diagnose import diagnose
from milvus_hubness.jobs.drift import drift
from milvus_hubness.jobs.enable import Enabled, EnablePlan, disable, enable, plan_enable
from milvus_hubness.jobs.in_place import SecondVectorEnabled, SecondVectorPlan
from milvus_hubness.jobs.living import list_online_banks, start_online_bank, stop_online_bank
from milvus_hubness.jobs.migrate import MigrationResult, migrate
from milvus_hubness.jobs.migration.bulk import BulkTarget
from milvus_hubness.jobs.migration.checks import Verification
from milvus_hubness.jobs.migration.clean import clean, would_drop
from milvus_hubness.jobs.migration.cutover import Rollback, cutover, rollback
from milvus_hubness.jobs.migration.run import resume, run
from milvus_hubness.jobs.migration.steering import MigrationOptions
from milvus_hubness.jobs.migration.verify import verify
from milvus_hubness.jobs.plan import MigrationPlan, plan_migration
from milvus_hubness.jobs.refresh import RefreshResult, refresh
from milvus_hubness.jobs.status import Status, repair, status
from milvus_hubness.jobs.tune import tune
from milvus_hubness.jobs.upkeep import Duty, Kept, keep_up

__all__ = [
    "BulkTarget",
    "Duty",
    "EnablePlan",
    "Enabled",
    "Kept",
    "MigrationOptions",
    "MigrationPlan",
    "MigrationResult",
    "RefreshResult",
    "Rollback",
    "SecondVectorEnabled",
    "SecondVectorPlan",
    "Status",
    "Verification",
    "clean",
    "cutover",
    "diagnose",
    "disable",
    "drift",
    "enable",
    "keep_up",
    "list_online_banks",
    "migrate",
    "plan_enable",
    "plan_migration",
    "refresh",
    "repair",
    "resume",
    "rollback",
    "run",
    "start_online_bank",
    "status",
    "stop_online_bank",
    "tune",
    "verify",
    "would_drop",
]
