"""Struct fields of Milvus: how they are described, copied and compared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from pymilvus import CollectionSchema, DataType

from milvus_hubness.milvus.structs import parts_of, sub_field_name

_BYTES_OF_NUMBERS = {
    DataType.FLOAT16_VECTOR,
    DataType.BFLOAT16_VECTOR,
    DataType.INT8_VECTOR,
}
"""Vectors of structs that a query returns as lists of numbers, and an insert takes as bytes."""

MAX_SIM = {"MAX_SIM_IP": "IP", "MAX_SIM_COSINE": "COSINE"}
"""The metrics of sub-fields that can be corrected, and those by which they compare two vectors.

Their scores are sums over the vectors of a query.
"""

_CONTENT = ("dim", "max_length", "max_capacity")
"""Parameters of a field that say what it can hold."""


def metric_of_structs(metric: str) -> str:
    """Return the metric by which vectors of structs are compared with each other, from that of their
    index; that of an index which cannot be corrected as it is.
    """
    # By a metric of single vectors, a search returns structs and not rows.
    return MAX_SIM.get(
        metric, metric if metric.startswith("MAX_SIM") else metric and f"{metric} of single vectors"
    )


def is_struct(field: Mapping[str, Any]) -> bool:
    """Whether a described field holds arrays of structs."""
    return bool(field.get("struct_fields"))


def sub_fields(schema: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the sub-fields of a described collection, each under its name in searches."""
    for field in schema["fields"]:
        for sub in field.get("struct_fields") or ():
            yield {**sub, "name": sub_field_name(field["name"], sub["name"])}


def all_fields(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fields and the sub-fields of a described collection by name.

    A sub-field is nullable if its struct field is.
    """
    fields = {field["name"]: field for field in schema["fields"]}
    for sub in sub_fields(schema):
        struct, _ = parts_of(sub["name"])
        fields[sub["name"]] = {**sub, "nullable": bool(fields[struct].get("nullable"))}
    return fields


def with_settings(
    schema: dict[str, Any], settings: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a described collection whose struct fields can be created from it.

    settings: by struct field, those that pymilvus leaves out of its description, such as mmap.
    pymilvus sends a text among the settings of a sub-field in quotes, and returns it with them.
    """

    def whole(field: dict[str, Any]) -> dict[str, Any]:
        if not is_struct(field):
            return field

        params = {**settings.get(field["name"], {}), **field.get("params", {})}
        subs = [
            {**sub, "params": {name: _unquoted(value) for name, value in sub["params"].items()}}
            if sub.get("params")
            else sub
            for sub in field["struct_fields"]
        ]
        return {**field, "params": params, "struct_fields": subs}

    return {**schema, "fields": [whole(field) for field in schema["fields"]]}


def _unquoted(value: Any) -> Any:
    if isinstance(value, str) and value.startswith('"') and value.endswith('"'):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def insertable_elements(elements: Any, field: Mapping[str, Any]) -> Any:
    """Return the array of structs of a row, as a query returns it, in the form that pymilvus
    inserts.

    elements: a list of dictionaries, or None where the field is null.
    """
    if elements is None:
        return None

    types = {sub["name"]: DataType(sub["type"]) for sub in field["struct_fields"]}
    return [
        {name: _insertable(value, types.get(name)) for name, value in element.items()}
        for element in elements
    ]


def _insertable(value: Any, field_type: DataType | None) -> Any:
    if field_type in _BYTES_OF_NUMBERS and not isinstance(value, bytes):
        # Those of bfloat16 come as the numbers of their bits where NumPy lacks the type.
        return np.array(value).tobytes()
    if field_type == DataType.BINARY_VECTOR and isinstance(value, list):
        return value[0]
    return value.tolist() if isinstance(value, np.ndarray) else value


def largest_row(schema: Mapping[str, Any]) -> int:
    """Return the bytes of the vectors that the structs of one row may have."""
    size = 0
    for field in schema["fields"]:
        capacity = int(field.get("params", {}).get("max_capacity") or 0)
        for sub in field.get("struct_fields") or ():
            size += capacity * 4 * int(sub.get("params", {}).get("dim") or 0)
    return size


def differences(requested: CollectionSchema, described: Mapping[str, Any]) -> list[str]:
    """Return what a created collection has in another way than it was requested, or lacks.

    Compares names, types, and how much each field and sub-field can hold. A server may add fields.
    """
    created = {field["name"]: field for field in [*described["fields"], *sub_fields(described)]}
    wanted = requested.to_dict()
    fields = [(field["name"], field, field["type"]) for field in wanted["fields"]]
    for struct in wanted.get("struct_fields", ()):
        fields.append((struct["name"], {}, DataType.ARRAY))
        for sub in struct["fields"]:
            fields.append((sub_field_name(struct["name"], sub["name"]), sub, sub["type"]))

    different = []
    for name, field, field_type in fields:
        if name not in created:
            different.append(f"it has no field {name!r}")
            continue

        actual = created[name]
        if actual["type"] != field_type:
            different.append(
                f"field {name!r} is {DataType(actual['type']).name}, not "
                f"{DataType(field_type).name}"
            )
        for limit in _CONTENT:
            ordered = field.get("params", {}).get(limit)
            given = actual.get("params", {}).get(limit)
            if ordered is not None and given is not None and int(given) != int(ordered):
                different.append(f"{limit} of field {name!r} is {given}, not {ordered}")

    return different
