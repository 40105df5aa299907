"""Collections whose records cannot be read, beside those on which jobs and calls work.

A state that cannot be read may name any bank generation: generations stay, a warning names the collection, and the job
goes on."""

import json

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    Beside,
    EmptyBank,
    QueryBank,
    Recipe,
    StateError,
    UnknownStateVersion,
    clean,
    disable,
    enable,
    migrate,
    plan_correction,
    refresh,
    status,
)
from milvus_hubness.jobs.migration.ledger import MIGRATIONS, Ledger
from milvus_hubness.jobs.refresh.sampling import start_sampling, stop_sampling
from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.jobs.store.records import Record
from tests.support.databases import OnMilvus
from tests.support.galleries import vectors

DIM, ITEMS = 8, 30
MADE = {"database": {"found": ("lite", "qdrant-local")}}
UNREADABLE = {
    "broken": {"hubness": json.dumps({"version": 1, "field": 3})},
    "newer": {"hubness": json.dumps({"version": 2, "novelty": True})},
    "of another field": {"hubness.image": "["},
}
"""Properties that may name any bank generation."""
OTHER_RECORDS = {
    "hubness_tuning": "{",
    "hubness_dual_write": "[]",
    "hubness_samplings": "7",
    "hubness_other": "{",
}
"""Properties that name no bank generation."""


def bank_of(seed):
    return QueryBank(vectors(np.random.default_rng(seed), 20, DIM))


def write(database, name, properties):
    if isinstance(database, OnMilvus):
        database.database.client.alter_collection_properties(name, properties)
    else:
        database.store().properties.alter(name, properties)


@pytest.fixture
def neighbours(database):
    """Names of collections of each kind; the last one has other records only."""
    names = []
    for properties in (*UNREADABLE.values(), OTHER_RECORDS):
        name = database.fill(vectors(np.random.default_rng(3), 3, DIM), "IP")
        write(database, name, properties)
        names.append(name)
    return names


def enabled(database):
    name, store = (
        database.fill(vectors(np.random.default_rng(5), ITEMS, DIM), "IP"),
        database.store(),
    )
    database.made += [f"{name}__bias_a", f"{name}__bias_b"]
    enable(
        store,
        plan_correction(
            store, name, Recipe(bank_of(1), estimator=NNN(3), verdict="warn"), Beside()
        ),
        client_ttl=0.0,
    )
    return name


def warned(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def assert_names_each_once(caplog, neighbours):
    *unreadable, other = neighbours
    messages = warned(caplog)
    for name in unreadable:
        assert sum(f"of {name!r} " in message for message in messages) == 1, messages
    assert not any(repr(other) in message for message in messages)


def test_a_refresh_keeps_what_they_may_use_and_drops_it_once_they_can_be_read(
    database, neighbours, caplog
):
    name, store = enabled(database), database.store()
    former = store.info(name).state.profile.bank
    assert refresh(store, name, bank_of(2), force=True, client_ttl=0.0).action == "full"
    assert refresh(store, name, bank_of(3), force=True, client_ttl=0.0).action == "full"
    assert_names_each_once(caplog, neighbours)
    used = Ledger(store).used_banks
    store.drop_spare_generations(former.collection, used, older_than=-60)
    assert len(store.load_bank(former).queries) == 20
    for neighbour in neighbours:
        write(database, neighbour, {"hubness": "", "hubness.image": ""})
    store.drop_spare_generations(former.collection, used, older_than=-60)
    with pytest.raises(EmptyBank):
        store.load_bank(former)
    assert len(store.load_bank(store.info(name).state.profile.bank).queries) == 20


def test_a_collection_is_dropped_and_its_bank_stays(database, neighbours, caplog):
    if not isinstance(database, OnMilvus):
        pytest.skip("a client of Qdrant drops the collection alone")
    name, client = enabled(database), database.application()
    bank = database.store().info(name).state.profile.bank
    client.drop_collection(name)
    assert_names_each_once(caplog, neighbours)
    store = database.store()
    assert not store.exists(name)
    assert not store.exists(f"{name}__bias_a")
    assert len(store.load_bank(bank).queries) == 20


def test_a_migration_is_made_and_undone_beside_them(database, neighbours, caplog):
    source, store = (
        database.fill(vectors(np.random.default_rng(6), ITEMS, DIM), "IP"),
        database.store(),
    )
    migration = migrate(
        store,
        plan_correction(store, source, Recipe(bank_of(1), estimator=NNN(3), verdict="warn")),
        no_writers=True,
    )
    assert clean(store, source, drop=migration.target).target == migration.target
    assert_names_each_once(caplog, neighbours)
    assert not store.exists(migration.target)
    assert store.exists(migration.bank_collection)
    assert migration.target not in {left.target for left in Ledger(store).migrations()}


def test_a_correction_and_a_sampling_end_beside_them(database, neighbours):
    name, store = enabled(database), database.store()
    if isinstance(database, OnMilvus):
        start_sampling(store, name, rate=0.5)
        assert stop_sampling(store, name).rate == 0.5
    disable(store, name)
    assert not status(store, name).corrected


def test_a_call_on_an_unreadable_collection_names_it(database, neighbours):
    store = database.store()
    for name, error in zip(
        neighbours, (StateError, UnknownStateVersion, StateError, StateError), strict=True
    ):
        for call in (status, refresh, disable):
            with pytest.raises(error, match=rf"the collection property 'hubness\S*' of {name!r} "):
                call(store, name)


RECORDS = {
    "no JSON": ("{", None),
    "a newer version": (json.dumps({"version": 2, "source": "shop", "target": "shop_copy"}), "shop"),
    "a state of a newer version": (
        json.dumps({"version": 1, "source": "shop", "target": "shop_copy", "state": {"version": 2}}), "shop",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.long) if kind == "no JSON" else kind for kind in RECORDS],
)
def test_an_unreadable_migration_stops_only_its_own_collections(database, kind, caplog):
    body, source = RECORDS[kind]
    name, store, copy = enabled(database), database.store(), database.name("shop_copy")
    body = body.replace("shop_copy", copy).replace('"shop"', f'"{copy}_source"')
    store.put_records(LEDGER, [Record(copy, MIGRATIONS, body)])
    try:
        assert refresh(store, name, bank_of(2), force=True, client_ttl=0.0).action == "full"
        other = database.fill(vectors(np.random.default_rng(6), ITEMS, DIM), "IP")
        plan = plan_correction(store, other, Recipe(bank_of(1), estimator=NNN(3), verdict="warn"))
        migration = migrate(store, plan, no_writers=True)
        found = {entry.target for entry in Ledger(store).migrations()}
        assert migration.target in found
        assert copy not in found
        assert any(repr(copy) in message for message in warned(caplog))
        clean(store, other, drop=migration.target)
        assert not store.exists(migration.bank_collection), (
            "it was made for this migration, and no row is left"
        )
        for about in (copy, f"{copy}_source") if source else (copy,):
            with pytest.raises(StateError, match=f"the ledger record {copy!r} is broken"):
                Ledger(store).find(about)
        with pytest.raises(StateError, match=f"the ledger record {copy!r} is broken"):
            Ledger(store).of_target(copy)
    finally:
        store.drop_records(LEDGER, MIGRATIONS, [copy])
