"""Clients that sample queries, killed as real processes: what they stored stays, and only unsent samples go."""

import contextlib
import itertools
import os
import random
import signal
import time

import numpy as np
import pytest

from milvus_hubness import HubnessClient, MilvusStore, connect
from milvus_hubness.jobs.common.samples import sampled_bank
from milvus_hubness.jobs.refresh.sampling import list_samplings, start_sampling
from milvus_hubness.milvus.client.query_samples import BUFFERED
from tests.chaos.processes import FORKS, be_quiet
from tests.support.galleries import plain_collection, vectors

DIM, ITEMS, IN_A_SEARCH, MOST_SEARCHES = 12, 80, 9, 5_000
PLACES = 10**7
"""So many that hardly two samples take the same."""
SHARED_PLACES = 2
"""Samples that may have taken the place of another one."""
PATIENCE = 60.0
NAMES = (f"killed_{os.getpid()}_{number}" for number in itertools.count())


def items():
    return vectors(np.random.default_rng(0), ITEMS, DIM)


def queries_of(seed):
    return vectors(np.random.default_rng(seed), MOST_SEARCHES * IN_A_SEARCH, DIM)


def search_on(uri, name, seed, reports):
    """Search until somebody kills this process, and report each answer with the counts of samples then."""
    be_quiet()
    queries = queries_of(seed)
    client = HubnessClient(uri)
    for start in range(0, len(queries), IN_A_SEARCH):
        found = client.search(name, queries[start : start + IN_A_SEARCH].tolist(), limit=1)
        counts = client.hubness_samples
        reports.send(([hits[0]["id"] for hits in found], counts.stored, counts.waiting))


class Searching:
    """A process that searches, and what it reported: its answers, and the counts of samples after each."""

    def __init__(self, uri, name, seed):
        self.queries = queries_of(seed)
        self.answers, self.stored, self.waiting = [], 0, 0
        self._reports, theirs = FORKS.Pipe(duplex=False)
        self.process = FORKS.Process(target=search_on, args=(uri, name, seed, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def read(self, seconds=0.0):
        """Read what was reported since, and wait for it."""
        with contextlib.suppress(EOFError):
            while self._reports.poll(seconds):
                ids, self.stored, self.waiting = self._reports.recv()
                self.answers += ids

    def search_until(self, stored):
        until = time.monotonic() + PATIENCE
        while self.stored < stored:
            assert time.monotonic() < until, (len(self.answers), self.stored, self.waiting)
            self.read(0.01)

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        assert self.process.exitcode == -signal.SIGKILL
        self.read(0.1)

    @property
    def sent(self):
        """The queries that were answered, and those of the search during which it was killed."""
        return [query.tobytes() for query in self.queries[: len(self.answers) + IN_A_SEARCH]]


def rows_of(client, name):
    """Return all samples as they are stored, by their place."""
    rows = client.query(
        f"{name}__query_samples_vector",
        filter="sample >= 0",
        output_fields=["*"],
        consistency_level="Strong",
    )
    return {row["place"]: row for row in rows}


@pytest.mark.parametrize("seed", range(6))
def test_killed_clients_lose_at_most_what_they_had_not_sent(uri, seed):
    rng = random.Random(seed)
    client, name = connect(uri), next(NAMES)
    plain_collection(client, name, items(), "IP")
    store = MilvusStore(client)
    begun = int(time.time())
    start_sampling(store, name, rate=1.0, size=PLACES)
    processes = [Searching(uri, name, 10 * seed + number) for number in range(1, 3)]
    try:
        for process in processes:
            process.search_until(rng.choice([1, 300]))
            # Anywhere in a write, or between two.
            time.sleep(rng.random())
            process.kill()

        rows = rows_of(client, name)
        sent = {query: process for process in processes for query in process.sent}
        by_process = dict.fromkeys(processes, 0)
        for row in rows.values():
            query = np.asarray(row["vector"], np.float32).tobytes()
            assert query in sent, "a row is no query that was sent"
            by_process[sent[query]] += 1
            assert set(row) == {"place", "sample", "queried_at", "vector"}
            assert row["place"] < PLACES
            assert begun <= row["queried_at"] <= time.time()

        for process, count in by_process.items():
            lost = len(process.answers) - count
            assert process.stored <= count + SHARED_PLACES, "what was stored is gone"
            assert lost <= process.waiting + SHARED_PLACES <= BUFFERED
            scores = process.queries[: len(process.answers)] @ items().T
            assert process.answers == scores.argmax(1).tolist()

        # The jobs read it, and other clients go on.
        assert len(sampled_bank(store, name)) == len(rows)
        fresh = queries_of(1_000)[:7]
        another = HubnessClient(uri)
        another.search(name, fresh.tolist(), limit=1)
        another.close()
        assert list_samplings(store, name)[0].samples == len(rows) + 7
    finally:
        for process in processes:
            process.process.kill()
        for collection in (name, f"{name}__query_samples_vector"):
            client.drop_collection(collection)
        client.close()
