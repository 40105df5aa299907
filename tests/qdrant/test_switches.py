"""A name moves between copies on Qdrant whose stored vectors have one width and unlike meaning: no answer mixes the
two, and no write is lost, whenever a client hears of it."""

from contextlib import nullcontext

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

from milvus_hubness import StoreError, resume, rollback
from milvus_hubness.jobs.migration.options import MigrationOptions
from milvus_hubness.jobs.store.records import DualWrite
from tests.qdrant.worlds import Backend, Corrected
from tests.support.galleries import vectors
from tests.support.switching import DIM, EXACT, ITEMS, Switching, oracles

AN_HOUR = 3_600.0
OLD = models.Filter(must=[models.HasIdCondition(has_id=list(range(55)))])
"""The points that no test writes."""


@pytest.fixture
def world():
    local = Backend("local", QdrantClient(":memory:"))
    return Switching(local, lambda items: local.fill(items, "Dot", keys=int))


def answered_by(world, client):
    """The collections whose oracle equals the answers of a client."""
    expected = oracles(world, world.states)
    found = [
        client.query_points(world.alias, query.tolist(), query_filter=OLD, limit=ITEMS).points
        for query in world.queries
    ]
    return {
        name
        for name, wanted in expected.items()
        if all(
            len(points) == 55
            and all(abs(point.score - scores[point.id]) < EXACT for point in points)
            for points, scores in zip(found, wanted, strict=True)
        )
    }


def test_between_the_move_and_the_end_of_every_ttl_both_copies_get_every_write(world, monkeypatch):
    """One client has heard of the switch, and one has not: each reads its own copy, and writes what both have."""
    old = world.backend.hubness(state_ttl=AN_HOUR)
    seen = []
    fresh = vectors(np.random.default_rng(5), 2, DIM)

    def waiting(*_):
        leads_to = world.store.alias_target(world.alias)
        if leads_to == world.first:
            old._operations.forget(world.alias)
            assert answered_by(world, old) == {world.first}
            seen.append(leads_to)
            return

        dual_writes = {name: world.store.info(name).dual_write for name in world.states}
        assert dual_writes == {
            world.first: DualWrite(collection=world.second, required=True),
            world.second: DualWrite(collection=world.first, former=True),
        }
        young = world.backend.hubness(state_ttl=AN_HOUR)
        for key, client in ((100, old), (101, young)):
            point = models.PointStruct(id=key, vector=fresh[key - 100].tolist(), payload={"n": key})
            client.upsert(world.alias, [point])
        old.set_payload(world.alias, {"by": "old"}, points=[56])
        young.set_payload(world.alias, {"by": "young"}, points=[57])
        old.delete(world.alias, models.PointIdsList(points=[58]))
        young.delete(world.alias, models.PointIdsList(points=[59]))
        for client, name in ((old, world.first), (young, world.second)):
            assert answered_by(world, client) == {name}
            found = {
                point.id: point
                for point in client.retrieve(
                    world.alias, [56, 57, 58, 59, 100, 101], with_vectors=True
                )
            }
            assert sorted(found) == [56, 57, 100, 101]
            assert [found[key].payload["by"] for key in (56, 57)] == ["old", "young"]
            np.testing.assert_allclose([found[key].vector for key in (100, 101)], fresh, rtol=1e-5)
        seen.append(leads_to)

    monkeypatch.setattr("milvus_hubness.jobs.migration.switching.wait_seconds", waiting)
    world.forth()
    assert seen[-1] == world.second
    assert {world.store.info(name).dual_write for name in world.states} == {None}
    # By now the former copy gets nothing any more; those who know it read it as it was.
    assert answered_by(world, old) == {world.first}
    old._operations.forget(world.alias)
    assert answered_by(world, old) == {world.second}


def assert_both_updates_survive(world, monkeypatch, alias, former, move):
    """Updates of two clients survive a move of an alias away from `former`: the one has heard of it, and
    the other, which has not, takes over what it read of a point while the first one updates it.
    """
    old = world.backend.hubness(state_ttl=AN_HOUR)
    young = world.backend.hubness(state_ttl=AN_HOUR)
    copied = []

    def waiting(*_):
        if world.store.alias_target(alias) == former:
            old._operations.forget(alias)
            old.retrieve(alias, [56])
            return

        put = old._operations._put

        def late(*args):
            copied.append(args)
            if len(copied) == 1:
                young.set_payload(alias, {"young": 1}, points=[56])
            return put(*args)

        with monkeypatch.context() as patched:
            patched.setattr(old._operations, "_put", late)
            old.set_payload(alias, {"old": 1}, points=[56])

    with monkeypatch.context() as patched:
        patched.setattr("milvus_hubness.jobs.migration.switching.wait_seconds", waiting)
        move()
    assert copied
    [point] = young.retrieve(alias, [56])
    assert (point.payload.get("old"), point.payload.get("young")) == (1, 1)


