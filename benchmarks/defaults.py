"""Gain and harm of defaults that need no labels, and whether the verdict recognises a wrong bank.

    python -m benchmarks.defaults [--from-saved]

Candidates are plain formulas, written here, on the seven embedding tasks: with whole banks (of the tasks whose pairs
are halved, ten draws of the halves), banks of 100, 300 and 1,000 queries (five draws each) and all vectors × 0.1 and ×
10; with banks of other tasks, at most 1,000 queries, brought to the mean length of the own bank's (those of another
dimension are cut or padded after a random rotation, and counted apart); with items as bank; with the tenth, the quarter
and the half of the bank that crowd the fewest items; and with one topic of four. The scores of a re-ranker are
judged with 20 draws of the halves. caption_translation is searched with 5,000 of its 14,085 queries, in all its items.
The verdict is also given 500 real queries, without labels.

ρ is the share of a bias to apply: the correlation, at least 0, of the biases from two random halves of the bank. The
verdict is that of `tune` without labels, on the candidate that is the default. Gains are in points of R@1 over the raw
search. --from-saved judges the figures of the last run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from sklearn.cluster import KMeans

from benchmarks.environment import RESULTS, environment, save, table
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.quality.verdict import Figures, examine, findings
from tests.support.real_data import DATA, EMBEDDING_TASKS, Task, load_task

Vectors = npt.NDArray[np.float32]

SIZES, DRAWS = (100, 300, 1000), 5
SCALES = (0.1, 10.0)
SEARCHED = {"caption_translation": 5000}
FOREIGN_BANK, TOPICS, FEWEST, REAL_QUERIES = 1000, 4, 40, 500
RERANKER, RERANKER_SEEDS = "reranker_scores t2v", 20
MOST_ITEMS = 5_000
FINDS, RELATIVE = 10, 0.5
ITERATIONS = 10
TODAY, DEFAULT = "today's Blend", "ρ · ½ (H 8 + SN .375σ)"
CANDIDATES = (
    TODAY, DEFAULT, "½ (H 8 + SN .375σ)", "ρ · ½ (NNN 8 + SN .375σ)", "ρ · NNN 8", "ρ · H 8", "ρ · SN .375σ",
)  # fmt: skip
BELOW_RAW, LOSS, SCALE_CHANGE = 0.5, 0.1, 0.05
FOREIGN, ADAPTED, SAME_SET = (
    "foreign bank",
    "foreign bank, other dimension",
    "other side of the same data set",
)
GALLERY, ITEM_SIDE, TOPIC = (
    "items of the gallery as bank",
    "other items as bank",
    "bank of one topic",
)
WHOLE, CROWDING, HALVING = "whole", "bank that crowds few items", "halving"
HALVED, HALVES, CROWDED = ("text_video_msrvtt", "clip_products"), 10, (0.1, 0.25, 0.5)
REACH_HALVES = "reach, which halves"
FOLLOWED = ("always", "followed", "worst", "with_queries")
FINDINGS = ("kind", "agreement", "two views", "neighbours", "reach", "best score", "hubs", HALVING)


class Case(NamedTuple):
    """A bank (m, d) on a task. kind: the rows of the tables group by it."""

    kind: str
    task: Task
    name: str
    bank: Vectors


class Scores:
    """Inner products of a bank with a gallery, as (items, queries), and biases from them or from a part of the bank."""

    def __init__(self, bank: Vectors, gallery: Vectors) -> None:
        self.of_items = torch.tensor(gallery) @ torch.tensor(bank).T

    def biases(self, part: slice) -> dict[str, torch.Tensor]:
        """{name: (n_items,)}, without ρ."""
        scores = self.of_items[:, part]
        spread = float(scores.var(0, unbiased=False).mean().sqrt())
        largest = scores.topk(min(16, scores.shape[1]), 1).values
        relative = self.relative(scores)
        nnn, near = largest[:, :8].mean(1), sinkhorn(scores, 0.375 * spread)
        today = 0.5 * 0.85 * largest.mean(1) + 0.5 * sinkhorn(scores, 0.5 * spread)
        return {
            TODAY: today,
            DEFAULT: (relative + near) / 2,
            "½ (H 8 + SN .375σ)": (relative + near) / 2,
            "ρ · ½ (NNN 8 + SN .375σ)": (nnn + near) / 2,
            "ρ · NNN 8": nnn,
            "ρ · H 8": relative,
            "ρ · SN .375σ": near,
        }

    def default(self, part: slice) -> torch.Tensor:
        """The bias of DEFAULT, without ρ."""
        scores = self.of_items[:, part]
        spread = float(scores.var(0, unbiased=False).mean().sqrt())
        return (self.relative(scores) + sinkhorn(scores, 0.375 * spread)) / 2

    @staticmethod
    def relative(scores: torch.Tensor) -> torch.Tensor:
        """H 8: the mean of the 8 largest scores of an item, less half of what each query finds anyway."""
        finds = scores.topk(min(FINDS, len(scores)), 0).values.mean(0)
        return (scores - RELATIVE * finds).topk(min(8, scores.shape[1]), 1).values.mean(1)

    def fitted(self) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """The biases of all candidates, and their ρ; the bank's order must be random."""
        middle, whole = self.of_items.shape[1] // 2, self.biases(slice(None))
        first, second = self.biases(slice(middle)), self.biases(slice(middle, None))
        agreement = {name: correlation(first[name], second[name]) for name in CANDIDATES}
        return {
            name: bias * (agreement[name] if "ρ" in name else 1) for name, bias in whole.items()
        }, agreement


