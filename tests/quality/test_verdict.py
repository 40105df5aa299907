"""The verdict without labels: its figures against plain formulas, and the banks that it takes and refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import NNN
from milvus_hubness.correction.estimators.base import known_to_halves
from milvus_hubness.quality.bank_checks import reach
from milvus_hubness.quality.measures import excess_answers, k_occurrence
from milvus_hubness.quality.tuning import default_biases, judge_bank, judge_unlabelled
from milvus_hubness.quality.verdict import Figures, chance_excess, examine, findings
from tests.support.galleries import crowding, hubby_gallery
from tests.support.real_data import LARGEST_APART, load_task, needs_real_data

SMALL = ("text_video_msrvtt t2v", "text_video_msrvtt v2t", "clip_products t2i", "clip_products i2t")
GOOD = Figures(
    agreement=0.8, two_views=0.3, bank_views=0.3, item_views=0.3, reach=0.7, best_z=4.0, before=0.4,
    after=0.25, noise=0.01, searched=500, by_chance=0.2, alike=0.02, signal=0.03,
)  # fmt: skip


@pytest.fixture(scope="module")
def world():
    """Items (400, 48) with hubs; 600 queries near items, and whether of none that is a hub."""
    items, queries, answers = hubby_gallery()
    centred = items - items.mean(0)
    along = centred @ np.linalg.svd(centred, full_matrices=False)[2][0]
    is_hub = (
        along > np.median(along)
        if abs(along.max()) > abs(along.min())
        else along < np.median(along)
    )
    return items, queries, ~is_hub[answers]


def nnn(bank, items):
    return NNN(4, 1.0).fit(bank).bias(items)


def test_figures_are_their_definitions(world):
    items, queries, _ = world
    fits = []

    def recorded(bank, rows):
        fits.append((bank.vectors.astype(np.float64), rows.astype(np.float64)))
        return nnn(bank, rows)

    seen = examine(queries, items, recorded)
    (fitted, rows), (asked, _), (first_view, first_items), (second_view, second_items) = fits
    assert sorted(map(bytes, np.concatenate([fitted, asked]).astype(np.float32))) == sorted(
        map(bytes, queries)
    )
    first, second = (np.sort(part @ rows.T, 0)[-4:].mean(0) for part in (fitted, asked))
    halves = fitted.astype(np.float32), asked.astype(np.float32)
    known = known_to_halves((first, second), halves, items)
    assert seen.agreement == pytest.approx(known.agreement, abs=1e-5)
    assert seen.agreement > np.corrcoef(first, second)[0, 1], "each half asks for other items"
    for share, figure in ((0, seen.before), (seen.agreement, seen.after)):
        answers = np.argsort(share * known.biases[0] - asked @ rows.T, 1)[:, :10]
        assert figure == pytest.approx(excess_answers(k_occurrence(answers, 400)), abs=1e-3)
    scores = queries.astype(np.float64) @ rows.T
    assert seen.best_z == pytest.approx(
        ((scores.max(1) - scores.mean(1)) / scores.std(1)).mean(), rel=1e-4
    )
    counts = np.bincount(scores.argmax(1), minlength=400)
    assert seen.reach == pytest.approx((counts > 0).sum() / (400 * (1 - np.exp(-600 / 400))))
    assert (
        first_view.shape[1] + second_view.shape[1] == 50
    )  # 24 complex frequencies, and two real ones
    both = first_view @ first_items.T + second_view @ second_items.T
    assert np.corrcoef(both.ravel(), (fitted @ rows.T).ravel())[0, 1] > 0.97


def test_a_foreign_bank_agrees_with_itself_but_its_views_do_not(world):
    items, queries, _ = world
    fitting, foreign = examine(queries, items, nnn), examine(queries[:, ::-1].copy(), items, nnn)
    assert judge_unlabelled(fitting).strength > 0
    assert fitting.two_views > 0.3
    assert foreign.two_views < 0.06
    judged = judge_unlabelled(foreign)
    assert (judged.verdict, judged.strength) == ("leave it alone", 0)
    assert "answers from two halves of the dimensions agree on" in judged.reason
    assert "the bank is foreign" in judged.reason


def test_figures_do_not_change_with_the_scale_of_the_vectors(world):
    items, queries, _ = world
    seen, scaled = examine(queries, items, nnn), examine(10 * queries, 10 * items, nnn)
    np.testing.assert_allclose(seen, scaled, atol=2e-3)


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("real", [False, True], ids=["alone", "with queries"])
def test_a_log_that_asks_for_each_item_alike_is_applied(copies, real):
    """Its halves ask for other items, and so disagree on the biases of all of them."""
    rng = np.random.default_rng(5)
    made = rng.normal(size=(300, 64)) / 8
    made[:, 0] += 0.15 * rng.gamma(2, 0.2, 300)
    items = np.float32(made)
    queries = np.tile(items, (copies + 1, 1)) + np.float32(
        rng.normal(size=(300 * (copies + 1), 64)) * 0.06
    )
    queries[:, 0] += 1
    judged = judge_bank(QueryBank(queries[300:]), items, queries=queries[:100] if real else None)
    assert judged.verdict == "apply"
    log = QueryBank(queries[300:], groups=np.tile(np.arange(300), copies))
    assert examine(log, items, default_biases).agreement > 0.7


def test_real_queries_show_the_hubs_that_a_bank_hides(world):
    items, queries, harmless = world
    bank, others = queries[harmless], queries[~harmless]
    assert examine(bank, items, nnn, queries=others).after > examine(bank, items, nnn).after + 0.1


@pytest.mark.parametrize("mean", [0.3, 1, 2.5, 10, 40])
def test_chance_is_that_of_poisson_counts(mean):
    weights = [math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(300)]
    expected = sum(weight * abs(k - mean) for k, weight in enumerate(weights)) / (2 * mean)
    assert chance_excess(mean) == pytest.approx(expected)


def test_reach_is_its_definition():
    assert reach(
        np.eye(4, dtype=np.float32)[[0, 0, 0, 1, 2]], np.eye(4, dtype=np.float32)
    ) == pytest.approx(3 / (4 * (1 - np.exp(-5 / 4))))


def test_a_good_bank_is_applied_in_plain_words():
    judged = judge_unlabelled(GOOD)
    assert (judged.verdict, judged.strength) == ("apply", 1.0)
    assert judged.reason.startswith("the two halves of the bank agree to 0.80")
    assert "agree on 30% of the queries" in judged.reason
    assert "from 40.0% to 25.0%" in judged.reason
    assert all(not finding.remedy for finding in findings(GOOD))


@pytest.mark.parametrize(
    ("bad", "name", "remedy"),
    [
        ({"agreement": 0.0}, "agreement", "collect more queries"),
        ({"two_views": 0.03}, "two views", "the bank is foreign"),
        ({"reach": 0.3, "signal": 0.3}, "reach", "at random from all queries"),
        ({"best_z": 8.5}, "best score", "search them as they are"),
        ({"after": 0.42}, "hubs", "keep the raw search"),
        ({"alike": 0.0}, "kind", "pass real queries"),
        ({"bank_views": 0.001, "groups": 500}, "kind", "of another model"),
    ],
)
def test_each_figure_alone_can_refuse_and_says_what_to_do(bad, name, remedy):
    [failed] = [finding for finding in findings(GOOD._replace(**bad)) if finding.fails]
    assert (failed.name, remedy in failed.remedy) == (name, True)
    judged = judge_unlabelled(GOOD._replace(**bad))
    assert judged[:3] == ("leave it alone", 0.0, str(failed))


def test_no_reason_ends_in_a_mark_as_pages_and_commands_add_the_full_stop():
    worst = dict.fromkeys(("agreement", "two_views", "item_views", "reach", "alike"), 0.0)
    for real in (False, True):
        bad = GOOD._replace(
            **worst, best_z=9.0, after=0.5, signal=1.0, logged=900, groups=800, largest_share=0.9,
            real_queries=real,
        )  # fmt: skip
        texts = [str(finding) for finding in findings(bad)]
        assert len([finding for finding in findings(bad) if finding.fails]) >= 5
        for figures in (bad, GOOD, GOOD._replace(cover=0.5), GOOD._replace(items=99)):
            judged = judge_unlabelled(figures)
            texts += [judged.reason, judged.sentence]
        assert all(text[-1] not in ".?!:;," for text in texts)


def test_half_the_strength_for_a_bank_of_few_topics():
    judged = judge_unlabelled(GOOD._replace(cover=0.7))
    assert (judged.verdict, judged.strength) == ("apply weakly", 0.5)
    assert "the bank covers 70% of the gallery evenly, as one of few topics does" in judged.reason
    # Real queries show what the bank is, however the gallery lies.
    real = GOOD._replace(cover=0.7, real_queries=True)
    assert judge_unlabelled(real)[:2] == ("apply", 1.0)
    judged = judge_unlabelled(real._replace(apart=0.012))
    assert (judged.verdict, judged.strength) == ("apply weakly", 0.5)
    assert "1.2% of the variance is between the bank and the real queries" in judged.sentence


def test_half_the_strength_for_a_small_gallery_until_real_queries_are_known():
    judged = judge_unlabelled(GOOD._replace(items=250))
    assert (judged.verdict, judged.strength) == ("not proven", 0.5)
    assert judged.sentence.startswith("250 items are too few to see whether the bank is of queries")
    assert judge_unlabelled(GOOD._replace(items=250, real_queries=True))[:2] == ("apply", 1.0)
    refused = judge_unlabelled(GOOD._replace(items=250, two_views=0.03))
    assert refused.verdict == "leave it alone"


def test_one_topic_of_four_covers_less_of_the_gallery_and_differs_from_real_queries():
    """Four clouds of items, each with queries of its own; hubs within each."""
    rng = np.random.default_rng(4)
    topic = np.repeat(np.arange(4), 150)
    centres = np.eye(4, 48) * 0.9
    items = centres[topic] + rng.normal(size=(600, 48)) / 7
    queries = items[rng.permutation(600)] + rng.normal(size=(600, 48)) / 14
    near = (queries @ centres.T).argmax(1)
    items, queries = np.float32(items), np.float32(queries)
    half = rng.permutation(600)
    real = queries[half[300:400]]
    whole, narrow = queries[half[:300]], queries[half[:300]][near[half[:300]] == 2]

    seen = examine(whole, items, default_biases)
    assert seen.cover == 1
    assert not seen.narrow
    assert examine(narrow, items, default_biases).cover < 0.5
    assert examine(narrow, items, default_biases).narrow
    assert not examine(whole, items, default_biases, queries=real).narrow
    assert examine(narrow, items, default_biases, queries=real).narrow


def test_neighbours_that_hubs_hide_are_seen_less_the_mean_of_the_items():
    """In a narrow cone, all items are nearest to the few that are nearest to its axis."""
    rng = np.random.default_rng(6)
    groups = np.repeat(rng.normal(size=(100, 64)), 4, axis=0)
    items = groups + 0.4 * rng.normal(size=(400, 64))
    axis = rng.normal(size=64)
    hubs = 6 * axis + np.outer(rng.gamma(2, 0.3, 400), axis) + items
    queries = np.float32(items[:200] + 0.4 * rng.normal(size=(200, 64)))
    plain = examine(queries, np.float32(items), default_biases)
    hidden = examine(queries + np.float32(axis), np.float32(hubs), default_biases)
    assert plain.item_views > 0.3
    assert hidden.item_views > 0.3


@pytest.mark.parametrize(
    ("doubtful", "name"),
    [({"reach": 0.3, "signal": 0.3}, "reach"), ({"alike": 0.0}, "kind")],
)
def test_real_queries_overrule_what_a_bank_alone_looks_like(doubtful, name):
    figures = GOOD._replace(**doubtful)
    assert judge_unlabelled(figures).verdict == "leave it alone"
    judged = judge_unlabelled(figures._replace(real_queries=True))
    assert judged.verdict == "apply"


def test_a_bank_of_another_model_is_refused_with_real_queries_too():
    """Its queries lie anywhere, so that two halves of the dimensions agree on their answers by chance."""
    rng = np.random.default_rng(3)
    groups = np.repeat(rng.normal(size=(100, 64)), 4, axis=0)
    items = np.float32(groups + 0.4 * rng.normal(size=(400, 64)))
    queries = np.float32(groups + 0.4 * rng.normal(size=(400, 64)))
    strange = np.float32(rng.normal(size=(400, 64)))

    own = examine(queries[::2], items, default_biases, queries=queries[1::2])
    seen = examine(strange, items, default_biases, queries=queries[1::2])
    assert not own.is_of_another_model
    assert seen.is_of_another_model
    assert judge_unlabelled(GOOD._replace(**_views_of(seen), real_queries=True)).strength == 0
    # A few queries that all fail may do so by chance.
    few = GOOD._replace(bank_views=0.0, groups=30, real_queries=True)
    assert judge_unlabelled(few).verdict == "apply"


def _views_of(figures):
    return {name: getattr(figures, name) for name in ("bank_views", "item_views", "groups")}


def test_low_reach_alone_is_what_strong_hubs_do():
    assert judge_unlabelled(GOOD._replace(reach=0.2)).verdict == "apply"


def test_hubs_that_rise_within_the_noise_of_few_queries_refuse_nothing():
    assert judge_unlabelled(GOOD._replace(after=0.405)).strength > 0
    assert judge_unlabelled(GOOD._replace(after=0.415)).strength == 0


def test_a_bank_of_the_gallery_s_items_is_refused(world):
    items, queries, _ = world
    for rows in (items, items + 0.01 * queries[:400]):
        judged = judge_unlabelled(examine(rows, items, nnn))
        assert judged.verdict == "leave it alone"
        assert "this looks like a bank of items" in judged.reason
    assert judge_unlabelled(examine(queries, items, nnn)).strength > 0


def test_queries_that_all_ask_the_same_fix_the_biases_at_once(world):
    items, queries, _ = world
    rng = np.random.default_rng(3)
    narrow = queries[:1] + 0.1 * rng.standard_normal((600, 48)).astype(np.float32)
    assert examine(narrow, items, nnn).signal > 5 * examine(queries, items, nnn).signal


def test_the_noise_of_few_queries_is_larger(world):
    items, queries, _ = world
    bank = queries[:200]
    noise_of_few = examine(bank, items, nnn, queries=queries[200:240]).noise
    noise_of_many = examine(bank, items, nnn, queries=queries[200:]).noise
    assert 1.5 * noise_of_many < noise_of_few < 10 * noise_of_many


def test_queries_that_resemble_items_but_agree_less_are_no_items():
    """Queries and items of a factorisation lie in one space."""
    alike = GOOD._replace(alike=0.0, item_views=0.6)
    assert judge_unlabelled(alike).verdict == "apply"
    assert judge_unlabelled(alike._replace(bank_views=0.55)).verdict == "leave it alone"


def test_a_bank_of_many_near_copies_is_a_log_not_items():
    alike = GOOD._replace(alike=0.0, item_views=0.6, bank_views=0.55)
    assert judge_unlabelled(alike._replace(logged=3_000, groups=1_400)).verdict == "apply"
    # A few repeats are in a gallery too.
    assert judge_unlabelled(alike._replace(logged=3_000, groups=1_600)).verdict == "leave it alone"


def test_few_queries_whose_views_all_differ_prove_nothing():
    few = GOOD._replace(two_views=0.0, searched=15)
    assert judge_unlabelled(few).verdict == "apply"
    assert judge_unlabelled(few._replace(searched=300)).verdict == "leave it alone"
    real = GOOD._replace(two_views=0.05, searched=100, real_queries=True)
    assert judge_unlabelled(real).verdict == "leave it alone", "they are the last to be asked"


def test_real_queries_have_to_show_that_hubs_lose_answers():
    hardly = GOOD._replace(after=0.39)
    assert judge_unlabelled(hardly).verdict == "apply"
    judged = judge_unlabelled(hardly._replace(real_queries=True))
    assert judged.verdict == "leave it alone"
    assert "they fall by less than 12%" in judged.reason
    # Nor is anything to be gained where hubs take no more than chance gives them.
    sparse = GOOD._replace(before=0.19, after=0.18, real_queries=True)
    assert judge_unlabelled(sparse).verdict == "leave it alone"


def test_a_recommender_is_told_its_reason():
    for real in (False, True):
        factors = GOOD._replace(two_views=0.4, item_views=0.06, real_queries=real)
        judged = judge_unlabelled(factors)
        assert judged.verdict == "leave it alone"
        assert "users may want what is popular" in judged.reason
        assert judge_unlabelled(factors._replace(two_views=0.8)).verdict == "apply"
        assert judge_unlabelled(factors._replace(item_views=0.5)).verdict == "apply"
    doubtful = GOOD._replace(two_views=0.4, item_views=0.15)
    assert judge_unlabelled(doubtful).verdict == "leave it alone"
    # Where real queries show that hubs lose answers, only a clear sign overrules them.
    assert judge_unlabelled(doubtful._replace(real_queries=True)).verdict == "apply"
    foreign = judge_unlabelled(GOOD._replace(two_views=0.01, real_queries=True))
    assert "the bank is foreign" in foreign.reason


def test_few_hubs_promise_little():
    [told] = [each for each in findings(GOOD._replace(before=0.22)) if each.name == "gain"]
    assert "expect little" in str(told)
    assert not told.fails
    [told] = [each for each in findings(GOOD._replace(before=0.6)) if each.name == "gain"]
    assert not told.remedy


def test_a_doubled_gallery_and_a_log_that_repeats_change_no_verdict(world):
    items, queries, _ = world
    bank = queries[:300]
    plain = examine(bank, items, default_biases)
    doubled = examine(bank, np.concatenate([items, items]), default_biases)
    assert doubled.before == pytest.approx(plain.before, abs=0.02)
    assert doubled.two_views == pytest.approx(plain.two_views, abs=0.05)
    assert judge_unlabelled(doubled)[:2] == judge_unlabelled(plain)[:2]

    popular = bank[np.minimum(np.random.default_rng(2).zipf(1.5, 2000) - 1, 299)]
    repeated = examine(popular, items, default_biases)
    assert repeated.searched == pytest.approx(len(np.unique(popular, axis=0)) / 2, abs=1)
    assert repeated.agreement < 0.9, "equal queries in both halves would agree"


def test_no_query_is_searched_that_was_fitted(world):
    items, queries, _ = world
    fitted = []

    def recorded(bank, rows):
        fitted.append({row.tobytes() for row in bank.vectors})
        return nnn(bank, rows)

    examine(np.repeat(queries[:80], 5, axis=0), items, recorded)
    assert fitted[0].isdisjoint(fitted[1])
    assert len(fitted[0]) == len(fitted[1]) == 40


@pytest.mark.parametrize("distinct", [1, 3])
def test_a_bank_of_few_distinct_queries_is_not_judged(world, distinct):
    items, queries, _ = world
    judged = judge_bank(QueryBank(np.repeat(queries[:distinct], 50, axis=0)), items)
    assert judged.verdict == "leave it alone"
    assert f"a bank of {distinct} distinct queries" in judged.reason


def drawn_log(queries, sizes, seed=5):
    """A log in which each query comes in so many noisy copies, out of order, and the query of each row."""
    rng = np.random.default_rng(seed)
    asked = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    noise = rng.standard_normal((len(asked), queries.shape[1]))
    return (queries[asked] + 0.05 * noise).astype(np.float32), asked


def test_near_copies_are_not_both_fitted_and_searched(world):
    items, queries, _ = world
    rows, asked = drawn_log(queries, [40, 20, 10, *[2] * 60, *[1] * 60])
    fits = []

    def recorded(bank, rows):
        fits.append(bank.vectors.astype(np.float64))
        return nnn(bank, rows)

    seen = examine(QueryBank(rows, groups=asked), items, recorded)
    means = np.stack([rows[asked == group].astype(np.float64).mean(0) for group in range(123)])
    for half in fits[:2]:
        distances = np.abs(half[:, None] - means).max(2)
        assert distances.min(1).max() < 1e-5, "each group counts once, as its mean"
    assert (len(fits[0]), len(fits[1]), seen.searched) == (61, 62, 62)
    np.testing.assert_allclose(np.concatenate(fits[:2]).sum(0), means.sum(0), atol=1e-3)


def test_the_unevenness_of_a_log_is_its_definition(world):
    items, queries, _ = world
    sizes = [40, 20, 10, *[2] * 60, *[1] * 60]
    rows, asked = drawn_log(queries, sizes)
    seen = examine(QueryBank(rows, groups=asked), items, nnn)
    assert (seen.logged, seen.groups) == (250, 123)
    assert seen.largest_share == 40 / 250
    assert seen.dispersion == pytest.approx(np.var(sizes) / np.mean(sizes))

    counts = np.where(asked == 0, 10.0, 0.5)
    seen = examine(QueryBank(rows, groups=asked, counts=counts), items, nnn)
    assert (seen.logged, seen.largest_share) == (505, pytest.approx(400 / 505))

    # Of a part of a log, the demand is that of the whole.
    part = examine(
        QueryBank(rows[:50]), items, nnn, whole=QueryBank(rows, groups=asked, counts=counts)
    )
    assert (part.logged, part.largest_share) == (seen.logged, seen.largest_share)


def test_a_log_of_which_few_groups_take_most_is_a_warning():
    log = GOOD._replace(logged=3000, groups=412, largest_share=0.32, dispersion=100.0)
    [told] = [finding for finding in findings(log) if finding.name == "log"]
    assert told.text == (
        "3,000 queries are 412 groups of near copies; the largest 1% of them hold 32% of all queries"
    )
    assert "pairs of the same log" in told.remedy
    assert not told.fails
    judged = judge_unlabelled(log)
    assert judged.verdict == "apply"
    assert str(told) in judged.reason, "jobs and plans show the reason"

    [even] = [each for each in findings(log._replace(largest_share=0.08)) if each.name == "log"]
    assert not even.remedy
    assert "log" not in [each.name for each in findings(log._replace(groups=3000))]


def test_figures_that_were_saved_before_logs_were_read_still_load():
    old = {
        name: value
        for name, value in GOOD._asdict().items()
        if name not in ("logged", "groups", "largest_share", "dispersion")
    }
    assert judge_unlabelled(Figures(**old)) == judge_unlabelled(GOOD)
    assert "log" not in [finding.name for finding in findings(Figures(**old))]


def test_a_bank_without_repeats_in_order_of_its_topics_is_halved_at_random(world):
    """The halves of an ordered bank would be two banks, each of other topics."""
    items, queries, _ = world
    by_topic = queries[np.argsort(queries[:, 0])]
    halves = []

    def recorded(bank, rows):
        halves.append(bank.vectors[:, 0].mean())
        return nnn(bank, rows)

    examine(QueryBank(by_topic, groups=np.arange(600)), items, recorded)
    assert abs(halves[0] - halves[1]) < 0.3 * queries[:, 0].std()


@needs_real_data
class TestOnRealData:
    @pytest.mark.parametrize("name", LARGEST_APART)
    def test_own_banks_are_applied_and_scores_of_a_reranker_are_not(self, name):
        task = load_task(name)
        bank = task.bank[:1000]
        verdict = judge_unlabelled(examine(bank, task.gallery, default_biases)).verdict
        assert (verdict == "leave it alone") == name.startswith("reranker")

    @pytest.mark.parametrize("other", SMALL)
    @pytest.mark.parametrize("name", SMALL)
    def test_a_bank_of_another_data_set_is_refused(self, name, other):
        if name.split()[0] == other.split()[0]:
            return
        seen = examine(load_task(other).bank, load_task(name).gallery, default_biases)
        assert "two views" in [finding.name for finding in findings(seen) if finding.fails]

    @pytest.mark.parametrize("name", SMALL)
    def test_a_bank_that_crowds_few_items_is_refused(self, name):
        task = load_task(name)
        seen = examine(crowding(task.bank, task.gallery, 0.1), task.gallery, default_biases)
        assert "reach" in [finding.name for finding in findings(seen) if finding.fails]

    @pytest.mark.parametrize("name", ["clip_products t2i", "clip_products i2t"])
    def test_items_in_place_of_queries_are_noticed_and_refused_if_real_queries_are_known(
        self, name
    ):
        task = load_task(name)
        free = examine(task.target_bank, task.gallery, default_biases)
        assert any("a bank of items" in finding.remedy for finding in findings(free))
        asked = examine(task.target_bank, task.gallery, default_biases, queries=task.query)
        assert judge_unlabelled(asked).verdict == "leave it alone"
