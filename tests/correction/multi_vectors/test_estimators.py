"""Each estimator over MaxSim against its equation in float64, and what a fit does with documents."""

from __future__ import annotations

import numpy as np
import pytest

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import (
    CSLS,
    DEFAULT_ESTIMATOR,
    NNN,
    Blend,
    DistributionNormalization,
    DualBankSinkhorn,
    DualInvertedSoftmax,
    InvertedSoftmax,
    RelativeNNN,
    Sinkhorn,
    from_dict,
    to_dict,
)
from milvus_hubness.correction.estimators.base import ALIASES, ESTIMATORS, TargetBank
from milvus_hubness.correction.kernels import token_rows as operands_module
from milvus_hubness.correction.kernels import topk
from milvus_hubness.correction.kernels.policy import kernel_policy
from milvus_hubness.correction.multi_vectors import MultiVectors, maxsim
from milvus_hubness.errors import BankTooSmall, DimensionMismatch, InvalidInput

DIM = 12


def texts(count, longest, seed):
    rng = np.random.default_rng(seed)
    rows = [rng.standard_normal((length, DIM)) for length in rng.integers(1, longest + 1, count)]
    # Rounded once, so that the oracle sees the numbers that are stored.
    return [(row / np.linalg.norm(row, axis=1, keepdims=True)).astype(np.float32) for row in rows]


BANK = texts(40, 6, 1)
GALLERY = texts(30, 20, 2)
TARGETS = texts(25, 15, 3)


def s(queries, documents):
    """(queries, documents) MaxSim in float64, pair by pair."""
    return np.array(
        [[(q.astype(float) @ r.astype(float).T).max(1).mean() for r in documents] for q in queries]
    )


def biases(estimator):
    fitted = estimator.fit(
        MultiVectors.from_list(BANK),
        gallery=MultiVectors.from_list(GALLERY),
        target_bank=MultiVectors.from_list(TARGETS),
    )
    bias = fitted.bias(MultiVectors.from_list(GALLERY))
    assert bias.dtype == np.float32
    return bias


def logsumexp(scores, tau):
    return tau * np.log(np.exp(scores / tau).sum(0))


def balanced(scores, tau, iterations):
    """−tau · log of the column scaling after so many rounds of Sinkhorn and Knopp, from ones."""
    kernel = np.exp(scores / tau)
    beta = np.ones(scores.shape[1])
    for _ in range(iterations):
        alpha = (1 / len(scores)) / (kernel @ beta)
        beta = (1 / scores.shape[1]) / (kernel.T @ alpha)
    return -tau * np.log(beta)


def relative(k, discount, finds):
    scores = s(BANK, GALLERY)
    best = np.sort(scores, axis=1)[:, -finds:].mean(1, keepdims=True)
    return np.sort(scores - discount * best, axis=0)[-k:].mean(0)


def dual_softmax(tau_query, tau_target):
    share = tau_target / (tau_query + tau_target)
    by_queries = logsumexp(s(BANK, GALLERY), tau_query)
    return share * by_queries + (1 - share) * logsumexp(s(TARGETS, GALLERY), tau_target)


EQUATIONS = {
    "nnn": (NNN(7, 0.75), lambda: 0.75 * np.sort(s(BANK, GALLERY), 0)[-7:].mean(0)),
    "csls": (CSLS(5), lambda: 0.5 * np.sort(s(BANK, GALLERY), 0)[-5:].mean(0)),
    "dn": (DistributionNormalization(0.5), lambda: 0.5 * s(BANK, GALLERY).mean(0)),
    "is": (InvertedSoftmax(0.05), lambda: logsumexp(s(BANK, GALLERY), 0.05)),
    "relative": (RelativeNNN(8, 0.5, 10), lambda: relative(8, 0.5, 10)),
    "dualis": (DualInvertedSoftmax(0.05, 0.3), lambda: dual_softmax(0.05, 0.3)),
    "sinkhorn": (Sinkhorn(0.05, 10, tol=0), lambda: balanced(s(BANK, GALLERY), 0.05, 10)),
    "dbsn": (
        DualBankSinkhorn(0.05, 10, tol=0),
        lambda: balanced(s(BANK, GALLERY + TARGETS), 0.05, 10)[: len(GALLERY)],
    ),
}


