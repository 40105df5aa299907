"""The ledger is never believed without a look: a copy or a source that is gone, renamed, or another one by now."""

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    CollectionExists,
    CollectionNotFound,
    Copy,
    MigrationOptions,
    NoMigration,
    QueryBank,
    Recipe,
    ResumeRefused,
    WrongPhase,
    clean,
    cutover,
    migrate,
    plan_correction,
    resume,
    rollback,
)
from milvus_hubness.jobs.common.lease import forget_leases
from milvus_hubness.jobs.migration import clean as migration_clean
from milvus_hubness.jobs.migration.catch_up import verify
from milvus_hubness.jobs.migration.clean import would_drop
from milvus_hubness.jobs.migration.ledger import Ledger
from milvus_hubness.jobs.migration.presence import problem_of
from milvus_hubness.jobs.store.records import DUAL_WRITE_PROPERTY, IDENTITY_PROPERTY
from tests.support.galleries import all_keys, plain_collection, vectors

DIM, ITEMS = 8, 60
ALONE = MigrationOptions(no_writers=True)


class Migrated:
    """A verified migration, whose alias leads to the copy if it has switched."""

    def __init__(self, backend, *, switched=False, rename=False):
        self.backend, self.client, self.store = backend, backend.client(), backend.store()
        self.name, self.alias = backend.name("source"), None if rename else backend.name("alias")
        self.bank = QueryBank(vectors(np.random.default_rng(1), 40, DIM))
        backend.made.append(f"{self.name}__before_hubness")
        self.make()
        self.target = self.migrate(switched=switched, rename=rename).target

    def make(self, seed=0, items=ITEMS):
        plain_collection(
            self.client, self.name, vectors(np.random.default_rng(seed), items, DIM), "IP"
        )

    def migrate(self, *, switched=False, rename=False, restart=False):
        names = {
            "alias": self.alias if switched and not rename else None,
            "rename": switched and rename,
        }
        plan = plan_correction(
            self.store,
            self.name,
            Recipe(self.bank, estimator=NNN(4)),
            Copy(restart=restart, **names),
        )
        return migrate(self.store, plan, ALONE)

    def drop(self, name):
        for alias in self.store.info(name, counted=False).aliases:
            self.client.drop_alias(alias)
        self.client.drop_collection(name)

    def move_away(self, name):
        other = self.backend.name("moved")
        self.client.rename_collection(name, other)
        return other

    def assert_refused(self, command, error, *words):
        for step in (command,) if callable(command) else command:
            with pytest.raises(error) as caught:
                step()
            message = str(caught.value)
            assert "\n" not in message
            for word in words:
                assert word in message

    @property
    def phase(self):
        return Ledger(self.store).find(self.name).phase


def test_a_copy_that_was_dropped_is_not_verified(backend):
    world = Migrated(backend)
    world.drop(world.target)
    steps = [
        lambda: resume(world.store, world.name, ALONE),
        world.migrate,
        lambda: verify(world.store, world.name, options=ALONE),
        lambda: cutover(world.store, world.name, alias=world.alias, options=ALONE),
    ]
    world.assert_refused(steps, CollectionNotFound, "the copy", "is gone", "--restart")
    assert "is gone" in problem_of(world.store, Ledger(world.store).find(world.name))
    again = world.migrate(restart=True)
    assert (again.phase, again.verified["rows"]) == ("verified", ITEMS)


@pytest.mark.long
def test_a_copy_that_was_renamed_is_found(backend):
    world = Migrated(backend)
    moved = world.move_away(world.target)
    steps = [lambda: resume(world.store, world.name, ALONE), world.migrate]
    steps.append(lambda: clean(world.store, world.name, drop=world.target))
    world.assert_refused(
        steps,
        CollectionNotFound,
        f"was renamed to '{moved}'",
        f"rename it to '{world.target}' again",
    )
    world.client.rename_collection(moved, world.target)
    assert resume(world.store, world.name, ALONE).verified["rows"] == ITEMS


@pytest.mark.long
@pytest.mark.lite_only
def test_another_copy_of_that_name_is_not_taken_for_it(backend):
    """Also a corrected one, whose state must not become that of the migration."""
    world = Migrated(backend)
    stranger = Migrated(backend)
    world.drop(world.target)
    world.client.rename_collection(stranger.target, world.target)
    world.assert_refused(
        lambda: resume(world.store, world.name, ALONE), CollectionExists, "another collection"
    )
    # Its state names the bank of its former name, which jobs refuse: it is read as a plain client does.
    world.client.load_collection(world.target)
    before = world.client.query(world.target, filter="id >= 0", output_fields=["id", "vector"])
    assert len(before) == ITEMS
    world.assert_refused(
        lambda: clean(world.store, world.name, drop=world.target), CollectionExists, "it stays"
    )
    after = world.client.query(world.target, filter="id >= 0", output_fields=["id", "vector"])
    assert after == before


