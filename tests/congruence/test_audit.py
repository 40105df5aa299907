"""Lines of the audit log: what jobs drop, adopt and are forced to, on each database."""

import re

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    QueryBank,
    Recipe,
    clean,
    migrate,
    plan_correction,
    refresh,
    rollback,
)
from milvus_hubness.jobs.common.lease import DROPPED
from tests.support.aliases import aliased
from tests.support.galleries import vectors

DIM = 8


@pytest.fixture
def lines(caplog):
    def lines(action):
        found = [each.getMessage() for each in caplog.records if each.name.endswith(".audit")]
        return [line for line in found if f"Z {action} " in line]

    return lines


def test_what_a_job_drops_or_is_forced_to_has_a_line(database, lines):
    rng = np.random.default_rng(3)
    name, store = database.fill(vectors(rng, 60, DIM), "COSINE"), database.store()
    bank = QueryBank(vectors(rng, 40, DIM))
    plan = plan_correction(store, name, Recipe(bank, estimator=NNN(4), verdict="skip"))
    target = migrate(store, plan, client_ttl=0).target
    alias = aliased(store, target)
    assert lines("forced") == []

    refresh(store, alias, Recipe(verdict="skip"), client_ttl=0)
    assert lines("forced") == [], "nothing was overruled"
    refresh(store, alias, Recipe(verdict="skip"), client_ttl=0, force=True, plan=True)
    assert lines("forced") == [], "nothing was written"
    refresh(store, alias, Recipe(verdict="skip"), client_ttl=0, force=True)
    [line] = lines("forced")
    assert f"forced {target!r}" in line

    # Where collections can be renamed, one is dropped under a name that begins with its own.
    of_target = re.compile(rf"dropped '{target}('|{DROPPED})")
    assert not any(map(of_target.search, lines("dropped")))
    rollback(store, alias)
    store.drop_alias(alias)
    clean(store, name, drop=target)
    assert any(map(of_target.search, lines("dropped")))
    assert all("user=" in line and "host=" in line for line in lines("dropped"))
