"""The real sets of `python -m benchmarks.data` by their protocol; tests of a missing set skip, with its command."""

from __future__ import annotations

import json
import os
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.data import data_folder, missing
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import Estimator, FittedBias

DATA = data_folder()

TASKS = (
    "docstring_code",
    "caption_translation",
    "caption_document",
    "text_video_msrvtt t2v",
    "text_video_msrvtt v2t",
    "clip_products t2i",
    "clip_products i2t",
    "reranker_scores t2v",
)
EMBEDDING_TASKS = TASKS[:-1]
LARGEST = "caption_translation"
LARGEST_APART = [
    *(task for task in TASKS if task != LARGEST),
    pytest.param(LARGEST, marks=pytest.mark.long),
]

needs_real_data = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"no real data in {DATA}: python -m benchmarks.data docstring_code"
)


def require(reason: str | None) -> None:
    """Skip the running test, or end a benchmark, if there is a reason."""
    if reason and "PYTEST_CURRENT_TEST" in os.environ:
        pytest.skip(reason)
    if reason:
        raise SystemExit(reason)


class Task(NamedTuple):
    """query (n_queries, d), gallery (n_items, d), bank (m, d), target_bank (t, d) where there is one.

    positives: (n_queries,) the number of each query's gallery item.
    """

    query: npt.NDArray[np.float32]
    gallery: npt.NDArray[np.float32]
    bank: npt.NDArray[np.float32]
    target_bank: npt.NDArray[np.float32] | None
    positives: npt.NDArray[np.int64]


class Rows(dict[str, dict[str, tuple[float, float]]]):
    """{task: {method: (R@1 in percent, skewness of N_10)}}; a task that is not there is as a missing set."""

    def __missing__(self, task: str) -> dict[str, tuple[float, float]]:
        require(missing(folder_of(task), DATA) or f"no row {task!r} in {DATA / 'reference.json'}")
        raise KeyError(task)


def reference() -> Rows:
    """Return the figures that plain formulas give."""
    path = DATA / "reference.json"
    cells: dict[str, dict[str, list[float]]] = (
        json.loads(path.read_text()) if path.is_file() else {}
    )
    return Rows(
        {
            task: {method: (r1, skew) for method, (r1, skew) in row.items()}
            for task, row in cells.items()
        }
    )


def folder_of(task: str) -> str:
    """Return the name of the set that a task reads."""
    name = task.partition(" ")[0]
    return "reranker_scores_msrvtt" if name == "reranker_scores" else name


@cache
def load_task(name: str) -> Task:
    """One of TASKS. Its test is skipped, or the benchmark ends, if its set is missing."""
    require(missing(folder_of(name), DATA))
    folder, _, direction = name.partition(" ")
    if folder == "text_video_msrvtt":
        return _halves(*_in_direction(direction, _read(folder, "text"), _read(folder, "video")))
    if folder == "clip_products":
        text, image = _unit(_read(folder, "text")), _unit(_read(folder, "image"))
        return _halves(*_in_direction(direction, text, image))
    if folder == "reranker_scores":
        scores = _read("reranker_scores_msrvtt", "scores")
        test, bank = _split(len(scores))
        columns = scores[:, test]
        unit_vectors = np.eye(len(test), dtype=np.float32)
        return Task(columns[test], unit_vectors, columns[bank], None, np.arange(len(test)))
    query, gallery, bank = (_unit(_read(folder, part)) for part in ("query", "gallery", "bank"))
    target_bank = _unit(_read(folder, "target_bank")) if folder == "docstring_code" else None
    if folder == "caption_document":
        positives = np.load(DATA / folder / "positives.npy").astype(np.int64)
    else:
        positives = np.arange(len(query))
    return Task(query, gallery, bank, target_bank, positives)


def _halves(query: npt.NDArray[np.float32], gallery: npt.NDArray[np.float32]) -> Task:
    test, bank = _split(len(query))
    return Task(query[test], gallery[test], query[bank], gallery[bank], np.arange(len(test)))


def _split(n: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    order = np.random.default_rng(0).permutation(n)
    return order[: n // 2], order[n // 2 :]


def _in_direction(direction: str, text: Any, other: Any) -> tuple[Any, Any]:
    return (text, other) if direction.startswith("t") else (other, text)


def _read(folder: str, part: str) -> npt.NDArray[np.float32]:
    return np.load(DATA / folder / f"{part}.npy").astype(np.float32)


def _unit(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms > 0, norms, 1)


@cache
def fit_on(name: str, estimator: Estimator, bank_size: int | None = None) -> FittedBias:
    """The estimator fitted on a task, its bank cut at `bank_size`."""
    task = load_task(name)
    bank = QueryBank.of(task.bank[:bank_size])
    return estimator.fit(bank, gallery=task.gallery, target_bank=task.target_bank)


def recall_at_1(name: str | Task, *fits: FittedBias | None) -> list[float]:
    """R@1 in percent on a task, or one of TASKS, under each fit, None for the raw search, in one pass over the scores.

    As `quality.ranks` has it: a tie, up to float32 rounding, counts for the query.
    """
    task = load_task(name) if isinstance(name, str) else name
    biases = [np.float32(0) if fitted is None else fitted.bias(task.gallery) for fitted in fits]
    found = np.zeros(len(fits))
    for start in range(0, len(task.query), 500):
        part = slice(start, start + 500)
        scores = task.query[part] @ task.gallery.T
        positives = task.positives[part, None]
        for which, bias in enumerate(biases):
            corrected = scores - bias
            own = np.take_along_axis(corrected, positives, 1)[:, 0]
            best = corrected.max(1)
            found[which] += (own >= best - 5e-7 * np.maximum(abs(best), abs(scores).max(1))).sum()
    return (100 * found / len(task.query)).tolist()
