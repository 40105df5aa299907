"""Rows that look like planted hubs have the same stored bias whoever wrote it, and count in full."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from pymilvus import DataType

from milvus_hubness import (
    NNN,
    Blend,
    HubnessClient,
    QueryBank,
    enable,
    migrate,
    plan_enable,
    plan_migration,
    refresh,
    rollback,
)
from milvus_hubness.jobs.common.bias_backends import BiasBackend
from milvus_hubness.jobs.common.corrections import load_correction
from milvus_hubness.jobs.migration.plan import MigrationOptions
from milvus_hubness.jobs.refresh.guard import guard_hubs
from tests.support.async_clients import opened
from tests.support.planted import DIM, centroid, gallery, unit

ITEMS, BANK, USERS = gallery(1000)
HUBS = centroid(USERS, 5)
SHARES = np.array([[0.3], [0.53], [0.54], [0.55], [0.56], [1.0]])
DOUBTFUL = unit((1 - SHARES) * ITEMS[0] + SHARES * HUBS[0])
"""Rows on the way from a genuine one to a hub, and that hub."""
MIXED = np.concatenate([ITEMS, DOUBTFUL])
STRENGTH = 0.5
"""That of the searches of each collection here."""


def rows_of(items, first=0):
    return [{"id": first + i, "vector": item} for i, item in enumerate(items)]


def raw(backend, items=ITEMS):
    """The name of a collection that is not corrected."""
    client, name = backend.client(), backend.name("shop")
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="COSINE")
    client.create_collection(name, schema=schema, index_params=index, consistency_level="Strong")
    client.insert(name, rows_of(items))
    return name


def migrated(backend, on_hub="warn", items=ITEMS, **options):
    """A migrated collection whose searches use half of each bias."""
    name, alias = raw(backend, items), backend.name("alias")
    plan = plan_migration(
        backend.store(),
        name,
        QueryBank(BANK),
        estimator=options.pop("estimator", Blend()),
        alias=alias,
        on_hub=on_hub,
        verdict="skip",
        **options,
    )
    migrate(backend.store(), replace(plan, strength=STRENGTH), MigrationOptions(no_writers=True))
    return alias


def stored(backend, name, keys):
    """The biases of these rows in the slot that searches read."""
    store = backend.store()
    info = store.info(name)
    state = info.state_of(None)
    rows = BiasBackend(store, info, state).read(list(keys), None)
    by_key = dict(zip(rows.batch.keys, rows.biases[:, state.profile.slot], strict=True))
    return np.array([by_key[key] for key in keys])


def correction_of(backend, name):
    state = backend.store().info(name).state_of(None)
    return load_correction(backend.store(), state, state.profile)


def expect_computed(backend, name, keys, items):
    """Assert that the stored biases are those of the profile, as a job computes them."""
    correction = correction_of(backend, name)
    computed = correction.centred(items)
    differences = np.abs(stored(backend, name, keys) - computed)
    assert (differences <= correction.allowed_differences(items, computed)).all()
    return computed


def top_ten(client, name, limit=10, **options):
    """The share of user queries with a planted row, of a key from 9000 on, among ten answers."""
    hits = client.search(name, data=list(USERS), limit=limit, **options)
    return np.mean([any(row["id"] >= 9000 for row in answers) for answers in hits])


def test_a_planted_hub_leaves_the_top_ten_at_half_the_strength(lite):
    """And raw searches find it as often as they did."""
    shares = {}
    for on_hub in ("off", "warn"):
        name = migrated(lite, on_hub)
        client = lite.hubness_client()
        client.insert(name, rows_of(HUBS[:1], 9000))
        shares[on_hub] = {w: top_ten(client, name, strength=w) for w in (None, 0.0, 1.0)}
        # Raw stays raw: the scores are those of the vectors.
        hits = client.search(name, data=list(USERS), limit=10, strength=0.0)
        vectors = {**dict(enumerate(ITEMS)), 9000: HUBS[0]}
        for query, answers in zip(USERS.astype(np.float64), hits, strict=True):
            cosines = [query @ vectors[row["id"]] for row in answers]
            assert [row["distance"] for row in answers] == pytest.approx(cosines, abs=1e-5)

    assert shares["off"][None] > 0.5
    assert shares["warn"][None] < 0.05
    assert shares["warn"][0.0] == shares["off"][0.0] > 0.9
    assert shares["warn"][1.0] <= shares["warn"][None]


def test_rows_below_the_limit_and_collections_without_a_guard_keep_their_biases(lite):
    names = {on_hub: migrated(lite, on_hub) for on_hub in ("off", "warn")}
    keys = range(len(ITEMS))
    # One row of this gallery, far out, reaches more than twice as much as nearly all others.
    watched = correction_of(lite, names["warn"])
    ordinary = watched.reaches(ITEMS) <= watched.hub_strength.limit
    assert 0.99 < ordinary.mean() < 1
    without, guarded = (stored(lite, name, keys) for name in names.values())
    assert guarded[ordinary] == pytest.approx(without[ordinary], abs=1e-6)
    assert (guarded[~ordinary] > without[~ordinary]).all()
    assert lite.store().info(names["off"]).state_of(None).profile.hub_strength is None
    client = lite.hubness_client()
    client.insert(names["off"], rows_of(HUBS, 9000))
    correction = correction_of(lite, names["off"])
    plain = correction.of_rows(HUBS, are_new=True)[0]
    assert stored(lite, names["off"], range(9000, 9005)) == pytest.approx(plain, abs=1e-6)


def test_migrate_client_refresh_and_rebuild_store_the_same_bias(lite):
    name = migrated(lite, items=MIXED)
    keys = list(range(len(MIXED)))
    computed = expect_computed(lite, name, keys, MIXED)
    correction = correction_of(lite, name)
    factors = computed / replace(correction, hub_strength=None).centred(MIXED)
    assert (factors[: len(ITEMS)] == 1).all()
    assert factors[-1] == pytest.approx(1 / (correction.fitted.estimator.share * STRENGTH))
    on_the_ramp = (factors > 1.01) & (factors < 0.99 * factors[-1])
    assert on_the_ramp.any()

    # A client writes some of the rows once more: the numbers of new rows, with the same factors.
    client = lite.hubness_client()
    again = DOUBTFUL[[0, -1]]
    client.insert(name, rows_of(again, 5000))
    expected, _ = correction.of_rows(again, are_new=True)
    allowed = correction.allowed_differences(again, expected)
    assert (np.abs(stored(lite, name, [5000, 5001]) - expected) <= allowed).all()

    # A refresh to another bank, and one that makes a copy.
    whole = np.concatenate([MIXED, again])
    keys += [5000, 5001]
    refresh(lite.store(), name, bank=QueryBank(USERS), verdict="skip", force=True)
    expect_computed(lite, name, keys, whole)
    done = refresh(
        lite.store(),
        name,
        bank=QueryBank(BANK),
        verdict="skip",
        force=True,
        rebuild_rows=1,
        rebuild_share=0.01,
        client_ttl=0,
    )
    assert done.action == "rebuilt"
    expect_computed(lite, name, keys, whole)

    # Pending rows are filled with the bias of new rows.
    client.insert(name, rows_of(HUBS[1:2], 7000), bias="pending")
    refresh(lite.store(), name)
    correction = correction_of(lite, name)
    [filled] = correction.of_rows(HUBS[1:2], are_new=True)[0]
    assert stored(lite, name, [7000]) == pytest.approx([filled], rel=1e-4)

    # Taken back, the biases are those of the former profile.
    refresh(lite.store(), name, revert=True)
    expect_computed(lite, name, keys, whole)


def test_upserts_and_the_asynchronous_client_store_the_same_bias(lite):
    name = migrated(lite)
    client = lite.hubness_client()
    client.insert(name, rows_of(HUBS[:1], 9000))
    client.upsert(name, rows_of(HUBS[:1], 0))

    async def run():
        async with opened(lite) as other:
            await other.insert(name, rows_of(HUBS[:1], 9001))

    asyncio.run(run())
    biases = stored(lite, name, [9000, 0, 9001])
    plain = replace(correction_of(lite, name), hub_strength=None)
    [full] = plain.of_rows(HUBS[:1], are_new=True)[0]
    factor = 1 / (plain.fitted.estimator.share * STRENGTH)
    assert biases == pytest.approx(np.full(3, factor * full), rel=1e-3)


@pytest.mark.parametrize("where", ["second_vector", "side_collection"])
def test_enable_stores_the_same_bias(lite, where):
    name = raw(lite, MIXED[:-1])
    lite.client().insert(name, rows_of(HUBS[:1], 9000))
    plan = plan_enable(
        lite.store(),
        name,
        QueryBank(BANK),
        estimator=Blend(),
        where=where,
        on_hub="warn",
        verdict="skip",
    )
    enable(lite.store(), plan, client_ttl=0)
    assert plan.correction.hub_strength.acts
    computed = expect_computed(lite, name, [*range(len(MIXED) - 1), 9000], MIXED)
    plain = replace(correction_of(lite, name), hub_strength=None).centred(MIXED)
    assert computed[-1] == pytest.approx(plan.correction.hub_strength.factor * plain[-1])


def test_a_guard_that_is_turned_on_changes_only_hubs_with_the_next_refresh(lite):
    name = migrated(lite, "off")
    client = lite.hubness_client()
    client.insert(name, rows_of(HUBS[:2], 9000))
    keys = [*range(len(ITEMS)), 9000, 9001]
    before = stored(lite, name, keys)
    done = guard_hubs(lite.store(), name, "warn")
    assert (done.factor, done.is_due) == (None, True)
    assert np.array_equal(stored(lite, name, keys), before)

    turned_on = refresh(lite.store(), name)
    assert turned_on.action == "full"
    assert turned_on.reason.startswith("the hub guard was turned on;")
    # Written are the two, and a genuine row only where a fit gives it another number than an insert.
    assert turned_on.written <= 2
    after = expect_computed(lite, name, keys, np.concatenate([ITEMS, HUBS[:2]]))
    assert np.array_equal(stored(lite, name, keys)[:-2], before[:-2])
    assert (after[-2:] > 2 * before[-2:]).all()
    assert top_ten(client, name) < 0.05
    assert refresh(lite.store(), name).action == "none"

    changed = guard_hubs(lite.store(), name, "refuse", false_alarms=0.01)
    assert changed.is_due
    assert refresh(lite.store(), name).reason.startswith("the share of false alarms")
    guard_hubs(lite.store(), name, "off")
    assert refresh(lite.store(), name).reason.startswith("the hub guard was turned off;")
    assert np.array_equal(stored(lite, name, keys)[:-2], before[:-2])
    assert stored(lite, name, keys)[-2:] == pytest.approx(before[-2:], abs=0.02)
    assert refresh(lite.store(), name).action == "none"


def test_a_rollback_and_a_gate_find_the_same_hubs(lite):
    name, alias = raw(lite), lite.name("alias")
    plan = plan_migration(
        lite.store(),
        name,
        QueryBank(BANK),
        estimator=Blend(),
        alias=alias,
        gate=1,
        on_hub="warn",
        verdict="skip",
    )
    plan = replace(plan, strength=STRENGTH)
    migration = migrate(lite.store(), plan, MigrationOptions(no_writers=True))
    client = HubnessClient(lite.uri, state_ttl=0)
    client.insert(alias, rows_of(HUBS[:1], 9000))
    refresh(lite.store(), alias, bank=QueryBank(BANK), verdict="skip", force=True)
    # After the refresh the row is the nearest of bank queries: the gate has those corrected that
    # would find it first.
    assert top_ten(client, alias, limit=1) < 0.02
    assert top_ten(client, alias, limit=1, strength=0.0) > 0.5
    client.close()
    rollback(lite.store(), migration.target)


def test_an_estimator_without_reaches_has_no_full_strength(lite):
    name = migrated(lite, estimator=NNN(16))
    assert lite.store().info(name).state_of(None).profile.hub_strength is None
    assert refresh(lite.store(), name).action == "none"
