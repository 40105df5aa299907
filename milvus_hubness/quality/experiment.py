"""A test on live queries: what the correction does to clicks, from randomised arms.

**What is assumed.** Arms are randomised, so both have the same users, the same pages and the same
habit of clicking on what stands first: no model of position bias is needed, as it is the same in both
arms. Beyond that, clicks stand for what users want; the arm of one query changes neither other queries
nor how often a query is sent; and all rows of both arms arrive, or are lost alike. The number of units
of each arm is compared with the share, since the last is what fails most often.

**What decides.** The verdict is taken on the reciprocal rank of the best click, 0 without one. A
correction moves right answers up a page that often had them already: click-through hardly moves
then, as users scan on to where the answer stands, while the rank of the click does.

**When.** A report may be made at any time and as often as one likes: see `confidence_sequence`. There is
no verdict before each arm has EFFECTIVE_UNITS and CLICKS, because the intervals are exact for many
units only. `benchmarks/experiment.py` shows how often verdicts are right, and after how many queries.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.notebooks import ShownAsTable
from milvus_hubness.errors import InvalidInput
from milvus_hubness.quality.confidence_sequence import (
    Difference,
    boundary,
    difference_of_arms,
    effective_units,
    mixture_scale,
)

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Values = npt.NDArray[np.float64]

EFFECTIVE_UNITS = 50
"""Effective units of the smaller arm, by its share, below which there is no verdict."""
CLICKS = 25
"""Units with a click of the smaller arm, by its share, below which there is no verdict.

Both were chosen on simulated experiments of two equal arms, looked at forty times up to 10,000
queries: `benchmarks/experiment.py` has the share of runs with a winner under other numbers."""
SHARE_ALPHA = 0.001
"""Probability that arms of the right share are ever called wrong."""
SHARE_UNITS = 1_000
"""Units at which a wrong share is noticed soonest."""

Verdict = Literal["correction helps", "correction hurts", "no difference proven yet"]
HELPS: Verdict = "correction helps"
HURTS: Verdict = "correction hurts"
UNPROVEN: Verdict = "no difference proven yet"
SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class Trials:
    """The answers of an experiment, one row each.

    Raises InvalidInput for arrays of different lengths, negative ranks, or a share outside 0 to 1.
    """

    unit: Integers
    """(n,) the randomised unit: a hash of the query and of a window of time."""

    treated: Flags
    """(n,) whether the answer is of the treatment, else of the control."""

    at: Integers
    """(n,) Unix seconds."""

    milliseconds: Values
    """(n,) latency; NaN where it is missing."""

    rank: Integers
    """(n,) the best rank, from 1, of a clicked hit; 0 for no click."""

    hub_share: Values
    """(n,) share of the hits that are hubs; NaN where it is missing."""

    share: float
    """Probability of the treatment, above 0 and below 1."""

    query: Integers | None = None
    """(n,) a hash of the query, without a window; where few queries are sent often, verdicts take
    fewer queries with it."""

    def __post_init__(self) -> None:
        columns = ("unit", "treated", "at", "milliseconds", "rank", "hub_share")
        lengths = {name: len(getattr(self, name)) for name in columns}
        if self.query is not None:
            lengths["query"] = len(self.query)
        if len(set(lengths.values())) > 1:
            raise InvalidInput(f"trials have columns of different lengths: {lengths}")
        if not 0 < self.share < 1:
            raise InvalidInput(f"share must be above 0 and below 1, got {self.share}")
        if len(self.rank) and self.rank.min() < 0:
            raise InvalidInput(f"ranks begin at 1, and 0 is no click: got {self.rank.min()}")

    def __len__(self) -> int:
        return len(self.unit)

    def distinct(self) -> Trials:
        """Return the trials in the order of their units, each answer once.

        Rows with the same unit, arm, second and latency are one answer that was delivered several
        times: again by a client that was cut off, or once more with a click that came late. The
        best click counts. A row without a latency is an answer of its own.
        """
        order = np.lexsort((self.milliseconds, self.at, self.treated, self.unit))
        rows = self.take(order)
        is_new = np.ones(len(rows), np.bool_)
        # NaN equals nothing, so that rows without a latency stay.
        is_new[1:] = rows.milliseconds[1:] != rows.milliseconds[:-1]
        is_new[1:] |= rows.at[1:] != rows.at[:-1]
        is_new[1:] |= rows.treated[1:] != rows.treated[:-1]
        is_new[1:] |= rows.unit[1:] != rows.unit[:-1]

        first = np.flatnonzero(is_new)
        if len(first) == len(rows):
            return rows
        no_click = np.iinfo(np.int64).max
        best = np.minimum.reduceat(np.where(rows.rank == 0, no_click, rows.rank), first)
        hub_share = np.fmax.reduceat(rows.hub_share, first)
        return replace(
            rows.take(first), rank=np.where(best == no_click, 0, best), hub_share=hub_share
        )

    def take(self, rows: npt.NDArray[Any]) -> Trials:
        """Return the trials of some rows, by their numbers or by a mask (n,)."""
        return Trials(
            unit=self.unit[rows],
            treated=self.treated[rows],
            at=self.at[rows],
            milliseconds=self.milliseconds[rows],
            rank=self.rank[rows],
            hub_share=self.hub_share[rows],
            share=self.share,
            query=None if self.query is None else self.query[rows],
        )


class Units(NamedTuple):
    """The sums of the units of trials, in the order of the units."""

    sizes: Integers
    """(u,) queries."""

    treated: Flags
    """(u,)."""

    reciprocal_ranks: Values
    """(u,) sums over the queries of 1 / rank of the best click."""

    clicks: Values
    """(u,) queries with a click."""

    queries: Integers | None
    """(u,) hashes of the queries that the units are about."""


@dataclass(frozen=True)
class Arm:
    """What the users of one arm met and did."""

    queries: int

    units: int

    clicks: int
    """Queries with a click."""

    click_through: float | None
    """Share of the queries with a click; None without queries, as all shares and means."""

    reciprocal_rank: float | None
    """Mean over the queries of 1 / rank of the best click, 0 without one."""

    hub_share: float | None
    """Mean share of an answer's hits that are hubs."""

    latency_p50: float | None
    """Median, in milliseconds."""

    latency_p95: float | None
    """In milliseconds."""


