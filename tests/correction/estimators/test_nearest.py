"""Biases from the nearest bank rows alone against those of the whole bank, both in float64."""

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
    Estimator,
    InvertedSoftmax,
    RelativeNNN,
    Sinkhorn,
)
from milvus_hubness.correction.estimators.nearest import Nearest, Needs, masses
from milvus_hubness.errors import BankTooSmall, InvalidInput

ITEMS, BANK, TARGETS = 7, 40, 25

USUAL = Blend((NNN(16, 0.9), Sinkhorn(0.03)), agreement=0.6)
EVERY = [
    NNN(3, 0.75),
    NNN(3, -0.5),
    CSLS(4, strength="agreement", agreement=0.3),
    InvertedSoftmax(0.1),
    DualInvertedSoftmax(0.1, 0.3),
    DistributionNormalization(0.5),
    RelativeNNN(3),
    Blend([RelativeNNN(2), Sinkhorn(0.3)], agreement=0.8),
    Sinkhorn(0.1),
    DualBankSinkhorn(0.2),
    USUAL,
    Blend(
        [
            Blend([Sinkhorn(0.3), CSLS(2)], [0.5, 0.5], strength=0.7),
            DualInvertedSoftmax(0.2, 0.1),
            DualBankSinkhorn(0.1),
            DistributionNormalization(1.0),
        ],
        [0.4, 0.1, 0.3, 0.2],
        strength=1.0,
    ),
]


def logsumexp(values, tau):
    largest = values.max(-1)
    return largest + tau * np.log(np.exp((values - largest[..., None]) / tau).sum(-1))


def oracle(estimator, scores, target_scores, potentials):
    """(m,) biases by the definition, from all scores (m, n) and (m, t) and potentials (n, p)."""
    factor = estimator.agreement if estimator.strength == "agreement" else estimator.strength
    return factor * at_full_strength(estimator, scores, target_scores, potentials)


def at_full_strength(estimator, scores, target_scores, potentials):
    match estimator:
        case Blend():
            total, first = np.zeros(len(scores)), 0
            for part, weight in zip(estimator.estimators, estimator.weights, strict=True):
                end = first + len(part.needs.temperatures)
                total += weight * oracle(part, scores, target_scores, potentials[:, first:end])
                first = end
            return total
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
        case DualInvertedSoftmax():
            one, two = estimator.tau_query, estimator.tau_target
            by_queries, by_targets = (
                logsumexp(scores, one) / one,
                logsumexp(target_scores, two) / two,
            )
            return one * two / (one + two) * (by_queries + by_targets)
        case Sinkhorn():
            return logsumexp(scores + potentials[:, 0], estimator.tau)


