"""What candidates miss, against a brute-force count."""

import numpy as np
import pytest

from milvus_hubness.correction.kernels.policy import kernel_policy
from milvus_hubness.quality.trials import LADDER, enough_candidates, missed_share, raw_ranks


def brute_force(queries, items, biases, strength):
    scores = queries.astype(float) @ items.astype(float).T
    corrected = scores - strength * biases
    best = np.argsort(-corrected, axis=1)[:, :10]
    return np.array(
        [[(raw > raw[i]).sum() + 1 for i in row] for raw, row in zip(scores, best, strict=True)]
    )


@pytest.mark.parametrize("kernel", ["numpy", "dense"])
@pytest.mark.parametrize("items", [3, 10, 257])
@pytest.mark.parametrize("strength", [0.0, 1.0, -2.0])
def test_raw_ranks_are_the_brute_force_ones(items, strength, kernel):
    rng = np.random.default_rng(items)
    queries, gallery = (rng.normal(size=(count, 8)).astype(np.float32) for count in (31, items))
    biases = rng.normal(size=items).astype(np.float32)
    with kernel_policy(kernel=kernel, tile_size=1_000):
        ranks = raw_ranks(queries, gallery, np.float32(strength) * biases)
    np.testing.assert_array_equal(ranks, brute_force(queries, gallery, biases, strength))
    if strength == 0:
        np.testing.assert_array_equal(ranks, np.tile(np.arange(1, min(items, 10) + 1), (31, 1)))


def test_as_many_candidates_are_taken_as_keep_misses_within_what_is_allowed():
    ranks = np.r_[np.full(90, 10), np.full(9, 150), np.full(1, 900)].reshape(10, 10)
    assert [missed_share(ranks, each) for each in (50, 200, 1_000)] == [0.1, 0.01, 0.0]
    assert [enough_candidates(ranks, share) for share in (0.2, 0.05, 0.001)] == [50, 200, 1_000]
    assert enough_candidates(np.full((1, 10), 10**6), 0.01) == LADDER[-1]
