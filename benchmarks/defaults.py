"""Gain and harm of defaults that need no labels, and whether a verdict recognises a wrong bank.

    python -m benchmarks.defaults [--from-saved]

Candidates are plain formulas, written here, on the seven embedding tasks: with banks of 100, 300 and 1,000 queries
(five draws each) and whole; with all vectors × 0.1 and × 10; with the banks of other tasks, at most 1,000 queries,
brought to the mean length of the own bank's (those of another dimension are cut or padded after a random rotation
and counted apart); with items as bank; and with a bank of one topic of four. The scores of a re-ranker are asked with
20 draws of the halves. caption_translation is asked 5,000 of its 14,085 queries, on all its items.

ρ is the share of a bias to apply: the correlation, at least 0, of the biases from two random halves of the bank.
Gains are in points of R@1 over the raw search. --from-saved prints the tables of the last run again.
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
from scipy.fft import dct
from sklearn.cluster import KMeans

from benchmarks.environment import RESULTS, environment, save, table
from milvus_hubness.quality.bank_checks import drift_between
from tests.real_data import DATA, EMBEDDING_TASKS, Task, load_task

Vectors = npt.NDArray[np.float32]

SIZES, DRAWS = (100, 300, 1000), 5
SCALES = (0.1, 10.0)
ASKED = {"caption_translation": 5000}
FOREIGN_BANK, TOPICS, FEWEST = 1000, 4, 40
RERANKER, RERANKER_SEEDS = "reranker_scores t2v", 20
MOST_ITEMS, MOST_QUERIES = 10_000, 5_000
DEPTH, FINDS, RELATIVE = 10, 10, 0.5
ITERATIONS = 10
TODAY, DEFAULT = "today's Blend", "ρ · ½ (NNN 8 + SN .375σ)"
CANDIDATES = (
    TODAY, DEFAULT, "½ (NNN 8 + SN .375σ)", "ρ · ½ (H 8 + SN .375σ)", "ρ · NNN 8", "ρ · H 8", "ρ · SN .375σ",
)  # fmt: skip
BELOW_RAW = 0.5
FOREIGN, ADAPTED, SAME_SET = "foreign bank", "foreign bank, other dimension", "other side of the same data set"
GALLERY, ITEM_SIDE, TOPIC = "items of the gallery as bank", "other items as bank", "bank of one topic"
WHOLE = "whole"


class Case(NamedTuple):
    """A bank (m, d) on a task. kind: the rows of the tables group by it."""

    kind: str
    task: Task
    name: str
    bank: Vectors


class Scores:
    """Inner products of a bank with a gallery, as (items, queries), and biases from them or from a part of the bank."""

    def __init__(self, bank: Vectors, gallery: Vectors) -> None:
        self.of_items = torch.from_numpy(gallery) @ torch.from_numpy(bank).T

    def biases(self, part: slice) -> dict[str, torch.Tensor]:
        """{name: (n_items,)}, without ρ."""
        scores = self.of_items[:, part]
        spread = float(scores.var(0, unbiased=False).mean().sqrt())
        largest = scores.topk(min(16, scores.shape[1]), 1).values
        finds = scores.topk(min(FINDS, len(scores)), 0).values.mean(0)
        relative = (scores - RELATIVE * finds).topk(min(8, scores.shape[1]), 1).values.mean(1)
        nnn, near = largest[:, :8].mean(1), sinkhorn(scores, 0.375 * spread)
        today = 0.5 * 0.85 * largest.mean(1) + 0.5 * sinkhorn(scores, 0.5 * spread)
        return {
            TODAY: today,
            DEFAULT: (nnn + near) / 2,
            "½ (NNN 8 + SN .375σ)": (nnn + near) / 2,
            "ρ · ½ (H 8 + SN .375σ)": (relative + near) / 2,
            "ρ · NNN 8": nnn,
            "ρ · H 8": relative,
            "ρ · SN .375σ": near,
        }

    def default(self, part: slice) -> torch.Tensor:
        """The bias of DEFAULT, without ρ."""
        scores = self.of_items[:, part]
        spread = float(scores.var(0, unbiased=False).mean().sqrt())
        return (scores.topk(min(8, scores.shape[1]), 1).values.mean(1) + sinkhorn(scores, 0.375 * spread)) / 2

    def fitted(self) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """The biases of all candidates, and their ρ; the bank's order must be random."""
        middle, whole = self.of_items.shape[1] // 2, self.biases(slice(None))
        first, second = self.biases(slice(middle)), self.biases(slice(middle, None))
        agreement = {name: correlation(first[name], second[name]) for name in CANDIDATES}
        return {name: bias * (agreement[name] if "ρ" in name else 1) for name, bias in whole.items()}, agreement


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


