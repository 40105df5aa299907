"""Refreshes and the status of any database that users have in hand."""

from milvus_hubness.api.databases import of_database
from milvus_hubness.jobs.common import adopt as adopting
from milvus_hubness.jobs.refresh import run
from milvus_hubness.jobs.refresh import status as reading

refresh = of_database(run.refresh)
status = of_database(reading.status)
adopt = of_database(adopting.adopt)
