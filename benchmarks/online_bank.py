"""What it is worth that a bank lives: R@1 as live queries take the places of a static bank's.

    OMP_NUM_THREADS=1 python -m benchmarks.online_bank [task …]

Each task, cut to ITEMS items, is split by items into halves, SPLITS times. The queries of one half are the traffic;
those of the other are asked, of that half's items alone: no query that is asked was ever in a bank, and no item of the
gallery was asked for by the traffic, which would push it aside and flatter. The static bank is as large as the traffic
at most; `banks.online.merge`, as jobs run it, gives 25, 50 and 100% of its places to traffic. Banks: the task's own;
three topics of four of it, as k-means has them, and one; that of another data set of the same dimension and another
encoder, at the own bank's mean length. Intervals are 95% percentile bootstraps over queries, each with its mean over
the splits in which it was asked. Each row also has what `quality.drift` says of the static bank and the query samples.

Then how often drift is seen between halves of one bank, and what sampling costs a search: the time of the
client's hook alone. Only a full run is kept.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.cluster import KMeans

from benchmarks.banks import OTHER_SET, Means, Numbers, as_long_as, cut, outcome_of
from benchmarks.environment import environment, one_thread, save, table
from milvus_hubness.correction.banks.bank import Origins, QueryBank, Vectors
from milvus_hubness.correction.banks.online import Terms, merge
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.estimators import NNN, Blend, Estimator
from milvus_hubness.correction.fitted import initial_state
from milvus_hubness.correction.state import BankReference
from milvus_hubness.jobs.store.ownership import CollectionId
from milvus_hubness.jobs.store.records import OnlineBank
from milvus_hubness.milvus.client.query_samples import Sampler
from milvus_hubness.quality.bank_checks import drift_between
from milvus_hubness.quality.measures import paired_difference
from tests.support.real_data import EMBEDDING_TASKS, Task, load_task

METHODS: dict[str, Estimator] = {"NNN 16, .75": NNN(16, 0.75), "Blend": Blend()}
SHARES = (0.25, 0.5, 1.0)
STEPS = ("static", *(f"{share:.0%}" for share in SHARES))
SPLITS, ITEMS, QUERIES = 5, 4_000, 10_000
RESAMPLES, REPEATS = 40, 20
TOPICS = 4
DAY = 86_400
OWN, TOPICS_BUT_ONE, TOPIC, FOREIGN = KINDS = (
    "own",
    "three topics of four",
    "one topic of four",
    "another data set",
)


def halves(task: Task, seed: int) -> tuple[Task, Numbers, Vectors]:
    """The task of one half of the items, the numbers of its queries, and the queries of the other half."""
    order = np.random.default_rng(seed).permutation(len(task.gallery))
    kept = np.sort(order[: len(order) // 2])
    is_asked = np.isin(task.positives, kept)
    query_vectors = np.flatnonzero(is_asked)
    positives = np.searchsorted(kept, task.positives[query_vectors])
    half = task._replace(
        query=task.query[query_vectors], gallery=task.gallery[kept], positives=positives
    )
    return half, query_vectors, task.query[~is_asked]


def static_banks(name: str, own: Vectors, size: int, seed: int) -> Iterator[tuple[str, Vectors]]:
    """The banks to begin with, of `size` queries or as many as there are."""
    rng = np.random.default_rng(seed)

    def some(vectors: Vectors) -> Vectors:
        return vectors[rng.permutation(len(vectors))[:size]]

    yield OWN, some(own)
    topics = KMeans(TOPICS, n_init=1, random_state=seed).fit_predict(own)
    yield TOPICS_BUT_ONE, some(own[topics != seed % TOPICS])
    yield TOPIC, some(own[topics == seed % TOPICS])
    if name in OTHER_SET:
        yield FOREIGN, as_long_as(own, some(load_task(OTHER_SET[name]).bank))


def online_bank(
    bank: Vectors, samples_collection: Vectors, share: float, seed: int
) -> tuple[Vectors, float]:
    """The bank when traffic has taken that share of its places, and the share it really has."""
    terms = Terms(
        size=len(bank),
        seed_share=1 - share,
        half_life_seconds=DAY,
        duplicate_cosine=0.99,
        seed=seed,
    )
    seeds = Origins.seeds(len(bank), 0)
    sampled = Origins(
        np.arange(len(samples_collection)), np.full(len(samples_collection), 60 * DAY)
    )
    merged = merge(QueryBank(bank), seeds, samples_collection, sampled, terms)
    if merged.bank is None or merged.bank.origins is None:
        raise RuntimeError("no traffic came in")
    return merged.bank.vectors, float((~merged.bank.origins.are_seeds).mean())


def run(name: str) -> dict[str, Any]:
    """{bank: {method: R@1 at every step, and the gain of each over the static bank}}"""
    task = cut(load_task(name), ITEMS, QUERIES)
    means: dict[tuple[str, str], Means] = {}
    told: dict[str, dict[str, list[Any]]] = {}
    for seed in range(SPLITS):
        half, asked, samples_collection = halves(task, seed)
        size = min(len(task.bank), len(samples_collection))
        for kind, bank in static_banks(name, task.bank, size, seed):
            grown = [online_bank(bank, samples_collection, share, seed) for share in SHARES]
            banks = [bank, *(vectors for vectors, _ in grown)]
            told.setdefault(kind, {"places": [], "live": [], "drift": []})
            told[kind]["drift"].append(drift_between(bank, samples_collection, seed=seed))
            told[kind]["places"].append(len(bank))
            told[kind]["live"].append([share for _, share in grown])
            for method, estimator in METHODS.items():
                biases = [
                    estimator.fit(QueryBank(each), gallery=half.gallery).bias(half.gallery)
                    for each in banks
                ]
                hits = outcome_of(half, np.arange(len(half.query)), *biases).values
                of = means.setdefault((kind, method), Means(2 + len(SHARES), len(task.query)))
                of.add(asked, *hits)
    result: dict[str, Any] = {"items": len(task.gallery) // 2, "splits": SPLITS}
    for kind, facts in told.items():
        result[kind] = {
            "places": float(np.mean(facts["places"])),
            "live_share": np.mean(facts["live"], 0).round(3).tolist(),
            "drift": float(np.mean([drift.statistic for drift in facts["drift"]])),
            "fired": sum(drift.fired for drift in facts["drift"]),
        }
        for method in METHODS:
            each = means[kind, method].each
            result[kind][method] = {
                "r1": dict(zip(("raw", *STEPS), each.mean(1).tolist(), strict=True)),
                "static_over_raw": paired_difference(each[0], each[1], resamples=1000)._asdict(),
                "over_static": {
                    step: paired_difference(each[1], each[2 + i], resamples=1000)._asdict()
                    for i, step in enumerate(STEPS[1:])
                },
            }
            shown = {step: round(r1, 1) for step, r1 in result[kind][method]["r1"].items()}
            print(name, "|", kind, "|", method, shown, flush=True)
    return result


def false_alarms(names: list[str]) -> dict[str, Any]:
    """Of random halves of each task's bank, at most 250 queries of row: how often drift fires, and the
    largest statistic."""
    fired, largest = 0, 0.0
    for name in names:
        bank = load_task(name).bank
        for seed in range(RESAMPLES):
            first, second = np.array_split(np.random.default_rng(seed).permutation(len(bank)), 2)
            found = drift_between(bank[first], bank[second], at_most=250, seed=seed)
            fired, largest = fired + found.fired, max(largest, found.statistic)
    return {"resamples": RESAMPLES * len(names), "fired": fired, "largest": largest}


def hook_costs() -> dict[str, float]:
    """µs that the sampler takes of a search of one 768-d query, passed by and sampled: the best of REPEATS
    rounds, as others may use the machine."""
    layout = Layout(768, "COSINE")
    reference = BankReference(collection="b", generation="01", fingerprint="", count=1)
    state = initial_state(
        layout, NNN(16), reference, field="v", suffix="", dtype="float32", source="c"
    )
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((1, 768), np.float32)
    costs = {}
    for what, rate, rounds in (("not sampled", 1e-9, 10_000), ("sampled", 1.0, 900)):
        terms = OnlineBank(
            field="v", profile="default", samples_collection="t", rate=rate, size=10_000, seed_share=0.25,
            half_life_seconds=DAY, duplicate_cosine=0.99,
        )  # fmt: skip
        taken = []
        for _ in range(REPEATS):
            sampler = Sampler(lambda samples_collection, samples: None)
            began = time.perf_counter()
            for _ in range(rounds):
                sampler.offer(terms, CollectionId(name="t"), state, queries)
            taken.append(time.perf_counter() - began)
            sampler.close()
        costs[what] = round(1e6 * min(taken) / rounds, 2)
    return costs


def markdown(
    results: dict[str, dict[str, Any]], alarms: dict[str, Any], costs: dict[str, float]
) -> str:
    parts = [
        "R@1 (%) with the static bank, and when live queries hold 25, 50 and 100% of its places; the gain of "
        "100% over the static bank with its 95% interval. Queries that are asked were never in a bank."
    ]
    for method in METHODS:
        rows = []
        for name, cells in results.items():
            for kind in KINDS:
                if kind not in cells:
                    continue
                cell = cells[kind][method]
                gain = cell["over_static"][STEPS[-1]]
                places = f"{cells[kind]['places']:,.0f}"
                shown = [f"{cell['r1'][step]:.1f}" for step in ("raw", *STEPS)]
                interval = f"{gain['estimate']:+.1f} ({gain['low']:+.1f} to {gain['high']:+.1f})"
                drift = f"{cells[kind]['drift']:.2%}, {cells[kind]['fired']} of {SPLITS}"
                rows.append([name, kind, places, *shown, interval, drift])
        head = [
            "task",
            "bank it began with",
            "places",
            "raw",
            *STEPS,
            "gain of 100%",
            "drift, fired",
        ]
        parts.append(f"**{method}**\n\n" + table(head, rows) + "\n\n" + means_of(results, method))
    fired = [
        f"{sum(each[kind]['fired'] for each in there)} of {SPLITS * len(there)} times for {kind}"
        for kind in KINDS
        if (there := [each for each in results.values() if kind in each])
    ]
    parts.append(
        f"Drift fired {', '.join(fired)}; between halves of one bank {alarms['fired']} of "
        f"{alarms['resamples']} times, the statistic {alarms['largest']:.2%} at most."
    )
    parts.append(
        "What the client's hook takes of a search of one 768-d query where the bank lives: "
        + ", ".join(f"{cost:.1f} µs {what}" for what, cost in costs.items())
        + "."
    )
    return "\n\n".join(parts)


def means_of(results: dict[str, dict[str, Any]], method: str) -> str:
    rows = []
    for kind in KINDS:
        cells = [each[kind][method] for each in results.values() if kind in each]
        if cells:
            shown = [
                f"{np.mean([cell['r1'][step] for cell in cells]):.1f}" for step in ("raw", *STEPS)
            ]
            gains = [cell["over_static"][STEPS[-1]]["estimate"] for cell in cells]
            rows.append(
                [kind, str(len(cells)), *shown, f"{np.mean(gains):+.1f}", f"{min(gains):+.1f}"]
            )
    head = ["mean over tasks", "tasks", "raw", *STEPS, "gain of 100%", "lowest"]
    return table(head, rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", metavar="task", help="only these")
    chosen = parser.parse_args().tasks or list(EMBEDDING_TASKS)
    one_thread()
    started = time.monotonic()
    costs = hook_costs()
    results = {name: run(name) for name in chosen}
    alarms = false_alarms(chosen)
    text = markdown(results, alarms, costs)
    print(text)
    if chosen == list(EMBEDDING_TASKS):
        facts = {
            "environment": environment(started),
            "hook_microseconds": costs,
            "false_alarms": alarms,
        }
        save("online_bank", {**facts, "tasks": results}, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
