"""What is asked of an estimator is answered by one that wraps others too: its scores for the hub guard, its share."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.parts import BiasSlots
from milvus_hubness.correction.estimators import (
    CSLS,
    DEFAULT_ESTIMATOR,
    Blend,
    RelativeNNN,
    WithDemand,
    to_dict,
)
from milvus_hubness.correction.estimators.base import ESTIMATORS
from milvus_hubness.correction.fitted import Correction
from milvus_hubness.correction.guard import RowEvidence
from tests.support.planted import DIM, centroid, gallery

ITEMS, QUERIES, USERS = gallery(rows=240, queries=400)
# Few queries for many items: some are asked for more often, so that there is demand to take off.
BANK = QueryBank(QUERIES, counts=1 + 400 / np.arange(1, 201))
WRAPPERS = {
    "alone": lambda estimator: estimator,
    "in a blend": lambda estimator: Blend((CSLS(3), estimator), (0.5, 0.5), strength=1.0),
    "with demand": lambda estimator: WithDemand((estimator,)),
    "blend with demand": lambda estimator: WithDemand((Blend((estimator,), (1.0,), strength=1.0),)),
    "demand in a blend": lambda estimator: Blend(
        (CSLS(3), WithDemand((estimator,))), (0.5, 0.5), strength=1.0
    ),
}
OWN = [
    kind()
    for kind in ESTIMATORS.values()
    if kind.__module__.startswith("milvus_hubness.") and not kind().needs_target_bank
]


def clamped(estimator):
    return estimator.clamped(len(BANK))


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("estimator", OWN, ids=lambda estimator: type(estimator).__name__)
class TestEveryEstimatorInEveryWrapper:
    def test_the_guard_has_a_reach_wherever_the_scores_of_the_gallery_are_kept(
        self, estimator, wrapper
    ):
        fitted = clamped(wrapper(estimator)).fit(BANK, gallery=ITEMS)
        keeps = "RelativeNNN" in json.dumps(to_dict(fitted.estimator))
        layout = Layout(DIM, "IP", BiasSlots(2))
        correction = Correction.fit(layout, fitted.estimator, BANK, gallery=ITEMS).measured(ITEMS)
        assert bool(correction.evidence.reaches) == keeps
        if not keeps:
            assert fitted.gallery_scores is None
            return

        scores = fitted.bank.vectors.astype(np.float64) @ ITEMS.T
        means = np.sort(scores, axis=1)[:, -10:].mean(axis=1)
        np.testing.assert_allclose(fitted.gallery_scores, means, atol=1e-5)
        restored = fitted.estimator.restore(BANK, BANK.of_queries(fitted.potentials))
        np.testing.assert_array_equal(restored.gallery_scores, fitted.gallery_scores)
        _, _, seen = correction.of_written(centroid(USERS, 5), are_new=True, with_measures=True)
        assert len(RowEvidence(*seen).stopped(correction.evidence)) == 5

    def test_its_share_is_that_of_the_biases_it_subtracts(self, estimator, wrapper):
        whole = wrapper(estimator.in_full())
        half = wrapper(replace(estimator.in_full(), strength=0.5))
        # The other method of a blend is there in full.
        is_mixed = isinstance(whole, Blend) and whole.estimators[0] == CSLS(3)
        expected = 0.75 if is_mixed else 0.5
        assert whole.share == 1
        assert half.share == expected

    def test_in_full_it_has_no_agreement(self, estimator, wrapper):
        agreed = replace(wrapper(estimator), strength="agreement")
        assert agreed.in_full().fit(BANK, gallery=ITEMS).estimator.factor_on_formula == 1


def test_the_share_of_the_default_is_the_agreement():
    fitted = DEFAULT_ESTIMATOR.fit(BANK, gallery=ITEMS).estimator
    assert 0 < fitted.of_biases.agreement < 1
    assert fitted.share == fitted.of_biases.agreement
    assert DEFAULT_ESTIMATOR.in_full().share == 1


def test_without_a_discount_no_scores_are_kept():
    assert RelativeNNN(discount=0.0).fit(BANK, gallery=ITEMS).gallery_scores is None