def robin_hood(first: torch.Tensor, items: int) -> tuple[float, float]:
    """Of N_10 (n_queries, 10), and its expectation if every answer were drawn at random."""
    counts = torch.bincount(first.flatten(), minlength=items).double()
    mean = float(counts.mean())
    by_chance = np.exp(-mean + np.floor(mean) * np.log(mean) - sum(np.log(np.arange(1, int(mean) + 1))))
    return float((counts - mean).abs().sum() / (2 * counts.sum())), float(by_chance)


def figures(bank: Vectors, gallery: Vectors, seed: int) -> dict[str, float]:
    """What a verdict can see: a bank and a gallery, with samples of at most 5,000 and 10,000."""
    rng = np.random.default_rng(seed)
    bank = bank[rng.permutation(len(bank))[:MOST_QUERIES]]
    items = gallery[np.sort(rng.permutation(len(gallery))[:MOST_ITEMS])]
    middle, n_items = len(bank) // 2, len(items)
    half, rest = slice(middle), slice(middle, None)
    scores = Scores(bank, items)
    raw = scores.of_items.T
    best = raw.topk(min(DEPTH, n_items), 1)
    spread = raw.std(1, unbiased=False)
    z = ((best.values[:, 0] - raw.mean(1)) / spread)[spread > 1e-6 * raw.abs().max()]
    counts = torch.bincount(best.indices[:, 0], minlength=n_items)
    reached = int((counts > 0).sum())
    bias = scores.default(half)
    agreement = correlation(bias, scores.default(rest))
    after, by_chance = robin_hood((raw[rest] - agreement * bias).topk(min(DEPTH, n_items), 1).indices, n_items)
    before, _ = robin_hood(best.indices[rest], n_items)
    signs, order = rng.choice(np.float32([-1, 1]), bank.shape[1]), rng.permutation(bank.shape[1])
    turned_bank, turned_items = (dct(rows * signs, norm="ortho") for rows in (bank, items))
    firsts, raw_firsts = [], []
    for columns in np.array_split(order, 2):
        view = Scores(turned_bank[:, columns], turned_items[:, columns])
        firsts.append((view.of_items[:, rest] - view.default(half)[:, None]).argmax(0))
        raw_firsts.append(view.of_items[:, rest].argmax(0))
    return {
        "agreement": agreement,
        "two_view": float((firsts[0] == firsts[1]).float().mean()),
        "two_view_raw": float((raw_firsts[0] == raw_firsts[1]).float().mean()),
        "reach": float(reached / (-n_items * np.expm1(-len(bank) / n_items))),
        "once": float((counts == 1).sum() / len(bank)),
        "z": float(z.mean()),
        "before": before,
        "after": after,
        "by_chance": by_chance,
        "alike": drift_between(bank, items, at_most=300, permutations=19, seed=seed).statistic,
    }


THRESHOLDS = {"two_view": 0.06, "reach": 0.35, "z": 8.0, "excess": 0.12}


def decided(seen: dict[str, float]) -> float:
    """The share of the bias to apply: 0, ½ or 1."""
    fits = seen["two_view"] >= THRESHOLDS["two_view"] and seen["reach"] >= THRESHOLDS["reach"]
    if not fits or seen["z"] > THRESHOLDS["z"] or seen["after"] >= seen["before"]:
        return 0.0
    return 0.5 if (seen["after"] - seen["by_chance"]) / (1 - seen["by_chance"]) > THRESHOLDS["excess"] else 1.0


@cache
def load(name: str) -> Task:
    task = load_task(name)
    if name not in ASKED:
        return task
    kept = np.sort(np.random.default_rng(0).permutation(len(task.query))[: ASKED[name]])
    return task._replace(query=task.query[kept], positives=task.positives[kept])


def draw(rows: Vectors, most: int | None, *key: Any) -> Vectors:
    """Rows in a random order, at most `most`."""
    return rows[np.random.default_rng(zlib.crc32(repr(key).encode())).permutation(len(rows))[:most]]


def same_length(rows: Vectors, of: Vectors) -> Vectors:
    return rows * np.float32(np.linalg.norm(of, axis=1).mean() / np.linalg.norm(rows, axis=1).mean())


