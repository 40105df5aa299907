"""Reads and descriptions of collections, and operations on whole collections. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pymilvus.exceptions import MilvusException

from milvus_hubness.basics.logs import log
from milvus_hubness.clients.steps import Ask
from milvus_hubness.correction.state import PROPERTY, CollectionState, read_states
from milvus_hubness.errors import LeaseHeld, StateError, UnsupportedOperation
from milvus_hubness.jobs.store.helpers import complete_rename, expect_helpers, list_helpers
from milvus_hubness.jobs.store.ownership import (
    LEDGER,
    QUERY_SAMPLES_PROPERTY,
    SIDE_PROPERTY,
    CollectionId,
    Helper,
    side_helpers,
)
from milvus_hubness.jobs.store.records import (
    BANK_PROPERTY,
    DUAL_WRITE_PROPERTY,
    IDENTITY_PROPERTY,
    SAMPLINGS_PROPERTY,
    TUNING_PROPERTY,
    DualWrite,
    Samplings,
    is_fence,
)
from milvus_hubness.milvus.client.state_cache import CachedState, StateCache, bodies_of, id_in
from milvus_hubness.milvus.client.steps import InStore, Operation
from milvus_hubness.milvus.pymilvus_private import LOADED_FIELDS, unread_columns
from milvus_hubness.milvus.store.banks import LEDGER_PROPERTY
from milvus_hubness.milvus.store.server import is_missing

if TYPE_CHECKING:
    from milvus_hubness.milvus.store.milvus_store import MilvusStore


class Reads:
    """Reads and descriptions of a collection in the user's form."""

    def __init__(self, states: StateCache) -> None:
        self._states = states

    def read(self, request: Ask) -> Operation[Any]:
        """Run a `query` or a `get`; rows have the user's form.

        request: with output_fields and timeout among its options.
        """
        collection = request.args[0]
        timeout = request.options["timeout"]
        read = partial(self._read, collection, request)
        return self._states.retrying(collection, timeout, read)

    def _read(self, collection: str, request: Ask, cached: CachedState) -> Operation[Any]:
        name = cached.real_name or collection
        if not cached.states:
            rows = yield Ask(request.method, (name, *request.args[1:]), request.options)
            names = rows[0] if rows else ()
            columns = unread_columns(rows) or ()
            timeout = request.options["timeout"]
            now = yield from self._states.corrected_since(
                collection, cached, timeout, columns, names
            )
            if now is None:
                return rows

            cached = now
            name = cached.real_name

        output_fields = request.options["output_fields"]
        fields = cached.reading.fields(output_fields, default_all=True)
        options = {**request.options, "output_fields": fields.requested}
        rows = yield Ask(request.method, (name, *request.args[1:]), options)

        strict = bool(options.get("strict_float32"))
        cached.reading.rows_out(rows, fields, strict_float32=strict)
        return rows

    def hubness_state(
        self, collection: str, anns_field: str | None
    ) -> Operation[CollectionState | None]:
        cached = yield from self._states.read_again(collection)
        return cached.state_of(anns_field)

    def describe_collection(
        self, collection: str, timeout: float | None, options: Mapping[str, Any]
    ) -> Operation[dict[str, Any]]:
        description: dict[str, Any] = yield Ask(
            "describe_collection", (collection, timeout), dict(options)
        )
        states = read_states(description.get("properties", {}), collection)
        return description_out(states.values(), description)

    def describe_index(
        self, collection: str, index_name: str, timeout: float | None, options: Mapping[str, Any]
    ) -> Operation[Any]:
        index = yield Ask("describe_index", (collection, index_name, timeout), dict(options))
        cached = yield from self._states.cached_state(collection, timeout)
        return index_out(cached.states.values(), index)


HELPER_PROPERTIES = frozenset(
    {
        BANK_PROPERTY,
        SIDE_PROPERTY,
        LEDGER_PROPERTY,
        QUERY_SAMPLES_PROPERTY,
    }
)
"""The properties by which collections of this package are known."""


