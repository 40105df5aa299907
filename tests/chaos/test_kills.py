"""Kill a job anywhere, run it again: the same result. One trial of each kind here; `make crash` runs them all."""

import os
from contextlib import closing
from dataclasses import replace

import pytest

from milvus_hubness import MilvusStore, connect
from milvus_hubness.jobs.store.records import DUAL_WRITE_PROPERTY, DualWrite
from tests.chaos import killed_copies, killed_migrations, killed_refreshes
from tests.support import servers

LONG = pytest.mark.long
SEED = int(os.environ.get("CHAOS_SEED", "7"))
FEW = {"how": "request", "rows": 450}
FROZEN_RUN, MIRRORED_RUN, ROLLBACK, SERVER_KILLED = 2, 7, 21, 1
READ, WRITTEN, BACK = 1, 11, 18
"""A full refresh beside searches, one of new rows beside writers, and one that takes the last one back."""


def assert_survives(kind, runner, backend, number, **changes):
    trial = replace(kind.trials(SEED, backend)[number], **changes)
    outcome = runner.run(trial)
    print(outcome.line)
    assert not outcome.problem, outcome.line


@pytest.mark.parametrize(
    "number",
    [pytest.param(FROZEN_RUN, marks=LONG), MIRRORED_RUN, pytest.param(ROLLBACK, marks=LONG)],
)
def test_a_migration(tmp_path, number):
    runner = killed_migrations.Runner(tmp_path)
    assert_survives(killed_migrations, runner, "lite", number, **FEW)


@pytest.mark.long
@pytest.mark.parametrize("number", [FROZEN_RUN, ROLLBACK])
def test_a_migration_on_a_server(served_uri, tmp_path, number):
    runner = killed_migrations.Runner(tmp_path, uri=served_uri)
    assert_survives(killed_migrations, runner, "server-2.3.5", number, **FEW)


@pytest.mark.parametrize(
    "number", [pytest.param(READ, marks=LONG), WRITTEN, pytest.param(BACK, marks=LONG)]
)
def test_a_refresh(tmp_path, number):
    assert_survives(killed_refreshes, killed_refreshes.Runner(tmp_path), "lite", number)


@pytest.mark.long
@pytest.mark.parametrize("number", [READ, WRITTEN])
def test_a_refresh_on_a_server(served_uri, tmp_path, number):
    runner = killed_refreshes.Runner(tmp_path, uri=served_uri)
    assert_survives(killed_refreshes, runner, "server-2.3.5", number, victim="process")


@pytest.mark.parametrize(
    ("number", "stage", "again"),
    [pytest.param(0, "copying", "same", marks=LONG), (1, "moving", "plain")],
)
def test_a_copy(tmp_path, number, stage, again):
    runner = killed_copies.Runner(tmp_path)
    assert_survives(killed_copies, runner, "lite", number, stage=stage, again=again)


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "stage", "again"), [(0, "announcing", "plain"), (1, "moving", "plain")]
)
def test_a_copy_on_a_server(served_uri, tmp_path, number, stage, again):
    runner, process = killed_copies.Runner(tmp_path, uri=served_uri), {"victim": "process"}
    assert_survives(
        killed_copies, runner, "server-2.3.5", number, stage=stage, again=again, **process
    )


@pytest.fixture(scope="module")
def mortal():
    """A server that may be killed."""
    if reason := servers.MilvusServer.unavailable():
        pytest.skip(reason)
    with servers.MilvusServer() as server:
        yield server


def test_a_migration_whose_server_is_killed(mortal, tmp_path):
    """Milvus 2.3 forgets the latest change of a collection's properties, unless it is made twice."""
    note = DualWrite(collection="another", required=True)
    with closing(connect(mortal.uri)) as client:
        client.create_collection("noted", dimension=4)
        MilvusStore(client).write_property("noted", DUAL_WRITE_PROPERTY, note)
    runner = killed_migrations.Runner(tmp_path, server=mortal)
    assert_survives(killed_migrations, runner, "server-2.3.5", SERVER_KILLED, **FEW)
    with closing(connect(mortal.uri)) as client:
        assert MilvusStore(client).info("noted").dual_write == note
