"""What a collection knows about its biases: versioned JSON in the custom property `hubness`. No I/O."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from milvus_hubness.errors import NotCorrected, StateError, UnknownStateVersion
from milvus_hubness.layout import Layout, Metric

PROPERTY = "hubness"
TUNING_PROPERTY = "hubness_tuning"
VERSION: Literal[1] = 1

BIAS_FIELD = "hubness_bias"
EPOCH_FIELD = "hubness_epoch"
NORM_FIELD = "hubness_norm"
SECOND_BIAS_FIELD = "hubness_bias_1"
HIDDEN_FIELDS = (BIAS_FIELD, SECOND_BIAS_FIELD, EPOCH_FIELD, NORM_FIELD)

SLOT_FIELDS = (BIAS_FIELD, SECOND_BIAS_FIELD)
"""Where biases lie in fields beside the vectors: the slots in turn."""
SIDE_FIELD = "biases"
"""Where they lie in a collection of their own: a vector field that holds the slots."""

PENDING = 0
"""Value of `hubness_epoch` in rows whose bias is not computed yet."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BankReference(_Frozen):
    """Where the reference queries lie: one generation of rows of a bank collection.

    nearest: the field of those rows that names each one's nearest items in the gallery, for a gate.
    """

    collection: str
    generation: int = Field(ge=1)
    fingerprint: str
    count: int = Field(ge=1)
    nearest: str = "nearest"


class Profile(_Frozen):
    """One set of biases.

    estimator: name and parameters. slot: the column that searches read. standby: the column that the next
    refresh fills before the two change places. centre: c, taken off every stored bias; it moves no ranking.
    epoch counts the refreshes, from 1. strength: w of searches that name none. gate: with a number k,
    only queries are corrected whose raw nearest item is among the k nearest of some bank query.
    gate_targets: with a number k too, or among the k nearest of some item of the target bank.
    """

    estimator: dict[str, Any]
    slot: int = Field(ge=0)
    standby: int = Field(ge=0)
    centre: float
    strength: float = 1.0
    gate: int | None = Field(default=None, ge=1)
    gate_targets: int | None = Field(default=None, ge=1)
    bank: BankReference
    epoch: int = Field(ge=1)
    refreshed_at: datetime


class Beside(_Frozen):
    """Biases beside the vectors, which are stored as the user gave them: searches fetch `candidates` rows and
    subtract the biases from their scores.

    side: the collection that holds the biases under the same keys; None where fields of the collection do.
    missed: the share of the exact corrected top 10 outside that many candidates, in the mean over `queries`;
    allowed: the share up to which that was to be.
    """

    side: str | None
    candidates: int = Field(ge=1)
    missed: float = Field(ge=0, le=1)
    allowed: float = Field(gt=0, lt=1)
    queries: int = Field(ge=1)


def stored_form_fields(metric: Metric) -> tuple[str, ...]:
    """The scalar fields that go with vectors in the stored form."""
    return (BIAS_FIELD, EPOCH_FIELD, NORM_FIELD) if metric == "COSINE" else (BIAS_FIELD, EPOCH_FIELD)


class CollectionState(_Frozen):
    """Everything a client or a job needs to speak to a corrected collection.

    source: the collection it was copied from, itself where the biases lie beside. phase: "copying" until the
    copy is verified. beside: None where the biases lie in the vectors.
    """

    version: Literal[1] = VERSION
    field: str
    metric: Metric
    dim: int = Field(ge=1)
    slots: int = Field(ge=2)
    multiple_of: int = Field(ge=1)
    source: str
    phase: Literal["copying", "ready"]
    profiles: dict[str, Profile]
    active: str = "default"
    beside: Beside | None = None

    @property
    def layout(self) -> Layout:
        return Layout(self.dim, self.metric, self.slots, self.multiple_of)

    @property
    def profile(self) -> Profile:
        """The profile that searches use when they name none."""
        return self.profiles[self.active]

    @property
    def hidden_fields(self) -> tuple[str, ...]:
        """The scalar fields this package added, which readers do not see unless they ask by name."""
        if self.beside is not None:
            return () if self.beside.side else (*SLOT_FIELDS, EPOCH_FIELD)
        return stored_form_fields(self.metric)

    def with_profile(self, profile: Profile) -> CollectionState:
        """This state with its active profile replaced."""
        return self.model_copy(update={"profiles": {**self.profiles, self.active: profile}})

    def to_json(self) -> str:
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> CollectionState:
        """Raises UnknownStateVersion for another version's state, StateError for a broken one."""
        try:
            version = json.loads(text)["version"]
        except (ValueError, KeyError, TypeError):
            raise StateError(f"the collection property {PROPERTY!r} is not a state: {text[:80]!r}") from None
        if version != VERSION:
            raise UnknownStateVersion(
                f"the collection's state has version {version}, this package reads {VERSION}: update it"
            )
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise StateError(
                f"the collection property {PROPERTY!r} is broken at {where}: {first['msg']}"
            ) from None


class TuningRecord(_Frozen):
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


def read_tuning(properties: dict[str, str]) -> TuningRecord | None:
    """What tuning left among a collection's properties. Raises StateError where it is broken."""
    text = properties.get(TUNING_PROPERTY)
    if not text:
        return None
    try:
        return TuningRecord.model_validate_json(text)
    except ValidationError as error:
        raise StateError(
            f"the collection property {TUNING_PROPERTY!r} is broken: {error.errors()[0]['msg']}"
        ) from None


def read_state(properties: dict[str, str]) -> CollectionState | None:
    """The state among a collection's properties, None where it carries no biases."""
    text = properties.get(PROPERTY)
    return CollectionState.from_json(text) if text else None


def require_state(state: CollectionState | None, collection: str) -> CollectionState:
    """`state`, or NotCorrected naming the collection."""
    if state is None:
        raise NotCorrected(f"collection {collection!r} carries no biases: migrate it first")
    return state