def to_dim(rows: Vectors, dim: int) -> Vectors:
    """Rows in `dim` random orthonormal directions of theirs, or theirs in as many random ones of `dim`."""
    most = max(dim, rows.shape[1])
    padded = np.pad(rows, [(0, 0), (0, most - rows.shape[1])])
    turned = dct(padded * np.random.default_rng(most).choice(np.float32([-1, 1]), most), norm="ortho")
    return np.ascontiguousarray(turned[:, :dim])


def cases(name: str) -> Iterator[Case]:
    task = load(name)
    yield Case(WHOLE, task, name, draw(task.bank, None, name, WHOLE))
    for scale in SCALES:
        scaled = task._replace(query=task.query * scale, gallery=task.gallery * scale)
        yield Case(f"× {scale:g}", scaled, name, draw(task.bank, None, name, WHOLE) * np.float32(scale))
    for size in SIZES:
        for number in range(DRAWS if size < len(task.bank) else 0):
            yield Case(f"{size} queries", task, f"{name}, draw {number}", draw(task.bank, size, name, number))
    for other in EMBEDDING_TASKS:
        if other != name:
            rows = draw(load(other).bank, FOREIGN_BANK, name, other)
            kind = FOREIGN if rows.shape[1] == task.bank.shape[1] else ADAPTED
            kind = SAME_SET if other.split()[0] == name.split()[0] else kind
            bank = same_length(to_dim(rows, task.bank.shape[1]) if kind == ADAPTED else rows, task.bank)
            yield Case(kind, task, f"{name}, bank of {other}", bank)
    yield Case(GALLERY, task, name, same_length(draw(task.gallery, MOST_QUERIES, name), task.bank))
    if task.target_bank is not None:
        yield Case(ITEM_SIDE, task, name, same_length(draw(task.target_bank, None, name), task.bank))
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
        yield Case(RERANKER, Task(columns[test], unit_vectors, columns[bank], None, numbers), str(seed), columns[bank])


def hits(task: Task) -> Callable[[torch.Tensor], npt.NDArray[np.float64]]:
    """Whether each query finds its item first under a bias; a tie up to rounding counts for the query."""
    scores = torch.from_numpy(task.query) @ torch.from_numpy(task.gallery).T
    own = torch.from_numpy(task.positives)[:, None]
    largest = scores.abs().amax(1)

    def under(bias: torch.Tensor) -> npt.NDArray[np.float64]:
        corrected = scores - bias.float()
        best = corrected.amax(1)
        found = corrected.gather(1, own)[:, 0] >= best - 5e-7 * torch.maximum(best.abs(), largest)
        return found.numpy().astype(np.float64)

    return under


def measured(case: Case, under: Callable[[torch.Tensor], npt.NDArray[np.float64]]) -> dict[str, Any]:
    task, gallery = case.task, case.task.gallery
    biases, agreement = Scores(case.bank, gallery).fitted()
    raw = under(torch.zeros(len(gallery))).mean()
    gains = {name: 100 * float(under(bias).mean() - raw) for name, bias in biases.items()}
    half = 100 * float(under(biases[DEFAULT] / 2).mean() - raw)
    seen = figures(case.bank, gallery, seed=0)
    strength = decided(seen)
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
        "figures": seen,
        "strength": strength,
    }


def run() -> list[dict[str, Any]]:
    rows = []
    for name in EMBEDDING_TASKS:
        scale_free: Any = hits(load(name))
        for case in cases(name):
            scaled = case.task is not load(name)
            rows.append(measured(case, hits(case.task) if scaled else scale_free))
            print(rows[-1]["kind"], rows[-1]["case"], f"{rows[-1]['gains'][DEFAULT]:+.2f}", flush=True)
    rows += [measured(case, hits(case.task)) for case in reranker_cases()]
    return rows


