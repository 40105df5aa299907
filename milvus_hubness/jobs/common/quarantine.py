"""Rows that the hub guard held back: they are in a collection of their own, which nobody searches.

A mark in the row itself would have to be a filter of each search, of plain clients too, or a bias so
large that it spoils the range of a quantiser and vanishes at strength 0. Elsewhere a row costs searches
nothing, and no job that rewrites the collection meets it. The ledger is no place for it: who may write
there steers all jobs, and clients that only write rows may not.

Whoever lists or releases rows names the collection as it was written, by its present name, or by an
alias: an alias moves to a copy, and the rows that were held back before go with it.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from milvus_hubness.basics.bounds import Count, FrozenModel, Moment, Text, read_record, shown
from milvus_hubness.errors import InvalidInput, StateError
from milvus_hubness.jobs.common.lease_records import now
from milvus_hubness.jobs.store.ownership import QUARANTINE
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import CollectionInfo, Record

HELD = "held"
"""The group of the records of rows that were held back."""

PART_CHARACTERS = 40_000
"""Characters of a row in one record: JSON escapes may lengthen them by half."""


class WrittenAs(Protocol):
    """How a row was written."""

    @property
    def method(self) -> str: ...

    @property
    def partition_name(self) -> str | None: ...


class _Body(FrozenModel):
    """A part of a row that was held back."""

    collection: Text
    key: int | str | None
    at: Moment
    partition: Text = ""
    part: Count
    parts: Count
    """The number of parts; a record of a later part is left over from a former version of the row."""
    text: str
    """A part of the row as JSON."""


class HeldRow(FrozenModel):
    """A row that the hub guard held back."""

    id: Text
    """What names it in the quarantine."""
    collection: Text
    """The name by which it was written."""
    key: int | str | None
    """Its key; None where the server would have made one."""
    at: Moment
    """When it was written."""
    partition: Text = ""
    """The partition for it; empty for the default one."""
    text: str
    """The row as JSON."""
    record_keys: tuple[Text, ...] = ()
    """The keys of its records in the quarantine; none before it is there."""

    @classmethod
    def of(
        cls, collection: str, key_field: str, row: Mapping[str, Any], write: WrittenAs
    ) -> HeldRow:
        key = row.get(key_field)
        # A later version of a row takes the place of an earlier one, as in the collection.
        name = uuid.uuid4().hex if key is None else json.dumps(key)
        digest = uuid.uuid5(uuid.NAMESPACE_OID, json.dumps([collection, name])).hex
        return cls(
            id=f"{HELD}/{digest}",
            collection=collection,
            key=key,
            at=now(),
            partition=write.partition_name or "",
            text=json.dumps(_packed(dict(row))),
        )

    @property
    def row(self) -> dict[str, Any]:
        """The row as it was written. Raises StateError if somebody has changed the record."""
        identity = self.facts["id"]
        try:
            row = _unpacked(json.loads(self.text))
        except (ValueError, TypeError, RecursionError) as error:
            problem = shown(error)
        else:
            if isinstance(row, dict):
                return row
            problem = "it is no row"
        raise StateError(
            f"row {identity} in {QUARANTINE!r} is broken ({problem}): forget it by `milvus-hubness "
            f"hubs {shown(self.collection)} --forget {identity}`"
        )

    @property
    def facts(self) -> dict[str, Any]:
        """What commands show of it."""
        return {"id": self.id.partition("/")[2], "key": self.key, "at": self.at.isoformat()}


def make_quarantine(store: Store) -> None:
    """Create the collection of rows that are held back, so that clients need not be allowed to."""
    store.put_records(QUARANTINE, [])


def hold_rows(rows: Sequence[HeldRow], store: Store) -> None:
    """Put rows into the quarantine; a former row of the same key and collection is replaced.

    It reads nothing: the quarantine may be large. Parts that only the former row had are ignored, and
    go with the row.
    """
    # One write may have a key twice: the last one counts.
    rows = list({row.id: row for row in rows}.values())
    store.put_records(QUARANTINE, [record for row in rows for record in _records_of(row)])


def held_rows(store: Store, info: CollectionInfo, requested: str) -> list[HeldRow]:
    """Return the rows held back from a collection, the oldest first.

    requested: the name that the caller used.
    """
    names = {requested, info.name, *info.aliases}
    # In the order of their keys: by row, and then by part.
    records = sorted(store.records(QUARANTINE, HELD), key=lambda record: record.key)
    rows: list[HeldRow] = []
    for identity, of_row in groupby(records, key=lambda record: record.key.rpartition("/")[0]):
        keyed = [(record.key, _body_in(record)) for record in of_row]
        first = keyed[0][1]
        if first.collection in names:
            rows.append(
                HeldRow(
                    id=identity,
                    collection=first.collection,
                    key=first.key,
                    at=first.at,
                    partition=first.partition,
                    text="".join(body.text for _, body in keyed if body.part < first.parts),
                    record_keys=tuple(key for key, _ in keyed),
                )
            )
    return sorted(rows, key=lambda row: (row.at, row.id))


def chosen_rows(rows: Iterable[HeldRow], keys: Sequence[str], collection: str) -> list[HeldRow]:
    """Return the rows of these keys or ids, as texts. Raises InvalidInput for one that is none."""
    by_name: dict[str, HeldRow] = {}
    for row in rows:
        by_name[row.facts["id"]] = row
        if row.key is not None:
            by_name[str(row.key)] = row
    for key in keys:
        if key not in by_name:
            raise InvalidInput(
                f"no row {key!r} of {collection!r} is in quarantine: `milvus-hubness hubs "
                f"{collection} --quarantined` lists them"
            )
    return list({by_name[key].id: by_name[key] for key in keys}.values())


def drop_held(store: Store, rows: Sequence[HeldRow]) -> None:
    """Remove rows, as `held_rows` returned them, from the quarantine."""
    keys = [key for row in rows for key in row.record_keys]
    if keys:
        store.drop_records(QUARANTINE, HELD, keys)


def _body_in(record: Record) -> _Body:
    """Return the part of a row in a record. Raises StateError, which names it."""
    return read_record(
        _Body.model_validate_json,
        record.body,
        f"the record {shown(record.key)!r}",
        f"delete it from {QUARANTINE!r}",
    )


def _records_of(row: HeldRow) -> list[Record]:
    """Return the records of a row, each with a part of its text."""
    starts = range(0, len(row.text), PART_CHARACTERS)
    records: list[Record] = []
    for part, start in enumerate(starts):
        body = _Body(
            collection=row.collection,
            key=row.key,
            at=row.at,
            partition=row.partition,
            part=part,
            parts=len(starts),
            text=row.text[start : start + PART_CHARACTERS],
        )
        records.append(Record(f"{row.id}/{part:06d}", HELD, body.model_dump_json()))
    return records


def _packed(value: Any) -> Any:
    """Return a value of a row as JSON has it; what JSON lacks becomes an object with one "$…"."""
    if isinstance(value, np.ndarray):
        text = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"$array": [value.dtype.str, list(value.shape), text]}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        # Sparse vectors have whole numbers as keys, which JSON would make texts of.
        if any(not isinstance(key, str) or key.startswith("$") for key in value):
            return {"$items": [[_packed(key), _packed(inner)] for key, inner in value.items()]}
        return {key: _packed(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_packed(inner) for inner in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise InvalidInput(
        f"a row with a {type(value).__name__} cannot be held back: write it as a list of numbers"
    )


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if "$array" in value:
        dtype, shape, text = value["$array"]
        return np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()
    if "$bytes" in value:
        return base64.b64decode(value["$bytes"])
    if "$items" in value:
        return {_unpacked(key): _unpacked(inner) for key, inner in value["$items"]}
    return {key: _unpacked(inner) for key, inner in value.items()}