@dataclass(frozen=True)
class ExperimentReport(ShownAsTable):
    """Both arms, their differences, and the verdict."""

    verdict: Verdict

    reason: str
    """Why, in one sentence; without a verdict, what is missing for one."""

    control: Arm

    treatment: Arm

    reciprocal_rank: Difference | None
    """Treatment less control, on which the verdict is taken; None if an arm has no units. It differs
    a little from the difference of the means above: what chance gave to an arm is taken out."""

    click_through: Difference | None

    alpha: float
    """Probability that the interval of a difference ever misses the true one, over all looks."""

    share: float
    """Probability of the treatment."""

    smallest_difference: float | None
    """Difference in reciprocal rank from which on the present number of queries can show it."""

    more_queries: int | None
    """Further queries, about, after which a difference of the present size would be proven; 0 with
    a verdict, None if more than a thousand times the present number are needed."""

    seconds: int
    """From the first to the last answer."""

    effective_units: float
    """Units of equal size that would vary as much as those of both arms."""

    clicked_units: int
    """Units with a click, of both arms."""

    mixed_units: int
    """Units with answers of both arms, which are left out."""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        report = asdict(self)
        for name in ("reciprocal_rank", "click_through"):
            difference = getattr(self, name)
            report[name] = None if difference is None else difference._asdict()
        return report

    def __str__(self) -> str:
        level = f"difference ({1 - self.alpha:.0%} at all looks)"
        lines = [
            _line("", "control", "treatment", level),
            _line("queries", f"{self.control.queries:,}", f"{self.treatment.queries:,}"),
            _line("units", f"{self.control.units:,}", f"{self.treatment.units:,}"),
            _line(
                "reciprocal rank of clicks",
                _number(self.control.reciprocal_rank, ".4f"),
                _number(self.treatment.reciprocal_rank, ".4f"),
                _interval(self.reciprocal_rank, "+.4f"),
            ),
            _line(
                "click-through",
                _number(self.control.click_through, ".1%"),
                _number(self.treatment.click_through, ".1%"),
                _interval(self.click_through, "+.1%"),
            ),
            _line(
                "hubs among the hits",
                _number(self.control.hub_share, ".1%"),
                _number(self.treatment.hub_share, ".1%"),
            ),
            _line(
                "latency p50, ms",
                _number(self.control.latency_p50, ".1f"),
                _number(self.treatment.latency_p50, ".1f"),
            ),
            _line(
                "latency p95, ms",
                _number(self.control.latency_p95, ".1f"),
                _number(self.treatment.latency_p95, ".1f"),
            ),
            "",
            f"{self.verdict}: {self.reason}",
        ]
        if self.mixed_units:
            lines.append(f"left out: {self.mixed_units:,} units with answers of both arms")
        return "\n".join(lines)


