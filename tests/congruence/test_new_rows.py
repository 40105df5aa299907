"""Rows that clients insert after a fit: no job takes their biases, which leave room for each other, for wrong ones."""

from itertools import count

import numpy as np
import pytest
from pymilvus import DataType

from milvus_hubness import (
    Beside,
    Copy,
    MigrationOptions,
    QueryBank,
    VerificationFailed,
    cutover,
    enable,
    migrate,
    plan_correction,
    refresh,
    resume,
    rollback,
)
from milvus_hubness.jobs.beside.entries import Entries
from milvus_hubness.jobs.migration import catch_up
from milvus_hubness.jobs.migration.catch_up import verify
from tests.support.galleries import vectors

DIM, ITEMS = 16, 300
WITHOUT_WRITERS = MigrationOptions(no_writers=True)


def products(backend):
    """A collection with VARCHAR keys, its bank, and an alias of it that no collection has yet."""
    rng = np.random.default_rng(3)
    client, name, alias = backend.client(), backend.name("products"), backend.name("shop")
    schema = client.create_schema(enable_dynamic_field=True)
    schema.add_field("sku", DataType.VARCHAR, is_primary=True, max_length=40)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="COSINE")
    client.create_collection(name, schema=schema, index_params=index, consistency_level="Strong")
    items = vectors(rng, ITEMS, DIM)
    client.insert(
        name, [{"sku": f"P-{i:04d}", "vector": row, "price": i} for i, row in enumerate(items)]
    )
    return name, alias, QueryBank(vectors(rng, 80, DIM))


def new_rows(keys, seed=9):
    """Rows that are near to each other, so that they leave room for each other."""
    rng = np.random.default_rng(seed)
    near = vectors(rng, 1, DIM) + 0.01 * vectors(rng, len(keys), DIM)
    return [{"sku": key, "vector": row, "price": -1} for key, row in zip(keys, near, strict=True)]


@pytest.mark.parametrize(
    "keys",
    [["AA-1"], pytest.param([f"AA-{i}" for i in range(20)], marks=pytest.mark.long)],
    ids=["one", "many"],
)
def test_after_an_insert_and_a_rollback_the_migration_can_be_repeated(backend, keys):
    name, alias, bank = products(backend)
    store = backend.store()
    plan = plan_correction(store, name, bank, Copy(alias=alias))
    migrate(store, plan)
    backend.hubness_client().insert(alias, new_rows(keys))
    rollback(store, alias)
    again = resume(store, name, alias=alias)
    assert again.phase == "switched"
    assert again.verified["rows"] == ITEMS + len(keys)
    found = backend.hubness_client().query(alias, filter='sku like "AA-%"', output_fields=["price"])
    assert [row["price"] for row in found] == [-1] * len(keys)


@pytest.mark.long
def test_a_new_row_between_verification_and_cutover_is_no_fault(lite):
    name, alias, bank = products(lite)
    store = lite.store()
    migrate(store, plan_correction(store, name, bank))
    lite.hubness_client().insert(name, new_rows(["AA-1"]))
    assert verify(store, name).rows == ITEMS + 1
    assert cutover(store, name, alias=alias).phase == "switched"


@pytest.mark.long
def test_a_full_refresh_computes_their_biases_by_the_formula(lite):
    name, alias, bank = products(lite)
    store, client = lite.store(), lite.hubness_client()
    migrate(store, plan_correction(store, name, bank, Copy(alias=alias)))
    client.insert(alias, new_rows(["AA-1"]))

    def epoch():
        [row] = client.query(alias, filter='sku == "AA-1"', output_fields=["hubness_epoch"])
        return row["hubness_epoch"]

    assert epoch() == -1
    refresh(store, alias, refit="always", force=True)
    assert epoch() == 2


@pytest.mark.long
def test_a_wrong_bias_among_any_rows_fails_with_a_remedy(lite):
    """The sample is random: in the end it has every row, and not only the first ones of some chunks."""
    name, _, bank = products(lite)
    store, client = lite.store(), lite.client()
    target = migrate(store, plan_correction(store, name, bank)).target
    state = store.info(target).state
    client.load_collection(target)
    [row] = client.query(target, filter='sku == "P-0299"', output_fields=["*"])
    stored = np.array([row["vector"]], np.float32)
    [vector] = state.layout.with_biases(
        stored, {slot: [0.25] for slot in range(state.layout.slots.count)}
    )
    client.upsert(target, {**row, "vector": vector, "hubness_bias": 0.25})

    def verify_often():
        for _ in range(60):
            verify(store, name)

    with pytest.raises(VerificationFailed, match=r"rows P-0299: .*--restart"):
        verify_often()


def test_the_sample_is_random_and_covers_all_rows():
    sampled = set()
    for _ in range(40):
        sample = catch_up.Sample(8)
        for start in range(0, 100, 30):
            sample.add(None, list(range(start, min(100, start + 30))))
        [(partition, keys)] = sample.by_partition().items()
        assert partition is None
        assert len(set(keys)) == 8
        sampled.update(keys)
    assert len(sampled) > 80


def test_inserts_without_an_end_do_not_end_enable(lite, monkeypatch):
    """Each pass of the check meets rows that were inserted since the last one."""
    name, _, bank = products(lite)
    store, client, numbers = lite.store(), lite.hubness_client(), count()
    plan = plan_correction(store, name, bank, Beside())
    wait_visible = Entries.wait_visible

    def visible_and_more(entries, *args):
        wait_visible(entries, *args)
        client.insert(name, new_rows([f"AA-{next(numbers):04d}"], seed=next(numbers)))

    monkeypatch.setattr(Entries, "wait_visible", visible_and_more)
    assert enable(store, plan).rows > ITEMS
