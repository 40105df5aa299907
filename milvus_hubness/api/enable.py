"""`enable` and `disable` of any database that users have in hand."""

from milvus_hubness.api.databases import of_database
from milvus_hubness.jobs.enable import disable as disabling
from milvus_hubness.jobs.enable import enable as enabling

enable = of_database(enabling.enable)
disable = of_database(disabling.disable)
