"""Fields of half precision are corrected in their own type; INT8, BINARY and SPARSE vectors pass through."""

import numpy as np
import pytest
from pymilvus import AnnSearchRequest, DataType, RRFRanker

from milvus_hubness import (
    NNN,
    Beside,
    CorrectionConfig,
    GloballyCorrected,
    QueryBank,
    Recipe,
    enable,
    migrate,
    plan_correction,
    refresh,
)
from milvus_hubness.correction.codec.arrays import SMALLEST, SPACING, decode, encode, rounded
from tests.support.galleries import METRICS, as_distance, nnn, similarity, vectors
from tests.support.recipes import as_plan

ITEMS, QUERIES, BANK, DIM, K = 150, 5, 60, 24, 8
KINDS = {"float16": DataType.FLOAT16_VECTOR, "bfloat16": DataType.BFLOAT16_VECTOR}
BITS = 16
MADE = {
    name: {"running": ["server-current"]}
    for name in ("goods", "test_other_vectors_beside_a_corrected_field_pass_through")
}
"""Milvus Lite and 2.3.5 have no fields of these kinds."""


class Goods:
    """A collection whose field "vector" is of half precision, a bank for it, and what is to come out."""

    def __init__(self, backend, dtype, metric):
        rng = np.random.default_rng(31)
        self.backend, self.dtype, self.metric = backend, dtype, metric
        self.items = rounded(vectors(rng, ITEMS, DIM), dtype)
        self.queries = rounded(vectors(rng, QUERIES, DIM), dtype)
        self.bank = vectors(rng, BANK, DIM)
        self.raw = similarity(self.queries, self.items, metric)
        self.biases = nnn(self.bank, self.items, metric, K, 0.75)
        # Under COSINE the vectors of length 1 are rounded to the type once more.
        self.atol = 2 * SPACING[dtype] if metric == "COSINE" else 1e-3
        self.plain, self.name, self.store = backend.client(), backend.name(), backend.store()

    def schema(self):
        schema = self.plain.create_schema(enable_dynamic_field=True)
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("vector", KINDS[self.dtype], dim=DIM)
        return schema

    def rows(self, first=0, count=ITEMS):
        packed = encode(self.items, self.dtype)
        return [
            {"id": i, "vector": packed[i], "note": f"n{i}"} for i in range(first, first + count)
        ]

    def fill(self):
        index = self.plain.prepare_index_params(
            "vector", index_type="FLAT", metric_type=self.metric
        )
        self.plain.create_collection(
            self.name, schema=self.schema(), index_params=index, consistency_level="Strong"
        )
        self.plain.insert(self.name, self.rows())

    def migrated(self, **options):
        self.fill()
        plan = plan_correction(
            self.store, self.name, **as_plan(QueryBank(self.bank), estimator=NNN(K), **options)
        )
        assert plan.to_dict()["dtype"] == self.dtype
        return migrate(self.store, plan).target

    def mean_bias(self, collection):
        return self.store.info(collection).state.profile.mean_bias

    def assert_ranked(self, results, corrected):
        """results of these queries are the best by these scores (m, n), and have them."""
        for number, hits in enumerate(results):
            keys = [hit["id"] for hit in hits]
            found = as_distance(corrected[number, keys], self.metric)
            np.testing.assert_allclose(hits.distances, found, atol=2 * self.atol)
            worst = np.sort(corrected[number])[-len(keys)]
            assert corrected[number, keys].min() >= worst - 2 * self.atol

    def assert_vectors(self, given, keys):
        found, wanted = decode(given, self.dtype), self.items[keys]
        step = SPACING[self.dtype] if self.metric == "COSINE" else 0
        np.testing.assert_allclose(found, wanted, rtol=step, atol=SMALLEST[self.dtype])


@pytest.fixture(params=METRICS)
def metric(request):
    return request.param


@pytest.fixture(params=KINDS)
def goods(backend, request, metric):
    return Goods(backend, request.param, metric)


def test_a_migrated_field_is_searched_and_read_as_before(goods):
    target = goods.migrated()
    field = next(
        each
        for each in goods.plain.describe_collection(target)["fields"]
        if each["name"] == "vector"
    )
    assert field["type"] == KINDS[goods.dtype]
    client = goods.backend.hubness_client()
    corrected = goods.raw - (goods.biases - goods.mean_bias(target))
    for data in (encode(goods.queries, goods.dtype), goods.queries, goods.queries.tolist()):
        results = client.search(
            target, data, limit=10, output_fields=["vector"], with_raw_score=True
        )
        goods.assert_ranked(results, corrected)
        for hits in results:
            assert all(isinstance(hit["entity"]["vector"], bytes) for hit in hits)
            goods.assert_vectors(
                [hit["entity"]["vector"] for hit in hits], [hit["id"] for hit in hits]
            )
    goods.assert_ranked(client.search(target, goods.queries, limit=10, strength=0.0), goods.raw)
    rows = client.query(target, filter="id < 20", output_fields=["*"])
    theirs = goods.plain.query(goods.name, filter="id < 20", output_fields=["*"])
    assert {frozenset(row) for row in rows} == {frozenset(row) for row in theirs}
    assert {type(row["vector"]) for row in rows} == {type(row["vector"]) for row in theirs}
    goods.assert_vectors([row["vector"] for row in rows], [row["id"] for row in rows])


