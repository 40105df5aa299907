"""The methods that HubnessClient and AsyncHubnessClient share: signatures, docstrings and operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pymilvus import AnnSearchRequest, CollectionSchema, DataType
from pymilvus.milvus_client.index import IndexParams

from milvus_hubness.client.messages import QUICK_FORM, Bias, Deletion, Question, Write
from milvus_hubness.client.steps import (
    Ask,
    ClientPolicy,
    Effect,
    Operation,
    PlainConnection,
    Step,
    raising_as_milvus,
    refusing,
)
from milvus_hubness.defaults import STATE_TTL
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.rerank import Adaptive, GloballyCorrected
from milvus_hubness.stores.milvus_server import EscapedKeys

if TYPE_CHECKING:
    from milvus_hubness.client.new_collections import CorrectionConfig
    from milvus_hubness.client.query_samples import Sampled
    from milvus_hubness.stores.milvus_banks import Sample

DEFAULT_BANK_BUDGET = 1 << 30


class Methods(EscapedKeys):
    """Methods of a client of pymilvus, for corrected collections.

    They return the result in HubnessClient, and an awaitable of the result in AsyncHubnessClient. A subclass inherits
    from this class first and from a client of pymilvus second.
    """

    _drive: Callable[..., Any]
    """`drive` or `drive_async`."""
    _perform: Callable[[Effect], Any]
    """Runs a step that is not a request of pymilvus's own client."""
    policy = ClientPolicy()

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
        sample_queries: bool = True,
        **kwargs: Any,
    ) -> None:
        # Here, as they need more modules than pymilvus's client: programs that only name the class start sooner.
        from milvus_hubness.client.operations import Operations
        from milvus_hubness.client.query_samples import Sampler

        with refusing():
            if not isinstance(sample_queries, bool):
                raise InvalidParameter(
                    f"sample_queries must be true or false, not {sample_queries!r}: the bank has a rate"
                )
            self._sampler = Sampler(self._put_samples) if sample_queries else None
            self._operations = Operations(strength, state_ttl, bank_budget, self._sampler, self.policy)
        super().__init__(uri, user, password, db_name, token, timeout, **kwargs)  # type: ignore[call-arg]
        self._plain = PlainConnection(uri, db_name, timeout, user=user, password=password, token=token, **kwargs)

    def _put_samples(self, samples_collection: str, samples: Sequence[Sample]) -> None:
        from milvus_hubness.client.query_samples import WRITE_SECONDS
        from milvus_hubness.stores.milvus_banks import put_samples

        put_samples(self._plain.client(), samples_collection, samples, WRITE_SECONDS)

    def _run(self, operation: Operation[Any]) -> Any:
        return self._drive(raising_as_milvus(operation), self._answer)

    def _answer(self, step: Step) -> Any:
        if isinstance(step, Ask):
            return getattr(super(), step.method)(*step.args, **step.options)
        return self._perform(step)

    def _learn_schema(self, connection: Any, collection: str) -> None:
        database = self._generate_call_context().get_db_name()  # type: ignore[attr-defined]
        connection._invalidate_schema(collection, db_name=database)

    def _leave_database(self, new_database: str) -> None:
        if self._sampler is not None:
            self._sampler.discard()
        self._plain.use_database(new_database)
        self._operations.states.forget()

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
    ) -> Any:
        """Insert rows as pymilvus does, and compute their biases from the bank.

        bias="pending" gives rows the mean bias until the next refresh. Raises BankTooLarge if the bank neither fits
        into bank_budget nor can be searched on the server, and DimensionMismatch, NonFiniteVectors and, under COSINE,
        ZeroVectors, with the rows in the message.
        """
        write = Write("insert", collection_name, data, timeout, partition_name, bias, kwargs)
        return self._run(self._operations.dual_writes.write(write))

    def upsert(
        self,
        collection_name: str,
        data: dict[str, Any] | list[dict[str, Any]],
        timeout: float | None = None,
        partition_name: str | None = "",
        *,
        bias: Bias = "compute",
        **kwargs: Any,
    ) -> Any:
        """Upsert rows as pymilvus does, and compute the bias of rows that have a vector.

        A partial update without a vector leaves the vector and the bias as they are. Raises as `insert` does.
        """
        write = Write("upsert", collection_name, data, timeout, partition_name, bias, kwargs)
        return self._run(self._operations.dual_writes.write(write))

    def write_import_files(
        self,
        collection_name: str,
        data: Iterable[dict[str, Any]],
        folder: str | Path,
        timeout: float | None = None,
        *,
        bias: Bias = "compute",
    ) -> Any:
        """Write new rows of a corrected collection, with their biases, to Parquet files for a bulk import.

        Returns the paths. Raises as `insert` does, and UnsupportedOperation if the biases are in a side collection or
        a job works on the collection.
        """
        return self._run(self._operations.writes.write_import_files(collection_name, data, Path(folder), bias, timeout))

    def delete(
        self,
        collection_name: str,
        ids: list[Any] | str | int | None = None,
        timeout: float | None = None,
        filter: str | None = None,
        partition_name: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Delete rows as pymilvus does."""
        deletion = Deletion(collection_name, ids, timeout, filter, partition_name, kwargs)
        return self._run(self._operations.dual_writes.delete(deletion))

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
        """Search as pymilvus does, ranked by the corrected score.

        strength: w; 1 is the full correction, 0 gives the raw ranking and the raw scores. profile: name of the bias
        profile. rerank: ranks more raw candidates against the bank or, if it is a QuariReranker, more corrected
        candidates by its model. candidates: how many; None uses the number of the re-ranker. with_raw_score: hits also
        have their uncorrected score, as "raw_score". On a field that is not corrected, these have no effect, except
        that a QuariReranker raises UnsupportedOperation. Raises DimensionMismatch, InvalidInput, InvalidParameter.
        """
        question = Question(
            data,
            limit,
            search_params=search_params,
            output_fields=output_fields,
            strength=strength,
            profile=profile,
            rerank=rerank,
            candidates=candidates,
            with_raw_score=with_raw_score,
        )
        options = {"timeout": timeout, "partition_names": partition_names, "anns_field": anns_field, "ranker": ranker}
        options |= {"function_chains": function_chains, "search_aggregation": search_aggregation, **kwargs}
        if highlighter is not None:
            options["highlighter"] = highlighter
        return self._run(self._operations.searches.search(collection_name, question, filter, options, ids=ids))

    def match(
        self,
        collection_name: str,
        queries: Any,
        limit: int = 10,
        filter: str = "",
        search_params: dict[str, Any] | None = None,
        timeout: float | None = None,
        partition_names: list[str] | None = None,
        anns_field: str | None = None,
        *,
        candidates: int = 200,
        with_bank: bool = False,
        one_to_one: bool = False,
        folder: str | Path | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Match a batch of queries with rows: each row gets a bias that balances the queries against all rows.

        queries: (m, d). candidates: rows that the index finds for each query, by raw score. with_bank: the stored bank
        joins the queries, which helps if these ask for some of the rows only. one_to_one: each row goes to at most one
        query, and limit has no effect. folder: for parts, from which an interrupted call with the same arguments
        continues. progress: called with the step, and the done and total numbers. Returns `Matches`. Raises
        MissingExtra without milvus-hubness[jobs], UnreadableFile for parts that cannot be used, and as `search` does.
        """
        from milvus_hubness.client.matching import match

        search = {"search_params": search_params, "timeout": timeout, "partition_names": partition_names, **kwargs}
        operation = match(
            self._operations, collection_name, queries, limit, filter, {**search, "anns_field": anns_field},
            candidates=candidates, with_bank=with_bank, one_to_one=one_to_one,
            folder=Path(folder) if folder else None, progress=progress,
        )  # fmt: skip
        return self._run(operation)

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
        """Query as pymilvus does."""
        options = {"output_fields": output_fields, "timeout": timeout, "partition_names": partition_names, **kwargs}
        return self._run(self._operations.reads.read(Ask("query", (collection_name, filter), {"ids": ids, **options})))

    def get(
        self,
        collection_name: str,
        ids: Any,
        output_fields: list[str] | None = None,
        timeout: float | None = None,
        partition_names: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Get rows as pymilvus does."""
        options = {"output_fields": output_fields, "timeout": timeout, "partition_names": partition_names, **kwargs}
        return self._run(self._operations.reads.read(Ask("get", (collection_name, ids), options)))

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
        """Search as pymilvus's hybrid_search does, with corrected scores on corrected fields.

        If the server cannot weigh a corrected field in the user's metric, the client sends the requests one by one and
        merges the answers as Milvus does. Raises UnsupportedOperation if that needs groups, or a ranker other than
        RRFRanker and WeightedRanker.
        """
        options = {"timeout": timeout, "partition_names": partition_names, **kwargs}
        arguments = (collection_name, reqs, ranker, limit, output_fields, options, strength, profile)
        return self._run(self._operations.searches.hybrid_search(*arguments))

    # -- descriptions -----------------------------------------------------------------------------------

    def hubness_state(self, collection_name: str, anns_field: str | None = None) -> Any:
        """Read the CollectionState of a corrected field from the collection.

        anns_field may be None if only one field is corrected. Returns None for any other field that is not corrected.
        """
        return self._run(self._operations.reads.hubness_state(collection_name, anns_field))

    def describe_collection(self, collection_name: str, timeout: float | None = None, **kwargs: Any) -> Any:
        """Describe the collection as pymilvus does, as the user created it."""
        return self._run(self._operations.reads.describe_collection(collection_name, timeout, kwargs))

    def describe_index(self, collection_name: str, index_name: str, timeout: float | None = None, **kwargs: Any) -> Any:
        """Describe an index as pymilvus does, with the user's metric."""
        return self._run(self._operations.reads.describe_index(collection_name, index_name, timeout, kwargs))

    def list_indexes(self, collection_name: str, field_name: str | None = "", **kwargs: Any) -> Any:
        """List indexes as pymilvus does, without that of a hidden vector field."""
        return self._run(self._operations.reads.list_indexes(collection_name, field_name, kwargs))

    def list_aliases(
        self, collection_name: str = "", timeout: float | None = None, *, include_internal: bool = False, **kwargs: Any
    ) -> Any:
        """List aliases as pymilvus does; include_internal lists the aliases that jobs write through, too."""
        call = Ask("list_aliases", (collection_name, timeout), kwargs)
        return self._run(self._operations.catalog.list_aliases(call, include_internal))

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
    ) -> Any:
        """Create a collection as pymilvus does.

        hubness: fields to correct from their first row on. Raises InvalidInput, InvalidParameter,
        DimensionMismatch and BankTooSmall; none of these leaves a collection behind.
        """
        quick_form = (dimension, primary_field_name, id_type, vector_field_name, metric_type, auto_id)
        arguments = dict(zip(QUICK_FORM, quick_form, strict=True))
        arguments |= {"timeout": timeout, "schema": schema, "index_params": index_params, **kwargs}
        return self._run(self._operations.writes.create_collection(collection_name, arguments, hubness))

    def create_index(
        self, collection_name: str, index_params: IndexParams, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Create an index as pymilvus does. Raises InvalidParameter if a corrected field gets another metric."""
        return self._run(self._operations.writes.create_index(collection_name, index_params, timeout, kwargs))

    def load_collection(self, collection_name: str, timeout: float | None = None, **kwargs: Any) -> Any:
        """Load a collection as pymilvus does; load_fields need not name the hidden fields."""
        call = Ask("load_collection", (collection_name, timeout), kwargs)
        return self._run(self._operations.catalog.load(call, timeout))

    def load_partitions(
        self, collection_name: str, partition_names: str | list[str], timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Load partitions as pymilvus does; load_fields need not name the hidden fields."""
        call = Ask("load_partitions", (collection_name, partition_names, timeout), kwargs)
        return self._run(self._operations.catalog.load(call, timeout))

    def drop_collection(self, collection_name: str, timeout: float | None = None, **kwargs: Any) -> Any:
        """Drop a collection as pymilvus does.

        Its bank, its biases and its job records are dropped too. Raises LeaseHeld while a job works on it, and
        UnsupportedOperation while its writes also go to a copy.
        """
        call = Ask("drop_collection", (collection_name, timeout), kwargs)
        return self._run(self._operations.catalog.drop_collection(collection_name, call, timeout))

    def truncate_collection(self, collection_name: str, timeout: float | None = None, **kwargs: Any) -> Any:
        """Truncate a collection as pymilvus does, with its biases.

        Raises as `drop_collection` does, and UnsupportedOperation if an unfinished refresh would restore the rows.
        """
        call = Ask("truncate_collection", (collection_name, timeout), kwargs)
        return self._run(self._operations.catalog.truncate_collection(collection_name, call, timeout))

    def drop_partition(
        self, collection_name: str, partition_name: str, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Drop a partition as pymilvus does. Raises as `truncate_collection` does."""
        call = Ask("drop_partition", (collection_name, partition_name, timeout), kwargs)
        return self._run(self._operations.catalog.drop_partition(collection_name, call, timeout))

    def rename_collection(
        self, old_name: str, new_name: str, target_db: str | None = "", timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Rename a collection as pymilvus does.

        Raises as `truncate_collection` does, and UnsupportedOperation for a corrected collection and another database.
        """
        call = Ask("rename_collection", (old_name, new_name, target_db, timeout), kwargs)
        return self._run(self._operations.catalog.rename_collection(old_name, target_db, call, timeout))

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
        """Restore a snapshot as pymilvus does.

        Raises UnsupportedOperation for a corrected collection if target_db_name is another database, or if its biases
        are in a side collection.
        """
        names = (snapshot_name, source_collection_name, target_collection_name)
        call = Ask("restore_snapshot", (*names, source_db_name, target_db_name, timeout), kwargs)
        database = target_db_name if target_db_name != source_db_name else ""
        return self._run(self._operations.catalog.restore_snapshot(source_collection_name, database, call, timeout))

    def alter_alias(self, collection_name: str, alias: str, timeout: float | None = None, **kwargs: Any) -> Any:
        """Alter an alias as pymilvus does."""
        call = Ask("alter_alias", (collection_name, alias, timeout), kwargs)
        return self._run(self._operations.states.forgetting(call))

    def drop_alias(self, alias: str, timeout: float | None = None, **kwargs: Any) -> Any:
        """Drop an alias as pymilvus does."""
        return self._run(self._operations.states.forgetting(Ask("drop_alias", (alias, timeout), kwargs)))

    @property
    def hubness_samples(self) -> Sampled:
        """Counts of the queries that this client sampled for online banks."""
        from milvus_hubness.client.query_samples import Sampled

        return self._sampler.counts if self._sampler is not None else Sampled(0, 0, 0)
