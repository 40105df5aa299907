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
"""So many places samples of live queries have at the least."""


class TuningRecord(FrozenModel):
    """What `tune` found for a collection: a choice for this bank, or the advice to leave it alone.

    choice: an estimator as its dictionary, with the strength to apply it at; None for "leave it alone".
    """

    verdict: Literal["apply", "apply weakly", "leave it alone"]
    choice: dict[str, Any] | None
    strength: float
    reason: str
    labelled: bool
    bank_fingerprint: str
    tuned_at: datetime


def read_tuning(properties: Mapping[str, str]) -> TuningRecord | None:
    """What tuning left among a collection's properties. Raises StateError where it is broken."""
    return read_property(properties, TUNING_PROPERTY, TuningRecord)


class DualWrite(FrozenModel):
    """Who writes to this collection writes the same to another one too, first here and then there, while rows
    are carried from here to there.

    collection: the other one. required: whether a write that the other does not take has failed; before that
    the next catch-up pass repairs it.
    """

    collection: str
    required: bool = False


def read_dual_write(properties: Mapping[str, str]) -> DualWrite | None:
    """What a migration left among a collection's properties. Raises StateError where it is broken."""
    return read_property(properties, DUAL_WRITE_PROPERTY, DualWrite)


class WriteIntentLog(FrozenModel):
    """Who writes to this collection notes the write in a write-intent log first, while a job rewrites rows
    here: what the job undoes of it, it does again from there.

    collection: holds for each key what was last noted of it. rows: holds the rows. made: tells what is noted
    for one job from what was noted for others. auto_id: the server makes the keys of inserted rows, which
    therefore are none that a job could have read before. by_partition: rows of one key may lie in several
    partitions.
    """

    collection: str
    made: str
    auto_id: bool = False
    by_partition: bool = False

    @property
    def rows(self) -> str:
        return f"{self.collection}_rows"


def read_intent_log(properties: Mapping[str, str]) -> WriteIntentLog | None:
    """What a refresh left among a collection's properties. Raises StateError where it is broken."""
    return read_property(properties, WRITE_INTENTS_PROPERTY, WriteIntentLog)


class OnlineBank(FrozenModel):
    """How the online bank of one profile works: a share of its live queries is sampled into a collection,
    from which a job takes them into the bank.

    field, profile: whose bank. samples_collection: the collection of samples. rate: the share of queries that
    clients sample. size: places in the bank. seed_share: of these, the share that queries which the bank
    began with keep. half_life_seconds: the age at which a query counts half as much as a new one.
    duplicate_cosine: queries whose cosine is above it are the same."""

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
        """How many places samples of this profile have in `samples_collection`. Each takes one at random: as
        long as few wait, few take the place of another."""
        return max(2 * self.size, FEWEST_SAMPLES)


class OnlineBanks(FrozenModel):
    """Those of a collection."""

    banks: tuple[OnlineBank, ...]


def read_online_banks(properties: Mapping[str, str]) -> tuple[OnlineBank, ...]:
    """The online banks of a collection. Raises StateError where what it says of them is broken."""
    result = read_property(properties, ONLINE_BANKS_PROPERTY, OnlineBanks)
    return result.banks if result else ()
