"""What a collection that another program made can hold, for the stores of frameworks. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from pymilvus import DataType

from milvus_hubness.errors import InvalidInput

_INTEGERS = (DataType.INT8, DataType.INT16, DataType.INT32, DataType.INT64)
_REALS = (DataType.FLOAT, DataType.DOUBLE)
_PYTHON_TYPES: dict[DataType, type | tuple[type, ...]] = {
    DataType.VARCHAR: str,
    DataType.BOOL: bool,
    **dict.fromkeys(_INTEGERS, Integral),
    **dict.fromkeys(_REALS, Real),
    DataType.ARRAY: (list, tuple),
}
"""The types of values by the type of their field; for other fields Milvus decides."""


@dataclass(frozen=True)
class RowForm:
    """The fields of a collection."""

    collection: str
    """Its name, for messages."""

    fields: Mapping[str, Mapping[str, Any]]
    """The fields by name, as `describe_collection` has them."""

    is_dynamic: bool
    """Whether rows may have further fields."""

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> RowForm:
        """Return the form of the collection that `describe_collection` describes."""
        fields = {field["name"]: field for field in description["fields"]}
        return cls(
            description["collection_name"], fields, bool(description.get("enable_dynamic_field"))
        )

    def expect_fields(
        self, types: Mapping[str, Collection[DataType]], *, dynamic: Collection[str] = ()
    ) -> None:
        """Check that the fields exist that a store reads and writes, and are of one of these types.

        dynamic: those of them that rows may have as dynamic fields. Raises InvalidInput.
        """
        for name, allowed in types.items():
            field = self.fields.get(name)
            if field is None and self.is_dynamic and name in dynamic:
                continue
            if field is None:
                raise InvalidInput(f"{self._unfit}: it has no field {name!r}; {self._remedy}")
            if field["type"] not in allowed:
                named = " or ".join(DataType(item).name for item in allowed)
                raise InvalidInput(
                    f"{self._unfit}: its field {name!r} is {DataType(field['type']).name}, not "
                    f"{named}; {self._remedy}"
                )

    def undeclared(self, names: Iterable[str]) -> list[str]:
        """Return those of the names that only dynamic fields can have."""
        return [name for name in names if name not in self.fields]

    def expect_in_row(self, row: Mapping[str, Any], names: Iterable[str]) -> None:
        """Check that a row of the collection has these fields. Raises InvalidInput."""
        for name in names:
            if row.get(name) is None:
                raise InvalidInput(
                    f"{self._unfit}: its rows have no field {name!r}; {self._remedy}"
                )

    def expect_rows(
        self, rows: Iterable[Mapping[str, Any]], *, by_generated_key: bool = False
    ) -> None:
        """Check that the collection can hold the rows, before any is written. Raises InvalidInput.

        by_generated_key: the rows name keys that Milvus generated, for an upsert. Vectors are not
        checked.
        """
        for row in rows:
            for name in row:
                if name not in self.fields and not self.is_dynamic:
                    raise InvalidInput(
                        f"collection {self.collection!r} has no field {name!r} and no dynamic "
                        f"fields: leave {name!r} out of the metadata"
                    )
            for name, field in self.fields.items():
                is_generated = field.get("auto_id") or field.get("is_function_output")
                if not is_generated or (by_generated_key and field.get("is_primary")):
                    self._expect_value(field, name, row)
                elif name in row:
                    raise InvalidInput(
                        f"collection {self.collection!r} makes the values of {name!r} itself: "
                        "write without them, or name another collection"
                    )

    def _expect_value(self, field: Mapping[str, Any], name: str, row: Mapping[str, Any]) -> None:
        value = row.get(name)
        if value is None:
            if not (field.get("nullable") or "default_value" in field):
                raise InvalidInput(
                    f"every row of collection {self.collection!r} needs the field {name!r}: add "
                    "it to the metadata, or name another collection"
                )
            return

        data_type = DataType(field["type"])
        expected = _PYTHON_TYPES.get(data_type, object)
        # In Python a bool is a number, in Milvus it is not.
        is_misplaced = isinstance(value, bool) and data_type in (*_INTEGERS, *_REALS)
        if is_misplaced or not isinstance(value, expected):
            raise InvalidInput(
                f"field {name!r} of collection {self.collection!r} is {data_type.name}, the value "
                f"{value!r:.80} is not: convert it, or name another collection"
            )
        if isinstance(value, str) and data_type == DataType.VARCHAR:
            limit = int(field["params"].get("max_length", 65_535))
            size = len(value.encode())
            if size > limit:
                raise InvalidInput(
                    f"field {name!r} of collection {self.collection!r} holds {limit:,} bytes, a "
                    f"value has {size:,}: shorten it, or name another collection"
                )

    @property
    def _unfit(self) -> str:
        return f"collection {self.collection!r} cannot be used by this store"

    @property
    def _remedy(self) -> str:
        return (
            f"it has {', '.join(self.fields)}: name its fields to the store, or another collection"
        )
