"""`search` and `hybrid_search`, without I/O."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Protocol

import numpy as np
from pymilvus import AnnSearchRequest, DataType
from pymilvus.exceptions import ParamError

from milvus_hubness.clients.steps import Ask, Compute
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.codec.arrays import without_tensors
from milvus_hubness.correction.codec.base import EPOCH_FIELD
from milvus_hubness.correction.codec.beside import SIDE_FIELD
from milvus_hubness.correction.overrides import NONE, Overrides
from milvus_hubness.correction.rerank import Adaptive, GloballyCorrected
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.errors import InvalidInput, UnsupportedOperation
from milvus_hubness.milvus.client import ranking
from milvus_hubness.milvus.client.biases import Biases
from milvus_hubness.milvus.client.candidates import rewrite_of
from milvus_hubness.milvus.client.catalog import Reads
from milvus_hubness.milvus.client.held_errors import recovered_from
from milvus_hubness.milvus.client.messages import (
    CHECKED_EACH_TIME,
    GROUPED,
    ITERATED,
    ORDERED,
    AnsweredSearch,
    HybridQuestion,
    Question,
    SearchRequest,
    checked_decimals,
    expect_limit,
    expect_question,
    expect_reranker,
    expect_whole_hits,
    first_set,
    offset_in,
    page_of,
)
from milvus_hubness.milvus.client.parts import REFUSALS, SENT_IN_PARTS, in_two
from milvus_hubness.milvus.client.rewrite import Asking, Rewrite
from milvus_hubness.milvus.client.side_memory import SideBiases
from milvus_hubness.milvus.client.state_cache import (
    PERHAPS_OUTDATED,
    CachedState,
    StateCache,
)
from milvus_hubness.milvus.client.steps import Operation
from milvus_hubness.milvus.filters import is_one_of
from milvus_hubness.milvus.store.server import exceeds_limit

KEYS_PER_REQUEST = 8_000
"""Keys in the filter of one request to a side collection."""
MAX_PREPARED = 256
"""Prepared searches of a collection state; further ones are built for each call."""
TEXTS = frozenset([str])
NAMES = frozenset([str, type(None)])
VECTORS = frozenset([list, np.ndarray])
NUMBERS = frozenset([float, int, type(None)])
"""Types of names, of vectors and of settings; those of other types are looked at closely."""
UNUSUAL = frozenset([*CHECKED_EACH_TIME, "offset", "round_decimal"])
"""Arguments with which no search is prepared."""
NEED_SERVER_RANKS = frozenset([*ORDERED, *GROUPED, *ITERATED]) - UNUSUAL
"""Arguments that are refused where the client ranks the hits, and elsewhere belong to the pattern."""
SPECIAL = UNUSUAL | NEED_SERVER_RANKS
"""Arguments that few searches have."""
Pattern = tuple[Any, ...]
"""What stays the same when only the data, the filter, the timeout and the like differ."""
_Part = tuple[AnnSearchRequest, Question, Rewrite | None]
"""A request of a hybrid search, its question, and the rewrite if its field is corrected."""


class SearchListener(Protocol):
    """Learns of answered searches."""

    def listens_to(self, cached: CachedState) -> bool:
        """Whether it needs to learn of searches by this collection state."""

    def searched(self, cached: CachedState, answered: Callable[[], AnsweredSearch]) -> None:
        """Learn of a search by this collection state.

        answered: returns what was searched, if the listener needs it. Raises nothing.
        """


@dataclass(frozen=True)
class PreparedSearch:
    """A search that one request answers, whatever its data."""

    state: CollectionState
    """The state of the searched field."""
    ask: Asking
    """Builds the request for any data."""
    field: Mapping[str, Any]
    """The arguments of the request that name the field."""
    listener: SearchListener | None
    """None where nobody needs to learn of such searches."""


class Searches:
    """`search` and `hybrid_search`.

    overrides: settings of searches that name none. listener: None for searches of which nobody is to
    know. Raises InvalidParameter for invalid settings.
    """

    def __init__(
        self,
        states: StateCache,
        biases: Biases,
        reads: Reads,
        overrides: Overrides,
        listener: SearchListener | None,
    ) -> None:
        self.overrides = overrides.checked()
        self._states = states
        self._biases = biases
        self._reads = reads
        self._listener = listener

    def search(
        self,
        collection: str,
        question: Question,
        filter: str,
        options: Mapping[str, Any],
        *,
        ids: Any = None,
    ) -> Operation[Any]:
        """Search by the corrected score.

        options: of MilvusClient.search, by name. ids: of rows to search with.
        If the request exceeds a limit of the server, because it is larger than the user's, its
        queries are sent in parts.
        """
        timeout = options.get("timeout")
        data: Any = question.data
        pattern = pattern_of(question, options) if ids is None else None
        used = self._states.remembered(collection)
        prepared = None if used is None or pattern is None else used.prepared.get(pattern)
        failed: tuple[CachedState, Exception] | None = None
        try:
            # Most searches end in this block. It calls little, as code that the wait for the server has
            # pushed out of the processor's caches takes several times as long.
            if used is not None and prepared is not None:
                try:
                    search_request = prepared.ask(data)
                    request = _request(
                        used.real_name, prepared.field, filter, search_request, options
                    )
                    results = yield request
                    if search_request.biases_of or search_request.works:
                        answer = yield from self._completed(used, search_request, request, results)
                    else:
                        answer = search_request.answer(results)
                except PERHAPS_OUTDATED as error:
                    failed = used, error
                else:
                    if time.monotonic() <= used.lifetime.serves_until:
                        if prepared.listener is not None:
                            field = prepared.state.field
                            prepared.listener.searched(used, partial(AnsweredSearch, field, data))
                        return answer

            whole = replace(question, filter=filter, ids=ids)
            call = partial(self._search, collection, whole, options, pattern)
            answer, _ = yield from self._states.used(collection, timeout, call, failed=failed)
            return answer
        except REFUSALS as error:
            if ids is not None or not can_be_halved(data) or not exceeds_limit(error):
                raise

            cached = yield from self._states.cached_state(collection, timeout)
            if cached.state_of(options.get("anns_field")) is None:
                raise

            recovered_from(error, collection, SENT_IN_PARTS)

        joined: Any = None
        for part in in_two(data):
            answer = yield from self.search(
                collection, replace(question, data=part), filter, options
            )
            joined = answer if joined is None else _joined(joined, answer)

        return joined

    def _search(
        self,
        collection: str,
        question: Question,
        options: Mapping[str, Any],
        pattern: Pattern | None,
        cached: CachedState,
    ) -> Operation[Any]:
        """Search by this state in as many steps as needed; prepare this pattern if one request answers
        it.
        """
        expect_reranker(question.rerank, question.candidates)
        expect_whole_hits(question.output_fields, cached.states, options)
        state = cached.state_of(options.get("anns_field"))
        if state is None:
            return (yield from self._uncorrected(collection, cached, question, options))

        question = replace(question, data=without_tensors(question.data))
        expect_question(
            question.data, question.ids, question.output_fields, question.search_params, options
        )
        expect_limit(question.limit)
        rewrite = rewrite_of(state, cached.reading)

        question, further = self._with_options(question, options)
        if question.ids is not None:
            vectors = yield from self.vectors(collection, cached, state, question.ids, options)
            question = replace(question, data=vectors)
        rewrite.expect_answerable(question, further)

        if further.get("search_aggregation") is not None:
            # Hits are inside buckets: the server rounds their scores.
            further["round_decimal"] = question.round_decimal
            question = replace(question, round_decimal=-1)
        if isinstance(question.rerank, GloballyCorrected) or rewrite.is_gated(question):
            bank = yield from self._biases.bank(collection, state, rewrite.profile(question))
            question = replace(question, bank=bank.queries.vectors, activated=bank.activated)

        results: Any = None
        parts = rewrite.apart(question)
        for part in parts:
            how = part.rerank
            search_request = (
                rewrite.ask(part) if how is None else ranking.reranked(rewrite, part, how)
            )
            name = cached.real_name or collection
            request = _request(
                name, field_arguments(state), question.filter, search_request, further
            )
            found = yield request
            answer = yield from self._completed(cached, search_request, request, found)
            results = answer if results is None else _joined(results, answer)

        if pattern is not None and len(parts) == 1:
            self._prepare(cached, pattern, rewrite, question)
        # Queries by ids are items of the gallery, not queries of users.
        if question.ids is None:
            self.notify(cached, partial(AnsweredSearch, state.field, question.data))
        return results

    def _uncorrected(
        self,
        collection: str,
        cached: CachedState,
        question: Question,
        options: Mapping[str, Any],
    ) -> Operation[Any]:
        if isinstance(question.rerank, Adaptive):
            raise UnsupportedOperation(
                f"{type(question.rerank).__name__} needs a corrected field: migrate or enable it "
                "first"
            )

        fields = cached.reading.fields(question.output_fields)
        args = (
            cached.real_name or collection,
            question.data,
            question.filter,
            question.limit,
            fields.requested,
            question.search_params,
        )
        results = yield Ask("search", args, {**options, "ids": question.ids})
        if now := (yield from self._corrected_since(collection, cached, results, options)):
            return (yield from self._search(collection, question, options, None, now))

        if question.ids is None:
            self.notify(cached, partial(AnsweredSearch, options.get("anns_field"), question.data))
        return cached.reading.hits_out(results, fields) if cached.states else results

    def _corrected_since(
        self, collection: str, cached: CachedState, results: Any, options: Mapping[str, Any]
    ) -> Operation[CachedState | None]:
        """Return the new state if these results are not of the uncorrected collection of `cached`."""
        # pymilvus answers later if it is to work in the background.
        hits = next(filter(None, results), None) if isinstance(results, list) else None
        if hits is None:
            return None

        columns = getattr(hits, "lazy_field_data", ())
        names = list.__getitem__(hits, 0)["entity"]
        return (
            yield from self._states.corrected_since(
                collection, cached, options.get("timeout"), columns, names
            )
        )

    def _prepare(
        self, cached: CachedState, pattern: Pattern, rewrite: Rewrite, question: Question
    ) -> None:
        """Prepare searches of this pattern, which one request answers, for as long as the state holds."""
        if len(cached.prepared) >= MAX_PREPARED:
            return

        # A copy, as the caller may change its lists and dictionaries.
        copied = copy.deepcopy(replace(question, data=()))
        if ask := rewrite.asking(copied):
            state = rewrite.state
            listener = self._listener
            if listener is not None and not listener.listens_to(cached):
                listener = None
            cached.prepared[pattern] = PreparedSearch(state, ask, field_arguments(state), listener)

    def notify(self, cached: CachedState, answered: Callable[[], AnsweredSearch]) -> None:
        """Let the listener know of an answered search."""
        if self._listener is not None:
            self._listener.searched(cached, answered)

    def _with_options(
        self, question: Question, options: Mapping[str, Any]
    ) -> tuple[Question, dict[str, Any]]:
        """Return the question with its offset, its rounding and w, and the other options."""
        further = dict(options)
        params = dict(question.search_params or {})
        whole = replace(
            question,
            offset=further.pop("offset", None) or params.pop("offset", None) or 0,
            search_params=params,
            round_decimal=further.pop("round_decimal", -1),
            overrides=question.overrides.over(self.overrides),
        )
        return whole, further

    def _completed(
        self, cached: CachedState, search_request: SearchRequest, request: Ask, results: Any
    ) -> Operation[Any]:
        """Convert the results of a request, with biases from a side collection if needed."""
        arguments = [results]
        if of := search_request.biases_of:
            keys = dict.fromkeys(chain.from_iterable(hits.ids for hits in results))
            arguments.append((yield from self.side_biases(cached, of, keys, request.options)))
        if search_request.works:
            return (yield Compute(lambda: search_request.answer(*arguments)))
        return search_request.answer(*arguments)

    def side_biases(
        self, cached: CachedState, of: SideBiases, keys: Iterable[Key], options: Mapping[str, Any]
    ) -> Operation[dict[Key, float]]:
        """Return biases by key, from memory as far as they were read before.

        options: of the search, whose consistency level applies to those that are read. Raises
        StateError if the side collection belongs to another collection.
        """
        ask = partial(self._read_side, cached, of, options)
        return self._states.side_memory.read(of, keys, ask)

    def _read_side(
        self,
        cached: CachedState,
        of: SideBiases,
        options: Mapping[str, Any],
        keys: Sequence[Key],
    ) -> Operation[dict[Key, float]]:
        side = of.collection
        timeout = options.get("timeout")
        key_field = cached.key_field
        yield from self._states.expect_sides(cached, timeout)
        yield from self._states.ensure_loaded(side, timeout)
        biases: dict[Key, float] = {}
        for start in range(0, len(keys), KEYS_PER_REQUEST):
            where = is_one_of(key_field, keys[start : start + KEYS_PER_REQUEST])
            fields = [key_field, SIDE_FIELD, EPOCH_FIELD]
            rows = yield Ask("query", (side, where, fields, timeout), _routing(options))
            found = ((row[key_field], of.bias_in(row)) for row in rows)
            biases |= {key: bias for key, bias in found if bias is not None}

        return biases

    def vectors(
        self,
        collection: str,
        cached: CachedState,
        state: CollectionState,
        ids: Any,
        options: Mapping[str, Any],
    ) -> Operation[list[Any]]:
        """Return the vectors of the rows with these ids.

        Raises InvalidInput if one is missing, and ParamError for what is no id, as pymilvus does.
        """
        keys = [_as_key(id) for id in (ids if isinstance(ids, list) else [ids])]
        further = {
            "output_fields": [state.field],
            "timeout": options.get("timeout"),
            **_routing(options),
        }
        where = is_one_of(cached.key_field, keys)
        rows = yield from self._reads.read(Ask("query", (collection, where), further))
        by_key = {row[cached.key_field]: row[state.field] for row in rows}
        if missing := [key for key in keys if key not in by_key]:
            raise InvalidInput(f"no rows of these ids to search with: {missing}")

        return [by_key[key] for key in keys]

    def hybrid_search(
        self, collection: str, question: HybridQuestion, options: Mapping[str, Any]
    ) -> Operation[Any]:
        """Hybrid search, with corrected scores for each request on a corrected field.

        options: of MilvusClient.hybrid_search, by name. Raises InvalidInput if no corrected field has
        the profile, and UnsupportedOperation if it cannot merge answers.
        """
        timeout = options.get("timeout")
        requests = question.requests
        if not _are_requests(requests):
            # pymilvus refuses them.
            args = (collection, requests, question.ranker, question.limit, question.output_fields)
            return (yield Ask("hybrid_search", args, dict(options)))

        call = partial(self._hybrid_search_on, collection, question, options)
        try:
            return (yield from self._states.retrying(collection, timeout, call))
        except REFUSALS as error:
            can_be_divided = all(can_be_halved(request.data) for request in requests)
            if not can_be_divided or not exceeds_limit(error):
                raise

            cached = yield from self._states.cached_state(collection, timeout)
            if all(cached.state_of(request.anns_field) is None for request in requests):
                raise

            recovered_from(error, collection, SENT_IN_PARTS)

        results: Any = None
        divided = [
            [_asking(request, data) for data in in_two(request.data)] for request in requests
        ]
        for part in zip(*divided, strict=True):
            whole = replace(question, requests=part)
            answer = yield from self.hybrid_search(collection, whole, options)
            results = answer if results is None else _joined(results, answer)
        return results

    def _hybrid_search_on(
        self,
        collection: str,
        hybrid: HybridQuestion,
        options: Mapping[str, Any],
        cached: CachedState,
    ) -> Operation[Any]:
        """Search by this collection state, by one request if the server can merge the answers."""
        requests = hybrid.requests
        output_fields = hybrid.output_fields
        overrides = hybrid.overrides.over(self.overrides)
        without_profile = overrides._replace(profile=None)
        expect_whole_hits(output_fields, cached.states, options)
        states = [cached.state_of(request.anns_field) for request in requests]
        ranking.require_profile(overrides.profile, [state for state in states if state])

        parts: list[_Part] = []
        for request, state in zip(requests, states, strict=True):
            question = Question(
                without_tensors(request.data) if state else request.data,
                request.limit,
                # An offset is that of the whole, which a server looks at alone, too.
                search_params=_without_offset(request.param),
                output_fields=output_fields,
                overrides=overrides
                if state and overrides.profile in state.profiles
                else without_profile,
            )
            rewrite = rewrite_of(state, cached.reading) if state else None
            parts.append((request, question, rewrite))

        merging = ranking.Ranker.of(hybrid.ranker)
        corrected = [(rewrite, question) for _, question, rewrite in parts if rewrite]
        if ranking.must_merge(merging, corrected):
            expect_limit(hybrid.limit)
            page = page_of(hybrid.limit, offset_in(options, {}))
            return (yield from self._merged(collection, cached, parts, merging, page, options))

        sent = [
            ranking.rewritten(request, rewrite, question) if rewrite else request
            for request, question, rewrite in parts
        ]
        fields = cached.reading.fields(output_fields)
        name = cached.real_name or collection
        args = (name, sent, hybrid.ranker, hybrid.limit, fields.requested)
        results = yield Ask("hybrid_search", args, dict(options))
        if now := (yield from self._corrected_since(collection, cached, results, options)):
            return (yield from self._hybrid_search_on(collection, hybrid, options, now))

        for request, question, _ in parts:
            self.notify(cached, partial(AnsweredSearch, request.anns_field, question.data))
        return cached.reading.hits_out(results, fields)

    def _merged(
        self,
        collection: str,
        cached: CachedState,
        parts: Sequence[_Part],
        ranker: ranking.Ranker,
        page: slice,
        options: Mapping[str, Any],
    ) -> Operation[Any]:
        """Search part by part, and merge the answers as Milvus does."""
        if name := first_set(options, ("search_aggregation", "function_chains")):
            raise UnsupportedOperation(f"{name} is not supported in hybrid_search")
        if options.get("group_by_field"):
            raise UnsupportedOperation(
                "grouping a hybrid search is not supported if the client merges the answers: with "
                "a gate, with biases outside the vectors, and with a weighted ranker on fields of "
                "metric COSINE or L2"
            )

        decimals = checked_decimals(options.get("round_decimal", -1))
        not_of_parts = ("offset", "round_decimal", "timezone")
        shared = {name: value for name, value in options.items() if name not in not_of_parts}
        answers: list[Any] = []
        metrics: list[str] = []
        for request, question, rewrite in parts:
            further = {**shared, "anns_field": request.anns_field}
            if request.expr_params:
                further["filter_params"] = request.expr_params
            # By the state of the whole: parts from two copies would be merged by unlike scores.
            whole = replace(question, filter=request.expr or "")
            answer = yield from self._search(collection, whole, further, None, cached)
            answers.append(answer)

            metric = rewrite.state.metric if rewrite else (request.param or {}).get("metric_type")
            if not metric:
                metric = yield from self._states.metric(
                    collection, cached, request.anns_field, options.get("timeout")
                )
            metrics.append(str(metric).upper())

        return ranking.merge(answers, metrics, ranker, page, decimals)


def can_be_halved(data: Any) -> bool:
    """Whether these are several queries."""
    return isinstance(data, list | np.ndarray) and len(data) > 1


def _are_requests(requests: Any) -> bool:
    """Whether these are requests of a hybrid search with parameters that have names."""
    return isinstance(requests, list | tuple) and all(
        isinstance(request, AnnSearchRequest) and isinstance(request.param, Mapping | None)
        for request in requests
    )


def _asking(request: AnnSearchRequest, data: Any) -> AnnSearchRequest:
    """Return the request for other queries."""
    return AnnSearchRequest(
        data=data,
        anns_field=request.anns_field,
        param=request.param,
        limit=request.limit,
        expr=request.expr,
        expr_params=request.expr_params,
    )


def _as_key(id: Any) -> Key:
    # pymilvus takes NumPy's integers, too.
    if isinstance(id, np.integer):
        return int(id)
    if not isinstance(id, int | str):
        raise ParamError(message=f"Unsupported id type: {type(id)}")
    return id


def _without_offset(params: Any) -> Any:
    if not isinstance(params, Mapping):
        return params
    return {name: value for name, value in params.items() if name != "offset"}


def _joined(results: Any, more: Any) -> Any:
    """Return the results with those of further queries; pymilvus's own type stays."""
    results += more
    return results


