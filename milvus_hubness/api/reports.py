"""`tune` and `diagnose` for collections of any database that users have in hand."""

from milvus_hubness.api.databases import of_database
from milvus_hubness.reports import collections

tune = of_database(collections.tune)
diagnose = of_database(collections.diagnose)