def test_updates_of_a_client_that_has_heard_survive_those_of_one_that_has_not(world, monkeypatch):
    assert_both_updates_survive(world, monkeypatch, world.alias, world.first, world.forth)


def test_they_survive_a_rollback(world, monkeypatch):
    world.forth()
    assert_both_updates_survive(world, monkeypatch, world.alias, world.second, world.back)


def test_they_survive_a_rollback_to_a_source_without_a_correction(world, monkeypatch):
    alias = alias_of_the_source(world)
    resume(world.store, world.first, world.options, alias=alias)
    assert not world.store.info(world.source).states

    def back():
        rollback(world.store, alias, options=world.options)
        assert world.store.alias_target(alias) == world.source

    assert_both_updates_survive(world, monkeypatch, alias, world.first, back)


def test_the_former_copy_takes_what_a_source_without_a_correction_takes(monkeypatch):
    corrected = Corrected(Backend("local", QdrantClient(":memory:")), "Cosine")
    store = corrected.store
    store.point_alias("shop", corrected.source)
    resume(store, corrected.name, MigrationOptions(client_ttl=0.0), alias="shop")
    zero = models.PointStruct(id=900, vector=[0.0] * corrected.DIM)

    def waiting(*_):
        if store.alias_target("shop") == corrected.source:
            corrected.client.upsert("shop", [zero])
            assert corrected.client.retrieve(corrected.name, [900])

    monkeypatch.setattr("milvus_hubness.jobs.migration.switching.wait_seconds", waiting)
    rollback(store, "shop")
    assert corrected.client.retrieve("shop", [900])


def alias_of_the_source(world):
    """A new alias of the plain source, of which `first` is a verified copy that no name leads to yet."""
    alias = f"{world.source}_shop"
    world.store.point_alias(alias, world.source)
    return alias


@pytest.mark.parametrize("method", ["upload_points", "upload_collection"])
def test_an_upload_that_begins_before_a_migration_reaches_the_copy(world, monkeypatch, method):
    # As on a server, which other clients call while one uploads.
    monkeypatch.setattr("qdrant_hubness.client.sync.turn", lambda _: nullcontext())
    client = world.backend.hubness(state_ttl=0.0)
    alias = alias_of_the_source(world)
    fresh = vectors(np.random.default_rng(5), 2, DIM).tolist()

    def stopped(*_):
        raise StoreError("stopped after the last comparison, before the name moves")

    def between(first, second):
        yield first
        with monkeypatch.context() as patched:
            patched.setattr(world.store, "point_alias", stopped)
            with pytest.raises(StoreError, match="stopped"):
                resume(world.store, world.first, world.options, alias=alias)
        assert world.store.info(world.source).dual_write.required
        yield second

    if method == "upload_points":
        points = [models.PointStruct(id=100 + i, vector=vector) for i, vector in enumerate(fresh)]
        client.upload_points(alias, between(*points), batch_size=1)
    else:
        client.upload_collection(alias, between(*fresh), ids=[100, 101], batch_size=1)

    resume(world.store, world.first, world.options, alias=alias)
    assert world.store.alias_target(alias) == world.first
    found = client.retrieve(alias, [100, 101], with_vectors=True)
    np.testing.assert_allclose([point.vector for point in found], fresh, rtol=1e-5)


def test_a_write_that_outlives_its_state_is_made_where_the_name_leads_by_then(world, monkeypatch):
    client = world.backend.hubness(state_ttl=0.0)
    send, held = client._operations._send, []

    def late(*args):
        if not held:
            held.append(args)
            world.forth()
        return send(*args)

    monkeypatch.setattr(client._operations, "_send", late)
    client.upsert(world.alias, [models.PointStruct(id=200, vector=[0.5] * DIM)])
    assert held[0][0] == world.first
    [point] = client.retrieve(world.alias, [200], with_vectors=True)
    np.testing.assert_allclose(point.vector, 0.5, rtol=1e-5)


def test_a_former_copy_that_is_gone_is_not_missed(world):
    client = world.backend.hubness(state_ttl=AN_HOUR)
    assert answered_by(world, client) == {world.first}
    world.forth()
    world.store.drop(world.first)
    assert answered_by(world, client) == {world.second}
