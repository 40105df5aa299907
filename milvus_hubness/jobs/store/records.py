"""The values that stores take and return: collections and
the properties that jobs leave on them, samples, records.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import Field

from milvus_hubness.basics.bounds import (
    CollectionName,
    Count,
    Depth,
    Fingerprint,
    FrozenModel,
    Moment,
    Name,
    Strength,
    Text,
    shown,
)
from milvus_hubness.basics.texts import chosen_parameters, describe, field_words
from milvus_hubness.correction.codec.arrays import Dtype, Floats, Metric, as_metric
from milvus_hubness.correction.codec.base import form_of
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.multi_vectors import MultiVectorLayout
from milvus_hubness.correction.codec.quantisation import spread_for
from milvus_hubness.correction.prior import Prior
from milvus_hubness.correction.state import (
    REMEDY,
    CollectionState,
    PropertyModel,
    StoredEstimator,
    described_property,
    read_states,
)
from milvus_hubness.errors import CannotMigrate, InvalidInput, InvalidParameter, StateError
from milvus_hubness.jobs.store.ownership import (
    CollectionId,
    Helper,
    Permit,
    expect_copy,
    permits_of,
    samples_helper,
    side_helpers,
)


def is_fence(alias: str) -> bool:
    """Whether an alias is a fencing alias, through which the holder of a lease writes."""
    return re.search(r"__lease_(\d+_)?[0-9a-f]{8}$", alias) is not None


BANK_PROPERTY = "hubness_bank"
"""Marks a collection that holds the generations of a query bank."""

# Properties of a collection, each the JSON of one of the records below.
TUNING_PROPERTY = "hubness_tuning"
DUAL_WRITE_PROPERTY = "hubness_dual_write"
SAMPLINGS_PROPERTY = "hubness_samplings"
IDENTITY_PROPERTY = "hubness_identity"


class TuningRecord(FrozenModel):
    """The verdict on one bank for one vector field, by `tune` or by a job that was given the bank."""

    field: str
    verdict: Literal["apply", "apply weakly", "not proven", "leave it alone"]
    choice: StoredEstimator | None
    """An estimator as its dictionary; None for `leave it alone`,
    and where a job judged the bank, which tries no methods."""
    strength: Strength
    """w of searches: that of the choice, or of the default method without one."""
    gate: Depth | None = None
    """The k of the gate that tuning chose; None for none."""
    prior: Prior | None = None
    """The prior whose weight tuning chose, not measured on any gallery; None if it tried none."""
    reason: Text
    """Why the verdict is so, in words."""
    labelled: bool
    """Whether labelled queries decided."""
    real_queries: Count = 0
    """Number of queries apart from the bank that decided; 0 if a part of the bank did."""
    bank_fingerprint: Fingerprint
    """Digest of the bank's queries."""
    kind: Name = ""
    """The field of the kinds with whose means vectors were compared, or "auto"; empty for none."""
    kind_tried: Name = ""
    """The kinds with and without which tuning compared searches, to choose `kind`; empty for none."""
    tuned_at: Moment

    @property
    def facts(self) -> dict[str, Any]:
        """The verdict as plain data, for people and for --json."""
        return {**self.model_dump(mode="json"), "judged_by": self.judged_by}

    @property
    def in_words(self) -> str:
        """The verdict, its method, and what it was made on."""
        method = ""
        if self.choice:
            method = f", {describe(chosen_parameters(self.choice))} at strength {self.strength:g}"
        return f"{self.verdict!r}{method}, by {self.judged_by}"

    @property
    def grounds(self) -> int:
        """How much the verdict rests on: 2 is labelled queries, 1 real ones, 0 a part of the bank."""
        if self.labelled:
            return 2
        return 1 if self.real_queries else 0

    @property
    def judged_by(self) -> str:
        """What the verdict was made on, in words."""
        if self.labelled:
            return "labelled queries"
        if self.real_queries:
            return f"{self.real_queries:,} real queries"
        return "half of the bank, for lack of real queries apart from it (--queries)"


MOST_VERDICTS = 8
"""Number of verdicts that a collection keeps: a property is read whole by every client."""


