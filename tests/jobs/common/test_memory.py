"""Jobs hold nothing per row: a collection of more rows costs them time, not memory."""

import gc
import tracemalloc
from dataclasses import replace

import numpy as np

from milvus_hubness import NNN, MilvusStore, QueryBank, Recipe, migrate, plan_correction, refresh
from milvus_hubness.jobs.common.corrections import load_corrections
from milvus_hubness.jobs.migration.compare import Endpoint
from milvus_hubness.jobs.store.generations import Batch
from tests.support.aliases import aliased
from tests.support.galleries import plain_collection, vectors

DIM = 4
FEW, MANY = 20_500, 120_000
"""More than a page of keys and than the sample of a refresh; what threads hold by chance is little beside it."""
BYTES_PER_ROW = 20
"""A key in a list takes 40."""


class Wide(MilvusStore):
    """Its collection `name` and the copy seem to have `rows` rows: they are made when they are read, and writes of them
    are lost."""

    def __init__(self, client, name, rows):
        super().__init__(client)
        self.source, self.copy, self.wide_rows = name, f"{name}_hubness", rows
        self.ends = {}

    def is_wide(self, collection):
        return collection in (self.source, self.copy, f"{self.copy}_r2")

    def info(self, collection, *, counted=True, **options):
        info = super().info(collection, counted=False, **options)
        return replace(info, rows=self.count(info.name)) if counted else info

    def chunk_rows(self, source):
        """Chunks so small that one more of them, read ahead, does not show."""
        return 400

    def count(self, collection):
        return self.wide_rows if self.is_wide(collection) else super().count(collection)

    def scan_keys(self, collection, *, limit, after=None, partition=None, pending=""):
        if not self.is_wide(collection):
            return super().scan_keys(
                collection, limit=limit, after=after, partition=partition, pending=pending
            )
        start = 0 if after is None else after + 1
        return [] if pending else list(range(start, min(self.wide_rows, start + limit)))

    def scan(
        self, collection, field, *, after=None, upto=None, limit=None, partition=None, where=""
    ):
        if not self.is_wide(collection):
            return super().scan(collection, field, after=after, upto=upto, limit=limit, where=where)
        start = 0 if after is None else after + 1
        stop = min(self.wide_rows if upto is None else upto + 1, start + (limit or self.wide_rows))
        return self.get(collection, range(start, stop), field)

    def get(self, collection, keys, field, *, partition=None):
        if not self.is_wide(collection):
            return super().get(collection, keys, field, partition=partition)
        places = np.array(list(keys), np.float32)
        items = np.sin(np.outer(places, np.arange(1, DIM + 1)) + 1).astype(np.float32)
        batch = Batch(
            places.astype(int).tolist(), items, [{"id": int(key), "group": 0} for key in places]
        )
        if collection == self.source:
            return batch
        if collection not in self.ends:
            state = super().info(collection, counted=False).state
            self.ends[collection] = Endpoint(collection, state, load_corrections(self, state))
        return self.ends[collection].encode_rows(batch)

    def insert(self, collection, batch, field, *, partition=None):
        if not self.is_wide(collection):
            super().insert(collection, batch, field, partition=partition)

    def upsert(self, collection, batch, field, *, partition=None):
        if not self.is_wide(collection):
            super().upsert(collection, batch, field, partition=partition)

    def nearest(self, collection, field, query_vectors, k):
        return [[] for _ in query_vectors]


def peaks_of(lite, rows):
    """Bytes that a migration and a refresh of all rows hold at most, above those before."""
    client, name, rng = lite.client(), lite.name("wide"), np.random.default_rng(0)
    plain_collection(client, name, vectors(rng, 1, DIM), "IP")
    store, banks = Wide(client, name, rows), [QueryBank(vectors(rng, 60, DIM)) for _ in range(2)]

    def migration():
        done = migrate(
            store, plan_correction(store, name, Recipe(banks[0], estimator=NNN(4))), no_writers=True
        )
        assert (done.phase, done.rows) == ("verified", rows)

    def full_refresh():
        alias = aliased(store, store.copy)
        done = refresh(store, alias, banks[1], force=True, client_ttl=0.0)
        assert (done.action, done.scanned) == ("full", rows)
        assert done.written > 0.99 * rows

    peaks = {}
    for job in (migration, full_refresh):
        gc.collect()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        job()
        peaks[job.__name__] = tracemalloc.get_traced_memory()[1] - before
    return peaks


def test_more_rows_need_no_more_memory(lite):
    tracemalloc.start()
    try:
        peaks_of(lite, 100)  # What is imported, opened and cached once.
        few, many = peaks_of(lite, FEW), peaks_of(lite, MANY)
    finally:
        tracemalloc.stop()
    per_row = {job: (many[job] - few[job]) / (MANY - FEW) for job in few}
    assert max(per_row.values()) < BYTES_PER_ROW, (per_row, few, many)
