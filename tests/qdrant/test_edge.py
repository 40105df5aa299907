"""The augmented form in the Rust engine itself, embedded: qdrant-edge-py holds one shard, and knows neither
collections nor aliases nor metadata, so that no job can run on it."""

import numpy as np
import pytest

from milvus_hubness import NNN, Correction, Layout, QueryBank
from milvus_hubness.correction.codec.index_hints import measured_on
from milvus_hubness.correction.codec.parts import BiasSlots, KindColumns
from milvus_hubness.correction.kinds import KindRule, Kinds
from tests.support.galleries import METRICS, nnn, similarity, vectors

edge = pytest.importorskip("qdrant_edge", reason="the package qdrant-edge-py is not installed")

DIM, ITEMS = 12, 300


@pytest.fixture(params=METRICS)
def metric(request):
    return request.param


@pytest.fixture
def shelf(metric, quick_folder):
    """A shard in augmented form, biases of `bank` in slot 0, and what went into it."""
    rng = np.random.default_rng(0)
    items, bank, other, query = (vectors(rng, n, DIM) for n in (ITEMS, 50, 60, 1))
    layout = measured_on(Layout(DIM, metric, BiasSlots(2)), items)
    params = edge.EdgeVectorParams(size=layout.width, distance=edge.Distance.Dot)
    shard = edge.EdgeShard.create(str(quick_folder), edge.EdgeConfig(vectors=params))
    biases = Correction.fit(layout, NNN(8), QueryBank(bank)).centred(items)
    stored = layout.augment(items, np.column_stack([biases, np.zeros(ITEMS)]))
    points = [
        edge.Point(i, stored[i].tolist(), {"n": i, "bias": float(biases[i])}) for i in range(ITEMS)
    ]
    shard.update(edge.UpdateOperation.upsert_points(points))
    yield shard, layout, items, bank, other, query
    shard.close()


def answered(shard, layout, query, strength, slot):
    asked = layout.encode_queries(query, strength, slot=slot)[0].tolist()
    request = edge.QueryRequest(query=edge.Query.Nearest(asked), limit=ITEMS)
    found = {point.id: point.score for point in shard.query(request)}
    return layout.scores([[found[i] for i in range(ITEMS)]], query, strength)[0]


def wanted(items, metric, bank, query, strength):
    scores = similarity(query, items, metric)[0] - strength * nnn(bank, items, metric, 8, 0.75)
    return -2 * scores if metric == "L2" else scores


def test_scores_are_corrected_before_and_after_vectors_are_updated(shelf, metric):
    shard, layout, items, bank, other, query = shelf
    for strength in (1.0, 0.0, 0.5):
        found = answered(shard, layout, query, strength, 0)
        np.testing.assert_allclose(found, wanted(items, metric, bank, query, strength), atol=3e-5)
    records = shard.retrieve(list(range(ITEMS)), False, True)
    stored = np.array(
        [record.vector for record in sorted(records, key=lambda record: record.id)], np.float32
    )
    fresh = Correction.fit(layout, NNN(8), QueryBank(other)).centred(items)
    renewed = layout.with_biases(stored, {1: fresh})
    updated = [edge.PointVectors(i, renewed[i].tolist()) for i in range(ITEMS)]
    shard.update(edge.UpdateOperation.update_vectors(updated))
    found = answered(shard, layout, query, 1.0, 1)
    np.testing.assert_allclose(found, wanted(items, metric, other, query, 1.0), atol=3e-5)
    found = answered(shard, layout, query, 1.0, 0)
    np.testing.assert_allclose(found, wanted(items, metric, bank, query, 1.0), atol=3e-5)
    [record] = shard.retrieve([7], True, False)
    assert record.payload["n"] == 7, "payloads are left alone"


def test_the_engine_compares_by_kind(quick_folder):
    """Points of two kinds and of none: <q − μq, r − (μk − μ)> + <μq, μ> − w·b, or the raw product."""
    rng = np.random.default_rng(1)
    items, bank, query = (vectors(rng, n, DIM) for n in (ITEMS, 50, 1))
    numbers = rng.integers(-1, 2, ITEMS)
    items[numbers == 1, 0] += 2
    rule = KindRule(field="kind", values=("image", "text"))
    kinds = Kinds.measured(rule, items, numbers, bank)
    layout = measured_on(Layout(DIM, "IP", kinds=KindColumns(2, scale=1 / 16)), items)
    biases = rng.normal(size=ITEMS).astype(np.float32)
    params = edge.EdgeVectorParams(size=layout.width, distance=edge.Distance.Dot)
    shard = edge.EdgeShard.create(str(quick_folder), edge.EdgeConfig(vectors=params))
    stored = layout.augment(items, biases, kinds=numbers)
    points = [edge.Point(i, stored[i].tolist(), {}) for i in range(ITEMS)]
    shard.update(edge.UpdateOperation.upsert_points(points))

    offsets = np.vstack([kinds.of_kinds - kinds.overall, np.zeros(DIM)])[numbers]
    mean_query = kinds.mean_query.astype(float)
    products = (query[0] - mean_query) @ (items - offsets).T + mean_query @ kinds.overall
    for weights, scores in ((kinds.weights(), products), (None, query[0].astype(float) @ items.T)):
        for strength in (0.0, 1.0):
            [asked] = layout.encode_queries(query, strength, kinds=weights)
            request = edge.QueryRequest(query=edge.Query.Nearest(asked.tolist()), limit=ITEMS)
            found = {point.id: point.score for point in shard.query(request)}
            np.testing.assert_allclose(
                [found[i] for i in range(ITEMS)], scores - strength * biases, atol=3e-5
            )
    shard.close()