def sinkhorn(scores: torch.Tensor, tau: float) -> torch.Tensor:
    """(n_items,) τ log Σ_i exp((s_ij + f_i) / τ) after 10 iterations from potentials of 0; scores: (items, queries)."""
    kernel = ((scores - scores.amax(0)) / max(tau, 1e-30)).exp_()
    of_queries = 1 / kernel.sum(0)
    for _ in range(ITERATIONS - 1):
        of_queries = 1 / (kernel.T @ (1 / (kernel @ of_queries).clamp_min(1e-37))).clamp_min(1e-37)
    return tau * (kernel @ of_queries).clamp_min(1e-37).log()


def correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    """At least 0."""
    one, other = (bias.double() - bias.double().mean() for bias in (first, second))
    return max(0.0, float(one @ other / (one.norm() * other.norm()).clamp_min(1e-300)))


def default_biases(bank: QueryBank, items: Vectors) -> Vectors:
    """The bias of DEFAULT, without ρ."""
    return Scores(bank.vectors, items).default(slice(None)).numpy()


def strength_of(seen: Figures, *, without: str = "") -> float:
    """The share of the bias that the verdict applies, if it had no such finding."""
    if any(finding.fails and finding.name != without for finding in findings(seen)):
        return 0.0
    return 0.5 if seen.narrow and without != HALVING else 1.0


@cache
def load(name: str) -> Task:
    task = load_task(name)
    if name not in SEARCHED:
        return task
    chosen = np.sort(np.random.default_rng(0).permutation(len(task.query))[: SEARCHED[name]])
    return task._replace(query=task.query[chosen], positives=task.positives[chosen])


def draw(rows: Vectors, most: int | None, *key: Any) -> Vectors:
    """Rows in a random order, at most `most`."""
    return rows[np.random.default_rng(zlib.crc32(repr(key).encode())).permutation(len(rows))[:most]]


def same_length(rows: Vectors, of: Vectors) -> Vectors:
    return rows * np.float32(
        np.linalg.norm(of, axis=1).mean() / np.linalg.norm(rows, axis=1).mean()
    )


