"""Rows as Parquet files that a Milvus server imports."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from pymilvus import CollectionSchema, DataType
from pymilvus.client.entity_helper import convert_to_json
from pymilvus.exceptions import MilvusException

from milvus_hubness.basics.requirements import install_line
from milvus_hubness.errors import MissingExtra, StoreError
from milvus_hubness.jobs.store.generations import Row
from milvus_hubness.milvus.store import schema as milvus_schema
from milvus_hubness.milvus.store.banks import MilvusLedger

_SIMPLE = (str, int, float, type(None))
"""Types of values that JSON has."""


def _json_of(value: Any) -> str:
    """Return a value as JSON, as an insert writes it: with NumPy's numbers as numbers, and NaN as null.

    Raises TypeError, and MilvusException for keys that are no texts.
    """
    if isinstance(value, str):
        return json.dumps(value)
    text: bytes = convert_to_json(value)
    return text.decode()


def _dtype_of_bytes(vector_type: DataType | None) -> Any:
    """Return the dtype of vectors that a query returns as bytes; None for other fields."""
    if vector_type == DataType.FLOAT16_VECTOR:
        return np.float16
    if vector_type == DataType.INT8_VECTOR:
        return np.int8
    if vector_type == DataType.BFLOAT16_VECTOR:
        # It comes with pymilvus's bulk writer.
        from ml_dtypes import bfloat16

        return bfloat16

    return None


class ImportWriter:
    """pymilvus's bulk writer, for rows in the form that inserts take."""

    def __init__(self, collection: str, described: Row, folder: Path, file_bytes: int) -> None:
        """Open files in the folder.

        described: the collection. file_bytes: size at which another file starts.
        """
        self.described = described
        self._collection = collection
        self._folder = folder
        self._types = {field["name"]: DataType(field["type"]) for field in described["fields"]}
        schema = CollectionSchema.construct_from_dict(described)
        self._writer = _bulk_writer().LocalBulkWriter(schema, str(folder), file_bytes)

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows. Raises StoreError naming a row that cannot be added."""
        for row in rows:
            try:
                self._writer.append_row(
                    {name: self._bulk_value(name, value) for name, value in row.items()}
                )
            except (MilvusException, TypeError, ValueError) as error:
                key = row.get(milvus_schema.key_field(self.described)["name"])
                raise StoreError(
                    f"row {key!r} cannot be added to a file for {self._collection!r}: "
                    f"{getattr(error, 'message', error)}"
                ) from error

    def _bulk_value(self, name: str, value: Any) -> Any:
        """Return the JSON of a JSON field, and an array for the bytes of a vector, as the bulk
        writer needs them. Raises TypeError for a value that has no JSON.
        """
        field_type = self._types.get(name)
        if field_type == DataType.JSON and value is not None:
            return _json_of(value)
        if field_type is None and not isinstance(value, _SIMPLE):
            # The bulk writer would notice it at the end, and lose the whole file.
            _json_of(value)

        if isinstance(value, bytes):
            dtype = _dtype_of_bytes(field_type)
            if dtype is not None:
                return np.frombuffer(value, dtype)
        return value

    def commit(self) -> list[str]:
        """Write the last rows, and return the paths of all files. Raises StoreError."""
        with self._writer as writer:
            if not writer.total_row_count:
                return []

            writer.commit()
            if not writer.batch_files:
                raise StoreError(
                    f"no file could be created in {self._folder}: check its free space"
                )

            return [str(path) for paths in writer.batch_files for path in paths]


class MilvusBulk(MilvusLedger):
    """The store's method for import files."""

    def import_writer(
        self, collection: str, folder: Path, file_bytes: int = 128 << 20
    ) -> ImportWriter:
        """Return a writer of rows as the collection stores them. Raises MissingExtra."""
        described = self.client.describe_collection(collection)
        return ImportWriter(collection, described, folder, file_bytes)


def _bulk_writer() -> Any:
    """Import pymilvus.bulk_writer; undo its changes to
    the root logger and give it the log level of pymilvus.

    Raises MissingExtra.
    """
    root = logging.getLogger()
    handlers = list(root.handlers)
    level = root.level
    try:
        module = import_module("pymilvus.bulk_writer")
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"the bulk writer lacks a package: {install_line('bulk')} ({error})"
        ) from error
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)

    logging.getLogger(module.__name__).setLevel(logging.getLogger("pymilvus").level)
    return module