def realised(row: dict[str, Any]) -> float:
    """The gain of following the verdict."""
    return {0.0: 0.0, 0.5: row["gain_of_half"], 1.0: row["gains"][DEFAULT]}[row["strength"]]


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
            [kind, str(len(of[kind])), *(spread([row["gains"][name] for row in of[kind]]) for name in CANDIDATES)]
            for kind in kinds
        ],
    )
    confusion, realised_gain = [], {}
    for kind in kinds:
        counts = [sum(row["strength"] == strength for row in of[kind]) for strength in (1.0, 0.5, 0.0)]
        always, followed = ([act(row) for row in of[kind]] for act in (lambda row: row["gains"][DEFAULT], realised))
        realised_gain[kind] = {
            "cases": len(of[kind]), "apply": counts[0], "half": counts[1], "alone": counts[2],
            "always": float(np.mean(always)), "followed": float(np.mean(followed)), "worst": float(min(followed)),
            "harmed": int(np.sum(np.array(followed) < -BELOW_RAW)),
            "refused_though_it_gains": int(np.sum([r["strength"] == 0 and r["gains"][DEFAULT] > BELOW_RAW for r in of[kind]])),
        }  # fmt: skip
        row = realised_gain[kind]
        confusion.append(
            [kind, *map(str, (row["cases"], *counts)), *(f"{row[key]:+.2f}" for key in ("always", "followed", "worst")),
             str(row["harmed"]), str(row["refused_though_it_gains"])]
        )  # fmt: skip
    below = {
        name: {
            kind: sorted(
                {task: mean for task, mean in by_task(of[kind], name).items() if mean < -BELOW_RAW}.items()
            )
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
        "mean_gain": {name: float(np.mean([row["gains"][name] for row in of[WHOLE]])) for name in CANDIDATES},
        "tasks_below_raw": below,
        "largest_change_by_scale": scale,
        "verdict": realised_gain,
        "own_banks_lose": {kind: realised_gain[kind]["always"] - realised_gain[kind]["followed"] for kind in own},
        "foreign_banks_gain": float(np.mean([realised(row) for row in of[FOREIGN]])),
        "reranker_left_alone": realised_gain[RERANKER]["alone"],
    }
    seen = table(
        ["bank", "two views", "ρ", "reach", "z", "Robin Hood before", "after", "by chance", "bank and gallery alike"],
        [
            [kind, *(extremes([row["figures"][key] for row in of[kind]])
                     for key in ("two_view", "agreement", "reach", "z", "before", "after", "by_chance", "alike"))]
            for kind in kinds
        ],
    )  # fmt: skip
    whole = table(
        ["task", "raw", "ρ", *CANDIDATES],
        [
            [row["case"], f"{row['raw']:.2f}", f"{row['rho']:.2f}", *(f"{row['gains'][name]:+.2f}" for name in CANDIDATES)]
            for row in of[WHOLE]
        ],
    )
    head = ["bank", "banks", "apply", "half", "alone", "gain, always applied", "gain, verdict followed", "worst",
            f"harmed by > {BELOW_RAW}", f"left alone though it gains > {BELOW_RAW}"]  # fmt: skip
    text = "\n\n".join(
        [
            "Points of R@1 over the raw search.",
            whole,
            "Mean gain, and the worst case, by kind of bank.",
            gain_table,
            f"The verdict on {DEFAULT}.",
            table(head, confusion),
            "What the verdict sees: least, median, largest.",
            seen,
            conclusions(facts),
        ]
    )
    return facts, text


def by_task(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    """{task: its mean gain}"""
    tasks = dict.fromkeys(map(task_of, rows))
    return {task: float(np.mean([row["gains"][name] for row in rows if task_of(row) == task])) for task in tasks}


def spread(values: list[float]) -> str:
    return f"{np.mean(values):+.2f} ({min(values):+.2f})"


def extremes(values: list[float]) -> str:
    return " ".join(f"{value:.3f}" for value in (min(values), float(np.median(values)), max(values)))


def conclusions(facts: dict[str, Any]) -> str:
    gains, below = facts["mean_gain"], facts["tasks_below_raw"][DEFAULT]
    harmed = [f"{task} ({kind}: {gain:+.2f})" for kind, pairs in below.items() for task, gain in pairs]
    lost = ", ".join(f"{loss:+.2f} ({kind})" for kind, loss in facts["own_banks_lose"].items())
    lines = [
        f"mean gain over the seven tasks, whole banks: {gains[DEFAULT]:+.2f}; {TODAY}: {gains[TODAY]:+.2f}",
        f"tasks more than {BELOW_RAW} below raw in the mean of the draws: {', '.join(harmed) or 'none'}",
        f"largest change by scale: {facts['largest_change_by_scale'][DEFAULT]:.2f} points",
        f"mean gain with foreign banks if the verdict is followed: {facts['foreign_banks_gain']:+.2f}",
        f"own banks lose against applying always: {lost}",
        f"re-ranker scores left alone: {facts['reranker_left_alone']} of {RERANKER_SEEDS}",
    ]
    return "\n".join(f"- {line}" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from-saved", action="store_true", help="print the tables of the last run again")
    started = time.monotonic()
    if parser.parse_args().from_saved:
        kept = json.loads((RESULTS / "defaults.json").read_text())
        rows = [row | {"strength": decided(row["figures"])} for row in kept["rows"]]
        print(summary(rows)[1])
        return 0
    rows = run()
    facts, text = summary(rows)
    print(text)
    save("defaults", {"environment": environment(started), "asked": ASKED, **facts, "rows": rows}, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
