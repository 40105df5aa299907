"""A Milvus collection corrected in an index of cells, and the hints that its rows must have."""

import numpy as np

from milvus_hubness import NNN, migrate, plan_correction
from milvus_hubness.jobs.common.corrections import load_correction
from tests.support.born import born
from tests.support.galleries import nnn, plain_collection, similarity, single_queries, vectors
from tests.support.recipes import as_plan

DIM, ITEMS, BANK, K, CELLS = 32, 160, 200, 6, 8

ALL = 128
"""The number of cells that Milvus Lite makes."""


class Divided:
    """A corrected collection with an index of CELLS cells, made by a client or by a migration with `options`."""

    def __init__(
        self,
        backend,
        metric="COSINE",
        *,
        index_type="IVF_FLAT",
        params=None,
        is_migrated=False,
        **options,
    ):
        rng = np.random.default_rng(17)
        self.backend, self.store, self.metric = backend, backend.store(), metric
        self.items = vectors(rng, ITEMS, DIM)
        self.bank, self.other = vectors(rng, BANK, DIM), vectors(rng, BANK, DIM)
        self.new, self.queries = vectors(rng, 3, DIM), vectors(rng, 4, DIM)
        bank, index = single_queries(self.bank), {"index_type": index_type}
        index["params"] = params or {"nlist": CELLS}
        if is_migrated or options:
            source = backend.name("divided")
            plain_collection(backend.client(), source, self.items, metric, **index)
            plan = plan_correction(self.store, source, **as_plan(bank, estimator=NNN(K), **options))
            self.name = migrate(self.store, plan, no_writers=True).target
        else:
            self.name = born(backend, self.items, bank, metric, estimator=NNN(K), **index)
        self.client = backend.hubness_client()

    @property
    def state(self):
        return self.store.info(self.name).state

    def stored(self, keys):
        """The rows (n, width) as the database has them."""
        found = self.store.get(self.name, list(keys), "vector")
        return found.vectors[np.argsort(found.keys)]

    def cells(self, keys):
        """(n, c)"""
        return self.stored(keys)[:, self.state.layout.locality_hint_columns]

    def assert_filled(self, keys, vectors):
        """As the bank has it."""
        state = self.state
        wanted = load_correction(self.store, state, state.profile).locality_hints(vectors)
        assert wanted.any(axis=1).all()
        np.testing.assert_allclose(self.cells(keys), wanted, atol=1e-5)

    def assert_found(self, bank=None, items=None, share=0.75, **options):
        """All that is probed is all there is."""
        items = self.items if items is None else items
        bank = self.bank if bank is None else bank
        wanted = similarity(self.queries, items, self.metric) - nnn(
            bank, items, self.metric, K, share
        )
        found = self.client.search(
            self.name,
            data=list(self.queries),
            limit=10,
            search_params={"params": {"nprobe": ALL, "ef": ALL}},
            **options,
        )
        assert [hits.ids for hits in found] == np.argsort(-wanted, axis=1)[:, :10].tolist()

    def insert(self, **options):
        """Three more rows. Returns their keys."""
        keys = range(ITEMS, ITEMS + len(self.new))
        rows = [
            {"id": key, "vector": row, "group": 0} for key, row in zip(keys, self.new, strict=True)
        ]
        self.client.insert(self.name, rows, **options)
        return keys

    def assert_writes_are_filled(self):
        """Inserted and upserted rows have their hints, and are found by them."""
        keys = self.insert()
        self.assert_filled(keys, self.new)
        self.client.upsert(self.name, [{"id": 5, "vector": self.new[0], "group": 0}])
        self.assert_filled([5], self.new[:1])

        items = np.vstack([self.items, self.new])
        items[5] = self.new[0]
        self.assert_found(items=items)
