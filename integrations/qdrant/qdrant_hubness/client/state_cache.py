"""The cached states of collections, and their banks.
No I/O: see `Operation` in milvus_hubness.extending.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from qdrant_client import models
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse

from milvus_hubness import HubnessError
from milvus_hubness.extending import (
    LEDGER,
    Ask,
    BankBiases,
    BankGenerations,
    BankReference,
    CachedStates,
    CollectionId,
    DualWrite,
    Operation,
    Overrides,
    Pause,
    StoredBank,
    identity_in,
    read_states,
)
from qdrant_hubness.client.cached_state import CachedState
from qdrant_hubness.client.points import parts
from qdrant_hubness.store import schema
from qdrant_hubness.store.banks import rows_of
from qdrant_hubness.store.limits import Limits
from qdrant_hubness.store.properties import STATES, of_metadata, payload_keys_in, point_id
from qdrant_hubness.store.requests import (
    FAILURES,
    error_text,
    is_missing,
    is_too_large,
    keeps_metadata,
)
from qdrant_hubness.store.rows import UNNAMED, named, rows_of_vectors

T = TypeVar("T")

IDS_PER_REQUEST = 1_000
"""Most ids in one request."""

ROWS_PER_PAGE = 1_000
"""Rows of a bank that one request reads."""

LONGEST_WAIT = 60.0
"""Longest wait of a client for a rate of strict mode,
in seconds, for one request that it adds to the user's.
"""


class StateCache(CachedStates[CachedState]):
    """The cached states, the banks in memory, and requests beside the user's."""

    failures = (HubnessError, *FAILURES)
    perhaps_outdated = failures
    writes_can_be_repeated = True

    def __init__(
        self,
        overrides: Overrides,
        state_ttl: float,
        bank_budget: int,
    ) -> None:
        """Raises InvalidParameter for invalid settings, TTL or budget."""
        super().__init__(state_ttl)
        self.overrides = overrides.checked()
        """Settings of queries that name none."""

        self._biases = BankBiases(self, bank_budget)
        """Banks in memory, and the biases of points by them."""

        self._aliases: set[str] = set()
        """The names of calls that were found to be aliases of corrected collections."""

        self._in_metadata: bool | None = None
        """Whether properties are in metadata of collections; None until the server has answered."""

    def connect(self, *, local: bool) -> None:
        """Learn of the connection. local: whether the client is in the local mode, which keeps metadata
        of collections.
        """
        self._in_metadata = True if local else None

    def read_state(self, collection: str, timeout: float | None) -> Operation[CachedState]:
        lifetime = self.lifetime(time.monotonic())
        name = collection
        if collection in self._aliases:
            name = yield from self._real_name(collection)
        try:
            described = yield Ask("get_collection", (name,))
        except FAILURES as error:
            # Assumes that there is no such collection, so that
            # the request which follows fails with Qdrant's error.
            if is_missing(error):
                return CachedState()

            raise

        real_name, properties = yield from self._properties(name, described)
        if real_name != name:
            # The alias may have moved between the two requests: description and name must be of one
            # collection.
            self._aliases.add(collection)
            return (yield from self.read_state(collection, timeout))

        sizes = {field: params.size for field, params in schema.dense(described).items()}
        return CachedState(
            CollectionId(name=name),
            sizes=sizes,
            states=read_states(properties, name),
            dual_write=DualWrite.read(properties, name),
            payload_keys=payload_keys_in(properties),
            limits=Limits.of(described),
            lifetime=lifetime,
            identity=identity_in(properties, name),
        )

    def patiently(self, ask: Ask, longest_wait: float = LONGEST_WAIT) -> Operation[Any]:
        """Make a request that the user's call did not: wait if a rate of strict mode is exceeded, and
        make it again.
        """
        waited = 0.0
        while True:
            try:
                return (yield ask)
            except ResourceExhaustedResponse as error:
                seconds = float(max(1, error.retry_after_s))
                waited += seconds
                if waited > longest_wait:
                    raise

                yield Pause(seconds)

    def divided(
        self,
        collection: str,
        parts: Iterable[Sequence[T]],
        request: Callable[[list[T]], Ask],
        stopped: Callable[[int, list[Any], Exception], Exception] | None = None,
        *,
        is_added: bool = True,
    ) -> Operation[list[Any]]:
        """Make request(part) for each part, and for its halves, as `in_parts` does. Return the answers.

        is_added: whether the first one waits as `patiently` does. The others do: they belong to a call
        that has begun.
        """

        def put(part: Sequence[T]) -> Operation[Any]:
            nonlocal is_added
            longest_wait = LONGEST_WAIT if is_added else 0.0
            answer = yield from self.patiently(request(list(part)), longest_wait)
            is_added = True
            return answer

        return self.in_parts(collection, parts, put, stopped)

    def retrieved(self, collection: str, ids: list[Any], **options: Any) -> Operation[list[Any]]:
        """Return the records of these ids, by as many requests as they need."""
        answers = yield from self.divided(
            collection,
            parts(ids, IDS_PER_REQUEST),
            lambda some_ids: Ask("retrieve", (collection, some_ids), options),
        )
        return [record for records in answers for record in records]

    def scrolled(
        self,
        collection: str,
        where: models.Filter,
        rows_per_page: int,
        expect_bounded: Callable[[int], None] = lambda count: None,
        **options: Any,
    ) -> Operation[list[Any]]:
        """Return the records that a filter selects, page by page.

        expect_bounded: raises if these are too many records.
        """
        options |= {"scroll_filter": where, "limit": rows_per_page}
        records: list[Any] = []
        offset: Any = None
        while True:
            ask = Ask("scroll", (collection,), {**options, "offset": offset})
            page, offset = yield from self.patiently(ask)
            records += page
            expect_bounded(len(records))
            if offset is None:
                return records

    def retrying_by_width(
        self,
        collection: str,
        call: Callable[[CachedState], Operation[T]],
        vectors: Callable[[T], list[Any]],
    ) -> Operation[T]:
        """As `retrying`, for a call that returns stored
        vectors, whose width shows if an alias was moved.

        vectors: returns some vectors of an answer.
        """

        def checked(cached: CachedState) -> Operation[T]:
            answer = yield from call(cached)
            if not all(cached.fits(vector) for vector in vectors(answer)):
                answer = yield from call((yield from self.read_again(collection)))
            return answer

        return self.retrying(collection, None, checked)

    def _properties(self, collection: str, described: Any) -> Operation[tuple[str, dict[str, str]]]:
        """Return the collection's real name, read only if it matters, and its properties."""
        if self._in_metadata is None:
            self._in_metadata = keeps_metadata((yield Ask("info")).version)
        if self._in_metadata:
            properties = of_metadata(described)
            if not (read_states(properties, collection) or DualWrite.read(properties, collection)):
                return collection, properties

            return (yield from self._real_name(collection)), properties

        name = yield from self._real_name(collection)
        try:
            points = yield Ask("retrieve", (STATES, [point_id(name)]))
        except FAILURES as error:
            # As Properties.of.
            if is_missing(error):
                return name, {}

            raise

        return name, dict(points[0].payload["properties"]) if points else {}

    def _real_name(self, collection: str) -> Operation[str]:
        aliases = (yield Ask("get_aliases")).aliases
        names = (alias.collection_name for alias in aliases if alias.alias_name == collection)
        return next(names, collection)

    # -- the collections that properties name ------------------------------------------------------

    def bodies_of(self, keys: Sequence[str]) -> Operation[list[str]]:
        try:
            records = yield Ask("retrieve", (LEDGER, [point_id(key) for key in keys]))
        except FAILURES as error:
            # Without a ledger nothing is listed: what needs a record is refused.
            if not is_missing(error):
                raise

            records = []

        return [str((record.payload or {}).get("body")) for record in records]

    def text_of(self, error: Exception) -> str:
        return error_text(error)

    def exceeds_limit(self, error: Exception) -> bool:
        return is_too_large(error)

    def copy_now(
        self,
        collection: str,
        cached: CachedState,
        dual_write: DualWrite,
        timeout: float | None,
    ) -> Operation[tuple[CachedState, DualWrite] | None]:
        now = yield from self.read_again(collection, timeout)
        return None if now.dual_write is None else (now, now.dual_write)

    def load_bank(self, reference: BankReference) -> Operation[StoredBank]:
        described = yield Ask("get_collection", (reference.collection,))
        rows = min(ROWS_PER_PAGE, Limits.of(described).rows_per_read)
        where = rows_of(reference.generation, BankGenerations.parts_of(reference))

        records = yield from self.scrolled(
            reference.collection,
            where,
            rows,
            partial(BankGenerations.expect_bounded, reference),
            with_vectors=True,
        )
        params = schema.dense(described)[UNNAMED]
        vectors = rows_of_vectors(
            [named(record.vector)[UNNAMED] for record in records],
            params.size,
            are_multi=params.multivector_config is not None,
        )
        payloads = [record.payload for record in records]
        return BankGenerations.restored(reference, "qdrant", vectors, payloads)
