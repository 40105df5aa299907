"""Hubness measures against scipy and hand-made counts."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from milvus_hubness.errors import InvalidInput, InvalidParameter
from milvus_hubness.quality.measures import (
    Sendings,
    confidence_interval,
    excess_answers,
    hubness_summary,
    k_occurrence,
    skewness,
)
from milvus_hubness.quality.outcomes import Outcome, excess_answers_of, noise_of_change

COUNTS = np.random.default_rng(0).geometric(0.2, 500) - 1


def test_k_occurrence_counts_first_k_results():
    found = np.array([[0, 1, 2], [1, 0, 4], [1, 4, 3]])
    assert k_occurrence(found, 6, 2).tolist() == [2, 3, 0, 0, 1, 0]
    assert k_occurrence(found, 5, 3).sum() == 9
    assert k_occurrence(np.zeros((2, 10), np.int32), 1).tolist() == [20]


def test_against_scipy():
    assert skewness(COUNTS) == pytest.approx(stats.skew(COUNTS))
    assert hubness_summary(COUNTS).kurtosis == pytest.approx(stats.kurtosis(COUNTS))


def test_excess_answers_is_the_share_to_be_moved():
    assert excess_answers([5, 5, 5]) == 0
    assert excess_answers([15, 0, 0]) == pytest.approx(2 / 3)
    assert excess_answers([3, 1]) == pytest.approx(1 / 4)


def test_antihubs():
    assert hubness_summary([3, 0, 1, 0]).antihubs == 0.5


def test_all_equal_counts_are_no_hubness():
    assert hubness_summary([4, 4, 4]) == (0, 0, 0, 4, 0, 0, pytest.approx(1 / 3), 0, 0, 1)
    assert hubness_summary([0, 0]) == (0, 0, 0, 0, 1, 0, 0, 0, 0, 1)
    assert hubness_summary([7]) == (0, 0, 0, 7, 0, 0, 1, 0, 0, 1)


def test_the_further_measures_are_those_of_scikit_hubness():
    """The figures that Hubness(k=3, metric="precomputed") of scikit-hubness 0.21.2 prints for these distances."""
    distances = np.random.default_rng(29).standard_normal((40, 30)) - np.linspace(0, 1.5, 30)
    counts = k_occurrence(np.argsort(distances, axis=1), 30, 3)
    summary = hubness_summary(counts, 3)
    assert summary._asdict() == pytest.approx(
        {
            "skewness": 1.0536989144583366,
            "excess_answers": 0.38333333333333336,
            "antihubs": 0.16666666666666666,
            "hub_occurrence": 0.6416666666666667,
            "groupie_ratio": 0.11666666666666665,
            "gini": 0.5155555555555555,
            "atkinson": 0.2846423113386146,
            "largest": 14,
            "kurtosis": stats.kurtosis(counts),
            "entropy": stats.entropy(counts) / np.log(30),
        }
    )


def test_entropy_falls_as_answers_gather_on_few_items():
    assert hubness_summary([10, 10, 0, 0]).entropy == pytest.approx(0.5)
    assert hubness_summary([20, 0, 0, 0]).entropy == 0


def test_summary():
    summary = hubness_summary(COUNTS)
    assert summary.skewness == skewness(COUNTS)
    assert summary.excess_answers == excess_answers(COUNTS)
    assert summary.largest == COUNTS.max()
    assert summary.antihubs == (COUNTS == 0).mean() > 0


def test_bad_input():
    for found in ([[0, 6]], [[-1, 0]], [[0.5, 1.0]], [["a", "b"]]):
        with pytest.raises(InvalidInput, match=r"numbers of items, 0 … 5"):
            k_occurrence(found, 6, 2)
    for found in ([], [[]], np.empty((0, 3), int)):
        with pytest.raises(InvalidInput, match="2 or more"):
            k_occurrence(found, 6, 2)
    for found in (np.arange(3), np.ones((2, 1), int)):
        with pytest.raises(InvalidInput, match="2 or more"):
            k_occurrence(found, 6, 2)
    with pytest.raises(InvalidParameter, match="k must be"):
        k_occurrence([[1]], 6, 0)
    with pytest.raises(InvalidParameter, match="n_items must be"):
        k_occurrence([[1]], 0)
    for measure in (skewness, excess_answers, hubness_summary):
        with pytest.raises(InvalidInput, match="1-D"):
            measure([])


def test_what_users_send_counts_as_if_each_sending_stood_by_itself():
    rng = np.random.default_rng(0)
    values = rng.integers(5, size=40).astype(float)
    counts = rng.integers(1, 6, 40)
    expanded = np.repeat(values, counts)
    sent = Sendings(counts)
    weighed = Sendings(weights=counts.astype(float))
    for sendings in (sent, weighed):
        assert sendings.mean(values) == pytest.approx(expanded.mean())
        assert sendings.median(values) == np.median(expanded)
    assert sent.interval(values) == confidence_interval(expanded)
    narrow, wide = sent.interval(values), weighed.interval(values)
    assert wide.high - wide.low > narrow.high - narrow.low
    half = np.arange(40) < 20
    assert sent.of(half).mean(values[half]) == np.repeat(values[half], counts[half]).mean()
    both = Sendings(np.array([1, 2]), np.array([1.0, 0.5]))
    assert both.mean(np.array([0.0, 1.0])) == 0.5
    assert both.median(np.array([3.0, 5.0])) == 4


def test_the_noise_of_a_change_is_that_of_other_draws_of_the_queries():
    """And none where two biases have the same answers, however much these vary with the queries."""
    rng = np.random.default_rng(0)

    def drawn(count):
        even = rng.integers(50, size=(count, 10))
        hubby = rng.integers(50, size=(count, 10)) ** 2 // 50
        retrieved = np.stack([even, hubby, hubby]).astype(np.int32)
        return Outcome(np.empty((3, 0), np.int32), retrieved, np.empty((3, 0)))

    changes = []
    for _ in range(200):
        excess = excess_answers_of(drawn(400), 50)
        changes.append(excess[-1] - excess[0])
    to_even, to_itself = noise_of_change(drawn(400), 50, rng)
    assert to_even == pytest.approx(np.std(changes), rel=0.35)
    assert to_itself == 0
