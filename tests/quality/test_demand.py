"""Whether biases push down what a log asks for: against plain formulas, and in words."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators.base import score_spread
from milvus_hubness.quality.demand import compare, demand_of, rank_correlation
from tests.support.diagnoses import diagnose
from tests.support.galleries import hubby_gallery


@pytest.fixture(scope="module")
def log():
    """Items (400, 48), and a log (600, 48) that asks for the item r about 200 / r times."""
    items, _, _ = hubby_gallery()
    rng = np.random.default_rng(0)
    demand = 1 / (1 + np.arange(400)) ** 1.2
    answers = rng.choice(400, 600, p=demand / demand.sum())
    queries = items[answers] + 0.2 * rng.standard_normal((600, 48))
    return items, QueryBank(queries.astype(np.float32), groups=_numbered(answers)), answers


def _numbered(answers):
    return np.unique(answers, return_inverse=True)[1]


def test_the_demand_is_its_definition(log):
    items, bank, answers = log
    biases = np.random.default_rng(1).standard_normal(400).astype(np.float32)
    counts = np.bincount(bank.groups)
    means = np.stack([bank.vectors[bank.groups == group].mean(0) for group in range(len(counts))])
    tau = 0.2 * score_spread(QueryBank(means), items)
    logits = (means.astype(np.float64) @ items.T - biases) / tau
    shares = np.exp(logits - logits.max(1, keepdims=True))
    expected = counts @ (shares / shares.sum(1, keepdims=True))
    demand = demand_of(bank, items, biases)
    np.testing.assert_allclose(demand, expected, rtol=1e-3, atol=1e-6)
    assert demand.sum() == pytest.approx(600, rel=1e-4)
    none = demand_of(bank, items, np.zeros(400, np.float32))
    assert np.corrcoef(none, np.bincount(answers, minlength=400))[0, 1] > 0.9


def test_biases_that_follow_demand_fight_it_and_those_against_it_agree(log):
    items, bank, answers = log
    wanted = np.log1p(np.bincount(answers, minlength=400)).astype(np.float32)
    fighting = compare(bank, items, wanted)
    agreeing = compare(bank, items, -wanted)
    assert fighting.correlation > 0.2
    assert fighting.pushed_down == 1
    assert fighting.sentence.startswith("demand and correction fight")
    assert agreeing.correlation < -0.2
    assert agreeing.pushed_down == 0
    assert agreeing.sentence.startswith("demand and correction agree")
    assert 0.3 < agreeing.largest_share < 0.8
    even = compare(bank, items, np.zeros(400, np.float32))
    assert even.correlation == 0
    assert "hardly touch" in even.sentence


def test_rank_correlation_is_spearmans():
    rng = np.random.default_rng(2)
    first, second = rng.integers(0, 9, 50), rng.standard_normal(50)
    assert rank_correlation(first, second) == pytest.approx(spearmanr(first, second).statistic)


def test_a_diagnosis_says_how_demand_and_correction_go_together(log):
    items, bank, answers = log
    biases = np.log1p(np.bincount(answers, minlength=400)).astype(np.float32)
    queries = items[:60] + np.float32(0.1)
    told = diagnose(queries, items, biases, bank=bank, strengths=(0, 1))
    [sentence] = [one for one in told.summary if "emand and correction" in one]
    assert sentence.startswith("Demand and correction fight: their rank correlation is +")
    data = told.to_dict()
    assert data["demand"]["correlation"] == told.demand.correlation
    assert data["bank"]["groups"] == len(set(answers.tolist()))
    assert data["bank"]["largest_share"] > 0.2
    assert any(finding.name == "log" and finding.remedy for finding in told.findings)

    # A bank whose groups are all asked for alike has no demand to show.
    even = QueryBank(bank.vectors[:60], groups=np.arange(60) // 2)
    assert diagnose(queries, items, biases, bank=even, strengths=(0, 1)).demand is None
    assert diagnose(queries, items, biases, strengths=(0, 1)).to_dict()["demand"] is None
