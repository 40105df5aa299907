"""Kill a refresh by a copy anywhere, run it again: nothing is lost, and the alias leads to one of the two.
`make crash` does sixteen of these a database."""

import os
from dataclasses import replace

import pytest

from tests.crash.rebuilds import Runner, trials

SEED = int(os.environ.get("CRASH_SEED", "7"))


def assert_survives(runner, backend, number, stage, again):
    outcome = runner.run(replace(trials(SEED, backend)[number], stage=stage, again=again, victim="process"))
    print(outcome.line)
    assert not outcome.problem, outcome.line


@pytest.mark.parametrize(
    ("number", "stage", "again"), [pytest.param(0, "copying", "same", marks=pytest.mark.long), (1, "moving", "plain")]
)
def test_on_milvus_lite(tmp_path, number, stage, again):
    assert_survives(Runner(tmp_path), "lite", number, stage, again)


@pytest.mark.long
@pytest.mark.parametrize(("number", "stage", "again"), [(0, "announcing", "plain"), (1, "moving", "plain")])
def test_on_a_server(served_uri, tmp_path, number, stage, again):
    assert_survives(Runner(tmp_path, uri=served_uri), "server-2.3.5", number, stage, again)
