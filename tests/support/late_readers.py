"""A collection behind an alias that becomes a corrected copy, while readers still know the uncorrected one."""

import numpy as np
from pymilvus import AnnSearchRequest, DataType, RRFRanker

from milvus_hubness import NNN, Copy, QueryBank, Recipe, migrate, plan_correction
from tests.support.galleries import vectors

DIM, OTHER_DIM, ITEMS = 8, 4, 60


class LateReaders:
    """Two vector fields, of which `vector` is to be corrected."""

    def __init__(self, backend):
        rng = np.random.default_rng(5)
        self.backend, self.store = backend, backend.store()
        self.items, self.others = vectors(rng, ITEMS, DIM), vectors(rng, ITEMS, OTHER_DIM)
        self.bank = QueryBank(vectors(rng, 30, DIM))
        self.name, self.alias = backend.name("late"), backend.name("live")
        self.plain = backend.client()
        schema = self.plain.create_schema()
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
        schema.add_field("other", DataType.FLOAT_VECTOR, dim=OTHER_DIM)
        index = self.plain.prepare_index_params()
        index.add_index("vector", index_type="FLAT", metric_type="COSINE")
        index.add_index("other", index_type="FLAT", metric_type="IP")
        self.plain.create_collection(self.name, schema=schema, index_params=index)
        rows = zip(range(ITEMS), self.items, self.others, strict=True)
        self.plain.insert(
            self.name, [{"id": key, "vector": row, "other": other} for key, row, other in rows]
        )
        self.store.point_alias(self.alias, self.name)

    def correct(self):
        """Let the alias lead to a corrected copy, without a wait for clients."""
        recipe = Recipe(self.bank, estimator=NNN(4), verdict="skip")
        plan = plan_correction(
            self.store, self.name, recipe, Copy(alias=self.alias), field="vector"
        )
        self.backend.made.append(migrate(self.store, plan, no_writers=True).target)

    def assert_of_the_user(self, rows):
        assert rows
        for row in rows:
            np.testing.assert_allclose(row["vector"], self.items[row["id"]], rtol=1e-6)
            assert not any(name.startswith("hubness") for name in row)

    def hybrid_search(self, client):
        asked = [AnnSearchRequest([self.others[i]], "other", {}, 3) for i in (3, 4)]
        [hits] = client.hybrid_search(
            self.alias, asked, RRFRanker(), limit=3, output_fields=["vector"]
        )
        return hits

    def search(self, client, output_fields):
        [hits] = client.search(
            self.alias, [self.others[3]], anns_field="other", limit=3, output_fields=output_fields
        )
        return hits


def rows_of(hits):
    """Return hits as rows."""
    return [{"id": hit["id"], **hit["entity"]} for hit in hits]


READS = {
    "query": lambda w, c: c.query(w.alias, filter="id in [3, 4]", output_fields=["vector"]),
    "query of all fields": lambda w, c: c.query(w.alias, filter="id < 3", output_fields=["*"]),
    "get": lambda w, c: c.get(w.alias, [3, 4], output_fields=["vector"]),
    "search": lambda w, c: rows_of(w.search(c, ["vector"])),
    "search of all fields": lambda w, c: rows_of(w.search(c, ["*"])),
    "hybrid search": lambda w, c: rows_of(w.hybrid_search(c)),
}
"""Calls on the alias, with the collection and a client, that return rows with the corrected vector."""
