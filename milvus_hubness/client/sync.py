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
    """Use it wherever a MilvusClient is used. Ordinary collections are passed through untouched. What it
    raises of its own is a MilvusException as well.

    On corrected ones, insert, upsert, search, query, get, delete, describe_collection and describe_index
    speak the original dimension and metric. Scores are s(q, r) − w·(b(r) − c) in the user's metric;
    c, the mean bias kept in the state, moves no ranking and keeps scores on the scale the application knows.

    strength: w of every search that names none; None takes each collection's own (1.0 unless changed).
    state_ttl: seconds for which what a collection says of its biases is believed without asking again; keep
    it below the time between two refreshes. bank_budget: bytes of banks that are kept in memory; of a larger
    one the server's own search finds as many of a new row's nearest queries as tell its bias to 0.3% of tau.
    sample_queries: the share of queries sampled for online banks; None for what each collection says,
    False for none. Of a query its vector is kept, its profile and the time; no search waits for it.
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

    # -- rows in --------------------------------------------------------------------------------------

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
        """As MilvusClient.insert; each new row gets its bias from the bank, or with bias="pending" the mean
        one until the next refresh.

        Raises BankTooLarge where the bank neither fits into bank_budget nor can be searched instead, and
        DimensionMismatch, NonFiniteVectors and, under COSINE, ZeroVectors, each naming the rows.
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
        """As MilvusClient.upsert; rows that bring a vector get its bias. A partial update without one keeps
        the vector and the bias as they are. Raises as `insert` does."""
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
        """Write new rows of a corrected collection to Parquet files for a bulk import, each with its bias,
        and return the paths. Raises as `insert` does, and UnsupportedOperation where biases are in a side
        collection or a job works on the collection."""
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
        """As MilvusClient.delete."""
        return self._run(
            self._operations.delete(collection_name, ids, timeout, filter, partition_name, kwargs)
        )

    # -- questions --------------------------------------------------------------------------------------

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
        """As MilvusClient.search, ranked by the corrected score.

        strength: w; 1 is the full correction, 0 the raw ranking and the raw scores. profile: the set of
        biases to take, by name. rerank: fetch more raw candidates and rank those against the bank instead;
        or, with a QuariReranker, more corrected ones, and rank those by what it has learned. candidates:
        how many these are; None for what the re-ranker says.
        with_raw_score: give each hit its uncorrected score as "raw_score". All are of no effect on a field
        that carries no biases, but for a QuariReranker. Raises DimensionMismatch, InvalidInput,
        InvalidParameter, and for a QuariReranker on such a field UnsupportedOperation.
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
        """As MilvusClient.query."""
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
        """As MilvusClient.get."""
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
        """As MilvusClient.hybrid_search, each request on a corrected field ranked by the corrected score.

        Where the server cannot weigh a corrected field as it weighs the user's metric, the requests are asked
        one by one and merged here as Milvus merges them. Raises UnsupportedOperation where that needs a
        ranker other than RRFRanker and WeightedRanker, or groups.
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
        """As MilvusClient.search_iterator, in the order of the corrected score; strength, profile and
        with_raw_score as in `search`.

        Raises as `search` does, and UnsupportedOperation where the biases lie beside the vectors, unless the
        strength is 0.
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
        """As MilvusClient.query_iterator."""
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
        """What the collection knows about a field's biases now; None where that carries none, and where none
        is named of several that do."""
        self._operations.forget(collection_name)
        return self._run(self._operations.cached_state(collection_name)).state_of(anns_field)

    def describe_collection(
        self, collection_name: str, timeout: float | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As MilvusClient.describe_collection, of the collection as the user made it."""
        return self._run(self._operations.describe_collection(collection_name, timeout, kwargs))

    def describe_index(
        self, collection_name: str, index_name: str, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """As MilvusClient.describe_index, with the user's metric."""
        return self._run(self._operations.describe_index(collection_name, index_name, timeout, kwargs))

    def list_indexes(self, collection_name: str, field_name: str | None = "", **kwargs: Any) -> list[str]:
        """As MilvusClient.list_indexes, without that of a second field that holds the augmented form."""
        return self._run(self._operations.list_indexes(collection_name, field_name, kwargs))

    # -- what makes a remembered state wrong --------------------------------------------------------------

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
        """As MilvusClient.create_collection. hubness: fields to correct from their first row on.

        Raises InvalidInput, InvalidParameter, DimensionMismatch, BankTooSmall; nothing is left then.
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
        """As MilvusClient.create_index. Raises InvalidParameter for a corrected field and another metric than
        it was corrected for."""
        self._run(self._operations.create_index(collection_name, index_params, timeout, kwargs))

    def list_collections(self, *, include_internal: bool = False, **kwargs: Any) -> list[str]:
        """As MilvusClient.list_collections, without the collections that this package creates beside the
        user's. include_internal: with them."""
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
        """As MilvusClient.list_aliases, without those by which jobs write. include_internal: with them."""
        return shown_aliases(super().list_aliases(collection_name, timeout, **kwargs), include_internal)

    def load_collection(self, collection_name: str, timeout: float | None = None, **kwargs: Any) -> None:
        """As MilvusClient.load_collection; load_fields need not name the hidden fields."""
        self._run(self._operations.load("load_collection", (collection_name,), timeout, kwargs))

    def load_partitions(
        self,
        collection_name: str,
        partition_names: str | list[str],
        timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        """As MilvusClient.load_partitions; load_fields need not name the hidden fields."""
        args = (collection_name, partition_names)
        self._run(self._operations.load("load_partitions", args, timeout, kwargs))

    def drop_collection(self, collection_name: str, timeout: float | None = None, **kwargs: Any) -> Any:
        """As MilvusClient.drop_collection; its bank, biases and notes go too.

        Raises LeaseHeld while a job works on it, UnsupportedOperation while its writes go to a copy as well.
        """
        call = Ask("drop_collection", (collection_name, timeout), kwargs)
        return self._run(self._operations.drop_collection(collection_name, call, timeout))

    def truncate_collection(self, collection_name: str, timeout: float | None = None, **kwargs: Any) -> Any:
        """As MilvusClient.truncate_collection, with the biases. Raises as `drop_collection` does, and
        UnsupportedOperation where a refresh was stopped that would bring rows back."""
        call = Ask("truncate_collection", (collection_name, timeout), kwargs)
        return self._run(self._operations.truncate_collection(collection_name, call, timeout))

    def drop_partition(
        self, collection_name: str, partition_name: str, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """As MilvusClient.drop_partition. Raises as `truncate_collection` does."""
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
        """As MilvusClient.rename_collection. Raises as `truncate_collection` does, and UnsupportedOperation
        for a corrected one and another database."""
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
        """As MilvusClient.restore_snapshot. Raises UnsupportedOperation for a corrected collection and
        another database, and where its biases are in a side collection."""
        names = (snapshot_name, source_collection_name, target_collection_name)
        call = Ask("restore_snapshot", (*names, source_db_name, target_db_name, timeout), kwargs)
        database = target_db_name if target_db_name != source_db_name else ""
        return self._run(self._operations.restore_snapshot(source_collection_name, database, call, timeout))

    def alter_alias(self, *args: Any, **kwargs: Any) -> Any:
        """As MilvusClient.alter_alias."""
        self._operations.forget()
        return super().alter_alias(*args, **kwargs)

    def drop_alias(self, *args: Any, **kwargs: Any) -> Any:
        """As MilvusClient.drop_alias."""
        self._operations.forget()
        return super().drop_alias(*args, **kwargs)

    def use_database(self, db_name: str, **kwargs: Any) -> None:
        """As MilvusClient.use_database."""
        super().use_database(db_name, **kwargs)
        if self._sampler is not None:
            self._sampler.discard()
        self._plain.use_database(db_name, **kwargs)
        self._operations.forget()

    @property
    def hubness_samples(self) -> Sampled:
        """What became of the queries that this client sampled for online banks."""
        return self._sampler.counts if self._sampler is not None else Sampled(0, 0, 0)

    def close(self) -> None:
        """As MilvusClient.close, once the queries that were sampled are written, for which it waits two
        seconds at most."""
        if self._sampler is not None:
            self._sampler.close()
        super().close()
        self._plain.close()
