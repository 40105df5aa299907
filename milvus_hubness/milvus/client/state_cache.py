"""The cache of the states of Milvus's collections. No I/O."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from pymilvus.exceptions import MilvusException

from milvus_hubness.clients.states import CachedCollection, CachedStates, Lifetime
from milvus_hubness.clients.steps import Ask, Pause
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.codec.base import EPOCH_FIELD
from milvus_hubness.correction.state import BankReference, CollectionState, read_states
from milvus_hubness.errors import (
    BankTooLarge,
    CollectionNotFound,
    DimensionMismatch,
    EmptyBank,
    HubnessError,
    StateError,
)
from milvus_hubness.jobs.store.ownership import (
    LEDGER,
    CollectionId,
    Helper,
    side_helpers,
)
from milvus_hubness.jobs.store.records import DualWrite, Samplings, identity_in
from milvus_hubness.milvus.client.held_errors import name_as_given, recovered_from
from milvus_hubness.milvus.client.parts import REFUSALS, SENT_IN_PARTS
from milvus_hubness.milvus.client.query_samples import samplings_in
from milvus_hubness.milvus.client.rewrite import Reading
from milvus_hubness.milvus.client.side_memory import SideBiases, SideMemory
from milvus_hubness.milvus.client.steps import (
    ClientPolicy,
    InStore,
    LearnSchema,
    LoadBank,
    Operation,
)
from milvus_hubness.milvus.store import schema as milvus_schema
from milvus_hubness.milvus.store.schema import expect_side_collections
from milvus_hubness.milvus.store.server import (
    exceeds_limit,
    is_lite,
    is_missing,
    is_not_loaded,
    message_of,
)

if TYPE_CHECKING:
    from milvus_hubness.milvus.store.milvus_store import MilvusStore

T = TypeVar("T")

CUT_OVER_PAUSE = 0.02
"""Time between two attempts while a name may be moving to a copy, in seconds."""
CLOSING_SECONDS = 0.1
"""Time after which Milvus Lite has closed and renamed a collection."""
_OTHER_WIDTH = re.compile(r"num_rows|should divide the dim|not equal to schema dim")
"""The messages of a server that got rows for a collection with vectors of another width."""

PERHAPS_OUTDATED = (
    MilvusException,
    DimensionMismatch,
    EmptyBank,
    BankTooLarge,
    CollectionNotFound,
    StateError,
)
"""Errors of a call that may be due to an outdated collection state."""


def id_in(description: Mapping[str, Any], collection: str) -> CollectionId:
    """Return which collection is described; `collection` may be an alias."""
    name = str(description.get("collection_name") or collection)
    return CollectionId(name=name, identity=str(description.get("collection_id") or ""))


@dataclass(frozen=True)
class CachedState(CachedCollection):
    """The cached state of a collection of Milvus."""

    key_field: str = ""
    samplings: Samplings = field(default_factory=Samplings)
    """What of the live queries is sampled."""
    widths: Mapping[str, int] = field(default_factory=dict, compare=False)
    """The stored dimensions of the vector fields that could be corrected."""
    prepared: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False)
    """Prepared searches, by their pattern."""
    metrics: dict[str, str] = field(default_factory=dict, compare=False)
    """Metrics of indexes, by field, as far as they were needed."""

    @cached_property
    def sides(self) -> tuple[Helper, ...]:
        """The side collections."""
        return tuple(side_helpers(self.states.values()))

    @cached_property
    def side_biases(self) -> tuple[SideBiases, ...]:
        """The generations in side collections that get the biases of new rows."""
        return tuple(found for state in self.states.values() for found in SideBiases.written(state))

    @cached_property
    def reading(self) -> Reading:
        """Decodes rows of the collection."""
        return Reading(tuple(self.states.values()))

    def fits(self, columns: Iterable[Any], names: Iterable[str]) -> bool:
        """Whether an answer may be of the uncorrected collection that this state is of.

        By an alias it may be of a corrected copy: its vectors are wider, and it has hidden fields.

        columns: its vectors as FieldData. names: the fields of its rows.
        """
        for column in columns:
            dim = column.vectors.dim
            if dim and dim != self.widths.get(column.field_name, dim):
                return False

        return not any(name.startswith(EPOCH_FIELD) for name in names)

    def state_of(self, anns_field: str | None) -> CollectionState | None:
        """Return the state of the named field, or else of the only corrected field."""
        if anns_field:
            # pymilvus refuses a name that is no text, and so need not be hashable.
            return self.states.get(anns_field) if isinstance(anns_field, str) else None
        return next(iter(self.states.values())) if len(self.states) == 1 else None


NOTHING = CachedState()
"""The state of a collection that does not exist."""


class StateCache(CachedStates[CachedState]):
    """The cache of collection states, and what else a client remembers of collections.

    state_ttl: TTL of a state, in seconds. Raises InvalidParameter for an invalid one.
    """

    failures = (HubnessError, *REFUSALS)
    perhaps_outdated = PERHAPS_OUTDATED
    write_again = "Write again, an insert as an upsert"

    def __init__(self, state_ttl: float, policy: ClientPolicy) -> None:
        super().__init__(state_ttl, policy.cut_over_seconds)
        self.policy = policy
        self.side_memory = SideMemory(state_ttl)

        self._last: dict[str, CachedState] = {}
        """The states that were read last, also after their TTL."""
        self._changed: dict[str, float] = {}
        """When a state was last read that differed from the one before."""

        self._loaded: set[str] = set()
        """Side collections and banks that are loaded."""
        self._version: str | None = None

    def forget(self, collection: str | None = None) -> None:
        """Drop the cached state of a collection, or of all collections."""
        super().forget(collection)
        self._loaded.clear()
        if collection is None:
            self._last.clear()
            self.side_memory.clear()

    def read_state(self, collection: str, timeout: float | None) -> Operation[CachedState]:
        """Return the state as the collection has it now.

        If a missing collection had a copy, the operation waits, because a cutover may be moving its
        name to the copy.
        """
        until = time.monotonic() + self.policy.cut_over_seconds
        while True:
            began = time.monotonic()
            try:
                description = yield Ask("describe_collection", (collection, timeout))
                break
            except MilvusException as error:
                if not is_missing(error):
                    raise

            last = self._last.get(collection, NOTHING)
            if last.dual_write is None or time.monotonic() > until:
                self._last.pop(collection, None)
                return NOTHING

            yield Pause(CUT_OVER_PAUSE)

        cached = _described(description, collection, self.lifetime(began))
        last = self._last.get(collection, NOTHING)
        if cached.states and last.states != cached.states:
            # pymilvus has the schemas that it has read.
            yield LearnSchema(cached.real_name)
        if last not in (NOTHING, cached):
            self._changed[collection] = began
        self._last[collection] = cached
        return cached

    def _repeated(
        self,
        collection: str,
        timeout: float | None,
        call: Callable[[CachedState], Operation[T]],
        state: CachedState,
        error: Exception,
    ) -> Operation[tuple[T, CachedState]]:
        """Run `call` again after an error on this state, as `used` says.

        Raises the error if it is not due to a change of the collection.
        """
        had_copy = state.dual_write is not None
        changed = yield from self._state_for_retry(collection, state, error, timeout)
        if changed is None:
            name_as_given(error, state.real_name, collection)
            raise error

        recovered_from(error, collection)

        # A switch of names has several steps: the next one may have come after the state was
        # read, so one retry need not be enough.
        until = time.monotonic() + self.policy.cut_over_seconds
        while True:
            state = changed
            try:
                return (yield from call(state)), state
            except PERHAPS_OUTDATED as last:
                # Milvus Lite gives a collection its new name before it can be read under it.
                is_final = time.monotonic() > until
                is_opening = had_copy and is_not_loaded(last)
                if not is_opening:
                    changed = yield from self.read_again(collection, timeout)
                    is_final |= changed == state and not self._met_another(
                        collection, changed, last
                    )
                if is_final:
                    name_as_given(last, state.real_name, collection)
                    raise

                recovered_from(last, collection)

            yield Pause(CUT_OVER_PAUSE)

    def _state_for_retry(
        self, collection: str, used: CachedState, error: Exception, timeout: float | None
    ) -> Operation[CachedState | None]:
        """Return the state for another attempt; None if the error is not due to a change."""
        had_copy = used.dual_write is not None
        now = yield from self.read_again(collection, timeout)
        if now == used and had_copy and isinstance(error, MilvusException):
            # The name may be moving: Milvus Lite closes a collection before it renames it.
            yield Pause(CLOSING_SECONDS)
            now = yield from self.read_again(collection, timeout)

        # On a busy machine it stays closed longer than that.
        was_away = had_copy and (is_missing(error) or is_not_loaded(error))
        if now != used or was_away or self._met_another(collection, used, error):
            return now

        return None

    def corrected_since(
        self,
        collection: str,
        cached: CachedState,
        timeout: float | None,
        columns: Iterable[Any],
        names: Iterable[str],
    ) -> Operation[CachedState | None]:
        """Return the new state if an answer shows that the collection was corrected after this
        state of an uncorrected one was read; else None.

        columns, names: see `fits`.
        """
        if cached.states or cached.fits(columns, names):
            return None

        now = yield from self.read_again(collection, timeout)
        return now if now.states else None

    def _met_another(self, collection: str, cached: CachedState, error: Exception) -> bool:
        """Whether the server refused rows because the name has just moved to another collection.

        One part of the server may know this before another one does.
        """
        changed = self._changed.get(collection, -self.policy.cut_over_seconds)
        is_moving = (
            cached.dual_write is not None
            or time.monotonic() - changed < self.policy.cut_over_seconds
        )
        # pymilvus raises its own refusals as subclasses.
        is_of_server = type(error) is MilvusException
        return is_moving and is_of_server and bool(_OTHER_WIDTH.search(str(error)))

    # -- the collections that properties name ------------------------------------------------------

    def expect_sides(self, cached: CachedState, timeout: float | None) -> Operation[None]:
        """Raise StateError unless the side collections belong to this collection."""
        # Each once for a cached state, which is renewed after its TTL.
        for helper in cached.sides:
            if helper in cached.checked:
                continue

            try:
                described = yield Ask("describe_collection", (helper.collection, timeout))
            except MilvusException as error:
                if not is_missing(error):
                    raise

                continue  # The request that follows reports it.

            owner = cached.collection_id
            listed: frozenset[str] = frozenset()
            if not helper.is_derived_from(owner.name):
                listed = yield InStore(partial(_listed_helpers, owner))
            helper.require_owner(owner, described["properties"], listed)
            cached.checked.add(helper)

    def bodies_of(self, keys: Sequence[str]) -> Operation[list[str]]:
        bodies: list[str] = yield InStore(partial(bodies_of, keys))
        return bodies

    def load_bank(self, reference: BankReference) -> Operation[StoredBank]:
        bank: StoredBank = yield LoadBank(reference)
        return bank

    def text_of(self, error: Exception) -> str:
        return message_of(error)

    def exceeds_limit(self, error: Exception) -> bool:
        return exceeds_limit(error)

    def sent_in_parts(self, collection: str, error: Exception) -> None:
        recovered_from(error, collection, SENT_IN_PARTS)

    def copy_now(
        self,
        collection: str,
        cached: CachedState,
        dual_write: DualWrite,
        timeout: float | None,
    ) -> Operation[tuple[CachedState, DualWrite] | None]:
        now = yield from self.read_again(collection, timeout)
        have_ended = now in (NOTHING, replace(cached, dual_write=None))
        if have_ended:
            return None

        if now.dual_write is None:
            copy = yield from self.cached_state(dual_write.collection, timeout)
            if copy == NOTHING:
                # A rollback renamed the collections: the copy has the name now, and the ledger no
                # other one.
                dual_write = dual_write.model_copy(update={"collection": collection})

        return cached, dual_write

    def insertable(
        self, rows: Iterable[dict[str, Any]], description: dict[str, Any]
    ) -> Operation[list[dict[str, Any]]]:
        """Return rows of a query in the form that pymilvus inserts; see `insertable_rows`."""
        lite = is_lite((yield from self.server_version()))
        return milvus_schema.insertable_rows(rows, description, lite=lite)

    def server_version(self) -> Operation[str]:
        """Return the version of the server, which is read once."""
        if self._version is None:
            self._version = str((yield Ask("get_server_version")))
        return self._version

    def ensure_loaded(self, collection: str, timeout: float | None) -> Operation[None]:
        """Load a side collection or a bank, which the user may not have loaded."""
        if collection in self._loaded:
            return

        answer = yield Ask("get_load_state", (collection,))
        if answer["state"].name != "Loaded":
            yield Ask("load_collection", (collection, timeout))
        self._loaded.add(collection)

    def metric(
        self, collection: str, cached: CachedState, field: str, timeout: float | None
    ) -> Operation[str]:
        """Return the metric of a field's index, in capitals; it is as old as this state at most."""
        metric = cached.metrics.get(field)
        if metric is None:
            name = cached.real_name or collection
            names = yield Ask("list_indexes", (name, field))
            index = yield Ask("describe_index", (name, names[0], timeout))
            metric = cached.metrics[field] = str(index["metric_type"]).upper()
        return metric


def _described(description: Mapping[str, Any], collection: str, lifetime: Lifetime) -> CachedState:
    """Return the state that a description of the collection has."""
    properties = description.get("properties", {})
    key_field = next(
        str(entry["name"]) for entry in description["fields"] if entry.get("is_primary")
    )
    states = read_states(properties, collection)
    expect_side_collections(states.values(), collection)
    collection_id = id_in(description, collection)
    return CachedState(
        collection_id,
        states,
        key_field=key_field,
        dual_write=DualWrite.read(properties, collection),
        samplings=samplings_in(properties, collection),
        lifetime=lifetime,
        identity=collection_id.identity or identity_in(properties, collection),
        widths={
            str(entry["name"]): int(entry["params"]["dim"])
            for entry in description["fields"]
            if entry.get("type") in milvus_schema.DTYPES and "dim" in entry.get("params", {})
        },
    )


def _listed_helpers(owner: CollectionId, store: MilvusStore) -> frozenset[str]:
    return store.listed_helpers(owner)


def bodies_of(keys: Sequence[str], store: MilvusStore) -> list[str]:
    """Return these records of the ledger, as JSON; the key of a migration is its target."""
    records = [store.record(LEDGER, key) for key in keys]
    return [record.body for record in records if record is not None]
