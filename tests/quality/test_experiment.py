"""The report of a test on live users: intervals that hold at all looks, and verdicts that wait."""

import json
import math
from typing import NamedTuple

import numpy as np
import pytest

from milvus_hubness.errors import InvalidInput, InvalidParameter
from milvus_hubness.quality.confidence_sequence import (
    boundary,
    difference_of_arms,
    mixture_scale,
)
from milvus_hubness.quality.experiment import CONTROL, TREATMENT, UNPROVEN, compare_arms

ALPHA = 0.05
USERS = 2_000


class Log(NamedTuple):
    """A log of searches. share: the probability of the treatment."""

    unit: np.ndarray
    treated: np.ndarray
    success: np.ndarray
    share: float = 0.5

    def take(self, rows):
        return Log(self.unit[rows], self.treated[rows], self.success[rows], self.share)

    def report(self, **options):
        return compare_arms(self.unit, self.treated, self.success, share=self.share, **options)


def users(count, seed=0, *, zipf=0.0, share=0.5, effect=0.0, success=0.5, graded=False):
    """Return the log of `count` searches by USERS users, each with a probability of success.

    effect: with which a search of the treatment succeeds that would fail. graded: a success is
    1 / rank of a click.
    """
    rng = np.random.default_rng(seed)
    demand = 1 / np.arange(1, USERS + 1) ** zipf
    unit = rng.choice(USERS, size=count, p=demand / demand.sum())
    treated = (rng.random(USERS) < share)[unit]
    rates = rng.beta(2 * success, 2 * (1 - success), size=USERS)
    succeeds = rng.random(count) < rates[unit]
    values = succeeds / rng.geometric(0.5, size=count) if graded else succeeds.astype(float)
    values = np.where(treated & (rng.random(count) < effect) & ~succeeds, 1.0, values)
    return Log(unit, treated, values, share)


def by_a_plain_loop(log):
    """Return the estimate and the interval in float64, row by row and unit by unit."""
    p = log.share
    sums, sizes, arms = {}, {}, {}
    for unit, treated, success in zip(log.unit, log.treated, log.success, strict=True):
        sums[unit] = sums.get(unit, 0.0) + float(success)
        sizes[unit] = sizes.get(unit, 0) + 1
        arms[unit] = bool(treated)

    total = sum(sizes.values())
    terms, errors = {}, {}
    for unit in sums:
        others = [other for other in sums if other != unit]
        predicted = sum(sums[other] for other in others) / sum(sizes[other] for other in others)
        errors[unit] = sums[unit] - predicted * sizes[unit]
        terms[unit] = errors[unit] / p if arms[unit] else -errors[unit] / (1 - p)

    estimate = sum(terms.values()) / total
    variance = max(
        sum(error**2 for error in errors.values()) / (p * (1 - p)),
        sum((terms[unit] - estimate * sizes[unit]) ** 2 for unit in terms),
    )
    log_alpha = -2 * math.log(ALPHA)
    rho = 10_000 * 0.15 / (p * (1 - p)) / (log_alpha + math.log(1 + log_alpha))
    width = math.sqrt((variance + rho) * math.log((variance + rho) / (rho * ALPHA**2))) / total
    return estimate, estimate - width, estimate + width


@pytest.mark.parametrize("share", [0.5, 0.1])
@pytest.mark.parametrize("graded", [True, False])
def test_the_difference_is_that_of_a_plain_loop(share, graded):
    log = users(900, zipf=1.0, share=share, effect=0.2, graded=graded)
    assert log.report().difference == pytest.approx(by_a_plain_loop(log), rel=1e-9)


def test_arms_are_described_as_a_plain_loop_does():
    log = users(700, share=0.3, effect=0.2, graded=True)
    found = log.report(names=("raw", "corrected"))
    assert (found.control.name, found.treatment.name) == ("raw", "corrected")
    for is_treatment, arm in ((False, found.control), (True, found.treatment)):
        rows = [row for row in range(700) if log.treated[row] == is_treatment]
        assert arm.rows == len(rows)
        assert arm.units == len({int(log.unit[row]) for row in rows})
        assert arm.success == pytest.approx(sum(log.success[row] for row in rows) / len(rows))


