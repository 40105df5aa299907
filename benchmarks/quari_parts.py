"""QuARI as published against two linear maps, for benchmarks.quari: three tasks, three seeds each.

All rows have the same pairs; rows of the network have the same rank and layers, and the last has twelve times the
epochs. The network is small, so that one core trains it in under an hour: a width of 512 over 64 pairs of tokens would
take weeks. The validation pairs choose the epoch and, of maps, one of two learning rates. The second of these rates,
and the last row, were added after a first run; the test pairs chose nothing else.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.environment import table
from milvus_hubness.extras.quari.pairs import Pairs
from milvus_hubness.extras.quari.settings import QuariConfig, TrainingSettings
from milvus_hubness.extras.quari.train import train, validate
from milvus_hubness.quality.measures import paired_difference
from tests.support.real_data import load_task

LEARNED, HELD, TEST = 2000, 500, 3000
SEEDS = (0, 1, 2)
SMALL = {"form": "published", "rank": 4, "layers": 1}
RATE = TrainingSettings(
    epochs=5,
    patience=5,
    batch=125,
    learning_rate=3e-4,
    least_rate=6e-6,
    temperature=0.04,
    noise=0.5,
)
MAPS = dataclasses.replace(RATE, epochs=16, patience=16, weight_decay=0.0)
THEIRS = dataclasses.replace(RATE, learning_rate=5e-4, least_rate=1e-5, noise=1.0)
MAP_RATES = (3e-4, 1e-3)
MAPS_ALONE, LESS_NOISE = "two linear maps", "published, width 64, our noise, 60 epochs"
GAIN = "over two maps, R@1"

PARTS: dict[str, tuple[dict[str, Any], TrainingSettings]] = {
    MAPS_ALONE: ({"form": "linear"}, MAPS),
    "published": (SMALL, THEIRS),
    LESS_NOISE: ({**SMALL, "width": 64}, dataclasses.replace(THEIRS, epochs=60, patience=60)),
}


def pairs_of(task_name: str) -> tuple[Pairs, Pairs, Pairs]:
    """Pairs to learn from, to validate on and to test on, without an item in common."""
    task, rng = load_task(task_name), np.random.default_rng(0)
    if task.target_bank is not None:
        rest, test = Pairs(task.bank, task.target_bank), Pairs(task.query, task.gallery)
    else:
        rest, test = Pairs(task.query, task.gallery, task.positives).split(0.3, 0)
    return (
        *(part(rest, chosen) for chosen in _chosen(rest, rng)),
        part(test, rng.permutation(len(test))[:TEST]),
    )


def _chosen(pairs: Pairs, rng: np.random.Generator) -> list[np.ndarray]:
    """Numbers of about LEARNED and HELD pairs; pairs of one item are together."""
    place = np.empty(len(pairs.gallery), np.int64)
    place[rng.permutation(len(place))] = np.arange(len(place))
    order = np.argsort(place[pairs.answers], kind="stable")
    cut = np.searchsorted(place[pairs.answers][order], place[pairs.answers][order[LEARNED]])
    return [order[:cut], order[cut : cut + HELD]]


def part(pairs: Pairs, chosen: np.ndarray) -> Pairs:
    """These pairs and the items that answer them."""
    items, answers = np.unique(pairs.answers[chosen], return_inverse=True)
    return Pairs(pairs.queries[chosen], pairs.gallery[items], answers)


def measured(ranks: np.ndarray) -> dict[str, float]:
    return {"R@1": float((ranks == 1).mean()), "MRR": float((1 / ranks).mean())}


def parts(task_name: str, results: dict[str, Any], finished: Callable[[], None]) -> None:
    """Fill `results` with the runs of a task that are not there; `finished` is called after each."""
    learned, held, test = pairs_of(task_name)
    raw = test.queries @ test.gallery.T
    own = raw[np.arange(len(test)), test.answers]
    results.setdefault(
        "pairs", {"learned": len(learned), "validation": len(held), "test": len(test)}
    )
    results.setdefault("gallery", len(test.gallery))
    results.setdefault("raw", measured((raw >= own[:, None]).sum(1)))
    runs = results.setdefault("runs", {})
    for name, (sizes, settings) in PARTS.items():
        for seed in SEEDS:
            if f"{name}, seed {seed}" in runs:
                continue
            started = time.monotonic()
            config = QuariConfig(learned.dim, **sizes)
            if name == LESS_NOISE:  # As large as that of the maps, which is divided by √d.
                settings = dataclasses.replace(settings, noise=RATE.noise / math.sqrt(learned.dim))
            rates = MAP_RATES if config.form == "linear" else (settings.learning_rate,)
            tried = [
                dataclasses.replace(
                    settings,
                    seed=seed,
                    learning_rate=rate,
                    least_rate=rate * settings.least_rate / settings.learning_rate,
                )
                for rate in rates
            ]
            trainings = [
                train(learned, config, one, validation=held, device="cpu") for one in tried
            ]
            trained = max(trainings, key=lambda one: one.history[one.best_epoch].mrr)
            ranks = validate(trained.network(), test)
            runs[f"{name}, seed {seed}"] = {
                **measured(ranks),
                "best epoch": trained.best_epoch,
                "learning rate": trained.settings.learning_rate,
                "validation": trained.history[trained.best_epoch]._asdict(),
                "seconds": round(time.monotonic() - started, 1),
                "first": np.packbits(ranks == 1).tobytes().hex(),
            }
            print(
                task_name,
                name,
                seed,
                measured(ranks),
                runs[f"{name}, seed {seed}"]["seconds"],
                flush=True,
            )
            finished()


def _first(task: dict[str, Any], run: str) -> np.ndarray:
    """(n,) for each test query, whether a run ranks its answer first."""
    packed = np.frombuffer(bytes.fromhex(task["runs"][run]["first"]), np.uint8)
    return np.unpackbits(packed)[: task["pairs"]["test"]]


def summary(task: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For each part: R@1 and MRR, mean and least and greatest of the seeds, and R@1 over two maps."""
    rows = {}
    first = {
        name: np.mean([_first(task, f"{name}, seed {seed}") for seed in SEEDS], axis=0)
        for name in PARTS
        if all(f"{name}, seed {seed}" in task["runs"] for seed in SEEDS)
    }
    for name, hits in first.items():
        runs = [task["runs"][f"{name}, seed {seed}"] for seed in SEEDS]
        rows[name] = {
            measure: {"mean": float(np.mean(values)), "least": min(values), "most": max(values)}
            for measure in ("R@1", "MRR")
            for values in ([run[measure] for run in runs],)
        }
        if name != MAPS_ALONE and MAPS_ALONE in first:
            rows[name][GAIN] = paired_difference(first[MAPS_ALONE], hits)._asdict()
    return rows


def parts_table(tasks: dict[str, Any]) -> str:
    """The table of all tasks: R@1 in %, mean and range of the seeds, and the gain over two maps with 95% intervals."""
    head = [
        "R@1, mean (range of three seeds)",
        *(cell for task in tasks for cell in (task, "over two maps")),
    ]
    rows = [
        [
            "raw",
            *(cell for task in tasks.values() for cell in (f"{100 * task['raw']['R@1']:.1f}", "")),
        ]
    ]
    summaries = [summary(task) for task in tasks.values()]
    for name in PARTS:
        cells = []
        for one in summaries:
            row = one.get(name, {})
            cells.append(_range(row.get("R@1"), ("mean", "least", "most"), ".1f"))
            cells.append(_range(row.get(GAIN), ("estimate", "low", "high"), "+.1f"))
        rows.append([name, *cells])
    return table(head, rows)


def _range(values: dict[str, float] | None, names: tuple[str, ...], form: str) -> str:
    return (
        "{} ({} … {})".format(*(format(100 * values[name], form) for name in names))
        if values
        else ""
    )
