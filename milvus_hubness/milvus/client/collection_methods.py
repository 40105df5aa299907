"""The methods on collections, aliases and indexes that both clients share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pymilvus import CollectionSchema, DataType
from pymilvus.milvus_client.index import IndexParams

from milvus_hubness.clients.steps import Ask
from milvus_hubness.milvus.pymilvus_private import EscapedKeys, database_of

if TYPE_CHECKING:
    from milvus_hubness.milvus.client.new_collections import CorrectionConfig
    from milvus_hubness.milvus.client.operations import Operations


class CollectionMethods(EscapedKeys):
    """Methods on collections; `Methods` has the others."""

    _operations: Operations
    _run: Callable[[Any], Any]

    # -- descriptions ------------------------------------------------------------------------------

    def hubness_state(self, collection_name: str, anns_field: str | None = None) -> Any:
        """Read the CollectionState of a corrected field from the collection.

        anns_field may be None if only one field is corrected. Returns None for any other field that
        is not corrected.
        """
        return self._run(self._operations.reads.hubness_state(collection_name, anns_field))

    def describe_collection(
        self, collection_name: str, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Describe the collection as pymilvus does, as the user created it."""
        return self._run(
            self._operations.reads.describe_collection(collection_name, timeout, kwargs)
        )

    def describe_index(
        self, collection_name: str, index_name: str, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Describe an index as pymilvus does, with the user's metric."""
        return self._run(
            self._operations.reads.describe_index(collection_name, index_name, timeout, kwargs)
        )

    def list_aliases(
        self,
        collection_name: str = "",
        timeout: float | None = None,
        *,
        include_internal: bool = False,
        **kwargs: Any,
    ) -> Any:
        """List aliases as pymilvus does.

        include_internal: list the aliases that jobs write through, too.
        """
        call = Ask("list_aliases", (collection_name, timeout), kwargs)
        return self._run(self._operations.catalog.list_aliases(call, include_internal))

    # -- operations that invalidate the cached state -----------------------------------------------

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
        arguments = {
            "dimension": dimension,
            "primary_field_name": primary_field_name,
            "id_type": id_type,
            "vector_field_name": vector_field_name,
            "metric_type": metric_type,
            "auto_id": auto_id,
            "timeout": timeout,
            "schema": schema,
            "index_params": index_params,
            **kwargs,
        }
        operation = self._operations.writes.create_collection(collection_name, arguments, hubness)
        return self._run(operation)

    def create_index(
        self,
        collection_name: str,
        index_params: IndexParams,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Create an index as pymilvus does.

        Raises InvalidParameter if a corrected field gets another metric.
        """
        return self._run(
            self._operations.writes.create_index(collection_name, index_params, timeout, kwargs)
        )

    def load_collection(
        self, collection_name: str, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Load a collection as pymilvus does; load_fields need not name the hidden fields."""
        call = Ask("load_collection", (collection_name, timeout), kwargs)
        return self._run(self._operations.catalog.load(call, timeout))

    def load_partitions(
        self,
        collection_name: str,
        partition_names: str | list[str],
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load partitions as pymilvus does; load_fields need not name the hidden fields."""
        call = Ask("load_partitions", (collection_name, partition_names, timeout), kwargs)
        return self._run(self._operations.catalog.load(call, timeout))

    def drop_collection(
        self, collection_name: str, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Drop a collection as pymilvus does.

        Its bank, its biases and its job records are dropped too. Raises LeaseHeld while a job works
        on it, and UnsupportedOperation while its writes also go to a copy.
        """
        call = Ask("drop_collection", (collection_name, timeout), kwargs)
        return self._run(self._operations.catalog.drop_collection(collection_name, call, timeout))

    def truncate_collection(
        self, collection_name: str, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Truncate a collection as pymilvus does, with its biases.

        Raises as `drop_collection` does, and UnsupportedOperation if an unfinished refresh would
        restore the rows.
        """
        call = Ask("truncate_collection", (collection_name, timeout), kwargs)
        return self._run(
            self._operations.catalog.truncate_collection(collection_name, call, timeout)
        )

    def drop_partition(
        self, collection_name: str, partition_name: str, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Drop a partition as pymilvus does. Raises as `truncate_collection` does."""
        call = Ask("drop_partition", (collection_name, partition_name, timeout), kwargs)
        return self._run(self._operations.catalog.drop_partition(collection_name, call, timeout))

    def rename_collection(
        self,
        old_name: str,
        new_name: str,
        target_db: str | None = "",
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Rename a collection as pymilvus does.

        Raises as `truncate_collection` does, and UnsupportedOperation for a corrected collection
        and another database.
        """
        call = Ask("rename_collection", (old_name, new_name, target_db, timeout), kwargs)
        database = self._other_database(target_db, "")
        return self._run(
            self._operations.catalog.rename_collection(old_name, new_name, database, call, timeout)
        )

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

        Raises UnsupportedOperation for a corrected collection if target_db_name is another
        database, or if its biases are in a side collection.
        """
        args = (
            snapshot_name,
            source_collection_name,
            target_collection_name,
            source_db_name,
            target_db_name,
            timeout,
        )
        call = Ask("restore_snapshot", args, kwargs)
        database = self._other_database(target_db_name, source_db_name)
        operation = self._operations.catalog.restore_snapshot(
            source_collection_name, target_collection_name, database, call, timeout
        )
        return self._run(operation)

    def _other_database(self, target: str | None, source: str) -> str:
        # An import that a client without such calls does not pay for.
        from milvus_hubness.milvus.client.catalog import other_database

        return other_database(target, source or database_of(self))

    def create_alias(
        self, collection_name: str, alias: str, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Create an alias as pymilvus does."""
        call = Ask("create_alias", (collection_name, alias, timeout), kwargs)
        return self._run(self._operations.states.forgetting(call))

    def alter_alias(
        self, collection_name: str, alias: str, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Alter an alias as pymilvus does."""
        call = Ask("alter_alias", (collection_name, alias, timeout), kwargs)
        return self._run(self._operations.states.forgetting(call))

    def drop_alias(self, alias: str, timeout: float | None = None, **kwargs: Any) -> Any:
        """Drop an alias as pymilvus does."""
        call = Ask("drop_alias", (alias, timeout), kwargs)
        return self._run(self._operations.states.forgetting(call))
