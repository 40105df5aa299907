"""The store against the databases themselves."""

import numpy as np
import pytest

from milvus_hubness import NNN, CollectionExists, CollectionNotFound, Layout, QueryBank
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.fitted import initial_state
from milvus_hubness.correction.state import BankReference
from milvus_hubness.jobs.migration.survey import survey
from milvus_hubness.jobs.store.generations import Batch
from milvus_hubness.jobs.store.records import DUAL_WRITE_PROPERTY, DualWrite, Record
from tests.support.databases import write_state
from tests.support.galleries import all_keys, vectors


def copying(source):
    """The state of a copy that is still to be filled."""
    bank_name = f"{source.name}_hubness__bank"
    bank = BankReference(collection=bank_name, generation="01", fingerprint="f", count=1, size=1)
    [field] = source.vector_fields
    made = {
        "field": field,
        "suffix": "",
        "dtype": "float32",
        "source": source.name,
        "phase": "copying",
    }
    return initial_state(Layout(8, "IP"), NNN(1), bank, **made)


def test_keys_are_all_that_were_written_whatever_the_consistency_level(backend):
    """pymilvus's default is Bounded, under which a read may lag behind the writes before it."""
    client, store, name = backend.client(), backend.store(), backend.name("bounded")
    client.create_collection(name, dimension=8, consistency_level="Bounded")
    rows = vectors(np.random.default_rng(0), 300, 8)
    for start in range(0, len(rows), 30):
        batch = rows[start : start + 30]
        client.insert(name, [{"id": start + i, "vector": row} for i, row in enumerate(batch)])
        assert all_keys(store, name) == list(range(start + 30))
        assert store.count(name) == start + 30
        assert len(store.get(name, all_keys(store, name), "vector")) == start + 30


