"""Kill it anywhere, run it again: the same result. The trials of Milvus, see tests/crash, on Qdrant's local
mode, where the database dies with the process."""

import logging
import os
import random
from dataclasses import replace

import pytest

from tests.crash import draws, refreshes, trials

BACKEND = "qdrant-local"
SEED = int(os.environ.get("CRASH_SEED") or random.randrange(10**6))
FROZEN_RUN, MIRRORED_RUN, ROLLBACK = 2, 7, 21
FULL, PENDING, BACK = 1, 11, 18


def assert_survives(runner, trial):
    outcome = runner.run(trial)
    logging.getLogger(__name__).warning(outcome.line)
    assert not outcome.problem, outcome.line


@pytest.mark.parametrize("number", [FROZEN_RUN, MIRRORED_RUN, ROLLBACK])
def test_a_migration(quick_folder, number):
    trial = replace(trials.trials(SEED, BACKEND)[number], how="request")
    assert_survives(trials.Runner(quick_folder), trial)


@pytest.mark.parametrize("number", [FULL, PENDING, BACK])
def test_a_refresh(quick_folder, number):
    assert_survives(refreshes.Runner(quick_folder), draws.trials(SEED, BACKEND)[number])
