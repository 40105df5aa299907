"""One client shared by many threads: rows written meanwhile, and biases renewed under its searches."""

import threading

import numpy as np
import pytest

from milvus_hubness import (
    CSLS,
    NNN,
    HubnessClient,
    QueryBank,
    Recipe,
    migrate,
    plan_correction,
    refresh,
)
from tests.support.aliases import aliased
from tests.support.galleries import all_keys, nnn, plain_collection, similarity, vectors

DIM, ITEMS, THREADS, OWN = 16, 400, 8, 1_000
FEWEST, PATIENCE = 50, 120
"""Searches, and the seconds in which even a busy machine answers so many."""


class Shared:
    def __init__(self, backend):
        rng = np.random.default_rng(61)
        self.backend = backend
        self.items, self.bank = vectors(rng, ITEMS, DIM), vectors(rng, 50, DIM)
        source = backend.name("threads")
        plain_collection(backend.client(), source, self.items, "IP")
        self.store = backend.store()
        plan = plan_correction(self.store, source, Recipe(QueryBank(self.bank), estimator=NNN(8)))
        self.name = aliased(self.store, migrate(self.store, plan).target)
        self.sets = [
            nnn(self.bank, self.items, "IP", 8, 0.75),
            nnn(self.bank, self.items, "IP", 4, 0.5),
        ]
        self.client = backend.client(HubnessClient, state_ttl=0.2)
        self.failures, self.responses, self.stop = [], [0, 0], threading.Event()

    def run(self, work):
        def guarded(*args):
            try:
                work(*args)
            except BaseException as error:
                self.failures.append(error)
                self.stop.set()

        return guarded

    def search(self, number):
        """Every response must hold the biases of one set, less their mean, and rank by them."""
        rng = np.random.default_rng(number)
        while not self.stop.is_set():
            queries = vectors(rng, 3, DIM)
            found = self.client.search(
                self.name, data=list(queries), limit=12, filter=f"id < {ITEMS}", with_raw_score=True
            )
            held = []
            for hits, raw in zip(found, similarity(queries, self.items, "IP"), strict=True):
                keys = [hit["id"] for hit in hits]
                np.testing.assert_allclose([hit["raw_score"] for hit in hits], raw[keys], atol=2e-5)
                subtracted = raw[keys] - np.array(hits.distances)
                held.append([np.ptp(subtracted - biases[keys]) < 4e-5 for biases in self.sets])
                assert hits.distances == sorted(hits.distances, reverse=True)
            whole = np.all(held, axis=0)
            assert whole.any(), f"a response mixed two sets of biases: {held}"
            self.responses[int(whole.argmax())] += 1

    def write(self, number, rows):
        """Inserts, updates and deletes of keys that no other thread has."""
        rng = np.random.default_rng(100 + number)
        first = OWN * (number + 1)
        while not self.stop.is_set():
            keys = (first + rng.choice(60, 5, replace=False)).tolist()
            new = dict(zip(keys, vectors(rng, 5, DIM), strict=True))
            self.client.upsert(
                self.name, [{"id": key, "vector": row, "group": number} for key, row in new.items()]
            )
            rows |= new
            if rng.random() < 0.4:
                gone = rng.choice(list(rows), 2).tolist()
                self.client.delete(self.name, ids=gone)
                for key in gone:
                    rows.pop(key, None)

    def start(self, *works):
        threads = [threading.Thread(target=self.run(work), args=args) for work, *args in works]
        for thread in threads:
            thread.start()
        return threads

    def finish(self, threads):
        self.stop.set()
        for thread in threads:
            thread.join(60)
        assert not self.failures, self.failures[0]


@pytest.fixture
def shared(backend):
    if backend.is_lite:
        pytest.skip("Milvus Lite serves one request at a time")
    return Shared(backend)


@pytest.mark.parametrize("seconds", [2, pytest.param(30, marks=pytest.mark.long)])
def test_eight_threads_search_and_write(shared, seconds):
    written = [{} for _ in range(THREADS // 2)]
    threads = shared.start(
        *((shared.search, i) for i in range(THREADS // 2)),
        *((shared.write, i, rows) for i, rows in enumerate(written)),
    )
    shared.stop.wait(seconds)
    for _ in range(PATIENCE):
        if shared.responses[0] > FEWEST or shared.stop.wait(1.0):
            break
    shared.finish(threads)
    assert shared.responses[0] > FEWEST
    wanted = {key: row for rows in written for key, row in rows.items()} | dict(
        enumerate(shared.items)
    )
    keys = sorted(wanted)
    assert len(keys) > ITEMS
    assert all_keys(shared.store, shared.name) == keys
    read = shared.client.get(shared.name, keys, output_fields=["vector", "hubness_bias"])
    stored = {row["id"]: row for row in read}
    vectors_read = np.array([stored[key]["vector"] for key in keys], np.float32)
    np.testing.assert_array_equal(vectors_read, np.array([wanted[key] for key in keys], np.float32))
    mean_bias = shared.store.info(shared.name).state.profile.mean_bias
    biases = nnn(shared.bank, vectors_read, "IP", 8, 0.75) - mean_bias
    np.testing.assert_allclose([stored[key]["hubness_bias"] for key in keys], biases, atol=2e-5)

    shared.stop.clear()
    threads = shared.start(*((shared.search, i) for i in range(THREADS)))
    for estimator in (CSLS(4), NNN(8), CSLS(4)):
        refresh(shared.store, shared.name, Recipe(estimator=estimator))
        shared.stop.wait(1.0)
    shared.finish(threads)
    assert min(shared.responses) > 0, "no search saw the other set of biases"
