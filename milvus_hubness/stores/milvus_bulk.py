"""Rows as Parquet files, written by pymilvus's bulk writer and imported by the server itself."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pymilvus import CollectionSchema, DataType
from pymilvus.client.types import BulkInsertState
from pymilvus.exceptions import MilvusException

from milvus_hubness.errors import StoreError
from milvus_hubness.stores import milvus_schema
from milvus_hubness.stores.base import Batch, CollectionInfo, ImportJob
from milvus_hubness.stores.milvus_ledger import MilvusLedger
from milvus_hubness.stores.milvus_rpc import imports_parquet, translated

BULK_WRITER_NEEDS = ("minio", "azure.storage.blob", "requests", "pyarrow", "ml_dtypes")
ONE_FILE = 2**40
"""Bytes after which the bulk writer would begin a further file of its own accord."""
_STATES: dict[int, Literal["done", "failed"]] = {
    BulkInsertState.ImportCompleted: "done",
    BulkInsertState.ImportFailed: "failed",
    BulkInsertState.ImportFailedAndCleaned: "failed",
}


class MilvusBulk(MilvusLedger):
    """The file methods of the store. Jobs are asked for over gRPC, which servers before 2.4 know nothing
    beside and later ones answer too."""

    def import_obstacles(self, source: CollectionInfo) -> list[str]:
        if self.is_lite:
            return ["Milvus Lite imports no files"]
        if not imports_parquet(self._version):
            return [f"this server, {self._version}, imports no Parquet files: Milvus does from 2.3.4 on"]
        if missing := [name for name in BULK_WRITER_NEEDS if not _is_installed(name)]:
            return [f"pymilvus's bulk writer needs {', '.join(missing)}: pip install 'milvus-hubness[bulk]'"]
        return [
            f"field {field['name']!r} is of a type that pymilvus's bulk writer does not write"
            for field in source.schema["fields"]
            if not _is_written(field)
        ]

    def write_import_file(
        self, collection: str, batches: Iterable[Batch], field: str, folder: Path
    ) -> str | None:
        with translated(collection):
            described = self.client.describe_collection(collection)
        form = milvus_schema.form_of(described, field)
        as_taken = _conversions(described)
        schema = CollectionSchema.construct_from_dict(described)
        with _bulk_writer().LocalBulkWriter(schema, str(folder), ONE_FILE) as writer:
            for batch in batches:
                stored = form.stored(batch.vectors)
                for key, row, vector in zip(batch.keys, batch.rows, stored, strict=True):
                    values = {**row, field: vector}
                    try:
                        writer.append_row({name: as_taken(name, value) for name, value in values.items()})
                    except MilvusException as error:
                        raise StoreError(
                            f"row {key!r} cannot be written to a file for {collection!r}: {error.message}"
                        ) from error
            if not writer.total_row_count:
                return None
            writer.commit()
            if not writer.batch_files:
                raise StoreError(f"no file could be written to {folder}: is there room for it?")
            [[path]] = writer.batch_files
            return Path(path).relative_to(folder).as_posix()

    def bulk_import(self, collection: str, file: str, *, partition: str | None = None) -> str:
        with self._writing(collection) as name:
            return str(self._connection.do_bulk_insert(name, partition or "", [file]))

    def import_job(self, job: str) -> ImportJob:
        with translated(f"import job {job}"):
            return _job(self._connection.get_bulk_insert_state(int(job)))

    def import_jobs(self, collection: str) -> list[ImportJob]:
        with translated(collection):
            return [_job(state) for state in self._connection.list_bulk_insert_tasks(0, collection)]

    @property
    def _connection(self) -> Any:
        # A MilvusClient has no method for imports, and those of pymilvus.utility know the connections of the
        # ORM only.
        return self.client._get_connection()


def _job(state: BulkInsertState) -> ImportJob:
    infos = state.infos
    return ImportJob(
        str(state.task_id),
        infos.get(BulkInsertState.IMPORT_FILES) or None,
        _STATES.get(state.state, "running"),
        infos.get(BulkInsertState.FAILED_REASON, ""),
    )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _bulk_writer() -> Any:
    """The module pymilvus.bulk_writer, without the root logger that importing it would set up, and no more
    talkative than the rest of pymilvus."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    module = import_module("pymilvus.bulk_writer")
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger(module.__name__).setLevel(logging.getLogger("pymilvus").level)
    return module


def _is_written(field: dict[str, Any]) -> bool:
    return DataType(field["type"]).name in _bulk_writer().constants.ARROW_TYPE_CREATOR


def _conversions(described: dict[str, Any]) -> Callable[[str, Any], Any]:
    """From a field's value as pymilvus's inserts take it to one that its bulk writer takes: it wants arrays
    for the bytes of these vectors, and reads a text for a JSON field as JSON."""
    dtypes = {
        DataType.FLOAT16_VECTOR: np.dtype(np.float16),
        DataType.BFLOAT16_VECTOR: np.dtype(import_module("ml_dtypes").bfloat16),
        DataType.INT8_VECTOR: np.dtype(np.int8),
    }
    kinds = {field["name"]: DataType(field["type"]) for field in described["fields"]}
    in_bytes = {name: dtypes[kind] for name, kind in kinds.items() if kind in dtypes}
    in_json = {name for name, kind in kinds.items() if kind == DataType.JSON}

    def as_taken(name: str, value: Any) -> Any:
        if value is None:
            return None
        if name in in_json:
            return json.dumps(value)
        if name in in_bytes and isinstance(value, bytes):
            return np.frombuffer(value, in_bytes[name])
        return value

    return as_taken
