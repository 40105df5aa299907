"""The collection state: versioned JSON in the custom property `hubness`. No I/O."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from milvus_hubness.basics.bounds import (
    MOST_CANDIDATES,
    MOST_ROWS,
    CollectionName,
    Depth,
    Fingerprint,
    FrozenModel,
    Moment,
    Name,
    Number,
    Strength,
    read_record,
    read_value,
    shown,
)
from milvus_hubness.basics.defaults import OnHub
from milvus_hubness.basics.texts import field_words
from milvus_hubness.correction.codec.arrays import Dtype, Floats, Metric, lost
from milvus_hubness.correction.codec.base import RowCodec, VectorCodec
from milvus_hubness.correction.codec.beside import SLOTS, BesideCodec
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.multi_vectors import MultiVectorCodec, MultiVectorLayout
from milvus_hubness.correction.codec.senders import QueryWeights
from milvus_hubness.correction.guard import Evidence
from milvus_hubness.correction.kinds import KindMeans, KindRule, Kinds, kinds_from
from milvus_hubness.correction.overrides import NONE, Overrides
from milvus_hubness.correction.prior import Prior, problems_in, unusable
from milvus_hubness.errors import (
    InvalidInput,
    InvalidParameter,
    NotCorrected,
    StateError,
    UnknownStateVersion,
)

PROPERTY = "hubness"
VERSION: Literal[1] = 1

Model = TypeVar("Model", bound="PropertyModel")


class PropertyModel(FrozenModel):
    """A record that is stored in the collection property `property_name`."""

    property_name: ClassVar[str]

    @classmethod
    def read(cls: type[Model], properties: Mapping[str, str], collection: str) -> Model | None:
        """Read the record from the properties of a collection, which messages name.

        Returns None if the property is missing. Raises StateError if the record is broken.
        """
        text = properties.get(cls.property_name)
        # Servers that cannot drop a property have it empty.
        if not text:
            return None
        what = described_property(cls.property_name, collection)
        return read_record(cls.model_validate_json, text, what, REMEDY)


REMEDY = "give it its former value again"


def described_property(property_name: str, collection: str) -> str:
    """Return what messages call a property of a collection."""
    return f"the collection property {shown(property_name)!r} of {shown(collection)!r}"


MOST_PARAMETERS = 1_000
"""Largest number of values in the description of an estimator; a tuned blend has some 60."""
MOST_LEVELS = 20
"""Largest number of levels of such a description; a tuned blend has 3."""
SMALLEST_PARAMETER = 1e-100
LARGEST_PARAMETER = 1e37
"""Bounds of the sizes of an estimator's numbers, other than 0: scores divided by them are finite.
"""


def _valid_estimator(values: dict[str, Any]) -> dict[str, Any]:
    """Return the description of an estimator unchanged.

    Raises InvalidParameter if the estimator has no such values.

    An estimator that this process does not know, of another package or of a newer version, is
    judged where it computes: searches and the proxy need no more than the stored biases.
    """
    # Here, since it takes 50 ms once, and a search of an uncorrected collection reads no state.
    # torch is imported only where an estimator computes.
    from milvus_hubness.correction.estimators import from_dict
    from milvus_hubness.correction.estimators.base import ESTIMATORS, names_in

    _expect_parameters(values)
    if names_in(values) <= ESTIMATORS.keys():
        from_dict(values)
    return values


def _expect_parameters(values: dict[str, Any]) -> None:
    """Check the number, the depth and the size of the values, whatever they mean.

    Raises InvalidParameter.
    """
    # A list in place of recursion: the state comes from outside, and may be nested without end.
    rest: list[tuple[Any, int]] = [(values, 0)]
    count = 0

    while rest:
        value, level = rest.pop()
        count += 1
        if count > MOST_PARAMETERS or level > MOST_LEVELS:
            raise InvalidParameter(
                f"an estimator has at most {MOST_PARAMETERS:,} values in {MOST_LEVELS} levels"
            )

        if isinstance(value, dict):
            rest += [(inner, level + 1) for inner in value.values()]
        elif isinstance(value, list):
            rest += [(inner, level + 1) for inner in value]
        elif (
            isinstance(value, int | float)
            and value
            and not SMALLEST_PARAMETER <= abs(value) <= LARGEST_PARAMETER
        ):
            raise InvalidParameter(
                f"the numbers of an estimator are finite, from {SMALLEST_PARAMETER:g} to "
                f"{LARGEST_PARAMETER:g} in size"
            )


StoredEstimator = Annotated[dict[str, Any], AfterValidator(_valid_estimator)]
"""An estimator as `estimators.to_dict` describes it."""


class BankReference(FrozenModel):
    """Reference to one generation of a bank collection."""

    collection: CollectionName
    """Name of the bank collection."""
    generation: str = Field(pattern="^[0-9a-f]+$", max_length=64)
    """Digest of its queries, potentials and targets; it names the rows of the generation."""
    fingerprint: Fingerprint
    """Digest of the queries and targets alone, the same as that of a bank file."""
    count: int = Field(ge=1, le=MOST_ROWS)
    """Number of queries."""
    size: int = Field(ge=1, le=MOST_ROWS)
    """Number of rows that hold its queries, targets and clicks; readers read no endless rest."""
    nearest: str = Field(default="", max_length=512)
    """Name of the rows that list the nearest items of each query and target, for a gate; empty
    without a gate.
    """

    @property
    def queries_fingerprint(self) -> str:
        """Digest of the queries alone, by which verdicts on a bank are stored."""
        # That of a bank with targets goes on after that of its queries.
        return self.fingerprint.split("+")[0]

    @property
    def has_targets(self) -> bool:
        """Whether reference items are stored with its queries."""
        return self.fingerprint != self.queries_fingerprint

    @property
    def rows(self) -> tuple[str, str]:
        """What identifies the generation's rows.

        Two references to the same rows differ if only one names nearest items.
        """
        return self.collection, self.generation


GENERATION_BYTES = 6
"""Bytes of the number of a generation beside the vectors: JSON of every language holds it exactly."""


class Profile(FrozenModel):
    """A bias profile: one set of biases of a field, which searches name or get by default."""

    estimator: StoredEstimator
    """Name and parameters of the method."""
    slot: int = Field(ge=0)
    """The slot of its biases: their column in the vectors, or where this generation is beside them."""
    mean_bias: Number
    """c, subtracted from every stored bias; it changes no ranking."""
    strength: Strength = 1.0
    """w of searches that name none."""
    gate: Depth | None = None
    """A number k; searches correct only queries whose raw nearest item is among the k nearest of
    some bank query. None: searches correct all queries.
    """
    bank: BankReference
    """The bank of the biases."""
    prior: Prior | None = None
    """What is added to the scores because items are wanted more or less often; None for nothing."""
    kinds: KindMeans | None = None
    """The means of queries and of kinds of items, with which vectors are compared; None without
    kinds."""
    epoch: int = Field(ge=1, le=MOST_ROWS)
    """Counts the refreshes, from 1."""
    refreshed_at: Moment
    """When the biases were last up to date."""
    fitted_at: Moment
    """When the bank was fitted to the rows: a refresh with the same bank leaves it as it is, unless it
    is a refit. It names the note of the fitted rows in the ledger.
    """
    evidence: Evidence | None = None
    """Quantiles of the gallery's biases, for the hub guard; None before they are measured."""

    @cached_property
    def generation(self) -> int:
        """The number of the entries beside the vectors with these biases, above 0.

        As the name of a bank's generation, it is a digest: of what the biases are computed from, and of
        the refresh. So a client that writes late for a refresh that was given up, or for a correction
        that was taken off, does not have the number of what came after it.
        """
        # A later version of this package may know of more about a prior, which is as it was then.
        prior = self.prior.model_dump(mode="json", exclude_defaults=True) if self.prior else None
        content = {
            "bank": self.bank.generation,
            "epoch": self.epoch,
            "estimator": self.estimator,
            "mean_bias": self.mean_bias,
            "prior": prior,
        }
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
        return 1 + int.from_bytes(digest.digest()[:GENERATION_BYTES])


