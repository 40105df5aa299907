"""Near copies in a bank: they are told apart by what they find, and share the weight of one query."""

import numpy as np
import pytest

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.codec.layout import Layout
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
    WithDemand,
)
from milvus_hubness.correction.fitted import Correction, grouped
from milvus_hubness.correction.near_copies import groups_at, smallest_cosine, with_groups
from milvus_hubness.errors import InvalidInput
from tests.support.real_data import load_task, needs_real_data

RNG = np.random.default_rng(3)
DIM = 128
ITEMS = 300


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


GALLERY = unit(RNG.standard_normal((ITEMS, DIM)) + 0.4)
TARGETS = unit(RNG.standard_normal((60, DIM)) + 0.4)
INTENTS = unit(GALLERY + 0.6 * unit(RNG.standard_normal((ITEMS, DIM))))
"""A query for each item."""

EVERY = [
    NNN(5, 0.5),
    CSLS(3),
    RelativeNNN(4),
    InvertedSoftmax(),
    InvertedSoftmax(0.1),
    DualInvertedSoftmax(),
    DistributionNormalization(0.3),
    Sinkhorn(),
    Sinkhorn(0.1, neighbors=8),
    DualBankSinkhorn(),
    Blend(strength=1.0),
    Blend(),
]


def noisy(intents, cosine, rng):
    """Return copies of queries at this cosine."""
    noise = unit(rng.standard_normal(intents.shape))
    return unit(cosine * intents + np.sqrt(1 - cosine**2) * noise)


def popular_log(copies, zipf=1.2, cosine=0.9, seed=0):
    """Return a log (copies, d) of noisy queries by Zipf's law, and the item that each asks for."""
    rng = np.random.default_rng(seed)
    shares = 1 / (1 + rng.permutation(ITEMS)) ** zipf
    items = rng.choice(ITEMS, size=copies, p=shares / shares.sum())
    return noisy(INTENTS[items], cosine, rng), items


def repeated(times):
    """Return a bank that has one of its 40 queries so many times, and the bank without repeats."""
    once = INTENTS[:40]
    rows = np.concatenate([once, np.repeat(once[:1], times - 1, axis=0)])
    return QueryBank(rows), QueryBank(once)


@pytest.mark.parametrize("estimator", EVERY, ids=repr)
def test_a_query_that_a_log_repeats_counts_once(estimator):
    log, once = repeated(200)
    given = {"gallery": GALLERY, "target_bank": TARGETS}
    grouped_log = with_groups(log, GALLERY)
    fitted = estimator.fit(grouped_log, **given)
    if fitted.estimator.strength == "agreement":
        # The halves are of the queries that come, which repeat.
        assert fitted.estimator.agreement > estimator.fit(once, **given).estimator.agreement
        return
    np.testing.assert_allclose(
        fitted.bias(GALLERY), estimator.fit(once, **given).bias(GALLERY), atol=2e-5
    )

    # Without groups, the answer of the repeated query is pushed down.
    answer = int((once.vectors[:1] @ GALLERY.T).argmax())
    counted = estimator.fit(log, **given).bias(GALLERY)
    rise = counted - counted.mean() - (fitted.bias(GALLERY) - fitted.bias(GALLERY).mean())
    assert rise[answer] > 0


def test_the_queries_of_a_group_weigh_as_their_mean_in_every_score():
    rng = np.random.default_rng(5)
    log = noisy(INTENTS[np.repeat(np.arange(30), 4)], 0.9, rng)
    groups = np.repeat(np.arange(30), 4)
    bank = QueryBank(log, groups=groups)
    np.testing.assert_allclose(bank.weights, 0.25)

    # In float64: the k units of weight with the largest scores, where a group counts as a whole.
    scores = log.astype(np.float64) @ GALLERY.T.astype(np.float64)
    of_groups = np.stack([scores[groups == group].mean(0) for group in range(30)])
    expected = 0.75 * np.sort(of_groups, axis=0)[-5:].mean(0)
    np.testing.assert_allclose(NNN(5).fit(bank).bias(GALLERY), expected, atol=1e-6)

    tau = 0.1
    expected = tau * np.log(np.exp(of_groups / tau).sum(0))
    biases = InvertedSoftmax(tau).fit(bank).bias(GALLERY)
    np.testing.assert_allclose(biases, expected, atol=1e-6)

    # The marginals of the groups are equal, those of the items too.
    fitted = Sinkhorn(tau, iterations=500, tol=1e-7).fit(bank, gallery=GALLERY)
    f = fitted.potentials[:, 0].astype(np.float64)
    plan = np.exp((of_groups + f[:, None] - fitted.bias(GALLERY)) / tau)
    np.testing.assert_allclose(plan.sum(0), 1, rtol=1e-4)
    np.testing.assert_allclose(plan.sum(1), ITEMS / 30, rtol=1e-3)


