"""Convergence, warm starts, restoring, and the sparse graph."""

from __future__ import annotations

import numpy as np
import pytest

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import NNN, Blend, DualBankSinkhorn, Sinkhorn
from milvus_hubness.correction.estimators.base import from_dict, to_dict
from milvus_hubness.correction.estimators.products import (
    FULL_SHARE,
    MOST_PRODUCTS,
    FittedItems,
    logsumexp_with_room,
)
from milvus_hubness.correction.estimators.sinkhorn import NEIGHBORS
from milvus_hubness.correction.estimators.steps import AllScores, PairSteps, scores_for
from milvus_hubness.correction.kernels import topk
from milvus_hubness.correction.kernels.policy import kernel_policy
from milvus_hubness.errors import (
    DimensionMismatch,
    InvalidInput,
    InvalidParameter,
    NonFiniteVectors,
)
from tests.support.real_data import load_task, needs_real_data

RNG = np.random.default_rng(0)
BANK = QueryBank(RNG.standard_normal((60, 8)) / 3)
GALLERY = (RNG.standard_normal((45, 8)) / 3).astype(np.float32)


def test_it_converges_and_says_so():
    fitted = Sinkhorn(0.2, iterations=500, tol=1e-4).fit(BANK, gallery=GALLERY)
    assert fitted.diagnostics.converged
    assert fitted.diagnostics.marginal_error <= 1e-4
    assert 1 < fitted.diagnostics.iterations < 500
    scores = BANK.vectors @ GALLERY.T + fitted.potentials - fitted.bias(GALLERY)
    plan = np.exp(scores.astype(np.float64) / 0.2)
    plan /= plan.sum()
    np.testing.assert_allclose(plan.sum(0), 1 / 45, rtol=1e-4)
    np.testing.assert_allclose(plan.sum(1), 1 / 60, rtol=5e-3)


def test_it_says_when_it_did_not():
    diagnostics = Sinkhorn(0.02, iterations=2, tol=1e-6).fit(BANK, gallery=GALLERY).diagnostics
    assert diagnostics[:4] == (60, 8, 45, 2)
    assert not diagnostics.converged
    assert diagnostics.marginal_error > 1e-6


@pytest.mark.parametrize(
    "estimator",
    [
        Sinkhorn(0.2, strength=0.5),
        Sinkhorn(temperature=0.4, strength="agreement"),
        DualBankSinkhorn(0.2),
        Blend(),
        Blend((NNN(4), Sinkhorn(temperature=0.4)), (0.3, 0.7), strength=0.8),
    ],
)
def test_the_biases_of_a_fit_on_a_gallery_are_those_that_its_formula_has(estimator):
    """Also with an agreement, whose fit in turn has those of its halves."""
    bank = QueryBank(BANK.vectors, groups=np.repeat(np.arange(30), 2))
    targets = RNG.standard_normal((20, 8)) / 3
    fitted = estimator.fit(bank, gallery=GALLERY, target_bank=targets)
    biases = estimator.gallery_biases(bank, GALLERY, targets)
    np.testing.assert_allclose(biases, fitted.bias(GALLERY), atol=1e-5)
    # Settled, it has the same agreement on any other bank.
    again = fitted.estimator.settled().fit(BANK, gallery=GALLERY, target_bank=targets)
    assert again.estimator.share == pytest.approx(fitted.estimator.share)
    assert again.estimator.agreement in (None, fitted.estimator.agreement)


@pytest.mark.parametrize("neighbors", [None, 10])
def test_a_warm_start_needs_fewer_iterations(neighbors):
    estimator = Sinkhorn(0.05, iterations=1000, tol=1e-3, neighbors=neighbors)
    cold = estimator.fit(BANK, gallery=GALLERY)
    warm = estimator.fit(BANK, gallery=GALLERY, start=cold.potentials)
    assert warm.diagnostics.iterations < cold.diagnostics.iterations / 2


