"""FAISS, imported where it is needed, from the one distribution of it that is installed."""

from __future__ import annotations

from functools import cache
from importlib.metadata import distributions
from typing import Any

from milvus_hubness.errors import FaissConflict


@cache
def import_faiss() -> Any:
    """The faiss module; raises FaissConflict if two distributions have written it over each other."""
    installed = {str(distribution.name).lower().replace("_", "-") for distribution in distributions()}
    gpu = sorted(name for name in installed if name.startswith("faiss-gpu"))
    if gpu and "faiss-cpu" in installed:
        raise FaissConflict(
            f"faiss-cpu and {gpu[0]} are both installed, one over the other's files; to keep the GPU build: "
            f"pip uninstall -y faiss-cpu && pip install --force-reinstall --no-deps {gpu[0]}"
        )
    import faiss

    return faiss
