"""Names that move while others do something: killed runs that are repeated late, aliases of their owners,
changes of the source while it is copied, and grants.
"""

import numpy as np
import pytest

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
    status,
)
from milvus_hubness.errors import ResumeRefused
from milvus_hubness.jobs.migration.ledger import Ledger
from milvus_hubness.jobs.migration.rights import Grant
from milvus_hubness.milvus.store.milvus_store import MilvusStore
from tests.support.galleries import plain_collection, vectors
from tests.support.live import DIM, ITEMS, K, Live


@pytest.fixture
def live(lite):
    """Made by its application: the ledger knows nothing of it."""
    return Live(lite, is_migrated=False)


@pytest.fixture
def migrated(lite):
    return Live(lite, is_migrated=True)


def killed(live, job, *, moves=0, after=False):
    """Run a job that is killed as the next alias is to move, or has moved, after so many."""

    class Killed(MilvusStore):
        moved = 0

        def point_alias(self, alias, collection):
            self.moved += 1
            if self.moved <= moves:
                return super().point_alias(alias, collection)
            if after:
                super().point_alias(alias, collection)
            raise StoreError("killed")

    with pytest.raises(StoreError, match="killed"):
        job(Killed(live.backend.client()))


def while_copied(live, action):
    """A store whose first write to the copy is followed by something that others do."""
    done = []

    class Watched(MilvusStore):
        def upsert(self, collection, *args, **kwargs):
            super().upsert(collection, *args, **kwargs)
            if collection == f"{live.name}_r2" and not done:
                done.append(collection)
                action()

    return Watched(live.backend.client())


def third_bank(live):
    return QueryBank(vectors(np.random.default_rng(5), 40, DIM))


def assert_nothing_lost(live):
    assert set(live.read()) == set(live.rows)


# -- a killed run that is repeated late ------------------------------------------------------------


def test_a_refresh_after_a_killed_rollback_ends_that_first(live):
    refresh(live.store, live.alias, QueryBank(live.other))
    killed(live, lambda store: rollback(store, live.alias))
    live.put(9001)
    with pytest.raises(WrongPhase, match="repeat the command"):
        refresh(live.store, live.alias, third_bank(live))
    assert_nothing_lost(live)
    done = refresh(live.store, live.alias, third_bank(live))
    assert done.former_copy == live.name, "the rollback was carried out"
    live.put(9002)
    assert_nothing_lost(live)
    assert rollback(live.store, live.alias).source == live.name
    assert_nothing_lost(live)


def test_a_rollback_that_was_killed_after_its_move_is_no_refresh(migrated):
    live = migrated
    second = refresh(live.store, live.alias, QueryBank(live.other), keep_former=2).collection
    refresh(live.store, live.alias, QueryBank(live.bank), keep_former=2)
    killed(live, lambda store: rollback(store, live.alias), after=True)
    done = refresh(live.store, live.alias)
    assert (done.action, done.collection) == ("none", second)
    assert live.store.exists(live.name), "what a rollback needs"


def test_a_switch_that_is_carried_on_after_other_moves_compares_again(migrated):
    live = migrated
    [source] = {m.source for m in Ledger(live.store).migrations() if m.target == live.name}
    killed(live, lambda store: refresh(store, live.alias, QueryBank(live.other)))
    assert rollback(live.store, live.alias).source == source
    live.put(9001)
    resume(live.store, source, alias=live.alias)
    live.put(9002)
    refresh(live.store, live.alias)
    assert_nothing_lost(live)


class Own:
    """A plain collection that is called by its own name, and the plan to move that name."""

    def __init__(self, lite):
        self.name = lite.name("own")
        self.items = vectors(np.random.default_rng(8), ITEMS, DIM)
        self.plain, self.store = lite.client(), lite.store()
        plain_collection(self.plain, self.name, self.items, "COSINE")
        bank = QueryBank(vectors(np.random.default_rng(9), 60, DIM))
        self.recipe = Recipe(bank, estimator=NNN(K), verdict="skip")
        self.plan = plan_correction(self.store, self.name, self.recipe, Copy(rename=True))

    def killed_in(self, method, job, *, after=False):
        """Run a job that is killed before, or after, its first call of a method of the store."""

        def stop(store, *arguments):
            if after:
                getattr(MilvusStore, method)(store, *arguments)
            raise StoreError("killed")

        with pytest.raises(StoreError, match="killed"):
            job(type("Killed", (MilvusStore,), {method: stop})(self.plain))

    def keys(self, client):
        found = client.query(self.name, "id >= 0", ["id"], consistency_level="Strong")
        return {row["id"] for row in found}


