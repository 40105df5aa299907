"""HubnessClient: a MilvusClient that hides the correction of collections."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pymilvus import MilvusClient
from pymilvus.client.constants import UNLIMITED

from milvus_hubness.clients.steps import Pause, drive
from milvus_hubness.correction.overrides import Overrides
from milvus_hubness.errors import HubnessError
from milvus_hubness.milvus.client.held_errors import HeldErrors
from milvus_hubness.milvus.client.messages import OF_SEARCHES, Question
from milvus_hubness.milvus.client.methods import Methods
from milvus_hubness.milvus.client.steps import (
    Effect,
    InStore,
    LearnSchema,
    LoadBank,
    Operation,
    as_milvus,
    refusing,
)
from milvus_hubness.milvus.pymilvus_private import connection_of


class HubnessClient(Methods, MilvusClient):
    """A MilvusClient that searches corrected collections by the corrected score.

    Use it wherever a MilvusClient is used. Ordinary collections pass through untouched. Every error
    that it raises is also a MilvusException.

    On corrected collections, insert, upsert, search, query, get, delete, describe_collection and
    describe_index use the original dimension and metric. Scores are s(q, r) − w·(b(r) − c) in the
    user's metric. c is the mean bias in the collection state; it changes no ranking and keeps
    scores on the scale that the application expects.

    strength: w of every search that names none; None uses the strength of the collection (1.0
    unless changed).
    kinds: the factor of kinds of every search that names none; None uses 1.
    state_ttl: TTL of the cached collection state, in seconds; keep it below the time between two
    refreshes.
    bank_budget: bytes of query banks in memory; with a larger bank, only bias="pending" writes
    rows.
    sample_queries: whether queries are sampled. A sample has the query's vector,
    its profile and the time; no search waits for it.
    """

    def _run(self, operation: Operation[Any]) -> Any:
        """Run an operation; its HubnessError is raised as a MilvusException too."""
        try:
            with HeldErrors():
                return drive(operation, self._answer)
        except HubnessError as error:
            raise as_milvus(error) from error

    def _perform(self, step: Effect) -> Any:
        if isinstance(step, LoadBank):
            return self._plain.store().load_bank(step.reference)
        if isinstance(step, InStore):
            return step.work(self._plain.store())
        if isinstance(step, Pause):
            return time.sleep(step.seconds)
        if isinstance(step, LearnSchema):
            return self._learn_schema(connection_of(self), step.collection)
        return step.work()

    def plain_client(self) -> MilvusClient:
        """Return a MilvusClient of the same server, which shows collections as they are stored.

        This client closes it.
        """
        with refusing():
            return self._plain.client()

    def list_collections(self, *, include_internal: bool = False, **kwargs: Any) -> list[str]:
        """List collections as MilvusClient does.

        include_internal: list the collections of this package, too.
        """
        operation = self._operations.catalog.list_collections((), kwargs, include_internal)
        names: list[str] = self._run(operation)
        return names

    def search_iterator(
        self,
        collection_name: str,
        data: Any,
        batch_size: int | None = 1000,
        filter: str | None = None,
        limit: int | None = UNLIMITED,
        output_fields: list[str] | None = None,
        search_params: dict[str, Any] | None = None,
        timeout: float | None = None,
        partition_names: list[str] | None = None,
        anns_field: str | None = None,
        round_decimal: int = -1,
        *,
        external_filter_func: Callable[[Any], Any] | None = None,
        strength: float | None = None,
        kinds: float | None = None,
        profile: str | None = None,
        with_raw_score: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Iterate as MilvusClient.search_iterator does, in the order of the corrected score.

        strength, kinds, profile, with_raw_score: as in `search`. Raises as `search` does, and
        UnsupportedOperation if the collection needs candidate re-ranking, unless the strength is 0.
        """
        self._expect_arguments(kwargs, OF_SEARCHES)
        question = Question(
            data,
            batch_size or 0,
            search_params=search_params,
            output_fields=output_fields,
            round_decimal=round_decimal,
            overrides=Overrides(strength, kinds, profile),
            with_raw_score=with_raw_score,
        )
        options: dict[str, Any] = {
            "batch_size": batch_size,
            "filter": filter,
            "limit": limit,
            "timeout": timeout,
            "partition_names": partition_names,
            "anns_field": anns_field,
            "round_decimal": round_decimal,
            "external_filter_func": external_filter_func,
            **kwargs,
        }
        operation = self._operations.pages.search_iterator(collection_name, question, options)
        return self._run(operation)

    def query_iterator(
        self,
        collection_name: str,
        batch_size: int | None = 1000,
        limit: int | None = UNLIMITED,
        filter: str | None = "",
        output_fields: list[str] | None = None,
        partition_names: list[str] | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Iterate over a query as MilvusClient.query_iterator does."""
        options: dict[str, Any] = {
            "batch_size": batch_size,
            "limit": limit,
            "filter": filter,
            **kwargs,
            "partition_names": partition_names,
            "timeout": timeout,
        }
        operation = self._operations.pages.query_iterator(collection_name, output_fields, options)
        return self._run(operation)

    def use_database(self, db_name: str, **kwargs: Any) -> None:
        """Switch the database as MilvusClient.use_database does."""
        super().use_database(db_name, **kwargs)
        self._leave_database(db_name)

    def close(self) -> None:
        """Close as MilvusClient.close does.

        It waits at most two seconds until the query samples are written.
        """
        self._operations.close()
        super().close()
        self._plain.close()
