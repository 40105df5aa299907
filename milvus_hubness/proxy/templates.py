"""The values of filter templates as Python has them. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milvus_hubness.errors import UnsupportedOperation


def filled(values: Mapping[str, Any]) -> dict[str, Any]:
    """What pymilvus takes as filter_params. Raises UnsupportedOperation for values of an unknown kind."""
    return {name: _value(value) for name, value in values.items()}


def _value(value: Any) -> Any:
    kept = value.WhichOneof("val")
    if kept != "array_val":
        return getattr(value, kept)
    of = value.array_val.WhichOneof("data")
    if of not in ("bool_data", "long_data", "double_data", "string_data"):
        raise UnsupportedOperation(f"the proxy cannot take {of} as a value of a filter here")
    return list(getattr(value.array_val, of).data)
