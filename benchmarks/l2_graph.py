"""What the constants of the L2 form are worth: recall of an HNSW graph built on stored vectors.

    python -m benchmarks.l2_graph

FAISS HNSW (M 16, efConstruction 200) over galleries whose lengths vary, or do not: the L2 index on the vectors as they
are, asked for the exact nearest; and the inner product index on the augmented form, asked for the exact nearest with
strength 0 and for the exact corrected ones with strength 1 (NNN 32, .75 on a bank from the same source). The augmented
form in five ways: with m = 0 and s = 1, with m the mean of ½‖r‖², with m and s measured on the gallery, with the graph
hint column too, as a migration has it, and all measured on the bank, as a collection born corrected has it. rounding:
the largest error of a score in float32, over the mean of ½‖r‖². Exits with 1 where the form measured on the gallery
finds less than the L2 index by more than MARGIN."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import faiss
import numpy as np
import numpy.typing as npt

from benchmarks.environment import environment, one_thread, save, table
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.index_hints import measured_on
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.parts import HalfSquares
from milvus_hubness.correction.estimators import NNN
from milvus_hubness.correction.fitted import Correction
from tests.support.real_data import load_task

ROWS, QUERIES, BANK = 4_000, 200, 1_000
LIMIT = 10
LINKS, BUILD_BREADTH = 16, 200
BREADTHS = (64, 128)
MARGIN = 0.03

Places = npt.NDArray[np.int64]


class Gallery(NamedTuple):
    """items (n, d), queries (m, d), bank (k, d)."""

    items: Floats
    queries: Floats
    bank: Floats


def galleries() -> Iterator[tuple[str, Gallery]]:
    rng = np.random.default_rng(0)
    total = ROWS + QUERIES + BANK

    def cut(rows: npt.NDArray[np.float64]) -> Gallery:
        return Gallery(*np.split(rows.astype(np.float32), [ROWS, ROWS + QUERIES]))

    def lengths(count: int, spread: float) -> npt.NDArray[np.float64]:
        """(count, 1) log-normal."""
        return np.exp(spread * rng.standard_normal(count))[:, None]

    for dim in (16, 64, 128, 384):
        yield f"Gaussian, {dim}-d", cut(rng.standard_normal((total, dim)))
    gaussian = rng.standard_normal((total, 64))
    yield "Gaussian, 64-d, far from the origin", cut(gaussian + 20)
    unit = gaussian / np.linalg.norm(gaussian, axis=1, keepdims=True)
    yield "unit, 64-d", cut(unit)
    yield "unit × log-normal 0.3, 64-d", cut(unit * lengths(total, 0.3))
    yield "unit × log-normal 1, 64-d", cut(unit * lengths(total, 1.0))
    centroids = 3 * rng.standard_normal((50, 64))[rng.integers(0, 50, total)]
    yield "50 clusters, 64-d", cut(centroids + 0.5 * rng.standard_normal((total, 64)))
    for name in ("caption_translation", "text_video_msrvtt t2v"):
        task = load_task(name)
        parts = task.gallery[:ROWS], task.query[:QUERIES], task.bank[:BANK]
        yield name, Gallery(*parts)
        if name == "caption_translation":
            scaled = [(part * lengths(len(part), 0.3)).astype(np.float32) for part in parts]
            yield f"{name} × log-normal 0.3", Gallery(*scaled)


def layouts(gallery: Gallery) -> dict[str, Layout]:
    plain = Layout(gallery.items.shape[1], "L2")
    mean = 0.5 * float(np.mean(np.sum(gallery.items.astype(np.float64) ** 2, axis=1)))
    return {
        "m = 0, s = 1": plain,
        "m = mean, s = 1": replace(plain, half_squares=HalfSquares(offset=mean)),
        "measured, no link": measured_on(plain, gallery.items, graph_hint=False),
        "measured": measured_on(plain, gallery.items),
        "measured on the bank": measured_on(plain, gallery.bank),
    }


def graph(rows: Floats, metric: int) -> Any:
    index = faiss.IndexHNSWFlat(rows.shape[1], LINKS, metric)
    index.hnsw.efConstruction = BUILD_BREADTH
    index.add(rows)
    return index


def recalls(index: Any, query_vectors: Floats, wanted: Places) -> dict[str, float]:
    """recall@10 of the places wanted (m, 10), at each breadth of the search."""
    found = {}
    for breadth in BREADTHS:
        _, got = index.search(
            query_vectors, LIMIT, params=faiss.SearchParametersHNSW(efSearch=breadth)
        )
        hits = [
            len(set(row) & set(own)) for row, own in zip(got.tolist(), wanted.tolist(), strict=True)
        ]
        found[f"ef {breadth}"] = round(sum(hits) / wanted.size, 4)
    return found


def measured(gallery: Gallery) -> dict[str, Any]:
    items, queries, bank = gallery
    wide, query_vectors = items.astype(np.float64), queries.astype(np.float64)
    halves = 0.5 * np.sum(wide**2, axis=1)
    similarity = query_vectors @ wide.T - halves
    plain = Layout(items.shape[1], "L2")
    uncentred = Correction.fit(plain, NNN(32, 0.75), QueryBank.of(bank))
    biases = replace(uncentred, mean_bias=float(uncentred.centred(items).mean())).centred(items)
    nearest = {w: np.argsort(-(similarity - w * biases), axis=1)[:, :LIMIT] for w in (0.0, 1.0)}
    found: dict[str, Any] = {
        "rows": len(items),
        "half squares": {"mean": float(halves.mean()), "std": float(halves.std())},
        "L2 index": {"strength 0": recalls(graph(items, faiss.METRIC_L2), queries, nearest[0.0])},
    }
    for name, layout in layouts(gallery).items():
        stored = layout.augment(items, biases)
        index = graph(stored, faiss.METRIC_INNER_PRODUCT)
        products = layout.encode_queries(queries, 0.0) @ stored.T
        found[name] = {
            f"strength {w:g}": recalls(index, layout.encode_queries(queries, w), wanted)
            for w, wanted in nearest.items()
        }
        part = layout.half_squares or HalfSquares()
        found[name]["constants"] = {"offset": part.offset, "scale": part.scale}
        squares = layout.scores(products, queries, 0.0)
        errors = np.abs(
            0.5 * np.sum(query_vectors**2, axis=1, keepdims=True) - squares / 2 - similarity
        )
        found[name]["rounding"] = float(errors.max() / halves.mean())
    return found


def as_markdown(found: dict[str, Any]) -> str:
    forms = [
        name
        for name in next(iter(found.values()))
        if name not in ("rows", "half squares", "L2 index")
    ]
    parts = []
    for strength in ("strength 0", "strength 1"):
        for breadth in (f"ef {breadth}" for breadth in BREADTHS):
            columns = [*(["L2 index"] if strength == "strength 0" else []), *forms]
            rows = [
                [name, *(f"{figures[form][strength][breadth]:.3f}" for form in columns)]
                for name, figures in found.items()
            ]
            parts.append(
                f"recall@10, {strength}, {breadth}\n\n{table(['gallery', *columns], rows)}"
            )
    rounding = [
        [name, *(f"{figures[form]['rounding']:.1e}" for form in forms)]
        for name, figures in found.items()
    ]
    parts.append(f"rounding\n\n{table(['gallery', *forms], rounding)}")
    return "\n\n".join(parts)


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    one_thread()
    faiss.omp_set_num_threads(1)
    started = time.monotonic()
    found: dict[str, Any] = {}
    for name, gallery in galleries():
        found[name] = measured(gallery)
        print(name, found[name]["measured"], flush=True)
    worst = min(
        figures["measured"]["strength 0"][breadth] - recall
        for figures in found.values()
        for breadth, recall in figures["L2 index"]["strength 0"].items()
    )
    results = {
        "galleries": found,
        "worst against the L2 index": round(worst, 4),
        "margin": MARGIN,
        "environment": environment(started),
    }
    markdown = as_markdown(found)
    save("l2_graph", results, markdown)
    print(markdown)
    return int(worst < -MARGIN)


if __name__ == "__main__":
    sys.exit(main())