@pytest.mark.parametrize("cosine", [0.97, 0.9, 0.8])
def test_groups_are_the_queries_that_ask_for_the_same_however_noisy_they_are(cosine):
    log, items = popular_log(1_500, cosine=cosine)
    groups = with_groups(QueryBank(log), GALLERY).groups
    together = groups[:, None] == groups[None]
    same = items[:, None] == items[None]
    # Of each query (B-cubed): the share of its group that asks for the same, and the reverse.
    both = (together & same).sum(1)
    assert (both / together.sum(1)).mean() > 0.95
    assert (both / same.sum(1)).mean() > 0.9


def test_queries_without_copies_stay_apart():
    bank = with_groups(QueryBank(INTENTS), GALLERY)
    assert len(bank.condensed) > 0.97 * ITEMS


def test_a_popular_item_is_not_pushed_down_by_its_own_queries():
    log, items = popular_log(2_000)
    popular = np.bincount(items, minlength=ITEMS).argmax()
    fresh = noisy(np.repeat(INTENTS[popular, None], 200, axis=0), 0.9, np.random.default_rng(9))

    def lead(bank):
        bias = Blend().fit(bank, gallery=GALLERY).bias(GALLERY)
        scores = fresh @ GALLERY.T - bias
        return (scores[:, popular] - np.delete(scores, popular, axis=1).max(1)).mean()

    # Against the raw lead: each query counted by itself takes much of it, a group little.
    raw = fresh @ GALLERY.T
    raw_lead = (raw[:, popular] - np.delete(raw, popular, axis=1).max(1)).mean()
    assert lead(QueryBank(log)) < raw_lead
    assert lead(with_groups(QueryBank(log), GALLERY)) > lead(QueryBank(log)) + 0.1 * raw_lead


def test_equal_banks_have_equal_groups_and_zero_or_few_queries_are_no_problem():
    log, _ = popular_log(500)
    log[7] = 0
    bank = QueryBank(log)
    np.testing.assert_array_equal(
        with_groups(bank, GALLERY).groups, with_groups(bank, GALLERY).groups
    )
    few = QueryBank(np.concatenate([INTENTS[:3], INTENTS[:1]]))
    assert with_groups(few, GALLERY).groups.tolist() == [0, 1, 2, 0]
    assert smallest_cosine(few.vectors, unit(few.vectors), GALLERY) == 1.0
    assert with_groups(QueryBank(np.zeros((3, DIM))), GALLERY).groups.tolist() == [0, 0, 0]


def test_a_group_is_merged_by_the_mean_of_its_pairs_not_cut_by_their_noise():
    rng = np.random.default_rng(1)
    dim = 400
    intents = unit(rng.standard_normal((3, dim)))
    log = noisy(np.repeat(intents, 300, axis=0), 0.85, rng)
    pair_cosines = log[:300] @ log[:300].T
    threshold = float(np.quantile(pair_cosines, 0.1))
    groups = groups_at(log, threshold)
    assert groups.max() == 2
    assert [len(set(groups[start : start + 300])) for start in (0, 300, 600)] == [1, 1, 1]


