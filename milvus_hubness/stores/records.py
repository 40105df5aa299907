"""The values that stores take and return: collections, fields, samples, records, write intents."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from milvus_hubness.banks.bank import Origins
from milvus_hubness.banks.generations import Key
from milvus_hubness.codec.arrays import Floats
from milvus_hubness.codec.half_precision import Dtype
from milvus_hubness.errors import InvalidInput
from milvus_hubness.job_properties import DualWrite, OnlineBank, TuningRecord, WriteIntentLog
from milvus_hubness.state import SECOND_VECTOR_FIELD, CollectionState

_FENCE = re.compile(r"__lease_(\d+_)?[0-9a-f]{8}$")


def is_fence(alias: str) -> bool:
    """Whether an alias is one by which the holder of a lease writes."""
    return _FENCE.search(alias) is not None


_INTENT_LOG = re.compile(r"__write_intents_[0-9a-f]{8}$")
_LONGEST_NAME = 200
"""Characters of a collection's name in that of its intent_log: Milvus allows 255 in all."""


def intent_log_name(collection: str) -> str:
    """Return a new name for a write-intent log of a collection."""
    return f"{collection[:_LONGEST_NAME]}__write_intents_{uuid.uuid4().hex[:8]}"


def intent_logs_among(names: Iterable[str], collection: str) -> list[str]:
    """Return the names of a collection's write-intent logs, whole or in part, among those of all
    collections."""
    found = {name.removesuffix("_rows") for name in names}
    stem = collection[:_LONGEST_NAME]
    return sorted(n for n in found if (end := _INTENT_LOG.search(n)) and n[: end.start()] == stem)


class Fences(Protocol):
    """The fencing aliases by which the holder of a lease writes."""

    def alias_of(self, collection: str) -> str | None:
        """Return the alias; None if writes to this collection are not fenced."""
        ...

    def renew(self, collection: str) -> None:
        """Write by another alias from here on: what was sent by the former one is not accepted any more.
        Raises LeaseLost."""
        ...


@dataclass(frozen=True)
class VectorField:
    """A dense float vector field. index_type and index_params are the database's own words."""

    name: str
    dim: int
    metric: str
    index_type: str
    index_params: dict[str, Any] = field(default_factory=dict)
    dtype: Dtype = "float32"


@dataclass(frozen=True)
class CollectionInfo:
    """What the jobs need to know of a collection.

    name: the real name, whatever alias was asked for. rows: what the database counts, duplicates and all.
    partitions: names that rows must be copied into, or that tell keys apart which have no order among
    themselves; (None,) where the database places rows by itself and all keys have one order. states: of the
    corrected vector fields, by name. schema: the database's own description, opaque to the jobs. dual_write:
    where a migration has its writers write too. intent_log: where a refresh has them write first.
    online_banks: the banks that take in live queries. identity: by which the database tells the collection
    from another of its name; empty if it does not."""

    name: str
    key_field: str
    vector_fields: dict[str, VectorField]
    rows: int
    partitions: tuple[str | None, ...]
    aliases: tuple[str, ...]
    states: dict[str, CollectionState]
    tuning: TuningRecord | None
    is_bank: bool
    schema: dict[str, Any]
    dual_write: DualWrite | None = None
    intent_log: WriteIntentLog | None = None
    online_banks: tuple[OnlineBank, ...] = ()
    identity: str = ""

    @property
    def users_fields(self) -> dict[str, VectorField]:
        """The vector fields but for those that hold the augmented form beside another."""
        return {
            name: each
            for name, each in self.vector_fields.items()
            if not name.startswith(SECOND_VECTOR_FIELD)
        }

    @property
    def state(self) -> CollectionState | None:
        """What is known of the corrected field; None where there is none. Raises InvalidInput for several."""
        return self.state_of(None)

    def with_index(self, field: str, index_type: str, index_params: dict[str, Any]) -> CollectionInfo:
        """As it would be with another index on a vector field."""
        other = replace(self.vector_fields[field], index_type=index_type, index_params=index_params)
        return replace(self, vector_fields={**self.vector_fields, field: other})

    def require_field(self, field: str) -> None:
        """Raises InvalidInput naming the float vector fields where `field` is none of them."""
        if field not in self.vector_fields:
            there = ", ".join(self.vector_fields) or "none"
            raise InvalidInput(f"{self.name!r} has no float vector field {field!r}, there are: {there}")

    def state_of(self, field: str | None) -> CollectionState | None:
        """What is known of this vector field's correction; None where it is not corrected. Without a field,
        of the corrected one. Raises InvalidInput where there are several, and for a field that is not
        there."""
        if field is not None:
            self.require_field(field)
            return self.states.get(field)
        if len(self.states) > 1:
            raise InvalidInput(
                f"{self.name!r} has several corrected fields, name one: {', '.join(self.states)}"
            )
        return next(iter(self.states.values()), None)

    def online_bank_of(self, field: str, profile: str) -> OnlineBank | None:
        """The online bank of this profile; None without one."""
        found = (each for each in self.online_banks if (each.field, each.profile) == (field, profile))
        return next(found, None)


@dataclass(frozen=True, eq=False)
class QuerySamples:
    """Samples of live queries. vectors (n, d) float32, as they were asked; (0, 0) where there are none."""

    vectors: Floats
    origins: Origins


@dataclass(frozen=True)
class Record:
    """An entry of a ledger. body: JSON of at most 60,000 characters; group: what entries are asked for by."""

    key: str
    group: str
    body: str


@dataclass(frozen=True)
class Note:
    """What a client was last about to do with the row of a key. partition: of the row, where it named one.
    row: what the write-intent log calls the row as it was to be written; None where it was to be deleted.
    changed: the fields that this partial update, and those noted just before it, change; empty for a whole
    row. id: of this note; the next one of the same key has another."""

    key: Key
    partition: str | None
    row: str | None
    changed: tuple[str, ...] = ()
    id: str = ""


@dataclass(frozen=True)
class ImportJob:
    """Rows that the database reads from a file by itself. file: as it was asked for, None where the database
    does not tell; reason: why it failed."""

    id: str
    file: str | None
    state: Literal["running", "done", "failed"]
    reason: str = ""
