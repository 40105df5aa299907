"""Which collections a collection may name in its properties, and the checks before such a name is
obeyed. No I/O.

A user who may change the properties of a collection can write any name into
them, and every client and job that reads them would then write to, delete from
or drop the named collection with its own rights. So a name is obeyed only if
two things hold, which the writer of the property cannot bring about alone:

- The name is derived from the collection's own name, as this package derives it. A helper
  collection that kept its name when its owner was renamed, a bank with a name of the user's
  choice, and each collection of query samples, are listed in the ledger instead.
- The named collection points back: its own property says whose helper it is. A copy has the id of
  its migration in its collection state, and a source its identity; both are in the ledger.

A collection that does not exist may be named: there is nothing that could be harmed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from milvus_hubness.basics.bounds import FrozenModel
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.errors import StateError

SIDE_PROPERTY = "hubness_side"
"""Marks a side collection; its value is the CollectionId of the collection whose biases it holds.
"""

QUERY_SAMPLES_PROPERTY = "hubness_query_samples"
"""Marks a collection of query samples; its value is
the CollectionId of the collection that was searched.
"""

LEDGER = "hubness_ledger"
"""The collection in which jobs keep their records.
A user who may write to it steers jobs and clients.
"""

HELPERS = "helpers"
"""Group of the ledger's records of helper collections
whose names are not derived from that of their owner.
"""


class CollectionId(FrozenModel):
    """Which collection is meant, also after a rename, where the database numbers collections."""

    name: str
    """The real name, never an alias."""

    identity: str = ""
    """The database's own number of the collection; empty
    where it has none, as in Milvus Lite and Qdrant.
    """

    def is_same(self, other: CollectionId) -> bool:
        """Whether both are one collection: by the numbers if there are any, else by the names."""
        if self.identity and other.identity:
            return self.identity == other.identity
        return self.name == other.name

    # Collections may share a bank, so a bank points back to nobody: its name is derived from that of
    # its owner, or the ledger lists it. The queries of another bank are not read either, as biases
    # that are computed from them show their directions.

    def banks_to_list(self, state: CollectionState) -> set[str]:
        """Return the banks of this collection's state whose names are not derived from its own."""
        banks = {bank.collection for bank in state.banks}
        return {bank for bank in banks if not is_bank_of(bank, self.name)}

    def bank_records(self, state: CollectionState) -> list[str]:
        """Return the keys of the ledger's records that must list the banks of a state."""
        return [f"{helpers_group(self.name)}/{bank}" for bank in sorted(self.banks_to_list(state))]

    def require_listed_banks(self, state: CollectionState, bodies: Iterable[str]) -> None:
        """Raise StateError unless these records of the ledger, as JSON, list the banks of a state."""
        self.require_banks(state, listed_in(bodies, self))

    def require_banks(self, state: CollectionState, listed: Collection[str]) -> None:
        """Raise StateError for a bank of somebody else. listed: the helpers in the ledger."""
        strangers = self.banks_to_list(state).difference(listed)
        if strangers:
            raise StateError(
                f"the collection property {state.property_name!r} of {self.name!r} names the bank "
                f"{min(strangers)!r}, which is not one of {self.name!r} and stays untouched: find "
                f"out who wrote that property, and drop it{harmless_causes(self.name)}"
            )


@dataclass(frozen=True)
class Helper:
    """A helper collection that a property names."""

    collection: str
    """The named collection."""

    property_name: str
    """The property that names it."""

    marker: str
    """The property with which a helper of this kind points back."""

    suffix: str | None
    """End of the derived name, after the name of the owner: a regular expression. None if no name
    suffices, and the ledger must list each of this kind.
    """

    def is_derived_from(self, name: str) -> bool:
        """Whether this package would give the helper of a collection of that name this name."""
        if self.suffix is None:
            return False

        return re.fullmatch(re.escape(name) + self.suffix, self.collection) is not None

    def require_owner(
        self, owner: CollectionId, properties: Mapping[str, Any], listed: Collection[str] = ()
    ) -> None:
        """Raise StateError unless this collection, which exists, is a helper of `owner`.

        properties: its own. listed: the helpers that the ledger lists for this owner.
        """
        points_back_to = owner_in(properties, self.marker)
        points_back = points_back_to is not None and points_back_to.is_same(owner)
        if points_back and (self.is_derived_from(owner.name) or self.collection in listed):
            return

        raise StateError(
            f"the collection property {self.property_name!r} of {owner.name!r} names "
            f"{self.collection!r}, which is no helper collection of {owner.name!r} and stays "
            f"untouched: find out who wrote that property, and drop it{harmless_causes(owner.name)}"
        )


def harmless_causes(collection: str) -> str:
    """Return the end of a message about a helper that may be the collection's own after all."""
    return (
        "; if the server has just been started again, it may hide rows of the ledger: repeat the "
        "command in a minute; if the collection was renamed without HubnessClient, run "
        f"milvus-hubness adopt {collection} --renamed-from NAME"
    )


def side_name(collection: str, suffix: str) -> str:
    """Return what the names of a field's side collections begin with. suffix: of the field's state."""
    return f"{collection}__bias{suffix}"


def samples_name(collection: str, field: str) -> str:
    """Return the name of the collection with a field's query samples."""
    return f"{collection}__query_samples_{field}"


def bank_name(collection: str) -> str:
    """Return the default name of the bank collection."""
    return f"{collection}__bank"


