"""Quantised collections: biases in scaled columns, chosen when the copy is made and when a refresh finds a change."""

import numpy as np
import pytest
from qdrant_client import models

from milvus_hubness import NNN, Layout, QueryBank, Recipe, migrate, plan_correction, refresh, status
from milvus_hubness.correction.codec.index_hints import measured_on
from milvus_hubness.correction.codec.parts import BiasSlots
from milvus_hubness.correction.codec.quantisation import spread_for, with_bias_scale
from milvus_hubness.correction.fitted import Correction
from qdrant_hubness.store import schema
from tests.qdrant.worlds import METRICS, Corrected, key
from tests.support.aliases import aliased
from tests.support.galleries import METRICS as LAYOUT_METRICS
from tests.support.galleries import embedding_like, similarity, vectors

INT8 = models.ScalarQuantization(scalar=models.ScalarQuantizationConfig(type="int8"))
BINARY = models.BinaryQuantizationConfig


@pytest.fixture
def quantised(monkeypatch):
    """A list: while it has a quantiser, every collection is quantised by it. The local mode knows of none."""
    configs = []
    monkeypatch.setattr(
        schema, "quantization", lambda source, field: configs[-1] if configs else None
    )
    return configs


@pytest.mark.parametrize("distance", METRICS)
def test_a_quantised_collection_has_spread_biases_and_the_same_scores(backend, quantised, distance):
    quantised.append(INT8)
    corrected = Corrected(backend, distance)
    corrected.name = aliased(corrected.store, corrected.name)
    layout = corrected.state.layout
    assert layout.slots.spread == spread_for(corrected.DIM, METRICS[distance])
    assert (layout.graph_hint, layout.locality_hints) == (None, None)
    assert layout.width % 16 == 0
    corrected.assert_scores()
    found, wanted = corrected.scores(strength=0.5), corrected.wanted(strength=0.5)
    np.testing.assert_allclose([found[i] for i in range(corrected.ITEMS)], wanted, atol=3e-5)

    new = vectors(np.random.default_rng(5), 1, corrected.DIM)
    corrected.client.upsert(corrected.name, [models.PointStruct(id=key(3), vector=new[0].tolist())])
    corrected.items[3] = new[0]
    corrected.assert_scores()

    assert refresh(corrected.store, corrected.name, QueryBank(corrected.other)).action == "full"
    corrected.assert_scores(bank=corrected.other)
    assert refresh(corrected.store, corrected.name).action == "none"
    now = status(corrected.store, corrected.name)
    assert (now.spread, now.needs_other_columns) == (layout.slots.spread, False)
    assert 1 / 4 < now.bias_scale / layout.slots.scale < 4
    shown = corrected.client.retrieve(corrected.name, [key(3)], with_vectors=True)[0].vector
    expected = new[0] / np.linalg.norm(new[0]) if distance == "Cosine" else new[0]
    np.testing.assert_allclose(shown, expected, rtol=1e-6)


def test_profiles_of_a_quantised_collection_have_columns_of_their_own(backend, quantised):
    quantised.append(INT8)
    rng = np.random.default_rng(0)
    items, bank, other = (vectors(rng, n, 12) for n in (90, 40, 50))
    store, source = backend.store(), backend.fill(items, "Dot")
    plan = plan_correction(store, source, Recipe(QueryBank(bank), estimator=NNN(4)))
    assert plan.to_dict()["spread"] == 2
    name = aliased(store, migrate(store, plan).target)
    refresh(store, name, Recipe(QueryBank(other), estimator=NNN(4)), profile="second")
    state, query = store.info(name).state, vectors(rng, 1, 12)[0]
    for profile, queries in (("default", bank), ("second", other)):
        hits = (
            backend.hubness().query_points(name, query.tolist(), limit=90, profile=profile).points
        )
        found = {hit.id: hit.score for hit in hits}
        correction = Correction.fit(state.layout, NNN(4), QueryBank(queries))
        biases = correction.centred(items) - state.profiles[profile].mean_bias
        wanted = similarity(query[None], items, "IP")[0] - biases
        np.testing.assert_allclose([found[key(i)] for i in range(90)], wanted, atol=3e-5)


@pytest.mark.parametrize("distance", METRICS)
def test_a_refresh_that_finds_a_quantiser_makes_a_copy_with_more_columns(
    backend, quantised, distance
):
    corrected = Corrected(backend, distance)
    store, before = corrected.store, corrected.state.layout
    shown = {record.id: record.vector for record in _all(corrected.client, corrected.name)}
    assert before.slots.spread == 1
    store.point_alias("live", corrected.name)
    assert refresh(store, "live").action == "none"

    quantised.append(INT8)
    assert status(store, "live").needs_other_columns
    planned = refresh(store, "live", plan=True)
    assert (planned.action, planned.planned) == ("full", True)
    done = refresh(store, "live")
    assert done.action == "full"
    assert "the quantization of the vectors changed" in done.reason
    corrected.name = done.collection
    assert corrected.state.layout.slots.spread == 2
    corrected.assert_scores()
    assert {record.id: record.vector for record in _all(corrected.client, done.collection)} == shown
    assert not status(store, "live").needs_other_columns
    assert refresh(store, "live").action == "none"

    # Without the quantiser, the columns serve as well; the next copy needs no more than before.
    quantised.clear()
    assert refresh(store, "live").action == "none"
    corrected.name = refresh(store, "live", QueryBank(corrected.other)).collection
    assert corrected.state.layout.slots.spread == 1
    assert corrected.state.layout.width == before.width
    corrected.assert_scores(bank=corrected.other)
    store.drop_alias("live")


