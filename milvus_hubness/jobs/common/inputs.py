"""The query banks of a job, and texts of their queries, from files and collections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from milvus_hubness.basics.files.columns import FORMATS, ONLY, format_of, open_columns
from milvus_hubness.basics.files.opening import open_file
from milvus_hubness.basics.progress import silent
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.kernels.multi_vectors import MultiVectors, is_multi, stacked
from milvus_hubness.errors import EmptyBank, InvalidInput, UnreadableFile, name_some
from milvus_hubness.jobs.common.progress import key_chunks
from milvus_hubness.jobs.store.protocols import Store

COLLECTION_PREFIX = "collection:"
"""With this begins the name of a bank that is read from a collection, not from a file."""


def read_bank(store: Store, spec: str, column: str | None = None) -> QueryBank:
    """Read a query bank from a file or a collection.

    column: needed if there are several. Raises as QueryBank.load.
    """
    if not spec.startswith(COLLECTION_PREFIX):
        return QueryBank.load(spec, column)

    collection = spec.removeprefix(COLLECTION_PREFIX)
    info = store.info(collection)
    if column is None and len(info.vector_fields) != 1:
        names = ", ".join(map(repr, info.vector_fields)) or "none"
        raise InvalidInput(
            f"{collection!r} does not have one vector field to read: choose one of {names}"
        )

    field = column or next(iter(info.vector_fields))
    info.require_field(field)
    state = info.states.get(field)
    vector = info.vector_fields[field]
    if state is not None and not state.codec.leaves_vectors:
        raise InvalidInput(
            f"{collection!r} is a corrected collection: its stored vectors are no queries"
        )

    vectors = [
        store.get(info.name, keys, field, partition=partition).vectors
        for partition, keys in key_chunks(store, info, "reading the bank", silent)
    ]
    if not vectors:
        raise EmptyBank(f"collection {collection!r} is empty: a bank needs at least one query")

    queries = stacked(vectors, vector.dim, are_multi=vector.multi_vectors)
    if is_multi(queries):
        # Rows without the vector are named, as NaN in single vectors is.
        queries = MultiVectors(queries.tokens, queries.offsets, what=f"the bank from {spec}")
    return QueryBank(queries, source=spec)


def read_texts(store: Store | None, spec: str, column: str, count: int) -> list[str]:
    """Read the texts of `count` queries from this column of a file or
    collection, in the order of `read_bank`. Raises InvalidInput if there
    is no such column or another number of texts, and UnreadableFile.

    store: of the collection; None where only files are read.
    """
    if store is not None and spec.startswith(COLLECTION_PREFIX):
        info = store.info(spec.removeprefix(COLLECTION_PREFIX))
        # A store reads rows together with one of their vectors, whichever it is.
        field = next(iter(info.vector_fields))
        rows = [
            row
            for partition, keys in key_chunks(store, info, "reading the texts", silent)
            for row in store.get(info.name, keys, field, partition=partition).rows
        ]
        if any(column not in row for row in rows):
            raise InvalidInput(
                f"{info.name!r} has no field {column!r}: choose one of {name_some(sorted(rows[0]))}"
            )

        texts = [row[column] for row in rows]
    else:
        texts = _read_column(spec, column)

    if len(texts) != count:
        raise InvalidInput(f"{column!r} of {spec} has {len(texts)} texts for {count} queries")

    return [str(text) for text in texts]


def _read_column(path: str, column: str) -> list[Any]:
    """Return a column of keys or texts.

    Raises UnreadableFile, and InvalidInput if the file has no such column.
    """
    with open_columns(path) as columns:
        if columns.names == [ONLY]:
            # A missing file is the fault to name.
            with open_file(path):
                pass
            named = ", ".join(suffix for suffix in FORMATS if suffix != format_of(Path(path)))
            raise UnreadableFile(
                f"{path}: has no columns: a file with {column!r} is a {named} file"
            )
        if column not in columns.names:
            raise InvalidInput(
                f"{Path(path).name} has no column {column!r}: add it, or name another one"
            )
        return columns.values(column)
