"""What a correction leaves: it is hidden from readers, and one command takes it away."""

import threading

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    Beside,
    CannotMigrate,
    CollectionNotFound,
    MigrationOptions,
    QueryBank,
    Recipe,
    clean,
    cutover,
    disable,
    enable,
    migrate,
    plan_correction,
    refresh,
    rollback,
)
from milvus_hubness.jobs.migration.clean import would_drop
from milvus_hubness.jobs.migration.ledger import Ledger
from milvus_hubness.jobs.refresh.sweep import leftovers, sweep
from milvus_hubness.jobs.store.ownership import LEDGER
from tests.qdrant.worlds import Corrected
from tests.support.aliases import aliased
from tests.support.galleries import vectors

ALONE = MigrationOptions(no_writers=True)
DIM = 8


def copied(backend, times):
    """A corrected collection that refreshes have copied behind the alias `live`, with all former copies."""
    made = Corrected(backend, "Cosine")
    cutover(made.store, made.name, alias="live", options=ALONE)
    made.former = []
    for seed in range(times):
        bank = QueryBank(vectors(np.random.default_rng(seed), 60, made.DIM))
        done = refresh(made.store, "live", bank, keep_former=9, client_ttl=0.0, force=True)
        assert done.to_dict()["former_copy"] == made.name, "the result names it"
        made.former.append(made.name)
        made.name = done.collection
        backend.made.append(made.name)
    return made


def ours(backend):
    """The collections of jobs, and the records of the ledger."""
    client = backend.client
    names = {each.name for each in client.get_collections().collections}
    records = client.scroll(LEDGER, limit=1_000)[0] if LEDGER in names else []
    return names, {record.payload["group"] for record in records}


def test_former_copies_are_found_and_removed_and_the_way_back_stays(everywhere):
    live = copied(everywhere, 2)
    found = leftovers(live.store, "live")
    assert set(found.copies) == set(live.former)
    assert live.name in found.staying
    removed = sweep(live.store, "live")
    assert set(removed.copies) == set(live.former)
    assert not any(live.store.exists(name) for name in live.former)
    assert not leftovers(live.store, "live")
    assert live.store.exists(live.source), "the source is the user's"
    live.client.set_payload("live", {"seen": 2}, [3])
    live.client.query_points("live", live.query.tolist())

    [migration] = Ledger(live.store).related("live")
    assert (migration.source, migration.target) == (live.source, live.name)
    done = rollback(live.store, "live", options=ALONE)
    assert (done.source, live.store.alias_target("live")) == (live.source, live.source)
    [record] = live.backend.client.retrieve(live.source, [3])
    assert record.payload["seen"] == 2, "the rollback has carried it"
    assert sweep(live.store, live.source).copies == (live.name,)


def test_clean_drops_a_former_copy_but_none_that_an_alias_leads_to(backend):
    live = copied(backend, 1)
    [former] = live.former
    live.store.point_alias("archive", former)
    found = leftovers(live.store, "live")
    assert not found
    assert "'archive' leads to it" in found.staying[former]

    live.store.drop_alias("archive")
    assert former in would_drop(live.store, "live", drop=former)["the former copy"]
    clean(live.store, live.source, drop=former)
    assert not live.store.exists(former)
    assert rollback(live.store, "live", options=ALONE).source == live.source


def test_after_everything_is_undone_nothing_is_left(everywhere):
    made = Corrected(everywhere, "Dot")
    bank = QueryBank(made.other)
    alias = aliased(made.store, made.name)
    done = refresh(made.store, alias, bank, client_ttl=0.0, force=True)
    rollback(made.store, alias, options=ALONE)
    clean(made.store, done.collection, drop=done.collection)
    made.store.drop_alias(alias)
    clean(made.store, made.name, drop=made.name)
    sweep(made.store, made.source)
    names, groups = ours(everywhere)
    assert not {name for name in names if name.startswith(made.source)} - {made.source}
    assert not [group for group in groups if made.source in group]
    assert not [key for key, text in made.store.properties_of(made.source).items() if text]
    assert not leftovers(made.store, made.source)


