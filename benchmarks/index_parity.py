"""Queries a second at equal recall: the raw and the corrected collection under each index type.

    python -m benchmarks.index_parity [--lite] [--rows N] [--queries N] [--task T] [--index I …] [--save]

On a Milvus 2.3.5 server of its own, or with --lite on Milvus Lite, which alone has HNSW_SQ. The gallery is
enlarged to N rows by mixing its items. For each index type, and each width of the search, recall@10 against
the exact answers of the same collection and queries a second of one client, one a request and a hundred a
request, medians of rounds that ask both collections in turns; the corrected collection is a copy with
NNN(32, 0.75). At recall 0.95: the width comes from the curve of recall, its logarithmic miss interpolated,
and the time of a query from the line fitted to the times of all widths, so that the noise of one cell decides
nothing. Exits with 1 where the corrected one answers fewer than 0.95 as many queries a second there. --save:
keep what was measured beside what was kept of other tasks and indexes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from pymilvus import DataType, MilvusClient

from benchmarks.environment import RESULTS, environment, one_thread, save, table
from benchmarks.kernels import enlarged
from milvus_hubness import NNN, QueryBank, migrate, plan_migration
from milvus_hubness.layout import Floats
from milvus_hubness.stores import MilvusStore
from tests.real_data import load_task
from tests.servers import MilvusServer

INDEXES: dict[str, tuple[dict[str, Any], str, tuple[int, ...]]] = {
    "HNSW": ({"M": 16, "efConstruction": 200}, "ef", (10, 16, 24, 32, 48, 64, 96, 128)),
    "IVF_FLAT": ({"nlist": 256}, "nprobe", (2, 4, 8, 16, 24, 32, 48, 64)),
    "IVF_SQ8": ({"nlist": 256}, "nprobe", (2, 4, 8, 16, 24, 32, 48, 64)),
    "HNSW_SQ": ({"M": 16, "efConstruction": 200, "sq_type": "SQ8"}, "ef", (10, 16, 24, 32, 48, 64, 96, 128)),
}
LIMIT, QUERIES, ROUNDS = 10, 300, 3
REQUESTS = (1, 100)
"""Queries of one request."""
LEAST_RECALL, LEAST_SHARE = 0.95, 0.95
BATCH = 2_000


def filled(client: MilvusClient, name: str, rows: Floats, index: str, params: dict[str, Any]) -> None:
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=rows.shape[1])
    wanted = client.prepare_index_params("vector", index_type=index, metric_type="IP", params=params)
    client.create_collection(name, schema=schema, index_params=wanted)
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        client.insert(name, [{"id": start + i, "vector": row} for i, row in enumerate(part)])
    client.flush(name)
    client.load_collection(name)


def asked(
    client: MilvusClient, name: str, queries: Floats, param: str, width: int, at_once: int
) -> tuple[Any, float]:
    """(m, LIMIT) ids, and the milliseconds of a query."""
    ids, started = [], time.perf_counter()
    for start in range(0, len(queries), at_once):
        found = client.search(
            name,
            data=list(queries[start : start + at_once]),
            limit=LIMIT,
            anns_field="vector",
            search_params={"params": {param: width}},
        )
        ids += [[hit["id"] for hit in hits] for hits in found]
    return np.array(ids), 1000 * (time.perf_counter() - started) / len(queries)


def recall(found: Any, exact: Any) -> float:
    return float(np.mean([np.isin(own, true).mean() for own, true in zip(exact, found, strict=True)]))


def curves(uri: str, index: str, rows: Floats, queries: Floats, bank: Floats) -> list[dict[str, float]]:
    """For each width of the search, recall and queries a second of the raw and the corrected collection."""
    params, param, widths = INDEXES[index]
    client = MilvusClient(uri)
    store = MilvusStore(client)
    filled(client, "raw", rows, index, params)
    plan = plan_migration(store, "raw", QueryBank.of(bank), estimator=NNN(32, 0.75))
    target = migrate(store, plan, client_ttl=0.0).target
    client.load_collection(target)
    state = store.info(target).state
    wrapped = state.layout.wrap(queries, state.profile.strength, slot=state.profile.slot)
    sides = {"raw": ("raw", queries), "corrected": (target, wrapped)}
    exact = {"raw": np.argsort(-(queries @ rows.T), axis=1)[:, :LIMIT]}
    biases = 0.75 * np.sort(rows @ bank.T, axis=1)[:, -32:].mean(1)
    exact["corrected"] = np.argsort(-(queries @ rows.T - biases), axis=1)[:, :LIMIT]
    cells = []
    for width in widths:
        cell: dict[str, float] = {"width": width}
        times: dict[str, list[float]] = {}
        for at_once in REQUESTS * ROUNDS:
            for side, (name, vectors) in sides.items():
                found, milliseconds = asked(client, name, vectors, param, width, at_once)
                cell[f"{side} recall"] = recall(found, exact[side])
                times.setdefault(f"{side} ms, {at_once} a request", []).append(milliseconds)
        cells.append(cell | {what: statistics.median(taken) for what, taken in times.items()})
        print(index, {what: round(value, 3) for what, value in cells[-1].items()}, flush=True)
    for name in ("raw", target, state.profile.bank.collection):
        client.drop_collection(name)
    client.close()
    return cells


def width_at(cells: list[dict[str, float]], side: str, least: float) -> float | None:
    """The width at which the recall is reached, None where none does."""
    widths = [cell["width"] for cell in cells]
    misses = [math.log(max(1 - cell[f"{side} recall"], 1e-6)) for cell in cells]
    wanted = math.log(1 - least)
    if misses[0] <= wanted:
        return widths[0]
    for i in range(1, len(cells)):
        if misses[i] <= wanted:
            share = (misses[i - 1] - wanted) / (misses[i - 1] - misses[i])
            return widths[i - 1] + share * (widths[i] - widths[i - 1])
    return None


def at_equal_recall(cells: list[dict[str, float]]) -> dict[str, Any]:
    """Of each side the width needed and the milliseconds of a query there, and the queries a second of the
    corrected over those of the raw collection, by how many queries a request brings."""
    found: dict[str, Any] = {
        f"{side} width": width_at(cells, side, LEAST_RECALL) for side in ("raw", "corrected")
    }
    for at_once in REQUESTS:
        taken = []
        for side in ("raw", "corrected"):
            if (needed := found[f"{side} width"]) is None:
                break
            line = np.polyfit(
                [cell["width"] for cell in cells],
                [cell[f"{side} ms, {at_once} a request"] for cell in cells],
                1,
            )
            taken.append(float(np.polyval(line, needed)))
        found[f"{at_once} a request"] = taken[0] / taken[1] if len(taken) == 2 else None
        found[f"{at_once} a request, ms"] = taken
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lite", action="store_true")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=QUERIES)
    parser.add_argument("--task", default="docstring_code")
    parser.add_argument("--index", nargs="+", choices=INDEXES)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    one_thread()
    started = time.monotonic()
    task = load_task(options.task)
    rows = np.concatenate([task.gallery, enlarged(task.gallery, max(0, options.rows - len(task.gallery)))])
    sound = np.linalg.norm(task.query, axis=1) > 0
    queries = task.query[sound][: options.queries]
    found: dict[str, dict[str, Any]] = {}
    sizes = {"task": options.task, "rows": options.rows, "queries": len(queries)}
    with ExitStack() as stack:
        if options.lite:
            uri, where = str(Path(stack.enter_context(tempfile.TemporaryDirectory()), "parity.db")), "Lite"
        else:
            uri, where = stack.enter_context(MilvusServer()).uri, "2.3.5"
        for index in options.index or [name for name in INDEXES if options.lite or name != "HNSW_SQ"]:
            cells = curves(uri, index, rows[: options.rows], queries, task.bank)
            found[f"{options.task}, {index}, {where}"] = {
                **sizes, "index": index, "milvus": where, "curve": cells,
                "at_equal_recall": at_equal_recall(cells), "environment": environment(started),
            }  # fmt: skip
    print(shown(found))
    if options.save:
        kept = RESULTS / "index_parity.json"
        before = json.loads(kept.read_text()) if kept.exists() else {}
        save("index_parity", before | found, shown(before | found))
    shares = [each["at_equal_recall"][f"{n} a request"] for each in found.values() for n in REQUESTS]
    return int(any(share is None or share < LEAST_SHARE for share in shares))


def shown(found: dict[str, Any]) -> str:
    """A table of the widths that both need, and of the queries a second of the one over the other's."""
    lines = []
    for each in found.values():
        cells, at = (
            [each["task"], f"{each['rows']:,}", each["milvus"], each["index"]],
            each["at_equal_recall"],
        )
        cells += ["–" if (w := at[f"{side} width"]) is None else f"{w:.0f}" for side in ("raw", "corrected")]
        lines.append(
            [*cells, *("–" if (r := at[f"{n} a request"]) is None else f"{r:.2f}" for n in REQUESTS)]
        )
    head = ["task", "rows", "Milvus", "index", "width, raw", "width, corrected",
            *(f"queries a second, {n} a request: corrected / raw" for n in REQUESTS)]  # fmt: skip
    return f"At recall@10 of {LEAST_RECALL}:\n\n{table(head, lines)}"


if __name__ == "__main__":
    sys.exit(main())
