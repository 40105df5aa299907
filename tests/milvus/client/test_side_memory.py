"""What a client remembers of a side collection, and for how long."""

import threading

import numpy as np
import pytest
from pymilvus import AsyncMilvusClient, MilvusClient
from pymilvus.exceptions import MilvusException

from milvus_hubness import CSLS, AsyncHubnessClient, HubnessClient, Recipe, refresh
from milvus_hubness.milvus.client import side_memory
from milvus_hubness.milvus.client.side_memory import SideBiases, SideMemory
from tests.support.galleries import nnn
from tests.support.reranked import ALPHA, Enabled, K
from tests.support.times import Time

TTL = 5.0
SIDE = SideBiases("goods__bias_a", 0, 1)
AN_HOUR = 3_600.0


class Side:
    """A side collection in a dictionary, and a memory of it."""

    def __init__(self, **options):
        self.memory = SideMemory(TTL, **options)
        self.rows = {}
        self.asked = []

    def reading(self, keys, of=SIDE):
        """Begin to read; an answer is on its way at each `next`."""

        def ask(missing):
            self.asked.append(missing)
            answer = {key: self.rows[key] for key in missing if key in self.rows}
            yield
            return answer

        return self.memory.read(of, keys, ask)

    def writing(self, biases, error=None):
        def send():
            yield
            for key, bias in biases.items():
                if bias is None:
                    self.rows.pop(key, None)
                else:
                    self.rows[key] = bias
            if error is not None:
                raise error

        return self.memory.write(SIDE, biases, send())

    def read(self, keys, of=SIDE):
        return finish(self.reading(keys, of))

    def write(self, biases):
        return finish(self.writing(biases))


def finish(operation):
    while True:
        try:
            next(operation)
        except StopIteration as end:
            return end.value


@pytest.fixture
def time(monkeypatch):
    time = Time()
    monkeypatch.setattr(side_memory.time, "monotonic", time.clock)
    return time


@pytest.fixture
def side(time):
    side = Side()
    side.rows = {1: 0.5, 2: -0.25, "three": 0.125}
    return side


def test_only_keys_that_were_not_seen_are_read_and_those_in_one_request(side):
    assert side.read([1, "three"]) == {1: 0.5, "three": 0.125}
    assert side.read([2, 1, 9, "three"]) == {2: -0.25, 1: 0.5, 9: 0.0, "three": 0.125}
    assert side.asked == [[1, "three"], [2, 9]]


def test_a_key_without_a_row_is_remembered_too(side):
    assert [side.read([9]), side.read([9])] == [{9: 0.0}] * 2
    assert side.asked == [[9]]


def test_a_bias_is_used_for_the_ttl_after_its_request_whenever_it_was_used(side, time):
    reading = side.reading([1])
    next(reading)
    time.sleep(2)  # A slow answer is as old as its question.
    finish(reading)
    side.rows[1] = 7.0

    time.sleep(2.9)
    assert side.read([1]) == {1: 0.5}
    time.sleep(0.1)
    assert side.read([1]) == {1: 7.0}


def test_the_keys_that_were_not_used_for_longest_go_first(time):
    side = Side(max_keys=3)
    for key in (1, 2, 3):
        side.read([key])
    side.read([1])
    side.read([4])
    assert len(side.memory) == 3
    side.asked.clear()
    side.read([1, 3, 4])
    assert not side.asked
    side.read([2])
    assert side.asked == [[2]]


def test_collections_share_the_memory_and_the_one_not_searched_for_longest_goes_first(time):
    side = Side(max_keys=3)
    other = SIDE._replace(collection="books__bias_a")
    side.read([1, 2])
    side.read([1, 2], other)
    assert len(side.memory) == 3
    side.asked.clear()
    side.read([1, 2], other)
    assert not side.asked


def test_what_is_too_old_takes_no_memory(side, time):
    side.read([1, 2])
    time.sleep(TTL)
    side.read(["three"])
    assert len(side.memory) == 1


@pytest.mark.parametrize("change", [{"slot": 1}, {"number": 2}])
def test_other_biases_of_the_same_collection_are_read_anew(side, change):
    side.read([1])
    side.rows[1] = 7.0
    assert side.read([1], SIDE._replace(**change)) == {1: 7.0}


def test_own_writes_and_deletions_are_known_at_once(side):
    side.read([1, 2])
    side.write({1: 7.0, 2: None, 5: 3.0})
    side.asked.clear()
    assert side.read([1, 2, 5]) == {1: 7.0, 2: 0.0, 5: 3.0}
    assert side.asked == [[2]]


def test_a_write_that_failed_is_read_again(side):
    side.read([1])
    with pytest.raises(MilvusException):
        finish(side.writing({1: 7.0}, MilvusException(message="no answer")))
    assert side.read([1]) == {1: 7.0}


def test_an_answer_that_a_write_overtook_is_not_kept(side):
    reading = side.reading([1, 2])
    next(reading)
    side.write({1: 7.0})
    assert finish(reading) == {1: 0.5, 2: -0.25}
    assert side.read([1, 2]) == {1: 7.0, 2: -0.25}