@dataclass(frozen=True)
class Belongings:
    """What belongs to a collection, which operations on the whole collection must take along."""

    owner: CollectionId
    """The collection by its real name, which a call may give as an alias."""
    states: tuple[CollectionState, ...] = ()
    """The states of its corrected fields, which name its banks."""
    dual_write: DualWrite | None = None
    """An existing copy that a migration lets its writes go to."""
    helpers: tuple[Helper, ...] = ()
    """Its side collections and collections of query samples."""

    @property
    def sides(self) -> tuple[str, ...]:
        """The names of its side collections."""
        return tuple(helper.collection for helper in self.helpers if helper.marker == SIDE_PROPERTY)

    def expect_no_other_writes(self) -> None:
        """Raises UnsupportedOperation during dual writes."""
        if self.dual_write:
            raise UnsupportedOperation(
                f"writes to {self.owner.name!r} are carried to {self.dual_write.collection!r} as "
                "well, which would miss this call: end the migration with "
                "`milvus-hubness migrate clean` first"
            )


class Catalog:
    """Operations on whole collections, with their refusals.

    `call` is always the user's own call, of pymilvus or of the proxy.
    """

    def __init__(self, states: StateCache) -> None:
        self._states = states

    def list_collections(
        self, args: tuple[Any, ...], options: Mapping[str, Any], include_internal: bool
    ) -> Operation[list[str]]:
        names: list[str] = yield Ask("list_collections", args, dict(options))
        if include_internal:
            return names

        shown: list[str] = yield InStore(partial(_without_helpers, names))
        return shown

    def list_aliases(self, call: Ask, include_internal: bool) -> Operation[Any]:
        answer = yield call
        if include_internal or not isinstance(answer, dict):
            return answer

        return {**answer, "aliases": aliases_out(answer["aliases"])}

    def drop_collection(
        self, collection: str, call: Ask, timeout: float | None = None
    ) -> Operation[Any]:
        """Drop a collection, then the helper collections that serve no other one."""
        belongings = yield from self._belongings(collection, timeout)
        belongings.expect_no_other_writes()
        yield InStore(lambda store: store.drop_fences(belongings.owner.name))
        outcome = yield call
        # After the collection: if its drop fails, it still has all that belongs to it.
        if belongings.states or belongings.helpers:
            yield InStore(partial(_drop_helpers, belongings))
        self._states.forget()
        return outcome

    def truncate_collection(
        self, collection: str, call: Ask, timeout: float | None = None
    ) -> Operation[Any]:
        """Truncate a collection and its side collections."""
        belongings = yield from self._belongings(collection, timeout)
        belongings.expect_no_other_writes()
        outcome = yield call
        for side in belongings.sides:
            yield Ask("truncate_collection", (side, timeout))
        return outcome

    def drop_partition(
        self, collection: str, call: Ask, timeout: float | None = None
    ) -> Operation[Any]:
        """Drop a partition.

        The next refresh removes the biases of its rows from a side collection.
        """
        belongings = yield from self._belongings(collection, timeout)
        belongings.expect_no_other_writes()
        return (yield call)

    def rename_collection(
        self,
        collection: str,
        new_name: str,
        database: str | None,
        call: Ask,
        timeout: float | None = None,
    ) -> Operation[Any]:
        """Rename a collection.

        Its helper collections keep their names, and the ledger lists them for the new name.
        """
        belongings = yield from self._belongings(collection, timeout)
        belongings.expect_no_other_writes()
        if database and belongings.states:
            raise UnsupportedOperation(
                f"collection {collection!r} is corrected and cannot move to database "
                f"{database!r}, which lacks its bank: copy the rows to a collection of that "
                "database and correct it"
            )

        if database and belongings.helpers:
            raise UnsupportedOperation(
                f"queries of collection {collection!r} are sampled, and it cannot move to database "
                f"{database!r} with its samples: run milvus-hubness bank sample {collection} --off first"
            )

        if not (belongings.states or belongings.helpers):
            return (yield from self._states.forgetting(call))

        renamed = CollectionId(name=new_name, identity=belongings.owner.identity)
        # The list comes first: a client that reads the new name finds its helpers at once.
        yield InStore(partial(_list_helpers, belongings, renamed))
        outcome = yield from self._states.forgetting(call)
        yield InStore(partial(complete_rename, former=belongings.owner.name, name=new_name))
        return outcome

    def restore_snapshot(
        self,
        source: str,
        target: str,
        database: str | None,
        call: Ask,
        timeout: float | None = None,
    ) -> Operation[Any]:
        """Restore a snapshot as a collection `target` that shares the bank of its source."""
        belongings = yield from self._belongings(source, timeout)
        if belongings.states and database:
            raise UnsupportedOperation(
                f"collection {source!r} is corrected and its snapshot cannot be restored in "
                f"database {database!r}, which lacks its bank: restore it in its own database"
            )

        if belongings.sides:
            raise UnsupportedOperation(
                f"a snapshot of {source!r} cannot be restored, as the copy would share the biases "
                f"in {belongings.sides[0]!r} with it: disable the correction first"
            )

        outcome = yield call
        if belongings.states:
            # Its number is not known before the server has restored it.
            yield InStore(partial(_list_banks, belongings, CollectionId(name=target)))
        return outcome

    def load(self, call: Ask, timeout: float | None) -> Operation[Any]:
        """Load a collection or partitions; the fields to load include the hidden ones."""
        options = dict(call.options)
        for name in set(LOADED_FIELDS) & set(options):
            options[name] = yield from self.fields_loaded(call.args[0], options[name], timeout)
        return (yield Ask(call.method, call.args, options))

    def fields_loaded(
        self, collection: str, names: Iterable[str], timeout: float | None = None
    ) -> Operation[list[str]]:
        """Return the names with those of their hidden fields."""
        cached = yield from self._states.cached_state(collection, timeout)
        loaded = list(names)
        hidden: list[str] = []
        for state in cached.states.values():
            if state.field in loaded:
                hidden += state.codec.hidden_fields
        return list(dict.fromkeys([*loaded, *hidden]))

    def _belongings(self, collection: str, timeout: float | None) -> Operation[Belongings]:
        """Read what belongs to a collection. Raises LeaseHeld while a job works on it.

        Nothing belongs to a missing collection, which the next call reports.
        """
        self._states.forget(collection)
        try:
            description = yield Ask("describe_collection", (collection, timeout))
        except MilvusException as error:
            if not is_missing(error):
                raise

            return Belongings(CollectionId(name=collection))

        owner = id_in(description, collection)
        properties = description.get("properties", {})
        yield InStore(partial(_expect_free, owner.name))

        states = tuple(read_states(properties, owner.name).values())
        sides = side_helpers(states)
        samplings = Samplings.read(properties, owner.name) or Samplings()
        samples = [sampling.helper for sampling in samplings.fields]
        helpers = yield InStore(partial(_own_helpers, [*sides, *samples], owner))

        dual_write = DualWrite.read(properties, owner.name)
        if dual_write and not (yield InStore(partial(_is_copied_to, owner, dual_write))):
            dual_write = None

        return Belongings(
            owner,
            states=states,
            dual_write=dual_write,
            helpers=helpers,
        )


