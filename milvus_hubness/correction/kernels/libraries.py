"""The import of FAISS, which two distributions may have overwritten."""

from __future__ import annotations

import subprocess
import sys
import warnings
from functools import cache
from typing import Any

from milvus_hubness.errors import FaissConflict

SEARCH_ON_EVERY_GPU = """
import faiss
import numpy as np

rows = np.eye(8, dtype=np.float32)
for device in range(faiss.get_num_gpus()):
    index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), device, faiss.IndexFlatIP(8))
    index.add(rows)
    _, nearest = index.search(rows, 1)
    assert (nearest[:, 0] == range(8)).all()
"""
"""A program that ends with 0 if FAISS finds the right rows on each GPU."""

PROBE_SECONDS = 120.0
"""How long that may take: the first call on a GPU loads FAISS's machine code."""


@cache
def import_faiss() -> Any:
    """Return the faiss module. Raises FaissConflict if two distributions overwrote each other."""
    from importlib.metadata import distributions

    installed = {
        str(distribution.name).lower().replace("_", "-") for distribution in distributions()
    }
    gpu = sorted(name for name in installed if name.startswith("faiss-gpu"))
    if gpu and "faiss-cpu" in installed:
        raise FaissConflict(
            f"faiss-cpu and {gpu[0]} are both installed, one over the other's files; "
            "to keep the GPU build: pip uninstall -y faiss-cpu && "
            f"pip install --force-reinstall --no-deps {gpu[0]}"
        )
    import faiss

    return faiss


@cache
def faiss_runs_on_gpus() -> bool:
    """Return whether the installed FAISS searches on the GPUs of this machine, once in a process.

    A build for GPUs has machine code for some of them. On another, such as the package
    faiss-gpu-cu12 1.14 on an H100, FAISS does not raise: it aborts the process. So a process of its
    own tries it, and a failure is a warning with its last words.
    """
    faiss = import_faiss()
    if not hasattr(faiss, "StandardGpuResources"):
        return False

    try:
        tried = subprocess.run(
            [sys.executable, "-c", SEARCH_ON_EVERY_GPU],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"no answer in {PROBE_SECONDS:.0f} s"
    else:
        if tried.returncode == 0:
            return True
        reason = (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]

    warnings.warn(
        f"FAISS {faiss.__version__} does not search on this machine's GPU, so that exact kernels "
        f"compute there: install faiss-gpu 1.15 or later ({reason})",
        RuntimeWarning,
        stacklevel=2,
    )
    return False
