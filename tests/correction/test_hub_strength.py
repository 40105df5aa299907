"""Rows that look like planted hubs get their bias in full, whatever less of it searches use."""

from dataclasses import replace

import numpy as np
import pytest

from milvus_hubness import NNN, Blend, QueryBank
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.fitted import Correction
from milvus_hubness.correction.guard import (
    LARGEST_FACTOR,
    RAMP,
    Evidence,
    GuardPolicy,
    HubStrength,
)
from milvus_hubness.correction.prior import Items, Prior
from tests.support.planted import DIM, centroid, gallery, genuine, unit

ITEMS, BANK, USERS = gallery()
HUBS = centroid(USERS, 5)
GUARD = GuardPolicy("refuse")


def fitted(strength=0.5, estimator=None, metric="IP", items=ITEMS, guard=GUARD):
    """A correction without the guard, and the same with it."""
    layout = Layout(DIM, metric, 2)
    correction = Correction.fit(layout, estimator or Blend(), QueryBank(BANK), gallery=items)
    correction = replace(correction, mean_bias=float(correction.centred(items).mean()))
    correction = correction.measured(items)
    return correction, correction.guarded(guard, strength)


def between(count=200):
    """Rows on the way from genuine ones to hubs: their reaches are below, on and above the ramp."""
    shares = np.linspace(0, 1, count)[:, None]
    return unit((1 - shares) * ITEMS[:count] + shares * HUBS[0])


def oracle_of_reaches(rows):
    """The shares of the bank whose ten best scores have a smaller mean, in float64."""
    scores = BANK.astype(np.float64) @ ITEMS.astype(np.float64).T
    means = np.sort(scores, axis=1)[:, -10:].mean(axis=1)
    return (rows.astype(np.float64) @ BANK.astype(np.float64).T > means).mean(axis=1)


@pytest.mark.parametrize("strength", [1.0, 0.5, 0.2])
def test_a_stored_bias_counts_in_full_at_the_strength_of_searches(strength):
    plain, guarded = fitted(strength)
    rows = between()
    rule = guarded.hub_strength
    share = plain.fitted.estimator.share
    assert 0 < share < 1
    assert rule.factor == pytest.approx(1 / (share * strength))

    reaches = oracle_of_reaches(rows)
    risen = np.clip((reaches / rule.limit - 1) / RAMP, 0, 1)
    biases = plain.centred(rows).astype(np.float64)
    expected = biases * np.where(biases > 0, 1 + (rule.factor - 1) * risen, 1)
    assert {0.0, 1.0} < set(risen.tolist()), "rows below, on and above the ramp"
    assert guarded.centred(rows) == pytest.approx(expected, rel=1e-6)

    # What a search with this strength subtracts is the bias at strength 1.
    full = risen == 1
    at_strength_1 = biases[full] / share
    assert strength * guarded.centred(rows)[full] == pytest.approx(at_strength_1, rel=1e-6)


@pytest.mark.parametrize("metric", ["IP", "COSINE", "L2"])
def test_every_way_to_compute_a_bias_gives_the_same_number(metric):
    _, guarded = fitted(metric=metric)
    rows = np.concatenate([between(), genuine(50), HUBS, np.zeros((1, DIM), np.float32)])
    whole = guarded.centred(rows)
    assert (whole != fitted(metric=metric)[0].centred(rows)).sum() > 20

    allowed = guarded.allowed_differences(rows, whole)
    one_by_one = np.concatenate([guarded.centred(rows[i : i + 1]) for i in range(len(rows))])
    written, _ = guarded.of_rows(rows, are_new=False)
    # Of more products than are computed at once.
    many = np.concatenate([rows, genuine(50_000)])
    by_kernels = guarded.of_rows(many, are_new=False)[0][: len(rows)]
    elsewhere = replace(guarded, compute=lambda items, _: guarded.fitted.bias(items)).centred(rows)
    for other in (one_by_one, written, by_kernels, elsewhere):
        assert (np.abs(other - whole) <= allowed).all()


def test_new_rows_get_the_factor_on_their_own_bias():
    plain, guarded = fitted()
    new, _ = plain.of_rows(HUBS, are_new=True)
    strong, _ = guarded.of_rows(HUBS, are_new=True)
    assert strong == pytest.approx(guarded.hub_strength.factor * new, rel=1e-6)
    by_kernels = replace(guarded, are_new=True).centred(HUBS)
    assert (np.abs(by_kernels - strong) <= guarded.allowed_differences(HUBS, strong)).all()


def test_genuine_rows_keep_their_bias_to_the_bit():
    plain, guarded = fitted()
    for rows in (ITEMS, genuine(2000)):
        assert np.array_equal(guarded.centred(rows), plain.centred(rows))


@pytest.mark.parametrize(
    ("guard", "estimator", "strength"),
    [
        (GuardPolicy("off"), Blend(), 0.5),
        (GUARD, NNN(16), 0.5),
        (GUARD, Blend(strength=1.0), 1.0),
        (GUARD, Blend(strength=2.0), 1.0),
        (GUARD, Blend(strength=0.0), 1.0),
    ],
    ids=["off", "no reach", "full already", "more than full", "nothing in use"],
)
def test_other_biases_stay_as_they_are(guard, estimator, strength):
    plain, guarded = fitted(strength, estimator, guard=guard)
    rows = between()
    assert np.array_equal(guarded.centred(rows), plain.centred(rows))
    assert (guarded.hub_strength is None) == (guard is not GUARD or isinstance(estimator, NNN))


