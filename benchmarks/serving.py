"""Where each way of serving corrected searches wins: biases in the vectors, or beside them.

    python -m benchmarks.serving

In memory: the share of the exact corrected top 10 outside a query's N raw candidates, banks uncut, on every task of
embeddings and on caption_translation with its gallery cut to three sizes; asked are all queries whose items are there.
Through databases: caption_translation under HNSW, 1,000 queries of it in batches of 100, and the first 20 of each batch
one by one too, the systems taking turns in random order. Every search names the key as its output field: Milvus Lite,
asked for none, sends all of every candidate, vectors included. A search for N candidates needs ef ≥ N, so N is what it
gets where less was asked for. Exits with 1 where a bound does not hold; nothing is kept where the server cannot run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pymilvus import DataType, MilvusClient
from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from benchmarks.environment import environment, one_thread, save, table
from milvus_hubness import (
    NNN,
    Beside,
    Blend,
    HubnessClient,
    MilvusStore,
    QueryBank,
    Recipe,
    connect,
    enable,
    migrate,
    plan_correction,
)
from milvus_hubness.basics.defaults import MAX_MISS_RATE
from milvus_hubness.correction.banks.bank import Vectors
from milvus_hubness.correction.estimators import Estimator
from milvus_hubness.jobs.enable.plan import MEASURED_QUERIES
from milvus_hubness.quality.trials import enough_candidates, missed_share, raw_ranks
from tests.support.real_data import EMBEDDING_TASKS, Task, fit_on, load_task
from tests.support.servers import MilvusServer, lite_uri

CANDIDATES = (50, 100, 200, 500)
ESTIMATORS: dict[str, Estimator] = {"NNN 32, .75": NNN(32, 0.75), "Blend": Blend()}
SERVED_TASK, SERVED = "caption_translation", "NNN 32, .75"
GALLERIES = (1_000, 3_500, 14_085)

HNSW = {"M": 16, "efConstruction": 200}
EFS = (64, 200)
LIMIT = 10
FEW = 50
ROUNDS, BATCH, SINGLE = 10, 100, 20
COMPACTION_SECONDS = 120
TIE = 1e-6
LEAST_RECALL = 0.98

PLAIN = "captions"
RAW, IN_VECTORS = "raw", "in the vectors"
OVERFETCHED = "raw, all candidates fetched"
SIDE = "beside, in a side collection"
BESIDE = (SIDE,)

Search = Callable[[Sequence[Vectors], int], Any]


# -- in memory ------------------------------------------------------------------------------------------


def cut(task: Task, items: int) -> Task:
    """A random part of a gallery whose items each have one query, and these."""
    kept = np.sort(np.random.default_rng(0).permutation(len(task.gallery))[:items])
    return task._replace(
        query=task.query[kept], gallery=task.gallery[kept], positives=np.arange(items)
    )


def missed(task: Task) -> dict[str, Any]:
    """For each estimator what N candidates miss, and how many `enable`, asking the bank, would take."""
    cells = {}
    for name, estimator in ESTIMATORS.items():
        fitted = estimator.fit(
            QueryBank(task.bank), gallery=task.gallery, target_bank=task.target_bank
        )
        bias = fitted.bias(task.gallery)
        ranks = raw_ranks(task.query, task.gallery, bias)
        search_request = task.bank[:: max(1, len(task.bank) // MEASURED_QUERIES)]
        of_bank = raw_ranks(search_request, task.gallery, bias)
        cells[name] = {
            "missed": {n: missed_share(ranks, n) for n in CANDIDATES},
            "missed_by_bank_queries": {n: missed_share(of_bank, n) for n in CANDIDATES},
            "enough": enough_candidates(ranks, MAX_MISS_RATE),
            "taken": enough_candidates(of_bank, MAX_MISS_RATE),
        }
    row = {
        "items": len(task.gallery),
        "queries": len(task.query),
        "bank": len(task.bank),
        "cells": cells,
    }
    print({name: cell["missed"] for name, cell in cells.items()}, row["items"], "items", flush=True)
    return row


def all_missed() -> list[dict[str, Any]]:
    rows = []
    for name in EMBEDDING_TASKS:
        task = load_task(name)
        sizes = GALLERIES if name == SERVED_TASK else (len(task.gallery),)
        rows += [
            {"task": name} | missed(cut(task, n) if n < len(task.gallery) else task) for n in sizes
        ]
    return rows


# -- through databases ----------------------------------------------------------------------------------


class Truth:
    """The queries that are asked, and what the exact corrected search answers."""

    def __init__(self) -> None:
        task = load_task(SERVED_TASK)
        asked = np.sort(np.random.default_rng(0).permutation(len(task.query))[: ROUNDS * BATCH])
        self.queries, self.gallery = task.query[asked], task.gallery
        self.right = task.gallery[task.positives[asked]]
        self.raw = self.queries @ task.gallery.T
        self.corrected = self.raw - fit_on(SERVED_TASK, ESTIMATORS[SERVED]).bias(task.gallery)
        self.tenth = np.partition(self.corrected, -LIMIT, axis=1)[:, -LIMIT]

    def recall(self, found: Sequence[npt.NDArray[np.int64]]) -> float:
        """Of the exact corrected top 10, equal scores being equally good."""
        good = [
            (scores[ids] >= tenth - TIE).sum()
            for scores, ids, tenth in zip(self.corrected, found, self.tenth, strict=True)
        ]
        return float(np.mean(good) / LIMIT)

    def r1(self, first: npt.NDArray[np.int64]) -> float:
        """In percent; an item with the vector of the right one is right too."""
        return 100 * float((self.gallery[first] == self.right).all(axis=1).mean())

    def exact(self) -> dict[str, float]:
        return {
            "raw_r1": self.r1(self.raw.argmax(1)),
            "corrected_r1": self.r1(self.corrected.argmax(1)),
            "raw_recall": self.recall(list(np.argsort(-self.raw, axis=1)[:, :LIMIT])),
        }


@dataclass
class System:
    """One way to ask. candidates: N, None where nothing is over-fetched."""

    name: str
    candidates: int | None
    search: Search
    found: list[npt.NDArray[np.int64]] = field(default_factory=list)
    single: list[float] = field(default_factory=list)
    batch: list[float] = field(default_factory=list)

    def ef(self, asked: int) -> int:
        return max(asked, self.candidates or 0)

    def ask(self, queries: Vectors, ef: int) -> tuple[float, list[npt.NDArray[np.int64]]]:
        """Milliseconds, and the first ten ids of each query."""
        data = list(queries)
        started = time.perf_counter()
        results = self.search(data, self.ef(ef))
        took = time.perf_counter() - started
        return 1000 * took, [np.array(hits.ids[:LIMIT], np.int64) for hits in results]

    def round(self, queries: Vectors, ef: int) -> None:
        self.single.append(
            statistics.median(self.ask(one[None], ef)[0] for one in queries[:SINGLE])
        )
        took, found = self.ask(queries, ef)
        self.batch.append(took)
        self.found += found


def fill(client: MilvusClient, name: str, items: Vectors) -> None:
    """A loaded collection under HNSW."""
    schema = client.create_schema(enable_dynamic_field=False)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=items.shape[1])
    index = client.prepare_index_params("vector", index_type="HNSW", metric_type="IP", params=HNSW)
    client.create_collection(name, schema=schema, index_params=index)
    for start in range(0, len(items), 1_000):
        part = items[start : start + 1_000]
        client.insert(name, [{"id": start + i, "vector": vector} for i, vector in enumerate(part)])


def settle(store: MilvusStore, name: str) -> None:
    """Rid of what was overwritten, indexed, and loaded as that."""
    store.client.flush(name)
    job = store.client.compact(name)
    unfinished = retry_if_result(lambda state: state != "Completed")
    Retrying(retry=unfinished, wait=wait_fixed(0.2), stop=stop_after_delay(COMPACTION_SECONDS))(
        store.client.get_compaction_state, job
    )
    store.flush(name)
    store.client.release_collection(name)
    store.client.load_collection(name)


def correct(store: MilvusStore) -> dict[str, Any]:
    """All ways at once; the number of candidates that `enable` takes, and how long each took."""
    bank, estimator, seconds = QueryBank(load_task(SERVED_TASK).bank), ESTIMATORS[SERVED], {}
    started = time.monotonic()
    done = enable(store, plan_correction(store, PLAIN, Recipe(bank, estimator=estimator), Beside()))
    seconds[SIDE] = time.monotonic() - started
    started = time.monotonic()
    target = migrate(store, plan_correction(store, PLAIN, Recipe(bank, estimator=estimator))).target
    seconds[IN_VECTORS] = time.monotonic() - started
    for collection in (PLAIN, target, done.side_collection):
        settle(store, collection)
    return {"target": target, "candidates": done.candidates, "seconds_to_correct": seconds}


def searching(client: MilvusClient, collection: str, limit: int = LIMIT) -> Search:
    return lambda data, ef: client.search(
        collection,
        data=data,
        limit=limit,
        output_fields=["id"],
        search_params={"params": {"ef": ef}},
    )


def systems(uri: str, store: MilvusStore, target: str, taken: int) -> Iterator[System]:
    """Those beside once with few candidates and once with as many as `enable` took."""
    plain = connect(uri, create=True)
    yield System(RAW, None, searching(plain, PLAIN))
    yield System(IN_VECTORS, None, searching(remembering(uri, LIMIT, target), target))
    for candidates in (FEW, taken):
        yield System(OVERFETCHED, candidates, searching(plain, PLAIN, candidates))
        state = store.info(PLAIN).state
        reranking = state.reranking.model_copy(update={"candidates": candidates})
        changed = state.model_copy(update={"reranking": reranking})
        store.write_property(PLAIN, state.property_name, changed)
        client = remembering(uri, candidates, PLAIN)
        yield System(SIDE, candidates, searching(client, PLAIN))


def remembering(uri: str, candidates: int, *collections: str) -> HubnessClient:
    """A client that has asked these collections for their state, and does not ask again."""
    client = HubnessClient(uri, state_ttl=float("inf"))
    for collection in collections:
        searching(client, collection)([load_task(SERVED_TASK).query[0]], candidates)
    return client


def serve(uri: str, truth: Truth) -> dict[str, Any]:
    """Every system on one database, at every ef."""
    client = connect(uri)
    store = MilvusStore(client)
    fill(client, PLAIN, truth.gallery)
    store.flush(PLAIN)
    done = correct(store)
    asked = list(systems(uri, store, done["target"], done["candidates"]))
    result = {
        "version": client.get_server_version(),
        "load_average": os.getloadavg(),
        **done,
    }
    print(result, flush=True)
    order = np.random.default_rng(0)
    cells = []
    for ef in EFS:
        for number in range(ROUNDS):
            queries = truth.queries[number * BATCH : (number + 1) * BATCH]
            for which in order.permutation(len(asked)):
                asked[which].round(queries, ef)
        cells += measured(asked, ef, truth)
    return {**result, "cells": cells}


def measured(asked: Sequence[System], ef: int, truth: Truth) -> list[dict[str, Any]]:
    """A cell of each system, ratios as medians over the rounds; what was measured is then forgotten."""
    base = {
        each.name: (each.single, each.batch) for each in asked if each.name in (RAW, IN_VECTORS)
    }
    cells = [
        {
            "system": each.name,
            "ef_asked": ef,
            "ef": each.ef(ef),
            "candidates": each.candidates,
            "recall": truth.recall(each.found),
            "r1": truth.r1(np.array([ids[0] for ids in each.found])),
            "single_ms": statistics.median(each.single),
            "single_over": {name: ratio(each.single, single) for name, (single, _) in base.items()},
            "batch_ms": statistics.median(each.batch),
            "batch_over": {name: ratio(each.batch, batch) for name, (_, batch) in base.items()},
        }
        for each in asked
    ]
    for each in asked:
        each.found, each.single, each.batch = [], [], []
    return cells


def ratio(times: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(times, others, strict=True))


# -- what comes of it -----------------------------------------------------------------------------------


class Found:
    """The cells of all databases, picked by system."""

    def __init__(self, served: dict[str, dict[str, Any]]) -> None:
        self.served = served
        self.taken = max(database["candidates"] for database in served.values())

    def cells(
        self,
        *names: str,
        ef: int | None = None,
        candidates: int | None = None,
        databases: Sequence[str] | None = None,
    ) -> list[dict[str, Any]]:
        return [
            cell
            for database in databases or self.served
            for cell in self.served[database]["cells"]
            if cell["system"] in names
            and ef in (None, cell["ef_asked"])
            and candidates == cell["candidates"]
        ]

    def slowdown(self, database: str, name: str, candidates: int | None) -> str:
        """Over the raw search: of one query / of a batch."""
        cells = self.cells(name, candidates=candidates, databases=[database])
        kinds = ("single_over", "batch_over")
        return (
            " / ".join(span([cell[kind][RAW] for cell in cells]) for kind in kinds)
            if cells
            else "–"
        )

    def reranking(self, *, ef: int | None = None) -> list[dict[str, Any]]:
        """Of the ways beside the vectors, as `enable` sets them up."""
        return self.cells(*BESIDE, ef=ef, candidates=self.taken)


def broken(rows: list[dict[str, Any]], found: Found) -> list[str]:
    """The bounds that do not hold."""
    faults = []
    for name in ESTIMATORS:
        shares = [row["cells"][name]["missed"][FEW] for row in rows if row["task"] == SERVED_TASK]
        if shares != sorted(shares) or shares[-1] * GALLERIES[0] >= shares[0] * GALLERIES[-1]:
            faults.append(
                f"{name}: what {FEW} candidates miss does not grow more slowly than the gallery"
            )
        for row in rows:
            cell = row["cells"][name]
            if cell["taken"] < cell["enough"]:
                faults.append(
                    f"{row['task']}, {name}: enable takes {cell['taken']}, not {cell['enough']}"
                )
    for cell in found.reranking():
        for kind in ("single_over", "batch_over"):
            if cell[kind][IN_VECTORS] <= 1:
                faults.append(
                    f"{kind} of {cell['system']}, ef {cell['ef']}: as fast as in the vectors"
                )
    for ef in EFS:
        for one in (*found.cells(IN_VECTORS, ef=ef), *found.reranking(ef=ef)):
            if one["recall"] < LEAST_RECALL:
                faults.append(f"{one['system']}, ef {one['ef']}: recall@10 {one['recall']:.3f}")
    return faults


def span(values: Sequence[float], digits: int = 1) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low}–{high}"


def conclusion(rows: list[dict[str, Any]], found: Found, exact: dict[str, float]) -> str:
    inside, taken = found.cells(IN_VECTORS), found.taken
    ways = [(IN_VECTORS, None), *((name, n) for n in (FEW, taken) for name in BESIDE)]
    slowdowns = [
        [name, str(n or "–"), *(found.slowdown(database, name, n) for database in found.served)]
        for name, n in ways
    ]
    lines = [
        f"- **Latency: in the vectors.** Multiples of the raw search's time, one query / {BATCH} at once, at "
        f"ef {' and '.join(map(str, EFS))}:\n\n{table(['biases', 'N', *found.served], slowdowns)}\n"
    ]
    for ef in EFS:
        cells, others = found.cells(IN_VECTORS, ef=ef), found.reranking(ef=ef)
        few = found.cells(*BESIDE, ef=ef, candidates=FEW)
        ours, theirs = ([cell["recall"] for cell in each] for each in (cells, others))
        best = (
            "in the vectors"
            if min(ours) > max(theirs)
            else "beside the vectors"
            if min(theirs) > max(ours)
            else "neither"
        )
        lines.append(
            f"- **Recall@10 of the corrected ranking at ef {ef}: {best}.** In the vectors {span(ours, 3)}; "
            f"beside them {span(theirs, 3)} with {taken} candidates (ef {others[0]['ef']}) and "
            f"{span([cell['recall'] for cell in few], 3)} with {FEW}."
        )
    corrected = [*inside, *found.cells(*BESIDE, candidates=FEW), *found.reranking()]
    lines.append(
        f"- R@1 of the right item: {span([cell['r1'] for cell in corrected])} whichever way "
        f"(exactly {exact['corrected_r1']:.1f}, raw {exact['raw_r1']:.1f})."
    )
    shares = {
        n: [row["cells"][SERVED]["missed"][n] for row in rows if row["task"] == SERVED_TASK]
        for n in CANDIDATES[:2]
    }
    grown = " and ".join(
        f"{' / '.join(f'{100 * share:.1f}' for share in each)}% beyond {n}"
        for n, each in shares.items()
    )
    sizes = " / ".join(f"{size:,}" for size in GALLERIES)
    lines.append(
        f"- What candidates miss grows with the gallery, more slowly than it: of the top 10 at {sizes} items "
        f"{grown} candidates ({SERVED})."
    )
    return "\n".join(lines)


def markdown(rows: list[dict[str, Any]], found: Found, exact: dict[str, float]) -> str:
    head = [
        "task",
        "items",
        "queries",
        "bank",
        "method",
        *(f"N = {n}" for n in CANDIDATES),
        "`enable` takes",
    ]
    lines = [
        [
            row["task"],
            *(f"{row[size]:,}" for size in ("items", "queries", "bank")),
            name,
            *(f"{100 * share:.2f}" for share in cell["missed"].values()),
            str(cell["taken"]),
        ]
        for row in rows
        for name, cell in row["cells"].items()
    ]
    parts = [
        f"## Where each wins\n\n{conclusion(rows, found, exact)}",
        "## Outside the candidates\n\nShare (%) of the exact corrected top 10 outside N raw candidates, and "
        f"the N beyond which at most {100 * MAX_MISS_RATE:g}% of that of the bank's own queries lies.\n\n"
        f"{table(head, lines)}",
        f"## Through databases\n\n{SERVED_TASK}, {GALLERIES[-1]:,} items, HNSW (M {HNSW['M']}, "
        f"efConstruction {HNSW['efConstruction']}), {SERVED}; recall@10 of the exact corrected top 10 "
        f"and R@1 (%) over {ROUNDS * BATCH:,} queries. Times in milliseconds, medians of {ROUNDS} rounds: "
        f"{BATCH} queries at once, and the median of {SINGLE} one by one. × raw and × vectors: over the raw "
        "search of a plain client and over biases in the vectors, at the same ef asked for.",
    ]
    head = ["system", "ef", "N", "recall@10", "R@1", "one query", "× raw", "× vectors"]
    head += [f"{BATCH} queries", "× raw", "× vectors"]
    for name, database in found.served.items():
        lines = [
            [
                cell["system"],
                str(cell["ef"])
                if cell["ef"] == cell["ef_asked"]
                else f"{cell['ef']} for {cell['ef_asked']}",
                str(cell["candidates"] or "–"),
                f"{cell['recall']:.3f}",
                f"{cell['r1']:.1f}",
                f"{cell['single_ms']:.1f}",
                *(f"{value:.2f}" for value in cell["single_over"].values()),
                f"{cell['batch_ms']:.0f}",
                *(f"{value:.2f}" for value in cell["batch_over"].values()),
            ]
            for cell in database["cells"]
        ]
        parts.append(f"### {name}, {database['version']}\n\n{table(head, lines)}")
    return "\n\n".join(parts)


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    one_thread()
    if reason := MilvusServer.unavailable():
        print(reason)
        return 1
    started = time.monotonic()
    rows = all_missed()
    truth = Truth()
    with tempfile.TemporaryDirectory() as folder:
        served = {"Milvus Lite": serve(lite_uri(Path(folder)), truth)}
    with MilvusServer() as server:
        served["Milvus server"] = serve(server.uri, truth)
    found, exact = Found(served), truth.exact()
    text = markdown(rows, found, exact)
    print(text)
    faults = broken(rows, found)
    print("\n".join(faults) or "all bounds hold")
    kept = {"environment": environment(started), "rounds": ROUNDS, "batch": BATCH, "single": SINGLE}
    save(
        "serving", kept | {"hnsw": HNSW, "exact": exact, "missed": rows, "databases": served}, text
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
