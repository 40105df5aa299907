"""Rows with keys of the names that corrected rows need, as in an export of a corrected collection by a plain client."""

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    Beside,
    CannotMigrate,
    MigrationOptions,
    NotCaughtUp,
    QueryBank,
    Recipe,
    enable,
    migrate,
    plan_correction,
)
from milvus_hubness.jobs.migration.catch_up import verify
from tests.support.galleries import plain_collection, vectors

DIM, ITEMS = 8, 700


def exported(backend, names):
    """A collection of which the last rows alone, which no sample has, carry keys of these names."""
    client, name, rng = backend.client(), backend.name("export"), np.random.default_rng(0)
    rows = plain_collection(client, name, vectors(rng, ITEMS, DIM), "COSINE")
    client.upsert(name, [{**row, **dict.fromkeys(names, 1)} for row in rows[-3:]])
    return client, name, QueryBank(vectors(rng, 40, DIM)), rows


def write_again(client, name, rows):
    """Milvus Lite keeps dynamic keys that an upsert leaves out."""
    client.delete(name, ids=[row["id"] for row in rows])
    client.insert(name, rows)


@pytest.mark.parametrize("names", [["hubness_bias", "hubness_epoch"], ["hubness_norm"]], ids=len)
def test_the_plan_counts_them_and_says_what_to_do(backend, names):
    client, name, bank, rows = exported(backend, names)
    store = backend.store()
    with pytest.raises(CannotMigrate) as refused:
        plan_correction(store, name, Recipe(bank, estimator=NNN(4)))
    for key in names:
        assert f"{key} (3 rows)" in str(refused.value)
    assert "delete these rows, and insert them without the keys" in str(refused.value)
    write_again(client, name, rows[-3:])
    assert (
        migrate(store, plan_correction(store, name, Recipe(bank, estimator=NNN(4)))).verified[
            "rows"
        ]
        == ITEMS
    )


@pytest.mark.lite_only
def test_a_side_collection_needs_no_such_names(backend):
    _, name, bank, _ = exported(backend, ["hubness_bias"])
    store = backend.store()
    assert enable(
        store, plan_correction(store, name, Recipe(bank, estimator=NNN(4)), Beside())
    ).side_collection
    [row] = backend.hubness_client().query(
        name, filter=f"id == {ITEMS - 1}", output_fields=["hubness_bias"]
    )
    assert row["hubness_bias"] == 1


@pytest.mark.lite_only
def test_a_copy_that_does_not_catch_up_says_which_rows_and_fields(backend):
    """Such rows may also be written after the plan was made."""
    client, name, bank, rows = exported(backend, [])
    store = backend.store()
    plan = plan_correction(store, name, Recipe(bank, estimator=NNN(4)))
    client.upsert(name, {**rows[5], "hubness_epoch": 1})
    with pytest.raises(NotCaughtUp, match=r"the last 1, among them 5 \(differs in hubness_epoch\)"):
        migrate(store, plan, MigrationOptions(no_writers=True))
    write_again(client, name, [rows[5]])
    migrate(store, plan, MigrationOptions(no_writers=True))
    assert verify(store, name).rows == ITEMS