@pytest.mark.parametrize("name", EQUATIONS)
@pytest.mark.parametrize("kernel", ["numpy", "dense"])
def test_each_estimator_has_its_equation_on_maxsim(name, kernel):
    estimator, equation = EQUATIONS[name]
    with kernel_policy(kernel=kernel):
        ours = biases(estimator)
    expected = equation()
    # Potentials are determined up to a constant, which changes no ranking.
    if estimator.potentials:
        ours = ours - ours.mean()
        expected = expected - expected.mean()
    np.testing.assert_allclose(ours, expected, atol=3e-6)


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_all_defaults_are_those_on_vectors_with_these_scores(alias):
    """A document is the vector of its scores, and a query a unit vector: then products are MaxSim."""
    estimator = ESTIMATORS[ALIASES[alias]]().clamped(20)
    scores = s(BANK + TARGETS, GALLERY + TARGETS).T
    units = np.eye(scores.shape[1])
    targets = TargetBank(scores[len(GALLERY) :], asking=units[len(BANK) :].astype(np.float32))
    fitted = estimator.fit(units[: len(BANK)], gallery=scores[: len(GALLERY)], target_bank=targets)
    expected = fitted.bias(scores[: len(GALLERY)])
    np.testing.assert_allclose(biases(estimator), expected, atol=2e-5)


@pytest.mark.parametrize("estimator", [Blend(), DEFAULT_ESTIMATOR, NNN(8), Sinkhorn()])
def test_new_documents_get_biases_and_a_stored_fit_gives_them_again(estimator):
    bank = MultiVectors.from_list(BANK)
    fitted = estimator.fit(bank, gallery=MultiVectors.from_list(GALLERY))
    new = MultiVectors.from_list(TARGETS)
    for bias in (fitted.bias, fitted.new_bias):
        together = bias(new)
        assert np.isfinite(together).all()
        assert together.std() > 0

    restored = from_dict(to_dict(fitted.estimator)).restore(bank, fitted.potentials)
    np.testing.assert_allclose(restored.bias(new), fitted.bias(new), atol=1e-6)
    np.testing.assert_allclose(restored.new_bias(new), fitted.new_bias(new), atol=1e-6)


def test_a_stored_bias_in_every_token_gives_the_corrected_sum():
    """The database's own MaxSim of <d, b> and <q, −1> is m · (s − b)."""
    documents = MultiVectors.from_list(GALLERY)
    fitted = Blend().fit(MultiVectors.from_list(BANK), gallery=documents)
    bias = fitted.bias(documents)
    stored = [np.hstack([r, np.full((len(r), 1), b)]) for r, b in zip(GALLERY, bias, strict=True)]
    sent = [np.hstack([q, np.full((len(q), 1), -1)]) for q in BANK]
    queries = MultiVectors.from_list(sent)
    sums = queries.lengths[:, None] * maxsim(queries, MultiVectors.from_list(stored))
    lengths = np.array([len(q) for q in BANK])[:, None]
    np.testing.assert_allclose(sums, lengths * (s(BANK, GALLERY) - bias), atol=1e-5)


def test_long_queries_weigh_no_more_than_short_ones():
    """A query said twice in one has the same mean, so every bias stays."""
    twice = [np.concatenate([row, row]) if i % 2 else row for i, row in enumerate(BANK)]
    documents = MultiVectors.from_list(GALLERY)
    expected = biases(NNN(8))
    fitted = NNN(8).fit(MultiVectors.from_list(twice), gallery=documents)
    np.testing.assert_allclose(fitted.bias(documents), expected, atol=1e-6)


