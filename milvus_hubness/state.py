"""The collection state: versioned JSON in the custom property `hubness`. No I/O."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from milvus_hubness.codec.arrays import Dtype, Floats, Metric
from milvus_hubness.codec.base import RowCodec, VectorCodec
from milvus_hubness.codec.fields import FieldsCodec, SideCollectionCodec
from milvus_hubness.codec.layout import Layout
from milvus_hubness.codec.second_vector import SecondVectorCodec
from milvus_hubness.errors import InvalidInput, InvalidParameter, NotCorrected, StateError, UnknownStateVersion

PROPERTY = "hubness"
VERSION: Literal[1] = 1

SLOTS_PER_PROFILE = 2
"""One slot that searches read, and one that the next refresh writes."""
Model = TypeVar("Model", bound="PropertyModel")


class FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class PropertyModel(FrozenModel):
    """A record that is stored in the collection property `property_name`."""

    property_name: ClassVar[str]

    @classmethod
    def read(cls: type[Model], properties: Mapping[str, str]) -> Model | None:
        """Read the record from a collection's properties; None if the property is missing or, on servers that cannot
        drop one, empty. Raises StateError if the record is broken."""
        text = properties.get(cls.property_name)
        if not text:
            return None
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise StateError(f"the collection property {cls.property_name!r} is broken: {problem}") from None


class BankReference(FrozenModel):
    """Reference to one generation of a bank collection.

    generation: digest of its queries, potentials and targets; it names the rows of the generation. fingerprint: digest
    of the queries and targets alone, the same as that of a bank file. count: number of queries. nearest: name of the
    rows that list the nearest items of each query and target, for a gate; empty without a gate.
    """

    collection: str
    generation: str = Field(pattern="^[0-9a-f]+$")
    fingerprint: str
    count: int = Field(ge=1)
    nearest: str = ""

    @property
    def rows(self) -> tuple[str, str]:
        """What identifies the generation's rows: two references differ if only one names nearest items."""
        return self.collection, self.generation


class Former(FrozenModel):
    """The former source of a profile's biases, from which a refresh that goes back computes them again."""

    estimator: dict[str, Any]
    mean_bias: float
    strength: float
    gate: int | None = Field(default=None, ge=1)
    gate_targets: int | None = Field(default=None, ge=1)
    bank: BankReference


class Profile(FrozenModel):
    """A bias profile.

    estimator: name and parameters. slot: the active slot, which searches read. standby: the standby slot,
    which the next refresh fills before the two switch roles. mean_bias: c, subtracted from every stored bias;
    it changes no ranking. epoch: counts the refreshes, from 1. strength: w of searches that name none. gate:
    a number k; searches correct only queries whose raw nearest item is among the k nearest of some bank
    query. gate_targets: a number k; searches also correct queries whose raw nearest item is among the k
    nearest of some item of the target bank. former: the source of the biases before the last full refresh.
    tolerance: a refresh left stored biases as they were if they differed from the new ones by at most this.
    """

    estimator: dict[str, Any]
    slot: int = Field(ge=0)
    standby: int = Field(ge=0)
    mean_bias: float
    strength: float = 1.0
    gate: int | None = Field(default=None, ge=1)
    gate_targets: int | None = Field(default=None, ge=1)
    bank: BankReference
    epoch: int = Field(ge=1)
    refreshed_at: datetime
    former: Former | None = None
    tolerance: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @property
    def banks(self) -> tuple[BankReference, ...]:
        """The banks of the current biases and of the former ones."""
        return (self.bank, *([self.former.bank] if self.former else []))


class CandidateReranking(FrozenModel):
    """Candidate re-ranking of the bias locations `fields` and `side_collection`.

    Vectors are stored as the user gave them; searches read `candidates` rows and subtract the biases from
    their scores. side: the collection that holds the biases under the same keys; None if fields of the
    collection hold them. missed: the share of the exact corrected top 10 outside that many candidates,
    averaged over `queries` queries; allowed: the upper limit of that share in the choice of `candidates`.
    """

    side: str | None
    candidates: int = Field(ge=1)
    missed: float = Field(ge=0, le=1)
    allowed: float = Field(gt=0, lt=1)
    queries: int = Field(ge=1)


class Incoming(FrozenModel):
    """A change of a profile's biases: a refresh fills a slot that searches do not read yet.

    name: of the profile. profile: its value after the change, with the slot that the refresh fills. Rows inserted
    meanwhile get both biases: the old one in the old slot, the new one in the new slot.
    """

    name: str
    profile: Profile


