from __future__ import annotations

import numpy as np
import pytest

from milvus_hubness.errors import DimensionMismatch, InvalidInput, InvalidParameter
from milvus_hubness.quality.measures import confidence_interval, paired_difference

RNG = np.random.default_rng(0)


def test_mean_of_hits_against_the_normal_approximation():
    values = (RNG.random(4000) < 0.3).astype(float)
    interval = confidence_interval(values)
    spread = 1.96 * values.std() / np.sqrt(4000)
    assert interval.estimate == values.mean()
    assert interval.low == pytest.approx(values.mean() - spread, abs=spread / 10)
    assert interval.high == pytest.approx(values.mean() + spread, abs=spread / 10)


def test_it_covers_the_truth_as_often_as_it_says():
    covered = 0
    for trial in range(300):
        values = np.random.default_rng(trial).exponential(size=100)
        _, low, high = confidence_interval(values, resamples=300, seed=trial)
        covered += low <= 1 <= high
    assert 0.9 < covered / 300 < 0.98


def test_paired_intervals_are_narrower_than_apart():
    before = RNG.random(500)
    after = before + 0.02 + RNG.normal(0, 0.01, 500)
    paired = paired_difference(before, after)
    assert paired.estimate == pytest.approx(after.mean() - before.mean())
    assert 0.018 < paired.low < paired.estimate < paired.high < 0.022
    assert confidence_interval(after).high - confidence_interval(after).low > 10 * (
        paired.high - paired.low
    )


def test_the_same_system_twice_differs_by_nothing():
    values = RNG.random(50)
    assert paired_difference(values, values) == (0, 0, 0)


def test_many_queries_are_drawn_as_if_all_at_once():
    """Five million draws do not fit into one part."""
    values = RNG.random(2500)
    means = values[np.random.default_rng(0).integers(2500, size=(2000, 2500))].mean(1)
    interval = confidence_interval(values)
    assert interval == pytest.approx(
        (values.mean(), *np.quantile(means, [0.025, 0.975])), rel=1e-12
    )
    assert confidence_interval(values, seed=1) != interval


def test_bad_input():
    for values in ([], [1.0], 3.0, np.ones((3, 2))):
        with pytest.raises(InvalidInput, match="at least two queries"):
            confidence_interval(values)
    with pytest.raises(InvalidInput, match="NaN"):
        confidence_interval([1, np.nan])
    with pytest.raises(DimensionMismatch, match="2 queries before and 3 after"):
        paired_difference([1, 2], [1, 2, 3])
    for wrong in ({"resamples": 0}, {"resamples": 1.5}):
        with pytest.raises(InvalidParameter):
            confidence_interval([1, 2], **wrong)