class Verdicts(PropertyModel):
    """The verdicts on banks, the latest first: one for each bank, field and kinds."""

    property_name: ClassVar[str] = TUNING_PROPERTY
    records: tuple[TuningRecord, ...] = Field(default=(), max_length=MOST_VERDICTS)

    def of(self, field: str, bank_fingerprint: str, kind: str = "") -> TuningRecord | None:
        """Return the verdict on this bank for this field and these kinds; None if there is none."""
        subject = (field, bank_fingerprint, kind)
        return next(
            (
                record
                for record in self.records
                if (record.field, record.bank_fingerprint, record.kind) == subject
            ),
            None,
        )

    def compared(self, field: str, bank_fingerprint: str) -> TuningRecord | None:
        """Return the latest choice of tuning between searches with kinds and without them."""
        subject = (field, bank_fingerprint)
        return next(
            (
                record
                for record in self.records
                if (record.field, record.bank_fingerprint) == subject and record.kind_tried
            ),
            None,
        )

    def former(self, record: TuningRecord) -> list[TuningRecord]:
        """Return the verdicts whose place a new one would take, the latest first."""
        # A choice against kinds replaces the verdict with them too.
        kinds = {record.kind} if record.kind else {"", record.kind_tried}
        subject = (record.field, record.bank_fingerprint)
        return [
            other
            for other in self.records
            if (other.field, other.bank_fingerprint) == subject and other.kind in kinds
        ]

    def outweighing(self, record: TuningRecord) -> TuningRecord | None:
        """Return the former verdict that rests on more than a new one; None if there is none.

        On equal grounds a verdict of `tune`, which has tried every method, rests on more than that of
        a job.
        """
        # Against a correction there is no choice, whoever has judged.
        is_jobs = record.choice is None and record.verdict != "leave it alone"
        for former in self.former(record):
            is_richer = former.grounds == record.grounds and is_jobs and former.choice is not None
            if former.grounds > record.grounds or is_richer:
                return former
        return None

    def with_record(self, record: TuningRecord) -> Verdicts:
        """Return the verdicts with a new one in place of those on the same bank and kinds.

        If they are too many, the oldest of those that rest on the least goes.
        """
        former = self.former(record)
        others = [other for other in self.records if other not in former]
        if len(others) >= MOST_VERDICTS:
            least = min(other.grounds for other in others)
            others.remove([other for other in others if other.grounds == least][-1])
        return Verdicts(records=(record, *others))


class Identity(PropertyModel):
    """A random number of a collection, for databases that do not number collections.

    A job writes it before it notes the collection in the ledger; a new collection of the same name
    lacks it, and a copy does not get it.
    """

    property_name: ClassVar[str] = IDENTITY_PROPERTY
    id: str = Field(pattern="^[0-9a-f]{32}$")


def identity_in(properties: Mapping[str, str], collection: str) -> str:
    """Return the identity among the properties of a collection; empty if there is none.

    Raises StateError.
    """
    identity = Identity.read(properties, collection)
    return identity.id if identity else ""


class DualWrite(PropertyModel):
    """Dual writes of a migration: clients send each
    write to this collection first, then to the copy.
    """

    property_name: ClassVar[str] = DUAL_WRITE_PROPERTY
    collection: CollectionName
    """The copy."""
    required: bool = False
    """Whether a write fails if the copy does not take
    it; before that, the next catch-up pass repairs it.
    """
    former: bool = False
    """Whether names move from the copy to this collection, forth or back: only clients that have not
    heard of that still read the copy, and they write here what they read there.
    """

    def permits(self, origin: CollectionId, bodies: Iterable[str]) -> list[Permit]:
        """Return by what migrations of the ledger writes to `origin` go to the copy as well.

        bodies: the ledger's records of the migrations to either of them, as JSON. Raises StateError
        if there is none.
        """
        return permits_of(origin, self.collection, self.property_name, bodies)

    def require_copy(
        self,
        origin: CollectionId,
        permits: Iterable[Permit],
        states: Mapping[str, CollectionState],
        identity: str,
    ) -> None:
        """Raise StateError if another collection has the name of the copy by now.

        states, identity: of the collection that has it, as it is described.
        """
        expect_copy(origin, self.collection, permits, states, identity)


SMALLEST_RATE = 1e-9
"""Least share of sampled queries; who wants none stops the sampling."""

MOST_SAMPLINGS = 1_000
"""Number of sampled fields that a collection may have: clients read them all with its state."""

LARGEST_SAMPLING = 10_000_000
"""Largest number of places for samples of a field."""

CLOCK_SKEW = 600
"""Seconds by which the clock of a client may be ahead; a sample of a later time does not count."""


