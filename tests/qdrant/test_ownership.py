"""Properties of a Qdrant collection that name another one: nothing there is written, deleted or dropped."""

import json
from contextlib import nullcontext

import numpy as np
import pytest
from qdrant_client import models

from milvus_hubness import (
    NNN,
    DualWriteFailed,
    HubnessError,
    QueryBank,
    Recipe,
    clean,
    migrate,
    plan_correction,
    refresh,
)
from milvus_hubness.jobs.store.records import (
    DUAL_WRITE_PROPERTY,
    DualWrite,
)
from tests.support.galleries import vectors

DIM, ITEMS = 6, 30


def bank_of(seed):
    return QueryBank(vectors(np.random.default_rng(seed), 20, DIM))


class World:
    """`private`, its copy and its bank; `public`, a corrected copy whose properties a stranger has written; `forged`,
    which a stranger has made."""

    def __init__(self, backend):
        self.backend, self.client, self.store = backend, backend.client, backend.store()
        self.private, _ = self.corrected(1)
        _, self.public = self.corrected(2)
        self.forged = backend.fill(vectors(np.random.default_rng(3), ITEMS, DIM))
        self.watched = [
            self.private,
            f"{self.private}_hubness",
            f"{self.private}__bank",
            self.forged,
        ]
        self.before = self.held()

    def corrected(self, seed):
        name = self.backend.fill(vectors(np.random.default_rng(seed), ITEMS, DIM))
        plan = plan_correction(self.store, name, Recipe(bank_of(seed), estimator=NNN(4)))
        return name, migrate(self.store, plan, no_writers=True).target

    def held(self):
        held = {}
        for name in self.watched:
            points, _ = self.client.scroll(name, limit=1_000, with_vectors=True)
            held[name] = sorted(point.model_dump_json() for point in points)
        return held


@pytest.fixture
def world(backend):
    return World(backend)


def dual_write(name, **options):
    return {DUAL_WRITE_PROPERTY: DualWrite(collection=name, **options).model_dump_json()}


def banked(world, name):
    state = json.loads(world.store.properties_of(world.public)["hubness"])
    for profile in state["profiles"].values():
        profile["bank"]["collection"] = name
    return {"hubness": json.dumps(state)}


PROPERTIES = {
    "a copy": lambda w: dual_write(w.private),
    "a required copy": lambda w: dual_write(w.private, required=True),
    "a forged copy": lambda w: dual_write(w.forged, required=True),
    "a bank": lambda w: banked(w, w.private),
    "a bank, a helper": lambda w: banked(w, f"{w.private}__bank"),
}


def upsert(world):
    points = [
        models.PointStruct(id=1, vector=[1.0] * DIM),
        models.PointStruct(id=7_001, vector=[0.5] * DIM),
    ]
    world.backend.hubness().upsert(world.public, points)


def delete(world):
    world.backend.hubness().delete(world.public, [1, 3, 5])


def payload(world):
    world.backend.hubness().set_payload(world.public, {"group": 9}, [11, 13])


CALLS = {
    "upsert": upsert,
    "delete": delete,
    "set_payload": payload,
    "search": lambda w: w.backend.hubness().query_points(w.public, query=[1.0] * DIM),
    "refresh": lambda w: refresh(w.store, w.public),
    "refresh with a bank": lambda w: refresh(w.store, w.public, bank_of(9), force=True),
    "clean": lambda w: clean(w.store, w.public, drop=w.public),
}


@pytest.mark.parametrize("named", PROPERTIES)
def test_a_property_that_names_another_collection_harms_nothing(world, named):
    refusals = {}
    for call, run in CALLS.items():
        world.store.properties.alter(world.public, PROPERTIES[named](world))
        try:
            run(world)
        except HubnessError as error:
            refusals[call] = str(error)
        assert world.held() == world.before, call
    assert not any("\n" in refusal for refusal in refusals.values())
    if named.startswith("a bank"):
        assert f"'hubness' of '{world.public}' names the bank" in refusals["upsert"]
    if "required" in named or named == "a forged copy":
        assert DUAL_WRITE_PROPERTY in refusals["upsert"]
    if "bank" in named:
        assert "names the bank" in refusals["refresh with a bank"]


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_stranger_that_has_got_the_name_of_the_copy_gets_no_writes(world, way, required):
    written, copy = world.private, f"{world.private}_hubness"
    if way == "backward":
        written, copy = copy, written
    world.store.properties.alter(written, dual_write(copy, required=required))
    client = world.backend.hubness()
    client.delete_collection(copy)
    config = models.VectorParams(size=DIM, distance=models.Distance.DOT)
    world.client.create_collection(copy, vectors_config=config)
    stranger = models.PointStruct(id=1, vector=[2.0] * DIM)
    world.client.upsert(copy, [stranger])

    new = models.PointStruct(id=7_001, vector=[0.5] * DIM)
    message = f"'{copy}' is another collection than the one"
    for call in (
        lambda: client.upsert(written, [new]),
        lambda: client.set_payload(written, {"group": 9}, [1]),
        lambda: client.delete(written, [1]),
    ):
        with pytest.raises(DualWriteFailed, match=message) if required else nullcontext():
            call()
    assert [point.id for point in client.retrieve(written, [1, 7_001])] == [7_001]
    [point], _ = world.client.scroll(copy, with_vectors=True)
    assert (point.id, point.vector, point.payload) == (1, [2.0] * DIM, {})
