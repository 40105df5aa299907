"""HubnessClient: a MilvusClient that hides the correction of collections."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pymilvus import AnnSearchRequest, CollectionSchema, DataType, MilvusClient
from pymilvus.client.constants import UNLIMITED
from pymilvus.milvus_client.index import IndexParams

from milvus_hubness.client.biases import Bias
from milvus_hubness.client.catalog import shown_aliases
from milvus_hubness.client.new_collections import CorrectionConfig, NewCollection
from milvus_hubness.client.operations import PagedOperations
from milvus_hubness.client.query_samples import WRITE_SECONDS, Sampled, sampler_for
from milvus_hubness.client.state_cache import PERHAPS_OUTDATED, Failed
from milvus_hubness.client.steps import (
    Ask,
    InStore,
    LearnSchema,
    LoadBank,
    Operation,
    Pause,
    Step,
    T,
    as_milvus,
    drive,
    refusing,
)
from milvus_hubness.errors import HubnessError
from milvus_hubness.rerank import Adaptive, GloballyCorrected
from milvus_hubness.state import STATE_TTL, CollectionState
from milvus_hubness.stores.milvus import MilvusStore
from milvus_hubness.stores.milvus_banks import Sample, put_samples
from milvus_hubness.stores.milvus_server import EscapedKeys, PlainClient

DEFAULT_BANK_BUDGET = 1 << 30


class HubnessClient(EscapedKeys, MilvusClient):
    """A MilvusClient that searches corrected collections by the corrected score.

    Use it wherever a MilvusClient is used. Ordinary collections pass through untouched. Every error that it
    raises is also a MilvusException.

    On corrected collections, insert, upsert, search, query, get, delete, describe_collection and
    describe_index use the original dimension and metric. Scores are s(q, r) − w·(b(r) − c) in the user's
    metric. c is the mean bias in the collection state; it changes no ranking and keeps scores on the scale
    that the application expects.

    strength: w of every search that names none; None uses the strength of each collection (1.0 unless
    changed). state_ttl: TTL of the cached collection state, in seconds; keep it below the time between two
    refreshes. bank_budget: bytes of query banks that the client holds in memory; for a larger bank, a search
    on the server finds enough of a new row's nearest queries to compute its bias to 0.3% of tau.
    sample_queries: share of queries sampled for online banks; None uses the share of each collection, False
    samples none. A sample has the query's vector, its profile and the time; no search waits for it.
    """

    def __init__(
        self,
        uri: str = "http://localhost:19530",
        user: str = "",
        password: str = "",
        db_name: str = "",
        token: str = "",
        timeout: float | None = None,
        *,
        strength: float | None = None,
        state_ttl: float = STATE_TTL,
        bank_budget: int = DEFAULT_BANK_BUDGET,
        sample_queries: float | None = None,
        **kwargs: Any,
    ) -> None:
        with refusing():
            self._sampler = sampler_for(sample_queries, self._put_samples)
        super().__init__(uri, user, password, db_name, token, timeout, **kwargs)
        self._plain = PlainClient(uri, user, password, db_name, token, timeout, **kwargs)
        self._operations = PagedOperations(strength, state_ttl, bank_budget, self._sampler)

    def _put_samples(self, samples_collection: str, samples: Sequence[Sample]) -> None:
        put_samples(self._plain, samples_collection, samples, WRITE_SECONDS)

    def _run(self, operation: Operation[T]) -> T:
        try:
            return drive(operation, self._answer)
        except HubnessError as error:
            raise as_milvus(error) from error

    def _answer(self, step: Step) -> Any:
        if isinstance(step, Ask):
            return getattr(super(), step.method)(*step.args, **step.options)
        if isinstance(step, LoadBank):
            return MilvusStore(self._plain).load_bank(step.reference)
        if isinstance(step, InStore):
            return step.work(MilvusStore(self._plain))
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        if isinstance(step, LearnSchema):
            database = self._generate_call_context().get_db_name()
            self._get_connection()._invalidate_schema(step.collection, db_name=database)
            return None
        return step.work()

    # -- writes ---------------------------------------------------------------------------------------

    def insert(
        self,
        collection_name: str,
        data: dict[str, Any] | list[dict[str, Any]],
        timeout: float | None = None,
        partition_name: str | None = "",
        *,
        bias: Bias = "compute",
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Insert rows as MilvusClient.insert does, and compute the bias of each from the bank.

        bias="pending" gives rows the mean bias until the next refresh. Raises BankTooLarge if the bank
        neither fits into bank_budget nor can be searched on the server, and DimensionMismatch,
        NonFiniteVectors and, under COSINE, ZeroVectors, each naming the rows.
        """
        return self._run(
            self._operations.write("insert", collection_name, data, timeout, partition_name, bias, kwargs)
        )

    def upsert(
        self,
        collection_name: str,
        data: dict[str, Any] | list[dict[str, Any]],
        timeout: float | None = None,
        partition_name: str | None = "",
        *,
        bias: Bias = "compute",
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Upsert rows as MilvusClient.upsert does, and compute the bias of rows that have a vector.

        A partial update without a vector leaves the vector and the bias as they are. Raises as `insert` does.
        """
        return self._run(
            self._operations.write("upsert", collection_name, data, timeout, partition_name, bias, kwargs)
        )

    def write_import_files(
        self,
        collection_name: str,
        data: Iterable[dict[str, Any]],
        folder: str | Path,
        timeout: float | None = None,
        *,
        bias: Bias = "compute",
    ) -> list[str]:
        """Write new rows of a corrected collection to Parquet files for a bulk import, and return the paths.

        Each row has its bias. Raises as `insert` does, and UnsupportedOperation if the biases are in a side
        collection or a job works on the collection.
        """
        return self._run(
            self._operations.write_import_files(collection_name, data, Path(folder), bias, timeout)
        )

    def delete(
        self,
        collection_name: str,
        ids: list[Any] | str | int | None = None,
        timeout: float | None = None,
        filter: str | None = None,
        partition_name: str | None = None,
        **kwargs: Any,
    ) -> dict[str, int]:
        """Delete rows as MilvusClient.delete does."""
        return self._run(
            self._operations.delete(collection_name, ids, timeout, filter, partition_name, kwargs)
        )

    # -- searches and reads -----------------------------------------------------------------------------

    def search(
        self,
        collection_name: str,
        data: Any = None,
        filter: str = "",
        limit: int = 10,
        output_fields: list[str] | None = None,
        search_params: dict[str, Any] | None = None,
        timeout: float | None = None,
        partition_names: list[str] | None = None,
        anns_field: str | None = None,
        ranker: Any = None,
        function_chains: Any = None,
        highlighter: Any = None,
        ids: Any = None,
        search_aggregation: Any = None,
        *,
        strength: float | None = None,
        profile: str | None = None,
        rerank: GloballyCorrected | Adaptive | None = None,
        candidates: int | None = None,
        with_raw_score: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Search as MilvusClient.search does, ranked by the corrected score.

        strength: w; 1 is the full correction, 0 gives the raw ranking and the raw scores. profile: name of
        the bias profile. rerank: fetch more raw candidates and rank them against the bank; with a
        QuariReranker, fetch more corrected candidates and rank them by its model. candidates: how many
        candidates; None uses the number of the re-ranker. with_raw_score: give each hit its uncorrected score
        as "raw_score". On a field that is not corrected, all of these have no effect, except a QuariReranker.

        Raises DimensionMismatch, InvalidInput, InvalidParameter, and UnsupportedOperation for a QuariReranker
        on a field that is not corrected.
        """
        options: dict[str, Any] = {
            "timeout": timeout,
            "partition_names": partition_names,
            "anns_field": anns_field,
            "ranker": ranker,
            "function_chains": function_chains,
            "highlighter": highlighter,
            "search_aggregation": search_aggregation,
            **kwargs,
        }
        failed = None
        if ids is None and rerank is None and candidates is None:
            quick = self._operations.search_like_before(
                collection_name,
                data,
                filter,
                limit,
                output_fields,
                search_params,
                options,
                strength=strength,
                profile=profile,
                with_raw_score=with_raw_score,
            )
            if quick is not None:
                try:
                    return quick.answer(super().search(*quick.args, **quick.options))
                except PERHAPS_OUTDATED as error:
                    failed = Failed(quick.cached, error)
        return self._run(
            self._operations.search(
                collection_name,
                data,
                filter,
                limit,
                output_fields,
                search_params,
                options,
                ids=ids,
                strength=strength,
                profile=profile,
                rerank=rerank,
                candidates=candidates,
                with_raw_score=with_raw_score,
                failed=failed,
            )
        )

    def query(
        self,
        collection_name: str,
        filter: str = "",
        output_fields: list[str] | None = None,
        timeout: float | None = None,
        ids: Any = None,
        partition_names: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Query as MilvusClient.query does."""
        return self._run(
            self._operations.query(
                collection_name, filter, output_fields, timeout, ids, partition_names, kwargs
            )
        )

    def get(
        self,
        collection_name: str,
        ids: Any,
        output_fields: list[str] | None = None,
        timeout: float | None = None,
        partition_names: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Get rows as MilvusClient.get does."""
        return self._run(
            self._operations.get(collection_name, ids, output_fields, timeout, partition_names, kwargs)
        )

    def hybrid_search(
        self,
        collection_name: str,
        reqs: list[AnnSearchRequest],
        ranker: Any,
        limit: int = 10,
        output_fields: list[str] | None = None,
        timeout: float | None = None,
        partition_names: list[str] | None = None,
        *,
        strength: float | None = None,
        profile: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Search as MilvusClient.hybrid_search does, with corrected scores on corrected fields.

        If the server cannot weigh a corrected field in the user's metric, the client sends the requests one
        by one and merges the answers as Milvus does. Raises UnsupportedOperation if that needs groups, or a
        ranker other than RRFRanker and WeightedRanker.
        """
        options = {"timeout": timeout, "partition_names": partition_names, **kwargs}
        return self._run(
            self._operations.hybrid_search(
                collection_name,
                reqs,
                ranker,
                limit,
                output_fields,
                options,
                strength=strength,
                profile=profile,
            )
        )

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
        profile: str | None = None,
        with_raw_score: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Iterate as MilvusClient.search_iterator does, in the order of the corrected score.

        strength, profile and with_raw_score as in `search`. Raises as `search` does, and UnsupportedOperation
        if the collection needs candidate re-ranking, unless the strength is 0.
        """
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
        return self._run(
            self._operations.search_iterator(
                collection_name,
                data,
                output_fields,
                search_params,
                options,
                strength=strength,
                profile=profile,
                with_raw_score=with_raw_score,
            )
        )

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
            "partition_names": partition_names,
            "timeout": timeout,
            **kwargs,
        }
        return self._run(self._operations.query_iterator(collection_name, output_fields, options))

    # -- descriptions -----------------------------------------------------------------------------------

    def hubness_state(self, collection_name: str, anns_field: str | None = None) -> CollectionState | None:
        """Read the state of a corrected field from the collection.

        anns_field: the field; it may be None if only one field is corrected. Returns None if the field is not
        corrected, and if no field is named but several are corrected.
        """
        self._operations.forget(collection_name)
        return self._run(self._operations.cached_state(collection_name)).state_of(anns_field)

    def describe_collection(
        self, collection_name: str, timeout: float | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Describe the collection as MilvusClient.describe_collection does, as the user created it."""
        return self._run(self._operations.describe_collection(collection_name, timeout, kwargs))

    def describe_index(
        self, collection_name: str, index_name: str, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Describe an index as MilvusClient.describe_index does, with the user's metric."""
        return self._run(self._operations.describe_index(collection_name, index_name, timeout, kwargs))

    def list_indexes(self, collection_name: str, field_name: str | None = "", **kwargs: Any) -> list[str]:
        """List indexes as MilvusClient.list_indexes does, without that of a hidden vector field."""
        return self._run(self._operations.list_indexes(collection_name, field_name, kwargs))

    # -- operations that invalidate the cached state ------------------------------------------------------

    def create_collection(
        self,
        collection_name: str,
        dimension: int | None = None,
        primary_field_name: str = "id",
        id_type: str | DataType = "int",
        vector_field_name: str = "vector",
        metric_type: str = "COSINE",
        auto_id: bool = False,
        timeout: float | None = None,
        schema: CollectionSchema | None = None,
        index_params: IndexParams | None = None,
        *,
        hubness: CorrectionConfig | Sequence[CorrectionConfig] | None = None,
        **kwargs: Any,
    ) -> None:
        """Create a collection as MilvusClient.create_collection does.

        hubness: fields to correct from their first row on. Raises InvalidInput, InvalidParameter,
        DimensionMismatch and BankTooSmall; none of these leaves a collection behind.
        """
        self._run(
            self._operations.create_collection(
                collection_name,
                NewCollection(
                    dimension,
                    primary_field_name,
                    id_type,
                    vector_field_name,
                    metric_type,
                    auto_id,
                    schema,
                    index_params,
                ),
                hubness,
                timeout,
                kwargs,
            )
        )

    def create_index(
        self, collection_name: str, index_params: IndexParams, timeout: float | None = None, **kwargs: Any
    ) -> None:
        """Create an index as MilvusClient.create_index does.

        Raises InvalidParameter if the metric of a corrected field differs from the metric of its correction.
        """
        self._run(self._operations.create_index(collection_name, index_params, timeout, kwargs))

    def list_collections(self, *, include_internal: bool = False, **kwargs: Any) -> list[str]:
        """List collections as MilvusClient.list_collections does, without internal ones.

        include_internal: list the collections that this package created for its own use too.
        """
        names = super().list_collections(**kwargs)
        return names if include_internal else self._run(self._operations.list_collections(names))

    def list_aliases(
        self,
        collection_name: str = "",
        timeout: float | None = None,
        *,
        include_internal: bool = False,
        **kwargs: Any,
    ) -> Any:
        """List aliases as MilvusClient.list_aliases does, without the aliases that jobs write through.

        include_internal: list these too.
        """
        return shown_aliases(super().list_aliases(collection_name, timeout, **kwargs), include_internal)

    def load_collection(self, collection_name: str, timeout: float | None = None, **kwargs: Any) -> None:
        """Load as MilvusClient.load_collection does; load_fields need not name the hidden fields."""
        self._run(self._operations.load("load_collection", (collection_name,), timeout, kwargs))

    def load_partitions(
        self,
        collection_name: str,
        partition_names: str | list[str],
        timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Load as MilvusClient.load_partitions does; load_fields need not name the hidden fields."""
        args = (collection_name, partition_names)
        self._run(self._operations.load("load_partitions", args, timeout, kwargs))

    def drop_collection(self, collection_name: str, timeout: float | None = None, **kwargs: Any) -> Any:
        """Drop a collection as MilvusClient.drop_collection does.

        Its bank, its biases and its job records are dropped too. Raises LeaseHeld while a job works on it,
        and UnsupportedOperation while its writes also go to a copy.
        """
        call = Ask("drop_collection", (collection_name, timeout), kwargs)
        return self._run(self._operations.drop_collection(collection_name, call, timeout))

    def truncate_collection(self, collection_name: str, timeout: float | None = None, **kwargs: Any) -> Any:
        """Truncate a collection as MilvusClient.truncate_collection does, with its biases.

        Raises as `drop_collection` does, and UnsupportedOperation if an unfinished refresh would restore the
        rows.
        """
        call = Ask("truncate_collection", (collection_name, timeout), kwargs)
        return self._run(self._operations.truncate_collection(collection_name, call, timeout))

    def drop_partition(
        self, collection_name: str, partition_name: str, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Drop a partition as MilvusClient.drop_partition does. Raises as `truncate_collection` does."""
        call = Ask("drop_partition", (collection_name, partition_name, timeout), kwargs)
        return self._run(self._operations.drop_partition(collection_name, call, timeout))

    def rename_collection(
        self,
        old_name: str,
        new_name: str,
        target_db: str | None = "",
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Rename a collection as MilvusClient.rename_collection does.

        Raises as `truncate_collection` does, and UnsupportedOperation for a corrected collection and another
        database.
        """
        call = Ask("rename_collection", (old_name, new_name, target_db, timeout), kwargs)
        return self._run(self._operations.rename_collection(old_name, target_db, call, timeout))

    def restore_snapshot(
        self,
        snapshot_name: str,
        source_collection_name: str,
        target_collection_name: str,
        source_db_name: str = "",
        target_db_name: str = "",
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Restore a snapshot as MilvusClient.restore_snapshot does.

        Raises UnsupportedOperation for a corrected collection if target_db_name is another database, or if
        its biases are in a side collection.
        """
        names = (snapshot_name, source_collection_name, target_collection_name)
        call = Ask("restore_snapshot", (*names, source_db_name, target_db_name, timeout), kwargs)
        database = target_db_name if target_db_name != source_db_name else ""
        return self._run(self._operations.restore_snapshot(source_collection_name, database, call, timeout))

    def alter_alias(self, *args: Any, **kwargs: Any) -> Any:
        """Alter an alias as MilvusClient.alter_alias does."""
        self._operations.forget()
        return super().alter_alias(*args, **kwargs)

    def drop_alias(self, *args: Any, **kwargs: Any) -> Any:
        """Drop an alias as MilvusClient.drop_alias does."""
        self._operations.forget()
        return super().drop_alias(*args, **kwargs)

    def use_database(self, db_name: str, **kwargs: Any) -> None:
        """Switch the database as MilvusClient.use_database does."""
        super().use_database(db_name, **kwargs)
        if self._sampler is not None:
            self._sampler.discard()
        self._plain.use_database(db_name, **kwargs)
        self._operations.forget()

    @property
    def hubness_samples(self) -> Sampled:
        """Counts of the queries that this client sampled for online banks."""
        return self._sampler.counts if self._sampler is not None else Sampled(0, 0, 0)

    def close(self) -> None:
        """Close as MilvusClient.close does, and wait at most two seconds to write the query samples."""
        if self._sampler is not None:
            self._sampler.close()
        super().close()
        self._plain.close()
