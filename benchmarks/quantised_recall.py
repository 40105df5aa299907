"""How much of a correction quantisers keep: recall@10 of the exact corrected ranking, by scale and spread.

    python -m benchmarks.quantised_recall [--rows N] [--queries N] [--part codes|rescored]

The items of two tasks with the biases of NNN(32, 0.75), in the quantisers of Qdrant (qdrant-edge-py, the Rust engine
embedded, without a graph and without rescoring) and of Milvus (FAISS). Columns: plain vectors, against the plain
ranking; and augmented vectors, against the exact corrected ranking: as they are where nothing is quantised, with the
scale 4·f in one column, f = ρ/sd(b), with f in 8 columns, and with f in as many as the dimension asks for. A migration
chooses the last for every quantiser of Qdrant but 1-bit binary, and for RaBitQ in Milvus. FAISS also has the
graph hint column, which a migration writes for Milvus, but not for RaBitQ and SQ4U.

docstring_code in 1,536 dimensions is docstring_code turned by a random rotation into more dimensions, which changes no
score: with it the rule for the spread was chosen, as with docstring_code itself. caption_translation had no part in
that choice. Rescored: Qdrant finds oversampling × 10 items by their codes, and ranks those by their vectors.

Exits with 1 where the spread form has a lower recall than the form as it is by more than two standard errors, or, on
caption_translation in int8, more than 0.03 below plain."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, NamedTuple

import faiss
import numpy as np
import numpy.typing as npt
import qdrant_edge as edge

from benchmarks.environment import RESULTS, environment, save, table
from milvus_hubness import NNN, Layout, QueryBank
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.index_hints import measured_on
from milvus_hubness.correction.codec.parts import BiasSlots
from milvus_hubness.correction.codec.quantisation import spread_for, with_bias_scale, with_spread
from milvus_hubness.correction.fitted import Correction
from tests.support.real_data import load_task

LIMIT = 10
ROTATED = "docstring_code in 1,536 dimensions"
TASKS = ("docstring_code", ROTATED, "caption_translation")
REPORTED = "caption_translation"
CLOSE = 0.03
OVERSAMPLINGS = (1.0, 2.0, 4.0, 10.0)
SPREAD = "spread by dimension"
POINTS_PER_REQUEST = 2_000


class Gallery(NamedTuple):
    """Items (n, d) and queries (m, d) of length 1, and centred biases (n,) of the items."""

    items: Floats
    queries: Floats
    biases: Floats


@dataclass(frozen=True)
class Form:
    """Stored vectors (n, width), queries (m, width), and the numbers (m, LIMIT) of the right answers."""

    stored: Floats
    sent: Floats
    exact: npt.NDArray[np.int64]


Search = Callable[[Floats, Floats], npt.NDArray[np.int64]]
"""Build an index over stored vectors, and return the numbers of the LIMIT best of each query."""


def loaded(name: str, rows: int, queries: int) -> Gallery:
    task = load_task(name.partition(" ")[0])
    items: Floats = task.gallery[task.gallery.any(axis=1)][:rows]
    asked: Floats = task.query[task.query.any(axis=1)][:queries]
    bank: Floats = task.bank[task.bank.any(axis=1)]
    if name == ROTATED:
        rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(1_536, items.shape[1])))[0]
        items, asked, bank = (
            np.asarray(part @ rotation.T, np.float32) for part in (items, asked, bank)
        )
    fitted = Correction.fit(Layout(items.shape[1], "IP"), NNN(32, 0.75), QueryBank.of(bank))
    centred = replace(fitted, mean_bias=float(fitted.centred(items).mean()))
    return Gallery(items, asked, centred.centred(items))


def forms_of(gallery: Gallery, *, graph_hint: bool, multiple_of: int) -> dict[str, Form]:
    items, queries, biases = gallery
    dim = items.shape[1]
    scores = queries @ items.T
    best = np.argsort(-scores, axis=1, kind="stable")[:, :LIMIT]
    corrected = np.argsort(-(scores - biases), axis=1, kind="stable")[:, :LIMIT]

    def augmented(layout: Layout) -> Form:
        return Form(layout.augment(items, biases), layout.encode_queries(queries), corrected)

    in_one = Layout(dim, "IP", multiple_of=multiple_of)
    size = 1 / math.sqrt(dim)
    scale = 2.0 ** round(math.log2(size / float(biases.std())))
    spread = with_bias_scale(with_spread(in_one, spread_for(dim, "IP")), items, biases)
    forms = {
        "plain": Form(items, queries, best),
        "as it is": augmented(in_one),
        "4·f in 1 column": augmented(replace(in_one, slots=BiasSlots(scale=4 * scale))),
        "8 columns": augmented(with_bias_scale(with_spread(in_one, 8), items, biases)),
        SPREAD: augmented(spread),
    }
    if graph_hint:
        forms["with a graph hint"] = augmented(measured_on(in_one, items, queries))
    return forms


def shares(form: Form, search: Search) -> npt.NDArray[np.float64]:
    """Return the recall of each query, (m,)."""
    found = search(form.stored, form.sent)
    return np.array(
        [np.isin(true, got).mean() for true, got in zip(form.exact, found, strict=True)]
    )


def in_qdrant(quantization: Any, oversampling: float | None = None) -> Search:
    def search(stored: Floats, sent: Floats) -> npt.NDArray[np.int64]:
        config = edge.EdgeConfig(
            vectors=edge.EdgeVectorParams(size=stored.shape[1], distance=edge.Distance.Dot),
            quantization_config=quantization,
            # All vectors are compared, by their codes.
            hnsw_config=edge.HnswIndexConfig(m=16, ef_construct=100, full_scan_threshold=10**7),
            optimizers=edge.EdgeOptimizersConfig(indexing_threshold=1, default_segment_number=1),
            wal_enabled=False,
        )
        rescoring = edge.QuantizationSearchParams(
            rescore=oversampling is not None, oversampling=oversampling
        )
        params = edge.SearchParams(quantization=rescoring)
        with tempfile.TemporaryDirectory() as folder:
            shard = edge.EdgeShard.create(folder, config)
            for start in range(0, len(stored), POINTS_PER_REQUEST):
                part = enumerate(stored[start : start + POINTS_PER_REQUEST], start)
                points = [edge.Point(number, row.tolist(), {}) for number, row in part]
                shard.update(edge.UpdateOperation.upsert_points(points))
            shard.optimize()
            found = np.full((len(sent), LIMIT), -1, np.int64)
            for row, query in enumerate(sent):
                request = edge.QueryRequest(
                    query=edge.Query.Nearest(query.tolist()), limit=LIMIT, params=params
                )
                found[row] = [point.id for point in shard.query(request)]
            shard.close()
        return found

    return search


def in_faiss(make: Callable[[int], Any]) -> Search:
    def search(stored: Floats, sent: Floats) -> npt.NDArray[np.int64]:
        index = make(stored.shape[1])
        index.train(stored)
        index.add(stored)
        found: npt.NDArray[np.int64] = index.search(sent, LIMIT)[1]
        return found

    return search


def qdrant_quantisers() -> dict[str, Search]:
    int8 = edge.ScalarType.Int8
    turbo, bits = edge.TurboQuantQuantizationConfig, edge.TurboQuantBitSize
    binary, encoding = edge.BinaryQuantizationConfig, edge.BinaryQuantizationEncoding
    configs = {
        "int8, quantile 0.99": edge.ScalarQuantizationConfig(type=int8, quantile=0.99),
        "int8, no quantile": edge.ScalarQuantizationConfig(type=int8),
        "turbo, default": turbo(),
        "turbo, 2 bits": turbo(bits=bits.Bits2),
        "turbo, 1 bit": turbo(bits=bits.Bits1),
        "binary, 2 bits": binary(encoding=encoding.TwoBits),
        "binary, 1 bit": binary(),
    }
    return {name: in_qdrant(config) for name, config in configs.items()}


def faiss_quantisers() -> dict[str, Search]:
    product = faiss.METRIC_INNER_PRODUCT

    def scalar(kind: str) -> Search:
        quantizer = getattr(faiss.ScalarQuantizer, kind)
        return in_faiss(lambda width: faiss.IndexScalarQuantizer(width, quantizer, product))

    def rabitq(width: int) -> Any:
        rotation = faiss.RandomRotationMatrix(width, width)
        return faiss.IndexPreTransform(rotation, faiss.IndexRaBitQ(width, product))

    def pq(width: int) -> Any:
        index = faiss.IndexPQ(width, 32, 8, product)
        index.pq.cp.niter, index.pq.cp.max_points_per_centroid = 10, 16
        index.pq.cp.min_points_per_centroid = 1
        return index

    return {
        "SQ8": scalar("QT_8bit"),
        "SQ6": scalar("QT_6bit"),
        "SQ4 (FAISS only)": scalar("QT_4bit"),
        "SQ4U": scalar("QT_4bit_uniform"),
        "RaBitQ": in_faiss(rabitq),
        "PQ, m = 32": in_faiss(pq),
    }


def measured(gallery: Gallery, quantisers: dict[str, Search], *, is_faiss: bool) -> dict[str, Any]:
    """Return for each quantiser and form the recall, and the standard error of its mean over the queries."""
    forms = forms_of(gallery, graph_hint=is_faiss, multiple_of=32 if is_faiss else 16)
    found: dict[str, Any] = {}
    for quantiser, search in quantisers.items():
        cells = {}
        for name, form in forms.items():
            recalls = shares(form, search)
            error = recalls.std(ddof=1) / math.sqrt(len(recalls))
            cells[name] = [round(float(recalls.mean()), 4), round(float(error), 4)]
        found[quantiser] = cells
        print(quantiser, cells, flush=True)
    return found


def rescored(gallery: Gallery) -> dict[str, dict[str, float]]:
    """Return for quantisers of Qdrant the recall of the form that a migration chooses, by oversampling."""
    forms = forms_of(gallery, graph_hint=False, multiple_of=16)
    bits = edge.TurboQuantBitSize.Bits2
    configs = {
        "int8, quantile 0.99": edge.ScalarQuantizationConfig(
            type=edge.ScalarType.Int8, quantile=0.99
        ),
        "turbo, 2 bits": edge.TurboQuantQuantizationConfig(bits=bits),
        "binary, 1 bit": edge.BinaryQuantizationConfig(),
    }
    found: dict[str, dict[str, float]] = {}
    for name, config in configs.items():
        form = forms["as it is" if name == "binary, 1 bit" else SPREAD]
        found[name] = {
            f"{oversampling:g}": round(
                float(shares(form, in_qdrant(config, oversampling)).mean()), 4
            )
            for oversampling in OVERSAMPLINGS
        }
        print("rescored", name, found[name], flush=True)
    return found


def shown(found: dict[str, dict[str, Any]], facts: dict[str, Any]) -> str:
    texts = []
    for name, quantisers in found.items():
        heads = list(next(iter(quantisers.values())))
        rows = [
            [quantiser, *(f"{cells[head][0]:.3f}" for head in heads)]
            for quantiser, cells in quantisers.items()
        ]
        about = facts[name]
        role = "reported only" if name.startswith(REPORTED) else "chosen on"
        texts.append(
            f"{name} ({role}): {about['rows']:,} rows, {about['dim']:,} dimensions, sd(b) {about['deviation']:.3f}, "
            f"by dimension f = {about['scale']:g} in {about['spread']} columns.\n\n{table(['quantiser', *heads], rows)}"
        )
    return "\n\n".join(texts)


def shown_rescored(found: dict[str, dict[str, dict[str, float]]]) -> str:
    rows = [
        [task, quantiser, *(f"{share:.3f}" for share in shares.values())]
        for task, quantisers in found.items()
        for quantiser, shares in quantisers.items()
    ]
    heads = [f"oversampling {oversampling:g}" for oversampling in OVERSAMPLINGS]
    return f"Qdrant, rescored.\n\n{table(['task', 'quantiser', *heads], rows)}"


def by_codes(rows: int, queries: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the recalls by task and engine, and the facts of each task."""
    found: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for task in TASKS:
        gallery = loaded(task, rows, queries)
        dim = gallery.items.shape[1]
        layout = with_bias_scale(
            Layout(dim, "IP", BiasSlots(spread=spread_for(dim, "IP"))),
            gallery.items,
            gallery.biases,
        )
        about = {
            "rows": len(gallery.items),
            "dim": dim,
            "deviation": float(gallery.biases.std()),
            "scale": layout.slots.scale,
            "spread": layout.slots.spread,
        }
        for engine, quantisers in (("Qdrant", qdrant_quantisers()), ("FAISS", faiss_quantisers())):
            if task == ROTATED:
                quantisers = {name: search for name, search in quantisers.items() if "int8" in name}
            if not quantisers:
                continue
            key = f"{task}, {engine}"
            print(key, flush=True)
            facts[key] = about
            found[key] = measured(gallery, quantisers, is_faiss=engine == "FAISS")
    return found, facts


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=7_000)
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--part", choices=["codes", "rescored"])
    options = parser.parse_args()
    started = time.monotonic()
    path = RESULTS / "quantised_recall.json"
    # A part is kept with the other one.
    results: dict[str, Any] = (
        json.loads(path.read_text()) if path.is_file() and options.part else {}
    )
    if options.part != "rescored":
        results["recall"], results["facts"] = by_codes(options.rows, options.queries)
    if options.part != "codes":
        tasks = [task for task in TASKS if task != ROTATED]
        results["rescored"] = {
            task: rescored(loaded(task, options.rows, options.queries)) for task in tasks
        }
    text = "\n\n".join(
        [
            shown(results.get("recall", {}), results.get("facts", {})),
            shown_rescored(results.get("rescored", {})),
        ]
    )
    print(text)
    results["queries"] = options.queries
    results["versions"] = {"qdrant_edge": version("qdrant-edge-py"), "faiss": faiss.__version__}
    results["environment"] = environment(started)
    save("quantised_recall", results, text)
    return int(
        any(_worse(key, quantisers) for key, quantisers in results.get("recall", {}).items())
    )


def _worse(key: str, quantisers: dict[str, Any]) -> bool:
    """Whether the spread form keeps less than the present one, or int8 takes too much. Of 1-bit binary, which keeps
    signs only, a plan warns."""
    for name, cells in quantisers.items():
        if name == "binary, 1 bit":
            continue
        (spread, error), (present, _), (plain, _) = cells[SPREAD], cells["as it is"], cells["plain"]
        if spread < present - 2 * error:
            return True
        if key.startswith(REPORTED) and "int8" in name and spread < plain - CLOSE:
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())