class Sampling(FrozenModel):
    """How clients sample the live queries of a vector field, which need not be corrected."""

    field: Name
    samples_collection: CollectionName
    """Where clients put sampled queries."""
    rate: float = Field(ge=SMALLEST_RATE, le=1)
    """The share of live queries that clients sample."""
    size: int = Field(ge=1, le=LARGEST_SAMPLING)
    """Number of places for samples. A sample takes a random place, so the newest ones are kept."""
    dim: int = Field(ge=1)
    """Dimension of the queries."""
    dtype: Dtype = "float32"

    @property
    def helper(self) -> Helper:
        """The collection of samples, as the property of the searched collection names it."""
        return samples_helper(self.samples_collection, SAMPLINGS_PROPERTY)


class Samplings(PropertyModel):
    """What of a collection is sampled."""

    property_name: ClassVar[str] = SAMPLINGS_PROPERTY
    fields: tuple[Sampling, ...] = Field(default=(), max_length=MOST_SAMPLINGS)

    def of(self, field: str) -> Sampling | None:
        """Return the sampling of this field; None if it has none."""
        return next((each for each in self.fields if each.field == field), None)

    def with_field(self, sampling: Sampling) -> Samplings:
        """Return these with the sampling of a field in place of the former one."""
        return Samplings(fields=(*self.without(sampling.field).fields, sampling))

    def without(self, field: str) -> Samplings:
        """Return these without the sampling of a field."""
        return Samplings(fields=tuple(each for each in self.fields if each.field != field))


class Fences(Protocol):
    """The fencing aliases through which the holder of a lease writes."""

    def check(self) -> None:
        """Raise LeaseLost if another process holds the lease. No alias can fence a change of names, or the
        drop of a collection: a store calls this after all that it reads for one.
        """

    def alias_of(self, collection: str) -> str | None:
        """Return the alias; None if writes to this collection are not fenced."""

    def token_of(self, collection: str) -> int:
        """Return the fencing token: it grows from holder to holder. 0 if writes are not fenced."""

    def renew(self, collection: str) -> None:
        """Switch to another alias, so that the database refuses requests through the former one.

        Raises LeaseLost.
        """


@dataclass(frozen=True)
class ColumnNeeds:
    """What the index and the quantiser of a vector field ask of the columns of augmented vectors. See
    Layout.
    """

    multiple_of: int
    """The stored width must be a multiple of it."""
    spread: int
    """In how many columns a bias is stored."""
    graph_hint: bool
    """Whether a graph hint column, with its far numbers, costs the index nothing."""
    length_pull: bool
    """Whether the index finds more if the graph hint column falls with the length of a row."""
    locality_hints: bool
    """Whether locality hint columns help the index and cost it nothing."""
    kind_offsets: bool
    """Whether rows may be stored less the offsets of their kinds, which takes a hidden text field that
    changes in one call with the vector.
    """

    @property
    def hints(self) -> dict[str, bool]:
        """The index hints that it takes, as arguments of `measured_on`."""
        return {
            "graph_hint": self.graph_hint,
            "length_pull": self.length_pull,
            "locality_hints": self.locality_hints,
        }


@dataclass(frozen=True)
class VectorField:
    """A dense float vector field."""

    name: str
    dim: int
    metric: str
    index_type: str
    """The type of its index, as the database names it."""
    index_params: dict[str, Any] = field(default_factory=dict)
    """The parameters of its index, as the database names them."""
    dtype: Dtype = "float32"
    computed_by: str = ""
    """The function of the database that computes the vectors; empty if clients write them."""
    multi_vectors: bool = False
    """Whether a row has several vectors, which the database scores by MaxSim."""

    @property
    def known_metric(self) -> Metric:
        """The metric. Raises InvalidParameter for one that cannot be corrected, and without any."""
        if not self.metric:
            raise InvalidParameter(
                f"{field_words(self.name)} has no index, so its metric is unknown: create an index "
                "first"
            )
        try:
            return as_metric(self.metric)
        except InvalidParameter as error:
            raise InvalidParameter(f"{field_words(self.name)}: {error}") from None

    @property
    def plain_layout(self) -> Layout:
        """The layout of the vectors as they are. Raises InvalidParameter for another metric."""
        layout_class = MultiVectorLayout if self.multi_vectors else Layout
        return layout_class(self.dim, self.known_metric)

    def width_of_copy(self, multiple_of: int) -> int:
        """Return the width of the augmented vectors of a copy with one profile.

        Raises InvalidParameter for another metric.
        """
        layout = Layout(self.dim, self.known_metric, multiple_of=multiple_of)
        return form_of(layout, self.dtype).width

    @property
    def obstacles(self) -> list[str]:
        """The reasons why the field cannot be corrected: no metric, another one than the three, and
        vectors that the database computes.

        It takes no augmented vectors then, and queries are texts, which no client can encode.
        """
        reasons = []
        if self.computed_by:
            reasons.append(
                f"the vectors of {field_words(self.name)} are computed on the server, by "
                f"{self.computed_by}, which accepts no others: correct a field whose vectors "
                "clients write, made by the same model"
            )
        try:
            _ = self.known_metric
        except InvalidParameter as error:
            reasons.append(str(error))
        return reasons


