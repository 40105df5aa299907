"""What a query bank is worth by its size and by its origin, and whether `tune` notices a bad one.

    python -m benchmarks.banks [task …]

Size: random draws from each task's own bank, nested within a draw; caption_translation is asked 2,000 queries on three
sizes of its gallery, to see whether a larger one needs a larger bank. Origin: banks of at most 1,000 queries (those
picked to crowd few items: of at most 3,000) on galleries of at most 2,000 items, asked at most 2,000 queries; beside
each, the task's own bank at that size. Vectors of another data set are brought to the mean length of the own bank's, as
COSINE does, unless said. `tune` is told nothing, or one half of the queries (at most 500), or these with their right
items; what comes of following it is measured on the other half, and the other way round. It gets no target bank, and
one sweep serves all that it is told beside the bank, with trials of a gate and once without them. The banks that
QB-Norm's table 2 compares are also tried with IS (τ = 0.05), NNN(16, 0.75) and the default, Blend(), with a gate and
without. In the other tables Blend is ½ of each of its methods, without ρ. Exits with 1 where a bound does not hold;
only a full run is kept.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from sklearn.cluster import KMeans

from benchmarks.environment import environment, one_thread, save, table
from milvus_hubness.correction.banks.bank import QueryBank, Vectors
from milvus_hubness.correction.estimators import NNN, Blend, Estimator, InvertedSoftmax
from milvus_hubness.correction.near_copies import near_copies, with_groups
from milvus_hubness.correction.rerank import DynamicGate
from milvus_hubness.quality.labelled import LabelledQueries
from milvus_hubness.quality.measures import (
    k_occurrence,
    nearest,
    paired_difference,
    skewness,
)
from milvus_hubness.quality.outcomes import Outcome, assess
from milvus_hubness.quality.right_items import RightItems
from milvus_hubness.quality.trials import Trial, search, sweep
from milvus_hubness.quality.tuning import (
    Swept,
    decide,
    default_biases,
    folds,
    judge_unlabelled,
    tune,
)
from milvus_hubness.quality.verdict import examine, findings
from tests.support.real_data import DATA, EMBEDDING_TASKS, Task, load_task

Numbers = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

METHODS = ("RelativeNNN 8", "SN .375σ", "Blend")
SIZES = (30, 100, 300, 1000, 3000, 10_000, 40_000)
DRAWS = 5
SHARES = (0.5, 0.9, 0.99)
GALLERIES = {"caption_translation": (1000, 4000, 14_085)}

BANK, ITEMS, QUERIES, KNOWN = 1000, 2000, 2000, 500
OWN_DRAWS = 3
FIRST = 10
TOPICS = 4
CROWDED_FROM, CROWDED = 4000, (0.25, 0.5, 0.75)
LIMITS = {
    "size": {"draws": DRAWS, "queries": dict.fromkeys(GALLERIES, QUERIES)},
    "origin": {
        "bank": BANK,
        "items": ITEMS,
        "queries": QUERIES,
        "known": KNOWN,
        "crowded_from": CROWDED_FROM,
    },
}
OTHER_SET = {
    "text_video_msrvtt t2v": "clip_products t2i",
    "text_video_msrvtt v2t": "clip_products i2t",
    "clip_products t2i": "text_video_msrvtt t2v",
    "clip_products i2t": "text_video_msrvtt v2t",
}
OWN = "own"
SAMPLE = "own: another sample, validation pairs"
FARTHEST = "own: the half farthest from the queries"
ONE_TOPIC = "own: one topic of four"
OTHER_TOPICS = "own: all topics but the one asked"
DILUTED = "own, and as many of another data set"
ITEM_SIDE = "other items of the gallery's kind"
GALLERY = "the gallery's own items"
FOREIGN = "another data set and encoder"
LENGTHS = "another data set and encoder, lengths kept"
RANDOM = "random directions"
ORIGINS = (
    OWN, SAMPLE, FARTHEST, ONE_TOPIC, OTHER_TOPICS, DILUTED, ITEM_SIDE, GALLERY, FOREIGN, LENGTHS, RANDOM,
)  # fmt: skip
CROWDING = tuple(f"own: the {share:.0%} that crowd the fewest items" for share in CROWDED)
TOLD = ("nothing", "queries", "pairs", "pairs, no gate")
DOMAINS = {
    "in domain": OWN,
    "far: another data set and encoder": FOREIGN,
    "adversarial: the quarter that crowds the fewest items": CROWDING[0],
    "adversarial: other items of the gallery's kind": ITEM_SIDE,
}
QUERYBANK_METHODS: dict[str, Estimator] = {
    "IS": InvertedSoftmax(0.05),
    "NNN": NNN(16, 0.75),
    "default": Blend(),
}
QUERYBANK_NAMES = ("IS", "DIS", "NNN", "NNN, gated", "default", "default, gated")
ALWAYS_SUSPECTED = (FOREIGN, LENGTHS, *CROWDING[:2])
BELOW_RAW, BELOW_NO_GATE = 1.0, 0.3


class SearchRequest(NamedTuple):
    """A bank (m, d), and the numbers of the test queries that are asked under it."""

    bank: Vectors
    queries: Numbers


class Decision(NamedTuple):
    """What `tune` says of a bank, told one of TOLD.

    suspected: the names of the findings that fail. applied: what it applies; None for the raw search. measured: the
    queries to ask.
    """

    told: str
    verdict: str
    suspected: list[str]
    applied: Trial | None
    measured: Numbers


class Means:
    """For each query the mean over banks of several values, of 0 to 100."""

    def __init__(self, kinds: int, queries: int) -> None:
        self.total, self.times = np.zeros((kinds, queries)), np.zeros(queries)

    def add(self, queries: Numbers, *hits: Values) -> None:
        self.total[:, queries] += 100 * np.stack(hits)
        self.times[queries] += 1

    @property
    def each(self) -> Values:
        """(kinds, queries asked)"""
        return self.total[:, self.times > 0] / self.times[self.times > 0]


def biases(bank: Vectors, gallery: Vectors) -> list[Vectors]:
    """One (n_items,) for each of METHODS; the Blend is made of the two before it."""
    blend = Blend()
    parts = [part.fit(QueryBank(bank), gallery=gallery).bias(gallery) for part in blend.estimators]
    return [*parts, np.average(parts, 0, blend.weights).astype(np.float32)]


def outcome_of(task: Task, queries: Numbers, *given: Vectors) -> Outcome:
    """Of the raw search and then of each bias."""
    raw = np.zeros(len(task.gallery), np.float32)
    return assess(
        task.query[queries], task.gallery, [raw, *given], RightItems.of(task.positives[queries])
    )


def skews(outcome: Outcome, n_items: int) -> Values:
    """(n_biases,) skewness of N_10."""
    return np.array([skewness(k_occurrence(found, n_items, FIRST)) for found in outcome.retrieved])


def cut(task: Task, items: int, queries: int) -> Task:
    """A random part of the gallery, and of the queries whose items are in it."""
    rng = np.random.default_rng(0)
    kept = np.sort(rng.permutation(len(task.gallery))[:items])
    there = np.flatnonzero(np.isin(task.positives, kept))
    asked = np.sort(rng.permutation(there)[:queries])
    positives = np.searchsorted(kept, task.positives[asked])
    return task._replace(query=task.query[asked], gallery=task.gallery[kept], positives=positives)


def by_size(task: Task) -> dict[str, Any]:
    """Gain in R@1 over raw, in points, at each size up to the whole bank: median, lowest, highest draw."""
    whole = len(task.bank)
    sizes = [*(size for size in SIZES if size < whole), whole]
    orders = [np.random.default_rng(seed).permutation(whole) for seed in range(DRAWS)]
    banks = [task.bank[order[:size]] for size in sizes[:-1] for order in orders] + [task.bank]
    corrected = [bias for bank in banks for bias in biases(bank, task.gallery)]
    outcome = outcome_of(task, np.arange(len(task.query)), *corrected)
    hits, skewed = 100 * outcome.values, skews(outcome, len(task.gallery))
    row: dict[str, Any] = {
        "items": len(task.gallery),
        "queries": len(task.query),
        "bank": whole,
        "raw": {"r1": float(hits[0].mean()), "skewness": float(skewed[0])},
    }
    for column, method in enumerate(METHODS):
        of_banks = np.arange(1 + column, len(hits), len(METHODS))
        locality_hints = {}
        for place, size in enumerate(sizes):
            draws = of_banks[place * DRAWS : (place + 1) * DRAWS]
            gains = hits[draws].mean(1) - hits[0].mean()
            locality_hints[size] = {
                "gain": float(np.median(gains)),
                "lowest": float(gains.min()),
                "highest": float(gains.max()),
                "skewness": float(np.median(skewed[draws])),
                "draws": len(draws),
            }
        gained = paired_difference(hits[0], hits[of_banks[-1]], resamples=1000)
        row[method] = {
            "whole": gained._asdict(),
            "sizes": locality_hints,
            "reached": reached(locality_hints, gained.estimate),
        }
    return row


def reached(cells: dict[int, dict[str, Any]], whole: float) -> dict[str, int | None]:
    """The size from which on the median gain is each of SHARES of the whole bank's, where that is above 0."""
    found: dict[str, int | None] = {}
    for share in SHARES:
        enough = [cell["gain"] >= share * whole for cell in cells.values()]
        from_here = [size for place, size in enumerate(cells) if all(enough[place:])]
        found[f"{share:.0%}"] = from_here[0] if whole > 0 else None
    return found


