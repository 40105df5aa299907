"""The verdict without labels: its figures against plain formulas, and the banks that it takes and refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest

from milvus_hubness.correction.estimators import NNN
from milvus_hubness.quality.bank_checks import reach
from milvus_hubness.quality.measures import excess_answers, k_occurrence
from milvus_hubness.quality.tuning import default_biases, judge_unlabelled
from milvus_hubness.quality.verdict import Figures, chance_excess, examine, findings
from tests.support.galleries import crowding
from tests.support.real_data import LARGEST_APART, load_task, needs_real_data

SMALL = ("text_video_msrvtt t2v", "text_video_msrvtt v2t", "clip_products t2i", "clip_products i2t")
GOOD = Figures(
    agreement=0.8, two_views=0.3, reach=0.7, best_z=4.0, before=0.4, after=0.25, by_chance=0.2, alike=0.02
)  # fmt: skip


@pytest.fixture(scope="module")
def world():
    """Items (400, 48), of which those far along a drift are hubs; 600 queries near items, and whether of none."""
    rng = np.random.default_rng(0)
    drift = rng.standard_normal(48)
    far = rng.gamma(1, 0.2, 400)
    items = rng.standard_normal((400, 48)) + np.outer(far, drift)
    answers = rng.integers(0, 400, 600)
    queries = items[answers] + 0.7 * rng.standard_normal((600, 48)) + 0.5 * drift
    return items.astype(np.float32), queries.astype(np.float32), far[answers] < np.median(far)


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
    assert seen.agreement == pytest.approx(np.corrcoef(first, second)[0, 1], abs=1e-5)
    for share, figure in ((0, seen.before), (seen.agreement, seen.after)):
        answers = np.argsort(share * first - asked @ rows.T, 1)[:, :10]
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
        ({"two_views": 0.05}, "two views", "the bank is foreign"),
        ({"reach": 0.3}, "reach", "at random from all queries"),
        ({"best_z": 8.5}, "best score", "search them as they are"),
        ({"after": 0.4}, "hubs", "keep the raw search"),
    ],
)
def test_each_figure_alone_can_refuse_and_says_what_to_do(bad, name, remedy):
    [failed] = [finding for finding in findings(GOOD._replace(**bad)) if finding.fails]
    assert (failed.name, remedy in failed.remedy) == (name, True)
    judged = judge_unlabelled(GOOD._replace(**bad))
    assert judged[:3] == ("leave it alone", 0.0, str(failed))


def test_half_the_strength_where_hubs_keep_much():
    judged = judge_unlabelled(GOOD._replace(after=0.31))
    assert (judged.verdict, judged.strength) == ("apply weakly", 0.5)
    assert "half the strength" in judged.reason
    assert judge_unlabelled(GOOD._replace(after=0.31, real_queries=True))[:2] == ("apply", 1.0)


def test_a_bank_like_the_gallery_is_applied_with_a_warning():
    judged = judge_unlabelled(GOOD._replace(alike=0.0))
    assert judged.verdict == "apply"
    [warning] = [finding for finding in findings(GOOD._replace(alike=0.0)) if finding.remedy]
    assert "queries, not items" in str(warning)
    assert not warning.fails


@needs_real_data
class TestRealData:
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
        seen = examine(crowding(task.bank, task.gallery, 0.25), task.gallery, default_biases)
        assert "reach" in [finding.name for finding in findings(seen) if finding.fails]

    @pytest.mark.parametrize("name", ["clip_products t2i", "clip_products i2t"])
    def test_items_in_place_of_queries_are_noticed_and_refused_if_real_queries_are_known(
        self, name
    ):
        task = load_task(name)
        free = examine(task.target_bank, task.gallery, default_biases)
        assert any("queries, not items" in finding.remedy for finding in findings(free))
        asked = examine(task.target_bank, task.gallery, default_biases, queries=task.query)
        assert judge_unlabelled(asked).verdict == "leave it alone"