def test_a_fit_is_restored_from_bank_and_potentials():
    estimator = Sinkhorn(0.05)
    fitted = estimator.fit(BANK, gallery=GALLERY)
    assert fitted.potentials.shape == (60, 1)
    assert fitted.potentials.dtype == np.float32
    for again in (
        estimator.restore(BANK, fitted.potentials),
        estimator.restore(BANK, fitted.potentials.tolist()),
    ):
        np.testing.assert_array_equal(again.bias(GALLERY), fitted.bias(GALLERY))
        assert again.diagnostics == (60, 8, None, None, None, None, None)


def test_a_dual_bank_fit_is_restored_without_the_target_bank():
    estimator = DualBankSinkhorn(0.05)
    fitted = estimator.fit(BANK, gallery=GALLERY, target_bank=GALLERY[:7] + 1)
    assert fitted.diagnostics.items == 52
    again = estimator.restore(BANK, fitted.potentials)
    np.testing.assert_array_equal(again.bias(GALLERY), fitted.bias(GALLERY))


def test_all_neighbors_are_the_dense_problem():
    dense = Sinkhorn(0.05).fit(BANK, gallery=GALLERY)
    for neighbors in (60, 1000):
        sparse = Sinkhorn(0.05, neighbors=neighbors).fit(BANK, gallery=GALLERY)
        np.testing.assert_allclose(sparse.bias(GALLERY), dense.bias(GALLERY), atol=1e-5)
        assert sparse.diagnostics.iterations == dense.diagnostics.iterations


