"""Biases spread over columns, as an index that mixes columns needs them, give the scores of one column.

No Milvus here has such an index (RaBitQ needs 2.6): the choice is put in by hand, and the rest is as it would be.
"""

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    Copy,
    CorrectionConfig,
    QueryBank,
    Recipe,
    migrate,
    plan_correction,
    refresh,
)
from milvus_hubness.jobs.store.records import VectorField
from milvus_hubness.milvus.store import schema as milvus_schema
from tests.support.galleries import METRICS, nnn, plain_collection, similarity, vectors

DIM, ITEMS, K, SPREAD = 12, 120, 6, 4


@pytest.fixture
def spread(monkeypatch):
    """A list: the last number in it is the spread that every index needs."""
    chosen = [SPREAD]
    monkeypatch.setattr(milvus_schema, "bias_spread", lambda field, dim, metric: chosen[-1])
    monkeypatch.setattr(milvus_schema, "takes_graph_hint", lambda field: chosen[-1] == 1)
    return chosen


def drawn():
    rng = np.random.default_rng(4)
    return [vectors(rng, count, DIM) for count in (ITEMS, 40, 50, 1)]


def assert_scores(client, name, items, query, bank, metric, strength=1.0):
    scores = similarity(query, items, metric)[0]
    biases = nnn(bank, items, metric, K, 0.75)
    [hits] = client.search(name, data=list(query), limit=len(items) + 9, strength=strength)
    found = {hit["id"]: hit["distance"] for hit in hits}
    got = np.array([found[i] for i in range(len(items))])
    wanted = scores - strength * biases
    if metric == "L2":
        got = -0.5 * got
    # The mean bias moves all scores alike.
    np.testing.assert_allclose(got - got.mean(), wanted - wanted.mean(), atol=3e-5)


@pytest.mark.lite_only
@pytest.mark.parametrize(
    "metric", ["L2", *(pytest.param(name, marks=pytest.mark.long) for name in ("IP", "COSINE"))]
)
def test_a_migrated_collection_is_searched_and_refreshed(backend, spread, metric):
    items, bank, other, query = drawn()
    name, alias, client = backend.name(), backend.name("live"), backend.hubness_client()
    plain_collection(backend.client(), name, items, metric)
    store = backend.store()
    done = migrate(
        store,
        plan_correction(store, name, Recipe(QueryBank(bank), estimator=NNN(K)), Copy(alias=alias)),
    )
    layout = store.info(done.target).state.layout
    assert (layout.slots.spread, layout.graph_hint) == (SPREAD, None)
    assert_scores(client, alias, items, query, bank, metric)
    assert_scores(client, alias, items, query, bank, metric, strength=0.25)
    items[7] = other[0]
    client.upsert(alias, [{"id": 7, "vector": items[7], "group": 2}])
    assert_scores(client, alias, items, query, bank, metric)
    assert refresh(store, alias, QueryBank(other)).action == "full"
    assert_scores(client, alias, items, query, other, metric)

    spread.append(8)
    again = refresh(store, alias)
    assert (again.action, again.reason) == ("full", "the quantization of the vectors changed")
    assert store.info(alias).state.layout.slots.spread == 8
    assert_scores(client, alias, items, query, other, metric)
    spread.append(1)
    assert refresh(store, alias).action == "none"
    assert refresh(store, alias, QueryBank(bank)).action == "full"
    assert store.info(alias).state.layout.slots.spread == 1
    assert_scores(client, alias, items, query, bank, metric)


@pytest.mark.lite_only
@pytest.mark.parametrize("metric", METRICS)
def test_a_new_collection_has_the_spread_from_its_first_row_on(backend, spread, metric):
    items, bank, _, query = drawn()
    name, client = backend.name(), backend.hubness_client()
    config = CorrectionConfig(Recipe(QueryBank(bank), estimator=NNN(K)))
    client.create_collection(name, dimension=DIM, metric_type=metric, hubness=config)
    client.insert(name, [{"id": i, "vector": row} for i, row in enumerate(items)])
    layout = backend.store().info(name).state.layout
    assert layout.slots.spread == SPREAD
    assert layout.slots.scale != 1
    assert_scores(client, name, items, query, bank, metric)


def test_rabitq_alone_needs_a_spread_and_indexes_with_one_range_take_no_hint():
    def field(index_type, **params):
        return VectorField("v", 384, "COSINE", index_type, params)

    indexes = [
        (field("IVF_RABITQ"), 8, False),
        (field("HNSW_SQ", sq_type="SQ4U"), 1, False),
        (field("HNSW_SQ", sq_type="SQ6"), 1, True),
        (field("IVF_SQ8"), 1, True),
        (field("HNSW_PQ"), 1, True),
        (field("HNSW"), 1, True),
    ]
    for vector, wanted, takes_hint in indexes:
        assert milvus_schema.bias_spread(vector, 384, "COSINE") == wanted
        assert milvus_schema.takes_graph_hint(vector) == takes_hint
        assert not milvus_schema.takes_locality_hints(vector) or takes_hint
