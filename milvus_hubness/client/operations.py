"""What a client does on corrected collections, step by step. No I/O: see `steps`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
from pymilvus import AnnSearchRequest
from pymilvus.exceptions import DataNotMatchException, ExceptionsMessage, MilvusException
from pymilvus.milvus_client.index import IndexParams

from milvus_hubness.client import born, hybrid
from milvus_hubness.client.arguments import expect_question
from milvus_hubness.client.bank_cache import BankCache
from milvus_hubness.client.beside import BesideRewrite, rewrite_of
from milvus_hubness.client.born import Hubness, NewCollection
from milvus_hubness.client.reading import Reading
from milvus_hubness.client.rewrite import Asked, Question, Rewrite
from milvus_hubness.client.steps import Ask, Compute, InStore, LoadBank, Operation
from milvus_hubness.errors import (
    BankTooLarge,
    CollectionNotFound,
    DimensionMismatch,
    EmptyBank,
    InvalidInput,
    InvalidParameter,
    StateError,
    UnsupportedOperation,
)
from milvus_hubness.estimators import from_dict
from milvus_hubness.estimators.base import FromNearest
from milvus_hubness.layout import Floats
from milvus_hubness.rerank import GloballyCorrected
from milvus_hubness.state import PENDING, SIDE_FIELD, BankReference, CollectionState, Profile, read_states
from milvus_hubness.stores.base import Made, StoredBank
from milvus_hubness.stores.milvus_banks import only_queries
from milvus_hubness.stores.milvus_rpc import COLLECTION_NOT_FOUND, is_one_of, runs_function_chains

T = TypeVar("T")

Bias = Literal["compute", "pending"]
"""Whether a new row gets its bias at once, or the mean one until the next refresh."""

KEYS_PER_REQUEST = 8_000
VECTORS_PER_REQUEST = 100

_PERHAPS_OUTDATED = (MilvusException, DimensionMismatch, EmptyBank, CollectionNotFound, StateError)
"""What a call on a collection raises whose state is no longer what is remembered of it."""


@dataclass(frozen=True)
class Known:
    """What a collection says of itself. states: of its corrected fields, by name."""

    key_field: str
    states: Mapping[str, CollectionState]

    @property
    def reading(self) -> Reading:
        """How its rows are read."""
        return Reading(tuple(self.states.values()))

    def searched(self, anns_field: str | None) -> CollectionState | None:
        """The state of the field that a search is on; the corrected one where none is named."""
        if anns_field:
            return self.states.get(anns_field)
        return next(iter(self.states.values())) if len(self.states) == 1 else None


NOTHING = Known("", {})


class Operations:
    """strength: w of every search that names none. state_ttl: seconds for which what a collection says of
    its biases is believed without asking again. bank_budget: bytes of banks to keep in memory."""

    def __init__(self, strength: float | None, state_ttl: float, bank_budget: int) -> None:
        self._strength = strength
        self._state_ttl = state_ttl
        self._known: dict[str, tuple[float, Known]] = {}
        self._banks = BankCache(bank_budget)
        self._metrics: dict[tuple[str, str], str] = {}
        self._chains: bool | None = None
        self._loaded: set[str] = set()
        self._forgotten = 0

    # -- what is remembered ---------------------------------------------------------------------------

    def forget(self, collection: str | None = None) -> None:
        """Ask again what the collection, or every collection, says of itself."""
        self._forgotten += 1
        self._loaded.clear()
        self._metrics.clear()
        if collection is None:
            self._known.clear()
        else:
            self._known.pop(collection, None)

    def known(self, collection: str, timeout: float | None = None) -> Operation[Known]:
        """What the collection says of itself, asked for at most once in `state_ttl` seconds. One that is not
        there says nothing: the call that follows reports it in Milvus's own words."""
        remembered = self._known.get(collection)
        if remembered is not None and time.monotonic() < remembered[0]:
            return remembered[1]
        forgotten = self._forgotten
        try:
            description = yield Ask("describe_collection", (collection, timeout))
        except MilvusException as error:
            if error.code == COLLECTION_NOT_FOUND:
                return NOTHING
            raise
        key_field = next(str(each["name"]) for each in description["fields"] if each.get("is_primary"))
        known = Known(key_field, read_states(description.get("properties", {})))
        if forgotten == self._forgotten:  # else another task or thread meanwhile made the answer wrong
            self._known[collection] = (time.monotonic() + self._state_ttl, known)
        return known

    def _as_it_is(
        self, collection: str, timeout: float | None, call: Callable[[Known], Operation[T]]
    ) -> Operation[T]:
        """call(known), and once more where that fails and the collection turns out to have changed."""
        known = yield from self.known(collection, timeout)
        try:
            return (yield from call(known))
        except _PERHAPS_OUTDATED:
            self.forget(collection)
            now = yield from self.known(collection, timeout)
            if now == known:
                raise
        return (yield from call(now))

    def _rewrite(self, known: Known, state: CollectionState) -> Operation[Rewrite]:
        in_fields = state.beside is not None and not state.beside.side
        if in_fields and self._chains is None:
            self._chains = runs_function_chains((yield Ask("get_server_version")))
        return rewrite_of(state, known.reading, chains=bool(self._chains))

    # -- banks and biases -------------------------------------------------------------------------------

    def _bank(self, collection: str, state: CollectionState, name: str) -> Operation[StoredBank]:
        """The bank of a profile as it was when that was first seen."""
        profile = state.profiles[name]
        bank = self._banks.bank((collection, state.field, name), profile)
        if bank is None:
            bank = yield LoadBank(profile.bank)
            self._banks.keep((collection, state.field, name), profile, bank)
        return bank

    def _biases(
        self, collection: str, state: CollectionState, vectors: Floats, bias: Bias, timeout: float | None
    ) -> Operation[dict[str, Floats]]:
        """(n,) biases of vectors (n, d) in every profile."""
        if bias not in ("compute", "pending"):
            raise InvalidParameter(f'bias must be "compute" or "pending", not {bias!r}')
        biases: dict[str, Floats] = {}
        for name, profile in state.profiles.items():
            if bias == "pending":
                biases[name] = np.zeros(len(vectors), np.float32)
            elif 4 * state.dim * profile.bank.count > self._banks.budget:
                biases[name] = yield from self._biases_by_search(state, profile, vectors, timeout)
            else:
                bank = yield from self._bank(collection, state, name)
                biases[name] = yield Compute(self._computing(collection, state, name, bank, vectors))
        return biases

    def _computing(
        self, collection: str, state: CollectionState, name: str, bank: StoredBank, vectors: Floats
    ) -> Callable[[], Floats]:
        def compute() -> Floats:
            of = (collection, state.field, name)
            return self._banks.correction(of, state, state.profiles[name], bank).centred(vectors)

        return compute

    def _biases_by_search(
        self, state: CollectionState, profile: Profile, vectors: Floats, timeout: float | None
    ) -> Operation[Floats]:
        """The same by the server's own search over the bank, which it keeps in an exact index."""
        estimator = from_dict(profile.estimator)
        if not isinstance(estimator, FromNearest):
            raise BankTooLarge(
                f"the bank {profile.bank.collection!r} of {profile.bank.count:,} queries is larger than "
                f"bank_budget, {self._banks.budget:,} bytes, and {profile.estimator['name']} needs all of "
                'it: give a larger budget, or write with bias="pending" and refresh'
            )
        k, share = estimator.nearest
        yield from self._ensure_loaded(profile.bank.collection, timeout)
        means: list[float] = []
        for start in range(0, len(vectors), VECTORS_PER_REQUEST):
            results = yield Ask(
                "search",
                (profile.bank.collection,),
                {
                    "data": list(vectors[start : start + VECTORS_PER_REQUEST]),
                    "filter": only_queries(profile.bank),
                    "limit": k,
                    "anns_field": "vector",
                    "timeout": timeout,
                },
            )
            means += [float(np.mean([hit["distance"] for hit in hits])) for hits in results]
        scores = np.array(means) * (-0.5 if state.metric == "L2" else 1.0)
        return (share * scores - profile.centre).astype(np.float32)

    # -- rows in --------------------------------------------------------------------------------------

    def write(
        self,
        method: str,
        collection: str,
        data: Any,
        timeout: float | None,
        partition_name: str | None,
        bias: Bias,
        options: Mapping[str, Any],
    ) -> Operation[dict[str, Any]]:
        """insert or upsert, each row that brings a vector with its bias."""

        def call(known: Known) -> Operation[dict[str, Any]]:
            rows = [data] if isinstance(data, dict) else data
            stored = data
            beside: list[tuple[BesideRewrite, dict[str, Floats], int]] = []
            for state in known.states.values():
                if not _bring_vectors(rows, state.field):
                    continue
                rewrite = rewrite_of(state, known.reading)
                vectors = rewrite.vectors_of(rows)
                biases = yield from self._biases(collection, state, vectors, bias, timeout)
                epoch = PENDING if bias == "pending" else state.profile.epoch
                stored = rewrite.rows_in(rows if stored is data else stored, vectors, biases, epoch)
                if isinstance(rewrite, BesideRewrite) and rewrite.side and bias == "compute":
                    beside.append((rewrite, biases, epoch))
            written: dict[str, Any] = yield Ask(
                method, (collection, stored, timeout, partition_name), dict(options)
            )
            for rewrite, biases, epoch in beside:
                keys = written.get("ids") or [row[known.key_field] for row in rows]
                lines = rewrite.side_rows(known.key_field, list(keys), biases, epoch)
                yield Ask("upsert", (rewrite.side, lines, timeout))
            return written

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

        def call(known: Known) -> Operation[dict[str, int]]:
            args = (collection, ids, timeout, filter, partition_name)
            done: dict[str, int] = yield Ask("delete", args, dict(options))
            for state in known.states.values():
                if ids and state.beside and state.beside.side:
                    yield Ask("delete", (state.beside.side, ids, timeout))
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
        search_params: Mapping[str, Any] | None,
        options: Mapping[str, Any],
        *,
        ids: Any = None,
        strength: float | None = None,
        profile: str | None = None,
        rerank: GloballyCorrected | None = None,
        with_raw_score: bool = False,
    ) -> Operation[Any]:
        """search, ranked by the corrected score where the field carries biases.

        options: the further arguments of MilvusClient.search, by name.
        """
        timeout = options.get("timeout")

        def call(known: Known) -> Operation[Any]:
            state = known.searched(options.get("anns_field"))
            if state is None:
                fields = known.reading.fields(output_fields)
                args = (collection, data, filter, limit, fields.requested, search_params)
                results = yield Ask("search", args, {**options, "ids": ids})
                return known.reading.hits_out(results, fields) if known.states else results
            expect_question(data, ids, output_fields, search_params, options)
            rewrite = yield from self._rewrite(known, state)
            further, params = naming(state, options), dict(search_params or {})
            offset = further.pop("offset", None) or params.pop("offset", None) or 0
            queries = data
            if ids is not None:
                queries = yield from self._vectors(collection, known, state, ids, options)
            question = Question(
                data=queries,
                limit=limit,
                offset=offset,
                search_params=params,
                output_fields=output_fields,
                round_decimal=further.pop("round_decimal", -1),
                strength=self._strength if strength is None else strength,
                profile=profile,
                rerank=rerank,
                with_raw_score=with_raw_score,
            )
            if state.beside is not None and rewrite.strength(question) != 0:
                _refuse_chains(further)
            if rerank is not None or rewrite.is_gated(question):
                bank = yield from self._bank(collection, state, profile or state.active)
                question = replace(question, bank=bank.queries.vectors, activated=bank.activated)
            first, *others = rewrite.apart(question)
            results = yield from self._answered(collection, known, filter, rewrite.ask(first), further)
            for other in others:
                results += yield from self._answered(collection, known, filter, rewrite.ask(other), further)
            return results

        return self._as_it_is(collection, timeout, call)

    def _answered(
        self, collection: str, known: Known, filter: str, asked: Asked, options: Mapping[str, Any]
    ) -> Operation[Any]:
        args = (collection, asked.data, filter, asked.limit, asked.output_fields, asked.search_params)
        offset = {"offset": asked.offset} if asked.offset else {}
        results = yield Ask("search", args, {**options, **asked.options, **offset})
        if asked.biases_of is None:
            return asked.answer(results)
        keys = list(dict.fromkeys(hit.id for hits in results for hit in hits))
        biases = yield from self._side_biases(asked.biases_of, known.key_field, keys, options)
        return asked.answer(results, biases)

    def _side_biases(
        self, side: str, key_field: str, keys: Sequence[Any], options: Mapping[str, Any]
    ) -> Operation[dict[Any, Sequence[float]]]:
        """The biases in every slot, by key, as consistent as the search was. options: of the search."""
        timeout, level = options.get("timeout"), options.get("consistency_level")
        yield from self._ensure_loaded(side, timeout)
        biases: dict[Any, Sequence[float]] = {}
        for start in range(0, len(keys), KEYS_PER_REQUEST):
            wanted = is_one_of(key_field, keys[start : start + KEYS_PER_REQUEST])
            as_before = {"consistency_level": level} if level is not None else {}
            rows = yield Ask("query", (side, wanted, [key_field, SIDE_FIELD], timeout), as_before)
            biases |= {row[key_field]: row[SIDE_FIELD] for row in rows}
        return biases

    def _ensure_loaded(self, collection: str, timeout: float | None) -> Operation[None]:
        """Whoever loaded a collection need not have known of the one beside it, or of its bank."""
        if collection not in self._loaded:
            if (yield Ask("get_load_state", (collection,)))["state"].name != "Loaded":
                yield Ask("load_collection", (collection, timeout))
            self._loaded.add(collection)

    def _vectors(
        self, collection: str, known: Known, state: CollectionState, ids: Any, options: Mapping[str, Any]
    ) -> Operation[list[Any]]:
        """The rows' own vectors, to search with."""
        keys = ids if isinstance(ids, list) else [ids]
        wanted, timeout = is_one_of(known.key_field, keys), options.get("timeout")
        level = {name: options[name] for name in ("consistency_level",) if name in options}
        rows = yield from self.query(collection, wanted, [state.field], timeout, None, None, level)
        by_key = {row[known.key_field]: row[state.field] for row in rows}
        if missing := [key for key in keys if key not in by_key]:
            raise InvalidInput(f"no rows of these ids to search with: {missing}")
        return [by_key[key] for key in keys]

    def hybrid_search(
        self,
        collection: str,
        requests: Sequence[AnnSearchRequest],
        ranker: Any,
        limit: int,
        output_fields: list[str] | None,
        options: Mapping[str, Any],
        *,
        strength: float | None = None,
        profile: str | None = None,
    ) -> Operation[Any]:
        """hybrid_search, each request on a corrected field ranked by the corrected score.

        options: the further arguments of MilvusClient.hybrid_search, by name. Raises UnsupportedOperation
        where an answer must be merged here and cannot be.
        """
        weight = self._strength if strength is None else strength

        def call(known: Known) -> Operation[Any]:
            asked: list[tuple[Rewrite, Question] | None] = []
            for request in requests:
                state = known.searched(request.anns_field)
                if state is None:
                    asked.append(None)
                    continue
                named = profile if profile in state.profiles else None
                question = Question(
                    request.data,
                    request.limit,
                    search_params=request.param,
                    strength=weight,
                    profile=named,
                )
                asked.append(((yield from self._rewrite(known, state)), question))
            told = hybrid.Ranker.of(ranker)
            if hybrid.must_merge(told, [each for each in asked if each]):
                return (
                    yield from self._merged(
                        collection, requests, told, limit, output_fields, options, weight, profile, known
                    )
                )
            sent = [
                hybrid.rewritten(request, *each) if each else request
                for request, each in zip(requests, asked, strict=True)
            ]
            fields = known.reading.fields(output_fields)
            args = (collection, sent, ranker, limit, fields.requested)
            results = yield Ask("hybrid_search", args, dict(options))
            return known.reading.hits_out(results, fields)

        return self._as_it_is(collection, options.get("timeout"), call)

    def _merged(
        self,
        collection: str,
        requests: Sequence[AnnSearchRequest],
        ranker: hybrid.Ranker,
        limit: int,
        output_fields: list[str] | None,
        options: Mapping[str, Any],
        strength: float | None,
        profile: str | None,
        known: Known,
    ) -> Operation[Any]:
        """A search for each request, and their answers merged."""
        if options.get("group_by_field"):
            raise UnsupportedOperation(
                "grouping a hybrid search whose answers are merged by the client: fields of metric COSINE or "
                "L2 with a weighted ranker, gates, and biases beside vectors are; use RRFRanker on others"
            )
        shared = {
            name: value
            for name, value in options.items()
            if name not in ("offset", "round_decimal", "timezone")
        }
        answers, metrics = [], []
        for request in requests:
            state = known.searched(request.anns_field)
            further = {**shared, "anns_field": request.anns_field}
            if request.expr_params:
                further["filter_params"] = request.expr_params
            answers.append(
                (
                    yield from self.search(
                        collection,
                        request.data,
                        request.expr or "",
                        request.limit,
                        output_fields,
                        request.param,
                        further,
                        strength=strength,
                        profile=profile if state and profile in state.profiles else None,
                    )
                )
            )
            metrics.append(state.metric if state else (yield from self._metric(collection, request, options)))
        offset = int(options.get("offset") or 0)
        page = slice(offset, offset + limit)
        return hybrid.merge(answers, metrics, ranker, page, options.get("round_decimal", -1))

    def _metric(
        self, collection: str, request: AnnSearchRequest, options: Mapping[str, Any]
    ) -> Operation[str]:
        """What the request says, else what the index of its field does."""
        if told := (request.param or {}).get("metric_type"):
            return str(told).upper()
        of = (collection, request.anns_field)
        if of not in self._metrics:
            names = yield Ask("list_indexes", (collection, request.anns_field))
            index = yield Ask("describe_index", (collection, names[0], options.get("timeout")))
            self._metrics[of] = str(index["metric_type"]).upper()
        return self._metrics[of]

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
        def call(known: Known) -> Operation[Any]:
            if not known.states:
                rows = yield ask(output_fields)
                if not any(name.startswith("hubness_epoch") for row in rows[:1] for name in row):
                    return rows
                # The stored form: the collection was corrected after it was last asked.
                self.forget(collection)
                now = yield from self.known(collection, timeout)
                return (yield from call(now)) if now.states else rows
            fields = known.reading.fields(output_fields, default_all=True)
            rows = yield ask(fields.requested)
            known.reading.rows_out(rows, fields)
            return rows

        return self._as_it_is(collection, timeout, call)

    # -- collections and indexes --------------------------------------------------------------------------

    def create_collection(
        self,
        collection: str,
        new: NewCollection,
        hubness: Hubness | Sequence[Hubness] | None,
        timeout: float | None,
        options: Mapping[str, Any],
    ) -> Operation[None]:
        """create_collection, with banks and states for the fields that `hubness` names."""
        self.forget()
        if hubness is None:
            yield Ask("create_collection", (collection,), {**new.as_given(), "timeout": timeout, **options})
            return
        further = dict(options)
        schema, index = new.in_full(further)
        made = born.planned(collection, hubness, schema, index)
        saved: list[tuple[BankReference, Made]] = []
        created = False
        try:
            for each in made:
                saved.append((yield InStore(each.save_bank)))
            states = {
                each.name: each.state(collection, reference)
                for each, (reference, _) in zip(made, saved, strict=True)
            }
            properties = {state.property_name: state.to_json() for state in states.values()}
            further["properties"] = {**(further.get("properties") or {}), **properties}
            stored = born.stored_schema(schema, states.values())
            yield Ask("create_collection", (collection,), {"schema": stored, "timeout": timeout, **further})
            created = True
            yield Ask("create_index", (collection, born.served_indexes(index, states), timeout))
            yield Ask("load_collection", (collection, timeout))
        except Exception:
            if created:
                yield Ask("drop_collection", (collection, timeout))
            for reference, kind in saved:
                yield InStore(born.undoing(reference, kind))
            raise

    def create_index(
        self, collection: str, index: IndexParams, timeout: float | None, options: Mapping[str, Any]
    ) -> Operation[None]:
        """create_index, on corrected fields for the metric that serves them."""
        known = yield from self.known(collection, timeout)
        served = born.served_indexes(index, known.states) if known.states else index
        yield Ask("create_index", (collection, served, timeout), dict(options))

    # -- descriptions -----------------------------------------------------------------------------------

    def describe_collection(
        self, collection: str, timeout: float | None, options: Mapping[str, Any]
    ) -> Operation[dict[str, Any]]:
        """The collection as the user made it."""
        description: dict[str, Any] = yield Ask("describe_collection", (collection, timeout), dict(options))
        states = read_states(description.get("properties", {}))
        return Reading(tuple(states.values())).description_out(description) if states else description

    def describe_index(
        self, collection: str, index_name: str, timeout: float | None, options: Mapping[str, Any]
    ) -> Operation[Any]:
        """The index with the user's metric."""
        index = yield Ask("describe_index", (collection, index_name, timeout), dict(options))
        known = yield from self.known(collection, timeout)
        return known.reading.index_out(index)


def naming(state: CollectionState, options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a search on this field, which they name where its vectors are halves: from the name
    pymilvus learns what the bytes of queries are."""
    return {**options, "anns_field": state.field} if state.dtype != "float32" else dict(options)


def _bring_vectors(rows: Any, field: str) -> bool:
    """Whether these are rows that bring a vector of this field: what is none is for Milvus to judge.

    Raises DataNotMatchException, as pymilvus does, where only some do.
    """
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return False
    bring = [field in row for row in rows]
    if any(bring) and not all(bring):
        raise DataNotMatchException(message=ExceptionsMessage.InsertMissedField % field)
    return any(bring)


def _refuse_chains(options: Mapping[str, Any]) -> None:
    """Raises UnsupportedOperation: what the server does to scores would come before they are corrected."""
    for name in ("function_chains", "ranker"):
        if options.get(name) is not None:
            raise UnsupportedOperation(
                f"{name} would see uncorrected scores where biases lie beside the vectors: search with "
                "strength=0, or migrate the collection"
            )
