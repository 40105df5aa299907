"""`enable` and `disable` of any database that users have in hand."""

from milvus_hubness.api.databases import of_database
from milvus_hubness.jobs.enable import enable as enabling
from milvus_hubness.jobs.enable import plan

plan_enable = of_database(plan.plan_enable)
enable = of_database(enabling.enable)
disable = of_database(enabling.disable)