@pytest.mark.long
def test_rows_that_came_after_the_verification_are_verified(backend):
    world = Migrated(backend)
    world.client.upsert(world.name, {"id": 1_000, "vector": world.bank.vectors[0], "group": 1})
    again = world.migrate()
    assert again.verified["rows"] == ITEMS + 1
    assert 1_000 in all_keys(world.store, world.target)


def test_a_new_source_is_not_the_old_one(backend):
    world = Migrated(backend)
    world.drop(world.name)
    world.make(seed=5, items=20)
    steps = [
        lambda: resume(world.store, world.name, ALONE),
        world.migrate,
        lambda: cutover(world.store, world.name, alias=world.alias, options=ALONE),
    ]
    world.assert_refused(
        steps, CollectionExists, "the source", "another collection has its name", "--restart"
    )
    assert len(all_keys(world.store, world.target)) == ITEMS
    assert world.migrate(restart=True).verified["rows"] == 20


def test_a_rollback_spares_a_new_collection_under_the_sources_name(backend):
    """It would have made its rows equal to those of the copy, and would have deleted the others."""
    world = Migrated(backend, switched=True)
    moved = world.move_away(world.name)
    world.make(seed=5, items=20)
    before = all_keys(world.store, world.name)
    steps = [lambda: rollback(world.store, world.target, options=ALONE)]
    steps.append(lambda: resume(world.store, world.target, ALONE))
    world.assert_refused(steps, CollectionNotFound, f"was renamed to '{moved}'")
    world.assert_refused(
        lambda: clean(world.store, world.target, drop=world.name), CollectionExists, "nothing was"
    )
    assert all_keys(world.store, world.name) == before
    world.client.drop_collection(world.name)
    world.client.rename_collection(moved, world.name)
    assert rollback(world.store, world.target, options=ALONE).source == world.name
    assert clean(world.store, world.name, drop=world.target).source == world.name


@pytest.mark.long
@pytest.mark.lite_only
@pytest.mark.parametrize("by", ["hubness", "plain"])
def test_a_source_renamed_after_a_cutover_by_rename_is_found(backend, by):
    world = Migrated(backend, switched=True, rename=True)
    renamed, moved = f"{world.name}__before_hubness", backend.name("moved")
    (backend.hubness_client() if by == "hubness" else world.client).rename_collection(
        renamed, moved
    )
    steps = [lambda: rollback(world.store, world.target, options=ALONE)]
    steps.append(lambda: clean(world.store, world.target, drop=renamed))
    world.assert_refused(steps, CollectionNotFound, f"was renamed to '{moved}'")
    world.client.rename_collection(moved, renamed)
    assert rollback(world.store, world.target, options=ALONE).source == world.name


@pytest.mark.long
@pytest.mark.lite_only
def test_a_switched_migration_whose_copy_was_dropped_can_be_forgotten(backend):
    world = Migrated(backend, switched=True)
    world.drop(world.target)
    steps = [lambda: rollback(world.store, world.name, options=ALONE)]
    steps.append(lambda: clean(world.store, world.name, drop=world.name))
    world.assert_refused(
        steps, CollectionNotFound, "the copy", f"clean {world.name} --drop {world.target}"
    )
    assert world.store.exists(world.name), "no rows would have been left"
    assert "the copy" not in would_drop(world.store, world.name, drop=world.target)
    clean(world.store, world.name, drop=world.target)
    assert Ledger(world.store).of_target(world.target) is None
    assert world.migrate(switched=True).phase == "switched"


@pytest.mark.long
@pytest.mark.lite_only
def test_a_finished_migration_looks_at_its_copy_too(backend):
    world = Migrated(backend, switched=True)
    clean(world.store, world.target, drop=world.name)
    assert resume(world.store, world.target, ALONE).phase == "finished"
    world.drop(world.target)
    world.assert_refused(
        lambda: resume(world.store, world.target, ALONE), CollectionNotFound, "is gone"
    )


