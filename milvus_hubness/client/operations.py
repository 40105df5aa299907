"""What a client does on corrected collections, step by step. No I/O: see `steps`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pymilvus.exceptions import MilvusException

from milvus_hubness.client.beside import BesideRewrite, rewrite_of
from milvus_hubness.client.rewrite import Asked, Rewrite
from milvus_hubness.client.steps import Ask, Compute, LoadBank, Operation
from milvus_hubness.correction import Correction
from milvus_hubness.errors import CollectionNotFound, DimensionMismatch, EmptyBank, InvalidInput
from milvus_hubness.estimators import from_dict
from milvus_hubness.layout import Floats
from milvus_hubness.rerank import GloballyCorrected
from milvus_hubness.state import BIAS_FIELD, SIDE_FIELD, CollectionState, Profile, read_state
from milvus_hubness.stores.base import StoredBank
from milvus_hubness.stores.milvus_rpc import COLLECTION_NOT_FOUND, is_one_of, runs_function_chains

T = TypeVar("T")

KEYS_PER_REQUEST = 8_000

_PERHAPS_OUTDATED = (MilvusException, DimensionMismatch, EmptyBank, CollectionNotFound)
"""What a call on a collection raises whose state is no longer what is remembered of it."""


class Operations:
    """strength: w of every search that names none. state_ttl: seconds for which what a collection says of
    its biases is believed without asking again."""

    def __init__(self, strength: float | None, state_ttl: float) -> None:
        self._strength = strength
        self._state_ttl = state_ttl
        self._states: dict[str, tuple[float, CollectionState | None]] = {}
        self._banks: dict[str, tuple[Profile, StoredBank]] = {}
        self._corrections: dict[str, tuple[StoredBank, Correction]] = {}
        self._key_fields: dict[str, str] = {}
        self._chains: bool | None = None
        self._loaded: set[str] = set()

    # -- what is remembered ---------------------------------------------------------------------------

    def forget(self, collection: str | None = None) -> None:
        """Ask again what the collection, or every collection, says of its biases."""
        self._loaded.clear()
        for remembered in (self._states, self._key_fields):
            if collection is None:
                remembered.clear()
            else:
                remembered.pop(collection, None)

    def state(self, collection: str, timeout: float | None = None) -> Operation[CollectionState | None]:
        """The collection's state, asked for at most once in `state_ttl` seconds. A collection that is not
        there has none: the call that follows reports it in Milvus's own words."""
        known = self._states.get(collection)
        if known is not None and time.monotonic() < known[0]:
            return known[1]
        try:
            description = yield Ask("describe_collection", (collection, timeout))
        except MilvusException as error:
            if error.code == COLLECTION_NOT_FOUND:
                return None
            raise
        state = read_state(description.get("properties", {}))
        self._key_fields[collection] = _key_field(description)
        self._states[collection] = (time.monotonic() + self._state_ttl, state)
        return state

    def _key_field(self, collection: str) -> Operation[str]:
        known = self._key_fields.get(collection)
        return known or _key_field((yield Ask("describe_collection", (collection,))))

    def _as_it_is(
        self,
        collection: str,
        timeout: float | None,
        call: Callable[[CollectionState | None], Operation[T]],
    ) -> Operation[T]:
        """call(state), and once more where that fails and the collection turns out to have changed."""
        state = yield from self.state(collection, timeout)
        try:
            return (yield from call(state))
        except _PERHAPS_OUTDATED:
            self.forget(collection)
            now = yield from self.state(collection, timeout)
            if now == state:
                raise
        return (yield from call(now))

    def _rewrite(self, state: CollectionState) -> Operation[Rewrite]:
        if state.beside is None or state.beside.side:
            return rewrite_of(state)
        if self._chains is None:
            self._chains = runs_function_chains((yield Ask("get_server_version")))
        return rewrite_of(state, chains=self._chains)

    def _kept(self, state: CollectionState) -> Operation[StoredBank]:
        """The bank as it was when this profile was first seen."""
        known = self._banks.get(state.profile.bank.collection)
        if known is None or known[0] != state.profile:
            known = (state.profile, (yield LoadBank(state.profile.bank)))
            self._banks[state.profile.bank.collection] = known
        return known[1]

    def _biases(self, state: CollectionState, vectors: Floats) -> Operation[Floats]:
        kept = yield from self._kept(state)

        def compute() -> Floats:
            known = self._corrections.get(state.profile.bank.collection)
            if known is None or known[0] is not kept:
                correction = Correction.restore(
                    state.layout,
                    from_dict(state.profile.estimator),
                    kept.queries,
                    kept.potentials,
                    target_bank=kept.targets,
                    centre=state.profile.centre,
                )
                known = (kept, correction)
                self._corrections[state.profile.bank.collection] = known
            return known[1].centred(vectors)

        biases: Floats = yield Compute(compute)
        return biases

    # -- rows in --------------------------------------------------------------------------------------

    def write(
        self,
        method: str,
        collection: str,
        data: Any,
        timeout: float | None,
        partition_name: str | None,
        options: Mapping[str, Any],
    ) -> Operation[dict[str, Any]]:
        """insert or upsert, each row that brings a vector with its bias."""

        def call(state: CollectionState | None) -> Operation[dict[str, Any]]:
            rows = [data] if isinstance(data, dict) else data
            if state is None or not _bring_vectors(rows, state.field):
                as_given = (collection, data, timeout, partition_name)
                written: dict[str, Any] = yield Ask(method, as_given, dict(options))
                return written
            rewrite = rewrite_of(state)
            vectors = rewrite.vectors_of(rows)
            biases = yield from self._biases(state, vectors)
            stored = rewrite.rows_in(rows, vectors, biases, state.profile.epoch)
            done: dict[str, Any] = yield Ask(
                method, (collection, stored, timeout, partition_name), dict(options)
            )
            if isinstance(rewrite, BesideRewrite) and rewrite.side:
                key_field = yield from self._key_field(collection)
                keys = done.get("ids") or [row[key_field] for row in rows]
                beside = rewrite.side_rows(key_field, list(keys), biases, state.profile.epoch)
                yield Ask("upsert", (rewrite.side, beside, timeout))
            return done

        return self._as_it_is(collection, timeout, call)

    def delete(
        self,
        collection: str,
        ids: Any,
        timeout: float | None,
        filter: str | None,
        partition_name: str | None,
        options: Mapping[str, Any],
    ) -> Operation[dict[str, int]]:
        """delete; biases in a side collection go with the rows where these are named by key, and otherwise
        with the next refresh."""

        def call(state: CollectionState | None) -> Operation[dict[str, int]]:
            args = (collection, ids, timeout, filter, partition_name)
            done: dict[str, int] = yield Ask("delete", args, dict(options))
            side = state.beside.side if state and state.beside else None
            if side and ids:
                yield Ask("delete", (side, ids, timeout))
            return done

        return self._as_it_is(collection, timeout, call)

    # -- questions --------------------------------------------------------------------------------------

    def search(
        self,
        collection: str,
        data: Any,
        filter: str,
        limit: int,
        output_fields: list[str] | None,
        search_params: dict[str, Any] | None,
        options: Mapping[str, Any],
        *,
        ids: Any,
        strength: float | None,
        rerank: GloballyCorrected | None,
    ) -> Operation[Any]:
        """search, ranked by the corrected score where the field carries biases.

        options: the further arguments of MilvusClient.search, by name.
        """
        timeout = options.get("timeout")
        anns_field = options.get("anns_field")
        weight = self._strength if strength is None else strength

        def call(state: CollectionState | None) -> Operation[Any]:
            plainly = (collection, data, filter, limit)
            if state is None:
                return (
                    yield Ask("search", (*plainly, output_fields, search_params), {**options, "ids": ids})
                )
            rewrite = yield from self._rewrite(state)
            if not rewrite.is_about_corrected(anns_field):
                fields = rewrite.fields(output_fields)
                results = yield Ask(
                    "search", (*plainly, fields.requested, search_params), {**options, "ids": ids}
                )
                for hits in results:
                    rewrite.entities_out((hit["entity"] for hit in hits), fields)
                return results
            further = dict(options)
            queries = data if ids is None else (yield from self._vectors(collection, state, ids, timeout))
            gated = rerank is not None or rewrite.is_gated(weight)
            kept = (yield from self._kept(state)) if gated else None
            asked = rewrite.ask(
                queries,
                search_params,
                output_fields,
                strength=weight,
                limit=limit,
                offset=int(further.pop("offset", 0)),
                round_decimal=further.pop("round_decimal", -1),
                rerank=rerank,
                bank=kept.queries.vectors if kept else None,
                activated=kept.activated if kept else frozenset(),
            )
            return (yield from self._answered(collection, filter, asked, further))

        return self._as_it_is(collection, timeout, call)

    def _answered(
        self, collection: str, filter: str, asked: Asked, options: Mapping[str, Any]
    ) -> Operation[Any]:
        args = (collection, asked.data, filter, asked.limit, asked.output_fields, asked.search_params)
        offset = {"offset": asked.offset} if asked.offset else {}
        results = yield Ask("search", args, {**options, **asked.options, **offset})
        if asked.biases_of is None:
            return asked.answer(results)
        key_field = yield from self._key_field(collection)
        keys = list(dict.fromkeys(hit.id for hits in results for hit in hits))
        biases = yield from self._side_biases(asked.biases_of, key_field, keys, options.get("timeout"))
        return asked.answer(results, biases)

    def _side_biases(
        self, side: str, key_field: str, keys: Sequence[Any], timeout: float | None
    ) -> Operation[dict[Any, Sequence[float]]]:
        """The biases in every slot, by key."""
        yield from self._ensure_loaded(side, timeout)
        biases: dict[Any, Sequence[float]] = {}
        for start in range(0, len(keys), KEYS_PER_REQUEST):
            wanted = is_one_of(key_field, keys[start : start + KEYS_PER_REQUEST])
            rows = yield Ask("query", (side, wanted, [key_field, SIDE_FIELD], timeout))
            biases |= {row[key_field]: row[SIDE_FIELD] for row in rows}
        return biases

    def _ensure_loaded(self, side: str, timeout: float | None) -> Operation[None]:
        """Whoever loaded a collection need not have known of the one beside it."""
        if side not in self._loaded:
            if (yield Ask("get_load_state", (side,)))["state"].name != "Loaded":
                yield Ask("load_collection", (side, timeout))
            self._loaded.add(side)

    def _vectors(
        self, collection: str, state: CollectionState, ids: Any, timeout: float | None
    ) -> Operation[list[Any]]:
        """The rows' own vectors, to search with."""
        keys = ids if isinstance(ids, list) else [ids]
        rows = yield from self.get(collection, keys, [state.field], timeout, None, {})
        key_field = yield from self._key_field(collection)
        by_key = {row[key_field]: row[state.field] for row in rows}
        if missing := [key for key in keys if key not in by_key]:
            raise InvalidInput(f"no rows of these ids to search with: {missing}")
        return [by_key[key] for key in keys]

    def query(
        self,
        collection: str,
        filter: str,
        output_fields: list[str] | None,
        timeout: float | None,
        ids: Any,
        partition_names: list[str] | None,
        options: Mapping[str, Any],
    ) -> Operation[Any]:
        """query, its rows as the user knows them."""

        def ask(requested: list[str] | None) -> Ask:
            return Ask("query", (collection, filter, requested, timeout, ids, partition_names), dict(options))

        return self._read(collection, output_fields, timeout, ask)

    def get(
        self,
        collection: str,
        ids: Any,
        output_fields: list[str] | None,
        timeout: float | None,
        partition_names: list[str] | None,
        options: Mapping[str, Any],
    ) -> Operation[Any]:
        """get, its rows as the user knows them."""

        def ask(requested: list[str] | None) -> Ask:
            return Ask("get", (collection, ids, requested, timeout, partition_names), dict(options))

        return self._read(collection, output_fields, timeout, ask)

    def _read(
        self,
        collection: str,
        output_fields: list[str] | None,
        timeout: float | None,
        ask: Callable[[list[str] | None], Ask],
    ) -> Operation[Any]:
        def call(state: CollectionState | None) -> Operation[Any]:
            if state is None:
                rows = yield ask(output_fields)
                if not any(BIAS_FIELD in row for row in rows):
                    return rows
                # The stored form: the collection was corrected after it was last asked.
                self.forget(collection)
                now = yield from self.state(collection, timeout)
                return rows if now is None else (yield from call(now))
            rewrite = rewrite_of(state)
            fields = rewrite.fields(output_fields, default_all=True)
            rows = yield ask(fields.requested)
            rewrite.entities_out(rows, fields)
            return rows

        return self._as_it_is(collection, timeout, call)

    # -- descriptions -----------------------------------------------------------------------------------

    def describe_collection(
        self, collection: str, timeout: float | None, options: Mapping[str, Any]
    ) -> Operation[dict[str, Any]]:
        """The collection as the user made it."""
        description: dict[str, Any] = yield Ask("describe_collection", (collection, timeout), dict(options))
        state = read_state(description.get("properties", {}))
        return rewrite_of(state).description_out(description) if state else description

    def describe_index(
        self, collection: str, index_name: str, timeout: float | None, options: Mapping[str, Any]
    ) -> Operation[Any]:
        """The index with the user's metric."""
        index = yield Ask("describe_index", (collection, index_name, timeout), dict(options))
        state = yield from self.state(collection, timeout)
        return rewrite_of(state).index_out(index) if state else index


def _bring_vectors(rows: Any, field: str) -> bool:
    """Whether these are rows that all bring a vector of this field: others are for Milvus to judge."""
    return (
        isinstance(rows, list) and bool(rows) and all(isinstance(row, dict) and field in row for row in rows)
    )


def _key_field(description: Mapping[str, Any]) -> str:
    return next(str(field["name"]) for field in description["fields"] if field.get("is_primary"))
