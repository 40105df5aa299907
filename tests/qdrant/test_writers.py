"""Nobody who writes or reads through HubnessQdrantClient notices that a migration goes on: the application of
the Milvus suite, asking Qdrant."""

import pytest

from tests.chaos.migration_clients import migrate_beside_writers
from tests.chaos.places import BACKENDS
from tests.chaos.qdrant import QdrantDatabase

SECONDS = 5


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nothing_is_lost_and_nothing_comes_back(backend):
    rate = BACKENDS["qdrant-local"].rows_per_second
    database, name = QdrantDatabase(backend.client), backend.name("written")
    application = migrate_beside_writers(
        database, name, SECONDS, rename=False, rows_per_second=rate
    )
    assert application.reads
    assert all(application.written.values())
