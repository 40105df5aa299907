"""Queries that are rows themselves: with `--ignore-identical` a row is no answer to itself, as evaluators have it."""

import numpy as np
import pytest

from milvus_hubness import Gallery, InvalidInput, Judgements, QueryBank, check
from milvus_hubness.quality import measures, outcomes, retrieval
from milvus_hubness.quality.data_faults import data_faults
from milvus_hubness.quality.rankings import rankings
from milvus_hubness.quality.right_items import RightItems

DIM = 16


@pytest.fixture(scope="module")
def data():
    """Rows in pairs that are near each other; the other one of a pair is right for each."""
    rng = np.random.default_rng(5)
    centres = rng.standard_normal((150, DIM))
    rows = np.repeat(centres, 2, 0) + 0.35 * rng.standard_normal((300, DIM))
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    keys = [f"doc{number}" for number in range(300)]
    asked = rng.permutation(300)[:120]
    right = [int(number) ^ 1 for number in asked]
    return rows, keys, asked, right


def brute_force(rows, asked, right, bias=0.0):
    """The rank of the right row of each query in float64, without the query itself."""
    scores = rows[asked].astype(np.float64) @ rows.T.astype(np.float64) - bias
    scores[np.arange(len(asked)), asked] = -np.inf
    of_right = scores[np.arange(len(asked)), right]
    return 1 + (scores > of_right[:, None]).sum(1), scores


def test_ranks_without_the_own_row_are_those_of_an_evaluator(data):
    rows, _, asked, right = data
    rng = np.random.default_rng(0)
    biases = [np.zeros(300, np.float32), rng.standard_normal(300).astype(np.float32) / 10]
    outcome = outcomes.assess(rows[asked], rows, biases, RightItems.of(right, own=asked))
    for number, bias in enumerate(biases):
        expected, scores = brute_force(rows, asked, right, bias)
        found = retrieval.ranks(rows[asked], rows, RightItems.of(right, own=asked), bias)
        np.testing.assert_array_equal(found.best, expected)
        np.testing.assert_array_equal(outcome.ranks[number], expected)
        first = np.argsort(-scores, 1)[:, :10]
        np.testing.assert_array_equal(measures.nearest(rows[asked], rows, 10, bias, asked), first)
        np.testing.assert_array_equal(outcome.retrieved[number], first)
    assert (
        expected <= retrieval.ranks(rows[asked], rows, RightItems.of(right), biases[1]).best
    ).all()


def test_a_query_that_is_no_row_keeps_all_answers(data):
    rows, _, asked, right = data
    own = np.where(np.arange(120) % 2, asked, -1)
    every = retrieval.ranks(rows[asked], rows, RightItems.of(right)).best
    without = retrieval.ranks(rows[asked], rows, RightItems.of(right, own=asked)).best
    mixed = retrieval.ranks(rows[asked], rows, RightItems.of(right, own=own)).best
    np.testing.assert_array_equal(mixed, np.where(own >= 0, without, every))


@pytest.mark.parametrize("depth", [3, 299, 1_000])
def test_rankings_for_evaluators_have_no_own_row(data, depth):
    rows, _, asked, right = data
    ranks = retrieval.ranks(rows[asked], rows, RightItems.of(right, own=asked))
    found = list(rankings(rows[asked], rows, depth, ranks, asked))
    for query, ranking in zip(asked, found, strict=True):
        assert len(ranking.items) == min(depth, 299)
        assert query not in ranking.items
    best = [
        list(ranking.items).index(row) + 1
        for ranking, row in zip(found, right, strict=True)
        if row in ranking.items
    ]
    np.testing.assert_array_equal(best, ranks.best[ranks.best <= depth])


def judged(data):
    rows, keys, asked, right = data
    return Judgements.of(
        rows[asked], [keys[row] for row in right], ids=[keys[row] for row in asked]
    )


def past(data):
    """Queries that are rows too."""
    rows, *_ = data
    return QueryBank.of(rows[np.random.default_rng(9).permutation(300)[:100]])


def test_check_says_when_and_then_measures_as_evaluators_do(data):
    rows, keys, asked, right = data
    of_queries = judged(data)
    found = data_faults(
        rows,
        past(data),
        "IP",
        queries=of_queries.labelled(keys),
        share_with_ids=of_queries.share_with_ids(keys),
    )
    faults = [fault for fault in found if fault.name == "items as queries"]
    assert len(faults) == 2, "of the bank and of the queries"
    for fault in faults:
        assert fault.is_grave
        assert "the ids of queries are keys of rows" in str(fault)
        assert "pass --ignore-identical, as evaluators do" in str(fault)
        assert "wrong file" not in str(fault)

    checked = check(
        Gallery.of(rows, "IP", keys),
        recipe=past(data),
        judgements=judged(data).ignoring_identical(),
    )
    assert not [fault for fault in checked.faults if fault.name == "items as queries"]
    ranks, scores = brute_force(rows, asked, right)
    expected = (ranks == 1).mean()
    assert checked.tuning.rows[0].value == pytest.approx(expected)
    assert checked.diagnosis.value_before == pytest.approx(expected)
    answers = np.argsort(-scores, 1)[:, :10]
    counts = np.bincount(answers.ravel(), minlength=300)
    assert checked.diagnosis.before.largest == counts.max()


def test_a_right_row_that_is_the_query_itself_is_none(data):
    rows, keys, asked, right = data
    wanted = [[keys[query], keys[row]] for query, row in zip(asked, right, strict=True)]
    wanted[0] = [keys[asked[0]]]
    both = Judgements.of(rows[asked], wanted, ids=[keys[row] for row in asked])
    within = both.ignoring_identical().within(keys, "products")
    assert [list(of_query) for of_query in within.keys] == [[keys[row]] for row in right[1:]]
    assert "1 of 120 queries have no right row in 'products'" in within.left_out[0]
    assert len(both.within(keys, "products")) == 120
    # Files have keys as texts where a collection may have whole numbers.
    numbers = Judgements.of(rows[:2], [["1", "2"], ["2"]], ids=["1", "x"]).ignoring_identical()
    assert list(numbers.within([1, 2], "products").keys) == [(2,), (2,)]
    assert both.within(keys, "products").labelled(keys).right.own is None
    of_rows = numbers.within([1, 2], "products").labelled([2, 1])
    assert of_rows.right.own.tolist() == [1, -1]


def test_what_says_nothing_of_rows_is_refused(data):
    rows, keys, asked, right = data
    without_ids = Judgements.of(rows[asked], [keys[row] for row in right])
    with pytest.raises(InvalidInput, match="the judgements have no ids: add a column 'query_id'"):
        without_ids.ignoring_identical()
    others = Judgements.of(
        rows[asked], [keys[row] for row in right], ids=[f"q{row}" for row in asked]
    )
    with pytest.raises(InvalidInput, match="no query has the key of a row of 'items' as its id"):
        check(
            Gallery.of(rows, keys=keys), recipe=past(data), judgements=others.ignoring_identical()
        )