def to_dim(rows: Vectors, dim: int) -> Vectors:
    """Rows in `dim` random orthonormal directions of theirs, or theirs in as many random ones of `dim`."""
    most = max(dim, rows.shape[1])
    padded = torch.from_numpy(np.pad(rows, [(0, 0), (0, most - rows.shape[1])]))
    basis, _ = torch.linalg.qr(torch.randn(most, most, generator=torch.Generator().manual_seed(0)))
    return (padded @ basis)[:, :dim].contiguous().numpy()


def other_halves(task: Task, seed: int) -> Task:
    """The task with other halves of its pairs."""
    assert task.target_bank is not None, "the pairs of the bank have no items"
    queries, items = (
        np.concatenate([task.query, task.bank]),
        np.concatenate([task.gallery, task.target_bank]),
    )
    order = np.random.default_rng(seed).permutation(len(queries))
    test, bank = order[: len(task.query)], order[len(task.query) :]
    return Task(queries[test], items[test], queries[bank], items[bank], task.positives)


def crowding(bank: Vectors, gallery: Vectors, share: float) -> Vectors:
    """The share of the bank whose nearest items are the fewest."""
    nearest = (bank @ gallery.T).argmax(1)
    counts = np.bincount(nearest, minlength=len(gallery))
    return bank[np.lexsort((nearest, -counts[nearest]))[: int(share * len(bank))]]


def cases(name: str) -> Iterator[Case]:
    task = load(name)
    yield Case(WHOLE, task, name, draw(task.bank, None, name, WHOLE))
    for seed in range(1, HALVES if name.startswith(HALVED) else 1):
        halves = other_halves(task, seed)
        yield Case(WHOLE, halves, f"{name}, halves {seed}", halves.bank)
    for scale in SCALES:
        scaled = task._replace(query=task.query * scale, gallery=task.gallery * scale)
        yield Case(
            f"× {scale:g}", scaled, name, draw(task.bank, None, name, WHOLE) * np.float32(scale)
        )
    for size in SIZES:
        for number in range(DRAWS if size < len(task.bank) else 0):
            yield Case(
                f"{size} queries",
                task,
                f"{name}, draw {number}",
                draw(task.bank, size, name, number),
            )
    for other in EMBEDDING_TASKS:
        if other != name:
            rows = draw(load(other).bank, FOREIGN_BANK, name, other)
            kind = FOREIGN if rows.shape[1] == task.bank.shape[1] else ADAPTED
            kind = SAME_SET if other.split()[0] == name.split()[0] else kind
            bank = same_length(
                to_dim(rows, task.bank.shape[1]) if kind == ADAPTED else rows, task.bank
            )
            yield Case(kind, task, f"{name}, bank of {other}", bank)
    yield Case(GALLERY, task, name, same_length(draw(task.gallery, MOST_ITEMS, name), task.bank))
    if task.target_bank is not None:
        yield Case(
            ITEM_SIDE, task, name, same_length(draw(task.target_bank, None, name), task.bank)
        )
    for share in CROWDED:
        rows = crowding(task.bank[:MOST_ITEMS], task.gallery, share)
        yield Case(CROWDING, task, f"{name}, {share:.0%}", draw(rows, None, name, share))
    topic = KMeans(TOPICS, n_init=1, random_state=0).fit_predict(task.bank)
    for number in range(TOPICS):
        rows = task.bank[topic == number]
        if len(rows) >= FEWEST:
            yield Case(TOPIC, task, f"{name}, topic {number}", draw(rows, None, name, number))


def reranker_cases() -> Iterator[Case]:
    load_task(RERANKER)
    scores = np.load(DATA / "reranker_scores_msrvtt" / "scores.npy").astype(np.float32)
    for seed in range(RERANKER_SEEDS):
        test, bank = np.array_split(np.random.default_rng(seed).permutation(len(scores)), 2)
        columns, numbers = scores[:, test], np.arange(len(test))
        unit_vectors = np.eye(len(test), dtype=np.float32)
        yield Case(
            RERANKER,
            Task(columns[test], unit_vectors, columns[bank], None, numbers),
            str(seed),
            columns[bank],
        )


