"""Collections whose rows expire: no job lets unchanged rows live longer unless that is allowed."""

import itertools
import time

import numpy as np
import pytest
from pymilvus import DataType

from milvus_hubness import (
    NNN,
    Beside,
    QueryBank,
    Recipe,
    enable,
    migrate,
    plan_correction,
    refresh,
    status,
)
from milvus_hubness.serve.config import CollectionTable
from tests.support.aliases import aliased
from tests.support.galleries import vectors

DIM, ITEMS, LONG = 8, 60, 86_400
RNG = np.random.default_rng(1)
ITEM_VECTORS, NEW = vectors(RNG, ITEMS, DIM), vectors(RNG, 5, DIM)
BANK, OTHER = (QueryBank(vectors(RNG, 40, DIM)) for _ in range(2))


def expiring(backend, seconds):
    client, name = backend.client(), backend.name("ttl")
    schema = client.create_schema(enable_dynamic_field=True)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="IP")
    properties = {"collection.ttl.seconds": seconds}
    client.create_collection(
        name, schema=schema, index_params=index, properties=properties, consistency_level="Strong"
    )
    client.insert(name, [{"id": i, "vector": vector} for i, vector in enumerate(ITEM_VECTORS)])
    return name


def corrected(backend, seconds, how="migrate"):
    """A corrected collection, with five rows that wait for a bias."""
    name, store = expiring(backend, seconds), backend.store()
    if how == "migrate":
        target = migrate(store, plan_correction(store, name, Recipe(BANK, estimator=NNN(8)))).target
        name = aliased(store, target)
    else:
        enable(
            store,
            plan_correction(store, name, Recipe(BANK, estimator=NNN(8)), Beside()),
            client_ttl=0,
        )
    rows = [{"id": 1_000 + i, "vector": vector} for i, vector in enumerate(NEW)]
    backend.hubness_client().insert(name, rows, bias="pending")
    return name, store


def stored(backend, name):
    rows = backend.client().query(
        name, "id < 1000", output_fields=["*"], consistency_level="Strong"
    )
    return {row["id"]: dict(row) for row in rows}


def test_a_full_refresh_writes_no_row_unless_it_is_allowed_to(lite):
    name, store = corrected(lite, LONG)
    before = stored(lite, name)
    planned = refresh(store, name, OTHER, force=True, plan=True)
    assert (planned.action, planned.written, planned.pending) == ("refused", 0, 5)

    done = refresh(store, name, OTHER, force=True, client_ttl=0)
    assert (done.action, done.written) == ("refused", 0)
    assert "the bank changed, but rows of" in done.reason
    assert "expire 86,400 s after their last write" in done.reason
    assert "--restart-ttl" in done.reason
    assert status(store, name).pending == 5
    assert stored(lite, name) == before, "no row is written that had its bias"
    assert store.info(name).state.profile.bank.fingerprint == BANK.fingerprint

    assert refresh(store, name, client_ttl=0).action == "none"
    allowed = refresh(store, name, OTHER, force=True, client_ttl=0, restart_ttl=True)
    assert allowed.action == "full"
    assert allowed.written > ITEMS / 2


def test_a_new_profile_is_refused_too(lite):
    name, store = corrected(lite, LONG)
    before = lite.client().describe_collection(name)["properties"]
    refused = refresh(store, name, OTHER, profile="image", client_ttl=0)
    assert refused.action == "refused"
    assert "keep the biases beside the vectors (enable)" in refused.reason
    assert lite.client().describe_collection(name)["properties"] == before


def test_a_side_collection_needs_no_leave(lite):
    plan = plan_correction(
        lite.store(), expiring(lite, LONG), Recipe(BANK, estimator=NNN(8)), Beside()
    )
    assert any("rows expire after 86,400 s as before" in remark for remark in plan.remarks)
    free = plan_correction(
        lite.store(), expiring(lite, 0), Recipe(BANK, estimator=NNN(8)), Beside()
    )
    assert not any("expire" in remark for remark in free.remarks)

    name, store = corrected(lite, LONG, "enable")
    before = stored(lite, name)
    assert refresh(store, name, OTHER, force=True, client_ttl=0).action == "full"
    assert stored(lite, name) == before


def test_plans_say_what_starts_anew(lite):
    remarks = plan_correction(lite.store(), expiring(lite, LONG), BANK).remarks
    [said] = [remark for remark in remarks if "86,400 s" in remark]
    assert "--restart-ttl" in said
    assert not any(
        "expire" in remark
        for remark in plan_correction(lite.store(), expiring(lite, 0), BANK).remarks
    )


def test_the_service_has_the_same_option(lite):
    for allowed in (False, True):
        table = CollectionTable(name="products", restart_ttl=allowed)
        assert table.refresh_options(lite.store(), full=True).restart_ttl is allowed


@pytest.mark.long
def test_on_a_server_rows_expire_unless_a_refresh_is_allowed_to_write_them(served):
    """Milvus 2.3.5 removes expired rows of flushed segments about once a minute, when it compacts."""
    seconds, client = 60, served.client()
    untouched = expiring(served, seconds)
    refused, store = corrected(served, seconds)
    allowed, _ = corrected(served, seconds)
    side, _ = corrected(served, seconds, "enable")
    for name in (untouched, refused, allowed, side):
        client.flush(name)
    assert refresh(store, refused, OTHER, force=True, client_ttl=0).action == "refused"
    assert refresh(store, side, OTHER, force=True, client_ttl=0).action == "full"

    # A compaction may come long after the rows expired, so that one refresh may be too old by then too.
    expired, until, banks = (untouched, refused, side), time.monotonic() + 300, (OTHER, BANK)
    for bank in itertools.cycle(banks):
        done = refresh(store, allowed, bank, force=True, client_ttl=0, restart_ttl=True)
        assert done.action == "full"
        if not any(stored(served, name) for name in expired):
            break
        assert time.monotonic() < until, {name: len(stored(served, name)) for name in expired}
        time.sleep(5)
    assert len(stored(served, allowed)) > ITEMS / 2, "this is why it is refused by default"

    state = store.info(side).state
    side_collection = state.codec.sides[state.profile.slot]
    assert store.count(side_collection) > ITEMS
    refresh(store, side, client_ttl=0)
    assert store.count(side_collection) <= len(NEW), (
        "biases of expired rows go with the next refresh"
    )
