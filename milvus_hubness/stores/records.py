"""The values that stores take and return: collections, fields, samples, records, write intents."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from milvus_hubness.banks.bank import Origins
from milvus_hubness.banks.generations import Key
from milvus_hubness.codec.arrays import Dtype, Floats
from milvus_hubness.codec.second_vector import SECOND_VECTOR_FIELD
from milvus_hubness.errors import InvalidInput
from milvus_hubness.job_properties import DualWrite, OnlineBank, TuningRecord, WriteIntentLog
from milvus_hubness.state import CollectionState

_FENCE = re.compile(r"__lease_(\d+_)?[0-9a-f]{8}$")


def is_fence(alias: str) -> bool:
    """Whether an alias is a fencing alias, through which the holder of a lease writes."""
    return _FENCE.search(alias) is not None


_INTENT_LOG = re.compile(r"__write_intents_[0-9a-f]{8}$")
_LONGEST_NAME = 200
"""Length of a collection's name within the name of its write-intent log: Milvus allows 255 characters in all."""


def intent_log_name(collection: str) -> str:
    """Return a new name for a write-intent log of a collection."""
    return f"{collection[:_LONGEST_NAME]}__write_intents_{uuid.uuid4().hex[:8]}"


def intent_logs_among(names: Iterable[str], collection: str) -> list[str]:
    """Return the names of a collection's write-intent logs, complete or not, from the names of all collections."""
    logs = {name.removesuffix("_rows") for name in names}
    stem = collection[:_LONGEST_NAME]
    return sorted(n for n in logs if (end := _INTENT_LOG.search(n)) and n[: end.start()] == stem)


class Fences(Protocol):
    """The fencing aliases through which the holder of a lease writes."""

    def alias_of(self, collection: str) -> str | None:
        """Return the alias; None if writes to this collection are not fenced."""
        ...

    def renew(self, collection: str) -> None:
        """Switch to another alias: the database accepts no more requests through the former one.

        Raises LeaseLost.
        """
        ...


@dataclass(frozen=True)
class VectorField:
    """A dense float vector field. index_type and index_params are those of the database."""

    name: str
    dim: int
    metric: str
    index_type: str
    index_params: dict[str, Any] = field(default_factory=dict)
    dtype: Dtype = "float32"


@dataclass(frozen=True)
class CollectionInfo:
    """Description of a collection for the jobs.

    name: the real name, even if an alias was requested. rows: the database's count, including duplicates. partitions:
    names that rows must be copied into, or that separate keys without a common order; (None,) if the database places
    rows itself and all keys have one order. states: of the corrected vector fields, by name. schema: the database's own
    description, opaque to the jobs. dual_write: the dual writes of a migration. intent_log: the write-intent log of a
    refresh. online_banks: the banks that take in live queries. identity: separates the collection from another one of
    the same name; empty if the database has no such id.
    """

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
        """The vector fields without second vector fields, which hold augmented vectors."""
        return {name: each for name, each in self.vector_fields.items() if not name.startswith(SECOND_VECTOR_FIELD)}

    @property
    def state(self) -> CollectionState | None:
        """The state of the corrected field; None if there is none. Raises InvalidInput for several."""
        return self.state_of(None)

    def with_index(self, field: str, index_type: str, index_params: dict[str, Any]) -> CollectionInfo:
        """Return this description with another index on a vector field."""
        other = replace(self.vector_fields[field], index_type=index_type, index_params=index_params)
        return replace(self, vector_fields={**self.vector_fields, field: other})

    def require_field(self, field: str) -> None:
        """Raise InvalidInput naming the float vector fields if `field` is not one of them."""
        if field not in self.vector_fields:
            fields = ", ".join(self.vector_fields) or "none"
            raise InvalidInput(f"{self.name!r} has no float vector field {field!r}: choose one of {fields}")

    def state_of(self, field: str | None) -> CollectionState | None:
        """Return the state of this vector field; None if it is not corrected.

        Without a field, return the state of the only corrected one. Raises InvalidInput if there are several,
        and for a field that does not exist.
        """
        if field is not None:
            self.require_field(field)
            return self.states.get(field)
        if len(self.states) > 1:
            raise InvalidInput(
                f"{self.name!r} has several corrected fields: choose one with --field: {', '.join(self.states)}"
            )
        return next(iter(self.states.values()), None)

    def online_bank_of(self, field: str, profile: str) -> OnlineBank | None:
        """Return the online bank of this profile; None if it has none."""
        banks = (each for each in self.online_banks if (each.field, each.profile) == (field, profile))
        return next(banks, None)


@dataclass(frozen=True, eq=False)
class QuerySamples:
    """Samples of live queries. vectors: (n, d) float32, as the user sent them; (0, 0) if there are none."""

    vectors: Floats
    origins: Origins


@dataclass(frozen=True)
class Record:
    """A record of a ledger. body: JSON of at most 60,000 characters. group: the name by which records are
    read together.
    """

    key: str
    group: str
    body: str


@dataclass(frozen=True)
class Note:
    """A client's last write intent for the row of a key.

    partition: of the row, if the write named one. row: the name of the noted row in the write-intent log;
    None for a deletion. changed: the fields that this partial update, and those noted just before it, change;
    empty for a whole row. id: of this note; the next note of the same key has another one.
    """

    key: Key
    partition: str | None
    row: str | None
    changed: tuple[str, ...] = ()
    id: str = ""


@dataclass(frozen=True)
class ImportJob:
    """An import: rows that the database reads from a file itself.

    file: as it was requested; None if the database does not report it. reason: of a failure.
    """

    id: str
    file: str | None
    state: Literal["running", "done", "failed"]
    reason: str = ""
