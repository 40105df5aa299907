"""A call that moves a name and arrives late, after other jobs: it is refused, or leads to where the name is."""

import contextlib

import numpy as np
import pytest
from pymilvus.exceptions import MilvusException

from milvus_hubness import (
    NNN,
    Copy,
    QueryBank,
    Recipe,
    StoreError,
    WrongPhase,
    clean,
    cutover,
    migrate,
    plan_correction,
    refresh,
    resume,
    rollback,
)
from milvus_hubness.milvus.store.milvus_store import MilvusStore
from tests.support.galleries import vectors
from tests.support.live import DIM, K, Live


@pytest.fixture
def live(lite):
    """Made by its application: the ledger knows nothing of it."""
    return Live(lite, is_migrated=False)


@pytest.fixture
def migrated(lite):
    return Live(lite, is_migrated=True)


class UnderWay:
    """A job that is killed while a call that moves a name is under way, after so many that have arrived."""

    def __init__(self, live, job, moves=0):
        self.live = live
        under_way = []

        class Slow(MilvusStore):
            moved = 0

            def point_alias(self, alias, collection):
                self.moved += 1
                if self.moved <= moves:
                    return super().point_alias(alias, collection)
                under_way.append((alias, collection))
                raise StoreError("killed")

        with pytest.raises(StoreError, match="killed"):
            job(Slow(live.backend.client()))
        [self.call] = under_way

    def arrive(self):
        """Deliver the call; return whether the database took it."""
        alias, collection = self.call
        with contextlib.suppress(MilvusException):
            self.live.backend.client().alter_alias(collection, alias)
            return True
        return False


def third_bank():
    return QueryBank(vectors(np.random.default_rng(5), 40, DIM))


def assert_in_use(live, collection):
    """The names lead to this collection, which has all rows."""
    assert live.store.alias_target(live.alias) == collection
    assert set(live.read()) == set(live.rows)


def test_the_copy_of_a_killed_refresh_goes_before_another_is_made_and_no_name_can_move_to_it(live):
    under_way = UnderWay(live, lambda store: refresh(store, live.alias, QueryBank(live.other)))
    _, first_copy = under_way.call
    done = refresh(live.store, live.alias, third_bank())
    live.put(9001)
    assert not under_way.arrive()
    assert done.collection != first_copy
    assert_in_use(live, done.collection)


def test_a_repetition_goes_on_with_the_copy_to_which_the_name_may_move(live):
    again = {"recipe": QueryBank(live.other), "force": True}
    under_way = UnderWay(live, lambda store: refresh(store, live.alias, **again))
    _, copy = under_way.call
    done = refresh(live.store, live.alias, **again)
    assert done.collection == copy
    live.put(9001)
    assert under_way.arrive()
    assert_in_use(live, copy)


def test_a_rollback_drops_the_copy_of_a_killed_refresh(migrated):
    live = migrated
    under_way = UnderWay(live, lambda store: refresh(store, live.alias, QueryBank(live.other)))
    _, copy = under_way.call
    source = rollback(live.store, live.alias).source
    live.put(9001)
    assert not under_way.arrive()
    assert not live.store.exists(copy)
    assert_in_use(live, source)


def test_who_ends_a_killed_rollback_leaves_the_name_there(live):
    refresh(live.store, live.alias, QueryBank(live.other))
    under_way = UnderWay(live, lambda store: rollback(store, live.alias))
    with pytest.raises(WrongPhase, match="repeat the command for the new biases"):
        refresh(live.store, live.alias, third_bank())
    live.put(9001)
    assert under_way.arrive()
    assert_in_use(live, live.name)
    done = refresh(live.store, live.alias, third_bank())
    assert_in_use(live, done.collection)


def test_who_moves_the_names_that_are_left_leaves_all_of_them_there(live):
    second = live.backend.name("second")
    live.store.point_alias(second, live.name)
    under_way = UnderWay(
        live, lambda store: refresh(store, live.alias, QueryBank(live.other)), moves=1
    )
    with pytest.raises(WrongPhase, match="repeat the command for the new biases"):
        refresh(live.store, live.alias, third_bank())
    assert under_way.arrive()
    _, copy = under_way.call
    assert live.store.alias_target(second) == copy
    assert_in_use(live, copy)
    assert refresh(live.store, live.alias).action == "none"


def test_half_a_move_of_another_collection_stops_no_rollback(lite):
    other, migrated = Live(lite, is_migrated=False), Live(lite, is_migrated=True)
    other.store.point_alias(lite.name("second"), other.name)
    UnderWay(other, lambda store: refresh(store, other.alias, QueryBank(other.other)), moves=1)
    source = rollback(migrated.store, migrated.alias).source
    assert_in_use(migrated, source)


# -- first migrations ------------------------------------------------------------------------------


@pytest.fixture
def unmigrated(lite):
    """A collection without a correction behind an alias."""
    live = Live(lite, is_migrated=True)
    rollback(live.store, live.alias)
    clean(live.store, live.alias, drop=live.name)
    live.source = live.store.alias_target(live.alias)
    return live


def planned(live, **copy):
    recipe = Recipe(QueryBank(live.bank), estimator=NNN(K, 0.75), verdict="skip")
    return plan_correction(live.store, live.source, recipe, Copy(**copy))


def test_a_copy_to_which_a_name_is_moving_is_not_made_anew(unmigrated):
    live = unmigrated
    plan, anew = (planned(live, alias=live.alias, restart=restart) for restart in (False, True))
    under_way = UnderWay(live, lambda store: migrate(store, plan))
    with pytest.raises(WrongPhase, match=f"'{live.alias}' is moving between .* without --restart"):
        migrate(live.store, anew)
    done = resume(live.store, live.source, alias=live.alias)
    live.put(9001)
    assert under_way.arrive()
    assert_in_use(live, done.target)


def test_the_name_of_a_copy_that_was_being_dropped_is_not_given_to_another_at_once(unmigrated):
    class Killed(MilvusStore):
        def rename(self, collection, name):
            raise StoreError("killed")

    live = unmigrated
    copy = migrate(live.store, planned(live)).target
    with pytest.raises(StoreError, match="killed"):
        clean(Killed(live.backend.client()), live.source, drop=copy)
    with pytest.raises(WrongPhase, match="repeat the command for a new copy"):
        migrate(live.store, planned(live))
    assert not live.store.exists(copy), "what the call that is under way would rename"
    assert migrate(live.store, planned(live)).target == copy


def test_a_name_that_is_moving_to_one_copy_does_not_move_to_another(unmigrated):
    live = unmigrated
    first, second = (
        migrate(live.store, planned(live, target=live.backend.name(name))).target
        for name in ("first", "second")
    )
    under_way = UnderWay(live, lambda store: cutover(store, first, alias=live.alias))
    with pytest.raises(WrongPhase, match=f"'{live.alias}' is moving between"):
        cutover(live.store, second, alias=live.alias)
    cutover(live.store, first, alias=live.alias)
    live.put(9001)
    assert under_way.arrive()
    assert_in_use(live, first)
