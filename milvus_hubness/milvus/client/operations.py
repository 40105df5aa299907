"""All operations of a client, and iterators over their results page by page."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pymilvus import MilvusClient
from pymilvus.client.constants import (
    GUARANTEE_TIMESTAMP,
    ITERATOR_FIELD,
    ITERATOR_SESSION_CP_FILE,
    ITERATOR_SESSION_TS_FIELD,
    OFFSET,
    REDUCE_STOP_FOR_BEST,
    UNLIMITED,
)
from pymilvus.client.iterator import SearchIteratorV2, query_iterator
from pymilvus.exceptions import DataTypeNotMatchException, ExceptionsMessage, ParamError

from milvus_hubness.clients.steps import Ask
from milvus_hubness.correction.codec.arrays import without_tensors
from milvus_hubness.correction.overrides import Overrides
from milvus_hubness.errors import StoreError, UnsupportedOperation
from milvus_hubness.milvus.client.biases import Biases
from milvus_hubness.milvus.client.candidates import rewrite_of
from milvus_hubness.milvus.client.catalog import Catalog, Reads
from milvus_hubness.milvus.client.dual_write import DualWrites
from milvus_hubness.milvus.client.guarding import HubGuard
from milvus_hubness.milvus.client.messages import (
    Question,
    SearchRequest,
    expect_question,
    expect_whole_hits,
)
from milvus_hubness.milvus.client.query_samples import Sampled, Sampler
from milvus_hubness.milvus.client.rewrite import Rewrite
from milvus_hubness.milvus.client.searches import Searches
from milvus_hubness.milvus.client.state_cache import CachedState, StateCache, id_in
from milvus_hubness.milvus.client.steps import ClientPolicy, Operation, refusing
from milvus_hubness.milvus.client.writes import Writes
from milvus_hubness.milvus.filters import literal
from milvus_hubness.milvus.pymilvus_private import (
    start_after,
    starts_at_the_first_key,
    with_escaped_keys,
)
from milvus_hubness.milvus.store import schema as milvus_schema

Row = dict[str, Any]
Key = int | str

# A server answers in key order to a request with these.
_IN_KEY_ORDER = {ITERATOR_FIELD: "True", REDUCE_STOP_FOR_BEST: "True"}
# Arguments of iterators that one query, or one search, does not take.
_NOT_OF_QUERY = ("batch_size", "limit", OFFSET, ITERATOR_SESSION_CP_FILE)
_NOT_OF_SEARCH = ("batch_size", "limit", "filter", "round_decimal", "external_filter_func")


class CorrectedIterator:
    """An iterator of pymilvus that converts its pages; other methods are those of pymilvus."""

    def __init__(self, iterator: Any, page_out: Callable[[Any], Any]) -> None:
        self._iterator = iterator
        self._page_out = page_out

    def next(self) -> Any:
        """Return the next page, of the type that pymilvus returns."""
        with refusing():
            return self._page_out(self._iterator.next())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class Pages:
    """Operations that answer page by page, by the collection state that they read at the start."""

    def __init__(
        self, states: StateCache, biases: Biases, reads: Reads, searches: Searches
    ) -> None:
        self._states = states
        self._biases = biases
        self._reads = reads
        self._searches = searches

    def query_iterator(
        self, collection: str, output_fields: list[str] | None, options: Mapping[str, Any]
    ) -> Operation[Any]:
        """Open a query_iterator whose rows have the user's form.

        options: its further arguments, by name.
        """
        cached = yield from self._states.read_again(collection, options["timeout"])
        fields = cached.reading.fields(output_fields)
        further = {**options, "output_fields": fields.requested}

        # pymilvus skips rows by one request, which cannot skip more rows than a page has.
        to_skip = further.get(OFFSET, 0)
        takes_pages = isinstance(to_skip, int) and to_skip > query_iterator.MAX_BATCH_SIZE
        if takes_pages:
            further[OFFSET] = 0
        # Pages come from the collection on which they began, whatever name moves meanwhile.
        name = cached.collection_id.name or collection
        iterator = with_escaped_keys((yield Ask("query_iterator", (name,), further)))
        if takes_pages and starts_at_the_first_key(iterator):
            key = yield from self._key_at(name, cached.key_field, to_skip, options)
            start_after(iterator, key)
        if not cached.states:
            return iterator

        strict = bool(options.get("strict_float32"))

        def page_out(rows: list[Row]) -> list[Row]:
            cached.reading.rows_out(rows, fields, strict_float32=strict)
            return rows

        return CorrectedIterator(iterator, page_out)

    def search_iterator(
        self, collection: str, question: Question, options: Mapping[str, Any]
    ) -> Operation[Any]:
        """Open a search_iterator, by the corrected score if the field is corrected.

        options: its further arguments, by name. Raises
        UnsupportedOperation if candidates would be re-ranked.
        """
        data = question.data
        output_fields = question.output_fields
        cached = yield from self._states.read_again(collection, options["timeout"])
        further = {
            **options,
            "output_fields": output_fields,
            "search_params": question.search_params,
        }
        name = cached.collection_id.name or collection
        if not cached.states:
            return with_escaped_keys((yield Ask("search_iterator", (name, data), further)))

        expect_whole_hits(output_fields, cached.states, options)
        state = cached.state_of(options["anns_field"])
        if state is None:
            fields = cached.reading.fields(output_fields)
            further = {**further, "output_fields": fields.requested}
            answer = partial(cached.reading.hits_out, fields=fields)
            return (yield from _opened(name, data, further, answer))

        data = without_tensors(data)
        question = replace(question, data=data)
        rounding = {"round_decimal": question.round_decimal}
        expect_question(data, None, output_fields, question.search_params, rounding)
        overrides = question.overrides.over(self._searches.overrides)
        question = replace(question, overrides=overrides)
        rewrite = rewrite_of(state, cached.reading)
        rewrite.expect_answerable(question, options)

        options = {**options, "anns_field": state.field}
        request = yield from self._ordered(collection, cached, rewrite, question, options)
        further |= options
        further["output_fields"] = request.output_fields
        further["search_params"] = request.search_params
        further["search_params"]["metric_type"] = state.codec.served_metric
        # The client rounds, after it has converted the scores.
        further["round_decimal"] = -1
        further |= request.options
        return (yield from _opened(name, request.data, further, request.answer))

    def _ordered(
        self,
        collection: str,
        cached: CachedState,
        rewrite: Rewrite,
        question: Question,
        options: Mapping[str, Any],
    ) -> Operation[SearchRequest]:
        """Return the request for all rows in one order, which a gate chooses by the nearest row."""
        if rewrite.ranks_candidates(question):
            raise UnsupportedOperation(
                f"search_iterator cannot follow the corrected order of {collection!r}: its biases "
                "are outside the vectors, so candidates are re-ranked within one answer: call "
                "search() with a larger limit, iterate with strength=0, or migrate the collection"
            )

        if not rewrite.is_gated(question):
            return rewrite.ask(question)

        bank = yield from self._biases.bank(collection, rewrite.state, rewrite.profile(question))
        raw = rewrite.ask(replace(question, overrides=question.overrides._replace(strength=0.0)))
        name = cached.collection_id.name
        key_field = cached.key_field
        args = (name, raw.data, options["filter"] or "", 1, [key_field], raw.search_params)
        further = {name: value for name, value in options.items() if name not in _NOT_OF_SEARCH}
        nearest = yield Ask("search", args, further)
        if not any(hit.id in bank.activated for hits in nearest for hit in hits):
            return raw

        without_gate = rewrite.profile(question).model_copy(update={"gate": None})
        state = rewrite.state.with_profile(without_gate, question.overrides.profile)
        return replace(rewrite, state=state).ask(question)

    def _key_at(
        self, collection: str, key_field: str, number: int, options: Mapping[str, Any]
    ) -> Operation[Key | None]:
        """Return the key of the row of this number in key order, from 1, or else the last key."""
        further = {name: value for name, value in options.items() if name not in _NOT_OF_QUERY}
        rows = Ask("query", (collection,), further)
        last: Key | None = None
        remaining = number
        while remaining > 0:
            size = min(remaining, query_iterator.MAX_BATCH_SIZE)
            page = yield from self.page(rows, key_field, last, size, [key_field])
            if not page:
                break

            remaining -= len(page)
            last = page[-1][key_field]

        return last

    def begin(self, rows: Ask) -> Operation[tuple[Ask, str]]:
        """Wait until the pages of the query `rows` show every row that was inserted before.

        Returns the query, fixed to one moment if the
        server reports it, and the name of the key field.
        """
        [collection] = rows.args
        description = yield Ask("describe_collection", (collection, rows.options["timeout"]))
        key_field = str(milvus_schema.key_field(description)["name"])
        # As of the other iterators: a name that moves meanwhile changes no page.
        rows = Ask("query", (id_in(description, collection).name,), rows.options)

        # Pages have the consistency level of the collection, not of the request; they show what
        # this strongly consistent query has shown.
        options = {
            "consistency_level": "Strong",
            **rows.options,
            "limit": 1,
            "output_fields": [key_field],
        }
        options["filter"] = options["filter"] or ""
        first = yield from self._reads.read(Ask("query", rows.args, options))
        if moment := first.extra.get(ITERATOR_SESSION_TS_FIELD):
            rows = Ask("query", rows.args, {**rows.options, GUARANTEE_TIMESTAMP: moment})
        return rows, key_field

    def page(
        self,
        rows: Ask,
        key_field: str,
        behind: Key | None,
        size: int,
        output_fields: list[str] | None,
    ) -> Operation[list[Row]]:
        """Return at most `size` rows in key order after the key `behind`.

        More rows may follow a short page.
        """
        conditions = []
        if behind is not None:
            conditions.append(f"{key_field} > {literal(behind)}")
        if rows.options["filter"]:
            conditions.append(f"({rows.options['filter']})")
        options = {
            **rows.options,
            **_IN_KEY_ORDER,
            "filter": " and ".join(conditions),
            "limit": size,
            "output_fields": output_fields,
        }
        answer = yield from self._reads.read(Ask("query", rows.args, options))

        # Milvus 2.3 returns fewer rows if keys have duplicates, and more rows from several shards.
        by_key = {row[key_field]: row for row in answer}
        if list(by_key) != sorted(by_key):
            raise StoreError(f"the server did not page {rows.args[0]!r} in key order")

        return list(by_key.values())[:size]


def _opened(
    collection: str, data: Any, arguments: Mapping[str, Any], answer: Callable[[Any], Any]
) -> Operation[Any]:
    """Open a search_iterator of pymilvus, whose pages `answer` converts."""

    def answered(hits: Any) -> Any:
        with refusing():
            return answer([hits])[0]

    # The user's function is to see the user's hits, and pymilvus calls it before a page is out.
    choose = arguments["external_filter_func"]
    if choose is not None:
        arguments = {**arguments, "external_filter_func": lambda hits: choose(answered(hits))}
    iterator = with_escaped_keys(
        (yield Ask("search_iterator", (collection, data), dict(arguments)))
    )
    if choose is not None and isinstance(iterator, SearchIteratorV2):
        return iterator

    def page_out(page: Any) -> Any:
        for hits in page.get_res() if page is not None else ():
            answer([hits if hasattr(hits, "distances") else _Cut(hits)])
        return page

    return CorrectedIterator(iterator, page_out)


class _Cut(list[Any]):
    """Hits cut out of a result of pymilvus: a list without the attributes of that result."""

    distances: list[float]


class AsyncQueryIterator:
    """MilvusClient.query_iterator for asyncio: rows page by page, in key order.

    Tasks may share an iterator. A page may have fewer than `batch_size` rows although more follow;
    an empty page is the end.
    """

    def __init__(
        self,
        pages: Pages,
        run: Callable[[Operation[Any]], Awaitable[Any]],
        collection: str,
        batch_size: int,
        limit: int | None,
        output_fields: list[str] | None,
        arguments: dict[str, Any],
    ) -> None:
        filter = arguments["filter"]
        if filter is not None and not isinstance(filter, str):
            raise DataTypeNotMatchException(message=ExceptionsMessage.ExprType % type(filter))
        if not 0 < batch_size <= query_iterator.MAX_BATCH_SIZE:
            most = query_iterator.MAX_BATCH_SIZE
            raise ParamError(message=f"batch size must be between 1 and {most}, got {batch_size}")

        if arguments.get(ITERATOR_SESSION_CP_FILE) is not None:
            raise UnsupportedOperation("a query iterator for asyncio keeps no checkpoint file")
        if filter and "element_filter" in filter.lower():
            raise UnsupportedOperation(
                "a query iterator for asyncio gives whole rows, not their elements"
            )

        self._pages = pages
        self._run = run
        self._to_skip = int(arguments.pop(OFFSET, 0))
        self._rows = Ask("query", (collection,), arguments)
        self._batch_size = batch_size
        self._left = None if limit in (None, UNLIMITED) else limit
        self._output_fields = output_fields
        self._key_field = ""
        self._behind: Key | None = None
        self._closed = False
        self._turn = asyncio.Lock()

    async def next(self) -> list[Row]:
        """Return the next page; empty at the end and after `close`.

        Raises as MilvusClient.query does, and StoreError if the server does not answer in key
        order. A call after an error continues at the failed page.
        """
        async with self._turn:
            if self._closed:
                return []
            if not self._key_field:
                self._rows, self._key_field = await self._run(self._pages.begin(self._rows))
            while self._to_skip > 0:
                skipped = await self._page(self._to_skip, [self._key_field])
                if not skipped:
                    break

                self._to_skip -= len(skipped)

            if self._left is None:
                return await self._page(self._batch_size, self._output_fields)

            page = await self._page(self._left, self._output_fields)
            self._left -= len(page)
            return page

    async def close(self) -> None:
        """End the iteration: later pages are empty."""
        self._closed = True

    def __aiter__(self) -> AsyncQueryIterator:
        return self

    async def __anext__(self) -> list[Row]:
        page = await self.next()
        if not page:
            raise StopAsyncIteration
        return page

    async def _page(self, size: int, output_fields: list[str] | None) -> list[Row]:
        if size <= 0:
            return []

        size = min(size, self._batch_size)
        operation = self._pages.page(self._rows, self._key_field, self._behind, size, output_fields)
        page: list[Row] = await self._run(operation)
        if page:
            self._behind = page[-1][self._key_field]
        return page


class Operations:
    """The operations of a client, by subject, over one cache of collection states.

    connected: returns the client by which queries are sampled; None for searches of which none is.
    Raises InvalidParameter for invalid settings or TTL.
    """

    def __init__(
        self,
        overrides: Overrides,
        state_ttl: float,
        bank_budget: int,
        connected: Callable[[], MilvusClient] | None = None,
        policy: ClientPolicy | None = None,
    ) -> None:
        self._sampler = Sampler.through(connected) if connected is not None else None
        self.states = StateCache(state_ttl, policy or ClientPolicy())
        self.biases = Biases(self.states, bank_budget, HubGuard())
        self.reads = Reads(self.states)
        self.catalog = Catalog(self.states)
        self.writes = Writes(self.states, self.biases)
        self.dual_writes = DualWrites(self.states, self.reads, self.writes)
        self.searches = Searches(self.states, self.biases, self.reads, overrides, self._sampler)
        self.pages = Pages(self.states, self.biases, self.reads, self.searches)

    @property
    def sampled(self) -> Sampled:
        """Counts of the sampled queries."""
        return self._sampler.counts if self._sampler is not None else Sampled(0, 0, 0)

    def discard_samples(self) -> None:
        """Drop the samples that wait, before `connected` leads to another database."""
        if self._sampler is not None:
            self._sampler.discard()

    def close(self) -> None:
        """Write the samples that wait, for two seconds at most."""
        if self._sampler is not None:
            self._sampler.close()
