"""From a plain collection to its corrected copy, by the jobs that migrate Milvus."""

import json

import numpy as np
import pytest
from qdrant_client import models

from milvus_hubness import (
    NNN,
    AlreadyCorrected,
    BankTooSmall,
    CannotMigrate,
    CollectionExists,
    CollectionNotFound,
    Copy,
    DimensionMismatch,
    EmptyCollection,
    InvalidInput,
    InvalidParameter,
    MigrationOptions,
    NoMigration,
    QueryBank,
    Recipe,
    VerificationFailed,
    clean,
    migrate,
    plan_correction,
    refresh,
    resume,
    rollback,
    status,
)
from milvus_hubness.jobs.common.corrections import load_correction
from milvus_hubness.jobs.migration.catch_up import verify
from milvus_hubness.jobs.migration.ledger import Ledger
from milvus_hubness.jobs.store.records import DUAL_WRITE_PROPERTY
from tests.qdrant.worlds import METRICS, key
from tests.support.aliases import aliased
from tests.support.galleries import nnn, single_queries, vectors
from tests.support.recipes import as_plan

DIM = 32


def everything(client, name):
    """All points by id, read back in full."""
    found, _ = client.scroll(name, limit=10_000, with_vectors=True)
    return {record.id: (record.payload, record.vector) for record in found}


def as_float32(vectors):
    """Vectors by name with all their numbers as float32, sparse ones in pairs."""
    return {
        name: list(zip(value.indices, np.float32(value.values).tolist(), strict=True))
        if isinstance(value, models.SparseVector)
        else np.float32(value).tolist()
        for name, value in vectors.items()
    }


def small(backend, distance="Dot", count=60, dim=8):
    rng = np.random.default_rng(5)
    return backend.fill(vectors(rng, count, dim), distance), QueryBank(vectors(rng, 40, dim))


@pytest.mark.parametrize("distance", METRICS)
def test_points_of_every_kind_arrive_whole(everywhere, distance):
    rng = np.random.default_rng(1)
    client, name, count = everywhere.client, everywhere.name(), 700
    client.create_collection(
        name,
        vectors_config={
            "image": models.VectorParams(size=DIM, distance=distance),
            "title": models.VectorParams(size=6, distance="Cosine"),
            "tokens": models.VectorParams(
                size=4,
                distance="Dot",
                multivector_config=models.MultiVectorConfig(comparator="max_sim"),
            ),
        },
        sparse_vectors_config={"words": models.SparseVectorParams()},
        **({} if everywhere.kind == "states" else {"metadata": {"owner": "search"}}),
    )
    images, titles = vectors(rng, count, DIM), vectors(rng, count, 6)
    client.upsert(
        name,
        [
            models.PointStruct(
                id=key(i),
                vector={
                    "image": images[i].tolist(),
                    "title": titles[i].tolist(),
                    **({"tokens": [[1.0, i, 0.0, 1.0], [0.5, 0.25, 0.0, 0.0]]} if i % 3 else {}),
                    **(
                        {"words": models.SparseVector(indices=[i, 2_000], values=[0.5, 1.5])}
                        if i % 2
                        else {}
                    ),
                },
                payload={
                    "n": i,
                    "deep": {"list": [1, None, {"x": i / 3}]},
                    "text": "o'hara \n é😀",
                    "none": None,
                },
            )
            for i in range(count)
        ],
    )
    before, bank = everything(client, name), vectors(rng, 200, DIM)
    store, stages = everywhere.store(), []
    plan = plan_correction(
        store, name, Recipe(single_queries(bank), estimator=NNN(16, 0.75)), field="image"
    )
    assert plan.to_dict()["rows"] == count
    assert plan.to_dict()["index_params"] == {"M": 16, "efConstruction": 100}
    json.dumps(plan.to_dict())
    result = migrate(store, plan, progress=lambda *stage: stages.append(stage))
    assert (result.rows, result.invalid) == (count, 0)
    assert ("copying", count, count) in stages

    after = everything(everywhere.hubness(), result.target)
    assert after.keys() == before.keys()
    unit = ["title", *(["image"] if distance == "Cosine" else [])]
    # The local mode brings vectors of its own to length 1 once more when it searches them.
    # REST prints decimals, which are equal as float32 only.
    for found in (after, everything(client, name)):
        assert {each: payload for each, (payload, _) in found.items()} == {
            each: payload for each, (payload, _) in before.items()
        }
        for each, (_, vector) in before.items():
            mine, wanted = dict(found[each][1]), dict(vector)
            for loose in unit:
                np.testing.assert_allclose(mine.pop(loose), wanted.pop(loose), rtol=3e-7, atol=1e-9)
            assert as_float32(mine) == as_float32(wanted)
    assert store.info(name).dual_write.collection == result.target
    told = client.get_collection(result.target).config
    assert (told.metadata or {}).get("owner") == (None if everywhere.kind == "states" else "search")
    assert DUAL_WRITE_PROPERTY not in store.properties.of(
        result.target, client.get_collection(result.target)
    )
    assert told.params.vectors["title"].distance == models.Distance.COSINE
    assert told.params.vectors["image"].distance == models.Distance.DOT

    state = store.info(result.target).state
    numbers = {key(i): i for i in range(count)}
    batch = store.get(result.target, list(after), "image")
    stored = state.layout.biases(batch.vectors, state.profile.slot)
    wanted = nnn(bank, images[[numbers[each] for each in batch.keys]], METRICS[distance], 16, 0.75)
    np.testing.assert_allclose(stored + state.profile.mean_bias, wanted, atol=1e-5)
    assert verify(store, name).rows == count


