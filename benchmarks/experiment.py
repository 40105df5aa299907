"""Whether the verdict of a test on live queries is right, and how many queries it takes.

    python -m benchmarks.experiment [--runs N] [--workers N] [--cases NAME ...] [--add] [--save]

Users are simulated on the exact ten best items of real tasks, without and with the correction. A user scans from the
top (the cascade model of Craswell, Zoeter, Taylor and Ramsey, 2008), clicks the first attractive hit and leaves; a hit
attracts with probability A_RELEVANT if it is the right one and A_OTHER if not, and after each hit the user goes on with
probability GOES_ON. So clicks favour what stands first, in both arms alike. What is right is computed, not
simulated: the mean reciprocal rank of clicks of either ranking under this model, over the demand.

Queries arrive at random, one a second if not said otherwise. A unit is a query in a window of ten minutes. Reports are
made after every 500 queries, and a run ends with its first verdict or at its limit. "No difference" has the raw ranking
in both arms. "Rows as units" counts each answer as if it were randomised by itself, which it is not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from sklearn.cluster import KMeans

from benchmarks.demand import LOG, biases_of, demand_of, task_of
from benchmarks.environment import RESULTS, environment, save, table
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import WithDemand
from milvus_hubness.correction.near_copies import with_groups
from milvus_hubness.quality.confidence_sequence import (
    TIGHTEST_AT,
    TYPICAL_VARIANCE,
    Sequence,
    difference_of_arms,
    mixture_scale,
)
from milvus_hubness.quality.experiment import HELPS, HURTS, UNPROVEN, Trials, report
from milvus_hubness.quality.measures import nearest
from milvus_hubness.quality.tuning import judge_bank
from tests.support.real_data import load_task

Values = npt.NDArray[np.float64]
Vectors = npt.NDArray[np.float32]

A_RELEVANT = 0.6
A_OTHER = 0.05
GOES_ON = 0.85
HITS = 10
EVERY = 500
"""Queries between two looks."""
WINDOW = 600
"""Seconds."""


class Site(NamedTuple):
    """A task with its users."""

    demand: Values
    """(m,) how often each query is sent."""

    clicks: Values
    """(2, m, 10) probability that the click is on this rank, without and with correction."""

    @property
    def truth(self) -> float:
        """The difference of the arms in mean reciprocal rank of clicks."""
        return float(self.demand @ (mean_reciprocal_ranks(self.clicks[1] - self.clicks[0])))


class Case(NamedTuple):
    """What is tried. site: one of SITES."""

    site: str
    limit: int = 100_000
    share: float = 0.5
    rate: float = 1.0
    """Queries a second."""
    popular: float = 0.0
    """Share of all queries that one of them has in addition."""
    alike: bool = False
    """Whether both arms have the raw ranking."""
    clicking: float = 1.0
    """Share of the users who click at all."""
    delay: float = 0.0
    """Mean seconds until a click is reported."""
    rows_as_units: bool = False
    hashes: bool = True
    """Whether rows have a hash of the query without the window."""


CASES = {
    "helps": Case("helps"),
    "hurts": Case("hurts"),
    "Zipf 1.0": Case("Zipf 1.0"),
    "Zipf 1.0, no hashes of queries": Case("Zipf 1.0", 200_000, hashes=False),
    "Zipf 1.0, 0.1 queries a second": Case("Zipf 1.0", rate=0.1),
    "Zipf 1.0, 10 queries a second": Case("Zipf 1.0", rate=10.0),
    "helps, one query has 30%": Case("helps", popular=0.3),
    "helps, a tenth is treated": Case("helps", share=0.1),
    "helps, clicks come 5 minutes late": Case("helps", delay=300.0),
    "no difference": Case("helps", 40_000, alike=True),
    "no difference, Zipf 1.0": Case("Zipf 1.0", 40_000, alike=True),
    "no difference, one query has 30%": Case("helps", 40_000, popular=0.3, alike=True),
    "no difference, Zipf 1.0, a tenth is treated": Case("Zipf 1.0", 40_000, 0.1, alike=True),
    "no difference, 2% click": Case("helps", 40_000, alike=True, clicking=0.04),
    "no difference, Zipf 1.0, rows as units": Case(
        "Zipf 1.0", 40_000, alike=True, rows_as_units=True, hashes=False
    ),
}
SITES = {
    "helps": "text_video_msrvtt t2v, all queries equally often; the default with the task's bank",
    "hurts": "docstring_code, all queries equally often; the default with a bank of one topic of four, which the "
    "verdict without labels does not recognise",
    "Zipf 1.0": "caption_document, demand by Zipf's law to the power 1; the default with a log of that demand",
}


@cache
def site_of(name: str) -> Site:
    if name == "Zipf 1.0":
        return _zipf_site()
    task = load_task("docstring_code" if name == "hurts" else "text_video_msrvtt t2v")
    bank = QueryBank(_one_topic(task.bank) if name == "hurts" else task.bank)
    bias = _default(bank, task.gallery)
    demand = np.full(len(task.query), 1 / len(task.query))
    return Site(demand, _clicks(task.query, task.gallery, task.positives, bias))


def _zipf_site() -> Site:
    task = task_of("caption_document")
    rng = np.random.default_rng(0)
    demand = demand_of(len(task.gallery), 1.0, rng)
    log = QueryBank(task.draw(rng, rng.choice(len(demand), size=LOG, p=demand)))
    bias = _default(log, task.gallery)
    return Site(demand, _clicks(task.test, task.gallery, np.arange(len(demand)), bias))


def _default(bank: QueryBank, gallery: Vectors) -> Vectors:
    """Return the biases that jobs store by default, with the strength of the verdict."""
    grouped = with_groups(bank, gallery)
    strength = judge_bank(grouped, gallery).strength
    return np.asarray(strength * biases_of(WithDemand(), grouped, gallery), np.float32)


def _one_topic(bank: Vectors) -> Vectors:
    sample = bank[:4_000]
    topics = KMeans(4, n_init=1, random_state=0).fit_predict(sample)
    of_one: Vectors = sample[topics == 0]
    return of_one


def _clicks(
    queries: Vectors, gallery: Vectors, positives: npt.NDArray[np.int64], bias: Vectors
) -> Values:
    arms = []
    for subtracted in (np.zeros_like(bias), bias):
        hits = nearest(queries, gallery, HITS, subtracted)
        attracts = np.where(hits == positives[:, None], A_RELEVANT, A_OTHER)
        reaches = np.ones_like(attracts)
        reaches[:, 1:] = np.cumprod((1 - attracts) * GOES_ON, axis=1)[:, :-1]
        arms.append(reaches * attracts)
    return np.stack(arms)


def mean_reciprocal_ranks(clicks: Values) -> Values:
    """Return the mean reciprocal rank of the click (m,) by its probabilities (m, 10)."""
    means: Values = (clicks / np.arange(1, HITS + 1)).sum(1)
    return means


def site_in(case: Case) -> Site:
    site = site_of(case.site)
    clicks = case.clicking * (site.clicks[[0, 0]] if case.alike else site.clicks)
    demand = site.demand * (1 - case.popular)
    # A query whose answers the correction changes as it does on the average.
    changes = mean_reciprocal_ranks(site.clicks[1] - site.clicks[0])
    demand[np.argmin(np.abs(changes - site.truth))] += case.popular
    return Site(demand, clicks)


def traffic(case: Case, seed: list[int]) -> tuple[Trials, Values]:
    """Return the trials of a run and the time (n,) at which each click is reported."""
    site = site_in(case)
    rng = np.random.default_rng(seed)
    count = case.limit
    queries = rng.choice(len(site.demand), size=count, p=site.demand)
    at = np.cumsum(rng.exponential(1 / case.rate, count))
    windows = (at // WINDOW).astype(np.int64)
    _, unit = np.unique(queries * (windows[-1] + 1) + windows, return_inverse=True)
    treated = (rng.random(unit.max() + 1) < case.share)[unit]

    upto = np.cumsum(site.clicks, axis=2)[treated.astype(np.int64), queries]
    drawn = rng.random(count)
    rank = 1 + (drawn[:, None] >= upto).sum(1)
    rank[rank > HITS] = 0
    missing = np.full(count, np.nan)
    trials = Trials(
        unit=np.arange(count) if case.rows_as_units else unit,
        treated=treated,
        at=at.astype(np.int64),
        milliseconds=missing,
        rank=rank,
        hub_share=missing,
        share=case.share,
        query=queries if case.hashes else None,
    )
    return trials, at + rng.exponential(1, count) * case.delay


def one_run(case: Case, seed: list[int]) -> tuple[str, int]:
    """Return the first verdict of a run, and the number of queries it took."""
    trials, reported = traffic(case, seed)
    for count in range(EVERY, case.limit + 1, EVERY):
        seen = trials.take(np.arange(count))
        if case.delay:
            is_reported = reported[:count] <= seen.at[-1]
            seen = replace(seen, rank=np.where(is_reported, seen.rank, 0))
        verdict = report(seen).verdict
        if verdict != UNPROVEN:
            return verdict, count
    return UNPROVEN, case.limit


def outcomes(name: str, first: int, last: int) -> list[tuple[str, int]]:
    torch.set_num_threads(1)
    number = list(CASES).index(name)
    return [one_run(CASES[name], [number, run]) for run in range(first, last)]


def summary_of(name: str, runs: list[tuple[str, int]]) -> dict[str, Any]:
    case = CASES[name]
    site = site_in(case)
    truth = site.truth
    right = UNPROVEN if case.alike else HELPS if truth > 0 else HURTS
    verdicts = [verdict for verdict, _ in runs]
    took = [count for verdict, count in runs if verdict != UNPROVEN]
    low, median, high = np.quantile(took, [0.05, 0.5, 0.95]) if took else (None, None, None)
    clicks = site.clicks.sum(2) @ site.demand
    return {
        **case._asdict(),
        "reciprocal_rank": float(site.demand @ mean_reciprocal_ranks(site.clicks[0])),
        "difference": truth,
        "click_through": clicks.tolist(),
        "runs": len(runs),
        "right": verdicts.count(right),
        "wrong_winner": sum(verdict not in (right, UNPROVEN) for verdict in verdicts),
        "no_verdict": verdicts.count(UNPROVEN),
        "queries": {"median": median, "5%": low, "95%": high},
    }


GUARDS = ((0, 0), (25, 12), (50, 25), (100, 50))
"""Effective units and units with a click of the smaller arm, before which no winner counts."""
GUARD_RUNS = 100
GUARD_LIMIT = 10_000
GUARD_EVERY = 250
GUARDED = {
    "guard: Zipf 1.0": Case("Zipf 1.0", GUARD_LIMIT, alike=True),
    "guard: Zipf 1.0, no hashes": Case("Zipf 1.0", GUARD_LIMIT, alike=True, hashes=False),
    "guard: Zipf 1.0, a tenth is treated": Case("Zipf 1.0", GUARD_LIMIT, 0.1, alike=True),
    "guard: one query has 30%": Case("helps", GUARD_LIMIT, popular=0.3, alike=True),
    "guard: one query has 30%, no hashes": Case(
        "helps", GUARD_LIMIT, popular=0.3, alike=True, hashes=False
    ),
    "guard: one query has 30%, a tenth is treated": Case(
        "helps", GUARD_LIMIT, 0.1, popular=0.3, alike=True
    ),
    "guard: one query has 30%, a tenth is treated, no hashes": Case(
        "helps", GUARD_LIMIT, 0.1, popular=0.3, alike=True, hashes=False
    ),
    "guard: 2% click": Case("helps", GUARD_LIMIT, alike=True, clicking=0.04),
    "guard: 2% click, a tenth is treated": Case(
        "helps", GUARD_LIMIT, 0.1, alike=True, clicking=0.04
    ),
}


def false_winners(name: str, first: int, last: int) -> list[int]:
    """Return for each of GUARDS in how many runs an interval left out the truth, which is zero."""
    torch.set_num_threads(1)
    case = GUARDED[name]
    smaller = min(case.share, 1 - case.share)
    counts = np.zeros(len(GUARDS), np.int64)
    for run in range(first, last):
        trials, _ = traffic(case, [1_000 + list(GUARDED).index(name), run])
        is_wrong = np.zeros(len(GUARDS), np.bool_)
        for count in range(GUARD_EVERY, case.limit + 1, GUARD_EVERY):
            looked = report(trials.take(np.arange(count)))
            interval = looked.reciprocal_rank
            if interval is None or interval.low <= 0 <= interval.high:
                continue
            for number, (units, clicked) in enumerate(GUARDS):
                is_wrong[number] |= (
                    smaller * looked.effective_units >= units
                    and smaller * looked.clicked_units >= clicked
                )
        counts += is_wrong
    return counts.tolist()


CLICK_THROUGH = (0.5, 0.1, 0.02)
CHANGES = (0.2, 0.1, 0.05, 0.02)


def queries_needed() -> dict[str, dict[str, int | None]]:
    """Return after how many queries a relative change of the reciprocal rank of clicks is proven.

    By click-through and change, where the estimate is the true change: half of the experiments are
    through sooner. Arms are equal and units single queries; ranks of clicks are those of "helps".
    """
    site = site_of("helps")
    ranks = np.arange(1, HITS + 1)
    by_rank = site.demand @ site.clicks[0]
    needed: dict[str, dict[str, int | None]] = {}
    for click_through in CLICK_THROUGH:
        probability = by_rank * click_through / by_rank.sum()
        mean = float(probability @ (1 / ranks))
        variance = 4 * (float(probability @ (1 / ranks**2)) - mean**2)
        scale = mixture_scale(4 * TIGHTEST_AT * TYPICAL_VARIANCE, 0.05)
        few, many = (Sequence(count, variance, scale, 0.05) for count in (500, 100_000))
        needed[str(click_through)] = {
            str(change): few.queries_to_show(change * mean) or many.queries_to_show(change * mean)
            for change in CHANGES
        }
    return needed


class Widths(NamedTuple):
    """Half widths of 95% confidence sequences of one experiment, each query a unit of its own."""

    normal_mixture: float
    """The one that reports have."""

    empirical_bernstein: float
    """Waudby-Smith and Ramdas (2024): exact for any number of bounded outcomes."""

    one_look: float
    """The ordinary interval, which holds at one look that was planned."""


def widths(count: int) -> Widths:
    case = Case("helps", count, rows_as_units=True)
    trials, _ = traffic(case, [0])
    outcome = np.where(trials.rank > 0, 1 / np.maximum(trials.rank, 1), 0.0)
    measured = difference_of_arms(
        outcome, np.ones(count, np.int64), trials.treated, trials.share, 0.05
    )
    assert measured is not None
    difference, sequence = measured

    # By inverse probabilities, less the mean of the earlier outcomes: between -2 and 2.
    before = np.concatenate([[0.5], np.cumsum(outcome)[:-1] / np.arange(1, count)])
    terms = np.where(trials.treated, 2.0, -2.0) * (outcome - before)
    return Widths(
        difference.half_width,
        4 * empirical_bernstein((terms + 2) / 4, 0.05),
        1.96 * float(np.sqrt(sequence.variance_per_query / count)),
    )


def empirical_bernstein(values: Values, alpha: float) -> float:
    """Return the half width of the predictable plug-in sequence of values (n,) between 0 and 1."""
    times = np.arange(1, len(values) + 1)
    means = (0.5 + np.cumsum(values)) / (times + 1)
    before = np.concatenate([[0.5], means[:-1]])
    variances = (0.25 + np.cumsum((values - means) ** 2)) / (times + 1)
    variances = np.concatenate([[0.25], variances[:-1]])
    bets = np.sqrt(2 * np.log(2 / alpha) / (variances * times * np.log(1 + times)))
    bets = np.minimum(bets, 0.5)
    costs = 4 * (values - before) ** 2 * (-np.log(1 - bets) - bets) / 4
    return float((np.log(2 / alpha) + costs.sum()) / bets.sum())


def markdown_of(
    cases: dict[str, dict[str, Any]],
    guards: dict[str, list[int]],
    needed: dict[str, dict[str, int | None]],
    by_width: dict[str, Any],
) -> str:
    rows = []
    for name, row in cases.items():
        queries = row["queries"]
        took = ""
        if queries["median"] is not None:
            took = f"{queries['median']:,.0f} ({queries['5%']:,.0f} to {queries['95%']:,.0f})"
        rows.append(
            [
                name,
                f"{row['reciprocal_rank']:.3f}",
                f"{row['difference']:+.4f}",
                f"{row['right']} of {row['runs']}",
                str(row["wrong_winner"]),
                str(row["no_verdict"]),
                f"{row['limit']:,}",
                took,
            ]
        )
    head = [
        "case",
        "reciprocal rank, raw",
        "true difference",
        "right",
        "wrong winner",
        "no verdict",
    ]
    verdicts = table([*head, "limit", "queries until a verdict: median (5% to 95%)"], rows)
    sites = "\n".join(f"- {name}: {text}." for name, text in SITES.items())
    lines = [
        [f"{int(count):,}", *(f"{width:.4f}" for width in of_count.values())]
        for count, of_count in by_width.items()
    ]
    compared = table(
        ["queries", "normal mixture", "empirical Bernstein", "ordinary interval, one look"], lines
    )
    guard_head = [f"{units} units, {clicked} clicks" for units, clicked in GUARDS]
    guarded = table(
        ["arms are alike", *guard_head],
        [
            [name.removeprefix("guard: "), *(f"{count / GUARD_RUNS:.1%}" for count in row)]
            for name, row in guards.items()
        ],
    )
    by_change = table(
        ["click-through", *(f"+{change:.0%}" for change in CHANGES)],
        [
            [f"{float(name):.0%}", *("" if n is None else f"{n:,}" for n in row.values())]
            for name, row in needed.items()
        ],
    )
    return (
        f"{verdicts}\n\n{sites}\n\nWhere arms are alike, no verdict is right.\n\n"
        f"Queries until a change of the reciprocal rank of clicks is proven, in the mean, by the "
        f"formula, each query a unit of its own and arms equal:\n\n{by_change}\n\n"
        f"Share of {GUARD_RUNS} runs in which an interval ever left out the truth, at looks after "
        f"every {GUARD_EVERY} of {GUARD_LIMIT:,} queries, if looks count from so many effective "
        f"units and units with a click of the smaller arm on:\n\n{guarded}\n\n"
        f"Half widths of the interval of the difference, each query a unit of its own:\n\n"
        f"{compared}"
    )


def saved_rows() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the cases and the guards that are saved, by name."""
    path = RESULTS / "experiment.json"
    if not path.is_file():
        return {}, {}
    saved = json.loads(path.read_text())
    return saved["cases"], saved["guards"]["wrong"]


