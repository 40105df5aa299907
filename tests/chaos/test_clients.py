"""Nobody who writes or reads through HubnessClient notices that a migration goes on."""

import pytest

from tests.chaos.migration_clients import migrate_beside_writers
from tests.chaos.milvus import MilvusDatabase
from tests.chaos.places import BACKENDS
from tests.conftest import Backend

SECONDS = 12


@pytest.fixture
def served(served_uri):
    here = Backend("server-2.3.5", served_uri)
    yield here
    here.clean()


@pytest.mark.long
@pytest.mark.parametrize("rename", [False, True], ids=["alias", "rename"])
def test_nothing_is_lost_and_nothing_comes_back(served, rename):
    name = served.name("written")
    served.made.append(f"{name}__before_hubness")
    application = migrate_beside_writers(
        MilvusDatabase(served.uri, served.client()),
        name,
        SECONDS,
        rename=rename,
        rows_per_second=BACKENDS[served.kind].rows_per_second,
    )
    assert application.reads
    assert all(application.written.values())
