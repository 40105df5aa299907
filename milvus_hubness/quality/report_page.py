"""A diagnosis as one HTML page that needs nothing but itself: no network, no script."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from jinja2 import Template
from markupsafe import Markup

from milvus_hubness import charts
from milvus_hubness.charts import number
from milvus_hubness.pages import page_template
from milvus_hubness.quality.bootstrap import Interval
from milvus_hubness.quality.diagnosis import Diagnosis, Region

LONGEST = 160


@cache
def _template() -> Template:
    return page_template(__package__, "report.html", LONGEST, {"points": charts.points})


def render(diagnosis: Diagnosis) -> str:
    """Return the page, UTF-8; write it with encoding="utf-8"."""
    regions = _regions(diagnosis)
    return _template().render(
        d=diagnosis,
        headline=_headline(diagnosis),
        tiles=_tiles(diagnosis),
        curves=_curves(diagnosis),
        regions=regions,
        unreached=sum(not region.reached for region, _ in regions),
        largest=max((max(hub.item.before, hub.item.after) for hub in diagnosis.hubs), default=1),
        histogram=charts.histogram,
        whisker=charts.whisker,
        bars=charts.bars,
        share=charts.share,
    )


def _headline(d: Diagnosis) -> dict[str, Any]:
    if d.verdict:
        verdict = str(d.verdict.get("verdict", ""))
        given = d.verdict.get("interval")
        return {
            "tone": re.sub("[^a-z]+", "-", verdict.lower()),
            "heading": verdict[:1].upper() + verdict[1:],
            "reason": str(d.verdict.get("reason") or ""),
            "measure": str(d.verdict.get("measure") or "R@1"),
            "interval": Interval(**given) if isinstance(given, dict) else Interval(*given) if given else None,
        }
    heading = f"Skewness {d.before.skewness:.2f} → {d.after.skewness:.2f}"
    reason = "Less hubness is not yet a better search: give right answers, or tune, for a verdict."
    if d.gain:
        first = [f"{100 * each['R@1']:.1f}%" for each in (d.retrieval_before, d.retrieval_after) if each]
        heading = f"R@1 {' → '.join(first)}"
        reason = "Measured on these queries; nothing was held out to judge by."
    return {"tone": "", "heading": heading, "reason": reason, "measure": "R@1", "interval": d.gain}


def _tiles(d: Diagnosis) -> list[tuple[str, ...]]:
    """Return name, value before, value after and meaning of each."""
    both, tiles = (d.before, d.after), []
    if d.retrieval_before and d.retrieval_after:
        for measure, meaning in (("R@1", "a right answer first"), ("R@10", "one among the first ten")):
            pair = (d.retrieval_before[measure], d.retrieval_after[measure])
            tiles.append((measure, *(f"{100 * each:.1f}%" for each in pair), meaning))
    return [
        *tiles,
        ("Skewness", *(f"{each.skewness:.2f}" for each in both), f"of N_{d.k}; 0 is even"),
        ("Robin Hood", *(f"{100 * each.robin_hood:.1f}%" for each in both), "answers to move to be even"),
        ("Anti-hubs", *(f"{100 * each.antihubs:.1f}%" for each in both), "items never found"),
        ("Largest hub", *(number(each.largest) for each in both), f"queries with it in the top {d.k}"),
    ]


def _curves(d: Diagnosis) -> list[Markup]:
    at = [point.strength for point in d.strengths]
    recalls = [point.recall for point in d.strengths if point.recall]
    skewness = [point.hubness.skewness for point in d.strengths]
    antihubs = [point.hubness.antihubs for point in d.strengths]
    height = 160 if recalls else 230
    drawn = [
        charts.curve("Skewness", at, skewness, d.strength, height),
        charts.curve("Anti-hubs", at, antihubs, d.strength, height, percent=True),
    ]
    if recalls:
        estimates = [each.estimate for each in recalls]
        drawn.insert(0, charts.curve("R@1", at, estimates, d.strength, height, percent=True, band=recalls))
    return drawn


def _regions(d: Diagnosis) -> list[tuple[Region, float]]:
    """Return the regions of the gallery with the share of each that the bank reaches, in its order."""
    regions = d.coverage.regions if d.coverage else []
    return sorted(((each, each.reached / each.items) for each in regions), key=lambda pair: pair[1])
