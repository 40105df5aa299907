"""How far apart two sets of vectors are: by the formula, small for two parts of one set, large for others."""

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from milvus_hubness.quality.bank_checks import ALIKE, AT_LEAST, share_between
from tests.support.real_data import load_task, needs_real_data


def drawn(seed, count, dim=5, shift=0.0):
    return np.random.default_rng(seed).normal(shift, size=(count, dim)).astype(np.float32)


def between(first, second, at_most=1_000):
    return share_between(first, second, at_most=at_most, seed=0)


def test_it_is_the_unbiased_discrepancy_over_the_variance():
    first, second = drawn(0, 60), drawn(1, 80, shift=0.7)
    both = np.concatenate([first, second]).astype(float)
    distances = cdist(both, both)
    width = np.median(distances[np.triu_indices(140, 1)])
    kernel = np.exp(-(distances**2) / (2 * width**2))
    own, other, across = kernel[:60, :60], kernel[60:, 60:], kernel[:60, 60:]
    means = [(each.sum() - len(each)) / (len(each) * (len(each) - 1)) for each in (own, other)]
    mmd2 = sum(means) - 2 * across.mean()
    inside = 1 - sum(means) / 2
    assert between(first, second) == pytest.approx(mmd2 / 4 / (mmd2 / 4 + inside), rel=1e-5)


def test_two_parts_of_one_set_are_alike_and_others_are_not():
    assert abs(between(drawn(0, 2_000), drawn(1, 2_000))) < ALIKE
    assert between(drawn(0, 2_000), drawn(1, 2_000, shift=1.0)) > 10 * ALIKE


def test_too_few_are_not_compared():
    assert between(drawn(0, 500), drawn(1, AT_LEAST - 1)) == 1.0
    assert between(drawn(0, 500), drawn(1, AT_LEAST)) < 0.05


def test_vectors_that_are_all_equal_are_alike():
    same = np.ones((60, 4), np.float32)
    assert between(same, same) == 0.0
    assert between(same, -same) > 0.5


@needs_real_data
@pytest.mark.parametrize("name", ["docstring_code", "caption_document", "clip_products t2i"])
def test_halves_of_the_queries_are_alike_and_the_items_are_not_on_real_data(name):
    task = load_task(name)
    order = np.random.default_rng(0).permutation(len(task.bank))
    first, second = np.array_split(task.bank[order], 2)
    assert abs(between(first, second, at_most=250)) < ALIKE / 2
    assert between(task.bank, task.gallery, at_most=500) > ALIKE
