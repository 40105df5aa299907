"""No alias fences a change of names: a job looks once more whether it holds its lease, after all it reads."""

import time

import numpy as np
import pytest

from milvus_hubness.errors import LeaseLost
from milvus_hubness.jobs.common.lease import Lease
from milvus_hubness.jobs.common.lease_records import LeasePolicy
from milvus_hubness.jobs.store.protocols import Renaming
from tests.support.galleries import vectors

QUICK = LeasePolicy(seconds=0.5, skew=0.0, fenced_write=0.0)


@pytest.fixture
def two(database):
    """Two collections, and the name of an alias of the first."""
    rng = np.random.default_rng(1)
    here, there = (database.fill(vectors(rng, 3, 4), "COSINE") for _ in range(2))
    alias = f"{here}_live"
    database.store().point_alias(alias, here)
    yield here, there, alias
    database.store().drop_alias(alias)


def taken_over(database, former, *names):
    """Another job, after the former one was stopped for longer than its lease lasts."""
    former._over.set()
    time.sleep(QUICK.seconds + 0.1)
    return Lease(database.store(), *names, policy=LeasePolicy(seconds=30, skew=0.0))


def test_a_former_holder_changes_no_name(database, two):
    here, there, alias = two
    with Lease(database.store(), here, there, policy=QUICK) as former:
        late = former.store
        late.point_alias(alias, here)
        with taken_over(database, former, here, there) as mine:
            mine.store.point_alias(alias, there)
            changes = [
                lambda: late.point_alias(alias, here),
                lambda: late.point_alias(f"{alias}_new", here),
                lambda: late.drop_alias(alias),
            ]
            changes.append(lambda: late.drop(here))
            if isinstance(late, Renaming):
                changes.append(lambda: late.rename(here, f"{here}_other"))
            for change in changes:
                with pytest.raises(LeaseLost, match="this process changes nothing more"):
                    change()
    store = database.store()
    assert store.alias_target(alias) == there
    assert store.alias_target(f"{alias}_new") is None
    assert store.exists(here)


def test_who_is_stopped_while_it_reads_where_an_alias_leads_does_not_move_it(
    database, two, monkeypatch
):
    here, there, alias = two
    held = {}
    with Lease(database.store(), here, there, policy=QUICK) as former:
        late = former.store
        reading = "_behind" if hasattr(late, "_behind") else "alias_target"
        read = getattr(type(late), reading)

        def slow(store, name):
            answer = read(store, name)
            if store is late and name == alias and not held:
                held["lease"] = taken_over(database, former, here, there)
                held["lease"].__enter__().store.point_alias(alias, there)
            return answer

        monkeypatch.setattr(type(late), reading, slow)
        with pytest.raises(LeaseLost, match="this process changes nothing more"):
            late.point_alias(alias, here)
        held["lease"].__exit__(None, None, None)
    assert database.store().alias_target(alias) == there