@pytest.mark.parametrize("kind", ["int", "varchar", "uuid", "mixed"])
def test_a_scan_shows_every_row_once_in_the_order_of_keys(database, kind):
    if kind not in database.keys:
        pytest.skip("it has no such keys")
    keys = database.keys_of(kind)
    items = vectors(np.random.default_rng(0), len(keys), 8)
    shuffled = [keys[i] for i in np.random.default_rng(1).permutation(len(keys))]
    name, store, field = database.fill(items, "IP", keys=shuffled), database.store(), database.field
    info = store.info(name)
    assert store.count(name) == info.rows == len(keys)
    looked = survey(store, info, 64)
    everything = []
    for partition in info.partitions:
        ordered = sorted(each for each in keys if database.is_in(each, partition))
        everything += ordered
        found, after = [], None
        while len(page := store.scan(name, field, after=after, limit=37, partition=partition)):
            assert len(page) <= 37
            for key, vector, row in zip(page.keys, page.vectors, page.rows, strict=True):
                place = int(row["note"][1:])
                assert np.array_equal(vector, items[place])
                assert shuffled[place] == key
            found += page.keys
            after = page.keys[-1]
        assert found == ordered
        assert store.scan(name, field, partition=partition).keys == ordered
        assert all_keys(store, name, partition) == ordered
        assert looked.sample.get(partition, []) == ordered
        pieces = [each.rows for each in looked.chunks if each.partition == partition]
        rest = len(ordered) % 64
        assert pieces == [64] * (len(ordered) // 64) + ([rest] if rest else [])
        if ordered:
            part = store.scan(name, field, after=ordered[7], upto=ordered[90], partition=partition)
            assert part.keys == ordered[8:91]
            assert (
                store.scan_keys(name, after=ordered[4], limit=9, partition=partition)
                == ordered[5:14]
            )
            assert store.scan_keys(name, after=ordered[-1], limit=9, partition=partition) == []
    assert all_keys(store, name) == everything
    read = [
        store.scan(name, field, after=each.after, upto=each.upto, partition=each.partition).keys
        for each in looked.chunks
    ]
    assert [key for piece in read for key in piece] == everything


@pytest.mark.lite_only
def test_rows_are_replaced_fetched_and_deleted_by_key(database):
    items = vectors(np.random.default_rng(0), 40, 8)
    name, store, field = database.fill(items, "IP"), database.store(), database.field
    batch = store.get(name, [7, 900, 3], field)
    assert batch.keys == [7, 3], "those that are there, in the order asked for"
    assert np.array_equal(batch.vectors, items[[7, 3]])
    assert [row["note"] for row in batch.rows] == ["n7", "n3"]
    store.upsert(name, Batch([7, 3], batch.vectors[::-1].copy(), batch.rows), field)
    again = store.get(name, [3, 7], field)
    assert np.array_equal(again.vectors, items[[7, 3]])
    assert [row["note"] for row in again.rows] == ["n3", "n7"], (
        "and the other fields are those of the batch"
    )
    store.delete(name, [3, 900])
    assert all_keys(store, name) == [i for i in range(40) if i != 3]
    assert store.count(name) == 39
    # A server of Milvus says of what is gone, too, that it is not loaded.
    for read in (store.info, store.count, lambda name: store.scan_keys(name, limit=9)):
        with pytest.raises(CollectionNotFound, match="nowhere"):
            read("nowhere")


def test_a_ledger_keeps_what_it_was_given_last(database):
    store, name = database.store(), database.name("ledger")
    assert store.records(name, "anything") == []
    first = [
        Record(f"a/{i:03}", "a", f'{{"n": {i}, "said": "\\"quoted\\" ü"}}') for i in range(700)
    ]
    store.put_records(name, [*first, Record("b/0", "b", "{}")])
    store.put_records(name, [Record("a/003", "a", '{"n": 33}')])
    again = database.store()
    assert again.records(name, "a") == [*first[:3], Record("a/003", "a", '{"n": 33}'), *first[4:]]
    again.drop_records(name, "a", ["a/000"])
    assert [each.key for each in store.records(name, "a")] == [each.key for each in first[1:]]
    again.drop_records(name, "a")
    assert store.records(name, "a") == []
    assert store.record(name, "b/0") == Record("b/0", "b", "{}")


def test_fences_are_listed_and_what_is_shown_is_read_once(database):
    store, name = database.store(), database.name("ledger")
    assert store.fences_of(name) == []
    store.put_records(name, [Record("a/0", "a", "{}")])
    fence = f"{name}__lease_7_0123abcd"
    store.fence(name, fence)
    store.point_alias(f"{name}_live", name)
    assert store.fences_of(name) == [fence]
    reads = []

    def read():
        reads.append(store.records(name, "a"))
        return reads[-1]

    assert [each.key for each in store.read_back(name, read, bool)] == ["a/0"]
    assert len(reads) == 1
    store.unfence(fence)
    assert store.fences_of(name) == []
    store.drop_alias(f"{name}_live")


def bank_of(rng, count):
    return StoredBank(QueryBank(vectors(rng, count, 8)), np.empty((count, 0), np.float32))


@pytest.mark.lite_only
def test_nothing_takes_a_collection_of_somebody_else(database):
    store, name = database.store(), database.fill(np.ones((1, 4), np.float32), "IP")
    with pytest.raises(CollectionExists, match="ledger"):
        store.put_records(name, [Record("a", "a", "{}")])
    with pytest.raises(CollectionExists, match="not a query bank"):
        store.save_bank(name, bank_of(np.random.default_rng(0), 30), "IP")


@pytest.mark.lite_only
def test_a_bank_keeps_its_generations_apart(database):
    """Those that no collection's state names are dropped when they are no longer asked for."""
    store, name = database.store(), database.name("bank")
    rng = np.random.default_rng(0)
    banks = [bank_of(rng, n) for n in (30, 50)]
    saved = [store.save_bank(name, each, "IP")[0] for each in banks]
    for reference, bank in zip(saved, banks, strict=True):
        kept = database.store().load_bank(reference)
        assert kept.fingerprint == bank.fingerprint
        assert np.array_equal(kept.queries.vectors, bank.queries.vectors)
    assert database.database.generations(name) == {saved[0].generation: 30, saved[1].generation: 50}
    store.drop_bank_generations([saved[0]])
    assert database.database.generations(name) == {saved[1].generation: 50}
    assert store.info(name).is_bank


def test_what_a_collection_is_told_it_says_by_any_name(database):
    store, name = database.store(), database.fill(np.ones((1, 4), np.float32), "IP")
    alias = f"{name}_live"
    store.point_alias(alias, name)
    assert store.info(name).dual_write is None
    store.write_property(name, DUAL_WRITE_PROPERTY, DualWrite(collection="other", required=True))
    assert store.info(name).dual_write == DualWrite(collection="other", required=True)
    assert store.info(alias).dual_write == store.info(name).dual_write
    assert (store.info(alias).name, store.info(alias).aliases) == (name, (alias,))
    store.write_property(name, DUAL_WRITE_PROPERTY, None)
    assert store.info(name).dual_write is None
    store.write_property(name, DUAL_WRITE_PROPERTY, DualWrite(collection="other"))
    store.drop_alias(alias)
    store.drop(name)
    database.make(name, 4, "IP")
    assert store.info(name).dual_write is None, "another of the same name says nothing of it"


@pytest.mark.lite_only
def test_an_alias_moves(database):
    store = database.store()
    first, second = (database.fill(np.ones((1, 4), np.float32), "IP") for _ in range(2))
    alias = f"{first}_live"
    assert store.alias_target(alias) is None
    for name in (first, second):
        store.point_alias(alias, name)
        assert store.alias_target(alias) == name
        assert store.exists(alias)
    assert store.info(first).aliases == ()
    store.drop_alias(alias)
    assert store.alias_target(alias) is None
    with pytest.raises(CollectionNotFound):
        store.info(alias)


def test_an_alias_that_is_to_lead_to_nothing_stays_and_the_missing_collection_is_named(database):
    store = database.store()
    name = database.fill(vectors(np.random.default_rng(0), 3, 8), "IP")
    alias = f"{name}_live"
    store.point_alias(alias, name)
    for moved in (alias, f"{name}_new"):
        with pytest.raises(CollectionNotFound, match=f"'{name}_gone'"):
            store.point_alias(moved, f"{name}_gone")
    assert store.alias_target(alias) == name
    store.drop_alias(alias)


def test_a_copy_left_half_made_is_made_whole_and_gone_on_with_until_it_is_ready(database):
    store = database.store()
    name = database.fill(vectors(np.random.default_rng(0), 20, 8), "IP")
    info, target = store.info(name), f"{name}_hubness"
    state = copying(info)
    database.begin_copy(store, info, target, state)
    store.create_copy(info, target, state)
    assert database.served(target) == database.served(name)
    assert list(store.info(target).states.values()) == [state]
    write_state(store, target, state.model_copy(update={"phase": "ready"}))
    with pytest.raises(CollectionExists):
        store.create_copy(info, target, state)
