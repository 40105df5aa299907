"""What re-ranking costs, for benchmarks.quari."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.quari_rivals import CANDIDATES
from milvus_hubness.extras.quari.model import Quari
from milvus_hubness.extras.quari.reranker import QuariReranker
from milvus_hubness.extras.quari.settings import QuariConfig

SPEED_REPEATS = 60
REMEMBERED = 6000
WITH_MEMORY = "linear maps and memory"


def products(config: QuariConfig) -> int:
    """Multiplications of one query and its candidates, of the matrix products alone."""
    recalled = 2 * config.memory * config.dim
    return (
        2 * config.dim**2
        + recalled
        + CANDIDATES * (1 + min(config.directions, config.dim)) * config.dim
    )


def speed() -> list[dict[str, Any]]:
    """As `timed`, on one thread and on as many as there are cores."""
    before = torch.get_num_threads()
    try:
        return [row for threads in (1, os.cpu_count() or 1) for row in timed(threads)]
    finally:
        torch.set_num_threads(before)


def timed(threads: int) -> list[dict[str, Any]]:
    """Milliseconds a query for 1,000 candidates of 512-d in batches of 16, from arrays to scores; in turn
    with it, for what else the machine does, a plain product of two matrices."""
    torch.set_num_threads(threads)
    rng, found = np.random.default_rng(0), []
    queries = rng.normal(size=(16, 512)).astype(np.float32)
    items = list(rng.normal(size=(16, CANDIDATES, 512)).astype(np.float32))
    left, right = torch.randn(1024, 512), torch.randn(512, 1024)
    for name, sizes in (("linear maps", {}), (WITH_MEMORY, {"memory": REMEMBERED})):
        reranker = QuariReranker(Quari(QuariConfig(512, **sizes)), candidates=CANDIDATES)
        config = reranker.network.config

        def adapt(reranker: QuariReranker = reranker) -> None:
            with torch.inference_mode():
                reranker.network(torch.from_numpy(queries))

        whole, of_queries, plain = [], [], []
        for _ in range(SPEED_REPEATS):
            whole.append(
                _seconds(lambda reranker=reranker: reranker.scores(queries, items)) / len(queries)
            )
            of_queries.append(_seconds(adapt) / len(queries))
            plain.append(_seconds(lambda: left @ right) / (1024 * 512 * 1024))
        found.append(
            {
                "sizes": name,
                "threads": threads,
                "median ms": 1000 * float(np.median(whole)),
                "least ms": 1000 * min(whole),
                "of that the queries": 1000 * float(np.median(of_queries)),
                "multiplications": products(config),
                "plain product, median ms": 1000 * products(config) * float(np.median(plain)),
                "plain product, least ms": 1000 * products(config) * min(plain),
                "times the plain product, median": float(
                    np.median(np.array(whole) / np.array(plain))
                )
                / products(config),
            }
        )
    return found


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
