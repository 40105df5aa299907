"""Plans and migrations of any database that users have in hand."""

from milvus_hubness.api.databases import of_database
from milvus_hubness.jobs import plan
from milvus_hubness.jobs.migration import clean as cleaning
from milvus_hubness.jobs.migration import run
from milvus_hubness.jobs.refresh import rollback as taking_back

plan_correction = of_database(plan.plan_correction)
migrate = of_database(run.migrate)
resume = of_database(run.resume)
cutover = of_database(run.cutover)
rollback = of_database(taking_back.rollback)
clean = of_database(cleaning.clean)