def test_the_boundary_is_where_the_mixture_of_likelihood_ratios_reaches_one_over_alpha():
    for variance, scale, alpha in ((3.0, 1.0, 0.05), (500.0, 40.0, 0.05), (20.0, 300.0, 0.001)):
        bound = boundary(variance, scale, alpha)
        drift = np.linspace(-14, 14, 400_001) / math.sqrt(scale)
        prior = np.exp(-(drift**2) * scale / 2) * math.sqrt(scale / (2 * math.pi))
        ratio = np.exp(drift * bound - drift**2 * variance / 2)
        mixture = float((ratio * prior).sum() * (drift[1] - drift[0]))
        assert mixture == pytest.approx(1 / alpha, rel=1e-4)


def test_the_boundary_is_tightest_where_it_is_meant_to_be():
    at = 700.0
    best = min(boundary(at, scale, ALPHA) for scale in np.geomspace(1, 10_000, 2_000))
    assert boundary(at, mixture_scale(at, ALPHA), ALPHA) == pytest.approx(best, rel=1e-3)
    assert boundary(at, mixture_scale(10 * at, ALPHA), ALPHA) > 1.2 * best


UNTIDY = {
    "users search equally often": {},
    "few users search most": {"zipf": 1.2},
    "a tenth is treated": {"share": 0.1, "zipf": 0.7},
    "few successes": {"success": 0.05},
    "few failures": {"success": 0.95},
    "1 / rank of the click": {"graded": True, "zipf": 0.7},
}
RUNS = 60
LOOKS = range(100, 3_001, 100)
# Three standard errors above α.
MOST = RUNS * ALPHA + 3 * math.sqrt(RUNS * ALPHA * (1 - ALPHA))


def winners(case, as_units=lambda log: log):
    """Return the number of runs in which an interval ever leaves out zero."""
    count = 0
    for seed in range(RUNS):
        log = as_units(users(LOOKS[-1], seed, **case))
        intervals = (log.take(np.arange(look)).report().difference for look in LOOKS)
        count += any(low > 0 or high < 0 for _, low, high in intervals)
    return count


@pytest.mark.parametrize("case", UNTIDY)
def test_alike_arms_have_no_winner_although_one_looks_after_every_hundred_rows(case):
    assert winners(UNTIDY[case]) <= MOST


def test_rows_taken_for_units_would_name_a_winner_without_a_difference():
    """So the sums over units are what the cases above rest on."""
    case = {"zipf": 1.2}
    assert winners(case) <= MOST
    assert winners(case, lambda log: log._replace(unit=np.arange(len(log.unit)))) > 0.25 * RUNS


def test_intervals_cover_a_true_difference_at_all_looks():
    missed = 0
    for seed in range(RUNS):
        log = users(3_000, seed, zipf=0.7, effect=0.15)
        # What the users of this log would do on average, from many more searches of theirs.
        crowd = users(100_000, seed, zipf=0.7)
        truth = 0.15 * (1 - crowd.success.mean())
        looks = (log.take(np.arange(look)).report().difference for look in range(500, 3_001, 500))
        missed += any(not low <= truth <= high for _, low, high in looks)
    assert missed <= MOST


@pytest.mark.parametrize("share", [0.5, 0.1])
@pytest.mark.parametrize("zipf", [0.0, 0.5])
def test_a_clear_difference_is_proven_in_either_direction(share, zipf):
    log = users(12_000, share=share, effect=0.4, zipf=zipf)
    found = log.report()
    assert found.verdict == TREATMENT
    assert found.difference.low > 0

    swapped = log._replace(treated=~log.treated, share=1 - share).report()
    assert swapped.verdict == CONTROL
    assert swapped.difference.estimate == pytest.approx(-found.difference.estimate)


def test_an_arm_in_which_nothing_succeeds_any_more_has_lost():
    log = users(4_000)
    found = log._replace(success=np.where(log.treated, 0.0, log.success)).report()
    assert (found.verdict, found.treatment.success) == (CONTROL, 0)


