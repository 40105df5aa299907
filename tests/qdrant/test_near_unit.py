"""Cosine vectors that a server keeps as they came, and those of other types beside, are migrated without a writer."""

from dataclasses import replace

import numpy as np
import pytest
from qdrant_client import models

from milvus_hubness import (
    NNN,
    Copy,
    MigrationOptions,
    NotCaughtUp,
    QueryBank,
    Recipe,
    VerificationFailed,
    migrate,
    plan_correction,
    rollback,
)
from milvus_hubness.jobs.migration.catch_up import verify
from tests.qdrant.strict import StrictServer
from tests.qdrant.worlds import Backend
from tests.support.galleries import vectors

COUNT = 60
ALONE = MigrationOptions(no_writers=True)
OTHERS = {
    "half": models.VectorParams(size=6, distance="Cosine", datatype="float16"),
    "bytes": models.VectorParams(size=6, distance="Cosine", datatype="uint8"),
    "near": models.VectorParams(size=32, distance="Cosine"),
    "tokens": models.VectorParams(
        size=5, distance="Cosine", datatype="float16", multivector_config={"comparator": "max_sim"}
    ),
    "plain": models.VectorParams(
        size=4, distance="Dot", datatype="float16", multivector_config={"comparator": "max_sim"}
    ),
}


def unit(rng, count, dim):
    rows = rng.normal(size=(count, dim))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def as_halves(rows):
    return rows.astype(np.float16).astype(np.float32)


def by_a_running_sum(rows):
    """Divided by a length that is summed up number by number in float32."""
    single = (rows * 3).astype(np.float32)
    squares = np.cumsum(single * single, axis=1, dtype=np.float32)[:, -1:]
    return single / np.sqrt(squares)


@pytest.fixture(params=["rest", pytest.param("grpc", marks=pytest.mark.long)])
def backend(request):
    here = Backend("strict", StrictServer().client(over=request.param))
    yield here
    here.clean()


@pytest.mark.parametrize("made", [as_halves, by_a_running_sum])
@pytest.mark.parametrize(
    "dim",
    [128, pytest.param(768, marks=pytest.mark.long), pytest.param(1536, marks=pytest.mark.long)],
)
def test_ordinary_unit_vectors_are_migrated(backend, made, dim):
    rng = np.random.default_rng(dim)
    rows = made(unit(rng, 3_000, dim))
    off = np.abs(np.sum(rows.astype(np.float64) ** 2, axis=1) - 1)
    kept = np.flatnonzero((off > 6e-7) & (off < 9.5e-7))
    assert len(kept) > 2, "a server leaves them as they are"
    rows = np.vstack([rows[kept], rows[:COUNT]])[:COUNT]
    name = backend.fill(rows, "Cosine", keys=lambda i: i)
    store = backend.store()
    plan = plan_correction(store, name, Recipe(QueryBank(vectors(rng, 40, dim)), estimator=NNN(4)))
    assert migrate(store, plan, ALONE).verified["rows"] == COUNT


def beside(backend):
    """A collection whose vectors of all types stand beside the one to correct."""
    rng = np.random.default_rng(4)
    name = backend.name()
    params = {"own": models.VectorParams(size=8, distance="Dot"), **OTHERS}
    backend.client.create_collection(
        name, vectors_config=params, sparse_vectors_config={"words": models.SparseVectorParams()}
    )
    points = []
    for i in range(COUNT):
        own = {
            "own": rng.normal(size=8),
            "half": rng.normal(size=6),
            "bytes": rng.integers(0, 255, 6),
            "near": as_halves(unit(rng, 1, 32))[0],
            "tokens": rng.normal(size=(3, 5)),
            "plain": rng.normal(size=(2, 4)),
        }
        named = {field: np.asarray(value, float).tolist() for field, value in own.items()}
        named["words"] = models.SparseVector(indices=[7, 2], values=[0.1, rng.normal()])
        points.append(models.PointStruct(id=i, vector=named, payload={"n": i}))
    backend.client.upsert(name, points)
    return name, QueryBank(vectors(rng, 40, 8))


def test_vectors_of_all_types_beside_it_are_carried_over_and_back(backend):
    name, bank = beside(backend)
    store, client = backend.store(), backend.client
    before = {r.id: r.vector for r in client.scroll(name, limit=COUNT, with_vectors=True)[0]}
    backend.made.append("live")
    plan = plan_correction(
        store, name, Recipe(bank, estimator=NNN(4)), Copy(alias="live"), field="own"
    )
    target = migrate(store, plan, ALONE).target
    for record in client.scroll(target, limit=COUNT, with_vectors=True)[0]:
        assert record.vector["bytes"] == before[record.id]["bytes"]
        assert record.vector["plain"] == before[record.id]["plain"]
        np.testing.assert_allclose(
            record.vector["half"], before[record.id]["half"], rtol=2e-3, atol=1e-6
        )
    assert rollback(store, "live", options=ALONE).carried == 0
    assert verify(store, name).rows == COUNT


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("half", [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
        ("bytes", [1.0] * 6),
        ("tokens", [[1.0, 0.0, 0.0, 0.0, 0.0]] * 3),
    ],
)
def test_a_vector_that_differs_is_found_and_shown(backend, field, value):
    name, bank = beside(backend)
    store = backend.store()
    target = migrate(
        store, plan_correction(store, name, Recipe(bank, estimator=NNN(4)), field="own"), ALONE
    ).target
    backend.client.update_vectors(target, [models.PointVectors(id=7, vector={field: value})])
    shown = rf"in row 7, '\S*{field}' is \S+ at number [\d, ]+ in '{name}' and [01]\.0 there in '{target}'"
    with pytest.raises(VerificationFailed, match=shown):
        verify(store, name)


def test_the_message_shows_both_values_and_blames_nobody_who_did_not_write(backend):
    """A row that the copy cannot hold: it differs again after each pass."""
    name, bank = beside(backend)
    store = backend.store()
    target = migrate(
        store, plan_correction(store, name, Recipe(bank, estimator=NNN(4)), field="own"), ALONE
    ).target

    class Forgetting(type(store)):
        def upsert(self, collection, batch, field, *, partition=None):
            if collection == target:
                rows = [{**row, "n": -1} if row["n"] == 7 else row for row in batch.rows]
                batch = replace(batch, rows=rows)
            super().upsert(collection, batch, field, partition=partition)

    backend.client.set_payload(target, {"n": -1}, [7])
    with pytest.raises(NotCaughtUp) as raised:
        migrate(
            backend.store(Forgetting),
            plan_correction(store, name, Recipe(bank, estimator=NNN(4)), field="own"),
            ALONE,
        )
    message = str(raised.value)
    assert f"7 (differs in n); in row 7, 'n' is 7 in '{name}' and -1 in '{target}'" in message
    assert "nobody has written it since" in message
    assert "by no dual write" not in message
    assert "\n" not in message


@pytest.mark.parametrize("seed", range(6))
def test_biases_of_vectors_in_half_precision_are_those_of_the_copy_within_its_rounding(
    backend, seed
):
    """The copy divides by the length of a vector that is not quite 1, and rounds again: biases move as much."""
    rng = np.random.default_rng(seed)
    items = vectors(rng, 60, 8)
    name = backend.fill(items, datatype=models.Datatype.FLOAT16)
    store = backend.store()
    plan = plan_correction(store, name, Recipe(QueryBank(vectors(rng, 40, 8)), estimator=NNN(4)))
    assert migrate(store, plan).rows == 60
    assert verify(store, name).biases == 60