def nearest(scores, seen, potentials, temperatures):
    """What a search for the `seen` nearest tells of all scores (m, n)."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :seen]
    mass = np.full(len(temperatures), -np.inf)
    for page in np.array_split(potentials, 3):
        mass = masses(page, temperatures, mass)
    return Nearest(
        np.take_along_axis(scores, order, 1),
        scores.shape[1] - seen,
        scores.mean(1),
        potentials[order],
        mass,
    )


def drawn(seed, estimator, spread=1.0):
    rng = np.random.default_rng(seed)
    potentials = rng.normal(scale=0.3 * spread, size=(BANK, len(estimator.needs.temperatures)))
    return (
        rng.normal(size=(ITEMS, BANK)) * spread,
        rng.normal(size=(ITEMS, TARGETS)) * spread,
        potentials,
    )


def by_nearest(estimator, scores, target_scores, potentials, seen, seen_targets):
    none = np.empty((TARGETS, 0))
    return estimator.from_nearest(
        nearest(scores, seen, potentials, estimator.needs.temperatures),
        nearest(target_scores, seen_targets, none, ()),
    )


@pytest.mark.parametrize("estimator", EVERY, ids=repr)
@given(
    seed=st.integers(0, 2**32 - 1),
    seen=st.integers(1, BANK),
    seen_targets=st.integers(1, TARGETS),
    spread=st.sampled_from([1e-3, 0.1, 1.0, 30.0]),
)
def test_the_error_is_never_above_its_bound(estimator, seed, seen, seen_targets, spread):
    given_all = drawn(seed, estimator, spread)
    needed = 16 if estimator == USUAL else 4
    found = by_nearest(estimator, *given_all, max(seen, needed), seen_targets)
    missing = oracle(estimator, *given_all) - found.biases
    assert (found.errors >= 0).all()
    assert (missing >= -1e-12 * spread).all()
    assert (missing <= found.errors + 1e-12 * spread).all()


@pytest.mark.parametrize("estimator", EVERY, ids=repr)
def test_with_all_rows_seen_it_is_exact(estimator):
    given_all = drawn(1, estimator)
    found = by_nearest(estimator, *given_all, BANK, TARGETS)
    assert found.biases.dtype == found.errors.dtype == np.float64
    np.testing.assert_allclose(found.biases, oracle(estimator, *given_all), rtol=1e-13, atol=1e-13)
    np.testing.assert_array_equal(found.errors, 0)


@pytest.mark.parametrize("estimator", EVERY, ids=repr)
def test_the_bound_falls_with_every_row_seen(estimator):
    given_all = drawn(2, estimator)
    errors = np.array(
        [
            by_nearest(estimator, *given_all, seen, min(seen, TARGETS)).errors
            for seen in range(16, BANK + 1)
        ]
    )
    assert (np.diff(errors, axis=0) <= 1e-15).all()
    exact = {"NNN", "CSLS", "DistributionNormalization"}
    if not isinstance(estimator, RelativeNNN):  # Exact for each row from some depth on.
        assert (errors[0] > 0).all() != (type(estimator).__name__ in exact)


def test_the_bound_is_tight_where_all_others_score_as_the_last():
    scores = np.c_[np.full((2, 3), 0.5), np.full((2, 37), 0.2)]
    for estimator in (InvertedSoftmax(0.1), Sinkhorn(0.1)):
        potentials = np.full((BANK, len(estimator.needs.temperatures)), 0.3)
        found = by_nearest(estimator, scores, scores[:, :TARGETS], potentials, 4, 1)
        wanted = oracle(estimator, scores, None, potentials)
        np.testing.assert_allclose(found.biases + found.errors, wanted, rtol=1e-12)


def test_it_is_the_fitted_bias():
    rng = np.random.default_rng(3)
    bank, items, targets = (
        rng.normal(size=(n, 6)).astype(np.float32) / 3 for n in (BANK, ITEMS, TARGETS)
    )
    scores, target_scores = (
        items.astype(float) @ other.astype(float).T for other in (bank, targets)
    )
    for estimator in EVERY:
        fitted = estimator.fit(QueryBank(bank), gallery=items, target_bank=targets)
        every = fitted.potentials.astype(float), BANK, TARGETS
        found = by_nearest(fitted.estimator, scores, target_scores, *every)
        np.testing.assert_allclose(found.biases, fitted.bias(items), atol=2e-6)


@pytest.mark.parametrize("tau", [5e-324, 1e-200, 1e200])
def test_any_temperature(tau):
    with np.errstate(all="raise", under="ignore", over="warn", divide="warn"):
        for estimator in (InvertedSoftmax(tau), Sinkhorn(tau), DualInvertedSoftmax(tau, tau)):
            found = by_nearest(estimator, *drawn(4, estimator), 5, 5)
            assert not np.isnan(found.biases + found.errors).any()
            assert (found.errors >= 0).all()


def test_what_estimators_need():
    assert NNN(7).needs == Needs(queries=7)
    assert DistributionNormalization().needs == Needs(mean=True)
    assert DualInvertedSoftmax(0.3, 0.6).needs == Needs(queries=64, targets=64, tolerance=0.001)
    assert DualBankSinkhorn(0.3).needs == Needs(queries=64, temperatures=(0.3,), tolerance=0.001)
    assert EVERY[-1].needs == Needs(64, 64, True, (0.3, 0.1), 0.1 / 300)
    assert all(isinstance(estimator, Estimator) for estimator in EVERY)


def test_what_is_missing_is_named():
    few = nearest(np.ones((2, 3)), 3, np.empty((3, 0)), ())
    for estimator in (NNN(4), CSLS(4)):
        with pytest.raises(
            BankTooSmall, match="4 nearest bank rows are needed, and the search returned 3"
        ):
            estimator.from_nearest(few)
    with pytest.raises(InvalidInput, match="target"):
        DualInvertedSoftmax().from_nearest(few)


def test_masses_join():
    rng = np.random.default_rng(5)
    potentials, tau = rng.normal(size=(9, 2)), (0.1, 2.0)
    wanted = [t * np.log(np.exp(potentials[:, i] / t).sum()) for i, t in enumerate(tau)]
    np.testing.assert_allclose(masses(potentials, tau, [-np.inf] * 2), wanted, rtol=1e-14)
    joined = masses(potentials[4:], tau, masses(potentials[:4], tau, [-np.inf] * 2))
    np.testing.assert_allclose(joined, wanted, rtol=1e-14)