def test_the_smallest_difference_is_the_one_whose_interval_ends_at_zero():
    found = users(3_000, effect=0.03).report()
    estimate, low, high = found.difference
    assert found.difference.half_width == pytest.approx(estimate - low)
    assert found.difference.half_width == pytest.approx(high - estimate)
    assert found.reason.endswith(
        f"rows can show differences from {found.difference.half_width:.4f} on"
    )


def test_more_data_of_the_same_kind_narrows_the_interval():
    log = users(8_000)
    widths = [
        log.take(np.arange(count)).report().difference.half_width
        for count in (1_000, 2_000, 4_000, 8_000)
    ]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 2 * widths[-1]


@pytest.mark.parametrize(("value", "name"), [(0.0, "success"), (1.0, "failure")])
def test_without_any_success_or_failure_there_is_no_verdict_and_the_reason_says_so(value, name):
    found = users(5_000)._replace(success=np.full(5_000, value)).report()
    assert found.verdict == UNPROVEN
    assert f"no unit has a {name}" in found.reason
    assert found.difference.low < 0 < found.difference.high


@pytest.mark.parametrize(("value", "name"), [(1.0, "success"), (0.0, "failure")])
def test_few_successes_or_failures_prove_nothing_however_clear_they_look(value, name):
    log = users(4_000)
    _, first = np.unique(log.unit, return_index=True)
    success = np.full(4_000, 1 - value)
    success[first[log.treated[first]][:40]] = value
    found = log._replace(success=success).report()
    assert found.verdict == UNPROVEN
    assert found.reason.startswith(f"40 units have a {name}, and 50 are needed")


def test_few_large_units_prove_nothing_however_many_rows_they_have():
    found = users(20_000, zipf=2.0, effect=0.5).report()
    assert found.verdict == UNPROVEN
    effective = 0.5 * found.effective_units
    assert found.reason.startswith(
        f"the smaller arm has {effective:.1f} effective units of 50 that are needed"
    )


def test_arms_of_another_share_than_was_set_have_no_verdict():
    """A tenth was drawn and half is said, or one arm of which rows are lost."""
    log = users(6_000, effect=0.4)
    assert log.report().verdict == TREATMENT
    wrong = log._replace(share=0.4).report()
    assert wrong.verdict == UNPROVEN
    assert "a share of 40% was set" in wrong.reason

    lost = log.take(~(log.treated & (log.unit % 4 == 0))).report()
    assert lost.verdict == UNPROVEN
    assert "rows of one arm are lost" in lost.reason


def test_a_report_is_plain_data_and_a_table():
    found = users(5_000, effect=0.4).report(names=("raw", "corrected"))
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["verdict"] == TREATMENT
    assert data["treatment"]["rows"] == found.treatment.rows
    assert data["difference"] == found.difference._asdict()

    lines = str(found).splitlines()
    assert lines[0].split() == ["raw", "corrected"]
    assert lines[3].split() == [
        "success",
        f"{found.control.success:.4f}",
        f"{found.treatment.success:.4f}",
    ]
    assert f"{found.difference.high:+.4f}, 95% at all looks)" in lines[4]
    assert lines[-1].startswith("treatment is better: success with 'corrected' differs by +")


def test_a_stricter_alpha_widens_the_interval():
    log = users(3_000)
    strict = log.report(alpha=0.01).difference.half_width
    assert strict > 1.1 * log.report().difference.half_width


def test_what_is_no_experiment_is_refused():
    log = users(10)
    with pytest.raises(InvalidParameter, match="share must be above 0 and below 1, not 1"):
        log._replace(share=1).report()
    with pytest.raises(InvalidParameter, match="alpha"):
        log.report(alpha=0)
    for is_treatment, name in ((False, "treatment"), (True, "control")):
        with pytest.raises(InvalidInput, match=f"arm '{name}' has no rows"):
            log.take(log.treated == is_treatment).report()


def test_two_units_have_no_interval():
    sums = np.array([1.0, 0.0])
    sizes = np.array([1, 1])
    assert difference_of_arms(sums, sizes, np.array([True, False]), 0.5, ALPHA) is None
    found = compare_arms(np.array([7, 9]), np.array([True, False]), sums)
    assert (found.verdict, found.difference) == (UNPROVEN, None)
    json.dumps(found.to_dict(), allow_nan=False)