def origins(name: str, task: Task) -> Iterator[tuple[str, list[SearchRequest]]]:
    """The origins that the task has banks of, each with its banks."""
    rng = np.random.default_rng(0)
    everything = np.arange(len(task.query))
    own, gallery = task.bank, task.gallery

    def some(vectors: Vectors, most: int = BANK) -> Vectors:
        return vectors[rng.permutation(len(vectors))[:most]]

    def asked_all(*banks: Vectors) -> list[SearchRequest]:
        return [SearchRequest(bank, everything) for bank in banks]

    yield OWN, asked_all(*(some(own) for _ in range(OWN_DRAWS if len(own) > BANK else 1)))
    if name == "docstring_code":
        validation = np.load(DATA / name / "val_query.npy").astype(np.float32)
        validation /= np.linalg.norm(validation, axis=1, keepdims=True)
        yield SAMPLE, asked_all(some(validation))
    likeness = (own @ task.query.T).max(1)
    yield FARTHEST, asked_all(some(own[likeness.argsort()[: len(own) // 2]]))
    topics = KMeans(TOPICS, n_init=4, random_state=0).fit(own)
    of_query = topics.predict(task.query)
    yield ONE_TOPIC, asked_all(*(some(own[topics.labels_ == topic]) for topic in range(TOPICS)))
    yield (
        OTHER_TOPICS,
        [
            SearchRequest(some(own[topics.labels_ != topic]), np.flatnonzero(of_query == topic))
            for topic in range(TOPICS)
        ],
    )
    if task.target_bank is not None:
        yield ITEM_SIDE, asked_all(some(task.target_bank))
    yield GALLERY, asked_all(some(gallery))
    if name in OTHER_SET:
        other = some(load_task(OTHER_SET[name]).bank)
        alike = as_long_as(own, other)
        yield DILUTED, asked_all(np.concatenate([some(own), alike]))
        yield FOREIGN, asked_all(alike)
        yield LENGTHS, asked_all(other)
    directions = rng.standard_normal((min(BANK, len(own)), own.shape[1]), np.float32)
    yield RANDOM, asked_all(as_long_as(own, directions))
    pool = some(own, CROWDED_FROM)
    for origin, share in zip(CROWDING, CROWDED, strict=True):
        yield origin, asked_all(crowding(pool, gallery, share))


def as_long_as(own: Vectors, vectors: Vectors) -> Vectors:
    """Each vector at the mean length of those of `own`."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Vectors = vectors * (np.linalg.norm(own, axis=1).mean() / lengths)
    return scaled


def unreached(bank: Vectors, gallery: Vectors, found: npt.NDArray[np.int32]) -> float:
    """Share of the answers `found` that no bank query has among its own first ten, as `check` shows it."""
    seen = k_occurrence(nearest(bank, gallery, FIRST), len(gallery), FIRST) > 0
    return float((~seen)[found].mean())


def crowding(bank: Vectors, gallery: Vectors, share: float) -> Vectors:
    """The share of the bank whose nearest items are the fewest."""
    first = nearest(bank, gallery, 1)[:, 0]
    counts = np.bincount(first, minlength=len(gallery))
    return bank[np.lexsort((first, -counts[first]))[: int(share * len(bank))]]


class Comparison:
    """Banks of several origins on one task, which is cut to ITEMS and QUERIES."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.task = cut(load_task(name), ITEMS, QUERIES)
        self.own: dict[int, list[tuple[Vectors, Vectors]]] = {}

    def run(self) -> dict[str, Any]:
        """{origin: what its banks are worth, and what `tune` makes of them}"""
        cells = {}
        for origin, asked in origins(self.name, self.task):
            cell = cells[origin] = self.worth(asked) | {"tune": self.followed(asked)}
            if origin in DOMAINS.values():
                cell["by_method"] = self.by_method(asked)
            said = {result: one["verdicts"] for result, one in cell["tune"].items()}
            print(
                self.name, "|", origin, {kind: f"{r1:.2f}" for kind, r1 in cell["r1"].items()}, said
            )
            sys.stdout.flush()
        return cells

    def worth(self, search_request: Sequence[SearchRequest]) -> dict[str, Any]:
        """R@1 and skewness of N_10 over the queries asked, and Blend with the own bank at that size."""
        task, n_items = self.task, len(self.task.gallery)
        means = Means(2 + len(METHODS), len(task.query))
        skewed, blind, gains = [], [], []
        for bank, queries in search_request:
            own = self.own_at(len(bank))
            outcome = outcome_of(
                task, queries, *biases(bank, task.gallery), *(bias for _, bias in own)
            )
            tried, alike = np.split(outcome.values, [1 + len(METHODS)])
            means.add(queries, *tried, alike.mean(0))
            skewed.append(skews(outcome, n_items)[: len(tried)])
            of_own = [unreached(drawn, task.gallery, outcome.retrieved[0]) for drawn, _ in own]
            blind.append(
                [unreached(bank, task.gallery, outcome.retrieved[0]), float(np.mean(of_own))]
            )
            gains.append(100 * float((tried[-1] - tried[0]).mean()))
        r1 = means.each.mean(1).tolist()
        return {
            "banks": [len(bank) for bank, _ in search_request],
            "items": n_items,
            "queries": means.each.shape[1],
            "r1": dict(zip(("raw", *METHODS, "own at that size"), r1, strict=True)),
            "skewness": dict(zip(("raw", *METHODS), np.mean(skewed, 0).tolist(), strict=True)),
            "gain": paired_difference(means.each[0], means.each[-2], resamples=1000)._asdict(),
            "gain_of_each_bank": gains,
            "unreached": dict(
                zip(("bank", "own at that size"), np.mean(blind, 0).tolist(), strict=True)
            ),
        }

    def own_at(self, size: int) -> list[tuple[Vectors, Vectors]]:
        """Random draws of that size from the task's own bank, each with its Blend."""
        if size not in self.own:
            rng = np.random.default_rng(1)
            draws = [
                self.task.bank[rng.permutation(len(self.task.bank))[:size]]
                for _ in range(OWN_DRAWS)
            ]
            self.own[size] = [(bank, biases(bank, self.task.gallery)[-1]) for bank in draws]
        return self.own[size]

    def followed(self, search_request: Sequence[SearchRequest]) -> dict[str, Any]:
        """{what `tune` is result: how often it suspects the banks, its verdicts, the gain of following it}"""
        decided = [decision for one in search_request for decision in self.decisions(*one)]
        cells = {}
        for result in TOLD:
            these = [decision for decision in decided if decision.told == result]
            means, verdicts = (
                Means(2, len(self.task.query)),
                [decision.verdict for decision in these],
            )
            for decision in these:
                hits = self.searched(
                    [decision.applied] if decision.applied else [], decision.measured
                ).values
                means.add(decision.measured, hits[0], hits[-1])
            cells[result] = {
                "runs": len(these),
                "suspected": sum(bool(decision.suspected) for decision in these),
                "suspicions": sorted({kind for decision in these for kind in decision.suspected}),
                "verdicts": {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))},
                "gated": sum(
                    bool(decision.applied and decision.applied.gate) for decision in these
                ),
                "gain": paired_difference(*means.each, resamples=1000)._asdict(),
            }
        return cells

    def searched(self, trials: Sequence[Trial], queries: Numbers) -> Outcome:
        """Of the raw search and then of each trial."""
        task = self.task
        return search(
            trials, task.query[queries], task.gallery, RightItems.of(task.positives[queries])
        )

    def by_method(self, search_request: Sequence[SearchRequest]) -> dict[str, float]:
        """Gain in R@1 of each of QUERYBANK_NAMES: IS, NNN and the default, each without a gate and with it."""
        gains = []
        for bank, queries in search_request:
            activated = DynamicGate().activated(bank, self.task.gallery)
            trials = []
            for estimator in QUERYBANK_METHODS.values():
                fitted = estimator.clamped(len(bank)).fit(
                    QueryBank(bank), gallery=self.task.gallery
                )
                plain = Trial(estimator, 1.0, fitted.bias(self.task.gallery))
                trials += [plain, plain._replace(gate=1, activated=activated)]
            hits = 100 * self.searched(trials, queries).values.mean(1)
            gains.append(hits[1:] - hits[0])
        return dict(zip(QUERYBANK_NAMES, np.mean(gains, 0).tolist(), strict=True))

    def decisions(self, bank: Vectors, queries: Numbers) -> Iterator[Decision]:
        """One told nothing; for each half of the queries, one told these and one told their items too."""
        task, applied = self.task, None
        free = tune(bank, task.gallery)
        if free.choice is not None:
            log = with_groups(QueryBank(bank), task.gallery)
            fitted = free.choice.fit(log, gallery=task.gallery)
            applied = Trial(
                free.choice, free.strength, np.float32(free.strength) * fitted.bias(task.gallery)
            )
        yield Decision(
            "nothing",
            free.verdict,
            [one.name for one in free.findings if one.fails],
            applied,
            queries,
        )

        copies = near_copies(QueryBank(bank), task.gallery)
        trials = sweep(copies.bank, task.gallery)
        halves = np.array_split(np.random.default_rng(0).permutation(queries), 2)
        for known, measured in (halves, halves[::-1]):
            result = known[:KNOWN]
            seen = examine(copies.bank, task.gallery, default_biases, queries=task.query[result])
            found = [one.name for one in findings(seen) if one.fails]
            judged = judge_unlabelled(seen)
            yield Decision(
                "queries", judged.verdict, found, at_strength(trials[-1], judged.strength), measured
            )
            pairs = LabelledQueries.of(task.query[result], task.positives[result])
            for told, tried in zip(
                TOLD[2:], (trials, [one for one in trials if one.gate is None]), strict=True
            ):
                outcome = self.searched(tried, result)
                fold = folds(pairs.queries, copies.cosine)
                chosen, judged, *_ = decide(
                    Swept(tried, outcome, copies.bank, task.gallery), pairs, fold
                )
                yield Decision(
                    told, judged.verdict, found, at_strength(chosen, judged.strength), measured
                )


def at_strength(trial: Trial, strength: float) -> Trial | None:
    """The trial at another strength; None at 0."""
    return (
        trial._replace(bias=np.float32(strength / trial.strength) * trial.bias)
        if strength
        else None
    )


def broken(sizes: dict[str, Any], tasks: dict[str, Any], means: dict[str, Any]) -> list[str]:
    """The bounds that do not hold, and by how much."""
    found = []
    for name, row in sizes.items():
        if row["Blend"]["whole"]["estimate"] <= 0:
            found.append(f"{name}: the whole bank gains {row['Blend']['whole']['estimate']:+.2f}")
    for name, origin, cell in (
        (name, *one) for name, cells in tasks.items() for one in cells.items()
    ):
        with_gate, without = (cell["tune"][result]["gain"]["estimate"] for result in TOLD[2:])
        if with_gate < without - BELOW_NO_GATE:
            found.append(
                f"{name}, {origin}: following tune gains {with_gate:+.2f}, without a gate {without:+.2f}"
            )
    for origin, row in means.items():
        for result, said in row["tune"].items():
            if origin == OWN and said["suspected"]:
                found.append(
                    f"told {result}, {said['suspected']} of {said['runs']} own banks are suspected"
                )
            if result != "nothing" and said["lowest"] < -BELOW_RAW:
                found.append(
                    f"{origin}: told {result}, following tune gains {said['lowest']:+.2f} on a task"
                )
        said = row["tune"]["nothing"]
        if origin in ALWAYS_SUSPECTED and said["suspected"] < said["runs"]:
            found.append(f"{origin}: {said['suspected']} of {said['runs']} are suspected")
    return found


def gain(cell: dict[str, Any]) -> str:
    return f"{cell['estimate']:+.1f} ({cell['low']:+.1f} to {cell['high']:+.1f})"


def sizes_table(rows: dict[str, dict[str, Any]], method: str) -> str:
    head = ["task", "items", "raw", *(f"{size:,}" for size in SIZES[:-1]), "whole bank"]
    head += [*(f"{share:.0%} from" for share in SHARES), "skewness"]
    lines = []
    for name, row in rows.items():
        cells = row[method]["sizes"]
        shown = [
            f"{cell['gain']:+.1f} ({cell['lowest']:+.1f} … {cell['highest']:+.1f})" if cell else "–"
            for cell in (cells.get(size) if size < row["bank"] else None for size in SIZES[:-1])
        ]
        shown.append(f"{row['bank']:,}: {gain(row[method]['whole'])}")
        shown += [f"{size:,}" if size else "–" for size in row[method]["reached"].values()]
        skewed = f"{row['raw']['skewness']:.2f} → {cells[row['bank']]['skewness']:.2f}"
        lines.append([name, f"{row['items']:,}", f"{row['raw']['r1']:.1f}", *shown, skewed])
    return f"**{method}**\n\n{table(head, lines)}"


def summary(tasks: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """{origin: means over the tasks that have it}"""
    found = {}
    for origin in (*ORIGINS, *CROWDING):
        cells = {name: cells[origin] for name, cells in tasks.items() if origin in cells}
        if not cells:
            continue
        gains = {name: cell["gain"]["estimate"] for name, cell in cells.items()}
        r1s = [cell["r1"] for cell in cells.values()]
        lowest = min(gains, key=lambda name: gains[name])
        found[origin] = {
            "tasks": len(cells),
            "gain": float(np.mean(list(gains.values()))),
            "own_at_that_size": float(np.mean([r1["own at that size"] - r1["raw"] for r1 in r1s])),
            "lowest": [lowest, gains[lowest]],
            "unreached": {
                which: float(np.mean([cell["unreached"][which] for cell in cells.values()]))
                for which in ("bank", "own at that size")
            },
            "tune": {
                result: {
                    "runs": sum(one["runs"] for one in said),
                    "suspected": sum(one["suspected"] for one in said),
                    "applied": sum(map(applied, said)),
                    "gated": sum(one["gated"] for one in said),
                    "gain": float(np.mean([one["gain"]["estimate"] for one in said])),
                    "lowest": float(min(one["gain"]["estimate"] for one in said)),
                }
                for result, said in (
                    (result, [cell["tune"][result] for cell in cells.values()]) for result in TOLD
                )
            },
        }
    return found


def worth_table(rows: dict[str, Any]) -> str:
    head = ["bank", "tasks", "gain of Blend", "with the own bank at that size", "lowest task"]
    head += ["unreached", "by the own bank at that size"]
    lines = []
    for origin, row in rows.items():
        name, lowest = row["lowest"]
        gains = [f"{row['gain']:+.1f}", f"{row['own_at_that_size']:+.1f}", f"{lowest:+.1f}, {name}"]
        lines.append(
            [
                origin,
                str(row["tasks"]),
                *gains,
                *(f"{part:.0%}" for part in row["unreached"].values()),
            ]
        )
    return table(head, lines)


def tune_table(rows: dict[str, Any]) -> str:
    head = ["bank", *(f"suspected, told {result}" for result in TOLD[:2])]
    head += [
        f"told {result}: {what}"
        for result in TOLD
        for what in ("applied (gated)", "gain", "lowest task")
    ]
    lines = []
    for origin, row in rows.items():
        line = [origin]
        line += [
            f"{row['tune'][result]['suspected']} of {row['tune'][result]['runs']}"
            for result in TOLD[:2]
        ]
        for said in row["tune"].values():
            line.append(f"{said['applied']} ({said['gated']}) of {said['runs']}")
            line += [f"{said['gain']:+.1f}", f"{said['lowest']:+.1f}"]
        lines.append(line)
    return table(head, lines)


def domain_table(tasks: dict[str, dict[str, Any]]) -> str:
    """QB-Norm's table 2 in shape: banks in the domain, far from it, and adversarial ones."""
    lines = []
    for domain, origin in DOMAINS.items():
        rows = [cells[origin]["by_method"] for cells in tasks.values() if origin in cells]
        if rows:
            gains = [[row[name] for row in rows] for name in QUERYBANK_NAMES]
            lines.append(
                [
                    domain,
                    str(len(rows)),
                    *(f"{np.mean(own):+.1f} ({min(own):+.1f})" for own in gains),
                ]
            )
    return table(["bank", "tasks", *QUERYBANK_NAMES], lines)


def every_table(tasks: dict[str, dict[str, Any]]) -> tuple[str, str]:
    """What each bank is worth, and what `tune` makes of it."""
    worth, followed = [], []
    for name, origin, cell in (
        (name, *one) for name, cells in tasks.items() for one in cells.items()
    ):
        line = [name, origin, " / ".join(f"{size:,}" for size in sorted(set(cell["banks"])))]
        line += [*(f"{r1:.1f}" for r1 in cell["r1"].values()), gain(cell["gain"])]
        line.append(f"{min(cell['gain_of_each_bank']):+.1f}" if len(cell["banks"]) > 1 else "–")
        line.append(f"{cell['skewness']['raw']:.2f} → {cell['skewness']['Blend']:.2f}")
        worth.append([*line, f"{cell['unreached']['bank']:.0%}"])
        said = cell["tune"].values()
        kinds = ", ".join(sorted({kind for one in said for kind in one["suspicions"]})) or "–"
        followed.append([name, origin, kinds])
        followed[-1] += [f"{applied(one)} of {one['runs']}, {gain(one['gain'])}" for one in said]
    head = ["task", "bank", "queries in it", "raw", *METHODS, "own at that size", "gain of Blend"]
    head += ["lowest bank", "skewness", "unreached"]
    result = [f"told {result}: applied, gain" for result in TOLD]
    return table(head, worth), table(["task", "bank", "suspicions", *result], followed)


def applied(said: dict[str, Any]) -> int:
    return sum(count for verdict, count in said["verdicts"].items() if verdict != "leave it alone")


def markdown(sizes: dict[str, Any], tasks: dict[str, Any], means: dict[str, Any]) -> str:
    parts = [
        "Gains are in points of R@1 over the raw search.",
        "## Size",
        f"The median of {DRAWS} random draws, in brackets the lowest and the highest; for the whole bank, "
        "the 95% bootstrap interval over the queries. Then the size from which on the median is so much of "
        "the whole bank's gain, and the skewness of N_10, raw and under the whole bank.",
        *(sizes_table(sizes, method) for method in METHODS[::-1]),
        "## Origin",
        f"Means over the tasks that have such a bank, of at most {BANK:,} queries (picked to crowd few "
        f"items: the share of at most {CROWDED_FROM:,}), on at most {ITEMS:,} items. Unreached: share of "
        "the raw search's first ten answers that no bank query has among its own first ten.",
        worth_table(means),
        "Gain of methods in the shape of QB-Norm's table 2, mean over tasks and in brackets the lowest. A gate "
        "corrects only queries whose raw best item is that of a bank query; DIS is IS with it.",
        domain_table(tasks),
        "What `tune` makes of them, told nothing but the bank, queries that are asked, or these with their "
        "right items, and these without trials of a gate.",
        tune_table(means),
        "## Origin, every task",
        "R@1 (%), and the gain with its 95% bootstrap interval over the queries.",
        *every_table(tasks),
    ]
    return "\n\n".join(parts)


def main() -> int:
    one_thread()
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "tasks", nargs="*", metavar="task", help="a task of tests/support/real_data.py"
    )
    given = parser.parse_args().tasks
    sizes, tasks = {}, {}
    for name in given or EMBEDDING_TASKS:
        whole = load_task(name)
        for items in GALLERIES.get(name, (len(whole.gallery),)):
            task = cut(whole, items, QUERIES) if name in GALLERIES else whole
            row = sizes[f"{name}, {items:,} items" if name in GALLERIES else name] = by_size(task)
            print(name, items, row["Blend"], f"{time.monotonic() - started:.0f} s", flush=True)
        tasks[name] = Comparison(name).run()
        print(name, f"{time.monotonic() - started:.0f} s", flush=True)
    means = summary(tasks)
    text = markdown(sizes, tasks, means)
    print(text)
    faults = broken(sizes, tasks, means)
    print("\n".join(faults) or "all bounds hold")
    if not given:
        kept = {"environment": environment(started), "limits": LIMITS, "broken": faults}
        save("banks", kept | {"size": sizes, "origin": means, "tasks": tasks}, text)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
