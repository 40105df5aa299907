"""Collection properties of jobs: dual writes, the write-intent log, online banks and tuning. No I/O."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar, Literal

from pydantic import Field

from milvus_hubness.state import FrozenModel, PropertyModel

TUNING_PROPERTY = "hubness_tuning"
DUAL_WRITE_PROPERTY = "hubness_dual_write"
WRITE_INTENTS_PROPERTY = "hubness_write_intents"
ONLINE_BANKS_PROPERTY = "hubness_online_banks"


FEWEST_SAMPLES = 2_000
"""Smallest number of slots for query samples."""


class TuningRecord(PropertyModel):
    """The result of `tune` for a collection: a choice for this bank, or the advice to leave it alone.

    choice: an estimator as its dictionary, with the strength; None for "leave it alone".
    """

    property_name: ClassVar[str] = TUNING_PROPERTY
    verdict: Literal["apply", "apply weakly", "leave it alone"]
    choice: dict[str, Any] | None
    strength: float
    reason: str
    labelled: bool
    bank_fingerprint: str
    tuned_at: datetime


class DualWrite(PropertyModel):
    """Dual writes of a migration: clients send each write to this collection first, then to the copy.

    collection: the copy. required: whether a write fails if the copy does not take it; before that, the next
    catch-up pass repairs it.
    """

    property_name: ClassVar[str] = DUAL_WRITE_PROPERTY
    collection: str
    required: bool = False


class WriteIntentLog(PropertyModel):
    """A write-intent log: while a job rewrites rows here, clients note each write in it first.

    If the job undoes a write, it replays the write from the log. collection: the collection with the last
    note of each key. rows: the collection with the noted rows. made: separates the notes for one job from
    those for others. auto_id: the server creates the keys of inserted rows, so no job can have read such rows
    before. by_partition: rows of one key may be in several partitions.
    """

    property_name: ClassVar[str] = WRITE_INTENTS_PROPERTY
    collection: str
    made: str
    auto_id: bool = False
    by_partition: bool = False

    @property
    def rows(self) -> str:
        return f"{self.collection}_rows"


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


class OnlineBanks(PropertyModel):
    """The online banks of a collection."""

    property_name: ClassVar[str] = ONLINE_BANKS_PROPERTY
    banks: tuple[OnlineBank, ...] = ()