def is_bank_of(bank: str, owner: str) -> bool:
    """Whether this package would give a bank of a collection named `owner` this name."""
    return re.fullmatch(re.escape(bank_name(owner)) + "(_.+)?", bank) is not None


def side_helpers(states: Iterable[CollectionState]) -> list[Helper]:
    """Return the side collections that these states name."""
    helpers: list[Helper] = []
    for state in states:
        ending = re.escape(side_name("", state.suffix)) + r"(_\d+)?_[ab]"
        helpers += [
            Helper(side, state.property_name, SIDE_PROPERTY, ending) for side in state.codec.sides
        ]
    return helpers


def samples_helper(samples_collection: str, property_name: str) -> Helper:
    """Return a collection of query samples as a helper. property_name: what names it.

    It gets what all users ask. So whoever may write properties and create a collection must not be
    able to have samples taken: the ledger says whether a field is sampled.
    """
    return Helper(samples_collection, property_name, QUERY_SAMPLES_PROPERTY, None)


def owner_in(properties: Mapping[str, Any], marker: str) -> CollectionId | None:
    """Return the collection whose helper this is, from
    the helper's own properties; None if none is named.
    """
    try:
        return CollectionId.model_validate_json(properties.get(marker) or "")
    except ValidationError:
        return None


# -- the ledger's list ---------------------------------------------------------------------------


class HelperRecord(FrozenModel):
    """A record of the ledger: `helper` belongs to `owner`,
    though its name is not derived from the owner's.
    """

    owner: CollectionId
    helper: str


def helpers_group(owner: str) -> str:
    """Return the group of the ledger that lists the helpers of a collection."""
    return f"{HELPERS}/{owner}"


def listed_in(bodies: Iterable[str], owner: CollectionId) -> frozenset[str]:
    """Return the helpers of `owner` in these records of its group; broken records list nothing."""
    helpers = set()
    for body in bodies:
        try:
            record = HelperRecord.model_validate_json(body)
        except ValidationError:
            continue

        # Both must agree: a collection of the same name may be a later one,
        # and one that was renamed since has a list under its new name.
        if record.owner.is_same(owner) and record.owner.name == owner.name:
            helpers.add(record.helper)
    return frozenset(helpers)


# -- copies --------------------------------------------------------------------------------------

_WITHOUT_COPY = {"preparing", "finished"}
"""Phases of a migration in which no write goes to both collections."""


@dataclass(frozen=True)
class Permit:
    """By which a migration of the ledger lets the writes of a collection go to another one as well."""

    migration: str
    """The id of the migration."""

    copied_field: str | None
    """The field in whose state a copy has that id; None if the writes go to the source."""

    source_identity: str
    """The identity of the source; empty if the ledger has none."""

    def is_for(self, states: Mapping[str, CollectionState], identity: str) -> bool:
        """Whether a collection is the one of the migration, and no other one of its name.

        states, identity: its own, as it is described.
        """
        if self.copied_field is not None:
            state = states.get(self.copied_field)
            return state is not None and state.migration == self.migration
        return not self.source_identity or identity == self.source_identity


def permits_of(
    origin: CollectionId, copy: str, property_name: str, bodies: Iterable[str]
) -> list[Permit]:
    """Return by what migrations of the ledger writes to `origin` go to `copy` as well.

    bodies: the ledger's records of the migrations to `origin` and to `copy`, as JSON. Forward,
    `copy` is the target; on the way back, `origin` is, and `copy` the source. Raises StateError if
    there is none.
    """
    found = [_permit_in(body, origin, copy) for body in bodies]
    permits = [permit for permit in found if permit is not None]
    if permits:
        return permits

    raise StateError(
        f"the collection property {property_name!r} of {origin.name!r} names {copy!r}, and the "
        f"ledger has no migration between the two, so {copy!r} stays untouched: find out who "
        "wrote that property, and drop it"
    )


def expect_copy(
    origin: CollectionId,
    copy: str,
    permits: Iterable[Permit],
    states: Mapping[str, CollectionState],
    identity: str,
) -> None:
    """Raise StateError if the collection `copy` is none that these permits are for.

    states, identity: of `copy`, as it is described now.
    """
    if any(permit.is_for(states, identity) for permit in permits):
        return

    raise StateError(
        f"{copy!r} is another collection than the one that the ledger's migration of "
        f"{origin.name!r} had by that name, so it stays untouched: end the migration with "
        "`milvus-hubness migrate clean`"
    )


def _permit_in(body: str, origin: CollectionId, copy: str) -> Permit | None:
    """Return by what a record of the ledger lets writes go from `origin` to `copy`, if it does."""
    try:
        migration = json.loads(body)
        switch = migration.get("switch") or {}
        # While a cutover renames the source, both of its names count.
        sources = {migration["source"], switch.get("source_renamed") or migration["source"]}
        target = migration["target"]
        phase = migration["phase"]
        migration_id = str(migration["id"])
        copied_field = str(migration["field"])
        source_identity = str(migration.get("source_identity") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None

    if phase in _WITHOUT_COPY:
        return None

    # Where the database or the ledger has no identity, the names alone decide.
    is_source = not (source_identity and origin.identity) or source_identity == origin.identity
    if copy == target and origin.name in sources and is_source:
        return Permit(migration_id, copied_field=copied_field, source_identity=source_identity)
    if origin.name == target and copy in sources:
        return Permit(migration_id, copied_field=None, source_identity=source_identity)
    return None