def _routing(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a search that apply to its further reads: consistency, cluster."""
    names = ("consistency_level", "guarantee_timestamp", "cluster_id")
    return {name: options[name] for name in names if options.get(name) is not None}


def field_arguments(state: CollectionState) -> dict[str, Any]:
    """Return the arguments of pymilvus's search that name the field and its type."""
    if state.dtype != "float32":
        return {"anns_field": state.field}

    # pymilvus sends bytes unchanged, given their type; it packs arrays number by number.
    description = {"name": state.field, "type": DataType.FLOAT_VECTOR}
    return {"anns_field": state.field, "schema": {"fields": [description]}}


def _request(
    collection: str,
    field: Mapping[str, Any],
    filter: str,
    search_request: SearchRequest,
    options: Mapping[str, Any],
) -> Ask:
    """Return the request to the server; options of the rewrite replace the user's."""
    further = {**options, **search_request.options, **field}
    if search_request.offset:
        further["offset"] = search_request.offset
    queries = search_request.data
    if not (type(queries) is list and len(queries) == 1 and type(queries[0]) is bytes):
        queries = [query if type(query) is bytes else query.tobytes() for query in queries]
    args = (
        collection,
        queries,
        filter,
        search_request.limit,
        search_request.output_fields,
        search_request.search_params,
    )
    return Ask("search", args, further)


def pattern_of(question: Question, options: Mapping[str, Any]) -> Pattern | None:
    """Return the pattern of a search; None for unusual arguments and such as may be refused."""
    data: Any = question.data
    limit = question.limit
    names = question.output_fields
    overrides = question.overrides
    anns_field = options.get("anns_field")
    if type(data) is list:
        are_vectors = VECTORS.issuperset(map(type, data))
    else:
        are_vectors = isinstance(data, np.ndarray) and data.ndim > 1
    # Each of these is quick, and few are calls: nearly all searches pass all of them.
    is_usual = (
        are_vectors
        and type(limit) is int
        and (
            names is None
            or (type(names) is list and all(names) and TEXTS.issuperset(map(type, names)))
        )
        and (anns_field is None or type(anns_field) is str)
        and (overrides is NONE or _are_usual(overrides))
        and question.rerank is None
        and question.candidates is None
    )
    if not is_usual:
        return None

    # A search prepared without these may be one of a field that refuses them.
    needing_ranks: tuple[str, ...] = ()
    if not SPECIAL.isdisjoint(options):
        if not UNUSUAL.isdisjoint(options):
            return None
        needing_ranks = tuple(name for name in NEED_SERVER_RANKS if first_set(options, (name,)))

    return (
        anns_field,
        limit,
        None if names is None else tuple(names),
        repr(question.search_params) if question.search_params else "",
        overrides,
        bool(question.with_raw_score),
        needing_ranks,
    )


def _are_usual(overrides: Overrides) -> bool:
    """Whether these settings have the types of those that most searches have."""
    return type(overrides.profile) in NAMES and NUMBERS.issuperset(
        map(type, (overrides.strength, overrides.kinds))
    )
