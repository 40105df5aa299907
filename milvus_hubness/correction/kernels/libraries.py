"""The import of FAISS, which two distributions may have overwritten."""

from __future__ import annotations

from functools import cache
from typing import Any

from milvus_hubness.errors import FaissConflict


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