@dataclass(frozen=True)
class CollectionInfo:
    """Description of a collection for the jobs."""

    name: str
    """The real name, even if an alias was requested."""
    key_field: str
    """The field of the primary keys."""
    vector_fields: dict[str, VectorField]
    """The dense float vector fields by name."""
    rows: int
    """The database's count, including duplicates."""
    partitions: tuple[str | None, ...]
    """Names that rows must be copied into, or that separate keys without a common order; (None,) if
    the database places rows itself and all keys have one order.
    """
    aliases: tuple[str, ...]
    states: dict[str, CollectionState]
    """The states of the corrected vector fields, by name."""
    verdicts: Verdicts
    """The verdicts of `tune`."""
    is_bank: bool
    """Whether it holds the generations of a query bank."""
    schema: dict[str, Any]
    """The database's own description, opaque to the jobs."""
    dual_write: DualWrite | None = None
    """Set while clients write to a copy too."""
    samplings: Samplings = field(default_factory=Samplings)
    """What of its live queries clients sample."""
    identity: str = ""
    """Separates the collection from another one of the same name, if not empty: the database's
    number of it, or the one in its property, see Identity.
    """
    time_to_live: int = 0
    """Seconds after which a row expires, counted from its last write, by whomever; 0 for no limit.
    """

    @classmethod
    def of_properties(
        cls,
        properties: Mapping[str, str],
        *,
        name: str,
        key_field: str,
        vector_fields: dict[str, VectorField],
        rows: int,
        partitions: tuple[str | None, ...],
        aliases: Iterable[str],
        schema: dict[str, Any],
        number: str = "",
        time_to_live: int = 0,
    ) -> CollectionInfo:
        """Return the description of a collection with all that its properties say.

        aliases: also those of fences, which the description leaves out. number: the database's own
        of the collection; empty if it numbers none. Raises StateError for a broken property.
        """
        return cls(
            name=name,
            key_field=key_field,
            vector_fields=vector_fields,
            rows=rows,
            partitions=partitions,
            aliases=tuple(alias for alias in aliases if not is_fence(alias)),
            states=read_states(properties, name),
            verdicts=Verdicts.read(properties, name) or Verdicts(),
            is_bank=BANK_PROPERTY in properties,
            schema=schema,
            dual_write=DualWrite.read(properties, name),
            samplings=Samplings.read(properties, name) or Samplings(),
            identity=number or identity_in(properties, name),
            time_to_live=time_to_live,
        )

    @staticmethod
    def properties_of_copy(properties: Mapping[str, Any], state: CollectionState) -> dict[str, Any]:
        """Return the properties of a copy: those of its source, and its own state.

        It does not get those about the source alone: its jobs, its samples, and which collection it
        is.
        """
        carried = {**properties, state.property_name: state.to_json()}
        for record in (DualWrite, Samplings, Identity):
            carried.pop(record.property_name, None)
        return carried

    def __post_init__(self) -> None:
        for state in self.states.values():
            # A user who may change properties or drop fields can make a state wrong:
            # jobs and clients that index by these names rely on this check.
            if state.field not in self.vector_fields:
                what = described_property(state.property_name, self.name)
                raise StateError(
                    f"{what} is about the vector field {shown(state.field)!r}, which the "
                    f"collection does not have: {REMEDY}"
                )

    @property
    def collection_id(self) -> CollectionId:
        return CollectionId(name=self.name, identity=self.identity)

    @property
    def sides(self) -> list[Helper]:
        """The side collections."""
        return side_helpers(self.states.values())

    @property
    def helpers(self) -> list[Helper]:
        """The helper collections that the properties name,
        apart from banks, which collections may share.
        """
        return [*self.sides, *(sampling.helper for sampling in self.samplings.fields)]

    def users_shape(self, field: str) -> tuple[int, str]:
        """Return the dimension and the metric of a field as users see them, corrected or not."""
        state = self.states.get(field)
        vector = self.vector_fields[field]
        return (state.dim, state.metric) if state else (vector.dim, vector.metric)

    def bias_spread(self, field: str) -> int:
        """Return in how many columns a quantiser that treats all columns alike needs a bias."""
        return spread_for(*self.users_shape(field))

    @property
    def state(self) -> CollectionState | None:
        """The state of the corrected field; None without one. Raises InvalidInput for several."""
        return self.state_of(None)

    def with_index(
        self, field: str, index_type: str, index_params: dict[str, Any]
    ) -> CollectionInfo:
        """Return this description with another index on a vector field."""
        other = replace(self.vector_fields[field], index_type=index_type, index_params=index_params)
        return replace(self, vector_fields={**self.vector_fields, field: other})

    def require_field(self, field: str) -> None:
        """Raise InvalidInput naming the float vector fields if `field` is not one of them."""
        if field not in self.vector_fields:
            fields = ", ".join(name or "the one without a name" for name in self.vector_fields)
            raise InvalidInput(
                f"{self.name!r} has no float vector field {field!r}: choose one of {fields or 'none'}"
            )

    def require_correctable(self, field: str) -> None:
        """Raise CannotMigrate if this field has obstacles, and as `require_field` does."""
        self.require_field(field)
        if obstacles := self.vector_fields[field].obstacles:
            raise CannotMigrate(f"{self.name!r} cannot be corrected: {'; '.join(obstacles)}")

    def state_of(self, field: str | None) -> CollectionState | None:
        """Return the state of this vector field, or of the only corrected one; None if it is not
        corrected. Raises InvalidInput for several and for an unknown field.
        """
        if field is not None:
            self.require_field(field)
            return self.states.get(field)

        if len(self.states) > 1:
            fields = ", ".join(self.states)
            raise InvalidInput(
                f"{self.name!r} has several corrected fields: choose one with --field: {fields}"
            )
        return next(iter(self.states.values()), None)