def hits(task: Task) -> Callable[[torch.Tensor], npt.NDArray[np.float64]]:
    """Whether each query finds its item first under a bias; a tie up to rounding counts for the query."""
    scores = torch.from_numpy(task.query) @ torch.from_numpy(task.gallery).T
    own = torch.from_numpy(task.positives)[:, None]
    largest = scores.abs().amax(1)

    def under(bias: torch.Tensor) -> npt.NDArray[np.float64]:
        corrected = scores - bias.float()
        best = corrected.amax(1)
        is_first = corrected.gather(1, own)[:, 0] >= best - 5e-7 * torch.maximum(
            best.abs(), largest
        )
        return is_first.numpy().astype(np.float64)

    return under


def measured(
    case: Case, under: Callable[[torch.Tensor], npt.NDArray[np.float64]]
) -> dict[str, Any]:
    task, gallery = case.task, case.task.gallery
    biases, agreement = Scores(case.bank, gallery).fitted()
    raw = under(torch.zeros(len(gallery))).mean()
    gains = {name: 100 * float(under(bias).mean() - raw) for name, bias in biases.items()}
    half = 100 * float(under(biases[DEFAULT] / 2).mean() - raw)
    seen = examine(case.bank, gallery, default_biases)
    with_queries = examine(
        case.bank, gallery, default_biases, queries=draw(task.query, REAL_QUERIES, case.name)
    )
    return {
        "kind": case.kind,
        "case": case.name,
        "queries": len(task.query),
        "items": len(gallery),
        "bank": len(case.bank),
        "raw": 100 * float(raw),
        "gains": gains,
        "gain_of_half": half,
        "rho": agreement[DEFAULT],
        "figures": seen._asdict(),
        "strength": strength_of(seen),
        "figures_with_queries": with_queries._asdict(),
        "strength_with_queries": strength_of(with_queries),
    }


def run() -> list[dict[str, Any]]:
    rows = []
    for name in EMBEDDING_TASKS:
        scale_free: Any = hits(load(name))
        for case in cases(name):
            scaled = case.task is not load(name)
            rows.append(measured(case, hits(case.task) if scaled else scale_free))
            print(
                case.kind,
                case.name,
                f"{rows[-1]['gains'][DEFAULT]:+.2f}",
                rows[-1]["strength"],
                flush=True,
            )
    rows += [measured(case, hits(case.task)) for case in reranker_cases()]
    return rows


def realised(row: dict[str, Any], strength: float | None = None) -> float:
    """The gain of following the verdict, or of this strength."""
    own = row["strength"] if strength is None else strength
    return float({0.0: 0.0, 0.5: row["gain_of_half"], 1.0: row["gains"][DEFAULT]}[own])


def task_of(row: dict[str, Any]) -> str:
    return str(row["case"]).partition(",")[0]


