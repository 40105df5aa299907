"""A collection and its corrected copy, to which clients write as well, and such writes."""

import numpy as np

from milvus_hubness import NNN, QueryBank, Recipe, migrate, plan_correction
from milvus_hubness.jobs.store.records import DUAL_WRITE_PROPERTY, DualWrite
from tests.support.galleries import nnn, plain_collection, vectors

DIM, ITEMS, K = 10, 60, 4


class Moving:
    """A collection, its corrected copy, and clients whose writes to the one reach the other."""

    def __init__(self, backend, metric="IP", estimator=None, make=plain_collection):
        rng = np.random.default_rng(71)
        self.backend, self.metric, self.rng = backend, metric, rng
        self.items, self.bank = vectors(rng, ITEMS, DIM), vectors(rng, 30, DIM)
        self.plain, self.source = backend.client(), backend.name("moving")
        make(self.plain, self.source, self.items, metric)
        self.store = backend.store()
        plan = plan_correction(
            self.store, self.source, Recipe(QueryBank(self.bank), estimator=estimator or NNN(K))
        )
        self.target = migrate(self.store, plan, no_writers=True).target
        self.client = backend.hubness_client()

    def dual_write(self, written, other, **options):
        result = DualWrite(collection=other, **options).model_dump_json()
        self.plain.alter_collection_properties(written, {DUAL_WRITE_PROPERTY: result})

    def forward(self, **options):
        self.dual_write(self.source, self.target, **options)
        return self

    def backward(self, **options):
        self.dual_write(self.target, self.source, **options)
        return self

    def rows(self, keys, **changed):
        fresh = vectors(self.rng, len(keys), DIM)
        return [
            {"id": key, "vector": vector, "group": 7, "note": f"new {key}", **changed}
            for key, vector in zip(keys, fresh, strict=True)
        ]

    def held(self, name, *more):
        """By key, the rows as HubnessClient shows them, with `more` fields."""
        read = self.client.query(
            name, filter="", output_fields=["*", *more], limit=1_000, consistency_level="Strong"
        )
        return {row["id"]: {k: v for k, v in row.items() if k != "id"} for row in read}

    def biases(self, vectors):
        mean_bias = self.store.info(self.target).state.profile.mean_bias
        return nnn(self.bank, np.asarray(vectors, np.float32), self.metric, K, 0.75) - mean_bias

    def assert_equal(self):
        """Both hold the same, and the corrected one every row's right bias."""
        plain, corrected = (
            self.held(self.source),
            self.held(self.target, "hubness_bias", "hubness_epoch"),
        )
        assert sorted(plain) == sorted(corrected)
        vectors = [plain[key]["vector"] for key in corrected]
        biases = [row.pop("hubness_bias") for row in corrected.values()]
        assert {row.pop("hubness_epoch") for row in corrected.values()} == {1}
        np.testing.assert_allclose(biases, self.biases(vectors), atol=2e-5)
        for key, row in corrected.items():
            np.testing.assert_allclose(row["vector"], plain[key]["vector"], rtol=2.0**-22)
            assert {**row, "vector": plain[key]["vector"]} == plain[key]
        return plain


WRITES = [
    ("insert", lambda m: {"data": m.rows([100, 101, 102])}),
    ("insert", lambda m: {"data": m.rows([103])[0]}),
    ("insert", lambda m: {"data": []}),
    ("upsert", lambda m: {"data": m.rows([5, 200, 6])}),
    ("delete", lambda m: {"ids": [3, 4, 9_999]}),
    ("delete", lambda m: {"ids": 5}),
    ("delete", lambda m: {"filter": "group == 2 and id < 31"}),
    ("delete", lambda m: {"filter": "group == 77"}),
]
