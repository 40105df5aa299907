"""Reciprocity against a float64 oracle that holds all scores, on untidy queries and galleries."""

from __future__ import annotations

import numpy as np
import pytest

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.near_copies import with_groups
from milvus_hubness.quality.reciprocity import reciprocities
from tests.support.diagnoses import diagnose
from tests.support.galleries import hubby_gallery, single_queries


def oracle(queries, items, biases, strength, groups=None, lengths=None):
    """The share of groups, from the whole matrix of scores in float64; all equal scores are first."""
    queries, items = np.asarray(queries, np.float64), np.asarray(items, np.float64)
    scores = queries @ items.T
    groups = np.arange(len(queries)) if groups is None else np.asarray(groups)
    corrected = scores - np.outer(np.broadcast_to(strength, len(queries)), biases)
    compared = scores if lengths is None else scores / np.asarray(lengths)[:, None]
    chosen = corrected >= corrected.max(1, keepdims=True) - 1e-6
    choosing = compared >= compared.max(0) - 1e-6
    shares = np.zeros(groups.max() + 1)
    for query, group in enumerate(groups):
        by_group = choosing[groups == group].any(0)
        shares[group] += (chosen[query] & by_group).any() / (groups == group).sum()
    return shares.mean()


@pytest.fixture(scope="module")
def hubby():
    items, queries, answers = hubby_gallery(rows=300, queries=900)
    # Queries for the same item are near copies.
    _, first = np.unique(answers, return_index=True)
    biases = np.sort(np.delete(queries, first, axis=0) @ items.T, 0)[-8:].mean(0)
    return queries[first[:200]], items, biases - biases.mean()


def test_it_is_that_of_the_whole_matrix(hubby):
    queries, items, biases = hubby
    rng = np.random.default_rng(0)
    each = rng.choice([0, 0.5, 1], len(queries))
    lengths = np.linalg.norm(queries, axis=1)
    groups = rng.integers(90, size=len(queries))
    _, groups = np.unique(groups, return_inverse=True)
    for options in ({}, {"groups": groups}, {"lengths": lengths, "groups": groups}):
        told = reciprocities(queries, items, biases, [0.0, 0.7, each], **options)
        assert told == pytest.approx(
            [oracle(queries, items, biases, w, **options) for w in (0.0, 0.7, each)]
        )
        assert len({round(share, 6) for share in told}) == 3
        assert told[0] < told[1], "hubs are what it lacks"


def test_one_hub_leaves_one_query_with_an_answer_of_its_own():
    """Ten items, each the answer of one query; an eleventh is nearer to all queries."""
    queries = np.eye(11)[:10] + 0.5 * np.eye(11)[10]
    items = np.vstack([np.eye(11)[:10], 3 * np.eye(11)[10] + 0.1 * np.eye(11)[0]])
    biases = np.r_[np.zeros(10), 1.5]
    raw, corrected = reciprocities(queries, items, biases, [0, 1])
    assert (raw, corrected) == (0.1, 1.0)


def test_repeats_and_near_copies_of_a_query_count_as_one(hubby):
    queries, items, biases = hubby
    rng = np.random.default_rng(1)
    sent = np.repeat(np.arange(200), np.r_[150, 40, np.ones(198, int)])
    order = rng.permutation(len(sent))
    noise = 1e-4 * rng.standard_normal((len(sent), queries.shape[1]))
    once = reciprocities(queries, items, biases, [0, 1])
    for log in (queries[sent][order], (queries[sent] + noise)[order].astype(np.float32)):
        groups = with_groups(QueryBank(log), items).groups
        assert groups.max() + 1 == 200
        assert reciprocities(log, items, biases, [0, 1], groups=groups) == pytest.approx(once)
    shown = diagnose(queries[sent][order], items, biases, strengths=[]).reciprocity
    assert shown.distinct == 200
    # Under IP, the length of a query says nothing of an item.
    lengths = np.linalg.norm(queries, axis=1)
    of_lengths = reciprocities(queries, items, biases, [0, 1], lengths=lengths)
    assert (shown.before, shown.after) == pytest.approx(tuple(of_lengths))


def test_equal_rows_are_one_row(hubby):
    """Twins of all items, also in another order and with rounding, change nothing."""
    queries, items, biases = hubby
    once = reciprocities(queries, items, biases, [0, 1])
    order = np.random.default_rng(2).permutation(3 * len(items))
    thrice = np.tile(items, (3, 1))[order]
    assert reciprocities(queries, thrice, np.tile(biases, 3)[order], [0, 1]) == once

    # Of twins with other biases, as demand gives them, the corrected search has the smaller first.
    dearer = np.r_[biases, biases + 5, biases + 9][order]
    assert reciprocities(queries, thrice, dearer, [0, 1]) == once


@pytest.mark.parametrize("kind", ["signs", "few whole numbers", "few whole numbers at length 1"])
def test_equal_scores_do_not_decide_by_chance(kind):
    """Vectors of quantised encoders: unequal rows with equal scores are common."""
    rng = np.random.default_rng(3)
    high = 2 if kind == "signs" else 4
    queries, items = (rng.integers(0, high, size=(count, 12)) for count in (150, 170))
    queries, items = (np.unique(2 * rows - high + 1, axis=0) for rows in (queries, items))
    if kind.endswith("length 1"):
        queries, items = (
            rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (queries, items)
        )
    biases = rng.integers(0, 3, len(items)) / 8
    expected = [oracle(queries, items, biases, w) for w in (0, 1)]
    for seed in range(3):
        shuffled = np.random.default_rng(seed)
        q, r = shuffled.permutation(len(queries)), shuffled.permutation(len(items))
        told = reciprocities(
            queries[q].astype(np.float32), items[r].astype(np.float32), biases[r], [0, 1]
        )
        assert told == pytest.approx(expected)


def test_vectors_without_any_direction():
    for queries, items in (
        (np.zeros((3, 4)), np.ones((5, 4))),
        (np.ones((3, 4)), np.zeros((5, 4))),
    ):
        queries, items = queries.astype(np.float32), items.astype(np.float32)
        assert reciprocities(queries, items, np.zeros(5), [0.0]) == [1.0], "all are equally near"
        shown = diagnose(queries, items, np.zeros(5), k=1, strengths=[]).reciprocity
        assert (shown.before, shown.distinct, shown.at_most) == (1.0, 1, 1.0)


def test_queries_that_a_gate_leaves_raw_stay_raw(hubby):
    queries, items, biases = hubby
    first = (queries @ items.T).argmax(1)
    activated = np.arange(len(items)) % 2 == 0
    shown = diagnose(
        queries, items, biases, activated=activated, query_groups=np.arange(200), strengths=[]
    ).reciprocity
    lengths = np.linalg.norm(queries, axis=1)
    of_strengths = [
        oracle(queries, items, biases, strength, lengths=lengths)
        for strength in (0, 1.0 * activated[first], 1)
    ]
    assert (shown.before, shown.after) == pytest.approx(tuple(of_strengths[:2]))
    assert shown.after != pytest.approx(of_strengths[2])


def test_fewer_items_than_queries_limit_it(hubby):
    queries, items, biases = hubby
    bank = single_queries(queries)
    shown = diagnose(
        queries, items[:50], biases[:50], query_groups=bank.groups, strengths=[]
    ).reciprocity
    assert shown.at_most == 0.25
    assert 0 < shown.before <= shown.at_most
