"""A gallery in shards gives what it gives in one piece; without Ray."""

from __future__ import annotations

import numpy as np
import pytest

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import NNN, Sinkhorn
from milvus_hubness.correction.kernels import logsumexp
from milvus_hubness.errors import DimensionMismatch, InvalidInput
from milvus_hubness.extras.ray import ray_gallery

RNG = np.random.default_rng(0)
BANK = QueryBank.of(RNG.standard_normal((50, 8)).astype(np.float32) / 3)
ITEMS = RNG.standard_normal((70, 8)).astype(np.float32) / 3


def test_steps_of_shards_add_up_to_that_of_the_whole():
    parts = [ITEMS[:3], ITEMS[3:40], lambda: ITEMS[40:]]
    counts, alone, _ = zip(
        *(ray_gallery.shard_step(part, BANK, None, 0.05, "cpu") for part in parts), strict=True
    )
    assert counts == (3, 37, 30)
    whole = -logsumexp(BANK.vectors, ITEMS, 0.05)
    np.testing.assert_allclose(ray_gallery.joined(alone, 0.05), whole, rtol=0, atol=1e-6)
    g = -logsumexp(ITEMS, BANK.vectors, 0.05, whole)
    steps = [ray_gallery.shard_step(part, BANK, whole, 0.05, "cpu") for part in parts]
    shares = sum(shares_of_part for _, shares_of_part, _ in steps)
    assert sum(bias_sum for *_, bias_sum in steps) == pytest.approx(-g.sum(), rel=1e-5)
    following = -logsumexp(BANK.vectors, ITEMS, 0.05, g)
    np.testing.assert_allclose(whole - 0.05 * np.log(shares), following, rtol=0, atol=1e-6)


def test_biases_of_a_shard():
    fitted = Sinkhorn(0.05).fit(BANK, gallery=ITEMS)
    found = ray_gallery.shard_biases(
        lambda: ITEMS[5:9], BANK, fitted.estimator, fitted.potentials, None
    )
    np.testing.assert_array_equal(found, fitted.bias(ITEMS[5:9]))
    np.testing.assert_array_equal(
        ray_gallery.shard_biases(ITEMS[:2], BANK, NNN(3), np.empty((50, 0), np.float32), None),
        NNN(3).fit(BANK).bias(ITEMS[:2]),
    )


def test_shards_that_do_not_fit():
    with pytest.raises(InvalidInput, match="empty"):
        ray_gallery.shard_items(ITEMS[:0], BANK)
    with pytest.raises(DimensionMismatch):
        ray_gallery.shard_items(lambda: ITEMS[:, :3], BANK)