class CandidateReranking(FrozenModel):
    """Candidate re-ranking of the bias location `beside`.

    Vectors are stored as the user gave them; searches read `candidates` rows and subtract the
    biases from their scores.
    """

    side_prefix: CollectionName | None
    """What the names of the two collections begin with that hold the biases under the same keys, one
    for each slot; None if keys of the rows' payloads hold them.
    """
    candidates: int = Field(ge=1, le=MOST_CANDIDATES)
    """Number of rows that a search reads."""
    missed: float = Field(ge=0, le=1)
    """The share of the exact corrected top 10 outside that many candidates."""
    allowed: float = Field(gt=0, lt=1)
    """The upper limit of that share in the choice of `candidates`."""
    queries: int = Field(ge=1, le=MOST_ROWS)
    """Number of queries over which `missed` is the mean."""


class OtherGeneration(FrozenModel):
    """The generation of biases beside the vectors that searches do not read."""

    use: Literal["filling", "returning", "former"]
    """`filling`: a refresh fills it, and searches are to read it. `returning`: the same, by a rollback.
    `former`: searches read it until the last switch; no row gets its biases any more.
    """
    profile: Profile
    """The profile while searches read this generation, with its slot."""


class _OfTokens(FrozenModel):
    """The stored layout of rows of several vectors."""

    of_tokens: Layout