def other_database(named: str | None, current: str) -> str:
    """Return the database that a call names, or "" if that is the current one.

    A call that names none is about the current one, and "" as the current one is "default".
    """
    is_current = not named or named == (current or "default")
    return "" if is_current else str(named)


def _is_copied_to(origin: CollectionId, dual_write: DualWrite, store: MilvusStore) -> bool:
    """Whether a migration lets writes go to an existing copy as well; a property alone does not."""
    copy = dual_write.collection
    if not store.exists(copy):
        return False

    try:
        dual_write.permits(origin, bodies_of((origin.name, copy), store))
    except StateError as error:
        log.warning("%s", error)
        return False
    return True


def _own_helpers(
    helpers: Iterable[Helper], owner: CollectionId, store: MilvusStore
) -> tuple[Helper, ...]:
    """Return those that belong to `owner`, and log each other one.

    Whatever is done to `owner` spares collections of others.
    """
    own = []
    for helper in helpers:
        try:
            expect_helpers(store, [helper], owner)
            own.append(helper)
        except StateError as error:
            log.warning("%s", error)
    return tuple(own)


def _expect_free(collection: str, store: MilvusStore) -> None:
    from milvus_hubness.jobs.common.lease import holder_of

    if holder := holder_of(store, collection):
        raise LeaseHeld(f"{holder}: wait until it ends, or stop it")


