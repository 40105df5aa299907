"""Reading keys comes to an end while rows of greater ones are written, and misses none."""

import uuid
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milvus_hubness import MilvusStore
from milvus_hubness.jobs.common.progress import absent, key_chunks, key_pages
from milvus_hubness.jobs.migration.survey import evenly_spread, survey
from milvus_hubness.jobs.store.records import CollectionInfo
from qdrant_hubness import QdrantStore

WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
UUIDS = st.integers(0, 2**128 - 2).map(lambda number: str(uuid.UUID(int=number)))
KEYS = {
    "Milvus's numbers": (MilvusStore, st.integers(-(2**63), 2**63 - 2)),
    "Milvus's words": (MilvusStore, WORDS),
    "Qdrant's numbers": (QdrantStore, st.integers(0, 2**64 - 2)),
    "Qdrant's UUIDs": (QdrantStore, UUIDS),
}


@pytest.mark.parametrize("kind", KEYS)
@given(data=st.data())
def test_steps_above_a_key_go_up_until_none_is_greater(kind, data):
    store, drawn = KEYS[kind]
    key = data.draw(drawn)
    steps = [store.above(None, key, step) for step in range(140)]
    reached = steps[: steps.index(None)]
    assert reached[0] == key
    assert reached == sorted(reached)
    assert all(type(each) is type(key) for each in reached)
    if isinstance(key, int):
        assert [above - key for above in reached[:9]] == [2**i - 1 for i in range(9)][
            : len(reached)
        ]


class Pages:
    """A store of some keys that gives pages of odd lengths, as Milvus 2.3 does, and another row each time."""

    above = MilvusStore.above

    def __init__(self, keys, following):
        self.keys, self.following, self.asked = sorted(keys), following, 0

    def count(self, collection):
        return len(self.keys)

    def scan_keys(self, collection, *, after, limit, partition=None, pending=None):
        self.asked += 1
        assert self.asked < 2_000, "the keys are read for ever"
        self.keys.append(self.following(self.keys[-1]))
        left = [key for key in self.keys if after is None or key > after]
        return left[: min(limit, 1 + self.asked % 3)]


@pytest.mark.parametrize(
    ("keys", "following"),
    [
        (range(50), lambda key: key + 1),
        ([5], lambda key: key + 1_000),
        ([f"01hz{i:06}" for i in range(50)], lambda key: f"01hz{int(key[4:]) + 1:06}"),
    ],
    ids=["numbers", "jumps", "words"],
)
@pytest.mark.parametrize("rows", [0, 20, 60], ids=["unknown", "too few", "some more"])
def test_all_that_was_there_is_read_and_the_reading_ends(keys, following, rows):
    there = set(keys)
    found = [key for page in key_pages(Pages(keys, following), "c", rows=rows) for key in page]
    assert there <= set(found)
    assert found == sorted(set(found))


class Still(Pages):
    """The same store, with no row written meanwhile."""

    def __init__(self, keys, partitions=(None,)):
        super().__init__(keys, None)
        self.info = CollectionInfo(
            "c", "id", {}, len(self.keys), partitions, (), {}, None, False, {}
        )

    def scan_keys(self, collection, *, after=None, limit, partition=None, pending=""):
        self.asked += 1
        left = [key for key in self.keys if after is None or key > after]
        return left[: min(limit, 1 + self.asked % 3)]

    def chunk_rows(self, info):
        return 4


SOME = st.sets(st.integers(0, 60), max_size=40)


@given(keys=SOME, others=SOME)
def test_the_keys_that_another_collection_lacks(keys, others):
    lacking = [
        key for page in absent(key_pages(Still(keys), "c"), Still(others), "other") for key in page
    ]
    assert lacking == sorted(keys - others)


@given(keys=SOME, after=st.integers(-1, 60))
def test_a_reader_goes_on_after_a_key(keys, after):
    store = Still(keys)
    found = [key for page in key_pages(store, "c", after=after, rows=len(keys)) for key in page]
    assert found == sorted(key for key in keys if key > after)


def test_chunks_are_full_whatever_the_pages_are_and_each_is_reported():
    store, told = Still(range(11), partitions=("a", "b")), []
    parts = list(
        key_chunks(store, store.info, "reading", lambda *facts: told.append(facts), total=20)
    )
    assert parts == [
        (name, part) for name in "ab" for part in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10])
    ]
    assert told == [("reading", done, max(20, done)) for done in (0, 4, 8, 11, 15, 19, 22)]
    few = [
        part for _, part in key_chunks(store, store.info, "writing", lambda *facts: None, most=3)
    ]
    assert few == 2 * [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]


def test_a_survey_of_any_size_has_about_four_thousand_chunks():
    store = Still([])
    store.info = replace(store.info, rows=40_000)
    store.scan_keys = lambda name, *, limit, after=None, **options: list(
        range(
            0 if after is None else after + 1,
            min(40_000, (0 if after is None else after + 1) + limit),
        )
    )
    chunks = survey(store, store.info, 3).chunks
    assert {chunk.rows for chunk in chunks[:-1]} == {12}
    assert [chunk.after for chunk in chunks] == [None, *(chunk.upto for chunk in chunks[:-1])]
    assert (chunks[-1].upto, sum(chunk.rows for chunk in chunks)) == (39_999, 40_000)


@given(total=st.integers(1, 20_000), sampled=st.integers(1, 5_000), size=st.integers(1, 3_000))
def test_a_sample_is_spread_evenly_whatever_the_pages_are(total, sampled, size):
    starts = range(0, total, size)
    places = [
        start + place
        for start in starts
        for place in evenly_spread(start, min(size, total - start), total, sampled)
    ]
    assert len(places) == min(total, sampled)
    gaps = np.diff(places)
    assert not len(gaps) or gaps.max() - gaps.min() <= 1