def test_groups_are_kept_and_restored_and_follow_a_subset():
    log, _ = popular_log(800)
    layout = Layout(DIM, "COSINE")
    bank = grouped(layout, QueryBank(log), GALLERY)
    assert grouped(layout, bank, TARGETS) is bank
    assert len(bank.condensed) < len(bank)

    correction = Correction.fit(layout, Blend(), bank, gallery=GALLERY)
    stored = correction.stored_bank(None)
    assert stored.potentials.shape == (800, 2)
    again = Correction.restore(layout, correction.fitted.estimator, stored)
    np.testing.assert_array_equal(again.centred(GALLERY), correction.centred(GALLERY))

    some = bank.take(np.arange(100))
    together = some.groups[:, None] == some.groups[None]
    np.testing.assert_array_equal(together, bank.groups[:100, None] == bank.groups[None, :100])


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (
            {"counts": [1.0, 2.0]},
            "must be 3 numbers, one for each query, not float64 of shape (2,)",
        ),
        ({"counts": [1.0, 0.0, 2.0]}, "must be above 0, which they are not in row 1"),
        ({"counts": [1.0, -1.0, np.nan]}, "must be above 0, which they are not in row 1, 2"),
        ({"counts": ["1", "2", "3"]}, "must be 3 numbers"),
        ({"groups": [0, 1]}, "3 queries have groups"),
        ({"groups": [0, 2, 2]}, "without a gap"),
        ({"groups": [0, 1, 2**62]}, "without a gap"),
        ({"groups": [-1, 0, 1]}, "without a gap"),
    ],
)
def test_counts_and_groups_of_another_length_or_kind_are_refused_in_one_line(wrong, problem):
    with pytest.raises(InvalidInput) as raised:
        QueryBank(np.eye(3), **wrong)
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_bank_file_may_have_counts(tmp_path):
    rows = np.eye(3, dtype=np.float32)
    np.savez(tmp_path / "log.npz", query=rows, count=np.array([5, 1, 2]))
    bank = QueryBank.load(tmp_path / "log.npz")
    assert bank.counts.tolist() == [5, 1, 2]
    condensed = QueryBank(rows, counts=bank.counts, groups=[0, 0, 1]).condensed
    assert condensed.counts.tolist() == [6, 2]

    np.savez(tmp_path / "short.npz", query=rows, count=np.array([5, 1]))
    with pytest.raises(InvalidInput, match="must be 3 numbers"):
        QueryBank.load(tmp_path / "short.npz")