def summary(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """The figures that matter, and the tables."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    of = {kind: [row for row in rows if row["kind"] == kind] for kind in kinds}
    own = [WHOLE, *(f"{size} queries" for size in SIZES)]
    gain_table = table(
        ["bank", "cases", *CANDIDATES],
        [
            [
                kind,
                str(len(of[kind])),
                *(spread([row["gains"][name] for row in of[kind]]) for name in CANDIDATES),
            ]
            for kind in kinds
        ],
    )
    confusion, realised_gain = [], {}
    for kind in kinds:
        counts = [
            sum(row["strength"] == strength for row in of[kind]) for strength in (1.0, 0.5, 0.0)
        ]
        always, followed = (
            [act(row) for row in of[kind]] for act in (lambda row: row["gains"][DEFAULT], realised)
        )
        realised_gain[kind] = {
            "cases": len(of[kind]), "apply": counts[0], "half": counts[1], "alone": counts[2],
            "always": float(np.mean(always)), "followed": float(np.mean(followed)), "worst": float(min(followed)),
            "with_queries": float(np.mean([realised(row, row["strength_with_queries"]) for row in of[kind]])),
            "harmed": int(np.sum(np.array(followed) < -BELOW_RAW)),
            "missed": int(np.sum([row["strength"] == 0 and row["gains"][DEFAULT] > BELOW_RAW for row in of[kind]])),
        }  # fmt: skip
        row = realised_gain[kind]
        confusion.append(
            [kind, *map(str, (row["cases"], *counts)), *(f"{row[key]:+.2f}" for key in FOLLOWED),
             str(row["harmed"]), str(row["missed"])]
        )  # fmt: skip
    below = {
        name: {
            kind: [
                (task, mean) for task, mean in by_task(of[kind], name).items() if mean < -BELOW_RAW
            ]
            for kind in own
        }
        for name in CANDIDATES
    }
    scale = {
        name: max(
            abs(row["gains"][name] - whole["gains"][name])
            for whole in of[WHOLE] for factor in SCALES for row in of[f"× {factor:g}"]
            if row["case"] == whole["case"]
        )
        for name in CANDIDATES
    }  # fmt: skip
    facts = {
        "mean_gain": {
            name: float(np.mean([*by_task(of[WHOLE], name).values()])) for name in CANDIDATES
        },
        "tasks_below_raw": below,
        "largest_change_by_scale": scale,
        "verdict": realised_gain,
        "own_banks_lose": {
            kind: realised_gain[kind]["always"] - realised_gain[kind]["followed"] for kind in own
        },
        "all_own_banks_lose": float(
            np.mean([row["gains"][DEFAULT] - realised(row) for kind in own for row in of[kind]])
        ),
        "without": {name: without(of, own, name) for name in ("nothing", *FINDINGS, REACH_HALVES)},
        "foreign_banks_gain": float(np.mean([realised(row) for row in of[FOREIGN]])),
        "reranker_left_alone": realised_gain[RERANKER]["alone"],
    }
    seen = table(
        [
            "bank", "two views", "ρ", "reach", "z", "excess answers before", "after", "by chance",
            "bank and gallery alike",
        ],
        [
            [kind, *(extremes([row["figures"][key] for row in of[kind]])
                     for key in ("two_views", "agreement", "reach", "best_z", "before", "after", "by_chance", "alike"))]
            for kind in kinds
        ],
    )  # fmt: skip
    tasks = list(by_task(of[WHOLE], DEFAULT))
    means = {name: by_task(of[WHOLE], name) for name in CANDIDATES}
    lines = [[task, *(f"{means[name][task]:+.2f}" for name in CANDIDATES)] for task in tasks]
    whole = table(
        ["task", *CANDIDATES],
        [*lines, ["mean", *(f"{facts['mean_gain'][name]:+.2f}" for name in CANDIDATES)]],
    )
    lacking = facts["without"]
    ablation = table(
        ["verdict without", *lacking["nothing"]],
        [[name, *(f"{gain:+.2f}" for gain in gains.values())] for name, gains in lacking.items()],
    )
    head = ["bank", "banks", "apply", "half", "alone", "gain, always applied", "gain, verdict followed", "worst",
            f"with {REAL_QUERIES} queries", f"harmed by > {BELOW_RAW}",
            f"left alone though it gains > {BELOW_RAW}"]  # fmt: skip
    text = "\n\n".join(
        [
            "Points of R@1 over the raw search.",
            whole,
            "Mean gain, and the worst case, by kind of bank.",
            gain_table,
            f"The verdict on {DEFAULT}.",
            table(head, confusion),
            "Mean gain of following a verdict that lacks one of its findings.",
            ablation,
            "What the verdict sees: least, median, largest.",
            seen,
            conclusions(facts),
        ]
    )
    return facts, text


def without(of: dict[str, list[dict[str, Any]]], own: list[str], name: str) -> dict[str, float]:
    """{bank: the mean gain of following a verdict that lacks a finding}"""
    groups = {"own banks": own} | {
        kind: [kind] for kind in of if kind not in own and not kind.startswith("×")
    }

    def gain(row: dict[str, Any]) -> float:
        seen = Figures(**row["figures"])
        if name == REACH_HALVES and any(
            one.fails and one.name == "reach" for one in findings(seen)
        ):
            return realised(row, min(0.5, strength_of(seen, without="reach")))
        return realised(row, strength_of(seen, without=name))

    return {
        group: float(np.mean([gain(row) for kind in kinds for row in of[kind]]))
        for group, kinds in groups.items()
    }


def by_task(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    """{task: its mean gain}"""
    tasks = dict.fromkeys(map(task_of, rows))
    return {
        task: float(np.mean([row["gains"][name] for row in rows if task_of(row) == task]))
        for task in tasks
    }


def spread(values: list[float]) -> str:
    return f"{np.mean(values):+.2f} ({min(values):+.2f})"


def extremes(values: list[float]) -> str:
    return " ".join(
        f"{value:.3f}" for value in (min(values), float(np.median(values)), max(values))
    )


def conclusions(facts: dict[str, Any]) -> str:
    gains, below = facts["mean_gain"], facts["tasks_below_raw"][DEFAULT]
    harmed = [
        f"{task} ({kind}: {gain:+.2f})" for kind, pairs in below.items() for task, gain in pairs
    ]
    lost = ", ".join(f"{loss:+.2f} ({kind})" for kind, loss in facts["own_banks_lose"].items())
    lines = [
        f"mean gain over the seven tasks, whole banks: {gains[DEFAULT]:+.2f}; {TODAY}: {gains[TODAY]:+.2f}",
        f"tasks more than {BELOW_RAW} below raw in the mean of the draws: {', '.join(harmed) or 'none'}",
        f"largest change by scale: {facts['largest_change_by_scale'][DEFAULT]:.2f} points",
        f"mean gain with foreign banks if the verdict is followed: {facts['foreign_banks_gain']:+.2f}",
        f"own banks lose against applying always: {facts['all_own_banks_lose']:+.2f} in the mean; {lost}",
        f"re-ranker scores left alone: {facts['reranker_left_alone']} of {RERANKER_SEEDS}",
    ]
    return "\n".join(f"- {line}" for line in lines)


def broken(facts: dict[str, Any]) -> list[str]:
    """The bounds that do not hold."""
    bounds = {
        f"the mean gain is above that of {TODAY}": facts["mean_gain"][DEFAULT]
        > facts["mean_gain"][TODAY],
        f"no task is more than {BELOW_RAW} below raw": not any(
            facts["tasks_below_raw"][DEFAULT].values()
        ),
        "gains do not change with the scale": facts["largest_change_by_scale"][DEFAULT]
        <= SCALE_CHANGE,
        "foreign banks cost at most 0.1": facts["foreign_banks_gain"] >= -LOSS,
        "own banks lose at most 0.1": facts["all_own_banks_lose"] <= LOSS,
        "the re-ranker's scores are always left alone": facts["reranker_left_alone"]
        == RERANKER_SEEDS,
    }
    return [bound for bound, holds in bounds.items() if not holds]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--from-saved",
        action="store_true",
        help="judge the figures of the last run again, and keep it",
    )
    started = time.monotonic()
    if parser.parse_args().from_saved:
        saved = json.loads((RESULTS / "defaults.json").read_text())
        rows, machine = saved["rows"], saved["environment"]
        for row in rows:
            row["strength"] = strength_of(Figures(**row["figures"]))
            row["strength_with_queries"] = strength_of(Figures(**row["figures_with_queries"]))
    else:
        rows = run()
        machine = environment(started)
    facts, text = summary(rows)
    print(text)
    faults = broken(facts)
    print("\n".join(["bounds that do not hold:", *faults] if faults else ["all bounds hold"]))
    save(
        "defaults",
        {
            "environment": machine,
            "searched_queries": SEARCHED,
            "broken": faults,
            **facts,
            "rows": rows,
        },
        text,
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
