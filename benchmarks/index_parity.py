"""Queries a second at equal recall: the raw and the corrected collection under each index type.

    python -m benchmarks.index_parity [--lite] [--rows N] [--queries N] [--judged N] [--task T] [--index I …]
                                      [--nlist RAW CORRECTED] [--tuned] [--save]

On a Milvus 2.3.5 server of its own, or with --lite on Milvus Lite, which alone has HNSW_SQ. The gallery is
enlarged to N rows by mixing its items. The corrected collection is a copy with NNN(32, 0.75), or with --tuned
with the estimator that `tune` chooses by pairs that are not asked here, at strength 1. --nlist: the IVF
indexes of the two have so many cells, and not 256 both.

For each index type, and each width of the search: recall@10 against the exact answers of the same collection, and the
share of queries whose right item, by the task's pairs, is among the ten. On these curves, the logarithmic miss
interpolated, lie the widths at which each has recall 0.95, and that at which the corrected one finds as many right
items as the raw one does at its own. Those are then timed, one query a request and a hundred a request: in each round
the raw one and the corrected one at the three widths ask the same queries one after the other, in another order each
time, and what counts is the median of the rounds' ratios. The range of the middle half of the rounds stands beside it.

Exits with 1 where the corrected one answers fewer than 0.95 as many queries a second at equal recall, or at
equal right answers. --save: keep what was measured beside that of other tasks, indexes and estimators.
"""

from __future__ import annotations

import argparse
import json
import math
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
from milvus_hubness import NNN, Copy, QueryBank, Recipe, migrate, plan_correction
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.estimators import Estimator, to_dict
from milvus_hubness.jobs.common.corrections import load_correction
from milvus_hubness.milvus.store.milvus_store import MilvusStore
from milvus_hubness.quality.labelled import LabelledQueries
from milvus_hubness.quality.tuning import tune
from tests.support.real_data import Task, load_task
from tests.support.servers import MilvusServer

INDEXES: dict[str, tuple[dict[str, Any], str, tuple[int, ...]]] = {
    "HNSW": ({"M": 16, "efConstruction": 200}, "ef", (10, 16, 24, 32, 48, 64, 96, 128)),
    "IVF_FLAT": ({"nlist": 256}, "nprobe", (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192)),
    "IVF_SQ8": ({"nlist": 256}, "nprobe", (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192)),
    "HNSW_SQ": (
        {"M": 16, "efConstruction": 200, "sq_type": "SQ8"},
        "ef",
        (10, 16, 24, 32, 48, 64, 96, 128),
    ),
}
LIMIT, QUERIES, JUDGED, PAIRS = 10, 200, 1_000, 2_000
ROUNDS = {1: 15, 100: 25}
"""Queries of one request, and how often they are timed."""
REQUESTS = 10
"""At least so many are timed."""
EQUAL_RECALL, EQUAL_WIDTH, AS_RIGHT = "equal recall", "equal width", "as many right"
SETTLING_SECONDS = 15
LEAST_RECALL, LEAST_SHARE = 0.95, 0.95
BATCH = 2_000


def filled(
    client: MilvusClient, name: str, rows: Floats, index: str, params: dict[str, Any]
) -> None:
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=rows.shape[1])
    wanted = client.prepare_index_params(
        "vector", index_type=index, metric_type="IP", params=params
    )
    client.create_collection(name, schema=schema, index_params=wanted)
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        client.insert(name, [{"id": start + i, "vector": row} for i, row in enumerate(part)])
    client.flush(name)


def served(client: MilvusClient, name: str) -> None:
    """Loaded with its index, not with what Milvus serves rows from until that is built."""
    while client.describe_index(name, "vector")["pending_index_rows"]:
        time.sleep(0.5)
    client.release_collection(name)
    client.load_collection(name)
    time.sleep(SETTLING_SECONDS)


