"""GR-CLIP's MixBench (Li et al., 2025, arXiv 2507.19054) as a mixed gallery, for whoever has it.

    python -m benchmarks.mixed --mixbench FOLDER/MSCOCO FOLDER/Google_WIT FOLDER/VisualNews FOLDER/OVEN

MixBench is not among the sets of `benchmarks.data`: it is a download of images, and an encoder has to embed them.
It has about 1,000 queries for each of four subsets, whose items are an image, a text, or an image with its text, a
third of each. To measure kinds on it:

1. Get the files of a subset from huggingface.co/datasets/mixed-modality-search/MixBench25, as they are:
   queries.jsonl with a `query_id`, a `text` and an `image` on each line, mixed_corpus.jsonl with a `corpus_id`, a
   `text` and an `image`, and qrels/qrels.tsv with a header and the columns query_id, corpus_id and score. An item
   without a text or without an image has an empty string there, or null.
2. Embed queries and items with one model, such as CLIP ViT-B/32, in the order of the lines. An item or query with
   both is the mean of its two unit vectors, as GR-CLIP has it. Save float32 rows as queries.npy and
   mixed_corpus.npy beside the files.

The kind of an item follows from what it has: image, text, or image and text. Half of the queries, drawn as in the
other sets of pairs, are the bank; the other half is measured, in a gallery without the right items of the bank.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.mixed_galleries import Floats, Mixed
from benchmarks.reference import unit

LEAST_SCORE = 1
"""Items with this score or more are right."""


def mixbench(folder: Path) -> Iterator[Mixed]:
    """Yield the gallery of a subset in a folder. Raises SystemExit, in one line, if a file does not fit."""
    queries = _lines(folder / "queries.jsonl")
    items = _lines(folder / "mixed_corpus.jsonl")
    query_vectors = _vectors(folder / "queries.npy", len(queries))
    item_vectors = _vectors(folder / "mixed_corpus.npy", len(items))
    if query_vectors.shape[1] != item_vectors.shape[1]:
        raise SystemExit(
            f"{folder}: queries have {query_vectors.shape[1]} dimensions and items "
            f"{item_vectors.shape[1]}: embed both with one model"
        )
    rights = _rights(folder / "qrels" / "qrels.tsv", queries, items)

    # Items whose query is in the bank would flatter every method.
    judged = [number for number in range(len(queries)) if rights[number]]
    order = np.random.default_rng(0).permutation(judged)
    measured, bank = np.sort(order[: len(order) // 2]), np.sort(order[len(order) // 2 :])
    wanted = {item for number in measured for item in rights[number]}
    of_bank = {item for number in bank for item in rights[number]} - wanted
    gallery = np.array([item for item in range(len(items)) if item not in of_bank])
    number_of = {int(item): number for number, item in enumerate(gallery)}

    yield Mixed.of(
        query_vectors[measured],
        item_vectors[gallery],
        query_vectors[bank],
        np.array([kind_of(items[item]) for item in gallery]),
        [[number_of[item] for item in rights[number]] for number in measured],
        np.arange(len(measured)),
        query_kinds=np.array([kind_of(queries[number]) for number in measured]),
    )


def kind_of(line: dict[str, Any]) -> str:
    """Return what a query or an item has."""
    parts = [part for part in ("image", "text") if line.get(part)]
    return " and ".join(parts) or "nothing"


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise SystemExit(
            f"{path} is missing: `python -c 'help(\"benchmarks.mixbench\")'` says which files are needed"
        )
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def _vectors(path: Path, count: int) -> Floats:
    if not path.is_file():
        raise SystemExit(f"{path} is missing: embed the lines of {path.stem}.jsonl in their order")
    rows = np.load(path)
    if rows.ndim != 2 or len(rows) != count:
        raise SystemExit(
            f"{path} has the shape {rows.shape}, but {path.stem}.jsonl has {count} lines"
        )
    return unit(rows.astype(np.float32))


def _rights(
    path: Path, queries: list[dict[str, Any]], items: list[dict[str, Any]]
) -> list[list[int]]:
    """Return the right items of each query by their numbers."""
    if not path.is_file():
        raise SystemExit(f"{path} is missing: it has the columns query_id, corpus_id and score")
    query_numbers = {str(line["query_id"]): number for number, line in enumerate(queries)}
    item_numbers = {str(line["corpus_id"]): number for number, line in enumerate(items)}
    rights: list[list[int]] = [[] for _ in queries]
    with path.open(newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            if int(row["score"]) >= LEAST_SCORE:
                rights[query_numbers[row["query_id"]]].append(item_numbers[row["corpus_id"]])
    return rights