def keep(rows: dict[str, Any], started: float) -> str:
    """Save the rows of some cases and guards next to those that are saved, and return the tables."""
    cases, guards = saved_rows()
    cases = {name: {**cases, **rows}[name] for name in CASES if name in {**cases, **rows}}
    guards = {name: {**guards, **rows}[name] for name in GUARDED if name in {**guards, **rows}}
    by_width = {str(count): widths(count)._asdict() for count in (2_000, 10_000, 40_000)}
    needed = queries_needed()
    markdown = markdown_of(cases, guards, needed, by_width)
    results = {
        "cases": cases,
        "sites": SITES,
        "click_model": {"a_relevant": A_RELEVANT, "a_other": A_OTHER, "goes_on": GOES_ON},
        "look_every": EVERY,
        "window_seconds": WINDOW,
        "queries_needed": needed,
        "guards": {"of": GUARDS, "runs": GUARD_RUNS, "wrong": guards},
        "half_widths": by_width,
        "environment": environment(started),
    }
    save("experiment", results, markdown)
    return markdown


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2, help="processes [default: 2]")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--guards", nargs="*", default=list(GUARDED), choices=list(GUARDED))
    parser.add_argument(
        "--save", action="store_true", help="once more after each case; other saved rows stay"
    )
    options = parser.parse_args(arguments)
    started = time.monotonic()

    # Each process makes its sites, so that each gets a share of the runs of all cases.
    of_cases = np.linspace(0, options.runs, options.workers + 1).astype(int).tolist()
    of_guards = np.linspace(0, GUARD_RUNS, options.workers + 1).astype(int).tolist()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, context) as pool:
        running = {
            name: [pool.submit(outcomes, name, *part) for part in pairwise(of_cases)]
            for name in options.cases
        }
        guarding = {
            name: [pool.submit(false_winners, name, *part) for part in pairwise(of_guards)]
            for name in options.guards
        }
        for name, parts in running.items():
            row = summary_of(name, [run for part in parts for run in part.result()])
            print(name, json.dumps(row), flush=True)
            if options.save:
                keep({name: row}, started)
        for name, counted in guarding.items():
            wrong = np.sum([part.result() for part in counted], axis=0).tolist()
            print(name, wrong, flush=True)
            if options.save:
                keep({name: wrong}, started)

    if options.save:
        print((RESULTS / "experiment.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
