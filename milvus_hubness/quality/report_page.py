"""A diagnosis as one HTML page that needs nothing but itself: no network, no script."""

from __future__ import annotations

import re
from html import escape
from importlib.resources import files
from itertools import islice
from string import Template

from milvus_hubness.quality import report_charts as charts
from milvus_hubness.quality.bootstrap import Interval
from milvus_hubness.quality.diagnosis import Antihubs, BankReach, Diagnosis, Hub, Item, Swallowed
from milvus_hubness.quality.report_charts import number

LONGEST = 160
FIELDS_OF_HUB = 6
FIELDS_IN_LINE = 3


def render(diagnosis: Diagnosis) -> str:
    """The page, UTF-8; write it with encoding="utf-8"."""
    template = Template(files(__package__).joinpath("report.html").read_text("utf-8"))
    sections = [
        _headline(diagnosis),
        _tiles(diagnosis),
        f'<div class="pair">{_distribution(diagnosis)}{_strengths(diagnosis)}</div>',
        _hubs(diagnosis),
        f'<div class="pair">{_antihubs(diagnosis.antihubs, diagnosis)}'
        f"{_coverage(diagnosis.coverage, diagnosis) if diagnosis.coverage else ''}</div>",
        _footer(diagnosis.k),
    ]
    return template.substitute(title=escape(diagnosis.title), body="\n".join(sections))


def _headline(d: Diagnosis) -> str:
    bank = f" · a bank of {number(d.coverage.bank_size)}" if d.coverage else ""
    about = f"{number(d.n_queries)} queries · {number(d.n_items)} items{bank} · strength {d.strength:g}"
    if d.verdict:
        verdict = str(d.verdict.get("verdict", ""))
        name, heading = re.sub("[^a-z]+", "-", verdict.lower()), verdict[:1].upper() + verdict[1:]
        reason = str(d.verdict.get("reason") or "")
        measure = str(d.verdict.get("measure") or "R@1")
        given = d.verdict.get("interval")
        interval = Interval(**given) if isinstance(given, dict) else Interval(*given) if given else None
    else:
        name, measure, interval = "", "R@1", d.gain
        heading, reason = _measured(d)
    evidence = (
        f"<p><b>{escape(measure)}: {charts.points(interval)}</b></p>{charts.whisker(interval, measure)}"
        if interval
        else ""
    )
    return (
        f'<header><h1>{escape(d.title)}</h1><div class="soft">{about}</div></header>'
        f'<section class="card verdict {name}"><strong>{escape(heading)}</strong>'
        f"<p>{escape(reason)}</p>{evidence}</section>"
    )


def _measured(d: Diagnosis) -> tuple[str, str]:
    """Where nobody has judged: what was seen, and no advice."""
    if d.gain:
        first = [f"{100 * one['R@1']:.1f}%" for one in (d.retrieval_before, d.retrieval_after) if one]
        return f"R@1 {' → '.join(first)}", "Measured on these queries; nothing was held out to judge by."
    heading = f"Skewness {d.before.skewness:.2f} → {d.after.skewness:.2f}"
    return heading, "Less hubness is not yet a better search: give right answers, or tune, for a verdict."


def _tiles(d: Diagnosis) -> str:
    both, tiles = (d.before, d.after), []
    if d.retrieval_before and d.retrieval_after:
        for measure, meaning in (("R@1", "a right answer first"), ("R@10", "one among the first ten")):
            pair = (d.retrieval_before[measure], d.retrieval_after[measure])
            tiles.append((measure, [f"{100 * one:.1f}%" for one in pair], meaning))
    tiles += [
        ("Skewness", [f"{one.skewness:.2f}" for one in both], f"of N_{d.k}; 0 is even"),
        ("Robin Hood", [f"{100 * one.robin_hood:.1f}%" for one in both], "answers to move to be even"),
        ("Anti-hubs", [f"{100 * one.antihubs:.1f}%" for one in both], "items never found"),
        ("Largest hub", [number(one.largest) for one in both], f"queries with it in the top {d.k}"),
    ]
    cards = "".join(
        f'<div class="card"><small>{name}</small><b>{_arrow(*shown)}</b><small>{meaning}</small></div>'
        for name, shown, meaning in tiles
    )
    return f'<section class="tiles" aria-label="Before and after">{cards}</section>'


def _distribution(d: Diagnosis) -> str:
    return (
        f'<section class="card" id="distribution"><h2>Who gets the answers</h2>'
        f"<figure>{charts.histogram(d.histogram, d.k)}<figcaption>Items by how many queries have them in "
        f"their top {d.k}, {_before_after()}. The scale is logarithmic: anti-hubs are the first row, "
        "hubs the last.</figcaption></figure></section>"
    )


def _strengths(d: Diagnosis) -> str:
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
        estimates = [one.estimate for one in recalls]
        drawn.insert(0, charts.curve("R@1", at, estimates, d.strength, height, percent=True, band=recalls))
    band = " The band is the 95% interval." if recalls else ""
    return (
        f'<section class="card" id="strength"><h2>How much to correct</h2><figure>{"".join(drawn)}'
        f"<figcaption>Strength 0 is the raw search, 1 the whole bias.{band}</figcaption></figure></section>"
    )


