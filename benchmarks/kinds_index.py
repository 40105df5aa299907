"""What kinds cost an index: recall@10 at equal ef, the time of a search, and the size of the number of a kind.

    python -m benchmarks.kinds_index [--rows N] [--task T …] [--faiss]

Galleries of two kinds: all items of a task, and as many simulated items of the queries' kind as `mixed_galleries`
makes them; enlarged by mixing items of one kind with each other where they are fewer than N. They are migrated
twice on a Milvus 2.3.5 server of its own, HNSW with M 16 and efConstruction 200: as by default, and with a field
of kinds. Each copy is compared with the exact answers of the rows that it stores.

A search is timed in rounds through HubnessClient, the copies one after the other in an order drawn by chance; what
counts is the median of the rounds' ratios, with its 95% interval by the sign test. The time of the client is that of
`encode_query` alone, in CPU time. The same rows are then searched under FAISS HNSW, which counts distances, with other
sizes h of the number in a kind's column, and without the offsets of kinds. --faiss: on Milvus Lite in place of the
server, without times of searches.

Exits with 1 where a search takes more than 3% longer with kinds, or recall is lower by more than 0.01 at any ef.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
import numpy.typing as npt
from pymilvus import DataType, MilvusClient

from benchmarks.client_overhead import median_difference
from benchmarks.environment import RESULTS, environment, one_thread, save, table
from benchmarks.kernels import enlarged
from benchmarks.mixed_galleries import BANK, OTHER, OWN, Names, simulated
from milvus_hubness import (
    Copy,
    HubnessClient,
    MilvusStore,
    QueryBank,
    Recipe,
    migrate,
    plan_correction,
)
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.state import CollectionState
from tests.support.lite import spare_work
from tests.support.real_data import load_task
from tests.support.servers import MilvusServer, lite_uri

TASKS = ("caption_translation", "clip_products t2i")
ROWS, QUERIES, LIMIT = 22_000, 500, 10
HNSW = {"M": 16, "efConstruction": 200}
WIDTHS = (16, 32, 64, 128, 256)
TIMED_WIDTH = 64
ROUNDS = {1: 300, 100: 40}
"""Queries of one request, and how often it is timed."""
SIZES = (0.25, 1, 4)
"""Of the number h of a kind, in multiples of the one that a migration chooses."""
NO_OFFSETS, LESS_MEANS = "vectors as they are", "vectors less the means"
WITHOUT = "kinds=0"
FORMS = (NO_OFFSETS, LESS_MEANS, WITHOUT)
"""Forms beside the sizes."""
BATCH = 2_000
SETTLING_SECONDS = 10
ENCODINGS = 3_000
DEARER, WORSE = 1.03, 0.01


class Gallery(NamedTuple):
    """A gallery of two kinds, and what searches it."""

    items: Floats
    """(n, d)."""
    kinds: Names
    """(n,)."""
    bank: Floats
    queries: Floats


def gallery(name: str, rows: int) -> Gallery:
    """Return a gallery with at least so many rows."""
    task = load_task(name)
    forms = []
    for items in (simulated(task, None), task.gallery):
        items = items[items.any(axis=1)]
        more = max(0, rows // 2 - len(items))
        forms.append(np.concatenate([items, enlarged(items, more)]) if more else items)
    valid = task.query[task.query.any(axis=1)]
    items = np.concatenate(forms).astype(np.float32)
    # A graph depends on the order of its rows: kinds that come one after the other share few links.
    order = np.random.default_rng(0).permutation(len(items))
    return Gallery(
        items[order],
        np.repeat([OWN, OTHER], [len(form) for form in forms])[order],
        task.bank[:BANK],
        valid[:QUERIES],
    )


class Corrected(NamedTuple):
    """A migrated copy."""

    name: str
    state: CollectionState
    stored: Floats
    """(n, width), its augmented vectors."""
    query_vectors: Floats
    """(m, width), what searches send."""

    @property
    def exact(self) -> npt.NDArray[np.int64]:
        """The exact answers of its rows, (m, LIMIT)."""
        return exact_answers(self.stored, self.query_vectors)


def exact_answers(stored: Floats, query_vectors: Floats) -> npt.NDArray[np.int64]:
    """Return the rows with the largest products, (m, LIMIT)."""
    scores = query_vectors.astype(np.float64) @ stored.astype(np.float64).T
    return np.argsort(-scores, axis=1)[:, :LIMIT]


def filled(client: MilvusClient, name: str, found: Gallery) -> None:
    """Make the collection of a gallery."""
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=found.items.shape[1])
    schema.add_field("kind", DataType.VARCHAR, max_length=20)
    index = client.prepare_index_params("vector", index_type="HNSW", metric_type="IP", params=HNSW)
    client.create_collection(name, schema=schema, index_params=index)
    for start in range(0, len(found.items), BATCH):
        stop = min(start + BATCH, len(found.items))
        rows = [
            {"id": row, "vector": found.items[row], "kind": str(found.kinds[row])}
            for row in range(start, stop)
        ]
        client.insert(name, rows)
    client.flush(name)


def copied(client: MilvusClient, source: str, found: Gallery, kind: str | None) -> Corrected:
    """Migrate a collection and read the copy's rows."""
    store = MilvusStore(client)
    name = f"{source}_by_kind" if kind else f"{source}_as_by_default"
    recipe = Recipe(QueryBank(found.bank), kind=kind, verdict="skip")
    plan = plan_correction(store, source, recipe, Copy(target=name), bank_collection=f"{name}_bank")
    migrate(store, plan, client_ttl=0.0)
    state = store.info(name).state
    assert state is not None

    stored = np.zeros((len(found.items), state.layout.width), np.float32)
    for start in range(0, len(stored), BATCH):
        rows = client.query(
            name,
            filter=f"id >= {start} and id < {start + BATCH}",
            output_fields=["id", "vector"],
            limit=BATCH,
        )
        stored[[row["id"] for row in rows]] = [row["vector"] for row in rows]
    return Corrected(name, state, stored, encoded(state, found.queries))


