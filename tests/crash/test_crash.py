"""Kill it anywhere, run it again: the same result. `make crash` does thirty of these a database, see trials.py."""

import os
from contextlib import closing
from dataclasses import replace

import pytest

from milvus_hubness import MilvusStore, connect
from milvus_hubness.stores.records import DUAL_WRITE_PROPERTY, DualWrite
from tests import servers
from tests.crash.trials import Runner, trials

LONG = pytest.mark.long
SEED = int(os.environ.get("CRASH_SEED", "7"))
FROZEN_RUN, MIRRORED_RUN, ROLLBACK, SERVER_KILLED = 2, 7, 21, 1


def assert_survives(runner, backend, number):
    outcome = runner.run(replace(trials(SEED, backend)[number], how="request"))
    print(outcome.line)
    assert not outcome.problem, outcome.line


@pytest.mark.parametrize("number", [pytest.param(FROZEN_RUN, marks=LONG), MIRRORED_RUN, ROLLBACK])
def test_on_milvus_lite(tmp_path, number):
    assert_survives(Runner(tmp_path), "lite", number)


@pytest.mark.long
@pytest.mark.parametrize("number", [FROZEN_RUN, ROLLBACK])
def test_on_a_server(served_uri, tmp_path, number):
    assert_survives(Runner(tmp_path, uri=served_uri), "server-2.3.5", number)


@pytest.fixture(scope="module")
def mortal():
    """A server that may be killed."""
    if reason := servers.MilvusServer.unavailable():
        pytest.skip(reason)
    with servers.MilvusServer() as server:
        yield server


def test_on_a_server_that_is_killed(mortal, tmp_path):
    assert_survives(Runner(tmp_path, server=mortal), "server-2.3.5", SERVER_KILLED)


def test_what_was_told_to_a_collection_outlives_the_server(mortal):
    """Milvus 2.3 forgets the latest change of its properties."""
    told = DualWrite(collection="another", required=True)
    with closing(connect(mortal.uri)) as client:
        client.create_collection("told", dimension=4)
        MilvusStore(client).write_property("told", DUAL_WRITE_PROPERTY, told)
    mortal.kill()
    mortal.start()
    with closing(connect(mortal.uri)) as client:
        assert MilvusStore(client).info("told").dual_write == told