def test_every_other_way_to_ask(goods):
    target = goods.migrated()
    client = goods.backend.hubness_client()
    corrected = goods.raw - (goods.biases - goods.mean_bias(target))
    one = encode(goods.queries[:1], goods.dtype)
    iterator, seen = client.search_iterator(target, one, batch_size=50), []
    while page := iterator.next():
        seen += [hit["id"] for hit in page]
    assert sorted(seen) == list(range(ITEMS))
    assert np.all(np.diff(corrected[0, seen]) <= 2 * goods.atol)
    by_id = client.search(target, ids=[3], limit=5)
    assert by_id[0][0]["id"] in range(ITEMS)
    request = AnnSearchRequest(encode(goods.queries, goods.dtype), "vector", {}, 10)
    for hits in client.hybrid_search(target, [request, request], RRFRanker(), 5):
        assert len(hits) == 5
    best = np.sort(as_distance(corrected[0], goods.metric))
    bound = float(best[30] if goods.metric == "L2" else best[-30])
    for hits in client.search(target, one, limit=100, search_params={"params": {"radius": bound}}):
        assert abs(len(hits) - 30) <= 3
    ranked = client.search(target, one, limit=5, rerank=GloballyCorrected(candidates=50))
    assert len(ranked[0]) == 5


def test_rows_are_written_in_every_shape_and_refreshed(goods):
    target = goods.migrated()
    client = goods.backend.hubness_client()
    shapes = [encode(goods.items, goods.dtype), goods.items, goods.items.tolist()]
    for number, given in enumerate(shapes):
        client.upsert(
            target, [{"id": 1_000 + number, "vector": given[7], "note": "new"}], bias="pending"
        )
    refresh(goods.store, target, Recipe(QueryBank(goods.bank), estimator=NNN(K + 2)))
    rows = client.query(target, filter="id >= 1000", output_fields=["vector", "hubness_epoch"])
    assert len(rows) == len(shapes)
    goods.assert_vectors([row["vector"] for row in rows], [7] * len(rows))
    assert all(row["hubness_epoch"] > 0 for row in rows)


def test_beside_and_born_corrected(goods):
    goods.fill()
    plan = plan_correction(
        goods.store, goods.name, Recipe(QueryBank(goods.bank), estimator=NNN(K)), Beside()
    )
    goods.backend.made += plan.body.sides
    enable(goods.store, plan)
    client = goods.backend.hubness_client()
    corrected = goods.raw - (goods.biases - goods.mean_bias(goods.name))
    goods.assert_ranked(client.search(goods.name, goods.queries, limit=5), corrected)
    born = goods.backend.name("born")
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type=goods.metric)
    client.create_collection(
        born,
        schema=goods.schema(),
        index_params=index,
        hubness=CorrectionConfig(Recipe(QueryBank(goods.bank), estimator=NNN(K))),
        consistency_level="Strong",
    )
    client.insert(born, goods.rows())
    goods.assert_ranked(client.search(born, goods.queries, limit=5), goods.raw - goods.biases)


def other_vectors(kind, rng):
    if kind == "BINARY_VECTOR":
        return [rng.bytes(BITS // 8) for _ in range(ITEMS)], "HAMMING", {"dim": BITS}
    if kind == "SPARSE_FLOAT_VECTOR":
        return [{i % 7: 1.0 + i / ITEMS, 50: 0.25} for i in range(ITEMS)], "IP", {}
    small = rng.integers(-128, 128, (ITEMS, BITS)).astype(np.int8)
    return list(small), "COSINE", {"dim": BITS}


def test_a_sparse_vector_beside_a_corrected_field_passes_through(lite):
    pass_through(lite, "SPARSE_FLOAT_VECTOR")


@pytest.mark.parametrize("kind", ["BINARY_VECTOR", "SPARSE_FLOAT_VECTOR", "INT8_VECTOR"])
def test_other_vectors_beside_a_corrected_field_pass_through(backend, kind):
    pass_through(backend, kind)


def pass_through(backend, kind):
    rng = np.random.default_rng(4)
    others, metric, params = other_vectors(kind, rng)
    items, bank = vectors(rng, ITEMS, DIM), vectors(rng, BANK, DIM)
    plain, name = backend.client(), backend.name()
    schema = plain.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    schema.add_field("other", DataType[kind], **params)
    index = plain.prepare_index_params("vector", index_type="FLAT", metric_type="IP")
    by_kind = "SPARSE_INVERTED_INDEX" if kind == "SPARSE_FLOAT_VECTOR" else "AUTOINDEX"
    index.add_index("other", index_type=by_kind, metric_type=metric)
    plain.create_collection(name, schema=schema, index_params=index, consistency_level="Strong")
    rows = [{"id": i, "vector": items[i], "other": others[i]} for i in range(ITEMS)]
    plain.insert(name, rows)
    plan = plan_correction(
        backend.store(), name, Recipe(QueryBank(bank), estimator=NNN(K)), field="vector"
    )
    target = migrate(backend.store(), plan).target
    client = backend.hubness_client()
    client.upsert(target, rows[:10])
    asked = {"anns_field": "other", "limit": 7, "output_fields": ["other"]}
    ours, theirs = (
        client.search(target, others[:3], **asked),
        plain.search(name, others[:3], **asked),
    )
    for mine, wanted in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine.distances, wanted.distances, rtol=1e-6)
        by_key = {hit["id"]: hit["entity"] for hit in wanted}
        assert all(hit["entity"] == by_key[hit["id"]] for hit in mine if hit["id"] in by_key)
    read = [each.query(on, filter="id < 20") for each, on in ((client, target), (plain, name))]
    ours, theirs = ({row["id"]: row["other"] for row in rows} for rows in read)
    assert ours == theirs
    corrected = items[:3].astype(float) @ items.T.astype(float) - nnn(bank, items, "IP", K, 0.75)
    for number, hits in enumerate(client.search(target, items[:3], limit=5, anns_field="vector")):
        assert [hit["id"] for hit in hits] == list(np.argsort(-corrected[number])[:5])