def test_repeats_share_the_weight_of_one_query():
    repeated = QueryBank(
        MultiVectors.from_list(BANK + [BANK[0]] * 9),
        groups=np.r_[np.arange(len(BANK)), np.zeros(9, int)],
    )
    documents = MultiVectors.from_list(GALLERY)
    fitted = NNN(8).fit(repeated, gallery=documents)
    np.testing.assert_allclose(fitted.bias(documents), biases(NNN(8)), atol=1e-6)
    assert fitted.bank.counts.tolist() == [10, *[1] * (len(BANK) - 1)]


def test_each_score_of_a_fit_is_computed_once(monkeypatch):
    """The default reads them about ten times: its halves, its iterations and its spread."""
    computed = []
    original = operands_module.maxsim_tiles

    def counting(documents, queries, **options):
        computed.append(len(documents) * len(queries))
        return original(documents, queries, **options)

    monkeypatch.setattr(operands_module, "maxsim_tiles", counting)
    bank = MultiVectors.from_list(BANK)
    fitted = DEFAULT_ESTIMATOR.fit(bank, gallery=MultiVectors.from_list(GALLERY))
    assert sum(computed) == len(BANK) * len(GALLERY)

    computed.clear()
    fitted.bias(MultiVectors.from_list(TARGETS))
    assert sum(computed) == len(BANK) * len(TARGETS)


def test_without_room_for_all_scores_they_are_computed_when_read():
    expected = biases(Blend())
    with kernel_policy(sinkhorn_limits=(0, 2e10)):
        np.testing.assert_allclose(biases(Blend()), expected, atol=1e-5)


def test_a_bank_of_multi_vectors_is_a_bank():
    bank = QueryBank.of(MultiVectors.from_list(BANK))
    assert len(bank) == len(BANK)
    assert bank.dim == DIM
    part = bank.take(np.arange(len(BANK)) % 2 == 0)
    np.testing.assert_array_equal(part.vectors.taken()[1], BANK[2])
    assert bank.fingerprint == QueryBank.of(MultiVectors.from_list(BANK)).fingerprint
    assert bank.fingerprint != part.fingerprint
    # Equal tokens, but other rows.
    halved = MultiVectors(np.ones((4, 2)), [0, 2, 4])
    assert QueryBank.of(halved).fingerprint != QueryBank.of(halved[[0]]).fingerprint
    assert len(bank.without(part.vectors)) == len(BANK) - len(part)
    with pytest.raises(BankTooSmall):
        NNN(41).fit(bank)


@pytest.mark.parametrize(
    ("gallery", "error", "words"),
    [
        (np.ones((3, DIM)), InvalidInput, "multi-vectors have no score with vectors"),
        (MultiVectors.from_list([np.ones((2, 5))]), DimensionMismatch, "the gallery has dimension"),
    ],
)
def test_what_has_no_maxsim_is_refused_in_one_line(gallery, error, words):
    with pytest.raises(error, match=words) as raised:
        Blend().fit(MultiVectors.from_list(BANK), gallery=gallery)
    assert "\n" not in str(raised.value)
    with pytest.raises(error):
        NNN(3).fit(MultiVectors.from_list(BANK)).bias(gallery)


@pytest.mark.parametrize("estimator", [Blend(), NNN(3), Sinkhorn(), DEFAULT_ESTIMATOR])
def test_a_bank_of_vectors_has_no_score_with_documents(estimator):
    bank = np.random.default_rng(0).standard_normal((30, DIM))
    with pytest.raises(InvalidInput, match="multi-vectors have no score with vectors"):
        estimator.fit(bank, gallery=MultiVectors.from_list(GALLERY)).bias(
            MultiVectors.from_list(GALLERY)
        )


def test_documents_have_no_score_with_documents():
    rows = operands_module.TokenRows.documents(MultiVectors.from_list(GALLERY))
    with pytest.raises(InvalidInput, match="both operands are documents"):
        topk(rows, rows, 1)
    nearest = topk(rows.as_queries(), rows, 2).indices[:, 0]
    assert (nearest == np.arange(len(rows))).mean() > 0.8
