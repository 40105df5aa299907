"""Retrieval measures against hand-made examples and naive definitions."""

from __future__ import annotations

import math

import ir_measures
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milvus_hubness.errors import InvalidParameter
from milvus_hubness.quality.retrieval import (
    Measure,
    PositiveRanks,
    average_precisions,
    hits,
    ndcgs,
    ranks,
    retrieval_summary,
)
from milvus_hubness.quality.right_items import RightItems

rank_lists = st.lists(
    st.sets(st.integers(1, 30), min_size=1, max_size=8).map(sorted), min_size=1, max_size=6
)


def of(lists):
    starts = np.concatenate([[0], np.cumsum([len(one) for one in lists])])
    found = np.array([rank for one in lists for rank in one])
    return PositiveRanks(found, RightItems(np.arange(len(found)), starts))


RANKS = of([[1], [3, 4], [11], [2, 5, 20]])


def test_by_hand():
    np.testing.assert_array_equal(hits(RANKS, 1), [1, 0, 0, 0])
    np.testing.assert_array_equal(hits(RANKS, 3), [1, 1, 0, 1])
    np.testing.assert_allclose(
        average_precisions(RANKS, 10), [1, (1 / 3 + 2 / 4) / 2, 0, (1 / 2 + 2 / 5) / 3]
    )
    assert retrieval_summary(RANKS) == {
        "R@1": 0.25,
        "R@5": 0.75,
        "R@10": 0.75,
        "MdR": 2.5,
        "MnR": 4.25,
        "MRR": pytest.approx((1 + 1 / 3 + 1 / 11 + 1 / 2) / 4),
        "mAP@10": pytest.approx((1 + 5 / 12 + 0 + 0.3) / 4),
        "nDCG@10": pytest.approx(ndcgs(RANKS, 10).mean()),
    }
    assert list(retrieval_summary(RANKS, ks=[3], depth=5)) == [
        "R@3",
        "MdR",
        "MnR",
        "MRR",
        "mAP@5",
        "nDCG@5",
    ]


def test_trec_eval_gives_the_same_figures():
    rng = np.random.default_rng(4)
    gallery, bias = rng.normal(size=(300, 8)), rng.normal(size=300)
    positives = [rng.choice(300, rng.integers(1, 9), replace=False) for _ in range(80)]
    queries = (
        np.stack([gallery[items].mean(0) for items in positives]) + rng.normal(size=(80, 8)) / 3
    )
    summary = retrieval_summary(
        ranks(queries, gallery, RightItems.of([items.tolist() for items in positives]), bias)
    )
    scores = queries @ gallery.T - bias
    relevant = {
        str(query): {str(item): 1 for item in items} for query, items in enumerate(positives)
    }
    run = {
        str(query): {str(item): row[item] for item in range(300)}
        for query, row in enumerate(scores.tolist())
    }
    names = {
        "R@1": "Success@1",
        "R@5": "Success@5",
        "R@10": "Success@10",
        "MRR": "RR",
        "mAP@10": "AP@10",
    }
    names["nDCG@10"] = "nDCG@10"
    trec = ir_measures.calc_aggregate(map(ir_measures.parse_measure, names.values()), relevant, run)
    expected = {name: trec[ir_measures.parse_measure(measure)] for name, measure in names.items()}
    assert 0.1 < expected["R@1"] < expected["R@10"] < 1
    assert {name: summary[name] for name in names} == pytest.approx(expected, abs=1e-6)


def test_ir_measures_gives_the_same_figures_for_each_measure_with_grades():
    rng = np.random.default_rng(5)
    gallery, bias = rng.normal(size=(300, 8)), rng.normal(size=300)
    positives = [rng.choice(300, rng.integers(1, 30), replace=False) for _ in range(80)]
    grades = [rng.integers(1, 4, len(items)) for items in positives]
    queries = np.stack([gallery[items].mean(0) for items in positives])
    queries += rng.normal(size=queries.shape) / 3
    of_positives = ranks(queries, gallery, RightItems.of(positives, grades), bias)
    relevant = {
        str(query): {str(item): int(grade) for item, grade in zip(items, of_query, strict=True)}
        for query, (items, of_query) in enumerate(zip(positives, grades, strict=True))
    }
    run = {
        str(query): {str(item): row[item] for item in range(300)}
        for query, row in enumerate((queries @ gallery.T - bias).tolist())
    }
    for name in ("Success@1", "Success@7", "RR", "AP", "nDCG@3", "nDCG@10", "nDCG@100"):
        theirs = ir_measures.parse_measure(name)
        expected = {
            one.query_id: one.value for one in ir_measures.iter_calc([theirs], relevant, run)
        }
        ours = Measure.of(name).values(of_positives)
        assert 0.05 < ours.mean() < 1
        assert dict(zip(map(str, range(80)), ours, strict=True)) == pytest.approx(
            expected, abs=1e-6
        )


@given(rank_lists, st.integers(1, 35))
def test_average_precision_is_the_mean_precision_at_the_positives(lists, k):
    for found, one in zip(average_precisions(of(lists), k), lists, strict=True):
        relevant = [rank in one for rank in range(1, k + 1)]
        precisions = [sum(relevant[: i + 1]) / (i + 1) for i in range(k) if relevant[i]]
        assert found == pytest.approx(sum(precisions) / min(len(one), k))


@given(rank_lists, st.integers(1, 35))
def test_ndcg_is_dcg_over_the_ideal(lists, k):
    for found, one in zip(ndcgs(of(lists), k), lists, strict=True):
        dcg = sum(1 / math.log2(1 + rank) for rank in one if rank <= k)
        ideal = sum(1 / math.log2(1 + rank) for rank in range(1, min(len(one), k) + 1))
        assert found == pytest.approx(dcg / ideal)


@given(rank_lists)
def test_perfect_and_bounded(lists):
    perfect = of([range(1, len(one) + 1) for one in lists])
    for measure in (average_precisions, ndcgs):
        np.testing.assert_allclose(measure(perfect, 10), 1)
        assert ((measure(of(lists), 10) >= 0) & (measure(of(lists), 10) <= 1 + 1e-12)).all()


def test_bad_input():
    for call in (hits, average_precisions, ndcgs):
        with pytest.raises(InvalidParameter, match="k must be"):
            call(RANKS, 0)