def _without_helpers(names: Sequence[str], store: MilvusStore) -> list[str]:
    """Return the names without those of this package's collections."""
    shown = []
    for name in names:
        # A description takes a request, and helper names have the form <collection>__bank.
        may_be_helper = name == LEDGER or "__" in name
        if not (may_be_helper and _is_helper(store, name)):
            shown.append(name)
    return shown


def _is_helper(store: MilvusStore, name: str) -> bool:
    """Whether this package created the collection.

    One that this user may not describe belongs to somebody else.
    """
    try:
        properties = store.client.describe_collection(name)["properties"]
    except MilvusException:
        return False
    return not HELPER_PROPERTIES.isdisjoint(properties)


def _drop_helpers(belongings: Belongings, store: MilvusStore) -> None:
    """Drop the helper collections of a dropped collection, except banks that others use."""
    from milvus_hubness.jobs.common.lease import forget_leases

    # Once more: another collection may have got the name since the call began.
    for helper in _own_helpers(belongings.helpers, belongings.owner, store):
        if store.exists(helper.collection):
            store.drop(helper.collection)

    banks = [bank for state in belongings.states for bank in state.banks]
    store.drop_bank_generations(banks)
    for name in {bank.collection for bank in banks}:
        if store.exists(name) and _is_helper(store, name) and not store.count(name):
            store.drop(name)

    store.forget_helpers(belongings.owner.name)
    forget_leases(store, belongings.owner.name, *belongings.sides)


def _list_helpers(belongings: Belongings, renamed: CollectionId, store: MilvusStore) -> None:
    if store.exists(renamed.name):
        return  # The server refuses the name.

    list_helpers(store, belongings.helpers, belongings.states, belongings.owner, renamed)


def _list_banks(belongings: Belongings, sharing: CollectionId, store: MilvusStore) -> None:
    list_helpers(store, [], belongings.states, belongings.owner, sharing)


_OURS = {
    PROPERTY,
    TUNING_PROPERTY,
    DUAL_WRITE_PROPERTY,
    SAMPLINGS_PROPERTY,
    IDENTITY_PROPERTY,
}


def is_ours(property: str) -> bool:
    """Whether this package uses the property of a collection."""
    return property in _OURS or property.startswith(f"{PROPERTY}.")


def description_out(
    states: Collection[CollectionState], description: dict[str, Any]
) -> dict[str, Any]:
    """Convert the result of describe_collection to the collection that the user created."""
    ours = {name for state in states for name in state.codec.hidden_fields}
    dims = {state.field: state.dim for state in states}

    fields = [entry for entry in description["fields"] if entry["name"] not in ours]
    for entry in fields:
        if entry["name"] in dims:
            entry["params"] = {**entry["params"], "dim": dims[entry["name"]]}

    properties = {
        name: value for name, value in description["properties"].items() if not is_ours(name)
    }
    shown = {**description, "fields": fields, "properties": properties}
    if "aliases" in description:
        shown["aliases"] = aliases_out(description["aliases"])
    return shown


def aliases_out(aliases: Iterable[str]) -> list[str]:
    """Return the aliases that the user created."""
    return [alias for alias in aliases if not is_fence(alias)]


def index_out(
    states: Collection[CollectionState], index: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Return the result of describe_index with the user's metric."""
    metrics = {state.field: state.metric for state in states}
    if index and index.get("field_name") in metrics:
        return {**index, "metric_type": metrics[index["field_name"]]}
    return index
