"""Biases times the agreement of the bank's halves."""

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    Blend,
    InvalidInput,
    InvalidParameter,
    QueryBank,
    RelativeNNN,
    Sinkhorn,
)
from milvus_hubness.correction.estimators import from_dict, to_dict
from milvus_hubness.correction.estimators.base import is_same

RNG = np.random.default_rng(11)
HUBS = RNG.normal(size=(60, 1)) * 0.3
ITEMS = np.float32(np.c_[HUBS, RNG.normal(size=(60, 7)) * 0.2])
BANK = np.float32(np.c_[np.ones((41, 1)), RNG.normal(size=(41, 7)) * 0.5])


def nnn(bank, k):
    scores = np.sort(ITEMS.astype(np.float64) @ bank.astype(np.float64).T, axis=1)
    return scores[:, -k:].mean(1)


def agreement(k):
    """By the definition, in float64: the halves of the documented seed."""
    order = np.random.default_rng(0).permutation(len(BANK))
    first, second = BANK[order[:20]], BANK[order[20:]]
    biases = nnn(first, min(k, 20)), nnn(second, min(k, 20))
    asked = [asking(first, biases[1]), asking(second, biases[0])]
    return without_what_one_half_knows(biases, asked)


def asking(bank, bias):
    """How many queries of the bank ask for each item."""
    scores = bank.astype(np.float64) @ ITEMS.astype(np.float64).T
    half = np.random.default_rng(0).permutation(len(BANK))[:20]
    tau = 0.2 * np.sqrt((BANK[half].astype(np.float64) @ ITEMS.T).var(axis=1).mean())
    shares = np.exp((scores - bias) / tau)
    return (shares / shares.sum(1, keepdims=True)).sum(0)


def without_what_one_half_knows(biases, asked):
    (first, second), (mine, other) = biases, asked
    slope = max(0, np.cov(first - second, mine - other)[0, 1] / np.var(mine - other, ddof=1))
    share = slope * max(0, (-np.corrcoef(mine, other)[0, 1] - 0.55) / 0.45)
    return np.corrcoef(first - share * mine, second - share * other)[0, 1]


@pytest.mark.parametrize("k", [1, 8, 30])
def test_a_bias_is_scaled_by_the_correlation_of_those_of_two_halves(k):
    fitted = NNN(k, 1.0, strength="agreement").fit(BANK, gallery=ITEMS)
    assert fitted.estimator.agreement == pytest.approx(agreement(k), abs=1e-6)
    np.testing.assert_allclose(fitted.bias(ITEMS), agreement(k) * nnn(BANK, k), atol=1e-6)
    new = np.float32(RNG.normal(size=(5, 8)))
    np.testing.assert_allclose(
        fitted.bias(new), fitted.estimator.agreement * NNN(k, 1.0).fit(BANK).bias(new), atol=1e-6
    )


@pytest.mark.parametrize("kind", [NNN(4, 1.0, strength="agreement"), Blend()], ids=["nnn", "blend"])
def test_a_log_that_asks_for_each_item_once_agrees_like_one_that_asks_for_others(kind):
    """Half of it raises the biases of half of the items, all of it raises all alike."""
    rng = np.random.default_rng(5)
    made = rng.normal(size=(600, 64)) / 8
    made[:, 0] += 0.15 * rng.gamma(2, 0.2, 600)
    items = np.float32(made)
    queries = items + np.float32(rng.normal(size=items.shape) * 0.06)
    queries[:, 0] += 1
    gallery, own, others = items[:300], queries[:300], queries[300:]

    full = kind.in_full()
    halves = np.split(np.random.default_rng(0).permutation(300), 2)
    plain = [
        np.corrcoef([full.fit(bank[half], gallery=gallery).bias(gallery) for half in halves])[0, 1]
        for bank in (own, others)
    ]
    assert plain[0] < 0.5 < 0.9 < plain[1]
    assert kind.fit(own, gallery=gallery).estimator.agreement > 0.8
    assert kind.fit(others, gallery=gallery).estimator.agreement > 0.9


def test_the_default_is_the_mean_of_two_estimators_times_the_agreement():
    fitted = Blend().fit(BANK, gallery=ITEMS)
    parts = RelativeNNN(8), Sinkhorn(temperature=0.375)
    mean = np.mean([part.fit(BANK, gallery=ITEMS).bias(ITEMS) for part in parts], axis=0)
    assert 0.5 < fitted.estimator.agreement < 1
    np.testing.assert_allclose(fitted.bias(ITEMS), fitted.estimator.agreement * mean, atol=1e-6)
    whole = Blend(strength=1.0).fit(BANK, gallery=ITEMS)
    np.testing.assert_allclose(whole.bias(ITEMS), mean, atol=1e-6)
    half = Blend(strength=0.5).fit(BANK, gallery=ITEMS)
    np.testing.assert_allclose(half.bias(ITEMS), 0.5 * mean, atol=1e-6)


def test_halves_that_disagree_leave_the_raw_search():
    """Queries without a common direction: each half has hubs of its own."""
    noise = np.float32(np.random.default_rng(2).normal(size=(12, 600)))
    items = np.float32(np.random.default_rng(3).normal(size=(40, 600)))
    assert NNN(1, 1.0, strength="agreement").fit(noise, gallery=items).estimator.agreement < 0.3
    one = NNN(1, strength="agreement").fit(BANK[:1], gallery=ITEMS)
    assert one.estimator.agreement == 0
    assert not one.bias(ITEMS).any()


def test_it_is_stored_and_measured_again_by_the_next_fit():
    fitted = Blend().fit(BANK, gallery=ITEMS)
    values = to_dict(fitted.estimator)
    assert values["agreement"] == fitted.estimator.agreement
    assert "strength" not in values, "it is the default"
    assert to_dict(NNN(3, strength="agreement"))["strength"] == "agreement"
    restored = from_dict(values).restore(QueryBank(BANK), fitted.potentials)
    np.testing.assert_array_equal(restored.bias(ITEMS), fitted.bias(ITEMS))
    assert is_same(Blend(), values)
    again = from_dict(values).fit(BANK[:30], gallery=ITEMS)
    assert again.estimator.agreement != fitted.estimator.agreement


def test_what_is_missing_is_named():
    with pytest.raises(InvalidInput, match="fitted on the gallery"):
        NNN(3, strength="agreement").fit(BANK)
    with pytest.raises(InvalidParameter, match="has no agreement yet"):
        NNN(3, strength="agreement").restore(BANK, np.empty((len(BANK), 0))).bias(ITEMS)
    for strength in (-0.5, "much", None, np.nan):
        with pytest.raises(InvalidParameter, match="strength must be"):
            NNN(3, strength=strength)
    with pytest.raises(InvalidParameter, match="\"agreement\" or a number from 0 up, not 'much'"):
        NNN(3, strength="much")