def taken_keys(counts: Mapping[str, int]) -> list[str]:
    """Return the obstacle that rows have keys of their own where a corrected collection has its
    hidden fields; none without such rows. counts: the number of rows with each key.
    """
    if not counts:
        return []

    keys = ", ".join(
        f"{name} ({count:,} row{'s' * (count != 1)})" for name, count in counts.items()
    )
    return [
        f"rows have keys of the names that corrected rows need: {keys}; they come from a "
        "corrected collection that was read without HubnessClient, which leaves them out: delete "
        "these rows, and insert them without the keys"
    ]


@dataclass(frozen=True, eq=False)
class QuerySamples:
    """Samples of live queries."""

    vectors: Floats
    """(n, d) float32, as the user sent them; (0, 0) if there are none."""
    numbers: npt.NDArray[np.int64]
    """(n,) what identifies each."""
    at: npt.NDArray[np.int64]
    """(n,) when each was sent, in Unix seconds."""

    def __len__(self) -> int:
        return len(self.numbers)

    def counting(self, now: float) -> QuerySamples:
        """Return the samples that count: whoever searches may write any rows in their place.

        A number below 0, one that a sample before has, a time in the future and a vector that no
        bank can hold do not count. now: Unix time.
        """
        is_first = np.zeros(len(self), np.bool_)
        is_first[np.unique(self.numbers, return_index=True)[1]] = True
        in_time = (self.at >= 0) & (self.at <= now + CLOCK_SKEW)
        usable = np.isfinite(self.vectors).all(axis=1) & self.vectors.any(axis=1)
        return self.take(np.flatnonzero(is_first & (self.numbers >= 0) & in_time & usable))

    def take(self, which: npt.NDArray[np.integer[Any]]) -> QuerySamples:
        """Return these samples only, by their positions."""
        return QuerySamples(self.vectors[which], self.numbers[which], self.at[which])


@dataclass(frozen=True, eq=False)
class Sample:
    """A live query."""

    place: int
    """A later sample in the same place replaces it."""

    number: int
    """Identifies the query."""

    at: int
    """Unix time, in seconds."""

    vector: Floats
    """(d,) float32."""


@dataclass(frozen=True)
class SamplesOf:
    """Where the samples of a collection go."""

    helper: Helper
    """The collection of samples, as the property of the searched collection names it."""

    owner: CollectionId
    """The searched collection."""


@dataclass(frozen=True)
class Record:
    """A record of a ledger."""

    key: str
    group: str
    """Records of a group are read together."""
    body: str
    """JSON of at most 60,000 characters."""
