"""Milvus's index types for dense vectors: their parameters, types and ranges, and which servers have them.

Source: milvus.io/docs, "Floating Vector Indexes" and "GPU-enabled Indexes"; where the pages differ from
Knowhere's own checks (nbits), the checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from milvus_hubness.errors import InvalidParameter
from milvus_hubness.stores.base import VectorField
from milvus_hubness.stores.milvus_rpc import version_numbers

INT_MAX = 2**31 - 1
NEWEST = (99,)
"""What a version that is no number is taken for."""


@dataclass(frozen=True)
class Whole:
    """A whole number from low to high, also as text. needed_before: the version from which Milvus has a
    default."""

    low: int
    high: int
    needed_before: tuple[int, ...] = (0,)

    def accepts(self, value: Any) -> bool:
        text = str(value)
        return text.isascii() and text.isdecimal() and self.low <= int(text) <= self.high

    def __str__(self) -> str:
        return f"a whole number from {self.low:,} to {self.high:,}"


@dataclass(frozen=True)
class OneOf:
    """One of these words, in any case."""

    words: tuple[str, ...]

    def accepts(self, value: Any) -> bool:
        return str(value).upper() in self.words

    def __str__(self) -> str:
        return f"one of {', '.join(self.words)}"


@dataclass(frozen=True)
class IndexType:
    """parameters: by name. since: the first version of Milvus that has it. on_lite: Milvus Lite builds it."""

    parameters: Mapping[str, Whole | OneOf] = field(default_factory=dict)
    since: tuple[int, ...] = (2, 3)
    on_lite: bool = False


BOOL = OneOf(("TRUE", "FALSE"))
REFINE: dict[str, Whole | OneOf] = {
    "refine": BOOL,
    "refine_type": OneOf(("SQ4U", "SQ6", "SQ8", "BF16", "FP16", "FP32", "FLAT")),
}
CELLS: dict[str, Whole | OneOf] = {"nlist": Whole(1, 65_536, (2, 4))}
GRAPH: dict[str, Whole | OneOf] = {"M": Whole(2, 2_048, (2, 4)), "efConstruction": Whole(1, INT_MAX, (2, 4))}
SUB_VECTORS, BITS = Whole(1, 65_536), Whole(1, 24)
CACHED: dict[str, Whole | OneOf] = {"cache_dataset_on_device": BOOL}
ALWAYS: dict[str, Whole | OneOf] = {"mmap.enabled": BOOL}
"""Parameters that every type has."""

INDEX_TYPES = {
    "AUTOINDEX": IndexType(on_lite=True),
    "FLAT": IndexType(on_lite=True),
    "IVF_FLAT": IndexType(CELLS, on_lite=True),
    "IVF_SQ8": IndexType(CELLS, on_lite=True),
    "IVF_PQ": IndexType({**CELLS, "m": Whole(1, 65_536, NEWEST), "nbits": BITS, **REFINE}),
    "IVF_RABITQ": IndexType({**CELLS, **REFINE}, since=(2, 6)),
    "SCANN": IndexType({**CELLS, "with_raw_data": BOOL}),
    "HNSW": IndexType(GRAPH, on_lite=True),
    "HNSW_SQ": IndexType(
        {**GRAPH, "sq_type": OneOf(("SQ4U", "SQ6", "SQ8", "BF16", "FP16")), **REFINE},
        since=(2, 5),
        on_lite=True,
    ),
    "HNSW_PQ": IndexType({**GRAPH, "m": SUB_VECTORS, "nbits": BITS, **REFINE}, since=(2, 5)),
    "HNSW_PRQ": IndexType(
        {**GRAPH, "m": SUB_VECTORS, "nbits": BITS, "nrq": Whole(1, 16), **REFINE}, since=(2, 5)
    ),
    "DISKANN": IndexType({"max_degree": Whole(1, 2_048), "search_list_size": Whole(1, 65_536)}),
    "GPU_CAGRA": IndexType(
        {
            "intermediate_graph_degree": Whole(1, INT_MAX),
            "graph_degree": Whole(1, INT_MAX),
            "build_algo": OneOf(("IVF_PQ", "NN_DESCENT")),
            "adapt_for_cpu": BOOL,
            **CACHED,
        },
        since=(2, 4),
    ),
    "GPU_IVF_FLAT": IndexType({**CELLS, **CACHED}),
    "GPU_IVF_PQ": IndexType({**CELLS, "m": SUB_VECTORS, "nbits": BITS, **CACHED}),
    "GPU_BRUTE_FORCE": IndexType(since=(2, 4)),
}


def validate_index(planned: VectorField, source: VectorField, server_version: str) -> None:
    """Raise InvalidParameter if a server of this version does not build the planned index.

    What the index of the source has is valid: its server has built it, and may be newer than this table.
    """
    kind, version = planned.index_type, version_numbers(server_version) or NEWEST
    lite = server_version.startswith("milvus_lite")
    built = {
        name: each for name, each in INDEX_TYPES.items() if (each.on_lite if lite else each.since <= version)
    }
    if kind == source.index_type:
        known, own = INDEX_TYPES.get(kind), source.index_params
        if known is None:
            return
    elif kind in built:
        known, own = built[kind], {}
    else:
        raise InvalidParameter(
            f"index type {kind!r} is not one that this server ({server_version}) builds: give one of "
            f"{', '.join(built)}, or give the source itself the index that its copy is to have"
        )
    rules = {**known.parameters, **ALWAYS}
    for name, value in planned.index_params.items():
        if name in own and str(own[name]) == str(value):
            continue
        if name not in rules:
            names = ", ".join(known.parameters) or "none"
            raise InvalidParameter(f"index type {kind} has no parameter {name!r}, it has: {names}")
        if not rules[name].accepts(value):
            raise InvalidParameter(f"{name} of {kind} must be {rules[name]}, not {value!r}")
    for name, rule in known.parameters.items():
        needed = isinstance(rule, Whole) and version < rule.needed_before and kind != source.index_type
        if needed and not lite and name not in planned.index_params:
            raise InvalidParameter(
                f"index type {kind} needs {name} on this server ({server_version}): give {rule} with "
                f"--index-param {name}=…"
            )
