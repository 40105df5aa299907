"""The report of a test on live queries: intervals that hold at all looks, and verdicts that wait."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from milvus_hubness.errors import InvalidInput
from milvus_hubness.quality.confidence_sequence import (
    boundary,
    difference_of_arms,
    mixture_scale,
)
from milvus_hubness.quality.experiment import HELPS, HURTS, UNPROVEN, Trials, report

WINDOW = 600
ALPHA = 0.05


def users(
    count,
    seed=0,
    *,
    zipf=0.0,
    popular=0.0,
    rate=1.0,
    share=0.5,
    effect=0.0,
    clicks=0.5,
    hashes=True,
):
    """Return the trials of `count` queries by 500 different ones, each with its own rate of clicks.

    effect: what is added to the probability of a click on the first hit in the treatment.
    """
    rng = np.random.default_rng(seed)
    demand = 1 / np.arange(1, 501) ** zipf
    demand *= (1 - popular) / demand.sum()
    demand[0] += popular
    query = rng.choice(500, size=count, p=demand)
    at = np.sort(rng.integers(0, max(1, int(count / rate)), size=count))
    _, unit = np.unique(query * 1_000_000 + at // WINDOW, return_inverse=True)
    treated = (rng.random(unit.max() + 1) < share)[unit]

    rates = rng.beta(clicks, 1 - clicks, size=500)
    if popular:
        # As of a name that everybody looks for.
        rates[0] = 0.95
    rank = np.where(rng.random(count) < rates[query], rng.geometric(0.5, size=count), 0)
    rank = np.where(treated & (rng.random(count) < effect), 1, rank)
    return Trials(
        unit=unit,
        treated=treated,
        at=at,
        milliseconds=rng.gamma(2, 3, size=count),
        rank=rank,
        hub_share=rng.random(count),
        share=share,
        query=query if hashes else None,
    )


def by_a_plain_loop(trials):
    """Return the estimate and the interval in float64, query by query and unit by unit."""
    p = trials.share
    sums, sizes, arms, queries = {}, {}, {}, {}
    for row in range(len(trials)):
        unit = int(trials.unit[row])
        outcome = 1 / int(trials.rank[row]) if trials.rank[row] else 0.0
        sums[unit] = sums.get(unit, 0.0) + outcome
        sizes[unit] = sizes.get(unit, 0) + 1
        arms[unit] = bool(trials.treated[row])
        queries[unit] = None if trials.query is None else int(trials.query[row])

    total = sum(sizes.values())
    terms, errors = {}, {}
    for unit in sums:
        others = [other for other in sums if other != unit]
        predicted = sum(sums[other] for other in others) / sum(sizes[other] for other in others)
        if trials.query is not None:
            alike = [other for other in others if queries[other] == queries[unit]]
            numerator = sum(sums[other] for other in alike) + 5 * predicted
            predicted = numerator / (sum(sizes[other] for other in alike) + 5)
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
@pytest.mark.parametrize("hashes", [True, False])
def test_the_difference_is_that_of_a_plain_loop(share, hashes):
    trials = users(900, zipf=1.0, share=share, effect=0.2, hashes=hashes)
    assert report(trials).reciprocal_rank == pytest.approx(by_a_plain_loop(trials), rel=1e-9)


def test_arms_are_described_as_a_plain_loop_does():
    trials = users(700, share=0.3, effect=0.2)
    missing = replace(
        trials,
        milliseconds=np.where(np.arange(700) % 3 == 0, np.nan, trials.milliseconds),
        hub_share=np.where(np.arange(700) % 4 == 0, np.nan, trials.hub_share),
    )
    of_experiment = report(missing)
    for is_treatment, arm in ((False, of_experiment.control), (True, of_experiment.treatment)):
        rows = [row for row in range(700) if missing.treated[row] == is_treatment]
        ranks = [int(missing.rank[row]) for row in rows]
        assert arm.queries == len(rows)
        assert arm.units == len({int(missing.unit[row]) for row in rows})
        assert arm.clicks == sum(rank > 0 for rank in ranks)
        assert arm.click_through == pytest.approx(arm.clicks / len(rows))
        reciprocal = sum(1 / rank for rank in ranks if rank) / len(rows)
        assert arm.reciprocal_rank == pytest.approx(reciprocal)
        hubs = [missing.hub_share[row] for row in rows if row % 4]
        assert arm.hub_share == pytest.approx(sum(hubs) / len(hubs))
        latencies = sorted(missing.milliseconds[row] for row in rows if row % 3)
        assert arm.latency_p50 == pytest.approx(latencies[len(latencies) // 2], rel=0.05)
        assert arm.latency_p95 == pytest.approx(latencies[int(len(latencies) * 0.95)], rel=0.05)


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
    "even demand": {"rate": 0.25},
    # A quarter of a query a second: 3,000 of them are 20 windows.
    "Zipf 1.0": {"zipf": 1.0, "rate": 0.25},
    "Zipf 1.0, no hashes": {"zipf": 1.0, "rate": 0.25, "hashes": False},
    "one query has 30%": {"popular": 0.3, "rate": 0.25},
    "one query has 30%, no hashes": {"popular": 0.3, "rate": 0.25, "hashes": False},
    "a tenth is treated": {"share": 0.1, "zipf": 1.0, "rate": 0.05},
    "few clicks": {"clicks": 0.04, "rate": 0.25},
}
RUNS = 60
LOOKS = range(100, 3_001, 100)


def winners(case, looks=LOOKS, make_units=lambda trials: trials):
    """Return the number of runs that ever have a verdict at one of the looks."""
    count = 0
    for seed in range(RUNS):
        trials = make_units(users(looks[-1], seed, **case))
        verdicts = (report(trials.take(np.arange(look))).verdict for look in looks)
        count += any(verdict != UNPROVEN for verdict in verdicts)
    return count


# Three standard errors above α.
MOST = RUNS * ALPHA + 3 * math.sqrt(RUNS * ALPHA * (1 - ALPHA))


@pytest.mark.parametrize("case", UNTIDY)
def test_alike_arms_have_no_winner_although_one_looks_after_every_hundred_queries(case):
    assert winners(UNTIDY[case]) <= MOST
    last = report(users(LOOKS[-1], **UNTIDY[case]))
    assert "can show differences from" in last.reason, "not for want of units or clicks"


def test_rows_taken_for_units_would_name_a_winner_without_a_difference():
    """So the sums over units are what the cases above rest on."""

    def of_rows(trials):
        return replace(trials, unit=np.arange(len(trials)))

    case = {"popular": 0.3, "hashes": False}
    looks = range(1_000, 10_001, 1_000)
    assert winners(case, looks) <= MOST
    assert winners(case, looks, of_rows) > 0.25 * RUNS


def test_clicks_that_are_reported_late_name_no_winner_without_a_difference():
    count = 0
    for seed in range(RUNS):
        trials = users(3_000, seed, zipf=1.0, rate=0.25)
        delays = np.random.default_rng(seed).exponential(1_800, size=3_000)
        verdicts = set()
        for look in range(300, 3_001, 300):
            seen = trials.take(np.arange(look))
            is_reported = (seen.at + delays[:look]) <= seen.at[-1]
            verdicts.add(report(replace(seen, rank=seen.rank * is_reported)).verdict)
        count += verdicts != {UNPROVEN}
    assert count <= MOST


def test_clicks_that_are_reported_late_make_a_difference_smaller_but_no_other():
    trials = users(12_000, effect=0.2, rate=0.2)
    delays = np.random.default_rng(0).exponential(7_200, size=12_000)
    is_reported = trials.at + delays <= trials.at[-1]
    late = report(replace(trials, rank=trials.rank * is_reported))
    assert late.verdict == HELPS
    assert late.reciprocal_rank.estimate < report(trials).reciprocal_rank.estimate


def intervals(trials, looks, **options):
    for look in looks:
        seen = trials.take(np.arange(look))
        yield report(seen, **options).reciprocal_rank


def test_intervals_cover_a_true_difference_at_all_looks():
    """Of an effect e on clicks that would else have the mean m, the difference is e (1 − m)."""
    missed = 0
    for seed in range(RUNS):
        trials = users(3_000, seed, zipf=1.0, effect=0.15, rate=0.25)
        # What the users of this log would do on average, from many more of them.
        crowd = users(200_000, seed, zipf=1.0, rate=0.25)
        reciprocal = np.where(crowd.rank > 0, 1 / np.maximum(crowd.rank, 1), 0.0)
        by_query = np.bincount(crowd.query, reciprocal, 500) / np.bincount(
            crowd.query, minlength=500
        ).clip(1)
        demand = np.bincount(trials.query, minlength=500) / len(trials)
        truth = 0.15 * (1 - by_query @ demand)
        missed += any(
            not low <= truth <= high for _, low, high in intervals(trials, range(500, 3_001, 500))
        )
    assert missed <= MOST


@pytest.mark.parametrize("share", [0.5, 0.1])
@pytest.mark.parametrize("demand", [{}, {"zipf": 1.0}, {"popular": 0.3}])
def test_a_clear_difference_is_proven_in_either_direction(share, demand):
    trials = users(12_000, share=share, effect=0.2, rate=0.2, **demand)
    found = report(trials)
    assert (found.verdict, found.more_queries) == (HELPS, 0)
    assert found.reciprocal_rank.low > 0

    swapped = report(replace(trials, treated=~trials.treated, share=1 - share))
    assert swapped.verdict == HURTS
    assert swapped.reciprocal_rank.estimate == pytest.approx(-found.reciprocal_rank.estimate)


def test_the_verdict_is_about_ranks_where_as_many_hits_are_clicked():
    trials = users(8_000, rate=0.2)
    clicked = trials.rank > 0
    ranks = np.where(trials.treated, 1, 3) * clicked
    found = report(replace(trials, rank=ranks))
    assert found.verdict == HELPS
    assert found.click_through.low < 0 < found.click_through.high


def test_an_arm_in_which_nobody_clicks_any_more_has_lost():
    trials = users(4_000, rate=0.2)
    found = report(replace(trials, rank=np.where(trials.treated, 0, trials.rank)))
    assert (found.verdict, found.treatment.clicks) == (HURTS, 0)


def test_hashes_of_queries_narrow_the_interval_where_few_queries_are_sent_often():
    trials = users(8_000, zipf=1.0, rate=1.0)
    with_hashes = report(trials).smallest_difference
    without = report(replace(trials, query=None)).smallest_difference
    assert with_hashes < 0.7 * without

    even = users(8_000, rate=1.0)
    with_hashes = report(even).smallest_difference
    assert with_hashes < 1.02 * report(replace(even, query=None)).smallest_difference


def repeated(trials, times):
    """Return the trials with as many more users who do the same."""
    width = int(trials.unit.max()) + 1
    count = len(trials)
    again = trials.take(np.tile(np.arange(count), times))
    return replace(
        again,
        unit=again.unit + width * np.repeat(np.arange(times), count),
        query=None,
    )


def test_the_number_of_further_queries_is_what_it_takes():
    trials = replace(users(3_000, seed=2, effect=0.05, rate=0.2), query=None)
    found = report(trials)
    assert found.verdict == UNPROVEN
    assert found.reciprocal_rank.low < 0 < found.reciprocal_rank.high
    assert f"{found.more_queries:,} more queries" in found.reason
    assert "at the present rate" in found.reason

    times = (3_000 + found.more_queries) / 3_000
    assert 2 < times < 3
    assert report(repeated(trials, 3)).verdict == HELPS
    assert report(repeated(trials, 2)).verdict == UNPROVEN


def test_the_smallest_difference_is_the_one_whose_interval_ends_at_zero():
    found = report(users(3_000, effect=0.03))
    estimate, low, high = found.reciprocal_rank
    assert found.smallest_difference == pytest.approx(estimate - low)
    assert found.smallest_difference == pytest.approx(high - estimate)
    assert f"{found.smallest_difference:.4f}" in found.reason


def test_more_data_of_the_same_kind_narrows_the_interval():
    widths = [high - low for _, low, high in intervals(users(8_000), (1_000, 2_000, 4_000, 8_000))]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 2 * widths[-1]


def test_arms_without_any_difference_need_no_number_of_queries():
    trials = users(2_000)
    twice = replace(
        repeated(trials, 2),
        treated=np.repeat([False, True], 2_000),
        milliseconds=np.full(4_000, np.nan),
    )
    found = report(twice)
    assert found.verdict == UNPROVEN
    assert found.more_queries is None
    assert "next to nothing" in found.reason


def test_an_answer_that_is_delivered_again_counts_once():
    trials = users(3_000, effect=0.2)
    once = report(trials)
    for again in (np.flatnonzero(trials.treated), np.arange(3_000), np.arange(500)):
        rows = np.random.default_rng(0).permutation(np.concatenate([np.arange(3_000), again]))
        assert report(trials.take(rows)) == once


def test_a_click_that_comes_late_replaces_the_row_without_one():
    trials = users(3_000, effect=0.2)
    early = replace(
        trials,
        rank=np.where(np.arange(3_000) % 2, 0, trials.rank),
        hub_share=np.full(3_000, np.nan),
    )
    both = trials.take(np.arange(3_000))
    rows = Trials(
        **{
            name: np.concatenate([getattr(early, name), getattr(both, name)])
            for name in ("unit", "treated", "at", "milliseconds", "rank", "hub_share", "query")
        },
        share=0.5,
    )
    assert report(rows) == report(trials)
    assert report(early).control.clicks < report(trials).control.clicks


def test_rows_without_a_latency_are_never_taken_for_one():
    trials = users(3_000, popular=0.3)
    missing = replace(trials, milliseconds=np.full(3_000, np.nan))
    found = report(missing)
    assert found.control.queries + found.treatment.queries == 3_000
    assert found.control.latency_p50 is None
    assert found.reciprocal_rank == pytest.approx(report(trials).reciprocal_rank)


def test_units_in_both_arms_are_left_out_and_counted():
    trials = users(3_000, popular=0.3, rate=0.2)
    largest = np.bincount(trials.unit).argmax()
    in_unit = np.flatnonzero(trials.unit == largest)
    arms = trials.treated.copy()
    arms[in_unit[0]] = ~arms[in_unit[0]]
    found = report(replace(trials, treated=arms))
    assert found.mixed_units == 1
    without = report(trials.take(trials.unit != largest))
    assert found.reciprocal_rank == without.reciprocal_rank
    assert "1 units with answers of both arms" in str(found)


def test_without_clicks_there_is_no_verdict_and_the_reason_says_so():
    trials = users(5_000)
    found = report(replace(trials, rank=np.zeros(5_000, np.int64)))
    assert (found.verdict, found.more_queries) == (UNPROVEN, None)
    assert "no query has a click" in found.reason
    assert found.reciprocal_rank.low < 0 < found.reciprocal_rank.high


def test_few_clicks_prove_nothing_however_clear_they_look():
    trials = users(4_000, rate=0.2)
    _, of_units = np.unique(trials.unit, return_index=True)
    ranks = np.zeros(4_000, np.int64)
    ranks[of_units[trials.treated[of_units]][:40]] = 1
    found = report(replace(trials, rank=ranks))
    assert found.verdict == UNPROVEN
    assert found.reason.startswith("40 units have a click, and 50 are needed")
    assert found.more_queries == 1_000


def test_few_large_units_prove_nothing_however_many_queries_they_have():
    """One query is 30% of 20,000 an hour: six windows, and one draw of its arm in each."""
    trials = users(20_000, popular=0.3, rate=20_000 / 3_600, effect=0.3)
    found = report(trials)
    assert found.verdict == UNPROVEN
    assert "effective units of 50 that are needed" in found.reason
    assert found.more_queries > 0


@pytest.mark.parametrize(("is_treatment", "name"), [(False, "treatment"), (True, "control")])
def test_an_empty_arm_has_no_figures_and_there_is_no_verdict(is_treatment, name):
    trials = users(12)
    found = report(trials.take(np.full(12, True) & (trials.treated == is_treatment)))
    arm = getattr(found, name)
    assert (arm.queries, arm.click_through, arm.reciprocal_rank) == (0, None, None)
    assert (found.verdict, found.reciprocal_rank) == (UNPROVEN, None)
    assert f"the {name} has no queries yet" in str(found)


def test_an_experiment_that_has_just_begun_has_a_report():
    found = report(users(5).take(np.empty(0, np.int64)))
    assert (found.verdict, found.control.queries, found.seconds) == (UNPROVEN, 0, 0)
    json.dumps(found.to_dict(), allow_nan=False)


def test_arms_of_another_share_than_was_set_have_no_verdict():
    """A client that was started with another share, or one arm of which rows are lost."""
    trials = users(6_000, effect=0.3, rate=0.2)
    assert report(trials).verdict == HELPS
    wrong = report(replace(trials, share=0.4))
    assert wrong.verdict == UNPROVEN
    assert "and 40% was set" in wrong.reason

    is_lost = trials.treated & (trials.unit % 4 == 0)
    lost = report(trials.take(~is_lost))
    assert (lost.verdict, lost.more_queries) == (UNPROVEN, None)
    assert "rows of one arm are lost" in lost.reason


def test_a_report_is_plain_data_and_a_table():
    found = report(users(5_000, effect=0.2, rate=0.2))
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["verdict"] == HELPS
    assert data["treatment"]["queries"] == found.treatment.queries
    assert data["reciprocal_rank"] == found.reciprocal_rank._asdict()

    lines = str(found).splitlines()
    assert f"{found.control.click_through:.1%}" in lines[4]
    assert f"{found.reciprocal_rank.high:+.4f})" in lines[3]
    assert lines[-1].startswith("correction helps: ")


def test_a_stricter_alpha_widens_the_interval():
    trials = users(3_000)
    assert report(trials, 0.01).smallest_difference > 1.1 * report(trials).smallest_difference


def test_what_is_no_experiment_is_refused():
    trials = users(10)
    with pytest.raises(InvalidInput, match="above 0 and below 1, got 1"):
        replace(trials, share=1)
    with pytest.raises(InvalidInput, match="different lengths"):
        replace(trials, rank=trials.rank[:5])
    with pytest.raises(InvalidInput, match="different lengths"):
        replace(trials, query=trials.query[:5])
    with pytest.raises(InvalidInput, match="0 is no click: got -1"):
        replace(trials, rank=np.full(10, -1))
    with pytest.raises(InvalidInput, match="alpha"):
        report(trials, alpha=0)


def test_two_units_have_no_interval():
    sums = np.array([1.0, 0.0])
    sizes = np.array([1, 1])
    assert difference_of_arms(sums, sizes, np.array([True, False]), 0.5, ALPHA) is None
