"""Queries a second at equal recall: the raw and the corrected collection under each index type.

    python -m benchmarks.index_parity [--lite] [--rows N] [--queries N] [--task T] [--index I …] [--save]

On a Milvus 2.3.5 server of its own, or with --lite on Milvus Lite, which alone has HNSW_SQ. The gallery is
enlarged to N rows by mixing its items. For each index type, and each width of the search, recall@10 against
the exact answers of the same collection and queries a second of one client, asked in turns; the corrected
collection is a copy with NNN(32, 0.75). Exits with 1 where, at the least width at which both reach recall
0.95, the corrected one answers fewer than 0.95 as many queries a second. --save: keep what was measured
beside what was kept of other tasks and indexes.
"""

from __future__ import annotations

import argparse
import json
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
    "HNSW": ({"M": 16, "efConstruction": 200}, "ef", (32, 48, 64, 80, 96, 128, 256)),
    "IVF_FLAT": ({"nlist": 256}, "nprobe", (8, 16, 24, 32, 40, 48, 64)),
    "IVF_SQ8": ({"nlist": 256}, "nprobe", (8, 16, 24, 32, 40, 48, 64)),
    "HNSW_SQ": ({"M": 16, "efConstruction": 200, "sq_type": "SQ8"}, "ef", (32, 48, 64, 80, 96, 128, 256)),
}
LIMIT, QUERIES, ROUNDS = 10, 200, 3
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


def asked(client: MilvusClient, name: str, queries: Floats, param: str, width: int) -> tuple[Any, float]:
    """(m, LIMIT) ids, and queries a second."""
    ids, started = [], time.perf_counter()
    for query in queries:
        [hits] = client.search(
            name, data=[query], limit=LIMIT, anns_field="vector", search_params={"params": {param: width}}
        )
        ids.append([hit["id"] for hit in hits])
    return np.array(ids), len(queries) / (time.perf_counter() - started)


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
        for _ in range(ROUNDS):
            for side, (name, vectors) in sides.items():
                found, speed = asked(client, name, vectors, param, width)
                cell[f"{side} recall"] = recall(found, exact[side])
                cell[f"{side} queries/s"] = max(speed, cell.get(f"{side} queries/s", 0.0))
        cells.append(cell)
        print(index, cell, flush=True)
    for name in ("raw", target, state.profile.bank.collection):
        client.drop_collection(name)
    client.close()
    return cells


def at_equal_recall(cells: list[dict[str, float]]) -> float | None:
    """Queries a second of the corrected over those of the raw collection, each at its least sufficient width;
    None where one never reaches the recall."""
    speeds = []
    for side in ("raw", "corrected"):
        enough = [cell for cell in cells if cell[f"{side} recall"] >= LEAST_RECALL]
        if not enough:
            return None
        speeds.append(enough[0][f"{side} queries/s"])
    return speeds[1] / speeds[0]


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
            share = at_equal_recall(cells)
            found[f"{options.task}, {index}, {where}"] = {
                **sizes, "index": index, "milvus": where, "curve": cells, "at_equal_recall": share,
                "environment": environment(started),
            }  # fmt: skip
    print(shown(found))
    if options.save:
        kept = RESULTS / "index_parity.json"
        before = json.loads(kept.read_text()) if kept.exists() else {}
        save("index_parity", before | found, shown(before | found))
    shares = [each["at_equal_recall"] for each in found.values()]
    return int(any(share is None or share < LEAST_SHARE for share in shares))


def shown(found: dict[str, dict[str, Any]]) -> str:
    """A table of the least sufficient width of both and their queries a second."""
    lines = []
    for each in found.values():
        cells = [each["task"], f"{each['rows']:,}", each["milvus"], each["index"]]
        for side in ("raw", "corrected"):
            enough = [cell for cell in each["curve"] if cell[f"{side} recall"] >= LEAST_RECALL]
            cells.append(f"{enough[0]['width']}, {enough[0][f'{side} recall']:.3f}" if enough else "–")
        share = each["at_equal_recall"]
        lines.append([*cells, "never reached" if share is None else f"{share:.2f}"])
    head = ["task", "rows", "Milvus", "index", "raw: width, recall", "corrected: width, recall",
            f"corrected / raw queries a second at recall {LEAST_RECALL}"]  # fmt: skip
    return table(head, lines)


if __name__ == "__main__":
    sys.exit(main())
