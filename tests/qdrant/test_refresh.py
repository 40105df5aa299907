"""Biases kept right, by the jobs that refresh Milvus: only vectors that moved are written."""

import time

import numpy as np
import pytest
from qdrant_client import models

from milvus_hubness import (
    NNN,
    LeaseHeld,
    LeaseLost,
    QueryBank,
    Recipe,
    migrate,
    plan_correction,
    refresh,
    status,
)
from milvus_hubness.jobs.common.lease import Lease
from milvus_hubness.jobs.common.lease_records import LeasePolicy
from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.jobs.store.records import Record
from qdrant_hubness import QdrantStore
from tests.qdrant.worlds import Corrected, key
from tests.support.aliases import aliased
from tests.support.galleries import nnn, vectors


def everything(backend, name):
    found, _ = backend.client.scroll(name, limit=10_000, with_vectors=True)
    return {record.id: record for record in found}


def test_it_writes_no_point_of_the_collection_that_is_read(corrected):
    requested = []

    class Counting(QdrantStore):
        def ask(self, method, collection, /, **options):
            requested.append((method, collection))
            return super().ask(method, collection, **options)

    collection = corrected.name
    corrected.name = aliased(corrected.store, collection)
    before = everything(corrected.backend, collection)
    refresh(corrected.backend.store(Counting), corrected.name, QueryBank(corrected.other))
    reads = {
        "get_collection",
        "count",
        "scroll",
        "retrieve",
        "collection_exists",
        "query_batch_points",
    }
    of_properties = {"update_collection"}
    methods = {method for method, where in requested if where == collection}
    assert methods - reads <= of_properties
    assert everything(corrected.backend, collection) == before
    after = everything(corrected.backend, corrected.name)
    assert {k: r.payload for k, r in after.items()} == {k: r.payload for k, r in before.items()}
    layout = corrected.state.layout
    for each, record in before.items():
        assert after[each].vector[: layout.dim] == record.vector[: layout.dim], "bit for bit"


def test_payloads_are_the_users_own(corrected):
    """A bias lies in the vector, and nothing else needs to be kept."""
    source = everything(corrected.backend, corrected.source)
    for each, record in everything(corrected.backend, corrected.name).items():
        assert record.payload == source[each].payload


def test_points_without_a_bias_get_theirs_in_a_copy(corrected):
    keys = [key(5), key(6), key(150)]
    for partition in ("numbers", "uuids"):
        mine = [each for each in keys if isinstance(each, int) == (partition == "numbers")]
        batch = corrected.store.get(corrected.name, mine, "", partition=partition)
        layout = corrected.state.layout
        batch.vectors[:, layout.slot_columns] = 0
        for row in batch.rows:
            row.update(hubness_epoch=0)
        corrected.store.upsert(corrected.name, batch, "")
    assert status(corrected.store, corrected.name).pending == 3
    shown = corrected.client.retrieve(corrected.name, keys)
    assert all("hubness_epoch" not in record.payload for record in shown), "that is ours"
    corrected.name = aliased(corrected.store, corrected.name)
    done = refresh(corrected.store, corrected.name, force=True)
    assert (done.action, done.pending, done.written) == ("full", 3, corrected.ITEMS)
    assert status(corrected.store, corrected.name).pending == 0
    test_payloads_are_the_users_own(corrected)
    corrected.assert_scores()


def test_what_a_client_writes_between_reading_and_copying_stays(of_each_distance):
    """What was deleted is not made again."""
    corrected = of_each_distance
    new = vectors(np.random.default_rng(11), 4, corrected.DIM)
    corrected.name = aliased(corrected.store, corrected.name)
    client, name = corrected.client, corrected.name
    done = []

    class Late(QdrantStore):
        def upsert(self, collection, batch, field, *, partition=None):
            if not done and partition == "numbers":
                done.append(batch.keys)
                updated = models.PointStruct(id=key(1), vector=new[0].tolist(), payload={"new": 1})
                client.upsert(name, [updated])
                client.update_vectors(
                    name, [models.PointVectors(id=key(3), vector=new[1].tolist())]
                )
                client.delete(name, [key(5)])
                client.set_payload(name, {"set": True}, [key(7)])
            super().upsert(collection, batch, field, partition=partition)

    refresh(corrected.backend.store(Late), name, QueryBank(corrected.other))
    assert {key(1), key(3), key(5), key(7)} <= set(done[0])
    for i, vector in ((1, new[0]), (3, new[1])):
        corrected.items[i] = vector
    found, wanted = corrected.scores(), corrected.wanted(bank=corrected.other)
    assert 5 not in found, "it stays deleted"
    left = [i for i in range(corrected.ITEMS) if i != 5]
    np.testing.assert_allclose([found[i] for i in left], wanted[left], atol=3e-5)
    rows = {each.id: each.payload for each in client.retrieve(name, [key(1), key(7)])}
    assert rows[key(1)] == {"new": 1}
    assert rows[key(7)]["set"] is True