def test_another_index_for_the_copy_is_refused(backend):
    name, bank = small(backend)
    with pytest.raises(InvalidParameter, match="omit the index options"):
        plan_correction(
            backend.store(), name, Recipe(bank, estimator=NNN(4)), Copy(index_params={"M": 32})
        )


def test_points_without_a_direction_or_a_vector_are_carried_over_counted_and_listed(backend):
    client, name = backend.client, backend.name()
    config = {"image": models.VectorParams(size=8, distance="Cosine")}
    client.create_collection(name, vectors_config=config)
    items = vectors(np.random.default_rng(5), 50, 8)
    items[7] = 0
    points = [
        models.PointStruct(
            id=i, vector={"image": items[i].tolist()} if i != 20 else {}, payload={"n": i}
        )
        for i in range(50)
    ]
    client.upsert(name, points)
    store = backend.store()
    result = migrate(
        store, plan_correction(store, name, Recipe(QueryBank(items[30:]), estimator=NNN(4)))
    )
    assert (result.invalid, result.invalid_keys) == (2, (7, 20))
    rows = backend.hubness().retrieve(result.target, [7, 20, 21], with_vectors=True)
    assert rows[0].vector == {"image": [0.0] * 8}
    assert rows[1].vector == {}
    assert [row.payload for row in rows] == [{"n": 7}, {"n": 20}, {"n": 21}]
    assert status(store, result.target).pending == 0
    assert (
        migrate(
            store, plan_correction(store, name, Recipe(QueryBank(items[30:]), estimator=NNN(4)))
        ).rows
        == 50
    )


def test_halves_are_stored_as_halves(backend):
    items = vectors(np.random.default_rng(3), 80, 8).astype(np.float16).astype(np.float32)
    bank = vectors(np.random.default_rng(4), 40, 8)
    name = backend.fill(items, "Dot", keys=lambda i: i, datatype=models.Datatype.FLOAT16)
    store = backend.store()
    target = migrate(
        store, plan_correction(store, name, Recipe(QueryBank(bank), estimator=NNN(8)))
    ).target
    stored = np.float32(
        [r.vector for r in backend.client.scroll(target, limit=80, with_vectors=True)[0]]
    )
    assert np.array_equal(stored.astype(np.float16).astype(np.float32), stored), (
        "all numbers are halves"
    )
    query = bank[0]
    found = backend.hubness().query_points(target, query.tolist(), limit=80).points
    state = store.info(target).state
    wanted = items @ query - (nnn(bank, items, "IP", 8, 0.75) - state.profile.mean_bias)
    np.testing.assert_allclose([p.score for p in found], [wanted[p.id] for p in found], atol=5e-4)


def test_migrations_clients_and_refreshes_fill_the_cell_columns(backend):
    rng = np.random.default_rng(6)
    items, bank, new = vectors(rng, 80, DIM), vectors(rng, 200, DIM), vectors(rng, 3, DIM)
    name = backend.fill(items, "Dot", keys=lambda i: i)
    store = backend.store()
    target = migrate(
        store, plan_correction(store, name, Recipe(QueryBank(bank), estimator=NNN(8)))
    ).target
    state = store.info(target).state
    assert state.layout.locality_hint_count == 13
    correction = load_correction(store, state, state.profile)

    def held(ids):
        found = store.get(target, list(ids), "")
        return found.vectors[np.argsort(found.keys)][:, state.layout.locality_hint_columns]

    np.testing.assert_allclose(held(range(80)), correction.locality_hints(items), atol=1e-5)
    points = [models.PointStruct(id=80 + i, vector=row.tolist()) for i, row in enumerate(new)]
    backend.hubness().upsert(target, points)
    np.testing.assert_allclose(held(range(80, 83)), correction.locality_hints(new), atol=1e-5)
    without = state.layout.augment(new, np.zeros(3))
    points = [models.PointVectors(id=80 + i, vector=row.tolist()) for i, row in enumerate(without)]
    backend.client.update_vectors(target, points)
    assert not held(range(80, 83)).any()
    refresh(store, alias := aliased(store, target), refit="always")
    target = store.info(alias).name
    state = store.info(alias).state
    correction = load_correction(store, state, state.profile)
    np.testing.assert_allclose(held(range(80, 83)), correction.locality_hints(new), atol=1e-5)
    np.testing.assert_allclose(held(range(80)), correction.locality_hints(items), atol=1e-5)