def test_of_two_writes_at_once_nobody_knows_which_came_last(side):
    slow = side.writing({1: 7.0, 2: 8.0})
    next(slow)
    side.write({1: 9.0})
    finish(slow)
    side.asked.clear()
    assert side.read([1, 2]) == {1: 7.0, 2: 8.0}
    assert side.asked == [[1]]


def test_threads_share_it():
    side = Side(max_keys=50)
    side.rows = {key: float(key) for key in range(100)}
    wrong = []

    def search(seed):
        rng = np.random.default_rng(seed)
        for _ in range(300):
            keys = rng.choice(100, 10, replace=False).tolist()
            side.write({keys[0]: float(keys[0])})
            if side.read(keys) != {key: float(key) for key in keys}:
                wrong.append(keys)

    threads = [threading.Thread(target=search, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(side.memory) <= 50


# -- on a database ---------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """The numbers of keys that were read from side collections."""
    asked = []
    query = MilvusClient.query

    def counted(client, collection_name, *args, **options):
        rows = query(client, collection_name, *args, **options)
        if "__bias_" in collection_name:
            asked.append(len(rows))
        return rows

    query_async = AsyncMilvusClient.query

    async def counted_async(client, collection_name, *args, **options):
        rows = await query_async(client, collection_name, *args, **options)
        if "__bias_" in collection_name:
            asked.append(len(rows))
        return rows

    monkeypatch.setattr(MilvusClient, "query", counted)
    monkeypatch.setattr(AsyncMilvusClient, "query", counted_async)
    return asked


def test_a_repeated_search_needs_no_second_request_and_is_as_exact(lite, asked):
    enabled = Enabled(lite, "IP")
    client = enabled.new_client(state_ttl=AN_HOUR)
    asked.clear()
    for query in enabled.queries:
        client.search(enabled.name, [query])
    first = len(asked)
    assert sum(asked) <= len(enabled.items)
    enabled.assert_found(client.search(enabled.name, data=list(enabled.queries)))
    assert len(asked) == first


def test_what_another_client_wrote_is_seen_after_the_ttl_and_what_it_wrote_itself_at_once(lite):
    enabled = Enabled(lite, "IP")
    reader = enabled.new_client(state_ttl=AN_HOUR)
    reader.search(enabled.name, data=list(enabled.queries))

    far = 3 * enabled.queries[0]
    new = nnn(enabled.bank, far[None], "IP", K, ALPHA)[0]
    enabled.client.upsert(enabled.name, [{"id": 7, "vector": far, "group": 1}])
    [seen] = reader.search(enabled.name, data=[enabled.queries[0]], limit=1)
    old = float(enabled.queries[0] @ far) - (enabled.biases[7] - enabled.state.profile.mean_bias)
    assert seen[0]["id"] == 7
    assert seen[0]["distance"] == pytest.approx(old, abs=1e-4)

    enabled.items[7], enabled.biases[7] = far, new
    enabled.raw = enabled.queries @ enabled.items.T
    enabled.assert_found(enabled.client.search(enabled.name, data=list(enabled.queries)))
    fresh = enabled.new_client(state_ttl=0.0)
    enabled.assert_found(fresh.search(enabled.name, data=list(enabled.queries)))


def test_an_insert_that_has_a_key_twice_gets_one_bias(lite, monkeypatch):
    """Newer Milvus refuses an upsert that has a key twice, after the insert that it took."""
    enabled = Enabled(lite, "IP")
    upsert = MilvusClient.upsert

    def refusing(client, name, data, *args, **options):
        if len({row["id"] for row in data}) < len(data):
            raise MilvusException(1_100, "duplicate primary keys are not allowed in the same batch")
        return upsert(client, name, data, *args, **options)

    monkeypatch.setattr(MilvusClient, "upsert", refusing)
    rows = [{"id": 900, "vector": vector, "group": 1} for vector in 3 * enabled.queries[:2]]
    enabled.client.insert(enabled.name, rows)
    side = enabled.state.codec.sides[enabled.state.profile.slot]
    assert len(enabled.plain.query(side, filter="id == 900", consistency_level="Strong")) == 1


def test_a_search_after_a_refresh_reads_its_biases(lite):
    enabled = Enabled(lite, "IP")
    client = enabled.new_client(state_ttl=AN_HOUR)
    client.search(enabled.name, data=list(enabled.queries))
    refresh(enabled.store, enabled.name, Recipe(estimator=CSLS(4)))
    # The reading of the state makes it known, not the TTL.
    client.hubness_state(enabled.name)
    enabled.state = enabled.store.info(enabled.name).state
    enabled.biases = nnn(enabled.bank, enabled.items, "IP", 4, 0.5)
    enabled.assert_found(client.search(enabled.name, data=list(enabled.queries)))


async def test_tasks_and_clients_share_nothing_but_the_database(lite, asked):
    enabled = Enabled(lite, "IP")
    client = AsyncHubnessClient(lite.uri, state_ttl=AN_HOUR)
    asked.clear()
    try:
        for _ in range(2):
            enabled.assert_found(await client.search(enabled.name, data=list(enabled.queries)))
    finally:
        await client.close()
    other = lite.client(HubnessClient)
    enabled.assert_found(other.search(enabled.name, data=list(enabled.queries)))
    assert len(asked) == 2