def query_vectors(
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
    return float(
        np.mean([np.isin(own, true).mean() for own, true in zip(exact, found, strict=True)])
    )


def compared(
    uri: str,
    index: str,
    rows: Floats,
    queries: Floats,
    own: Any,
    timed: int,
    bank: Floats,
    by: Estimator,
    nlists: list[int] | None,
) -> dict[str, Any]:
    """The curves of the raw and the corrected collection over all queries, and what they answer a second at
    the widths that follow, by the first `timed` queries or REQUESTS requests where those are more. own: (m,)
    each query's row. nlists: of the one and the other index."""
    params, param, widths = INDEXES[index]
    if nlists:
        params = params | {"nlist": nlists[0]}
    raw = f"raw_{index.lower()}"
    client = MilvusClient(uri)
    store = MilvusStore(client)
    filled(client, raw, rows, index, params)
    served(client, raw)
    other = {"nlist": nlists[1]} if nlists else None
    plan = plan_correction(
        store, raw, Recipe(QueryBank.of(bank), estimator=by), Copy(index_params=other)
    )
    target = migrate(store, plan, client_ttl=0.0).target
    state = store.info(target).state
    assert state is not None
    served(client, target)
    encoded = state.layout.encode_queries(queries, state.profile.strength, slot=state.profile.slot)
    sides = {"raw": (raw, queries), "corrected": (target, encoded)}
    biases = load_correction(store, state, state.profile).centred(rows)
    scores = {
        "raw": queries @ rows.T,
        "corrected": queries @ rows.T - state.profile.strength * biases,
    }
    exact = {side: np.argsort(-each, axis=1)[:, :LIMIT] for side, each in scores.items()}
    curve = []
    for width in widths:
        point: dict[str, float] = {"width": width}
        for side, (name, vectors) in sides.items():
            found, _ = query_vectors(client, name, vectors, param, width, max(ROUNDS))
            point[f"{side} recall"] = recall(found, exact[side])
            point[f"{side} right"] = float((found == own[:, None]).any(axis=1).mean())
        curve.append(point)
        print(index, {what: round(value, 3) for what, value in point.items()}, flush=True)
    at = widths_for(curve)
    if at["raw width"] is not None:
        at |= in_turns(client, sides, param, at, timed)
    for name in (raw, target, state.profile.bank.collection):
        client.drop_collection(name)
    client.close()
    return {"curve": curve, "at_equal_recall": at}


def width_at(curve: list[dict[str, float]], column: str, least: float) -> int | None:
    """The least width at which a share is reached, None where none does."""
    widths = [point["width"] for point in curve]
    max_miss_rate = [math.log(max(1 - point[column], 1e-6)) for point in curve]
    wanted = math.log(1 - least)
    if max_miss_rate[0] <= wanted:
        return int(widths[0])
    for i in range(1, len(curve)):
        if max_miss_rate[i] <= wanted:
            share = (max_miss_rate[i - 1] - wanted) / (max_miss_rate[i - 1] - max_miss_rate[i])
            return math.ceil(widths[i - 1] + share * (widths[i] - widths[i - 1]))
    return None


def widths_for(curve: list[dict[str, float]]) -> dict[str, Any]:
    """Of each side the width that LEAST_RECALL needs; the right answers of both at that of the raw one, and
    the width at which the corrected one finds as many. Whole numbers, None where no width is enough."""
    found: dict[str, Any] = {
        f"{side} width": width_at(curve, f"{side} recall", LEAST_RECALL)
        for side in ("raw", "corrected")
    }
    raw = found["raw width"]
    if raw is None:
        return found
    widths = [point["width"] for point in curve]
    for side in ("raw", "corrected"):
        found[f"{side} right"] = float(
            np.interp(raw, widths, [point[f"{side} right"] for point in curve])
        )
    return found | {"as right width": width_at(curve, "corrected right", found["raw right"])}


def in_turns(
    client: MilvusClient,
    sides: dict[str, tuple[str, Floats]],
    param: str,
    at: dict[str, Any],
    timed: int,
) -> dict[str, Any]:
    """For each of the widths of the corrected collection, and each number of queries a request: the median
    ratio of queries a second over the raw one's at its own width, the middle half of those ratios, and the
    median milliseconds of a query of each."""
    widths = {
        "raw": at["raw width"],
        EQUAL_RECALL: at["corrected width"],
        EQUAL_WIDTH: at["raw width"],
        AS_RIGHT: at["as right width"],
    }
    places = [what for what, width in widths.items() if width is not None]
    found: dict[str, Any] = {}
    for at_once, rounds in ROUNDS.items():
        times: dict[str, list[float]] = {what: [] for what in places}
        for turn in range(rounds):
            first = turn % len(places)
            for what in places[first:] + places[:first]:
                name, vectors = sides["raw" if what == "raw" else "corrected"]
                some = vectors[: max(timed, REQUESTS * at_once)]
                times[what].append(
                    query_vectors(client, name, some, param, widths[what], at_once)[1]
                )
        for what in places:
            key = f"{what}, {at_once} a request"
            found[f"{key}, ms"] = float(np.median(times[what]))
            if what != "raw":
                ratios = np.divide(times["raw"], times[what])
                found[key] = float(np.median(ratios))
                found[f"{key}, middle half"] = np.percentile(ratios, [25, 75]).tolist()
    return found


def chosen(task: Task, rows: Floats, pairs: Any) -> Estimator:
    """The estimator that `tune` chooses by the pairs of those queries. Exits where it chooses none."""
    found = tune(
        task.bank, rows, queries=LabelledQueries.of(task.query[pairs], task.positives[pairs])
    )
    print(f"tune: {found.verdict}, strength {found.strength}: {found.reason}", flush=True)
    if found.choice is None:
        sys.exit("tune advises to leave this task alone: there is nothing to measure")
    return found.choice


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lite", action="store_true")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=QUERIES, help="how many of them are timed")
    parser.add_argument("--judged", type=int, default=JUDGED)
    parser.add_argument("--task", default="docstring_code")
    parser.add_argument("--index", nargs="+", choices=INDEXES)
    parser.add_argument("--nlist", nargs=2, type=int, metavar=("RAW", "CORRECTED"))
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    one_thread()
    started = time.monotonic()
    task = load_task(options.task)
    gallery, more = task.gallery, max(0, options.rows - len(task.gallery))
    rows = np.concatenate([gallery, enlarged(gallery, more)])[: options.rows]
    valid = np.flatnonzero((np.linalg.norm(task.query, axis=1) > 0) & (task.positives < len(rows)))
    judged, pairs = valid[: options.judged], valid[options.judged :][:PAIRS]
    by = chosen(task, rows, pairs) if options.tuned else NNN(32, 0.75)
    found: dict[str, dict[str, Any]] = {}
    sizes = {
        "task": options.task,
        "rows": options.rows,
        "queries": options.queries,
        "judged": len(judged),
    }
    with ExitStack() as stack:
        if options.lite:
            uri, where = (
                str(Path(stack.enter_context(tempfile.TemporaryDirectory()), "parity.db")),
                "Lite",
            )
        else:
            uri, where = stack.enter_context(MilvusServer()).uri, "2.3.5"
        for index in options.index or [
            name for name in INDEXES if options.lite or name != "HNSW_SQ"
        ]:
            asking = (task.query[judged], task.positives[judged], options.queries)
            both = compared(uri, index, rows, *asking, task.bank, by, options.nlist)
            of = ", nlist {} and {}".format(*options.nlist) if options.nlist else ""
            found[f"{options.task}, {index}{of}, {where}{', tuned' if options.tuned else ''}"] = {
                **sizes, "index": index + of, "milvus": where, "tuned": options.tuned,
                "estimator": to_dict(by), **both, "environment": environment(started),
            }  # fmt: skip
            if options.save:
                kept = RESULTS / "index_parity.json"
                before = json.loads(kept.read_text()) if kept.exists() else {}
                save("index_parity", before | found, shown(before | found))
    print(shown(found))
    shares = [
        each["at_equal_recall"].get(f"{what}, {n} a request")
        for each in found.values()
        for n in ROUNDS
        for what in (EQUAL_RECALL, AS_RIGHT)
    ]
    return int(any(share is None or share < LEAST_SHARE for share in shares))


def shown(found: dict[str, Any]) -> str:
    """The widths that both need for LEAST_RECALL and the queries a second of the one over the other's; and
    the right answers of both at the raw one's width, and the queries a second there and for as many."""
    equal, right = [], []
    for each in found.values():
        at = each["at_equal_recall"]
        what = [each["task"], f"{each['rows']:,}", each["milvus"], each["index"],
                "tune's choice" if each["tuned"] else "NNN(32, 0.75)"]  # fmt: skip
        widths = [_said(at[f"{side} width"], "d") for side in ("raw", "corrected")]
        equal.append([*what, *widths, *_shares(at, EQUAL_RECALL)])
        rights = [_said(at.get(f"{side} right"), ".1%") for side in ("raw", "corrected")]
        width = _said(at.get("as right width"), "d")
        right.append(
            [*what, widths[0], *rights, *_shares(at, EQUAL_WIDTH), width, *_shares(at, AS_RIGHT)]
        )
    head = ["task", "rows", "Milvus", "index", "corrected by"]
    a_second = [f"queries a second, {n} a request: corrected / raw" for n in ROUNDS]
    named = ["width", "right, raw", "right, corrected", *a_second]
    return (
        f"At recall@10 of {LEAST_RECALL} against the exact answers of the same collection:\n\n"
        f"{table([*head, 'width, raw', 'width, corrected', *a_second], equal)}\n\n"
        "Queries with their right answer among the ten, at the width that the raw collection needs, and the "
        "width at which the corrected one finds as many as the raw one does there:\n\n"
        f"{table([*head, *named, 'width for as many', *a_second], right)}"
    )


def _shares(at: dict[str, Any], what: str) -> list[str]:
    """The ratios with one and with a hundred queries a request, and the middle half of each one's rounds."""
    keys = [f"{what}, {n} a request" for n in ROUNDS]
    return [
        "–"
        if key not in at
        else "{:.2f} ({:.2f} to {:.2f})".format(at[key], *at[f"{key}, middle half"])
        for key in keys
    ]


def _said(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


if __name__ == "__main__":
    sys.exit(main())