def encoded(state: CollectionState, queries: Floats, *, by_kind: bool = True) -> Floats:
    """Return what searches at strength 1 send."""
    profile = state.profile
    kinds = state.kinds_of(profile) if by_kind else None
    weights = None if kinds is None else kinds.weights()
    return state.layout.encode_queries(queries, 1.0, slot=profile.slot, kinds=weights)


def recall(answers: npt.NDArray[np.int64], exact: npt.NDArray[np.int64]) -> float:
    """Return the share of exact answers among answers (m, LIMIT)."""
    return float(
        np.mean([np.isin(right, got).mean() for right, got in zip(exact, answers, strict=True)])
    )


def served(client: MilvusClient, name: str) -> None:
    """Wait until a collection is loaded with its index."""
    while client.describe_index(name, "vector")["pending_index_rows"]:
        time.sleep(0.5)
    client.release_collection(name)
    client.load_collection(name)
    time.sleep(SETTLING_SECONDS)


def on_server(uri: str, found: Gallery, copies: dict[str, Corrected]) -> dict[str, Any]:
    """Return recall at each ef, and ratios of the times of searches."""
    client = HubnessClient(uri)
    plain = MilvusClient(uri)
    results: dict[str, Any] = {"recall": {}, "times": {}}
    for way, copy in copies.items():
        served(plain, copy.name)
        exact = copy.exact
        for width in WIDTHS:
            answers = []
            for start in range(0, len(found.queries), 100):
                some = found.queries[start : start + 100]
                hits = client.search(
                    copy.name, data=some, limit=LIMIT, strength=1.0,
                    search_params={"params": {"ef": width}},
                )  # fmt: skip
                answers += [[hit["id"] for hit in of_query] for of_query in hits]
            results["recall"].setdefault(way, {})[str(width)] = recall(np.array(answers), exact)
        print(way, results["recall"][way], flush=True)

    order = random.Random(0)
    for batch, rounds in ROUNDS.items():
        seconds: dict[str, list[float]] = {way: [] for way in copies}
        for number in range(rounds + rounds // 10):
            start = (number * batch) % (len(found.queries) - batch + 1)
            some = found.queries[start : start + batch]
            ways = list(copies)
            order.shuffle(ways)
            for way in ways:
                began = time.perf_counter()
                client.search(
                    copies[way].name, data=some, limit=LIMIT, strength=1.0,
                    search_params={"params": {"ef": TIMED_WIDTH}},
                )  # fmt: skip
                seconds[way].append(time.perf_counter() - began)
        timed = {way: values[rounds // 10 :] for way, values in seconds.items()}
        over, interval = median_difference(timed["kinds"], timed["default"])
        base = statistics.median(timed["default"])
        results["times"][str(batch)] = {
            "milliseconds": {way: 1e3 * statistics.median(values) for way, values in timed.items()},
            "ratio": 1 + over / base,
            "interval": [1 + end / base for end in interval],
        }
        print(batch, results["times"][str(batch)], flush=True)
    client.close()
    plain.close()
    return results


def of_encoding(copies: dict[str, Corrected], queries: Floats) -> dict[str, Any]:
    """Return the CPU time of encoding a request, in µs, by way and number of queries."""
    found: dict[str, Any] = {}
    for batch in ROUNDS:
        for way, copy in copies.items():
            some = queries[:batch]
            kinds = copy.state.kinds_of(copy.state.profile)
            weights = None if kinds is None else kinds.weights()
            values = []
            for _ in range(ENCODINGS // batch + 20):
                began = time.thread_time()
                copy.state.layout.encode_queries(some, 1.0, slot=0, kinds=weights)
                values.append(time.thread_time() - began)
            found.setdefault(str(batch), {})[way] = 1e6 * statistics.median(values)
    return found


def in_faiss(copy: Corrected, stored: Floats, query_vectors: Floats) -> dict[str, Any]:
    """Return recall and distances at each ef of an HNSW graph over stored vectors."""
    index = faiss.IndexHNSWFlat(stored.shape[1], HNSW["M"], faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = HNSW["efConstruction"]
    index.add(np.ascontiguousarray(stored))
    exact = exact_answers(stored, query_vectors)
    found: dict[str, Any] = {}
    for width in WIDTHS:
        index.hnsw.efSearch = width
        faiss.cvar.hnsw_stats.reset()
        _, answers = index.search(query_vectors, LIMIT)
        distances = faiss.cvar.hnsw_stats.ndis / len(query_vectors)
        found[str(width)] = {"recall": recall(answers, exact), "distances": distances}
    return found


def by_size(copies: dict[str, Corrected], found: Gallery) -> dict[str, Any]:
    """Return what FAISS HNSW finds in the default copy, and with numbers of kinds of several sizes."""
    default, by_kind = copies["default"], copies["kinds"]
    results = {"default": in_faiss(default, default.stored, default.query_vectors)}
    layout = by_kind.state.layout
    columns_of_kinds = layout.kinds
    assert columns_of_kinds is not None
    parts = (
        layout.biases(by_kind.stored),
        by_kind.stored[:, layout.locality_hint_columns],
        layout.held_kinds(by_kind.stored),
    )
    for size in SIZES:
        scale = columns_of_kinds.scale * size
        other = replace(layout, kinds=replace(columns_of_kinds, scale=scale))
        state = by_kind.state.model_copy(update={"layout": other})
        stored = other.augment(found.items, *parts)
        results[f"{scale:g}"] = in_faiss(by_kind, stored, encoded(state, found.queries))
    # The same ranking without the offsets that bring the kinds together.
    plain = replace(layout, kinds=replace(columns_of_kinds, offsets=""))
    state = by_kind.state.model_copy(update={"layout": plain})
    stored = plain.augment(found.items, *parts)
    results[NO_OFFSETS] = in_faiss(by_kind, stored, encoded(state, found.queries))

    # The same from vectors less the means: the numbers of kinds are in the products then.
    kinds = by_kind.state.kinds_of(by_kind.state.profile)
    assert kinds is not None
    columns = layout.kind_columns
    stored, query_vectors = by_kind.stored.copy(), by_kind.query_vectors.copy()
    stored[:, : layout.dim] = kinds.centred_items(layout.scaled(found.items), parts[2])
    stored[:, columns] = query_vectors[:, columns] = 0
    results[LESS_MEANS] = in_faiss(by_kind, stored, query_vectors)

    without = encoded(by_kind.state, found.queries, by_kind=False)
    results[WITHOUT] = in_faiss(by_kind, by_kind.stored, without)
    for form, cells in results.items():
        print(form, {w: (round(c["recall"], 4), round(c["distances"])) for w, c in cells.items()})
    return results


def measured(uri: str, name: str, rows: int, *, with_times: bool) -> dict[str, Any]:
    """Return the figures of a task."""
    found = gallery(name, rows)
    client = MilvusClient(uri)
    source = name.replace(" ", "_")
    filled(client, source, found)
    copies = {
        way: copied(client, source, found, kind)
        for way, kind in (("default", None), ("kinds", "kind"))
    }
    layouts = {
        way: {
            "width": copy.state.layout.width,
            "locality_hints": copy.state.layout.locality_hint_count,
            "graph_hint": copy.state.layout.graph_hint is not None,
            "kind_scale": copy.state.layout.kinds.scale if copy.state.layout.kinds else None,
        }
        for way, copy in copies.items()
    }
    print(name, len(found.items), layouts, flush=True)
    result = {"rows": len(found.items), "dim": found.items.shape[1], "layouts": layouts}
    result["encoding"] = of_encoding(copies, found.queries)
    print(result["encoding"], flush=True)
    result["faiss"] = by_size(copies, found)
    if with_times:
        result |= on_server(uri, found, copies)
    for copy in copies.values():
        client.drop_collection(copy.name)
        client.drop_collection(copy.state.profile.bank.collection)
    client.drop_collection(source)
    client.close()
    return result


def markdown(results: dict[str, Any]) -> str:
    """Return the tables of all tasks."""
    recalls, times, sizes, layouts = [], [], [], []
    for task, result in results.items():
        for way, layout in result["layouts"].items():
            hints = layout["locality_hints"] + layout["graph_hint"]
            h = f"{layout['kind_scale']:g}" if way == "kinds" else "–"
            layouts.append(
                [
                    task,
                    f"{result['rows']:,}",
                    str(result["dim"]),
                    way,
                    str(layout["width"]),
                    str(hints),
                    h,
                ]
            )
        for way, cells in result.get("recall", {}).items():
            recalls.append([task, way, *(f"{cells[str(width)]:.3f}" for width in WIDTHS)])
        for batch, cell in result.get("times", {}).items():
            encoding = result["encoding"][batch]
            times.append(
                [
                    task,
                    batch,
                    *(f"{cell['milliseconds'][way]:.2f}" for way in ("default", "kinds")),
                    f"{cell['ratio']:.3f} ({cell['interval'][0]:.3f} … {cell['interval'][1]:.3f})",
                    *(f"{encoding[way]:.0f}" for way in ("default", "kinds")),
                ]
            )
        for form, cells in result["faiss"].items():
            shown = [
                f"{cells[str(width)]['recall']:.3f}; {cells[str(width)]['distances']:,.0f}"
                for width in WIDTHS
            ]
            sizes.append([task, form if form in ("default", *FORMS) else f"h = {form}", *shown])
    heads = [f"ef {width}" for width in WIDTHS]
    return "\n\n".join(
        [
            "The copies: their width, the columns of index hints, and the number h of a kind.",
            table(["task", "rows", "dimension", "copy", "width", "hints", "h"], layouts),
            "Recall@10 on Milvus 2.3.5, HNSW, against the exact answers of the same copy.",
            table(["task", "copy", *heads], recalls),
            f"Milliseconds of a request at ef {TIMED_WIDTH}, the ratio with its 95% interval, and the CPU time of "
            "encoding the request in µs.",
            table(
                [
                    "task",
                    "queries",
                    "default",
                    "kinds",
                    "kinds / default",
                    "encoding, default",
                    "encoding, kinds",
                ],
                times,
            ),
            "FAISS HNSW over the same rows: recall@10, and the distances of a query.",
            table(["task", "form", *heads], sizes),
        ]
    )


def holds(results: dict[str, Any]) -> bool:
    """Whether the bounds of this benchmark hold."""
    for result in results.values():
        recalls = result.get("recall", {})
        for width in WIDTHS if recalls else ():
            if recalls["kinds"][str(width)] < recalls["default"][str(width)] - WORSE:
                return False
        if any(cell["ratio"] > DEARER for cell in result.get("times", {}).values()):
            return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--task", nargs="+", default=list(TASKS))
    parser.add_argument("--faiss", action="store_true")
    options = parser.parse_args()
    one_thread()
    spare_work()
    started = time.monotonic()
    path = RESULTS / "kinds_index.json"
    results = json.loads(path.read_text())["tasks"] if path.exists() else {}
    with ExitStack() as stack:
        if options.faiss:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            uri = lite_uri(Path(folder))
        else:
            uri = stack.enter_context(MilvusServer()).uri
        for name in options.task:
            results[name] = measured(uri, name, options.rows, with_times=not options.faiss)
            if not options.faiss:
                kept = {"tasks": results, "environment": environment(started)}
                save("kinds_index", kept, markdown(results))
    print(markdown(results))
    return 0 if holds(results) else 1


if __name__ == "__main__":
    sys.exit(main())
