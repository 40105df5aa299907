"""Biases from the products of items with the whole bank, beside their definition in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import (
    CSLS,
    NNN,
    Blend,
    DistributionNormalization,
    DualBankSinkhorn,
    DualInvertedSoftmax,
    InvertedSoftmax,
    RelativeNNN,
    Sinkhorn,
)
from milvus_hubness.correction.estimators.base import ESTIMATORS
from milvus_hubness.errors import BankTooSmall, InvalidInput

ITEMS, BANK, DIM = 7, 40, 6

EVERY = [
    NNN(3, 0.75),
    NNN(BANK, -0.5),
    CSLS(4, strength="agreement"),
    InvertedSoftmax(0.1),
    DistributionNormalization(0.5),
    RelativeNNN(3),
    Sinkhorn(0.1),
    DualBankSinkhorn(0.2),
    Blend(),
    Blend(
        [
            Blend([Sinkhorn(0.3), CSLS(2)], [0.5, 0.5], strength=0.7),
            DualBankSinkhorn(0.1),
            DistributionNormalization(1.0),
        ],
        [0.5, 0.3, 0.2],
        strength=1.0,
    ),
]
ONLY_FROM_VECTORS = [DualInvertedSoftmax(0.1, 0.3)]
"""Estimators whose biases need products with the target bank too."""


OTHERS = [
    kind().clamped(BANK)
    for kind in ESTIMATORS.values()
    if kind.__module__.startswith("milvus_hubness.")
    and kind not in map(type, [*EVERY, *ONLY_FROM_VECTORS])
]
"""Estimators that are not listed: their two formulas are compared with each other."""


def logsumexp(values, tau):
    largest = values.max(-1)
    return largest + tau * np.log(np.exp((values - largest[..., None]) / tau).sum(-1))


def oracle(estimator, scores, potentials):
    """(n,) biases by the definition, from scores (n, m) and potentials (m, p), all in float64."""
    return estimator.factor_on_formula * at_full_strength(estimator, scores, potentials)


def at_full_strength(estimator, scores, potentials):
    match estimator:
        case Blend():
            parts = zip(estimator.with_columns(), estimator.weights, strict=True)
            return sum(
                weight * oracle(part, scores, potentials[:, columns])
                for (part, columns), weight in parts
            )
        case NNN():
            return estimator.alpha * np.sort(scores)[:, -estimator.k :].mean(1)
        case RelativeNNN():
            return np.sort(scores + potentials[:, 0])[:, -estimator.k :].mean(1)
        case CSLS():
            return 0.5 * np.sort(scores)[:, -estimator.k :].mean(1)
        case DistributionNormalization():
            return estimator.lam * scores.mean(1)
        case InvertedSoftmax():
            return logsumexp(scores, estimator.tau)
        case Sinkhorn():
            return logsumexp(scores + potentials[:, 0], estimator.tau)


def fitted_on(estimator, seed, length=1.0):
    """The fit, new items, and their products with the bank."""
    rng = np.random.default_rng(seed)
    bank, items, targets = (
        (length * rng.normal(size=(n, DIM)) / 3).astype(np.float32) for n in (BANK, ITEMS, 25)
    )
    fitted = estimator.fit(QueryBank(bank), gallery=items, target_bank=targets)
    return fitted, items, items @ bank.T


@pytest.mark.parametrize("estimator", EVERY, ids=repr)
@given(seed=st.integers(0, 2**32 - 1), length=st.sampled_from([0.01, 1.0, 5.0]))
def test_they_are_those_of_the_definition(estimator, seed, length):
    fitted, items, products = fitted_on(estimator, seed, length)
    wanted = oracle(fitted.estimator, products.astype(float), fitted.potentials.astype(float))
    scale = max(1.0, float(np.abs(products).max()))
    found = fitted.bias_of_products(products, are_new=False)
    np.testing.assert_allclose(found, wanted, atol=5e-6 * scale)
    np.testing.assert_allclose(found, fitted.bias(items), atol=5e-6 * scale)


@pytest.mark.parametrize("estimator", [*EVERY, *OTHERS], ids=repr)
def test_those_of_new_items_leave_room_as_those_from_their_vectors_do(estimator):
    fitted, items, products = fitted_on(estimator, seed=3)
    if estimator in OTHERS and not fitted.takes_products:
        pytest.skip(f"{estimator!r} needs the vectors")
    np.testing.assert_allclose(
        fitted.bias_of_products(products, are_new=False), fitted.bias(items), atol=2e-6
    )
    found = fitted.bias_of_products(products, are_new=True)
    np.testing.assert_allclose(found, fitted.new_bias(items), atol=2e-6)


@pytest.mark.parametrize("tau", [5e-324, 1e-200, 1e200])
def test_any_temperature(tau):
    rng = np.random.default_rng(4)
    bank, items = (rng.normal(size=(n, DIM)).astype(np.float32) for n in (BANK, ITEMS))
    with np.errstate(all="raise", under="ignore", over="warn", divide="warn"):
        for estimator in (InvertedSoftmax(tau), Sinkhorn(tau, items=9, mean_bias=0.0)):
            potentials = np.zeros((BANK, estimator.potentials))
            fitted = estimator.restore(bank, potentials)
            for are_new in (False, True):
                found = fitted.bias_of_products(items @ bank.T, are_new=are_new)
                assert not np.isnan(found).any()


@pytest.mark.parametrize(
    "estimator", [*ONLY_FROM_VECTORS, Blend([NNN(3), *ONLY_FROM_VECTORS])], ids=repr
)
def test_an_estimator_that_needs_more_says_so(estimator):
    fitted, _, products = fitted_on(estimator, seed=5)
    assert not fitted.takes_products
    with pytest.raises(InvalidInput, match=r"DualInvertedSoftmax.*pass vectors"):
        fitted.bias_of_products(products, are_new=False)


def test_a_restored_bank_that_is_too_small_is_named():
    with pytest.raises(BankTooSmall, match="has 3 queries; at least 8 are needed"):
        RelativeNNN(8).restore(np.ones((3, DIM)), np.zeros((3, 1)))