def test_biases_of_another_size_get_another_scale_with_a_copy(backend, quantised):
    quantised.append(INT8)
    corrected = Corrected(backend)
    store, before = corrected.store, corrected.state.layout
    store.point_alias("live", corrected.name)
    small = NNN(corrected.K, corrected.ALPHA / 20)
    done = refresh(store, "live", Recipe(estimator=small), force=True)
    assert done.action == "full"
    corrected.name = done.collection
    assert corrected.state.layout.slots.scale >= 8 * before.slots.scale
    corrected.assert_scores(alpha=small.alpha)
    store.drop_alias("live")


def _all(client, name):
    return client.scroll(name, limit=1_000, with_vectors=True)[0]


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (None, []),
        (INT8, ["in 2 columns", "does not rescore by default"]),
        (
            models.ProductQuantization(product=models.ProductQuantizationConfig(compression="x4")),
            ["does not rescore"],
        ),
        (models.BinaryQuantization(binary=BINARY()), ["1-bit binary", "two bits", "oversampling"]),
        (models.BinaryQuantization(binary=BINARY(encoding="one_bit")), ["1-bit binary"]),
        (
            models.BinaryQuantization(binary=BINARY(encoding="two_bits")),
            ["in 2 columns", "rescores by default"],
        ),
    ],
)
def test_a_plan_says_what_the_quantiser_does_to_biases(backend, quantised, config, parts):
    rng = np.random.default_rng(1)
    source, bank = backend.fill(vectors(rng, 60, 12)), QueryBank(vectors(rng, 40, 12))
    quantised += [config] if config else []
    plan = plan_correction(backend.store(), source, bank)
    remarks = [text for text in plan.remarks if "quantiz" in text]
    assert len(remarks) == bool(parts)
    assert all(part in remarks[0] for part in parts)
    assert plan.chosen.layout.slots.spread == (2 if parts and "1-bit binary" not in parts else 1)


def test_turbo_rescores_by_default_below_four_bits():
    turbo = pytest.importorskip("qdrant_client").models
    if not hasattr(turbo, "TurboQuantization"):
        pytest.skip("this qdrant-client has no turbo quantization")
    for bits, rescores in ((None, False), ("bits4", False), ("bits2", True), ("bits1", True)):
        config = turbo.TurboQuantization(turbo=turbo.TurboQuantQuantizationConfig(bits=bits))
        [remark] = schema.quantization_remarks(config, 8)
        assert ("Qdrant rescores by default" in remark) == rescores


@pytest.mark.parametrize("metric", LAYOUT_METRICS)
def test_the_rust_engine_keeps_the_correction_in_int8(quick_folder, metric):
    edge = pytest.importorskip("qdrant_edge", reason="the package qdrant-edge-py is not installed")
    dim = 96
    items, queries, biases = embedding_like(dim, metric, count=600)
    exact = np.argsort(-(similarity(queries, items, metric) - biases), axis=1)[:, :10]
    found = {}
    spread_there = spread_for(dim, metric)
    for spread in (1, spread_there):
        layout = measured_on(
            Layout(dim, metric, BiasSlots(spread=spread)), items, queries, graph_hint=False
        )
        layout = with_bias_scale(layout, items, biases)
        found[spread] = _recall_in_int8(
            edge, quick_folder / str(spread), layout, items, queries, biases, exact
        )
    assert found[spread_there] > 0.88
    assert found[1] < found[spread_there] - 0.1


def _recall_in_int8(edge, folder, layout, items, queries, biases, exact):
    quantization = edge.ScalarQuantizationConfig(type=edge.ScalarType.Int8, quantile=0.99)
    config = edge.EdgeConfig(
        vectors=edge.EdgeVectorParams(size=layout.width, distance=edge.Distance.Dot),
        quantization_config=quantization,
        hnsw_config=edge.HnswIndexConfig(m=16, ef_construct=100, full_scan_threshold=10**7),
        optimizers=edge.EdgeOptimizersConfig(indexing_threshold=1, default_segment_number=1),
    )
    shard = edge.EdgeShard.create(str(folder), config)
    try:
        stored = layout.augment(items, biases)
        points = [edge.Point(i, row.tolist(), {}) for i, row in enumerate(stored)]
        shard.update(edge.UpdateOperation.upsert_points(points))
        shard.optimize()
        params = edge.SearchParams(quantization=edge.QuantizationSearchParams(rescore=False))
        shares = []
        for query, true in zip(layout.encode_queries(queries), exact, strict=True):
            request = edge.QueryRequest(
                query=edge.Query.Nearest(query.tolist()), limit=10, params=params
            )
            shares.append(np.isin(true, [point.id for point in shard.query(request)]).mean())
        return np.mean(shares)
    finally:
        shard.close()
