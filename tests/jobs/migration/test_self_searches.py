"""Rows searched for by their own vectors, in two places and while others write: the last check of a verification."""

import itertools

import numpy as np
import pytest

from milvus_hubness import NNN, QueryBank, Recipe, VerificationFailed, migrate, plan_correction
from milvus_hubness.jobs.migration.catch_up import (
    SEARCHED,
    find_themselves,
    misses_too_many,
    searched_rows,
)
from milvus_hubness.milvus.store.milvus_store import MilvusStore
from tests.support.galleries import plain_collection, vectors

ROWS, DIM = 60, 12


def copied(lite, name, items, bank):
    plain_collection(lite.client(), name, items, "IP")
    lite.made.append(f"{name}_hubness")
    plan = plan_correction(lite.store(), name, Recipe(bank, estimator=NNN(4), verdict="warn"))
    return lambda: migrate(lite.store(), plan, client_ttl=0.0)


@pytest.fixture
def world(lite):
    """(name, items, job) of a collection whose rows are mostly among their own ten best."""
    rng = np.random.default_rng(5)
    name, items = lite.name(), vectors(rng, ROWS, DIM)
    return name, items, copied(lite, name, items, QueryBank(vectors(rng, 40, DIM)))


def watched(monkeypatch, change):
    """Let `change` replace the answer of each search of the check; it gets its number and answer."""
    search, number = MilvusStore.nearest, itertools.count()

    def nearest(store, collection, field, query_vectors, k):
        found = search(store, collection, field, query_vectors, k)
        return change(next(number), found) if k == SEARCHED else found

    monkeypatch.setattr(MilvusStore, "nearest", nearest)


def test_rows_written_between_the_searches_are_no_misses(world, lite, monkeypatch):
    """Under IP, long rows push others out of their own ten best, in both places alike."""
    name, items, job = world
    writer = lite.hubness_client()
    written = []

    def then_write(number, found):
        keys = range(1_000 + 10 * number, 1_010 + 10 * number)
        rows = [{"id": key, "vector": 9 * items[key % ROWS], "group": 1} for key in keys]
        writer.insert(name, rows)
        written.extend(keys)
        return found

    watched(monkeypatch, then_write)
    job()
    assert len(written) >= 20


def test_searches_that_miss_rows_in_the_second_place_alone_are_reported(world, monkeypatch):
    watched(
        monkeypatch, lambda number, found: [best[20:] for best in found] if number == 1 else found
    )
    with pytest.raises(
        VerificationFailed, match="miss rows: of 10 rows searched for by their own vectors"
    ):
        world[-1]()


@pytest.mark.parametrize(
    ("rows", "searched", "hidden", "reported"),
    [(60, 10, 0.5, 0.98), (100, 10, 0.25, 0.75), (1_000, 100, 0.15, 0.9), (10**6, 256, 0.15, 0.99)],
)
def test_enough_rows_are_searched_to_report_a_copy_that_hides_many(
    rows, searched, hidden, reported
):
    assert searched_rows(rows) == searched
    found = np.random.default_rng(0).binomial(searched, 1 - hidden, 20_000)
    share = np.mean([misses_too_many(searched, searched, number) for number in found])
    assert share == pytest.approx(reported, abs=0.02)
    # A tenth is a difference that two graphs over the same rows may have.
    assert not misses_too_many(searched, searched, searched - max(1, searched // 10))


def test_a_row_counts_if_the_first_place_answers_alike_before_and_after():
    first = iter([[[1], [2], [9], [4]], [[1], [9], [3], [4]]])
    steady, in_first, in_second = find_themselves(
        [1, 2, 3, 4], lambda k: next(first), lambda k: [[1], [2], [3], [*range(10, 20), 4]]
    )
    assert steady.tolist() == [True, False, False, True]
    assert in_first[steady].tolist() == [True, True]
    assert in_second[steady].tolist() == [True, False]