def report(trials: Trials, alpha: float = 0.05) -> ExperimentReport:
    """Return the report of an experiment, which may be made at any time.

    An answer that was delivered several times counts once, units with answers of both arms are left
    out. alpha: see `ExperimentReport.alpha`. Raises InvalidInput for an alpha outside 0 to 1.
    """
    if not 0 < alpha < 1:
        raise InvalidInput(f"alpha must be above 0 and below 1, got {alpha}")
    rows, units, mixed = _by_unit(trials.distinct())
    arms = {is_treatment: _arm(rows, units, is_treatment) for is_treatment in (False, True)}

    queries = len(rows)
    seconds = int(np.ptp(rows.at)) if queries else 0
    ranks, clicks = (
        difference_of_arms(
            sums, units.sizes, units.treated, trials.share, alpha, queries=units.queries
        )
        for sums in (units.reciprocal_ranks, units.clicks)
    )
    missing = _missing(arms[False], arms[True], units, trials.share)

    verdict = UNPROVEN
    more: int | None = None
    if missing is not None:
        reason, total = missing
        more = None if total is None else max(1, total - queries)
    else:
        assert ranks is not None, "arms with enough units have a difference"
        difference, sequence = ranks
        if difference.low > 0:
            verdict = HELPS
        elif difference.high < 0:
            verdict = HURTS
        total = sequence.queries_to_show(difference.estimate)
        more = None if total is None else total - queries
        reason = _reason(difference, verdict, more, queries, seconds)

    return ExperimentReport(
        verdict=verdict,
        reason=reason,
        control=arms[False],
        treatment=arms[True],
        reciprocal_rank=None if ranks is None else ranks[0],
        click_through=None if clicks is None else clicks[0],
        alpha=alpha,
        share=trials.share,
        smallest_difference=None if ranks is None else ranks[0].half_width,
        more_queries=more,
        seconds=seconds,
        effective_units=effective_units(units.sizes),
        clicked_units=int((units.clicks > 0).sum()),
        mixed_units=mixed,
    )


def _by_unit(trials: Trials) -> tuple[Trials, Units, int]:
    """Return the trials and sums of units that are in one arm, and the number of the others.

    trials: in the order of their units.
    """
    if not len(trials):
        none = np.empty(0)
        return trials, Units(trials.unit, trials.treated, none, none, None), 0

    is_first = np.ones(len(trials), np.bool_)
    is_first[1:] = trials.unit[1:] != trials.unit[:-1]
    starts = np.flatnonzero(is_first)
    in_treatment = np.add.reduceat(trials.treated.astype(np.int64), starts)
    sizes = np.diff(starts, append=len(trials))
    is_mixed = (in_treatment > 0) & (in_treatment < sizes)

    clicked = trials.rank > 0
    reciprocal = np.where(clicked, 1 / np.maximum(trials.rank, 1), 0.0)
    units = Units(
        sizes=sizes[~is_mixed],
        treated=in_treatment[~is_mixed] > 0,
        reciprocal_ranks=np.add.reduceat(reciprocal, starts)[~is_mixed],
        clicks=np.add.reduceat(clicked.astype(np.float64), starts)[~is_mixed],
        queries=None if trials.query is None else trials.query[starts][~is_mixed],
    )
    return trials.take(np.repeat(~is_mixed, sizes)), units, int(is_mixed.sum())


