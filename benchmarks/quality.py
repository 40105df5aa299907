"""R@1 of every method on every real set, with 95% confidence intervals, against reference.json.

    python -m benchmarks.quality [task …]

HNN is the hubless nearest neighbour (Huang et al., ACL 2019) with ε = 1/30: the queries of the bank are assigned to the
items with entropy, and all items get as many. It is a Sinkhorn iteration that runs to its end.

Recall is in percent over all test queries, the intervals are percentile bootstraps over them. Exits with 1
where a cell that the reference has too is off by more than 0.15 points of R@1 or 0.02 of skewness of N_10.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np

from benchmarks.baselines import BASELINES
from benchmarks.environment import environment, one_thread, save, table
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import (
    CSLS,
    NNN,
    Blend,
    DistributionNormalization,
    DualBankSinkhorn,
    DualInvertedSoftmax,
    Estimator,
    InvertedSoftmax,
    Sinkhorn,
)
from milvus_hubness.correction.rerank import DynamicGate
from milvus_hubness.quality.measures import (
    confidence_interval,
    k_occurrence,
    paired_difference,
    skewness,
)
from milvus_hubness.quality.outcomes import assess
from milvus_hubness.quality.right_items import RightItems
from tests.support.real_data import EMBEDDING_TASKS, TASKS, Task, load_task, reference

RECALL_TOLERANCE, SKEWNESS_TOLERANCE = 0.15, 0.02
BANK_OF_BLEND = 9000

METHODS: dict[str, Estimator | None] = {
    "raw": None,
    "NNN 16, .75": NNN(16, 0.75),
    "NNN 32, .75": NNN(32, 0.75),
    "NNN 128, .75": NNN(128, 0.75),
    "CSLS 10": CSLS(10),
    "IS .05": InvertedSoftmax(0.05),
    "IS .02": InvertedSoftmax(0.02),
    "DIS .05": InvertedSoftmax(0.05),
    "DN .5": DistributionNormalization(0.5),
    "DualIS .05": DualInvertedSoftmax(0.05, 0.05),
    "DualIS": DualInvertedSoftmax(),
    "SN .02": Sinkhorn(0.02),
    "SN .02, 64 nearest": Sinkhorn(0.02, neighbors=64),
    "SN .03": Sinkhorn(0.03),
    "SN": Sinkhorn(),
    "HNN 1/30": Sinkhorn(1 / 30, iterations=1000),
    "DBSN .02": DualBankSinkhorn(0.02),
    "Blend": Blend(),
}
GATED = "DIS .05"
"""The method of which only queries whose raw best item is the nearest of a bank query are corrected."""
ALL = [*METHODS, *BASELINES]
SHORT_BANK = ("Blend", "NNN 16, .75", "SN .03", "SN")
IN_REFERENCE = {
    "raw": "raw",
    "NNN 32, .75": "nnn k=32 a=.75",
    "NNN 128, .75": "nnn k=128 a=.75",
    "CSLS 10": "csls k=10",
    "IS .05": "is tau=.05",
    "IS .02": "is tau=.02",
    "DIS .05": "dis k=1 tau=.05",
    "DN .5": "dn l=.5",
    "DualIS .05": "dualis t1=t2=.05",
    "SN .02": "sn tau=.02 T=10",
    "DBSN .02": "dbsn tau=.02 T=10",
}


def run(name: str) -> dict[str, dict[str, Any]]:
    """{method: its cell}, for the methods that the task has the banks for."""
    task = load_task(name)
    methods = {
        method: estimator
        for method, estimator in METHODS.items()
        if estimator is None or not estimator.needs_target_bank or task.target_bank is not None
    }
    biases, seconds = [], {}
    for method, estimator in methods.items():
        started = time.monotonic()
        biases.append(bias_of(task, estimator, BANK_OF_BLEND if method in SHORT_BANK else None))
        seconds[method] = time.monotonic() - started
    positives = RightItems.of(task.positives)
    outcome = assess(task.query, task.gallery, biases, positives)
    hits = dict(zip(methods, outcome.values, strict=True))
    found = dict(zip(methods, outcome.retrieved, strict=True))
    for method, baseline in BASELINES.items():
        started = time.monotonic()
        changed, bias = baseline(task)
        seconds[method] = time.monotonic() - started
        outcome = assess(changed.query, changed.gallery, [bias], positives)
        hits[method], found[method] = outcome.values[0], outcome.retrieved[0]
    gate = DynamicGate().activated(task.bank, task.gallery)[found["raw"][:, 0]]
    hits[GATED] = np.where(gate, hits[GATED], hits["raw"])
    found[GATED] = np.where(gate[:, None], found[GATED], found["raw"])
    cells = {}
    for method in hits:
        recall = confidence_interval(100 * hits[method], resamples=1000)
        cells[method] = {
            "r1": recall.estimate,
            "low": recall.low,
            "high": recall.high,
            "skewness": skewness(k_occurrence(found[method], len(task.gallery), 10)),
            "seconds": seconds[method],
        }
        if method != "raw":
            gain = paired_difference(100 * hits["raw"], 100 * hits[method], resamples=1000)
            cells[method]["gain"] = gain._asdict()
    print(name, {method: f"{cell['r1']:.2f}" for method, cell in cells.items()}, flush=True)
    return cells


def bias_of(task: Task, estimator: Estimator | None, bank_size: int | None) -> Any:
    if estimator is None:
        return np.zeros(len(task.gallery), np.float32)
    bank = QueryBank(task.bank[:bank_size])
    return estimator.fit(bank, gallery=task.gallery, target_bank=task.target_bank).bias(
        task.gallery
    )


def differences(results: dict[str, dict[str, dict[str, Any]]]) -> tuple[int, list[str]]:
    """How many cells the reference has too, and which of them are off."""
    compared, off = 0, []
    for name, cells in results.items():
        for method, cell in cells.items():
            if IN_REFERENCE.get(method) not in reference()[name]:
                continue
            r1, skew = reference()[name][IN_REFERENCE[method]]
            compared += 1
            if (
                abs(cell["r1"] - r1) > RECALL_TOLERANCE
                or abs(cell["skewness"] - skew) > SKEWNESS_TOLERANCE
            ):
                off.append(
                    f"{name}, {method}: R@1 {cell['r1']:.2f} and skewness {cell['skewness']:.2f}, not {r1} and {skew}"
                )
    return compared, off


def markdown(results: dict[str, dict[str, dict[str, Any]]], means: dict[str, float]) -> str:
    rows = []
    for method in ALL:
        cells = [results[name].get(method) for name in results]
        shown = [f"{c['r1']:.1f} ({c['low']:.1f}–{c['high']:.1f})" if c else "–" for c in cells]
        rows.append([method, *shown, f"{means[method]:.1f}" if method in means else "–"])
    return (
        "R@1 (%) with 95% bootstrap intervals. The mean is over the seven embedding tasks; "
        "methods without a number have the default temperatures; "
        f"{', '.join(SHORT_BANK)} see banks cut at {BANK_OF_BLEND:,}.\n\n"
        + table(["method", *results, "mean of seven"], rows)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "tasks",
        nargs="*",
        metavar="task",
        help="a task of tests/support/real_data.py; all unless given",
    )
    names = parser.parse_args().tasks or list(TASKS)
    one_thread()
    started = time.monotonic()
    results = {name: run(name) for name in names}
    embeddings = [name for name in EMBEDDING_TASKS if name in results]
    means = {
        method: float(np.mean([results[name][method]["r1"] for name in embeddings]))
        for method in ALL
        if len(embeddings) == len(EMBEDDING_TASKS)
        and all(method in results[name] for name in embeddings)
    }
    compared, off = differences(results)
    text = markdown(results, means)
    print(text)
    if means:
        print(
            f"mean R@1 of Blend over the seven embedding tasks: {means['Blend']:.2f} (raw {means['raw']:.2f})"
        )
    print("\n".join(off) or f"all {compared} cells equal the reference")
    if names == list(TASKS):
        kept = {
            "environment": environment(started),
            "means": means,
            "compared": compared,
            "off": off,
        }
        save("quality", kept | {"tasks": results}, text)
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
