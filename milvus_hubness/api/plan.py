"""Plans for any database that users have in hand."""

from milvus_hubness.api.databases import of_database
from milvus_hubness.jobs import plan

plan_correction = of_database(plan.plan_correction)
