"""The report on an experiment on live queries, from the answers that clients recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.errors import InvalidInput
from milvus_hubness.jobs.common.outcomes import RecordedAnswer, recorded_answers
from milvus_hubness.jobs.common.samples import samples_of, sampling_of
from milvus_hubness.jobs.store.protocols import Store, expect_store
from milvus_hubness.jobs.store.records import TrialFacts
from milvus_hubness.quality.experiment import Arm, ExperimentReport, Trials, report
from milvus_hubness.reports import charts

Times = npt.NDArray[np.int64]

LONGEST = 80
"""Characters of a name in the page."""
MOST_POINTS = 200
"""Points of a line in the page."""

HUB_DEVIATIONS = 2.0
"""A hub is a row whose k-occurrence is above the mean by so many standard deviations (Radovanović et
al., 2010)."""


def experiment_names(store: Store, collection: str, **whose: Any) -> dict[str, int]:
    """Return the experiments of a collection, the latest first, with their recorded answers."""
    answers = recorded_answers(store, collection, **whose)
    names = Counter(_name(answer) for answer in reversed(answers) if _name(answer))
    return {str(name): count for name, count in names.items()}


def experiment_report(
    store: Store,
    collection: str,
    name: str | None = None,
    *,
    field: str | None = None,
    profile: str | None = None,
    kind: str = "click",
    alpha: float = 0.05,
) -> tuple[str, ExperimentReport]:
    """Return the name of an experiment and what its recorded answers show.

    name: None for the latest. kind: of the outcomes that count. alpha: probability that the interval
    ever misses the true difference, at whichever looks. Raises CollectionNotFound and InvalidInput.
    """
    expect_store(store)
    info = store.info(collection)
    answers = recorded_answers(store, info.name, field=field, profile=profile, kind=kind)
    names = list(dict.fromkeys(_name(answer) for answer in reversed(answers) if _name(answer)))
    if not names:
        raise InvalidInput(
            f"no answer of an experiment is recorded of {info.name!r}: record outcomes with "
            f"milvus-hubness bank sample {info.name} --outcomes 1, and search with "
            "HubnessClient(experiment=Experiment(NAME)) or proxy --experiment NAME"
        )
    if name is not None and name not in names:
        raise InvalidInput(
            f"{info.name!r} has no recorded answers of experiment {name!r}: choose one of "
            f"{', '.join(map(str, names))}"
        )

    chosen = name or str(names[0])
    trials = trials_of([each for each in answers if _name(each) == chosen], info.rows)
    return chosen, report(trials, alpha)


def trials_of(answers: Sequence[RecordedAnswer], rows: int) -> Trials:
    """Return the answers of one experiment as trials. rows: of the collection.

    Raises InvalidInput if the share of the arms changed on the way, since earlier answers have
    another probability then.
    """
    trials = [_trial(answer) for answer in answers]
    shares = sorted({trial.share for trial in trials})
    if len(shares) > 1:
        raise InvalidInput(
            f"the experiment ran with several shares ({', '.join(map(str, shares))}): give each share "
            "a name of its own"
        )

    hubs = _hubs(answers, rows)
    hub_share = [_hub_share(answer.facts.keys, hubs) for answer in answers]
    return Trials(
        unit=np.array([trial.unit for trial in trials], np.int64),
        treated=np.array([trial.treated for trial in trials], np.bool_),
        at=np.array([answer.at for answer in answers], np.int64),
        milliseconds=np.array([trial.milliseconds for trial in trials], np.float64),
        rank=np.array([answer.best_rank for answer in answers], np.int64),
        hub_share=np.array(hub_share, np.float64),
        share=shares[0],
        query=np.array([trial.query for trial in trials], np.int64),
    )


def _trial(answer: RecordedAnswer) -> TrialFacts:
    trial = answer.facts.trial
    assert trial is not None, "only answers of one experiment are compared"
    return trial


def _hub_share(keys: Sequence[Key], hubs: set[Key]) -> float:
    """Return the share of these hits that are hubs; NaN without hits."""
    return float(np.mean([key in hubs for key in keys])) if keys else np.nan


@dataclass(frozen=True)
class ExperimentView:
    """What the page of an experiment shows."""

    name: str
    collection: str
    report: ExperimentReport
    rows: Sequence[tuple[str, str, str, str]]
    """A figure, that of the control, that of the corrected arm, and the difference."""
    ranks: Markup
    """A chart of the mean reciprocal rank of each arm, up to each moment."""
    counts: Markup
    """A chart of the recorded answers and the sampled queries, up to each moment."""

    @property
    def tone(self) -> str:
        """The class of the verdict in the page."""
        return {"correction helps": "helps", "correction hurts": "hurts"}.get(
            self.report.verdict, ""
        )

    @property
    def alpha(self) -> str:
        return f"{self.report.alpha:.0%}"


def experiment_page(
    store: Store,
    collection: str,
    name: str | None = None,
    *,
    field: str | None = None,
    profile: str | None = None,
    kind: str = "click",
) -> str:
    """Return the page of an experiment in UTF-8: verdict, arms, and what was recorded over time.

    Raises as `experiment_report` does.
    """
    chosen, shown = experiment_report(
        store, collection, name, field=field, profile=profile, kind=kind
    )
    info = store.info(collection)
    answers = [
        answer
        for answer in recorded_answers(store, info.name, field=field, profile=profile, kind=kind)
        if _name(answer) == chosen
    ]
    sampling = sampling_of(info, field, profile)
    assert sampling is not None, "the answers were read from its samples"
    sampled = np.sort(samples_of(store, sampling).origins.at)
    return render(chosen, info.name, shown, answers, sampled)


def render(
    name: str,
    collection: str,
    shown: ExperimentReport,
    answers: Sequence[RecordedAnswer],
    sampled: Times,
) -> str:
    """Return the page of a report on recorded answers, in order of time, in UTF-8.

    sampled: Unix times of the sampled queries, ascending.
    """
    view = ExperimentView(
        name=name,
        collection=collection,
        report=shown,
        rows=_rows(shown),
        ranks=_ranks_chart(answers),
        counts=_counts_chart(answers, sampled),
    )
    return charts.page_template(__package__, "experiment.html", LONGEST).render(view=view)


def _rows(shown: ExperimentReport) -> list[tuple[str, str, str, str]]:
    control, corrected = shown.control, shown.treatment
    return [
        ("queries", f"{control.queries:,}", f"{corrected.queries:,}", ""),
        ("with a click", f"{control.clicks:,}", f"{corrected.clicks:,}", ""),
        _row("reciprocal rank of clicks", control, corrected, shown, "reciprocal_rank", ".4f"),
        _row("click-through", control, corrected, shown, "click_through", ".1%"),
        _row("hubs among the hits", control, corrected, shown, "hub_share", ".1%"),
        _row("latency p50, ms", control, corrected, shown, "latency_p50", ".1f"),
        _row("latency p95, ms", control, corrected, shown, "latency_p95", ".1f"),
    ]


def _row(
    title: str, control: Arm, corrected: Arm, shown: ExperimentReport, name: str, form: str
) -> tuple[str, str, str, str]:
    values = (getattr(control, name), getattr(corrected, name))
    first, second = ("–" if value is None else format(value, form) for value in values)
    difference = getattr(shown, name, None)
    interval = ""
    if difference is not None:
        low, high = (format(end, "+" + form) for end in (difference.low, difference.high))
        interval = f"{difference.estimate:+{form}} ({low} … {high})"
    return title, first, second, interval


def _ranks_chart(answers: Sequence[RecordedAnswer]) -> Markup:
    """Draw the mean reciprocal rank of each arm, up to each moment."""
    times = np.array([answer.at for answer in answers])
    gains = np.array([1 / answer.best_rank if answer.best_rank else 0.0 for answer in answers])
    treated = np.array([_trial(answer).treated for answer in answers])
    lines = []
    for name, css_class, of_arm in (
        ("control", "before", ~treated),
        ("corrected", "after", treated),
    ):
        if of_arm.any():
            means = np.cumsum(gains[of_arm]) / np.arange(1, of_arm.sum() + 1)
            lines.append(_line(name, css_class, times[of_arm], means))
    span = _moment(times[0]), _moment(times[-1])
    return charts.timeline("Reciprocal rank", lines, *span, lambda value: f"{value:.3f}")


def _counts_chart(answers: Sequence[RecordedAnswer], sampled: Times) -> Markup:
    """Draw how many answers were recorded and queries sampled, up to each moment."""
    times = np.array([answer.at for answer in answers])
    lines = [_line("answers", "after", times, np.arange(1, len(times) + 1))]
    if len(sampled):
        lines.append(_line("samples", "before", sampled, np.arange(1, len(sampled) + 1)))
    moments = np.concatenate([times, sampled])
    span = _moment(moments.min()), _moment(moments.max())
    return charts.timeline("Recorded", lines, *span, lambda value: f"{value:,.0f}")


def _line(name: str, css_class: str, times: Any, values: Any) -> charts.Line:
    """Return a line of at most MOST_POINTS points, spread evenly over the rows."""
    rows = np.unique(np.linspace(0, len(times) - 1, MOST_POINTS).astype(int))
    points = [(_moment(times[row]), float(values[row])) for row in rows]
    return charts.Line(name, css_class, points, dots=False)


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(float(seconds), timezone.utc)


def _hubs(answers: Sequence[RecordedAnswer], rows: int) -> set[Key]:
    """Return the keys of hubs: rows among the first hits of far more different queries than others.

    Counted in the control arm, whose ranking is not corrected.
    """
    first_hits = {
        _trial(answer).query: answer.facts.keys
        for answer in answers
        if not _trial(answer).treated and not answer.facts.offset
    }
    counts = Counter(key for keys in first_hits.values() for key in keys)
    rows = max(rows, len(counts), 1)
    mean = counts.total() / rows
    mean_square = sum(count**2 for count in counts.values()) / rows
    deviation = max(mean_square - mean**2, 0.0) ** 0.5
    return {key for key, count in counts.items() if count > mean + HUB_DEVIATIONS * deviation}


def _name(answer: RecordedAnswer) -> str | None:
    return answer.facts.trial.experiment if answer.facts.trial else None
