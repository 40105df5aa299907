"""The test for drift: by its formula, quiet on resamples of real queries, awake to real shifts."""

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from scipy.stats import kstest, wasserstein_distance
from sklearn.cluster import KMeans

from milvus_hubness import DimensionMismatch, InvalidInput, InvalidParameter, NonFiniteVectors
from milvus_hubness.quality.bank_checks import AT_LEAST, LEVEL, THRESHOLD, drift_between
from tests.support.real_data import load_task, needs_real_data


def drawn(seed, count, dim=5, shift=0.0):
    return np.random.default_rng(seed).normal(shift, size=(count, dim)).astype(np.float32)


def test_the_statistic_is_the_unbiased_discrepancy_over_the_variance():
    first, second = drawn(0, 60), drawn(1, 80, shift=0.7)
    both = np.concatenate([first, second]).astype(float)
    distances = cdist(both, both)
    width = np.median(distances[np.triu_indices(140, 1)])
    kernel = np.exp(-(distances**2) / (2 * width**2))
    own, other, across = kernel[:60, :60], kernel[60:, 60:], kernel[:60, 60:]
    means = [(each.sum() - len(each)) / (len(each) * (len(each) - 1)) for each in (own, other)]
    mmd2 = sum(means) - 2 * across.mean()
    inside = 1 - sum(means) / 2
    found = drift_between(first, second)
    assert found.mmd2 == pytest.approx(mmd2, rel=1e-5)
    assert found.statistic == pytest.approx(mmd2 / 4 / (mmd2 / 4 + inside), rel=1e-5)
    assert (found.bank, found.recent) == (60, 80)
    assert (found.fired, found.p) == (True, 1 / 2_000)


def test_the_p_value_is_uniform_where_nothing_moved():
    values = [
        drift_between(drawn(seed, 50), drawn(1_000 + seed, 70), permutations=199, seed=seed).p
        for seed in range(200)
    ]
    assert kstest(values, "uniform").pvalue > 0.01


def test_a_shift_must_be_large_as_well_as_sure():
    found = drift_between(drawn(0, 2_000), drawn(1, 2_000, shift=0.1))
    assert found.p <= LEVEL
    assert 0 < found.statistic < THRESHOLD
    assert not found.fired
    few = [drift_between(drawn(seed, 50), drawn(100 + seed, 50), seed=seed) for seed in range(20)]
    assert sum(each.statistic >= THRESHOLD for each in few) >= 3
    assert not any(each.fired for each in few)


def test_the_earth_mover_moves_a_shift_and_little_by_chance():
    first, second = drawn(0, 400, dim=1), drawn(1, 300, dim=1, shift=0.5)
    found = drift_between(first, second, permutations=1)
    both = np.concatenate([first, second])[:, 0]
    on_a_line = wasserstein_distance(first[:, 0], second[:, 0]) / both.std()
    assert found.earth_mover == pytest.approx(on_a_line, rel=1e-6)
    assert found.earth_mover_by_chance < found.earth_mover / 3
    same = drift_between(drawn(0, 400), drawn(1, 300), permutations=1)
    assert same.earth_mover == pytest.approx(same.earth_mover_by_chance, rel=0.3)
    assert f"Earth mover's distance {found.earth_mover:.2f}, " in found.reason


def test_few_queries_decide_nothing():
    found = drift_between(drawn(0, 500), drawn(1, AT_LEAST - 1, shift=9))
    assert not found.fired
    assert f"{AT_LEAST - 1} recent queries" in found.reason
    assert drift_between(drawn(0, 500), drawn(1, AT_LEAST, shift=9)).fired


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(DimensionMismatch):
        drift_between(drawn(0, 60), drawn(0, 60, dim=6))
    with pytest.raises(NonFiniteVectors, match="row 3"):
        drift_between(drawn(0, 60), np.where(np.arange(60)[:, None] == 3, np.nan, drawn(0, 60)))
    with pytest.raises(InvalidInput):
        drift_between(drawn(0, 60)[0], drawn(0, 60))
    for wrong in ({"permutations": 0}, {"at_most": 0}):
        with pytest.raises(InvalidParameter):
            drift_between(drawn(0, 60), drawn(0, 60), **wrong)


def test_queries_that_are_all_alike_have_not_drifted_apart():
    same = np.ones((60, 4), np.float32)
    assert not drift_between(same, same).fired
    assert drift_between(same, -same).fired


@needs_real_data
@pytest.mark.parametrize("name", ["docstring_code", "caption_document", "clip_products t2i"])
def test_it_stays_quiet_on_resamples_of_real_queries(name):
    bank = load_task(name).bank
    for seed in range(10):
        order = np.random.default_rng(seed).permutation(len(bank))
        found = drift_between(
            bank[order[: len(order) // 2]], bank[order[len(order) // 2 :]], at_most=250
        )
        assert not found.fired, found.reason
        assert abs(found.statistic) < THRESHOLD / 2


@needs_real_data
@pytest.mark.parametrize("name", ["docstring_code", "caption_translation", "text_video_msrvtt v2t"])
def test_it_stays_quiet_on_the_queries_that_a_bank_is_for(name):
    task = load_task(name)
    found = drift_between(task.bank, task.query, at_most=500)
    assert not found.fired, found.reason


@needs_real_data
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_it_fires_on_queries_of_another_data_set(share):
    fitting, other = (
        load_task(name).bank for name in ("text_video_msrvtt t2v", "clip_products t2i")
    )
    fitting = fitting / np.linalg.norm(fitting, axis=1, keepdims=True)
    order = np.random.default_rng(0).permutation(len(fitting))
    count = int(share * 240)
    recent = np.concatenate([fitting[order[250 : 250 + 240 - count]], other[:count]])
    found = drift_between(fitting[order[:250]], recent)
    assert found.fired
    assert found.statistic > THRESHOLD
    assert "of the variance is between" in found.reason


@needs_real_data
@pytest.mark.parametrize("name", ["docstring_code", "caption_translation"])
def test_it_fires_on_another_topic_of_one_data_set(name):
    task = load_task(name)
    topics = KMeans(4, n_init=1, random_state=0).fit(task.bank[:2_000])
    of_query = topics.predict(task.query)
    minorities = [topic for topic in range(4) if (topics.labels_ == topic).mean() < 0.5]
    assert len(minorities) >= 3
    for topic in minorities:
        found = drift_between(task.bank, task.query[of_query == topic], at_most=400)
        assert found.fired, found.reason