def _read_layout(value: Any) -> Any:
    """Return the layout of rows of several vectors, or another value as it is, for pydantic to read."""
    if not isinstance(value, dict) or value.keys() != _OfTokens.model_fields.keys():
        return value
    layout = _OfTokens.model_validate(value).of_tokens
    arguments = {field.name: getattr(layout, field.name) for field in fields(layout)}
    return MultiVectorLayout(**arguments)


def _written_layout(layout: Layout) -> dict[str, Any]:
    """Return the layout as plain data, without the parts that it lacks."""
    present = {name: part for name, part in asdict(layout).items() if part is not None}
    return {"of_tokens": present} if layout.multi_vectors else present


StoredLayout = Annotated[Layout, BeforeValidator(_read_layout), PlainSerializer(_written_layout)]


class CollectionState(FrozenModel):
    """The state of a corrected vector field, for clients and jobs."""

    version: Literal[1] = VERSION
    """Version of the form of the state."""
    field: Name
    """The corrected vector field."""
    suffix: Name = ""
    """End of the names of the hidden fields and of the property, which differ between several
    corrected fields of a collection; empty for the first field.
    """
    layout: StoredLayout
    """The columns of the augmented vectors and queries."""
    dtype: Dtype = "float32"
    """Type of the numbers in the field."""
    source: CollectionName
    """The collection that this one was copied from; the collection itself if it was corrected
    without a copy.
    """
    phase: Literal["copying", "ready"] = "ready"
    """`copying` until the copy is verified."""
    profiles: dict[Name, Profile]
    """Bias profiles by name."""
    active: Name = "default"
    """The profile that searches use when they name none."""
    reranking: CandidateReranking | None = None
    """None unless the bias location is `beside`."""
    other: OtherGeneration | None = None
    """The second generation of biases beside the vectors; None before the first refresh."""
    migration: Name = ""
    """The id of the migration that created the collection as a copy; empty for others."""
    kinds: KindRule | None = None
    """How rows get their kind, such as their modality or language; None without kinds."""
    on_hub: OnHub = "off"
    """What clients do with a new row that looks like a planted hub."""

    @model_validator(mode="after")
    def _expect_parts_that_fit(self) -> CollectionState:
        """Check what concerns several fields. Raises InvalidParameter, which names the field."""
        if self.active not in self.profiles:
            raise InvalidParameter(f"active is {self.active!r}, which is none of the profiles")
        if self.suffix not in ("", f"_{self.field}"):
            raise InvalidParameter(
                f"suffix is {self.suffix!r}, not '' or the field's {f'_{self.field}'!r}"
            )
        self._expect_location()
        self._expect_slots()
        self._expect_kinds()
        # It raises if the field would be wider than Milvus allows.
        _ = self.codec.form
        return self

    def _expect_location(self) -> None:
        if self.reranking is None:
            if self.other is not None:
                raise InvalidParameter("other is set: only biases beside have a second generation")
            return

        # The collections, or the keys of payloads, have fixed names: they hold one profile.
        if len(self.profiles) > 1:
            raise InvalidParameter(
                f"profiles has {len(self.profiles)} names: biases beside have one profile"
            )

    def _expect_kinds(self) -> None:
        """Check that the layout has a column for each kind, and each profile a mean."""
        count = self.kinds.count if self.kinds is not None else 0
        columns = self.layout.kinds
        columns_count = columns.count if columns is not None else 0
        if columns_count != count:
            raise InvalidParameter(f"layout.kinds has {columns_count} columns, for {count} kinds")
        if columns is not None and columns.offsets and self.dtype != "float32":
            raise InvalidParameter(f"layout.kinds.offsets are for float32, not for {self.dtype}")
        if count and self.reranking is not None:
            raise InvalidParameter("kinds and reranking are both set: candidates have no kinds")

        for name, profile in self.profiles.items():
            if (profile.kinds is None) != (self.kinds is None):
                raise InvalidParameter(f"profiles.{name}.kinds does not fit the kinds of the state")
            # It raises if the profile has other means than the rule has kinds.
            _ = self.kinds_of(profile)

    def _expect_slots(self) -> None:
        """Check that each slot exists and has the biases of one profile or generation."""
        profiles = {f"profiles.{name}": profile for name, profile in self.profiles.items()}
        if self.other is not None:
            profiles["other.profile"] = self.other.profile

        owner_of_slot: dict[int, str] = {}
        for label, profile in profiles.items():
            if profile.slot >= self.slots:
                raise InvalidParameter(
                    f"{label}.slot is {profile.slot}: there are the slots 0 to {self.slots - 1}"
                )
            owner = owner_of_slot.setdefault(profile.slot, label)
            if owner != label:
                raise InvalidParameter(f"{label}.slot is {profile.slot}, as {owner}.slot is")

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
        """The number of slots of biases: columns of the vectors, or places of a generation beside."""
        return self.layout.slots.count if self.reranking is None else SLOTS

    @cached_property
    def codec(self) -> RowCodec:
        """The codec of the field's rows, queries and scores: the one of its bias location."""
        common = (self.field, self.suffix, self.layout, self.dtype, self.profile.slot)
        if self.reranking is None:
            codec_class = MultiVectorCodec if self.layout.multi_vectors else VectorCodec
            return codec_class(*common)

        return BesideCodec(
            *common,
            side_prefix=self.reranking.side_prefix,
            candidates=self.reranking.candidates,
            generations=self.generations,
        )

    @property
    def generations(self) -> tuple[tuple[int, int], ...]:
        """The slot and the number of each generation beside the vectors whose biases rows get: first
        that which searches read, then that which a job is filling.
        """
        return tuple((profile.slot, profile.generation) for profile in self.written_profiles)

    @property
    def miss_rate(self) -> float | None:
        """Measured share of the exact corrected top 10 outside the candidates.

        None if there are no candidates.
        """
        return None if self.reranking is None else self.reranking.missed

    @property
    def allowed_miss_rate(self) -> float | None:
        """The upper limit of `miss_rate` in the choice of the number of candidates."""
        return None if self.reranking is None else self.reranking.allowed

    @cached_property
    def profile(self) -> Profile:
        """The profile that searches use when they name none."""
        return self.profiles[self.active]

    @property
    def kind(self) -> str:
        """What a caller names for the kinds: a field, or "auto"; empty without kinds."""
        return self.kinds.source if self.kinds is not None else ""

    def kinds_of(self, profile: Profile) -> Kinds | None:
        """Return the kinds with the means of a profile; None without kinds."""
        if self.kinds is None or profile.kinds is None:
            return None
        return kinds_from(self.kinds, profile.kinds, self.layout.dim)

    def query_weights(self, profile: Profile, overrides: Overrides = NONE) -> QueryWeights:
        """Return what searches with this profile send beside their queries.

        overrides: settings of the search, whose profile is not looked at. Raises InvalidParameter.
        """
        overrides.checked()
        strength = overrides.strength
        factor = overrides.kinds
        kinds = self.kinds_of(profile)
        return QueryWeights(
            profile.strength if strength is None else float(strength),
            profile.slot,
            None if kinds is None else kinds.weights(1.0 if factor is None else float(factor)),
        )

    @cached_property
    def fields_read(self) -> frozenset[str]:
        """The fields of rows on which their numbers depend, apart from the vector."""
        of_kinds = {self.kinds.field} if self.kinds is not None and self.kinds.field else set()
        return self._prior_fields | of_kinds

    @cached_property
    def needs_rows(self) -> bool:
        """Whether the numbers of a row depend on more than its vector."""
        return bool(self._priors or self.fields_read)

    def expect_values(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raise InvalidInput for a row, named by its position, whose value no prior can use."""
        for name in sorted(self._prior_fields):
            for position, problem in problems_in([row.get(name) for row in rows]):
                raise InvalidInput(unusable(position, name, problem))

    @cached_property
    def _priors(self) -> list[Prior]:
        """The priors of all biases that new rows get."""
        return [profile.prior for profile in self.written_profiles if profile.prior is not None]

    @cached_property
    def filling(self) -> Profile | None:
        """The profile as it will be once a job has filled the other generation beside the vectors."""
        other = self.other
        return other.profile if other is not None and other.use != "former" else None

    @cached_property
    def written_profiles(self) -> tuple[Profile, ...]:
        """The profiles whose biases a written row gets: those that searches read, and then that which
        a job is filling.
        """
        return (*self.profiles.values(), *([self.filling] if self.filling else []))

    @cached_property
    def _prior_fields(self) -> frozenset[str]:
        """The fields of rows that a prior reads."""
        return frozenset(prior.field for prior in self._priors if prior.source == "field")

    def profile_of(self, name: str | None) -> Profile:
        """Return the profile of that name, the active one for None. Raises InvalidInput."""
        # A value that is no text need not be hashable.
        if name is not None and not (isinstance(name, str) and name in self.profiles):
            names = ", ".join(self.profiles)
            raise InvalidInput(
                f"no profile {name!r} for {field_words(self.field)}: choose one of {names}"
            )
        return self.profiles[name or self.active]

    @property
    def banks(self) -> tuple[BankReference, ...]:
        """The banks of all profiles, and of both generations beside the vectors."""
        other = [self.other.profile] if self.other is not None else []
        return tuple(profile.bank for profile in (*self.profiles.values(), *other))

    @property
    def property_name(self) -> str:
        """The collection property that holds this state."""
        return f"{PROPERTY}.{self.field}" if self.suffix else PROPERTY

    def require_storable(self, vectors: npt.ArrayLike, what: str = "row") -> Floats:
        """Return `vectors` as float32 (n, d), valid for insertion.

        Raises as Layout.validate_vectors does, and InvalidInput naming a row that could not be read
        back bit for bit.
        """
        rows = self.layout.validate_vectors(vectors, what)
        if problem := self.unreadable(rows, range(len(rows))):
            raise InvalidInput(
                f"{what} {problem}: leave it out, or correct {self.source!r} by enable"
            )
        return rows

    def index_metric(self, requested: str | None) -> str | None:
        """Return the metric with which a server indexes the field: augmented vectors are compared by
        their inner product, whatever the user's metric.

        requested: the user's; None for none. Raises InvalidParameter if it is not that of the
        correction.
        """
        if self.codec.leaves_vectors:
            return requested
        if requested is not None and requested.upper() != self.metric:
            raise InvalidParameter(
                f"{field_words(self.field)} was corrected for {self.metric}: its index cannot take "
                f"{requested.upper()}"
            )
        return "IP"

    def unreadable(self, rows: Floats, keys: Sequence[Any]) -> str:
        """Return a message about a number in rows (n, d) that would not be read back bit for bit.

        It is empty if all would. keys: names of the rows in the message.
        """
        # Only a mean that is subtracted before rows are stored can cost a bit.
        half_squares = self.layout.half_squares
        if half_squares is None or not half_squares.mean or self.codec.leaves_vectors:
            return ""
        taken_off = half_squares.mean_of(self.dim).taken_off
        is_lost = lost(rows, taken_off)
        if not is_lost.any():
            return ""

        row, column = np.argwhere(is_lost)[0]
        return (
            f"{keys[row]} has {rows[row, column]:g} in dimension {column} of {field_words(self.field)}, "
            "which float32 rounds against the mean of that dimension, "
            f"{taken_off[column]:g}: it must be 0, or from half to twice the mean"
        )

    def with_profile(self, profile: Profile, name: str | None = None) -> CollectionState:
        """Return this state with the named profile (the active one for None) replaced or added."""
        return self.model_copy(update={"profiles": {**self.profiles, name or self.active: profile}})

    @classmethod
    def from_json(
        cls, text: str, collection: str, property_name: str = PROPERTY
    ) -> CollectionState:
        """Parse the state in a property of a collection.

        Raises UnknownStateVersion for another version, StateError for a broken state.
        """
        what = described_property(property_name, collection)
        # The version comes first: what another one means by its fields is not for this to say.
        value = read_value(text, what, REMEDY)
        version = value.get("version") if isinstance(value, dict) else None
        if version is None:
            raise StateError(f"{what} is not a state: {REMEDY}")
        if version != VERSION:
            raise UnknownStateVersion(
                f"{what} has version {shown(version)}, this package reads {VERSION}: "
                "update milvus-hubness"
            )

        state = read_record(cls.model_validate_json, text, what, REMEDY)
        # A property that was copied from another field would correct that field twice.
        if state.property_name != property_name:
            raise StateError(f"{what} is the state of {state.property_name!r}: {REMEDY}")
        return state


def read_states(properties: Mapping[str, str], collection: str) -> dict[str, CollectionState]:
    """Return the states among the properties of a collection by vector field.

    collection: its name in messages. Raises as `CollectionState.from_json` does.
    """
    states = [
        CollectionState.from_json(text, collection, name)
        for name, text in sorted(properties.items())
        if text and (name == PROPERTY or name.startswith(f"{PROPERTY}."))
    ]
    return {state.field: state for state in states}


def suffix_for(field: str, others: Collection[CollectionState]) -> str:
    """Return the suffix of a new field's state; `others` are the states of the collection."""
    # One field of a collection goes without, and most collections have no second one.
    is_taken = any(not state.suffix for state in others if state.field != field)
    return f"_{field}" if is_taken else ""


def require_state(state: CollectionState | None, collection: str) -> CollectionState:
    """Return `state`, or raise NotCorrected naming the collection."""
    if state is None:
        raise NotCorrected(
            f"collection {collection!r} is not corrected: migrate or enable it first"
        )
    return state