def _hubs(d: Diagnosis) -> str:
    whole = max((max(hub.item.before, hub.item.after) for hub in d.hubs), default=1)
    cards = "".join(_hub(hub, whole, d.k) for hub in d.hubs)
    return (
        f'<section id="hubs"><h2>The worst hubs</h2><p class="soft">The items that most queries have in '
        f"their top {d.k}, and queries that they stand in front of.</p>"
        f'<div class="hubs">{cards}</div></section>'
    )


def _hub(hub: Hub, whole: int, k: int) -> str:
    item = hub.item
    drawn = charts.bars(f"N_{k} of {item.key}", item.before, item.after, whole)
    queries = "".join(_query(one) for one in hub.swallows)
    return (
        f'<article class="card"><h3>{_short(item.key)}</h3>{drawn}{_fields(item)}'
        f"{f'<h4>Queries it swallows</h4><ul>{queries}</ul>' if queries else ''}</article>"
    )


def _query(one: Swallowed) -> str:
    what = f"query {one.query}" if one.text is None else f"“{_short(one.text)}”"
    right = ""
    if one.right_before is not None and one.right_after is not None:
        right = f", its right answer at {_arrow(number(one.right_before), number(one.right_after))}"
    return f"<li>{what} <small>has it at rank {one.rank}{right}</small></li>"


def _antihubs(found: Antihubs, d: Diagnosis) -> str:
    rescued = "".join(_line(item, f"now {number(item.after)} queries") for item in found.examples)
    never = "".join(_line(item) for item in found.never)
    newly_lost = found.after - (found.before - found.rescued)
    return (
        f'<section class="card" id="antihubs"><h2>Anti-hubs: items no query finds</h2>'
        f"{charts.bars('Anti-hubs', found.before, found.after, d.n_items)}"
        f'<p class="soft">Of {number(d.n_items)} items; {number(found.rescued)} that were lost are found '
        f"after correction, {number(newly_lost)} that were found are not. "
        f"Random answers would leave {_count(found.by_chance)}.</p>"
        f"{f'<h3>Found again</h3><ul>{rescued}</ul>' if rescued else ''}"
        f"{f'<h3>Still not found</h3><ul>{never}</ul>' if never else ''}</section>"
    )


def _coverage(seen: BankReach, d: Diagnosis) -> str:
    reached, chance = seen.reached / d.n_items, seen.by_chance / d.n_items
    title = f"{100 * reached:.1f}% of the items are reached by the bank"
    regions = sorted(seen.regions, key=lambda region: region.reached / region.items)
    shares = [region.reached / region.items for region in regions]
    cells = "".join(
        f'<i class="{"" if one.reached else "none"}" style="--items:{one.items};'
        f'--share:{100 * part / shares[-1] if one.reached else 0:.0f}%" title="around {_short(one.central)}: '
        f'{number(one.reached)} of {number(one.items)} items reached"></i>'
        for one, part in zip(regions, shares, strict=True)
    )
    farthest = "".join(_line(item, f"{similarity:.3f}") for item, similarity in seen.farthest)
    return (
        f'<section class="card" id="coverage"><h2>What the bank covers</h2><p><b>{title}</b></p>'
        f"{charts.share(title, reached, chance)}"
        f'<p class="soft">An item is reached when one of the {number(seen.bank_size)} bank queries has it '
        f"in its top {d.k}. {100 * seen.blind_answers:.1f}% of the answers to your queries, uncorrected, are "
        "items that it does not reach.</p>"
        f"<h3>{len(regions)} regions of the gallery, {_none(shares.count(0))} of them unreached</h3>"
        '<div class="regions" role="img" aria-label="Regions by the share of their items reached">'
        f"{cells}</div>"
        '<p class="soft">Clusters of items, as wide as they are large, filled by the share of their items '
        f"that is reached, from {100 * shares[0]:.1f}% to {100 * shares[-1]:.1f}%; red where none is.</p>"
        f"<h3>Farthest from every bank query</h3><ul>{farthest}</ul></section>"
    )


def _footer(k: int) -> str:
    return (
        f'<footer class="soft"><p>N_{k} of an item: how many queries have it among their first {k} results. '
        "A hub has a large one, an anti-hub 0. Correction subtracts one number, estimated from the bank, "
        "from every score of an item. Skewness: E(N − μ)³ / σ³. Robin Hood index: ½ Σ|N − μ| / Σ N.</p>"
        "</footer>"
    )


def _line(item: Item, value: str = "") -> str:
    fields = " · ".join(
        f"{_short(name)}: {_short(one)}" for name, one in islice(item.fields.items(), FIELDS_IN_LINE)
    )
    return f"<li><span>{value}</span><b>{_short(item.key)}</b> <small>{fields}</small></li>"


def _fields(item: Item) -> str:
    rows = "".join(
        f"<dt>{_short(name)}</dt><dd>{_short(one)}</dd>"
        for name, one in islice(item.fields.items(), FIELDS_OF_HUB)
    )
    return f"<dl>{rows}</dl>" if rows else ""


def _short(value: object) -> str:
    text = str(value)
    return escape(text if len(text) <= LONGEST else text[: LONGEST - 1] + "…")


def _arrow(before: str, after: str) -> str:
    return f'<span class="before">{before}</span> → <span class="after">{after}</span>'


def _before_after() -> str:
    return '<b class="before">before</b> and <b class="after">after</b>'


def _count(value: float) -> str:
    return number(value) if value >= 1 else "fewer than one"


def _none(count: int) -> str:
    return number(count) if count else "none"
