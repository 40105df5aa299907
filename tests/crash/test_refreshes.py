"""Kill a refresh anywhere, run it again: the same biases. `make crash` does twenty of these a database."""

import os
import random
from dataclasses import replace

import pytest

from tests.crash.draws import trials
from tests.crash.milvus import MilvusPlace
from tests.crash.refreshes import Runner
from tests.crash.rivals import assert_one_writes

LONG = pytest.mark.long
SEED = int(os.environ.get("CRASH_SEED", "7"))
READ, WRITTEN, BACK = 1, 11, 18
"""A full refresh beside searches, one of new rows beside writers, and one that takes the last one back."""


def assert_survives(runner, backend, number):
    outcome = runner.run(replace(trials(SEED, backend)[number], victim="process"))
    print(outcome.line)
    assert not outcome.problem, outcome.line


@pytest.mark.parametrize("number", [pytest.param(READ, marks=LONG), WRITTEN, pytest.param(BACK, marks=LONG)])
def test_on_milvus_lite(tmp_path, number):
    assert_survives(Runner(tmp_path), "lite", number)


@pytest.mark.parametrize("number", [READ, pytest.param(WRITTEN, marks=LONG)])
def test_on_a_server(served_uri, tmp_path, number):
    assert_survives(Runner(tmp_path, uri=served_uri), "server-2.3.5", number)


def test_one_that_was_paused_changes_nothing_more(served_uri, tmp_path):
    """A second process has done its work meanwhile, and a third was refused."""
    place = MilvusPlace.within(tmp_path, None, served_uri)
    print(SEED, assert_one_writes(place, random.Random(SEED)))
