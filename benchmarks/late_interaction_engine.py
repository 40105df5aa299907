"""Late interaction through Qdrant's engine: what its searches keep of the dense computation.

    pip install --group data django babel qdrant-edge-py
    python -m benchmarks.late_interaction_engine [--save] [--tokens FILE.npz]

The tasks, tokens and folds are those of `benchmarks.late_interaction`, of which the first fold of two tasks is
searched. Documents are stored as `milvus-hubness migrate` does on Qdrant, each token with its document's bias, in the
Rust engine that a Qdrant server runs (qdrant-edge-py). "plain" searches the tokens as they are, "corrected" the
augmented ones with the default method. Truth for the recall of each is its own dense ranking. HNSW has m 16,
ef_construct 64 and ef 64; int8 is scalar quantisation of the 0.99 quantile without rescoring, scanned, with the biases
in two columns as a migration of a quantised collection stores them, or in one as they are. A scan's cost is CPU time of
all its searches, plain and corrected in turn.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.environment import environment, one_thread, save, table
from benchmarks.late_interaction import INSTALL, hits, of_texts, points, records_and_tokens
from benchmarks.text_to_text import folds
from milvus_hubness import Correction, MultiVectors, maxsim
from milvus_hubness.correction.codec.multi_vectors import MultiVectorLayout
from milvus_hubness.correction.codec.parts import BiasSlots
from milvus_hubness.correction.codec.quantisation import with_bias_scale
from milvus_hubness.correction.estimators import DEFAULT_ESTIMATOR
from milvus_hubness.quality.measures import paired_difference
from qdrant_hubness.store.schema import COLUMNS_OF_MULTI_VECTORS

try:
    import qdrant_edge as edge
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed: {INSTALL} qdrant-edge-py") from None

NAMES = ("docstrings to code", "names, six languages to English")
DEPTH = 10
RECALL_QUERIES = 500
BATCH = 100
AS_THEY_ARE = "int8, biases as they are"


@contextmanager
def shard(rows: MultiVectors, *, graph: bool = False, int8: bool = False) -> Iterator[Any]:
    """Yield the engine with these documents, optimised."""
    folder = tempfile.mkdtemp()
    max_sim = edge.MultiVectorConfig(edge.MultiVectorComparator.MaxSim)
    options: dict[str, Any] = {}
    if int8:
        options["quantization_config"] = edge.ScalarQuantizationConfig(
            type=edge.ScalarType.Int8, quantile=0.99
        )
    config = edge.EdgeConfig(
        vectors=edge.EdgeVectorParams(
            size=rows.dim, distance=edge.Distance.Dot, multivector_config=max_sim
        ),
        hnsw_config=edge.HnswIndexConfig(
            m=16, ef_construct=64, full_scan_threshold=1 if graph else 10**9
        ),
        optimizers=edge.EdgeOptimizersConfig(indexing_threshold=1, default_segment_number=1),
        **options,
    )
    there = edge.EdgeShard.create(folder, config)
    try:
        made = [edge.Point(number, tokens.tolist(), {}) for number, tokens in enumerate(rows)]
        for start in range(0, len(made), BATCH):
            some = made[start : start + BATCH]
            there.update(edge.UpdateOperation.upsert_points(some))
        there.optimize()
        yield there
    finally:
        there.close()
        shutil.rmtree(folder)


def answers(there: Any, queries: MultiVectors, params: Any) -> tuple[Any, npt.NDArray[Any], float]:
    """Return the ten best documents (m, 10), their scores, and the CPU seconds that searches took."""
    ids, scores = [], []
    seconds = 0.0
    for tokens in queries:
        request = edge.QueryRequest(
            query=edge.Query.Nearest(tokens.tolist()), limit=DEPTH, params=params
        )
        started = time.process_time()
        answer = there.query(request)
        seconds += time.process_time() - started
        ids.append([point.id for point in answer])
        scores.append([point.score for point in answer])
    return np.array(ids), np.array(scores), seconds


def recall(found: npt.NDArray[Any], truth: npt.NDArray[Any]) -> float:
    return float(
        np.mean([np.isin(right, ids).mean() for ids, right in zip(found, truth, strict=True)])
    )


def measured(tokens: Any, records: Any) -> dict[str, Any]:
    """Return the figures of the first fold of a task."""
    fold = next(iter(folds(records)))
    queries, documents, bank = (
        of_texts(tokens, texts).normalised() for texts in (fold.queries, fold.items, fold.bank)
    )
    layout = MultiVectorLayout(documents.dim, "COSINE")
    correction = Correction.fit(layout, DEFAULT_ESTIMATOR, bank, gallery=documents)
    biases = correction.centred(documents)
    biases = biases - biases.mean()
    quantised = MultiVectorLayout(
        documents.dim, "COSINE", BiasSlots(spread=COLUMNS_OF_MULTI_VECTORS)
    )
    quantised = with_bias_scale(quantised, documents, biases)

    # What a search returns is a sum over the query's tokens.
    lengths = queries.lengths[:, None]
    raw = maxsim(queries, documents)
    corrected = raw - biases
    sides = {
        "plain": (documents, queries, raw),
        "corrected": (layout.augment(documents, biases), layout.encode_queries(queries), corrected),
    }
    task: dict[str, Any] = {
        "queries": len(queries),
        "documents": len(documents),
        "tokens": len(documents.tokens),
        "bias_scale": quantised.slots.scale,
    }

    exact = edge.SearchParams(exact=True)
    at_one: dict[str, npt.NDArray[np.float64]] = {}
    seconds: dict[str, float] = {}
    for side, (rows, sent, scores) in sides.items():
        with shard(rows) as there:
            ids, found, seconds[side] = answers(there, sent, exact)
        expected = lengths * np.take_along_axis(scores, ids, 1)
        error = np.abs(found - expected).max() / np.abs(expected).max()
        at_one[side] = np.array(
            [ids[row, 0] in right for row, right in enumerate(fold.positives)], float
        )
        task[side] = {
            "R@1": 100 * float(at_one[side].mean()),
            "dense R@1": 100 * float(hits(scores, fold.positives).mean()),
            "largest relative error of a score": float(error),
        }
    task["gain"] = list(paired_difference(100 * at_one["plain"], 100 * at_one["corrected"]))
    dense = [hits(scores, fold.positives) for _, _, scores in sides.values()]
    task["dense gain"] = list(paired_difference(100 * dense[0], 100 * dense[1]))
    task["scan"] = seconds["corrected"] / seconds["plain"]

    few = slice(0, RECALL_QUERIES)
    for side, (rows, sent, scores) in sides.items():
        truth = np.argsort(-scores[few], 1)[:, :DEPTH]
        with shard(rows, graph=True) as there:
            found, _, _ = answers(there, sent[few], edge.SearchParams(hnsw_ef=64))
        task[side]["HNSW"] = recall(found, truth)

    as_stored = edge.SearchParams(quantization=edge.QuantizationSearchParams(rescore=False))
    truth = np.argsort(-raw[few], 1)[:, :DEPTH]
    with shard(documents, int8=True) as there:
        task["plain"]["int8"] = recall(answers(there, queries[few], as_stored)[0], truth)
    truth = np.argsort(-corrected[few], 1)[:, :DEPTH]
    for name, stored in {"int8": quantised, AS_THEY_ARE: layout}.items():
        with shard(stored.augment(documents, biases), int8=True) as there:
            found, _, _ = answers(there, stored.encode_queries(queries[few]), as_stored)
        task["corrected"][name] = recall(found, truth)
    return task


def tables(results: dict[str, Any]) -> str:
    of_gains = []
    of_recall = []
    for name, task in results["tasks"].items():
        plain, corrected = task["plain"], task["corrected"]
        of_gains.append(
            [
                name,
                f"{task['documents']:,} ({task['tokens']:,} tokens)",
                f"{plain['R@1']:.1f}",
                points(task["gain"]),
                points(task["dense gain"]),
                f"{max(side['largest relative error of a score'] for side in (plain, corrected)):.1e}",
                f"{task['scan']:.2f}",
            ]
        )
        of_recall.append(
            [
                name,
                *(f"{plain[kind]:.3f} → {corrected[kind]:.3f}" for kind in ("HNSW", "int8")),
                f"{corrected[AS_THEY_ARE]:.3f}",
                f"{task['bias_scale']:g}",
            ]
        )
    return "\n".join(
        [
            "R@1 of exact scans, the gain of the default in points, and the same computed densely.",
            "",
            table(
                ["task", "documents", "R@1", "gain", "dense", "error of a score", "scan's cost"],
                of_gains,
            ),
            "",
            "Recall@10 of the plain and of the corrected ranking.",
            "",
            table(["task", "HNSW", "int8", "int8 with biases as they are", "scale"], of_recall),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--tokens", type=Path)
    arguments = parser.parse_args()
    started = time.monotonic()
    one_thread()

    records, tokens = records_and_tokens(arguments.tokens)
    results: dict[str, Any] = {"tasks": {}}
    for name in NAMES:
        results["tasks"][name] = measured(tokens, records[name])
        print(name, results["tasks"][name], flush=True)

    markdown = tables(results)
    print(markdown)
    if arguments.save:
        results["environment"] = environment(started)
        save("late_interaction_engine", results, markdown)


if __name__ == "__main__":
    main()
