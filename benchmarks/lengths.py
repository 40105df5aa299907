"""What varying lengths cost the graph of a corrected collection under IP, and what the layout does about it.

    OMP_NUM_THREADS=1 python -m benchmarks.lengths [--milvus] [--edge] [--save]

recall@10 of HNSW (M 16, efConstruction 200) over ROWS rows, against the exact answers of the same
scores, biases of NNN(16, 0.75): of the vectors as they are (plain), and of these augmented forms:

- "as for one length": the layout that all galleries had before, whatever their lengths;
- "equal lengths": the same and one more column √(max‖x‖² − ‖x‖²), 0 in the query, where x is the
  stored vector: all are of one length (Bachrach et al., RecSys 2014);
- "measured": what `measured_on` chooses.

The constants of `codec.index_hints` for varying lengths were chosen on the galleries CHOSEN_ON, of
3,000 rows; the others were not looked at before. FAISS builds the graphs; with --edge Qdrant's own
engine (qdrant-edge-py) does too, and with --milvus a Milvus 2.3.5 server. Milvus Lite builds FAISS's
graph. Exits with 1 where the measured form is more than MARGIN below the plain one, or on unit
vectors below the form for one length.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import faiss
import numpy as np
import numpy.typing as npt

from benchmarks.environment import environment, one_thread, save, table
from milvus_hubness import NNN, Layout, QueryBank
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.index_hints import FAR_ANCHOR, measured_on
from milvus_hubness.correction.codec.parts import GraphHint
from milvus_hubness.correction.fitted import Correction
from tests.support.real_data import load_task

ROWS, BANK, QUERIES, LIMIT = 4_000, 1_000, 300, 10
LINKS, BUILD_BREADTH = 16, 200
BREADTHS = (64, 256)
MARGIN = 0.01
UNIT = ("caption_translation", "docstring_code")
CHOSEN_ON = (
    "lengths 0.6 to 5.5, 32-d",
    "one shared direction, 32-d",
    "rank 12, log-normal 1, 64-d",
    "docstring_code × log-normal 0.5",
)
SERVED = (
    "lengths 0.6 to 5.5, 32-d",
    "rank 8, log-normal 0.5, 64-d",
    "one shared direction, 32-d",
    "caption_translation",
)
"""Galleries that the databases index too, which takes longer."""


class Gallery(NamedTuple):
    """items (n, d), queries (m, d), bank (k, d), searched with IP."""

    items: Floats
    queries: Floats
    bank: Floats


class Form(NamedTuple):
    """Stored vectors, the queries for them, and the exact scores (m, n)."""

    stored: Floats
    sent: Floats
    scores: npt.NDArray[np.float64]


Found = Callable[[Floats, Floats], Iterator[npt.NDArray[np.int64]]]
"""Builds a graph of stored vectors; yields the numbers of the rows found for the queries, for each of BREADTHS."""


# -- galleries ------------------------------------------------------------------------------------------


def unit(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def galleries() -> Iterator[tuple[str, Gallery]]:
    asked = BANK + QUERIES

    def cut(items: npt.NDArray[Any], queries: npt.NDArray[Any]) -> Gallery:
        return Gallery(
            *(part.astype(np.float32) for part in (items, queries[BANK:], queries[:BANK]))
        )

    def log_normal(rng: np.random.Generator, count: int, spread: float) -> npt.NDArray[np.float64]:
        return np.exp(spread * rng.normal(size=(count, 1)))

    def around_a_direction(rng: np.random.Generator, dim: int) -> tuple[Any, Any]:
        direction = rng.normal(size=dim)
        return tuple(
            (rng.normal(size=(count, dim)) + np.outer(rng.gamma(1, 0.6, count), direction))
            / np.sqrt(dim)
            for count in (ROWS, asked)
        )  # type: ignore[return-value]

    rng = np.random.default_rng(0)
    items, queries = around_a_direction(rng, 32)
    yield (
        "lengths 0.6 to 5.5, 32-d",
        cut(unit(items) * rng.uniform(0.6, 5.5, (ROWS, 1)), unit(queries)),
    )
    yield "one shared direction, 32-d", cut(items, queries)
    # Queries of every direction spread the corrected answers over most items, which is the hardest for a graph.
    queries = rng.normal(size=(asked, 32))
    lengths = np.exp(rng.uniform(np.log(0.6), np.log(5.5), (ROWS, 1)))
    yield (
        "lengths 0.6 to 5.5, queries of all directions, 32-d",
        cut(unit(items) * rng.uniform(0.6, 5.5, (ROWS, 1)), unit(queries)),
    )
    yield (
        "log-uniform lengths, queries of all directions, 32-d",
        cut(unit(items) * lengths, unit(queries)),
    )
    items, queries = around_a_direction(np.random.default_rng(7), 100)
    yield "one shared direction, 100-d", cut(items, queries)

    for rank, spread in ((12, 1.0), (8, 0.5), (16, 0.25)):
        rng = np.random.default_rng(rank)
        basis = rng.normal(size=(rank, 64))
        items, queries = (
            unit(rng.normal(size=(count, rank)) @ basis + 0.1 * rng.normal(size=(count, 64)))
            for count in (ROWS, asked)
        )
        yield (
            f"rank {rank}, log-normal {spread:g}, 64-d",
            cut(items * log_normal(rng, ROWS, spread), queries),
        )

    rng = np.random.default_rng(3)
    centres = rng.normal(size=(60, 96))
    items, queries = (
        unit(centres[rng.integers(0, 60, count)] + 0.7 * rng.normal(size=(count, 96)))
        for count in (ROWS, asked)
    )
    yield "60 clusters, log-normal 0.7, 96-d", cut(items * log_normal(rng, ROWS, 0.7), queries)

    for name, spread in (
        ("docstring_code", 0.5),
        ("caption_translation", 0.5),
        ("caption_translation", 1.0),
    ):
        task = real(name)
        rng = np.random.default_rng(5)
        items = (task.items * log_normal(rng, len(task.items), spread)).astype(np.float32)
        yield f"{name} × log-normal {spread:g}", task._replace(items=items)
    for name in ("text_video_msrvtt t2v", "text_video_msrvtt v2t", *UNIT):
        yield name, real(name)


def real(name: str) -> Gallery:
    task = load_task(name)
    queries = task.query[task.query.any(axis=1)]
    return Gallery(task.gallery[:ROWS], queries[:QUERIES], task.bank[:BANK])


# -- forms ----------------------------------------------------------------------------------------------


def forms(gallery: Gallery) -> dict[str, Form]:
    items, queries, bank = gallery
    measured = measured_on(Layout(items.shape[1], "IP"), items, bank, locality_hints=True)
    correction = Correction.fit(measured, NNN(16, 0.75), QueryBank.of(bank))
    correction = replace(correction, mean_bias=float(correction.centred(items).mean()))
    biases, hints = correction.centred(items), correction.locality_hints(items)
    raw = queries.astype(np.float64) @ items.astype(np.float64).T
    corrected = raw - biases

    layout = for_one_length(measured)
    filled = layout.augment(items, biases, hints)
    sent = layout.encode_queries(queries)
    wide = np.column_stack([sent, np.zeros(len(sent), np.float32)])
    return {
        "plain": Form(items, queries, raw),
        "as for one length": Form(filled, sent, corrected),
        "equal lengths": Form(of_equal_length(filled), wide, corrected),
        "measured": Form(
            measured.augment(items, biases, hints), measured.encode_queries(queries), corrected
        ),
    }


def for_one_length(layout: Layout) -> Layout:
    """Return the layout without what depends on the spread of the items' lengths and on those of the queries."""
    hint = layout.graph_hint
    if hint is not None:
        factor = FAR_ANCHOR if hint.length_pull else 1.0
        hint = GraphHint(hint.anchor / factor, hint.pull * factor)
    return replace(layout, slots=replace(layout.slots, scale=1.0), graph_hint=hint)