@pytest.mark.parametrize("near", [3, None])
def test_steps_are_log_sum_exps_for_several_temperatures_at_once(near):
    """Over the nearest pairs, or over all. The shares are those of the bank's marginal."""
    taus = np.array([0.05, 0.1, 1.0])
    scores = BANK.vectors.astype(np.float64) @ GALLERY.T
    steps = AllScores(BANK.vectors, GALLERY)
    if near is not None:
        steps = PairSteps.nearest(
            topk(GALLERY, BANK.vectors, near), topk(BANK.vectors, GALLERY, near)
        )
        kept = np.zeros_like(scores, bool)
        np.put_along_axis(kept, np.argsort(-scores, axis=1)[:, :near], True, axis=1)
        np.put_along_axis(kept, np.argsort(-scores, axis=0)[:near], True, axis=0)
        scores[~kept] = -np.inf
    g = RNG.standard_normal((3, 45)).astype(np.float32)
    f = steps.from_items(g, taus)
    following, shares = steps.from_bank(f, taus)
    for which, tau in enumerate(taus):
        np.testing.assert_allclose(
            f[which], -tau * np.log(np.exp((scores + g[which]) / tau).sum(1)), atol=1e-5
        )
        weighted = scores + f[which][:, None]
        np.testing.assert_allclose(
            following[which], -tau * np.log(np.exp(weighted / tau).sum(0)), atol=1e-5
        )
        plan = np.exp((weighted + following[which]) / tau)
        np.testing.assert_allclose(shares[which], plan.sum(1), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(shares.sum(1), 45, rtol=1e-5)


@pytest.mark.parametrize("neighbors", [None, 1, 5])
def test_odd_galleries(neighbors):
    """All-zero rows, twice the same row, one item, one query, a very low temperature."""
    estimator = Sinkhorn(0.001, neighbors=neighbors)
    gallery = np.concatenate([np.zeros((2, 8), np.float32), GALLERY[:3], GALLERY[:3]])
    bias = estimator.fit(BANK, gallery=gallery).bias(gallery)
    assert np.isfinite(bias).all()
    np.testing.assert_allclose(bias[2:5], bias[5:8], atol=1e-5)
    assert np.isfinite(estimator.fit(BANK, gallery=GALLERY[:1]).bias(GALLERY)).all()
    assert np.isfinite(
        estimator.fit(QueryBank(BANK.vectors[:1]), gallery=GALLERY).bias(GALLERY)
    ).all()
    assert np.isfinite(
        estimator.fit(QueryBank(np.zeros((4, 8))), gallery=GALLERY).bias(GALLERY)
    ).all()


def test_bad_input():
    estimator = Sinkhorn(0.05)
    with pytest.raises(InvalidInput, match="Sinkhorn is fitted on the gallery"):
        estimator.fit(BANK)
    with pytest.raises(InvalidInput, match="DualBankSinkhorn needs reference items"):
        DualBankSinkhorn(0.05).fit(BANK, gallery=GALLERY)
    with pytest.raises(InvalidInput, match="the gallery is empty"):
        estimator.fit(BANK, gallery=GALLERY[:0])
    with pytest.raises(DimensionMismatch, match="the gallery has dimension 7"):
        estimator.fit(BANK, gallery=GALLERY[:, :7])
    with pytest.raises(DimensionMismatch, match="the target bank has dimension 7"):
        DualBankSinkhorn(0.05).fit(BANK, gallery=GALLERY, target_bank=GALLERY[:, :7])
    with pytest.raises(NonFiniteVectors, match="the gallery"):
        estimator.fit(BANK, gallery=GALLERY * np.nan)
    for bad in (np.zeros(60), np.zeros((59, 1)), np.zeros((60, 2))):
        with pytest.raises(InvalidInput, match=r"potentials must have shape \(60, 1\)"):
            estimator.fit(BANK, gallery=GALLERY, start=bad)
        with pytest.raises(InvalidInput, match=r"potentials must have shape \(60, 1\)"):
            estimator.restore(BANK, bad)
    with pytest.raises(NonFiniteVectors, match="the potentials"):
        estimator.restore(BANK, np.full((60, 1), np.nan))


def test_the_scores_are_had_by_size():
    assert scores_for(10_000, 20_000) == "float32"
    assert scores_for(20_000, 20_000) == "recomputed"
    assert scores_for(100_000, 100_000) == "recomputed"
    assert scores_for(1_000_000, 1_000_000) == "sparse"
    free = 130 * 2**30
    assert scores_for(100_000, 100_000, free) == "float32"
    assert scores_for(200_000, 200_000, free) == "recomputed"
    assert scores_for(1_000_000, 1_000_000, free) == "recomputed"


@pytest.mark.parametrize(("memory", "scores"), [(1 << 30, "float32"), (0, "recomputed")])
@pytest.mark.parametrize("tile", [100, 1 << 21])
def test_however_the_scores_are_had_the_fit_is_the_same(memory, scores, tile):
    exact = (BANK.vectors @ GALLERY.T).astype(np.float64)
    g = np.zeros(45)
    for _ in range(10):
        f = -0.05 * np.log(np.exp((exact + g) / 0.05).sum(1))
        g = -0.05 * np.log(np.exp((exact + f[:, None]) / 0.05).sum(0))
    with kernel_policy(sinkhorn_limits=(memory, 1e9), tile_size=tile):
        fitted = Sinkhorn(0.05, iterations=10, tol=0, device="cpu").fit(BANK, gallery=GALLERY)
    assert fitted.diagnostics.scores == scores
    assert fitted.diagnostics.iterations == 10
    np.testing.assert_allclose(fitted.potentials[:, 0], f, atol=1e-6)


@pytest.mark.parametrize("memory", [1 << 30, 0])
def test_numpy_balances_as_torch_does(memory):
    """Whether the scores are stored or computed again in blocks; new items too."""
    on_torch = Sinkhorn(0.05, iterations=10, tol=0, device="cpu").fit(BANK, gallery=GALLERY)
    with kernel_policy(kernel="numpy", sinkhorn_limits=(memory, 1e9), tile_size=100):
        on_arrays = Sinkhorn(0.05, iterations=10, tol=0).fit(BANK, gallery=GALLERY)
        new_bias = on_arrays.new_bias(GALLERY)
    assert on_arrays.diagnostics.scores == ("float32" if memory else "recomputed")
    np.testing.assert_allclose(on_arrays.potentials, on_torch.potentials, atol=1e-6)
    np.testing.assert_allclose(new_bias, on_torch.new_bias(GALLERY), atol=1e-6)


def test_too_many_pairs_are_balanced_over_the_nearest():
    bank, gallery = QueryBank(RNG.standard_normal((200, 8)) / 3), RNG.standard_normal((150, 8)) / 3
    with kernel_policy(sinkhorn_limits=(0, 0)):
        fitted = Sinkhorn(0.05).fit(bank, gallery=gallery)
    assert fitted.diagnostics.scores == "sparse"
    sparse, whole = (
        Sinkhorn(0.05, neighbors=k).fit(bank, gallery=gallery) for k in (NEIGHBORS, 200)
    )
    np.testing.assert_array_equal(fitted.potentials, sparse.potentials)
    assert np.abs(fitted.potentials - whole.potentials).max() > 1e-6


NEW = 12


@pytest.fixture(scope="module")
def grown():
    """A fit on the first items of a gallery, and the others, which come later."""
    rng = np.random.default_rng(5)
    items, bank = (rng.standard_normal((n, 6)).astype(np.float32) / 2 for n in (80 + NEW, 60))
    return Sinkhorn(temperature=0.3).fit(QueryBank(bank), gallery=items[:-NEW]), items[-NEW:]


def by_definition(fitted, new, fitted_items=80, share=1.0):
    """(n,) float64 biases of new items that come together, of which a share counts."""
    tau, m = fitted.estimator.tau, len(fitted.bank)
    scores = fitted.bank.vectors.astype(float) @ new.astype(float).T
    f = room = fitted.potentials[:, 0].astype(float)
    for _ in range(5):
        biases = tau * np.log(np.exp((scores + room[:, None]) / tau).sum(0))
        taken = share * m / fitted_items * np.exp((scores - biases) / tau).sum(1)
        room = -tau * np.log(np.exp(-f / tau) + taken)
    room = room - (room - f).mean()
    return tau * np.log(np.exp((scores + room[:, None]) / tau).sum(0))


def test_new_items_leave_room_for_each_other_in_any_order(grown):
    fitted, new = grown
    assert fitted.estimator.items == 80
    np.testing.assert_allclose(fitted.new_bias(new), by_definition(fitted, new), atol=1e-5)
    order = np.random.default_rng(0).permutation(NEW)
    np.testing.assert_allclose(fitted.new_bias(new[order]), fitted.new_bias(new)[order], atol=1e-6)
    again = fitted.estimator.restore(fitted.bank, fitted.potentials)
    np.testing.assert_array_equal(again.new_bias(new), fitted.new_bias(new))
    assert fitted.new_bias(new[:0]).shape == (0,)
    for unknown in ({}, {"items": 80}, {"mean_bias": 0.5}):
        with pytest.raises(InvalidParameter, match=r"how many items .* mean bias: fit it"):
            Sinkhorn(0.1, **unknown).restore(fitted.bank, fitted.potentials).new_bias(new)


OLD = 200
AWAY = np.array([0, 0, 0, 2.5], np.float32)
"""The direction of the second topic, which no query and no fitted item has."""


@pytest.fixture(scope="module")
def one_topic():
    """A fit on a bank and OLD items of one topic."""
    rng = np.random.default_rng(6)
    bank, items = (rng.standard_normal((n, 4)).astype(np.float32) / 2 for n in (150, OLD))
    bank[:, 3] = items[:, 3] = 0
    bank -= 0.3 * AWAY
    return Sinkhorn(temperature=0.3).fit(QueryBank(bank), gallery=items)


def arriving(count, topic):
    rng = np.random.default_rng(count)
    return rng.standard_normal((count, 4)).astype(np.float32) / 2 + topic * AWAY


def counted_share(fitted, new):
    """By the definition: e^((mean of the new items' biases alone − that of the fitted ones)/tau)."""
    estimator = fitted.estimator
    above = float(fitted.bias(new).astype(float).mean()) - estimator.mean_bias
    return max(FULL_SHARE * OLD / len(new), np.exp(min(0, above / estimator.tau)))


def test_the_mean_bias_of_a_fit_is_that_of_its_items():
    for neighbors in (None, 10):
        fitted = Sinkhorn(0.1, neighbors=neighbors).fit(BANK, gallery=GALLERY)
        assert fitted.estimator.mean_bias == pytest.approx(fitted.bias(GALLERY).mean(), abs=1e-6)
        assert fitted.estimator.unmeasured().mean_bias is None
        assert from_dict(to_dict(fitted.estimator)).mean_bias == fitted.estimator.mean_bias

    dual = DualBankSinkhorn(0.1).fit(BANK, gallery=GALLERY[:30], target_bank=GALLERY[30:])
    assert dual.estimator.mean_bias == pytest.approx(dual.bias(GALLERY).mean(), abs=1e-6)


@pytest.mark.parametrize("topic", [0, 1])
@pytest.mark.parametrize("count", [1, 7, int(FULL_SHARE * OLD)])
def test_a_small_batch_counts_in_full_whatever_its_topic(one_topic, topic, count):
    """To the last bit what it is without a limit."""
    new = arriving(count, topic)
    estimator = one_topic.estimator
    unlimited = logsumexp_with_room(
        new @ one_topic.bank.vectors.T,
        one_topic.potentials[:, 0],
        estimator.tau,
        FittedItems(OLD, estimator.mean_bias),
        full_share=np.inf,
    )
    np.testing.assert_array_equal(one_topic.new_bias(new), unlimited.astype(np.float32))
    np.testing.assert_allclose(unlimited, by_definition(one_topic, new, OLD), atol=1e-5)


@pytest.mark.parametrize("count", [OLD // 2, OLD, 2 * OLD])
def test_a_large_batch_of_a_topic_that_the_bank_lacks_hardly_counts(one_topic, count):
    """Its items would crowd each other out of queries that ask for the fitted ones."""
    new = arriving(count, 1)
    share = counted_share(one_topic, new)
    assert share == pytest.approx(FULL_SHARE * OLD / count), "nothing of it is asked for"
    found = one_topic.new_bias(new)
    np.testing.assert_allclose(found, by_definition(one_topic, new, OLD, share), atol=1e-5)

    # It leaves no more room than the largest small batch of this kind.
    alone = one_topic.bias(new)
    small = arriving(int(FULL_SHARE * OLD), 1)
    moved, allowed = (
        np.abs(new_bias - bias).mean()
        for new_bias, bias in ((found, alone), (one_topic.new_bias(small), one_topic.bias(small)))
    )
    assert 0 < moved < 1.1 * allowed
    assert moved < np.abs(by_definition(one_topic, new, OLD) - alone).mean() / 2


@pytest.mark.parametrize("count", [OLD // 2, OLD, 2 * OLD])
def test_a_large_batch_that_the_bank_asks_for_counts_in_full(one_topic, count):
    new = arriving(count, -0.3)
    assert counted_share(one_topic, new) == 1
    np.testing.assert_allclose(
        one_topic.new_bias(new), by_definition(one_topic, new, OLD), atol=1e-5
    )


def test_a_batch_that_the_bank_asks_for_a_little_counts_in_part(one_topic):
    new = arriving(OLD, 0.1)
    share = counted_share(one_topic, new)
    assert 1.5 * FULL_SHARE < share < 0.9
    wanted = by_definition(one_topic, new, OLD, share)
    np.testing.assert_allclose(one_topic.new_bias(new), wanted, atol=1e-5)
    order = np.random.default_rng(0).permutation(OLD)
    np.testing.assert_allclose(one_topic.new_bias(new[order]), wanted[order], atol=1e-5)


def test_topics_one_after_another_get_what_they_get_mixed():
    """Also where a batch has too many products with the bank for one pass."""
    rng = np.random.default_rng(7)
    bank = rng.standard_normal((6_000, 4)).astype(np.float32) / 2
    sizes = np.full(2, 2_000)
    assert sizes.sum() * len(bank) > MOST_PRODUCTS
    new = rng.standard_normal((sizes.sum(), 4)).astype(np.float32) / 4
    new += np.repeat(np.array([[1, 0, 0, 0], [0, 1, 0, 0]], np.float32), sizes, axis=0)
    estimator = Sinkhorn(0.1, items=2_000, mean_bias=0.0)
    fitted = estimator.restore(QueryBank(bank), np.zeros((len(bank), 1)))

    order = rng.permutation(len(new))
    sorted_by_topic = fitted.new_bias(new)
    mixed = fitted.new_bias(new[order])
    off = np.abs(sorted_by_topic[order] - mixed).mean()
    assert off < 0.1 * np.abs(sorted_by_topic - fitted.bias(new)).mean()


def test_a_blend_leaves_room_in_the_parts_that_balance(grown):
    fitted, new = grown
    blend = Blend([NNN(4), fitted.estimator], [0.25, 0.75], strength=1.0).restore(
        fitted.bank, fitted.potentials
    )
    wanted = 0.25 * NNN(4).fit(fitted.bank).bias(new) + 0.75 * fitted.new_bias(new)
    np.testing.assert_allclose(blend.new_bias(new), wanted, atol=1e-6)


def test_a_blend_fits_those_that_differ_in_temperature_in_shared_passes(monkeypatch):
    """Each has the biases of a fit by itself, also where other ones stand between them."""
    alike = (Sinkhorn(0.2), Sinkhorn(temperature=0.5), Sinkhorn(temperature=1.0))
    others = (NNN(4), Sinkhorn(0.2, iterations=3), DualBankSinkhorn(0.3))
    members = (alike[0], others[0], alike[1], others[1], others[2], alike[2])
    targets = QueryBank(RNG.standard_normal((20, 8)) / 3)
    weights = np.arange(1, 7) / 21
    wanted = weights @ np.stack(
        [each.fit(BANK, gallery=GALLERY, target_bank=targets).bias(GALLERY) for each in members]
    )
    passes = []
    from_bank = AllScores.from_bank
    monkeypatch.setattr(
        AllScores,
        "from_bank",
        lambda steps, f, taus: passes.append(len(taus)) or from_bank(steps, f, taus),
    )
    fitted = Blend(members, weights, strength=1.0).fit(BANK, gallery=GALLERY, target_bank=targets)
    np.testing.assert_allclose(fitted.bias(GALLERY), wanted, atol=1e-6)
    assert passes.count(3) > 0
    restored = fitted.estimator.restore(BANK, fitted.potentials, target_bank=targets)
    np.testing.assert_allclose(restored.bias(GALLERY), wanted, atol=1e-6)


@needs_real_data
def test_new_items_are_corrected_as_a_refit_corrects_them_on_real_data():
    task = load_task("caption_document")
    bank, is_new = (
        QueryBank(task.bank[:2000]),
        np.random.default_rng(0).random(len(task.gallery)) < 0.1,
    )
    fitted = Sinkhorn(iterations=30).fit(bank, gallery=task.gallery[~is_new])
    refitted = fitted.estimator.fit(bank, gallery=task.gallery)
    off = (fitted.bias(task.gallery) - refitted.bias(task.gallery))[~is_new].mean()
    wanted = refitted.bias(task.gallery[is_new]) + off
    before = (fitted.bias(task.gallery[is_new]) - wanted).mean()
    after = (fitted.new_bias(task.gallery[is_new]) - wanted).mean()
    assert before > 0
    assert abs(after) < 0.4 * before