class TestDemand:
    def fitted(self, bank, **given):
        return WithDemand((Blend(strength=1.0),), **given).fit(bank, gallery=GALLERY)

    def test_the_formula_holds_in_float64(self):
        log, _ = popular_log(1_000)
        bank = with_groups(QueryBank(log), GALLERY)
        fitted = self.fitted(bank)
        neutral = Blend(strength=1.0).fit(bank, gallery=GALLERY).bias(GALLERY).astype(np.float64)

        condensed = bank.condensed
        scores = condensed.vectors.astype(np.float64) @ GALLERY.T.astype(np.float64)
        spread = np.sqrt(((scores - scores.mean(1, keepdims=True)) ** 2).mean())
        shares = np.exp((scores - neutral) / (0.2 * spread))
        shares /= shares.sum(1, keepdims=True)
        # No group counts for more than eight of mean size.
        counts = np.minimum(condensed.counts, 8 * condensed.counts.mean())
        assert (counts < condensed.counts).any()
        factor = 0.25 * spread * (1 - 3 * counts.mean() / counts.var())
        expected = neutral - factor * np.log(3 + counts @ shares)
        np.testing.assert_allclose(fitted.bias(GALLERY), expected, atol=2e-5)
        assert fitted.diagnostics.dispersion == pytest.approx(counts.var() / counts.mean())

        # A new item and an item of the gallery differ only as the biases of new items do.
        products = GALLERY @ condensed.vectors.T
        of_products = fitted.bias_of_products(products, are_new=False)
        np.testing.assert_allclose(of_products, expected, atol=2e-5)

    def test_a_tau_of_the_users_own_leaves_the_weight_in_units_of_the_spread(self):
        log, _ = popular_log(1_000)
        bank = with_groups(QueryBank(log), GALLERY)
        fitted = self.fitted(bank)
        with_tau = self.fitted(bank, tau=fitted.estimator.tau)
        assert with_tau.estimator.temperature is None
        np.testing.assert_allclose(with_tau.bias(GALLERY), fitted.bias(GALLERY), atol=1e-6)

    def test_a_fit_goes_on_from_potentials_of_each_query(self):
        log, _ = popular_log(1_000)
        bank = with_groups(QueryBank(log), GALLERY)
        estimator = WithDemand((Blend(strength=1.0),))
        fitted = estimator.fit(bank, gallery=GALLERY)
        again = estimator.fit(bank, gallery=GALLERY, start=bank.of_queries(fitted.potentials))
        # The iteration goes on, and moves all biases together.
        moves = again.bias(GALLERY) - fitted.bias(GALLERY)
        assert moves.std() < 0.02 * fitted.bias(GALLERY).std()
        with pytest.raises(InvalidInput, match="potentials must have shape"):
            estimator.fit(bank, gallery=GALLERY, start=fitted.potentials[:5])

    def test_items_that_the_log_wants_gain(self):
        log, items = popular_log(2_000)
        bank = with_groups(QueryBank(log), GALLERY)
        neutral = Blend(strength=1.0).fit(bank, gallery=GALLERY).bias(GALLERY)
        change = self.fitted(bank).bias(GALLERY) - neutral
        wanted = np.bincount(items, minlength=ITEMS)
        assert change[wanted > 20].mean() < change[wanted == 0].mean()

    def test_even_demand_changes_nothing(self):
        counts = 1 + np.random.default_rng(4).poisson(6, ITEMS)
        bank = QueryBank(INTENTS, counts=counts)
        neutral = Blend(strength=1.0).fit(bank, gallery=GALLERY).bias(GALLERY)
        np.testing.assert_array_equal(self.fitted(bank).bias(GALLERY), neutral)

    @pytest.mark.parametrize("bots", [1, 5])
    def test_bots_do_not_count_as_demand(self, bots):
        """A third of a log of even demand is sent by one machine, or by five."""
        rng = np.random.default_rng(7)
        wanted = rng.integers(ITEMS, size=2_000)
        sent = np.concatenate([wanted, np.repeat(rng.integers(ITEMS, size=bots), 900 // bots)])
        sizes = np.bincount(sent, minlength=ITEMS)
        bank = QueryBank(INTENTS[sizes > 0], counts=sizes[sizes > 0])
        neutral = Blend(strength=1.0).fit(bank, gallery=GALLERY).bias(GALLERY)
        unbounded = self.fitted(bank, largest=1e6).bias(GALLERY) - neutral
        moved = self.fitted(bank).bias(GALLERY) - neutral
        assert np.ptp(moved) < 0.65 * np.ptp(unbounded)
        assert np.ptp(unbounded) > 0.5 * neutral.std()

    def test_counts_of_a_file_are_as_good_as_repeats(self):
        counts = np.random.default_rng(2).integers(1, 40, 60)
        given_counts = QueryBank(INTENTS[:60], counts=counts, groups=np.arange(60))
        repeats = np.repeat(np.arange(60), counts)
        given_repeats = QueryBank(INTENTS[repeats], groups=repeats)
        np.testing.assert_allclose(
            self.fitted(given_counts).bias(GALLERY),
            self.fitted(given_repeats).bias(GALLERY),
            atol=2e-5,
        )


@needs_real_data
def test_captions_of_one_image_are_grouped_by_what_they_find_on_real_data():
    """A log of Zipf's law: the groups give back what counting each query by itself loses."""
    task = load_task("caption_document")
    captions = task.query.reshape(5, 1_000, -1).astype(np.float32)
    gallery = task.gallery.astype(np.float32)
    gains = []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        demand = 1 / (1 + rng.permutation(1_000)) ** 1.3
        demand /= demand.sum()
        items = rng.choice(1_000, size=3_000, p=demand)
        log = QueryBank(captions[rng.integers(4, size=3_000), items])
        scores = captions[4] @ gallery.T

        def r1(bias, scores=scores, demand=demand):
            return 100 * (((scores - bias).argmax(1) == np.arange(1_000)) * demand).sum()

        bank = with_groups(log, gallery)
        biases = [
            Blend().fit(log, gallery=gallery).bias(gallery),
            Blend().fit(bank, gallery=gallery).bias(gallery),
            WithDemand().fit(bank, gallery=gallery).bias(gallery),
        ]
        gains.append([r1(bias) - r1(0 * scores[0]) for bias in biases])
    counted, shared, demanded = np.mean(gains, axis=0)
    assert shared > counted + 2
    assert demanded > counted + 5