def of_equal_length(stored: Floats) -> Floats:
    squares = np.square(stored, dtype=np.float64).sum(axis=1)
    return np.column_stack([stored, np.sqrt(squares.max() - squares)]).astype(np.float32)


# -- graphs ---------------------------------------------------------------------------------------------


def on_faiss(stored: Floats, sent: Floats) -> Iterator[npt.NDArray[np.int64]]:
    index = faiss.IndexHNSWFlat(stored.shape[1], LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = BUILD_BREADTH
    index.add(np.ascontiguousarray(stored))
    for breadth in BREADTHS:
        yield index.search(sent, LIMIT, params=faiss.SearchParametersHNSW(efSearch=breadth))[1]


def on_edge(stored: Floats, sent: Floats) -> Iterator[npt.NDArray[np.int64]]:
    """Qdrant's engine in this process; it builds a graph only if the thresholds are this low."""
    import qdrant_edge as edge

    with tempfile.TemporaryDirectory() as folder:
        config = edge.EdgeConfig(
            vectors=edge.EdgeVectorParams(size=stored.shape[1], distance=edge.Distance.Dot),
            hnsw_config=edge.HnswIndexConfig(LINKS, BUILD_BREADTH, 1, max_indexing_threads=1),
            optimizers=edge.EdgeOptimizersConfig(indexing_threshold=1, default_segment_number=1),
        )
        shard = edge.EdgeShard.create(folder, config)
        for start in range(0, len(stored), 1_000):
            points = [
                edge.Point(start + i, row.tolist(), {})
                for i, row in enumerate(stored[start : start + 1_000])
            ]
            shard.update(edge.UpdateOperation.upsert_points(points))
        shard.optimize()
        if shard.info().indexed_vectors_count < len(stored):
            raise SystemExit(
                f"Qdrant indexed {shard.info().indexed_vectors_count} of {len(stored)} vectors"
            )

        for breadth in BREADTHS:
            params = edge.SearchParams(hnsw_ef=breadth)
            found = []
            for query in sent:
                nearest = edge.Query.Nearest(query.tolist())
                hits = shard.query(edge.QueryRequest(query=nearest, limit=LIMIT, params=params))
                ids = [hit.id for hit in hits]
                found.append(ids + [-1] * (LIMIT - len(ids)))
            yield np.array(found)
        shard.close()


def on_milvus(client: Any) -> Found:
    from benchmarks.recall_gate import ask, fill

    def found(stored: Floats, sent: Floats) -> Iterator[npt.NDArray[np.int64]]:
        fill(client, "lengths", stored, "HNSW", {"M": LINKS, "efConstruction": BUILD_BREADTH})
        while client.describe_index("lengths", "vector")["pending_index_rows"]:
            time.sleep(0.5)
        # A collection that was loaded before its index was built is searched without it.
        client.release_collection("lengths")
        client.load_collection("lengths")
        for breadth in BREADTHS:
            yield ask(client, "lengths", sent, {"ef": breadth})
        client.drop_collection("lengths")

    return found


def recalls(form: Form, found: Found) -> dict[str, float]:
    """Return recall@10 by breadth; answers as good as the tenth count, up to float32 rounding."""
    rounding = 1e-6 * np.abs(form.scores).max(axis=1)
    least = np.partition(form.scores, -LIMIT, axis=1)[:, -LIMIT] - rounding
    shares = {}
    for breadth, rows in zip(BREADTHS, found(form.stored, form.sent), strict=True):
        good = np.take_along_axis(form.scores, np.maximum(rows, 0), 1) >= least[:, None]
        shares[f"ef {breadth}"] = round(float((good & (rows >= 0)).mean()), 4)
    return shares


# -- results --------------------------------------------------------------------------------------------


def facts(name: str, gallery: Gallery) -> dict[str, Any]:
    lengths = np.linalg.norm(gallery.items.astype(np.float64), axis=1)
    percentiles = np.percentile(lengths, [0, 1, 50, 99, 100])
    return {
        "rows": len(lengths),
        "lengths": percentiles.round(3).tolist(),
        "chosen on it": name in CHOSEN_ON,
    }


def as_markdown(found: dict[str, Any]) -> str:
    parts = []
    for engine in ("FAISS", "Qdrant", "Milvus 2.3.5"):
        measured = {name: each[engine] for name, each in found.items() if engine in each}
        if not measured:
            continue
        head = ["gallery", "lengths, 1st to 99th percentile", *next(iter(measured.values()))]
        rows = [
            [
                f"{name} (chosen on it)" if found[name]["chosen on it"] else name,
                "{1:g} to {3:g}".format(*found[name]["lengths"]),
                *(
                    " / ".join(f"{share:.3f}" for share in shares.values())
                    for shares in by_form.values()
                ),
            ]
            for name, by_form in measured.items()
        ]
        breadths = " / ".join(map(str, BREADTHS))
        parts.append(f"{engine}, HNSW, recall@{LIMIT} at ef {breadths}:\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def shortfalls(found: dict[str, Any]) -> list[str]:
    """Return a line for each recall of the measured form that is more than MARGIN below its goal."""
    lines = []
    for name, each in found.items():
        for engine, by_form in each.items():
            if not isinstance(by_form, dict):
                continue
            goals = ("plain", "as for one length")[name in UNIT]
            for breadth, goal in by_form[goals].items():
                share = by_form["measured"][breadth]
                if share < goal - MARGIN:
                    lines.append(f"{name}, {engine}, {breadth}: {share:.3f}, {goals} {goal:.3f}")
    return lines


def measured_by(engines: dict[str, Found]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, gallery in galleries():
        found[name] = facts(name, gallery)
        shown: Sequence[str] = ("plain", "as for one length", "measured")
        for engine, search in engines.items():
            if engine != "FAISS" and name not in SERVED:
                continue
            by_form = forms(gallery)
            kept = by_form if engine == "FAISS" else {form: by_form[form] for form in shown}
            found[name][engine] = {form: recalls(each, search) for form, each in kept.items()}
            print(name, engine, found[name][engine], flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--milvus", action="store_true")
    parser.add_argument("--edge", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    one_thread()
    faiss.omp_set_num_threads(1)
    started = time.monotonic()
    engines: dict[str, Found] = {"FAISS": on_faiss}
    if options.edge:
        engines["Qdrant"] = on_edge
    if options.milvus:
        from milvus_hubness import connect
        from tests.support.servers import MilvusServer

        with MilvusServer() as server:
            found = measured_by(engines | {"Milvus 2.3.5": on_milvus(connect(server.uri))})
    else:
        found = measured_by(engines)

    markdown = as_markdown(found)
    lines = shortfalls(found)
    print(markdown, *lines, sep="\n")
    if options.save:
        results = {
            "galleries": found,
            "margin": MARGIN,
            "more than the margin below": lines,
            "environment": environment(started),
        }
        save("lengths", results, markdown)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
