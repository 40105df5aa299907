"""Collection properties of jobs: dual writes, the write-intent log, online banks and tuning. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from milvus_hubness.state import FrozenModel, read_property

TUNING_PROPERTY = "hubness_tuning"
DUAL_WRITE_PROPERTY = "hubness_dual_write"
WRITE_INTENTS_PROPERTY = "hubness_write_intents"
ONLINE_BANKS_PROPERTY = "hubness_online_banks"


FEWEST_SAMPLES = 2_000
"""Smallest number of slots for query samples."""


class TuningRecord(FrozenModel):
    """The result of `tune` for a collection: a choice for this bank, or the advice to leave it alone.

    choice: an estimator as its dictionary, with the strength; None for "leave it alone".
    """

    verdict: Literal["apply", "apply weakly", "leave it alone"]
    choice: dict[str, Any] | None
    strength: float
    reason: str
    labelled: bool
    bank_fingerprint: str
    tuned_at: datetime


def read_tuning(properties: Mapping[str, str]) -> TuningRecord | None:
    """Read the tuning result from a collection's properties. Raises StateError if it is broken."""
    return read_property(properties, TUNING_PROPERTY, TuningRecord)


class DualWrite(FrozenModel):
    """Dual writes of a migration: clients send each write to this collection first, then to the copy.

    collection: the copy. required: whether a write fails if the copy does not take it; before that, the next
    catch-up pass repairs it.
    """

    collection: str
    required: bool = False


def read_dual_write(properties: Mapping[str, str]) -> DualWrite | None:
    """Read the dual-write record from a collection's properties. Raises StateError if it is broken."""
    return read_property(properties, DUAL_WRITE_PROPERTY, DualWrite)


class WriteIntentLog(FrozenModel):
    """A write-intent log: while a job rewrites rows here, clients note each write in it first.

    If the job undoes a write, it replays the write from the log. collection: the collection with the last
    note of each key. rows: the collection with the noted rows. made: separates the notes for one job from
    those for others. auto_id: the server creates the keys of inserted rows, so no job can have read such rows
    before. by_partition: rows of one key may be in several partitions.
    """

    collection: str
    made: str
    auto_id: bool = False
    by_partition: bool = False

    @property
    def rows(self) -> str:
        return f"{self.collection}_rows"


def read_intent_log(properties: Mapping[str, str]) -> WriteIntentLog | None:
    """Read the write-intent log from a collection's properties. Raises StateError if it is broken."""
    return read_property(properties, WRITE_INTENTS_PROPERTY, WriteIntentLog)


class OnlineBank(FrozenModel):
    """Settings of the online bank of one profile.

    Clients sample a share of its live queries into a collection, from which a job takes them into the bank.
    field, profile: those of the bank. samples_collection: the collection of samples. rate: the share of
    queries that clients sample. size: capacity of the bank. seed_share: the share of it that is reserved for
    the queries that the bank started with. half_life_seconds: the age at which a query counts half as much as
    a new one. duplicate_cosine: two queries with a cosine above it are duplicates.
    """

    field: str
    profile: str
    samples_collection: str
    rate: float = Field(gt=0, le=1)
    size: int = Field(ge=1)
    seed_share: float = Field(ge=0, le=1)
    half_life_seconds: float = Field(gt=0, allow_inf_nan=False)
    duplicate_cosine: float = Field(gt=0, le=1)

    @property
    def capacity(self) -> int:
        """Number of slots for samples of this profile in `samples_collection`.

        Each sample takes a random slot: while few samples wait, few replace another.
        """
        return max(2 * self.size, FEWEST_SAMPLES)


class OnlineBanks(FrozenModel):
    """The online banks of a collection."""

    banks: tuple[OnlineBank, ...]


def read_online_banks(properties: Mapping[str, str]) -> tuple[OnlineBank, ...]:
    """Read the online banks from a collection's properties. Raises StateError if the record is broken."""
    result = read_property(properties, ONLINE_BANKS_PROPERTY, OnlineBanks)
    return result.banks if result else ()