@pytest.fixture
def own(lite):
    return Own(lite)


@pytest.mark.parametrize("again", [resume, cutover])
@pytest.mark.parametrize("kills", [1, 2])
def test_a_source_that_was_about_to_get_another_name_is_found_by_the_one_it_has(
    lite, own, again, kills
):
    own.killed_in("rename", lambda store: migrate(store, own.plan))
    if kills == 2:
        own.killed_in("rename", lambda store: again(store, own.name, rename=True))
    assert not status(own.store, own.name).corrected
    own.plain.upsert(own.name, [{"id": 9001, "vector": own.items[0], "group": 1}])

    again(own.store, own.name, rename=True)
    assert own.keys(lite.hubness_client()) == {*range(ITEMS), 9001}
    assert status(own.store, own.name).corrected


def test_a_source_that_has_its_other_name_already_begins_no_migration_of_its_own(lite, own):
    """A run with --restart took it for a collection that nobody had migrated, and moved its name again."""
    own.killed_in("rename", lambda store: migrate(store, own.plan), after=True)
    own.store.point_alias(own.name, f"{own.name}__before_hubness")
    again = plan_correction(own.store, own.name, own.recipe, Copy(rename=True, restart=True))
    with pytest.raises(WrongPhase, match=f"the name '{own.name}' is moving between"):
        migrate(own.store, again)
    resume(own.store, own.name, rename=True)
    assert own.keys(lite.hubness_client()) == {*range(ITEMS)}


