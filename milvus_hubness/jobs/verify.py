"""Whether a corrected copy holds exactly what its source holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction import read_back
from milvus_hubness.errors import VerificationFailed, name_some
from milvus_hubness.halves import SMALLEST, SPACING, kept
from milvus_hubness.jobs.progress import Progress, chunks, silent
from milvus_hubness.layout import Floats
from milvus_hubness.state import CollectionState
from milvus_hubness.stores.base import Batch, CollectionInfo, Key, Store

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Verification:
    """rows and fields compared, one by one."""

    rows: int
    fields: int


def verify(
    store: Store,
    source: CollectionInfo,
    target: str,
    state: CollectionState,
    *,
    progress: Progress = silent,
) -> Verification:
    """Compare the key sets, every copied field of every row, the vectors read back, and the biases.

    Vectors must come back bit for bit; under COSINE, where a row was not unit, within one unit in the last
    place of the field's type (float16: or 2⁻²⁴ of the row's length, near zero). Raises VerificationFailed
    naming the first rows that differ.
    """
    rows = fields = 0
    for partition in source.partitions:
        keys = store.keys(source.name, partition=partition)
        _compare_keys(keys, store.keys(target, partition=partition), source.name, target)
        for part in chunks(keys, store.chunk_rows(source), "verifying", progress):
            wanted = store.fetch(source.name, part, state.field, partition=partition)
            copied = store.fetch(target, part, state.field, partition=partition)
            fields += _compare_rows(wanted, copied, state)
            rows += len(part)
    counted = store.count(target)
    if counted != rows:
        raise VerificationFailed(f"{target!r} counts {counted} rows for {rows} keys: rows were doubled")
    return Verification(rows, fields)


def _compare_keys(wanted: list[Key], copied: list[Key], source: str, target: str) -> None:
    missing = sorted(set(wanted) - set(copied))
    extra = sorted(set(copied) - set(wanted))
    if missing or extra:
        told = []
        if missing:
            told.append(f"{len(missing)} keys of {source!r} are missing ({name_some(missing)})")
        if extra:
            told.append(f"{len(extra)} keys are not in {source!r} ({name_some(extra)})")
        raise VerificationFailed(
            f"{target!r} differs: {'; '.join(told)}. Was {source!r} written to during the copy?"
        )


def _compare_rows(wanted: Batch, copied: Batch, state: CollectionState) -> int:
    if copied.keys != wanted.keys:
        raise VerificationFailed(f"rows vanished while they were compared: {name_some(wanted.keys)}")
    hidden = set(state.hidden_fields)
    compared = 0
    for key, before, after in zip(wanted.keys, wanted.rows, copied.rows, strict=True):
        names = set(before) | (set(after) - hidden)
        differing = [name for name in sorted(names) if not _same(before.get(name), after.get(name))]
        if differing:
            raise VerificationFailed(f"row {key!r} differs in {', '.join(differing)}")
        compared += len(names) + 1
    _require(wanted.keys, _vectors_recovered(wanted, copied, state), "vectors are not read back")
    _require(wanted.keys, _biases_sound(copied, state), "biases are not finite or differ from their column")
    return compared


def _vectors_recovered(wanted: Batch, copied: Batch, state: CollectionState) -> Flags:
    vectors = read_back(state, copied.vectors, copied.rows)
    exact = _equal(vectors, wanted.vectors).all(axis=1)
    if not state.norm_field:
        return np.asarray(exact, np.bool_)
    norms = np.array([row[state.norm_field] for row in copied.rows], np.float64)
    unit = SPACING[state.dtype] * np.abs(wanted.vectors)
    floor = SMALLEST[state.dtype] * np.maximum(norms, 1)[:, None]
    near = np.abs(vectors - wanted.vectors) <= np.maximum(unit, floor)
    rescaled = norms != 1
    return np.asarray(exact | (near.all(axis=1) & rescaled), np.bool_)


def _biases_sound(copied: Batch, state: CollectionState) -> Flags:
    stored = state.layout.biases(copied.vectors, state.profile.slot)
    column = np.array([row[state.bias_field] for row in copied.rows], np.float32)
    scale = np.float32(state.layout.scale)
    wanted = kept(column / scale, state.dtype) * scale
    return np.asarray(np.isfinite(stored) & (stored == wanted), np.bool_)


def _require(keys: list[Key], sound: Flags, complaint: str) -> None:
    if broken := [key for key, fine in zip(keys, sound, strict=True) if not fine]:
        raise VerificationFailed(f"{complaint}: rows {name_some(broken)}")


def _equal(a: Floats, b: Floats) -> Flags:
    return np.asarray((a == b) | (np.isnan(a) & np.isnan(b)), np.bool_)


def _same(a: Any, b: Any) -> bool:
    """Equality of field values in which NaN equals NaN."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)