def test_what_was_set_in_payloads_goes_back_too(backend):
    name, bank = small(backend, "Cosine")
    store, client = backend.store(), backend.hubness()
    store.point_alias("live", name)
    backend.made.append("live")
    plan = plan_correction(store, name, Recipe(bank, estimator=NNN(4)), Copy(alias="live"))
    assert migrate(store, plan).alias == "live"
    assert store.alias_target("live") == plan.body.target
    new = vectors(np.random.default_rng(9), 3, 8)
    client.upsert(
        "live",
        [
            models.PointStruct(id=key(3), vector=new[0].tolist(), payload={"changed": True}),
            models.PointStruct(id=1_000, vector=new[1].tolist(), payload={}),
        ],
    )
    client.delete("live", [key(4), key(5)])
    client.set_payload(
        "live", {"more": 1}, models.Filter(must=[models.HasIdCondition(has_id=[key(6)])])
    )
    wanted = everything(client, "live")
    with pytest.raises(AlreadyCorrected, match="switched"):
        plan_correction(store, name, Recipe(bank, estimator=NNN(4)))
    revert = rollback(store, "live", options=MigrationOptions(client_ttl=0.0))
    assert (revert.alias, revert.source) == ("live", name)
    assert store.alias_target("live") == name
    assert store.info(plan.body.target).dual_write is None
    found = everything(backend.client, name)
    assert {each: row[0] for each, row in found.items()} == {
        each: row[0] for each, row in wanted.items()
    }
    for each, (_, vector) in wanted.items():
        moved = 64 * 2.0**-23 if backend.is_local else 3e-7  # by searches, see below
        np.testing.assert_allclose(found[each][1], vector, rtol=moved, atol=1e-9)
    clean(store, name, drop=plan.body.target)
    assert not backend.client.collection_exists(plan.body.target)
    assert plan.body.target not in {migration.target for migration in Ledger(store).migrations()}


def test_a_copy_that_was_tampered_with_is_found_out(backend):
    name, bank = small(backend)
    store = backend.store()
    target = migrate(store, plan_correction(store, name, Recipe(bank, estimator=NNN(4)))).target
    backend.client.set_payload(target, {"n": -1}, [key(7)])
    with pytest.raises(VerificationFailed, match="differs in n"):
        verify(store, name)


def test_searches_that_move_vectors_are_no_difference(backend):
    """qdrant-client's local mode divides the vectors that it keeps by their lengths at every search, by which
    some move by a few units in the last place, again and again."""
    rng = np.random.default_rng(0)
    name = backend.fill(vectors(rng, 400, 8), "Cosine")
    store, asked = backend.store(), vectors(rng, 100, 8)
    migrate(store, plan_correction(store, name, Recipe(QueryBank(asked[:40]), estimator=NNN(4))))
    for query in asked:
        backend.client.query_points(name, query.tolist(), limit=1)
    assert verify(store, name)


def test_migrations_that_cannot_be(backend):
    store, client = backend.store(), backend.client
    name, bank = small(backend)
    for change, error in (
        ({"rename": True}, InvalidInput),
        ({"target": name}, CollectionExists),
        ({"field": "image"}, CannotMigrate),
        ({"estimator": NNN(41)}, BankTooSmall),
        ({"bank": QueryBank(np.ones((50, 9)))}, DimensionMismatch),
    ):
        arguments = {"bank": bank, "estimator": NNN(4), **change}
        with pytest.raises(error):
            plan_correction(store, name, **as_plan(arguments.pop("bank"), **arguments))
    with pytest.raises(CollectionNotFound):
        plan_correction(store, "nowhere", bank)
    with pytest.raises(NoMigration):
        resume(store, name)
    for config, error, why in (
        (models.VectorParams(size=8, distance="Manhattan"), CannotMigrate, "Manhattan"),
        ({"a": models.VectorParams(size=8, distance="Dot"), "b": models.VectorParams(size=8, distance="Dot")},
         InvalidInput, "a, b"),
        (models.VectorParams(size=8, distance="Dot", datatype="uint8"), CannotMigrate, "no float vector"),
        (models.VectorParams(size=8, distance="Dot"), EmptyCollection, "no rows"),
    ):  # fmt: skip
        other = backend.name()
        client.create_collection(other, vectors_config=config)
        with pytest.raises(error, match=why):
            plan_correction(store, other, bank)
    target = migrate(store, plan_correction(store, name, Recipe(bank, estimator=NNN(4)))).target
    with pytest.raises(AlreadyCorrected):
        plan_correction(store, target, bank)
    with pytest.raises(CannotMigrate, match="query bank"):
        plan_correction(store, f"{name}__bank", bank)