@pytest.mark.parametrize("method", ["point_alias", "drop_alias", "rename"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_source_that_was_about_to_get_its_own_name_back_has_it_after_a_repetition(
    own, method, after
):
    target = migrate(own.store, own.plan).target
    own.killed_in(method, lambda store: rollback(store, own.name), after=after)
    rollback(own.store, target)
    assert own.store.alias_target(own.name) is None
    assert not status(own.store, own.name).corrected
    assert own.keys(own.plain) == {*range(ITEMS)}


def test_so_does_one_whose_dual_writes_another_migration_has_ended(lite):
    rng = np.random.default_rng(8)
    name, alias = lite.name("full"), lite.name("live")
    items = vectors(rng, ITEMS, DIM)
    plain_collection(lite.client(), name, items, "COSINE")
    store = lite.store()
    store.point_alias(alias, name)
    client = lite.hubness_client()
    recipe = Recipe(QueryBank(vectors(rng, 60, DIM)), estimator=NNN(K))

    class Killed(MilvusStore):
        def point_alias(self, alias, collection):
            raise StoreError("killed")

    with pytest.raises(StoreError):
        migrate(Killed(lite.client()), plan_correction(store, name, recipe, Copy(alias=alias)))
    migrate(store, plan_correction(store, name, recipe, Copy(target=f"{name}_second")))
    client.upsert(alias, [{"id": 9001, "vector": items[0], "group": 1}])
    resume(store, f"{name}_hubness")
    assert store.alias_target(alias) == f"{name}_hubness", "the alias of the killed run"
    assert client.query(alias, filter="id == 9001", consistency_level="Strong")


@pytest.mark.parametrize("direction", ["forth", "back", "back, with an alias that was dropped"])
def test_what_a_plain_client_writes_before_the_repetition_is_kept(live, second, direction):
    if direction == "forth":
        killed(live, lambda store: refresh(store, live.alias, QueryBank(live.other)))
    else:
        refresh(live.store, live.alias, QueryBank(live.other))
        killed(live, lambda store: rollback(store, live.alias))
    plain = live.backend.client()
    [row] = plain.query(live.alias, filter="id == 5", output_fields=["*"])
    plain.upsert(live.alias, [{**row, "group": 77}])
    if direction == "forth":
        refresh(live.store, live.alias)
    else:
        if direction != "back":
            plain.drop_alias(second)
        rollback(live.store, live.alias)
    [row] = live.client.query(
        live.alias, filter="id == 5", output_fields=["*"], consistency_level="Strong"
    )
    assert row["group"] == 77


def test_half_a_rollback_ends_before_a_refresh_by_the_other_alias(live):
    second = live.backend.name("second")
    live.store.point_alias(second, live.name)
    refresh(live.store, live.alias, QueryBank(live.other))
    killed(live, lambda store: rollback(store, live.alias), moves=1)
    leads_to = {alias: live.store.alias_target(alias) for alias in (live.alias, second)}
    assert set(leads_to.values()) == {live.name, f"{live.name}_r2"}
    [ahead] = [alias for alias in leads_to if leads_to[alias] != live.name]
    [back] = [alias for alias in leads_to if leads_to[alias] == live.name]
    with pytest.raises(WrongPhase, match="repeat the command"):
        refresh(live.store, ahead, third_bank(live))
    assert live.store.alias_target(ahead) == live.store.alias_target(back) == live.name
    live.put(9001, ahead)
    assert live.client.query(back, filter="id == 9001", consistency_level="Strong")


def test_no_rollback_begins_while_names_have_moved_in_part(migrated):
    live = migrated
    second = live.backend.name("second")
    live.store.point_alias(second, live.name)
    killed(live, lambda store: refresh(store, live.alias, QueryBank(live.other)), moves=1)
    with pytest.raises(WrongPhase, match="some names have moved"):
        rollback(live.store, live.name)
    refresh(live.store, live.alias)
    assert live.store.alias_target(live.alias) == live.store.alias_target(second)
    assert_nothing_lost(live)


# -- aliases of their owners -----------------------------------------------------------------------


@pytest.fixture
def second(live):
    """Another alias of the collection."""
    alias = live.backend.name("second")
    live.store.point_alias(alias, live.name)
    return alias


def elsewhere(live):
    name = live.backend.name("elsewhere")
    plain_collection(live.backend.client(), name, np.ones((2, DIM), np.float32), "IP")
    return name


def test_an_alias_that_is_given_while_a_copy_is_made_moves_too(live):
    alias = live.backend.name("second")
    store = while_copied(live, lambda: live.backend.client().create_alias(live.name, alias))
    done = refresh(store, live.alias, QueryBank(live.other))
    assert live.store.alias_target(alias) == done.collection


def test_an_alias_that_is_dropped_while_a_copy_is_made_is_not_made_again(live, second):
    store = while_copied(live, lambda: live.backend.client().drop_alias(second))
    refresh(store, live.alias, QueryBank(live.other))
    assert live.store.alias_target(second) is None


def test_an_alias_that_was_dropped_since_a_switch_is_not_made_again_by_a_rollback(live, second):
    refresh(live.store, live.alias, QueryBank(live.other))
    live.backend.client().drop_alias(second)
    rollback(live.store, live.alias)
    assert live.store.alias_target(second) is None
    assert_nothing_lost(live)


def test_an_alias_that_its_owner_moves_away_while_a_copy_is_made_stays_there(live, second):
    other = elsewhere(live)
    store = while_copied(live, lambda: live.backend.client().alter_alias(other, second))
    done = refresh(store, live.alias, QueryBank(live.other))
    assert live.store.alias_target(live.alias) == done.collection
    assert live.store.alias_target(second) == other
    live.store.drop_alias(second)


@pytest.mark.parametrize("moves", [0, 1], ids=["before any moved", "after one moved"])
def test_an_alias_that_is_moved_away_during_a_killed_switch_blocks_nothing(
    live, second, moves, caplog
):
    killed(live, lambda store: refresh(store, live.alias, QueryBank(live.other)), moves=moves)
    left = max(live.alias, second) if moves else second
    kept = min(live.alias, second) if moves else live.alias
    other = elsewhere(live)
    live.backend.client().alter_alias(other, left)
    refresh(live.store, kept)
    assert live.store.alias_target(kept) == f"{live.name}_r2"
    assert live.store.alias_target(left) == other
    live.store.drop_alias(left)


def test_an_alias_that_leads_elsewhere_keeps_no_other_from_being_rolled_back(live, second, caplog):
    refresh(live.store, live.alias, QueryBank(live.other))
    live.backend.client().alter_alias(elsewhere(live), second)
    assert rollback(live.store, live.alias).source == live.name
    assert f"{second!r} leads to" in caplog.text
    live.store.drop_alias(second)


def test_an_alias_that_a_copy_was_given_goes_back_with_the_others(live):
    done = refresh(live.store, live.alias, QueryBank(live.other))
    alias = live.backend.name("second")
    live.store.point_alias(alias, done.collection)
    rollback(live.store, live.alias)
    assert live.store.alias_target(alias) == live.name
    live.put(9001)
    assert live.client.query(alias, filter="id == 9001", consistency_level="Strong")


# -- changes of the source while it is copied ------------------------------------------------------


def new_partition(live):
    live.client.create_partition(live.alias, "late")
    row = {"id": 9001, "vector": live.query[0], "group": 1}
    live.client.insert(live.alias, [row], partition_name="late")
    live.rows[9001] = live.query[0]


def new_index(live):
    client = live.backend.client()
    index = client.prepare_index_params("group", index_type="INVERTED", index_name="by_group")
    client.create_index(live.name, index)


CHANGES = {"a partition": new_partition, "an index of a scalar field": new_index}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_source_that_changes_while_it_is_copied_is_copied_anew(live, change):
    """The name does not move to a copy that lacks what the source has; the next refresh makes another."""
    with pytest.raises(ResumeRefused, match="refresh again, which makes another copy"):
        refresh(while_copied(live, lambda: change(live)), live.alias, QueryBank(live.other))
    assert live.store.alias_target(live.alias) == live.name
    assert_nothing_lost(live)

    done = refresh(live.store, live.alias)
    assert done.action == "full"
    assert_nothing_lost(live)
    live.assert_found(live.other)
    indexes = live.backend.client().list_indexes
    assert set(indexes(done.collection)) == set(indexes(live.name))


def test_a_time_to_live_that_is_set_while_a_copy_is_made_is_not_undone(live):
    def promised():
        live.client.alter_collection_properties(live.alias, {"collection.ttl.seconds": 3600})

    with pytest.raises(ResumeRefused):
        refresh(while_copied(live, promised), live.alias, QueryBank(live.other))
    assert live.store.alias_target(live.alias) == live.name
    assert refresh(live.store, live.alias).action == "refused", "it would restart their time"
    done = refresh(live.store, live.alias, restart_ttl=True)
    assert live.store.info(done.collection).time_to_live == 3600


# -- grants ----------------------------------------------------------------------------------------


def with_grants(live, given, while_copying=lambda: None):
    """A database with users: a store whose grants are in `given`, by collection."""

    class Granting(MilvusStore):
        def grants_on(self, collection):
            return sorted(given.get(collection, set()))

        def grant_all(self, collection, grants):
            given.setdefault(collection, set()).update(grants)
            return []

        def upsert(self, collection, *args, **kwargs):
            super().upsert(collection, *args, **kwargs)
            if collection == f"{live.name}_r2":
                while_copying()

    return Granting(live.backend.client())


def test_grants_that_are_given_meanwhile_are_there_after_a_switch_and_after_a_rollback(live):
    reader, later, latest = (
        Grant(role, "Collection", "Search") for role in ("reader", "later", "latest")
    )
    given = {live.name: {reader}}
    store = with_grants(live, given, lambda: given[live.name].add(later))
    done = refresh(store, live.alias, QueryBank(live.other))
    assert given[done.collection] == {reader, later}
    given[done.collection].add(latest)
    rollback(store, live.alias)
    assert given[live.name] == {reader, later, latest}


# -- what is left of copies ------------------------------------------------------------------------


def test_clean_finds_what_is_to_go_from_the_alias(migrated):
    live = migrated
    [source] = {m.source for m in Ledger(live.store).migrations() if m.target == live.name}
    refresh(live.store, live.alias, QueryBank(live.other))
    clean(live.store, live.alias, drop=source)
    assert not live.store.exists(source)
    assert_nothing_lost(live)


def test_clean_finds_a_copy_that_was_rolled_back_before_another_refresh(live):
    second = refresh(live.store, live.alias, QueryBank(live.other)).collection
    rollback(live.store, live.alias)
    refresh(live.store, live.alias, third_bank(live))
    clean(live.store, live.alias, drop=second)
    assert not live.store.exists(second)
    assert_nothing_lost(live)


def test_a_former_copy_that_is_dropped_is_not_said_to_stay(migrated):
    live = migrated
    done = refresh(live.store, live.alias, QueryBank(live.other), keep_former=0)
    assert (done.former_copy, done.dropped) == (None, (live.name,))


def test_a_copy_that_nobody_wants_any_more_goes_with_the_next_refresh(live):
    class Killed(MilvusStore):
        def upsert(self, collection, *args, **kwargs):
            if collection == f"{live.name}_r2":
                raise StoreError("killed")
            super().upsert(collection, *args, **kwargs)

    with pytest.raises(StoreError):
        refresh(Killed(live.backend.client()), live.alias, QueryBank(live.other))
    assert refresh(live.store, live.alias, QueryBank(live.bank)).action == "none"
    assert not live.store.exists(f"{live.name}_r2")
    assert live.store.info(live.name).dual_write is None
    assert refresh(live.store, live.alias, refit="pending").action == "none"
    live.assert_found(live.bank)
