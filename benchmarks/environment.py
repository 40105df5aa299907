"""Where a benchmark ran, and how its results are kept."""

from __future__ import annotations

import json
import os
import platform
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from threadpoolctl import threadpool_limits

# Jobs are timed on random vectors, which no verdict would have corrected; benchmarks.verdict is about it.
os.environ.setdefault("MILVUS_HUBNESS_VERDICT", "skip")

RESULTS = Path(__file__).parent / "results"


def one_thread() -> None:
    """Let PyTorch, FAISS and the linear algebra of NumPy compute in one thread each.

    So times mean the same on every machine, and others can work on this one. A second thread of theirs also waits
    for work in a busy loop, which would count as CPU time of the work that is measured.
    """
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    threadpool_limits(1)


def environment(started: float) -> dict[str, Any]:
    """The machine, the versions, and how long the benchmark took; started: `time.monotonic()` then."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(memory / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "milvus_hubness": version("milvus-hubness"),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "seconds": round(time.monotonic() - started, 1),
    }


def save(name: str, results: dict[str, Any], markdown: str | None = None) -> None:
    """results/name.json, and results/name.md where there is a table."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    if markdown is not None:
        (RESULTS / f"{name}.md").write_text(markdown.rstrip() + "\n")


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