class CollectionState(FrozenModel):
    """The state of a corrected vector field, for clients and jobs.

    suffix: end of the names of the hidden fields and of the property, which differ between several corrected fields of
    a collection; empty for the first field. profiles: bias profiles by name; active: the one that searches use when
    they name none. source: the collection that this one was copied from; the collection itself if it was corrected
    without a copy. phase: "copying" until the copy, or the second field, is verified. reranking: None unless the bias
    location is `fields` or `side_collection`. second_vector: a second vector field with the augmented vectors, which is
    searched in place of `field`; `field` then has the vectors as the user gave them; None if `field` itself has the
    augmented vectors. layout: the columns of the augmented vectors and queries. dtype: of the numbers in the field.
    incoming: the next value of a profile that a refresh is changing. outgoing: the former value of a profile that has
    just changed: clients with an older cached state still read its slot, so new rows get that bias in it too.
    migration: the id of the migration that created the collection as a copy.
    """

    version: Literal[1] = VERSION
    field: str
    suffix: str = ""
    layout: Layout
    dtype: Dtype = "float32"
    source: str
    phase: Literal["copying", "ready"] = "ready"
    profiles: dict[str, Profile]
    active: str = "default"
    reranking: CandidateReranking | None = None
    second_vector: str | None = None
    incoming: Incoming | None = None
    outgoing: Incoming | None = None
    migration: str = ""

    @property
    def dim(self) -> int:
        """The dimension of the user's vectors."""
        return self.layout.dim

    @property
    def metric(self) -> Metric:
        """The user's metric."""
        return self.layout.metric

    @property
    def slots(self) -> int:
        """The number of bias slots."""
        return self.layout.slots

    @property
    def codec(self) -> RowCodec:
        """The codec of the field's rows, queries and scores: the one of its bias location."""
        common = (self.field, self.suffix, self.layout, self.dtype, self.shown_slot)
        if self.second_vector is not None:
            return SecondVectorCodec(*common, second=self.second_vector)
        if self.reranking is None:
            return VectorCodec(*common)
        side, candidates = self.reranking.side, self.reranking.candidates
        if side is None:
            return FieldsCodec(*common, candidates=candidates)
        return SideCollectionCodec(*common, side_collection=side, candidates=candidates)

    @property
    def searched_field(self) -> str:
        """The vector field that searches of `field` use."""
        return self.second_vector or self.field

    @property
    def serves(self) -> bool:
        """Whether searches of `field` can be corrected yet."""
        return self.second_vector is None or self.phase == "ready"

    @property
    def miss_rate(self) -> float | None:
        """Measured share of the exact corrected top 10 outside the candidates; None if there are none."""
        return None if self.reranking is None else self.reranking.missed

    @property
    def allowed_miss_rate(self) -> float | None:
        """The upper limit of `miss_rate` in the choice of the number of candidates."""
        return None if self.reranking is None else self.reranking.allowed

    @property
    def profile(self) -> Profile:
        """The profile that searches use when they name none."""
        return self.profiles[self.active]

    def profile_of(self, name: str | None) -> Profile:
        """Return the profile of that name, the active one for None. Raises InvalidInput."""
        if name is not None and name not in self.profiles:
            names = ", ".join(self.profiles)
            raise InvalidInput(f"no profile {name!r} for field {self.field!r}: choose one of {names}")
        return self.profiles[name or self.active]

    @property
    def shown_slot(self) -> int:
        """The slot whose bias `bias_field` shows: of the active profile, or of its next value during a refresh."""
        if self.incoming is not None and self.incoming.name == self.active:
            return self.incoming.profile.slot
        return self.profile.slot

    @property
    def banks(self) -> tuple[BankReference, ...]:
        """The banks of all profiles: of the current biases, the former ones and those that a refresh is writing."""
        moving = [change.profile for change in (self.incoming, self.outgoing) if change is not None]
        return tuple(bank for profile in (*self.profiles.values(), *moving) for bank in profile.banks)

    @property
    def property_name(self) -> str:
        """The collection property that holds this state."""
        return f"{PROPERTY}.{self.field}" if self.suffix else PROPERTY

    def require_storable(self, vectors: npt.ArrayLike, what: str = "row") -> Floats:
        """Return `vectors` as float32 (n, d), valid for insertion. Raises as Layout.validate_vectors does, and
        InvalidInput naming a row that could not be read back bit for bit."""
        rows = self.layout.validate_vectors(vectors, what)
        if problem := self.unreadable(rows, range(len(rows))):
            raise InvalidInput(f"{what} {problem}: leave it out, or correct {self.source!r} by enable")
        return rows

    def unreadable(self, rows: Floats, keys: Sequence[Any]) -> str:
        """Return a message about a number in rows (n, d) that would not be read back bit for bit; empty if all would.
        keys: names of the rows in the message."""
        if not self.layout.mean or self.codec.leaves_vectors:
            return ""
        lost = self.layout.lost(rows)
        if not lost.any():
            return ""
        row, column = np.argwhere(lost)[0]
        return (
            f"{keys[row]} has {rows[row, column]:g} in dimension {column} of {self.field!r}, which float32 "
            f"rounds against the mean of that dimension, {self.layout.taken_off[column]:g}: it must be 0, or "
            "from half to twice the mean"
        )

    def with_profile(self, profile: Profile, name: str | None = None) -> CollectionState:
        """Return this state with the named profile (the active one for None) replaced or added."""
        return self.model_copy(update={"profiles": {**self.profiles, name or self.active: profile}})

    def to_json(self) -> str:
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> CollectionState:
        """Parse a state. Raises UnknownStateVersion for another version, StateError for a broken state."""
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
            raise StateError(f"the collection property {PROPERTY!r} is broken at {where}: {first['msg']}") from None


def read_states(properties: Mapping[str, str]) -> dict[str, CollectionState]:
    """Return the states among a collection's properties, by vector field."""
    states = [
        CollectionState.from_json(text)
        for name, text in sorted(properties.items())
        if text and (name == PROPERTY or name.startswith(f"{PROPERTY}."))
    ]
    return {state.field: state for state in states}


def slots_for(profiles: int) -> int:
    """Return how many slots that many profiles need. Raises InvalidParameter."""
    if profiles < 1:
        raise InvalidParameter(f"profiles start at 1, got {profiles}")
    return SLOTS_PER_PROFILE * profiles


def suffix_for(field: str, others: Collection[CollectionState]) -> str:
    """Return the suffix of a new field's state; `others` are the states of the collection."""
    return f"_{field}" if any(not state.suffix for state in others if state.field != field) else ""


def require_state(state: CollectionState | None, collection: str) -> CollectionState:
    """Return `state`, or raise NotCorrected naming the collection."""
    if state is None:
        raise NotCorrected(f"collection {collection!r} is not corrected: migrate or enable it first")
    return state