@pytest.mark.lite_only
def test_a_copy_dropped_in_the_middle_is_not_filled_on_from_there(backend):
    world = Migrated(backend)
    ledger = Ledger(world.store)
    ledger.write(ledger.find(world.name), phase="copying")
    world.drop(world.target)
    world.assert_refused(
        lambda: resume(world.store, world.name, ALONE), CollectionNotFound, "--restart"
    )


def test_the_identity_of_a_source_is_neither_copied_nor_left_behind(lite):
    world = Migrated(lite)
    before = world.store.info(world.name).identity
    assert before
    assert world.store.info(world.target).identity == ""
    assert (
        "hubness_identity"
        not in lite.hubness_client().describe_collection(world.target)["properties"]
    )
    clean(world.store, world.name, drop=world.target)
    assert world.store.info(world.name).identity == ""


class Killed(BaseException):
    """As if the process had ended."""


def killed_after(monkeypatch, step):
    """Let the process end after this function of `clean`."""
    call = getattr(migration_clean, step)

    def until_then(*arguments, **named):
        call(*arguments, **named)
        raise Killed

    monkeypatch.setattr(migration_clean, step, until_then)


@pytest.mark.parametrize("step", ["_forget_identity", "drop_collection"])
@pytest.mark.parametrize("then", ["run", "clean"])
def test_a_clean_that_is_killed_can_be_taken_over(backend, monkeypatch, step, then):
    """The source is not taken for another collection of its name, nor is the copy missed."""
    world = Migrated(backend)
    properties = world.store.properties_of(world.name)
    before = {name: text for name, text in properties.items() if name != IDENTITY_PROPERTY}
    with monkeypatch.context() as killing:
        killed_after(killing, step)
        with pytest.raises(Killed):
            clean(world.store, world.name, drop=world.target)
    forget_leases(world.store, world.name, world.target)

    migration = Ledger(world.store).find(world.name)
    assert problem_of(world.store, migration) == ""
    with pytest.raises(WrongPhase, match="complete it with a run"):
        cutover(world.store, world.name, alias=backend.name("alias"))
    with pytest.raises(ResumeRefused, match="pass its bank again"):
        resume(world.store, world.name, ALONE)

    if then == "run":
        # It ends the clean, and makes no copy of that name, which a late call might drop.
        with pytest.raises(WrongPhase, match="repeat the command for a new copy"):
            world.migrate()
        assert world.migrate().phase == "verified"
        assert len(all_keys(world.store, world.target)) == ITEMS
    clean(world.store, world.name, drop=world.target)
    assert not world.store.exists(world.target)
    properties = world.store.properties_of(world.name)
    # Milvus Lite cannot remove a property, and leaves it empty.
    assert {name: text for name, text in properties.items() if text} == before


def test_a_clean_that_is_killed_before_it_ends_dual_writes_leaves_them_whole(lite, monkeypatch):
    """A property that still names the copy, and a ledger that refuses it, would let clients' writes fail."""
    world = Migrated(lite)
    clean(world.store, world.name, drop=world.target)
    plan = plan_correction(world.store, world.name, Recipe(world.bank, estimator=NNN(4)))
    migrate(world.store, plan, client_ttl=0.0)
    assert world.store.info(world.name).dual_write is not None

    write = type(world.store).write_property

    def killed(store, collection, name, value):
        if name == DUAL_WRITE_PROPERTY:
            raise Killed
        write(store, collection, name, value)

    with monkeypatch.context() as killing:
        killing.setattr(type(world.store), "write_property", killed)
        with pytest.raises(Killed):
            clean(world.store, world.name, drop=world.target)

    client = lite.hubness_client()
    vector = vectors(np.random.default_rng(9), 1, DIM)[0]
    row = {"id": 10_000, "vector": vector, "group": 0}
    client.insert(world.name, [row])
    assert 10_000 in all_keys(world.store, world.target)


def test_a_copy_whose_record_is_not_to_be_seen_is_said_to_be_one(lite):
    """As after a server was killed: Milvus 2.3.5 does not show all rows of the ledger at once."""
    migrated = Migrated(lite, switched=True)
    ledger = Ledger(migrated.store)
    record = ledger.find(migrated.alias)
    ledger.forget(record)
    for name in (migrated.alias, migrated.target):
        with pytest.raises(NoMigration, match="repeat the command in a minute"):
            rollback(migrated.store, name, options=ALONE)
    with pytest.raises(NoMigration, match=r"^no migration of .* in this database"):
        rollback(migrated.store, migrated.name, options=ALONE)
    ledger.write(record)
    assert rollback(migrated.store, migrated.alias, options=ALONE).source == migrated.name
