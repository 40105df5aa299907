"""Sampling on the side: as often as asked, bounded, and never in a search's way."""

import math
import threading
import time

import numpy as np
import pytest
from scipy.stats import binomtest

from milvus_hubness.correction.codec.arrays import encode
from milvus_hubness.jobs.store.ownership import CollectionId
from milvus_hubness.jobs.store.records import Sampling, Samplings
from milvus_hubness.milvus.client.query_samples import BATCH, BUFFERED, Sampled, Sampler, Target
from milvus_hubness.milvus.client.state_cache import CachedState

DIM = 4
OWNER = CollectionId(name="c", identity="7")
AT_ONCE = np.ones((BATCH, DIM), np.float32)
"""As many queries as are written without waiting for more."""


def target(rate=1.0, samples_collection="t", dtype="float32", size=10_000):
    sampling = Sampling(
        field="v",
        samples_collection=samples_collection,
        rate=rate,
        size=size,
        dim=DIM,
        dtype=dtype,
    )
    return Target.of(sampling, OWNER)


class QuerySamples:
    """What was written; `broken` and `held` make writing fail, or wait."""

    def __init__(self):
        self.samples = []
        self.calls = 0
        self.broken = False
        self.held = threading.Event()
        self.held.set()

    def write(self, target, samples):
        self.calls += 1
        self.held.wait()
        if self.broken:
            raise ConnectionError("gone")
        assert target.owner == OWNER
        self.samples += [(target.helper.collection, sample) for sample in samples]

    @property
    def vectors(self):
        return np.array([sample.vector for _, sample in self.samples]).reshape(-1, DIM)


@pytest.fixture
def samples_collection():
    one = QuerySamples()
    yield one
    one.held.set()


@pytest.mark.parametrize("batch", [1, 7, 400])
def test_queries_are_sampled_at_the_rate_whatever_the_batch(samples_collection, batch):
    sampler = Sampler(samples_collection.write)
    queries = np.random.default_rng(0).normal(size=(5_600, DIM)).astype(np.float32)
    for start in range(0, len(queries), batch):
        sampler.offer(target(0.1), queries[start : start + batch])
    sampler.close()
    assert binomtest(len(samples_collection.samples), len(queries), 0.1).pvalue > 1e-4
    known = {row.tobytes() for row in queries}
    assert all(row.tobytes() in known for row in samples_collection.vectors)
    assert sampler.counts.stored == len(samples_collection.samples)
    numbers = [int((queries == row).all(1).argmax()) for row in samples_collection.vectors]
    assert np.histogram(numbers, 3, (0, len(queries)))[0].min() > 0.2 * len(numbers)


def test_a_sample_is_a_vector_and_a_time(samples_collection):
    sampler = Sampler(samples_collection.write)
    asked = [1.0, 2.0, 3.0, 4.0]
    sampler.offer(target(size=3), [asked])
    asked[0] = 9.0
    sampler.close()
    [(name, sample)] = samples_collection.samples
    assert name == "t"
    assert sample.vector.tolist() == [1, 2, 3, 4]
    assert sample.place in range(3)
    assert set(vars(sample)) == {"place", "number", "at", "vector"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_sampled_as_numbers(samples_collection, dtype):
    sampler = Sampler(samples_collection.write)
    sampler.offer(target(dtype=dtype), encode(np.array([[0.5, 1, 2, -4]], np.float32), dtype))
    sampler.close()
    assert samples_collection.vectors.tolist() == [[0.5, 1, 2, -4]]


def test_what_no_bank_can_hold_is_not_sampled(samples_collection):
    sampler = Sampler(samples_collection.write)
    sampler.offer(
        target(),
        [[0.0] * DIM, [math.nan] + [1.0] * 3, [1.0] * 5, [1e39, 1, 1, 1]],
    )
    cached = CachedState(OWNER, samplings=Samplings(fields=(target().sampling,)))
    sampler.searched(cached, lambda: ("v", ["text"]))
    sampler.close()
    assert samples_collection.samples == []
    assert sampler.counts.dropped == 1


def test_a_full_buffer_drops_and_does_not_wait(samples_collection):
    samples_collection.held.clear()
    sampler = Sampler(samples_collection.write)
    queries = np.ones((3 * BUFFERED, DIM), np.float32)
    sampler.offer(target(), queries)
    assert sampler.counts.waiting <= BUFFERED
    assert sampler.counts.dropped >= BUFFERED
    samples_collection.held.set()
    sampler.close(30)
    counts = sampler.counts
    assert counts.stored == len(samples_collection.samples) == len(queries) - counts.dropped


def test_samples_whose_write_is_not_answered_are_waiting(samples_collection):
    sampler = Sampler(samples_collection.write)
    samples_collection.held.clear()
    # The third one is no query that a bank can hold.
    queries = AT_ONCE.copy()
    queries[2] = 0.0
    sampler.offer(target(), queries)
    while not samples_collection.calls:
        time.sleep(0.01)
    assert sampler.counts == Sampled(stored=0, dropped=0, waiting=BATCH - 1)

    samples_collection.held.set()
    sampler.close()
    assert sampler.counts == Sampled(stored=BATCH - 1, dropped=0, waiting=0)


def test_a_collection_that_takes_no_samples_is_left_alone_for_a_while(samples_collection):
    samples_collection.broken = True
    sampler = Sampler(samples_collection.write)
    sampler.offer(target(), AT_ONCE)
    while not sampler.counts.dropped:
        pass
    assert samples_collection.calls == 2
    samples_collection.broken = False
    sampler.offer(target(), AT_ONCE)
    sampler.offer(target(samples_collection="another"), AT_ONCE)
    sampler.close(30)
    assert [name for name, _ in samples_collection.samples] == ["another"] * BATCH
    assert (sampler.counts.stored, sampler.counts.dropped) == (BATCH, 2 * BATCH)


def test_samples_of_one_database_are_not_written_to_another(samples_collection):
    samples_collection.held.clear()
    sampler = Sampler(samples_collection.write)
    sampler.offer(target(), AT_ONCE)
    while not samples_collection.calls:
        pass
    sampler.offer(target(), [[2.0] * DIM])
    leaving = threading.Thread(target=sampler.discard, args=(30,), daemon=True)
    leaving.start()
    while not sampler.counts.dropped:
        pass
    assert leaving.is_alive()
    samples_collection.held.set()
    leaving.join(30)
    assert not leaving.is_alive()
    assert samples_collection.vectors.tolist() == [[1] * DIM] * BATCH
    assert sampler.counts == Sampled(stored=BATCH, dropped=1, waiting=0)
    sampler.close(30)


def test_closing_does_not_wait_for_a_server_that_hangs(samples_collection):
    samples_collection.held.clear()
    sampler = Sampler(samples_collection.write)
    sampler.offer(target(), np.ones((1, DIM), np.float32))
    closing = threading.Thread(target=sampler.close, args=(0.05,), daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert samples_collection.samples == []
    sampler.offer(target(), np.ones((1, DIM), np.float32))
    samples_collection.held.set()
    sampler.close(30)
    assert len(samples_collection.samples) == 1


def test_the_thread_ends_when_there_is_nothing_to_write_and_begins_again(samples_collection):
    others, sampler = set(threading.enumerate()), Sampler(samples_collection.write)
    for _ in range(2):
        samples_collection.held.clear()
        sampler.offer(target(), AT_ONCE)
        [writing] = set(threading.enumerate()) - others
        samples_collection.held.set()
        writing.join(30)
        assert not writing.is_alive()
    assert len(samples_collection.samples) == 2 * BATCH