class Enabled:
    """A collection with biases in payloads."""

    def __init__(self, backend):
        rng = np.random.default_rng(4)
        self.backend, self.store = backend, backend.store()
        self.bank = QueryBank(vectors(rng, 40, DIM))
        self.name = backend.fill(vectors(rng, 150, DIM), "Dot")
        self.plain = {record.id: record.payload for record in self.read(backend.client)}

    def read(self, client):
        return client.scroll(self.name, limit=500)[0]

    def enable(self, **options):
        plan = plan_correction(self.store, self.name, Recipe(self.bank, estimator=NNN(4)), Beside())
        return enable(self.store, plan, **{"client_ttl": 0.0, **options})

    def assert_hidden(self, client):
        assert {record.id: record.payload for record in self.read(client)} == self.plain


def test_biases_in_payloads_are_hidden_after_disable_and_removed(everywhere):
    made = Enabled(everywhere)
    made.enable()
    disable(made.store, made.name)
    client = everywhere.hubness()
    made.assert_hidden(client)
    shown = client.query_points(made.name, [1.0] * DIM).points[0]
    assert not [key for key in shown.payload if key.startswith("hubness")]
    described = client.get_collection(made.name)
    assert not described.config.metadata
    assert not described.payload_schema

    with pytest.raises(
        CannotMigrate, match=r"earlier correction.*hubness_bias.*milvus-hubness sweep"
    ):
        plan_correction(made.store, made.name, made.bank)
    found = leftovers(made.store, made.name)
    assert found.keys == {"hubness_bias": 150, "hubness_epoch": 150}
    assert found.banks == (f"{made.name}__bank",)
    sweep(made.store, made.name)
    assert {record.id: record.payload for record in made.read(everywhere.client)} == made.plain
    assert f"{made.name}__bank" not in ours(everywhere)[0]
    assert not leftovers(made.store, made.name)
    assert plan_correction(made.store, made.name, made.bank).body.survey.rows == 150


def test_readers_see_none_of_our_keys_while_enable_and_refresh_run(backend):
    made = Enabled(backend)
    stop, wrong = threading.Event(), []

    def reading():
        client = backend.hubness(state_ttl=0.05)
        while not stop.is_set():
            for record in made.read(client):
                if record.payload != made.plain[record.id]:
                    wrong.append(record.payload)

    reader = threading.Thread(target=reading)
    reader.start()
    try:
        made.enable(client_ttl=0.2)
        other = QueryBank(vectors(np.random.default_rng(9), 40, DIM))
        refresh(made.store, made.name, other, client_ttl=0.2, force=True)
        disable(made.store, made.name)
        made.assert_hidden(backend.hubness())
    finally:
        stop.set()
        reader.join()
    assert not wrong[:2]


def test_a_key_of_the_users_own_is_shown(backend):
    made = Enabled(backend)
    backend.client.set_payload(made.name, {"hubness_note": 1}, [1])
    made.plain[1]["hubness_note"] = 1
    made.enable()
    made.assert_hidden(backend.hubness())


def test_a_bank_that_another_collection_uses_stays(backend):
    made, other = Enabled(backend), Enabled(backend)
    made.enable()
    plan = plan_correction(
        other.store,
        other.name,
        Recipe(other.bank, estimator=NNN(4)),
        Beside(),
        bank_collection=f"{made.name}__bank",
    )
    enable(other.store, plan, client_ttl=0.0)
    disable(made.store, made.name)
    assert not sweep(made.store, made.name).banks
    assert other.store.exists(f"{made.name}__bank")


def test_an_unfinished_migration_stays(backend):
    made = Enabled(backend)
    plan = plan_correction(made.store, made.name, Recipe(made.bank, estimator=NNN(4)))
    target = migrate(made.store, plan, ALONE).target
    found = sweep(made.store, made.name)
    assert not found
    assert "'verified'" in found.staying[target]
    backend.client.delete_collection(target)
    found = sweep(made.store, made.name)
    assert (found.records, found.banks) == ((target,), (f"{made.name}__bank",))
    assert not leftovers(made.store, made.name)


def test_nothing_is_known_of_a_name(backend):
    with pytest.raises(CollectionNotFound, match="'nowhere'"):
        sweep(backend.store(), "nowhere")
