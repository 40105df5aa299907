"""Biases that a quantiser with one range for all columns, or one that rotates, leaves in the ranking."""

from dataclasses import replace

import numpy as np
import pytest

from milvus_hubness.correction.codec.index_hints import measured_on
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.parts import LARGEST_SPREAD, BiasSlots
from milvus_hubness.correction.codec.quantisation import spread_for, with_bias_scale, with_spread
from tests.support.galleries import embedding_like, products_of

METRICS = ["IP", "COSINE", "L2"]
FEW = 10


def int8(stored, sent, quantile=0.99):
    """Products as Qdrant's scalar quantiser computes them: one range, a quantile of all numbers, for both sides."""
    low, high = np.quantile(stored, [(1 - quantile) / 2, (1 + quantile) / 2])
    step = (high - low) / 127

    def rounded(numbers):
        return np.rint((np.clip(numbers, low, high) - low) / step) * step + low

    return rounded(sent) @ rounded(stored).T


def rotated_signs(stored, sent):
    """Products with 1-bit codes of randomly rotated vectors, as RaBitQ (Gao and Long, SIGMOD 2024) has them."""
    width = stored.shape[1]
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(width, width)))[0]
    centre = stored.mean(axis=0)
    residuals = (stored - centre) @ rotation
    codes = np.sign(residuals)
    factors = (residuals**2).sum(axis=1) / np.abs(residuals).sum(axis=1)
    return (sent @ rotation) @ (codes * factors[:, None]).T + (sent @ centre)[:, None]


def recall(products, exact):
    best, true = (np.argpartition(-scores, FEW, axis=1)[:, :FEW] for scores in (products, exact))
    return np.mean([np.isin(one, other).mean() for one, other in zip(true, best, strict=True)])


def recalls(metric, dim, products, strength=1.0):
    """Recall@10 of the exact corrected ranking through a quantiser: of the plain layout, of the spread one; and of the
    raw ranking, of vectors without a bias."""
    items, queries, biases = embedding_like(dim, metric)
    raw = products_of(queries, items, metric)
    plain = measured_on(Layout(dim, metric), items, queries, graph_hint=False)
    spread = measured_on(
        Layout(dim, metric, BiasSlots(spread=spread_for(dim, metric))),
        items,
        queries,
        graph_hint=False,
    )
    spread = with_bias_scale(spread, items, biases, strength)
    exact = raw - strength * biases
    found = [
        recall(
            products(layout.augment(items, biases), layout.encode_queries(queries, strength)), exact
        )
        for layout in (plain, spread)
    ]
    unit = np.linalg.norm(items, axis=1, keepdims=True) if metric == "COSINE" else 1
    best = recall(products(items / unit, queries), (queries @ (items / unit).T).astype(float))
    return (*found, best)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dim", [96, 384, 1_536])
def test_one_range_for_all_columns_keeps_the_correction(metric, dim):
    before, after, plain = recalls(metric, dim, int8)
    assert before < plain - 0.1, "in one column the quantiser takes it away"
    assert after > plain - 0.05


@pytest.mark.parametrize("metric", ["IP", "COSINE"])
def test_the_whole_range_of_values_keeps_it_too(metric):
    """Without a quantile, Qdrant takes the least and the greatest number."""
    before, after, plain = recalls(metric, 384, lambda stored, sent: int8(stored, sent, 1.0))
    assert before < plain - 0.1
    assert after > plain - 0.05


def test_a_strength_above_one_is_within_the_range_if_it_is_named():
    before, after, plain = recalls("IP", 384, int8, strength=1.5)
    assert after > before + 0.15
    assert after > plain - 0.08


@pytest.mark.parametrize("metric", ["IP", "COSINE"])
def test_a_rotation_keeps_more_of_a_spread_bias(metric):
    before, after, plain = recalls(metric, 384, rotated_signs)
    assert after > before + 0.05
    assert after > plain - 0.08


def test_the_spread_grows_with_the_dimension_and_is_a_power_of_two():
    dims = (1, 96, 97, 256, 384, 385, 768, 1_536, 32_768)
    for metric in ("IP", "COSINE"):
        assert [spread_for(dim, metric) for dim in dims] == [
            2,
            2,
            4,
            8,
            8,
            16,
            16,
            32,
            LARGEST_SPREAD,
        ]
    assert [spread_for(dim, "L2") for dim in dims] == [2, 4, 8, 16, 16, 32, 32, 64, LARGEST_SPREAD]
    assert spread_for(384, "Manhattan") == 1


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e3])
def test_a_scaled_bias_has_the_size_of_the_numbers_of_the_vector(metric, factor):
    items, _, biases = embedding_like(384, metric)
    items, biases = (
        np.float32(factor) * items,
        biases * np.float32(factor**2 if metric != "COSINE" else 1),
    )
    layout = measured_on(Layout(384, metric, BiasSlots(spread=8)), items, graph_hint=False)
    layout = with_bias_scale(layout, items, biases)
    stored = layout.augment(items, biases)
    size = stored[:, :384].std()
    assert size / 2 < stored[:, layout.columns_of(0)].std() < 2 * size
    if metric == "L2":
        assert size / 4 < stored[:, 385 : layout.slot_columns.start].std() < 4 * size
        assert not stored[:, 384].any()
    np.testing.assert_array_equal(layout.biases(stored), biases)


@pytest.mark.parametrize("biases", [np.zeros(5), np.full(5, 0.3), np.empty(0)])
def test_biases_without_a_spread_have_no_scale(biases):
    layout, items = Layout(64, "IP", BiasSlots(spread=4)), np.ones((len(biases), 64), np.float32)
    assert with_bias_scale(layout, items, biases.astype(np.float32)) == layout


@pytest.mark.parametrize("deviation", [1e-30, 1e30])
def test_extreme_biases_have_a_scale_that_a_layout_accepts(deviation):
    items = np.random.default_rng(0).normal(size=(9, 64)).astype(np.float32)
    biases = (deviation * np.linspace(-1, 1, 9)).astype(np.float32)
    for metric in METRICS:
        layout = measured_on(Layout(64, metric, BiasSlots(spread=4)), items, graph_hint=False)
        with_bias_scale(layout, items, biases)


def test_another_spread_drops_what_was_measured_for_the_former():
    items = np.random.default_rng(0).normal(size=(50, 20)).astype(np.float32)
    hinted = measured_on(Layout(20, "IP"), items, items)
    assert hinted.graph_hint
    assert with_spread(hinted, 4) == Layout(20, "IP", BiasSlots(spread=4))
    assert hinted.stores_like(replace(hinted, graph_hint=None))
    assert not hinted.stores_like(with_spread(hinted, 4))