def _arm(trials: Trials, units: Units, is_treatment: bool) -> Arm:
    in_arm = units.treated == is_treatment
    rows = trials.take(trials.treated == is_treatment)
    latencies = rows.milliseconds[np.isfinite(rows.milliseconds)]
    hub_shares = rows.hub_share[np.isfinite(rows.hub_share)]
    clicks = int(units.clicks[in_arm].sum())
    total = float(units.reciprocal_ranks[in_arm].sum())
    return Arm(
        queries=len(rows),
        units=int(in_arm.sum()),
        clicks=clicks,
        click_through=clicks / len(rows) if len(rows) else None,
        reciprocal_rank=total / len(rows) if len(rows) else None,
        hub_share=float(hub_shares.mean()) if len(hub_shares) else None,
        latency_p50=float(np.quantile(latencies, 0.5)) if len(latencies) else None,
        latency_p95=float(np.quantile(latencies, 0.95)) if len(latencies) else None,
    )


def _missing(
    control: Arm, treatment: Arm, units: Units, share: float
) -> tuple[str, int | None] | None:
    """Return why there cannot be a verdict yet, and how many queries that takes; None if there can.

    Neither number of queries nor of clicks says which arm is better, so that waiting for them favours
    none.
    """
    queries = control.queries + treatment.queries
    wrong_share = _wrong_share(control.units, treatment.units, share)
    if wrong_share:
        return wrong_share, None
    for name, arm in (("control", control), ("treatment", treatment)):
        if not arm.queries:
            return f"the {name} has no queries yet", None

    # By the share, not by the units that the smaller arm has: of few large units it may have none by
    # chance, and what it lacks would not show.
    smaller = min(share, 1 - share)
    effective = effective_units(units.sizes) * smaller
    if effective < EFFECTIVE_UNITS:
        total = math.ceil(queries * EFFECTIVE_UNITS / effective)
        return (
            f"the smaller arm has {effective:.0f} effective units of {EFFECTIVE_UNITS} that are "
            f"needed: wait for about {total - queries:,} more queries",
            total,
        )

    # If one arm has hardly any clicks because it is so much worse, that must be able to show.
    clicked = int((units.clicks > 0).sum())
    if not clicked:
        return "no query has a click: is feedback reported?", None
    needed = math.ceil(CLICKS / smaller)
    if clicked < needed:
        total = math.ceil(queries * needed / clicked)
        return (
            f"{clicked:,} units have a click, and {needed:,} are needed: wait for about "
            f"{total - queries:,} more queries",
            total,
        )
    return None


def _wrong_share(control: int, treatment: int, share: float) -> str:
    """Return that the arms do not have the share of the units that they should; empty if they do."""
    units = control + treatment
    per_unit = share * (1 - share)
    scale = mixture_scale(SHARE_UNITS * per_unit, SHARE_ALPHA)
    surplus = treatment - share * units
    if abs(surplus) <= boundary(units * per_unit, scale, SHARE_ALPHA):
        return ""
    return (
        f"the treatment has {treatment / units:.1%} of the units, and {share:.0%} was set: rows of "
        "one arm are lost, or clients have different shares; begin a new experiment"
    )


def _reason(
    difference: Difference, verdict: Verdict, more: int | None, queries: int, seconds: int
) -> str:
    estimate, low, high = difference
    if verdict != UNPROVEN:
        return (
            f"the reciprocal rank of clicks differs by {estimate:+.4f}, between {low:+.4f} and "
            f"{high:+.4f}"
        )

    can_show = f"{queries:,} queries can show differences from {difference.half_width:.4f} on"
    if more is None:
        return f"the arms differ by {estimate:+.4f} in reciprocal rank, next to nothing; {can_show}"
    days = more / queries * seconds / SECONDS_PER_DAY
    duration = f", {days:.1f} days at the present rate," if seconds else ""
    return (
        f"about {more:,} more queries{duration} would prove a difference of the present size, "
        f"{estimate:+.4f} in reciprocal rank; {can_show}"
    )


def _line(name: str, control: str, treatment: str, difference: str = "") -> str:
    return f"{name:<26}{control:>12}{treatment:>12}  {difference}".rstrip()


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _interval(difference: Difference | None, form: str) -> str:
    if difference is None:
        return ""
    estimate, low, high = (format(value, form) for value in difference)
    return f"{estimate} ({low} to {high})"