def test_a_rule_in_a_state_whose_estimator_has_no_reaches_is_ignored():
    plain, _ = fitted(estimator=NNN(16))
    edited = replace(plain, hub_strength=HubStrength(limit=0.1, factor=4, false_alarms=0.001))
    rows = between()
    centred = plain.centred(rows)
    assert np.array_equal(edited.centred(rows), centred)
    assert np.array_equal(
        edited.of_rows(rows, are_new=True)[0], plain.of_rows(rows, are_new=True)[0]
    )
    assert np.array_equal(
        edited.allowed_differences(rows, centred), plain.allowed_differences(rows, centred)
    )


def test_searches_that_are_raw_by_default_leave_the_share_of_the_estimator():
    plain, guarded = fitted(0.0)
    assert guarded.hub_strength.factor == pytest.approx(1 / plain.fitted.estimator.share)
    assert fitted(1e-3)[1].hub_strength.factor == LARGEST_FACTOR


def test_a_bias_below_the_mean_favours_no_hub():
    rule = HubStrength(limit=0.3, factor=4, false_alarms=0.001)
    biases = np.array([-0.5, 0.0, 0.5], np.float32)
    reaches = np.full(3, 0.9, np.float32)
    assert rule.applied(biases, reaches).tolist() == [-0.5, 0.0, 2.0]
    assert rule.applied(biases, reaches).dtype == np.float32


def test_the_factor_has_no_jump():
    rule = HubStrength(limit=0.3, factor=5, false_alarms=0.001)
    reaches = np.linspace(0, 1, 10_001).astype(np.float32)
    factors = rule.factors(reaches)
    assert np.abs(np.diff(factors)).max() < 1e-2
    assert factors[0] == factors[2_999] == 1
    assert factors[3_751] == factors[-1] == 5


def test_a_limit_of_nothing_makes_a_hub_of_every_row_with_a_reach():
    rule = HubStrength(limit=0, factor=5, false_alarms=0.001)
    assert rule.factors(np.array([0, 1e-4], np.float32)).tolist() == [1, 5]


@pytest.mark.parametrize("limit", [0.8, 0.96])
def test_a_row_that_answers_everything_counts_in_full_below_a_high_limit(limit):
    rule = HubStrength(limit=limit, factor=5, false_alarms=0.001)
    assert rule.factors(np.array([limit, (1 + limit) / 2, 1], np.float32)) == pytest.approx(
        [1, 5, 5], abs=1e-4
    )


def test_a_limit_that_no_row_can_exceed_changes_no_bias():
    rule = HubStrength(limit=1.2, factor=5, false_alarms=0.001)
    assert rule.factors(np.array([0, 1], np.float32)).tolist() == [1, 1]


def test_a_prior_counts_as_often_as_for_other_rows():
    plain, guarded = fitted()
    prior = Prior(source="field", field="sales", factor=0.1, weight=1.0)
    items = Items(list(range(5)), [{"sales": 10.0**n} for n in range(5)])
    numbers = replace(guarded, prior=prior).centred(HUBS, items) - guarded.centred(HUBS)
    expected = replace(plain, prior=prior).centred(HUBS, items) - plain.centred(HUBS)
    assert np.ptp(expected) > 0.01
    assert numbers == pytest.approx(expected, abs=1e-6)


def test_the_evidence_of_rows_is_that_of_the_estimator():
    plain, guarded = fitted()
    rows = np.concatenate([HUBS, ITEMS[:50]])
    of_plain = plain.of_written(rows, are_new=True, guarded=True)[2]
    of_guarded = guarded.of_written(rows, are_new=True, guarded=True)[2]
    assert np.array_equal(of_plain.biases, of_guarded.biases)
    assert np.array_equal(of_plain.reaches, of_guarded.reaches)
    assert (
        guarded.measured(np.concatenate([ITEMS, HUBS])).evidence
        == plain.measured(np.concatenate([ITEMS, HUBS])).evidence
    )


def test_rounded_vectors_differ_by_what_is_allowed_and_other_rows_by_no_more_than_before():
    plain, guarded = fitted(metric="COSINE")
    rows = between(400)
    rounded = rows.astype(np.float16).astype(np.float32)
    centred = guarded.centred(rows)
    allowed = guarded.allowed_differences(rows, centred, 1e-3)
    assert (np.abs(guarded.centred(rounded) - centred) <= allowed).all()

    weak = guarded.reaches(rows) < 0.8 * guarded.hub_strength.limit
    before = plain.allowed_differences(rows, plain.centred(rows))
    now = guarded.allowed_differences(rows, centred)
    assert weak.sum() > 50
    assert np.array_equal(now[weak], before[weak])
    # A changed bias is still seen: none may differ by half of what the factor adds.
    strong = guarded.reaches(rows) > 1.3 * guarded.hub_strength.limit
    assert strong.sum() > 50
    assert (now[strong] < 0.05 * (centred - plain.centred(rows))[strong]).all()


@pytest.mark.parametrize("planted", [1, 3])
def test_hubs_that_were_there_before_the_fit_do_not_raise_the_limit_above_themselves(planted):
    whole = np.concatenate([ITEMS, HUBS[:planted]])
    plain, guarded = fitted(items=whole)
    assert (plain.reaches(HUBS[:planted]) > guarded.hub_strength.limit).all()
    assert (plain.reaches(genuine(2000)) < guarded.hub_strength.limit).all()
    strong = guarded.centred(HUBS[:planted])
    assert strong == pytest.approx(
        guarded.hub_strength.factor * plain.centred(HUBS[:planted]), rel=1e-5
    )


def test_quantiles_below_the_tail_and_of_small_reaches_count_as_they_are():
    reaches = np.concatenate([np.full(990, 0.01), np.full(10, 0.09)]).astype(np.float32)
    evidence = Evidence.of(reaches, reaches)
    assert evidence.limit(0.001) == pytest.approx(2.25 * 0.09)
    assert evidence.limit(0.05) == pytest.approx(2.25 * 0.01)
