"""A corrected collection behind an alias, and what its application writes and finds."""

import numpy as np

from milvus_hubness import NNN, Copy, QueryBank, Recipe, migrate, plan_correction
from tests.support.born import born
from tests.support.galleries import nnn, plain_collection, similarity, vectors

DIM, ITEMS, K = 12, 150, 8


class Live:
    """A corrected collection behind an alias, rows of which are of any length."""

    def __init__(self, backend, *, is_migrated):
        rng = np.random.default_rng(8)
        self.backend, self.store, self.metric = backend, backend.store(), "COSINE"
        items = vectors(rng, ITEMS, DIM)
        self.rows = dict(enumerate(items))
        self.bank, self.other = vectors(rng, 60, DIM), vectors(rng, 70, DIM)
        self.query = vectors(rng, 1, DIM)
        self.alias = backend.name("live")
        if is_migrated:
            source = backend.name("full")
            plain_collection(backend.client(), source, items, self.metric)
            bank = QueryBank(self.bank)
            plan = plan_correction(
                self.store, source, Recipe(bank, estimator=NNN(K)), Copy(alias=self.alias)
            )
            self.name = migrate(self.store, plan).target
        else:
            self.name = born(backend, items, self.bank, self.metric, estimator=NNN(K))
            self.store.point_alias(self.alias, self.name)
        self.client = backend.hubness_client()

    def read(self):
        found = self.client.query(self.alias, filter="id >= 0", consistency_level="Strong")
        return {row["id"]: np.float32(row["vector"]) for row in found}

    def assert_found(self, bank):
        items = np.array(list(self.rows.values()))
        mean_bias = self.store.info(self.alias).state.profile.mean_bias
        wanted = (
            similarity(self.query, items, self.metric)[0]
            - nnn(bank, items, self.metric, K, 0.75)
            + mean_bias
        )
        [hits] = self.client.search(self.alias, data=list(self.query), limit=len(items) + 50)
        assert {hit["id"] for hit in hits} == set(self.rows)
        found = {hit["id"]: hit["distance"] for hit in hits}
        np.testing.assert_allclose([found[key] for key in self.rows], wanted, atol=3e-5)

    def put(self, key, name=None):
        """Write a row with the vector of the query, by the alias or another name."""
        self.client.upsert(name or self.alias, [{"id": key, "vector": self.query[0], "group": 1}])
        self.rows[key] = self.query[0]

    def write(self):
        rng = np.random.default_rng(len(self.rows))
        fresh = vectors(rng, 3, DIM)
        new = max(self.rows) + 1
        lines = [
            {"id": key, "vector": row, "group": 1}
            for key, row in zip((5, new), fresh, strict=False)
        ]
        self.client.upsert(self.alias, lines)
        gone = min(key for key in self.rows if key > 10)
        self.client.delete(self.alias, ids=[gone])
        self.rows |= {5: fresh[0], new: fresh[1]}
        del self.rows[gone]
