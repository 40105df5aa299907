"""Labelled pairs from a file: query vectors, each with the key of its right row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as parquet

from milvus_hubness.banks import QueryBank
from milvus_hubness.errors import InvalidInput, UnreadableFile, name_some
from milvus_hubness.stores.base import Key

QUERY_COLUMN, KEY_COLUMN = "query", "key"


def read_pairs(path: str) -> tuple[QueryBank, list[Key]]:
    """Arrays `query` (n, d) and `key` (n,) of an .npz, or columns so named in a .parquet or .arrow file.

    Raises UnreadableFile, InvalidInput where one of them is missing or their lengths differ.
    """
    queries = QueryBank.load(path, QUERY_COLUMN)
    try:
        if path.endswith(".npz"):
            with np.load(path, allow_pickle=False) as arrays:
                keys = arrays[KEY_COLUMN].tolist()
        else:
            read = parquet.read_table if path.endswith(".parquet") else feather.read_table
            keys = read(path, columns=[KEY_COLUMN]).column(KEY_COLUMN).to_pylist()
    except (KeyError, pa.ArrowException):
        raise InvalidInput(f"{Path(path).name} has no {KEY_COLUMN!r} beside {QUERY_COLUMN!r}") from None
    except (OSError, ValueError) as error:
        raise UnreadableFile(f"cannot read {KEY_COLUMN!r} of {path}: {error}") from None
    if len(keys) != len(queries):
        raise InvalidInput(f"{Path(path).name} has {len(keys)} keys for {len(queries)} queries")
    if odd := [key for key in keys if isinstance(key, bool) or not isinstance(key, int | str)]:
        raise InvalidInput(
            f"{KEY_COLUMN!r} of {Path(path).name} must hold whole numbers or texts, not {name_some(odd, 1)}"
        )
    return queries, keys
