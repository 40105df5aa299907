"""Arrays of structs in rows: the vectors of a sub-field such as `chunks[embedding]`. No I/O.

A struct field has for each row an array of structs, and a struct a value of each sub-field:

    {"id": 1, "chunks": [{"text": "a", "embedding": [...]}, {"text": "b", "embedding": [...]}]}

Milvus calls a sub-field `chunks[embedding]`, as indexes and searches name it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from milvus_hubness.correction.codec.arrays import UNIT_TOLERANCE
from milvus_hubness.correction.kernels.multi_vectors import MultiVectors

_SUB_FIELD = re.compile(r"(?P<struct>[^\[\]]+)\[(?P<sub>[^\[\]]+)\]")


def struct_and_sub(name: str) -> tuple[str, str] | None:
    """Return the struct field and the sub-field of a name such as `chunks[embedding]`; None for
    the name of another field.
    """
    match = _SUB_FIELD.fullmatch(name)
    return (match["struct"], match["sub"]) if match else None


def parts_of(name: str) -> tuple[str, str]:
    """Return the struct field and the sub-field of the name of a sub-field."""
    parts = struct_and_sub(name)
    if parts is None:
        raise ValueError(f"{name!r} is the name of no sub-field")
    return parts


def top_level(name: str) -> str:
    """Return the field of a row that holds the values of a field or sub-field."""
    parts = struct_and_sub(name)
    return name if parts is None else parts[0]


def vectors_in(row: Mapping[str, Any], name: str) -> list[Any]:
    """Return the vectors of a sub-field in the array of structs of a row, one for each struct.

    An empty list if the row has no structs.
    """
    struct, sub = parts_of(name)
    return [element[sub] for element in row.get(struct) or ()]


def without_vectors(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a row whose structs lack a sub-field."""
    struct, sub = parts_of(name)
    elements = row.get(struct)
    if elements is None:
        return dict(row)
    others = [{key: value for key, value in each.items() if key != sub} for each in elements]
    return {**row, struct: others}


def with_vectors(row: Mapping[str, Any], name: str, vectors: Sequence[Any]) -> dict[str, Any]:
    """Return a row whose structs have these vectors in a sub-field.

    vectors: one for each struct; whatever they are if the row has no structs.
    """
    struct, sub = parts_of(name)
    elements = row.get(struct)
    if not elements:
        return dict(row)
    changed = [{**each, sub: vector} for each, vector in zip(elements, vectors, strict=True)]
    return {**row, struct: changed}


def put_vectors(row: MutableMapping[str, Any], name: str, vectors: Sequence[Any]) -> None:
    """Set the vectors of a sub-field in the array of structs of a row, in place."""
    struct, sub = parts_of(name)
    for element, vector in zip(row[struct], vectors, strict=True):
        element[sub] = vector


def sub_field_name(struct: str, sub: str) -> str:
    """Return the name by which indexes and searches know a sub-field."""
    return f"{struct}[{sub}]"


def problem_of_lengths(metric: str, vectors: MultiVectors, names: Sequence[Any]) -> str:
    """Return a message about a vector of a field of structs whose length MAX_SIM_COSINE would lose.

    It is empty if there is none. names: of the rows. Corrected rows are compared by inner products,
    and the length of a vector has no place in them.
    """
    if metric != "COSINE":
        return ""
    lengths = np.linalg.norm(vectors.tokens.astype(np.float64), axis=1)
    odd = np.flatnonzero(np.abs(lengths - 1) > UNIT_TOLERANCE)
    if not len(odd):
        return ""
    row = int(np.searchsorted(vectors.offsets, odd[0], side="right")) - 1
    return (
        f"{names[row]} has a vector of length {lengths[odd[0]]:.6g} in {vectors.what}: under "
        "MAX_SIM_COSINE only those of length 1 are corrected: normalise them in float32"
    )