def test_one_process_at_a_time(everywhere):
    corrected = Corrected(everywhere, "Dot")
    with Lease(corrected.store, corrected.name) as held:
        first = held.token
        with (
            pytest.raises(LeaseHeld, match="holds the lease"),
            Lease(everywhere.store(), corrected.name),
        ):
            pass
    with Lease(everywhere.store(), corrected.name) as held:
        held.check()
        assert held.token == first + 1


def test_a_former_holder_s_writes_are_refused_however_late_they_arrive(everywhere):
    corrected = Corrected(everywhere, "Dot")
    name, vector = corrected.name, ""
    with Lease(corrected.store, name, policy=LeasePolicy(0.3, 0.0, 0.0)) as former:
        late = former.store
        rows = late.get(name, [1], vector, partition="numbers")
        late.upsert(name, rows, vector, partition="numbers")
        former._over.set()  # no renewal: it was paused
        time.sleep(0.4)
        with Lease(everywhere.store(), name):
            for write in (
                lambda: late.upsert(name, rows, vector),
                lambda: late.put_bias_keys(name, rows.with_columns({"new": [1]}), ["new"]),
                lambda: late.delete(name, [1]),
                lambda: late.put_records(LEDGER, [Record("late", "late", "{}")]),
            ):
                with pytest.raises(LeaseLost, match="another job has taken over"):
                    write()
    assert everywhere.store().info(name).aliases == ()


def test_a_copy_takes_over_the_alias(everywhere):
    corrected = Corrected(everywhere, "Cosine")
    corrected.store.point_alias("live", corrected.name)
    before = everything(everywhere, corrected.name)
    done = refresh(corrected.store, "live", QueryBank(corrected.other))
    assert done.action == "full"
    assert corrected.store.alias_target("live") == done.collection != corrected.name
    everywhere.made.append(done.collection)
    corrected.name = done.collection
    corrected.assert_scores(bank=corrected.other)
    layout = corrected.state.layout
    for each, record in everything(everywhere, done.collection).items():
        assert record.vector[: layout.dim] == before[each].vector[: layout.dim], "bit for bit"
        assert record.payload == before[each].payload


def test_two_vectors_of_a_collection_are_corrected_each_for_itself(backend):
    rng = np.random.default_rng(0)
    name, a, b = backend.name(), vectors(rng, 80, 8), vectors(rng, 80, 6)
    config = {
        "a": models.VectorParams(size=8, distance="Cosine"),
        "b": models.VectorParams(size=6, distance="Dot"),
    }
    backend.client.create_collection(name, vectors_config=config)
    points = [
        models.PointStruct(id=i, vector={"a": a[i].tolist(), "b": b[i].tolist()}, payload={"n": i})
        for i in range(80)
    ]
    backend.client.upsert(name, points)
    store, banks = backend.store(), {"a": vectors(rng, 30, 8), "b": vectors(rng, 30, 6)}
    first = migrate(
        store,
        plan_correction(store, name, Recipe(QueryBank(banks["a"]), estimator=NNN(4)), field="a"),
    )
    backend.made += [f"{first.target}_hubness", f"{first.target}__bank"]
    plan = plan_correction(
        store, first.target, Recipe(QueryBank(banks["b"]), estimator=NNN(4)), field="b"
    )
    target = aliased(store, migrate(store, plan).target)
    assert set(store.info(target).states) == {"a", "b"}
    new = {field: vectors(rng, 40, len(bank[0])) for field, bank in banks.items()}
    refresh(store, target, QueryBank(new["a"]), field="a")
    client = backend.hubness()
    record = client.retrieve(target, [5], with_vectors=True)[0]
    assert record.payload == {"n": 5}
    np.testing.assert_allclose(record.vector["b"], b[5], rtol=1e-6)
    for field, items, bank in (("a", a, new["a"]), ("b", b, banks["b"])):
        scores = [
            {point.id: point.score for point in answer.points}
            for answer in (
                client.query_points(
                    target, banks[field][0].tolist(), field, limit=80, strength=strength
                )
                for strength in (0, 1)
            )
        ]
        wanted = nnn(bank, items, "COSINE" if field == "a" else "IP", 4, 0.75)
        got = np.array([scores[0][i] - scores[1][i] for i in range(80)])
        np.testing.assert_allclose(got - got.mean(), wanted - wanted.mean(), atol=1e-5)
