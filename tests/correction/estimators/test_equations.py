"""Each estimator against its paper's equation, written down naively in float64."""

from __future__ import annotations

import numpy as np
import pytest

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

RNG = np.random.default_rng(0)


def unit(n, d=8):
    rows = RNG.standard_normal((n, d)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


QUERIES, GALLERY, BANK, TARGETS = unit(15), unit(30), unit(40), unit(25)


def s(a, b):
    return a.astype(np.float64) @ b.astype(np.float64).T


def corrected(estimator):
    """(queries, gallery) s − b by the product."""
    fitted = estimator.fit(QueryBank(BANK), gallery=GALLERY, target_bank=TARGETS)
    bias = fitted.bias(GALLERY)
    assert bias.shape == (30,)
    assert bias.dtype == np.float32
    return s(QUERIES, GALLERY) - bias


def assert_same_ranking_scores(ours, papers):
    """Equal up to what depends on the query alone."""
    np.testing.assert_allclose(
        ours - ours.mean(1, keepdims=True), papers - papers.mean(1, keepdims=True), atol=2e-6
    )


@pytest.mark.parametrize(("k", "alpha"), [(1, 0.75), (7, 0.25), (40, 1.5)])
def test_nnn(k, alpha):
    expected = np.empty((15, 30))
    for r in range(30):
        nearest = sorted((float(s(q[None], GALLERY[r][None])[0, 0]) for q in BANK), reverse=True)[
            :k
        ]
        expected[:, r] = s(QUERIES, GALLERY[r][None])[:, 0] - alpha * sum(nearest) / k
    np.testing.assert_allclose(corrected(NNN(k, alpha)), expected, atol=1e-6)


@pytest.mark.parametrize(("k", "discount", "finds"), [(1, 0.5, 10), (8, 0.0, 3), (40, 1.0, 30)])
def test_nnn_on_relative_scores(k, discount, finds):
    scores = s(BANK, GALLERY)
    found = np.sort(scores, axis=1)[:, -finds:].mean(1, keepdims=True)
    relative = np.sort(scores - discount * found, axis=0)[-k:].mean(0)
    np.testing.assert_allclose(
        corrected(RelativeNNN(k, discount, finds)), s(QUERIES, GALLERY) - relative, atol=1e-6
    )


@pytest.mark.parametrize("k", [1, 10, 30])
def test_csls(k):
    r_target = np.sort(s(QUERIES, GALLERY), axis=1)[:, -k:].mean(1, keepdims=True)
    r_source = np.sort(s(BANK, GALLERY), axis=0)[-k:].mean(0, keepdims=True)
    papers = 2 * s(QUERIES, GALLERY) - r_target - r_source
    assert_same_ranking_scores(corrected(CSLS(k)), papers / 2)


@pytest.mark.parametrize("tau", [0.005, 0.05, 1.0])
def test_inverted_softmax(tau):
    papers = np.exp(s(QUERIES, GALLERY) / tau) / np.exp(s(BANK, GALLERY) / tau).sum(0)
    np.testing.assert_allclose(corrected(InvertedSoftmax(tau)), tau * np.log(papers), atol=1e-6)


@pytest.mark.parametrize(("tau_query", "tau_target"), [(0.05, 0.05), (0.02, 0.1), (1.0, 0.03)])
def test_dual_inverted_softmax(tau_query, tau_target):
    by_queries = np.exp(s(QUERIES, GALLERY) / tau_query) / np.exp(s(BANK, GALLERY) / tau_query).sum(
        0
    )
    by_targets = np.exp(s(QUERIES, GALLERY) / tau_target) / np.exp(
        s(TARGETS, GALLERY) / tau_target
    ).sum(0)
    scale = 1 / (1 / tau_query + 1 / tau_target)
    np.testing.assert_allclose(
        corrected(DualInvertedSoftmax(tau_query, tau_target)),
        scale * np.log(by_queries * by_targets),
        atol=1e-6,
    )


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_distribution_normalization(lam):
    mean_query, mean_target = BANK.mean(0, dtype=np.float64), GALLERY.mean(0, dtype=np.float64)
    papers = (QUERIES - lam * mean_query) @ (GALLERY - lam * mean_target).T
    assert_same_ranking_scores(corrected(DistributionNormalization(lam)), papers)


def sinkhorn_knopp(scores, tau, iterations):
    """Row and column scalings of exp(scores / tau) to uniform marginals, from ones."""
    m, n = scores.shape
    kernel, beta = np.exp(scores / tau), np.ones(n)
    for _ in range(iterations):
        alpha = (1 / m) / (kernel @ beta)
        beta = (1 / n) / (kernel.T @ alpha)
    return alpha, beta, alpha[:, None] * kernel * beta


@pytest.mark.parametrize("iterations", [1, 2, 10])
@pytest.mark.parametrize("tau", [0.02, 0.1])
def test_sinkhorn(tau, iterations):
    alpha, beta, plan = sinkhorn_knopp(s(BANK, GALLERY), tau, iterations)
    estimator = Sinkhorn(tau, iterations, tol=0)
    assert_same_ranking_scores(corrected(estimator), s(QUERIES, GALLERY) + tau * np.log(beta))
    fitted = estimator.fit(QueryBank(BANK), gallery=GALLERY)
    f = fitted.potentials[:, 0] - tau * np.log(alpha)
    np.testing.assert_allclose(f, f.mean(), atol=2e-6)
    error = np.abs(plan.sum(1) - 1 / 40).sum()
    assert fitted.diagnostics.marginal_error == pytest.approx(error, abs=1e-4)
    assert fitted.diagnostics.iterations == iterations


def test_dual_bank_sinkhorn():
    _, beta, _ = sinkhorn_knopp(s(BANK, np.concatenate([GALLERY, TARGETS])), 0.05, 10)
    papers = s(QUERIES, GALLERY) + 0.05 * np.log(beta[:30])
    assert_same_ranking_scores(corrected(DualBankSinkhorn(0.05, tol=0)), papers)


def test_blend():
    parts = [NNN(5), InvertedSoftmax(0.1), Sinkhorn(0.05)]
    weights = [0.2, 0.5, 0.3]
    mixed = sum(weight * corrected(part) for weight, part in zip(weights, parts, strict=True))
    np.testing.assert_allclose(corrected(Blend(parts, weights, strength=1.0)), mixed, atol=1e-6)
