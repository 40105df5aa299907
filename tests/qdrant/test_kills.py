"""Kill it anywhere, run it again: the same result. The trials of Milvus, see tests/chaos, on Qdrant's local
mode, where the database dies with the process."""

import logging
import os
from dataclasses import replace

import pytest

from tests.chaos import killed_copies, killed_migrations, killed_refreshes

LONG = pytest.mark.long
BACKEND = "qdrant-local"
SEED = int(os.environ.get("CHAOS_SEED", "7"))
FROZEN_RUN, MIRRORED_RUN, ROLLBACK = 2, 7, 21
FULL, PENDING, BACK = 1, 11, 18


def assert_survives(runner, trial):
    outcome = runner.run(trial)
    logging.getLogger(__name__).warning(outcome.line)
    assert not outcome.problem, outcome.line


@pytest.mark.parametrize(
    "number",
    [pytest.param(FROZEN_RUN, marks=LONG), MIRRORED_RUN, ROLLBACK],
)
def test_a_migration(quick_folder, number):
    trial = replace(killed_migrations.trials(SEED, BACKEND)[number], how="request", rows=450)
    assert_survives(killed_migrations.Runner(quick_folder), trial)


@pytest.mark.parametrize("number", [FULL, PENDING, BACK])
def test_a_refresh(quick_folder, number):
    assert_survives(
        killed_refreshes.Runner(quick_folder), killed_refreshes.trials(SEED, BACKEND)[number]
    )


def test_a_copy(quick_folder):
    trial = replace(killed_copies.trials(SEED, BACKEND)[0], stage="verified", again="plain")
    assert_survives(killed_copies.Runner(quick_folder), trial)
