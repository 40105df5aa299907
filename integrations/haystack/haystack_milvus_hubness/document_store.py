"""HubnessDocumentStore: milvus-haystack's document store with a HubnessClient."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from haystack import Document
from haystack.document_stores.errors import DuplicateDocumentError
from haystack.document_stores.types import DuplicatePolicy
from haystack.errors import FilterError
from milvus_haystack import MilvusDocumentStore
from milvus_haystack.utils.constant import EmbeddingMode
from pymilvus import DataType, MilvusException

from haystack_milvus_hubness.filters import Fields, expression
from milvus_hubness import HubnessClient, InvalidInput
from milvus_hubness.extending import STATE_TTL, RowForm

PAGE = 1000


class HubnessDocumentStore(MilvusDocumentStore):
    """A MilvusDocumentStore that ranks documents of corrected collections by the corrected score.

    Further arguments: strength, w of every search, None for that of the collection; state_ttl, the
    TTL of the cached collection state, in seconds. Raises InvalidInput for an existing collection
    whose rows are not documents, by these names of fields.
    """

    def __init__(
        self, *args: Any, strength: float | None = None, state_ttl: float = STATE_TTL, **kwargs: Any
    ) -> None:
        self.strength = strength
        self.state_ttl = state_ttl
        self._hubness_client: HubnessClient | None = None
        self._form: RowForm | None = None
        super().__init__(*args, **kwargs)

    @property
    def client(self) -> HubnessClient:
        """Return the client of all requests."""
        if self._hubness_client is None:
            arguments = {
                name: self._resolve_value(value) if name in ("token", "password") else value
                for name, value in self.connection_args.items()
            }
            arguments |= {"strength": self.strength, "state_ttl": self.state_ttl}
            self._hubness_client = HubnessClient(**arguments)
        return self._hubness_client

    # -- the schema --------------------------------------------------------------------------------

    def _extract_fields(self) -> None:
        """Read the fields of the collection, before the store creates an index or loads."""
        self.fields = []
        self._form = None
        if not self._collection_exists:
            return

        self._form = RowForm.of(self.client.describe_collection(self.collection_name))
        types = {
            self._primary_field: (DataType.VARCHAR,),
            self._text_field: (DataType.VARCHAR,),
            self._vector_field: (DataType.FLOAT_VECTOR,),
        }
        if self._sparse_vector_field:
            types[self._sparse_vector_field] = (DataType.SPARSE_FLOAT_VECTOR,)
        dynamic = (self._text_field,) if self.enable_dynamic_field else ()
        self._form.expect_fields(types, dynamic=dynamic)
        self.fields = list(self._form.fields)

    def _load(self, timeout: float | None = None) -> None:
        super()._load(timeout=timeout)
        # Only a row shows whether texts are in a dynamic field.
        if self._form and (undeclared := self._form.undeclared([self._text_field])):
            first = self.client.query(self.collection_name, output_fields=undeclared, limit=1)
            for row in first:
                self._form.expect_in_row(row, undeclared)

    def _expect_documents(self, documents: list[Document]) -> None:
        """Check that the collection can hold the documents. Raises InvalidInput."""
        taken = (self._primary_field, self._text_field, self._vector_field)
        for document in documents:
            for name in document.meta:
                if name in taken or name == self._sparse_vector_field:
                    raise InvalidInput(
                        f"the meta {name!r} of document {document.id!r} has the name of a field of "
                        f"collection {self.collection_name!r}: rename it"
                    )
                if self._form and not self.enable_dynamic_field and name not in self.fields:
                    raise InvalidInput(
                        f"the meta {name!r} of document {document.id!r} has no field in collection "
                        f"{self.collection_name!r}: leave it out, or open a collection with dynamic "
                        "fields by enable_dynamic_field=True"
                    )
        if self._form:
            self._form.expect_rows(map(self._row, documents))

    def _row(self, document: Document) -> dict[str, Any]:
        """Return a document as the row that milvus-haystack writes, with any vectors."""
        row = {
            self._primary_field: document.id,
            self._text_field: document.content or "",
            self._vector_field: document.embedding or (),
            **document.meta,
        }
        if self._sparse_vector_field and self._sparse_mode == EmbeddingMode.EMBEDDING_MODEL:
            row[self._sparse_vector_field] = ()
        return row

    # -- reading -----------------------------------------------------------------------------------

    def filter_documents(self, filters: dict[str, Any] | None = None) -> list[Document]:
        """Return the documents that match, all of them without filters. Raises FilterError."""
        return [self._parse_document(dict(row)) for row in self._rows(self._expression(filters))]

    def count_documents_by_filter(self, filters: dict[str, Any]) -> int:
        """Return the number of documents that match. Raises FilterError."""
        return len(self._ids(self._expression(filters)))

    def _embedding_retrieval(
        self,
        query_embedding: list[float],
        filters: dict[str, Any] | None = None,
        top_k: int = 10,
        query_text: str | None = None,
    ) -> list[Document]:
        if not self._collection_exists:
            return []
        results = self.client.search(
            self.collection_name,
            data=[query_embedding],
            anns_field=self._vector_field,
            search_params=self.search_params,
            limit=top_k,
            filter=self._expression(filters),
            output_fields=self._get_output_fields(),
            partition_names=self.partition_names,
        )
        return self._parse_search_result(results, distance_to_score_fn=self._select_score_fn())

    # -- writing -----------------------------------------------------------------------------------

    def write_documents(
        self, documents: list[Document], policy: DuplicatePolicy = DuplicatePolicy.NONE
    ) -> int:
        """As MilvusDocumentStore.write_documents, with the policies FAIL and SKIP too; return the
        number written.

        Before it writes, raises ValueError for values that are not documents, InvalidInput for
        documents that the collection cannot hold, and DuplicateDocumentError for FAIL.
        """
        if not isinstance(documents, list) or not all(
            isinstance(document, Document) for document in documents
        ):
            raise ValueError("documents is not a list of Document: pass one")
        if policy in (DuplicatePolicy.FAIL, DuplicatePolicy.SKIP):
            documents = self._new_ones(documents, policy)
            policy = DuplicatePolicy.NONE
        self._expect_documents(documents)
        return super().write_documents(self._with_embeddings(documents), policy)

    def _with_embeddings(self, documents: list[Document]) -> list[Document]:
        """Return the documents, with dummy embeddings of the collection's dimension where they have
        none.

        milvus-haystack would use the dimension of the other documents, or 128.
        """
        if not self._collection_exists or all(
            document.embedding is not None for document in documents
        ):
            return documents
        dim = int(self._form.fields[self._vector_field]["params"]["dim"])
        dummy = [self._dummy_value] * dim
        return [
            document if document.embedding is not None else replace(document, embedding=dummy)
            for document in documents
        ]

    def _new_ones(self, documents: list[Document], policy: DuplicatePolicy) -> list[Document]:
        ids = [document.id for document in documents]
        existing = self._existing(list(dict.fromkeys(ids)))
        new: list[Document] = []
        for document in documents:
            if document.id not in existing:
                new.append(document)
            elif policy == DuplicatePolicy.FAIL:
                raise DuplicateDocumentError(
                    f"document {document.id!r} exists, or is in the list twice: use "
                    "DuplicatePolicy.OVERWRITE or SKIP"
                )
            existing.add(document.id)
        return new

    def delete_all_documents(self) -> None:
        """Delete every document; the collection, its bank and its correction stay."""
        self._delete(self._ids(self._expression(None)))

    def delete_by_filter(self, filters: dict[str, Any]) -> int:
        """Delete the documents that match; return how many. Raises FilterError."""
        ids = self._ids(self._expression(filters))
        self._delete(ids)
        return len(ids)

    def update_by_filter(self, filters: dict[str, Any], meta: dict[str, Any]) -> int:
        """Set these fields in the meta of the documents that match; return how many.

        Raises FilterError.
        """
        documents = self.filter_documents(filters)
        changed = [replace(document, meta={**document.meta, **meta}) for document in documents]
        self.write_documents(changed, DuplicatePolicy.OVERWRITE)
        return len(documents)

    # -- helpers -----------------------------------------------------------------------------------

    def _expression(self, filters: dict[str, Any] | None) -> str:
        may_be_dynamic = self._form is None or self._form.is_dynamic
        fields = Fields(self._primary_field, frozenset(self.fields), may_be_dynamic)
        return expression(filters, fields) if filters else fields.all

    def _rows(self, expr: str, fields: list[str] | None = None) -> list[dict[str, Any]]:
        if not self._collection_exists:
            return []
        options = {"output_fields": fields or self._get_output_fields(), "batch_size": PAGE}
        if self.partition_names:
            options["partition_names"] = self.partition_names
        rows: list[dict[str, Any]] = []
        try:
            pages = self.client.query_iterator(self.collection_name, filter=expr, **options)
            while page := pages.next():
                rows += page
            pages.close()
        except MilvusException as error:
            raise FilterError(f"Milvus refused the filter {expr}: {error}") from error
        return rows

    def _ids(self, expr: str) -> list[str]:
        return [row[self._primary_field] for row in self._rows(expr, [self._primary_field])]

    def _existing(self, ids: Sequence[str]) -> set[str]:
        if not self._collection_exists:
            return set()
        pages = [list(ids[i : i + PAGE]) for i in range(0, len(ids), PAGE)]
        rows = [
            self.client.get(self.collection_name, page, output_fields=[self._primary_field])
            for page in pages
        ]
        return {row[self._primary_field] for page in rows for row in page}

    def _delete(self, ids: Sequence[str]) -> None:
        for i in range(0, len(ids), PAGE):
            self.client.delete(self.collection_name, ids=list(ids[i : i + PAGE]))

    def to_dict(self) -> dict[str, Any]:
        """Return the store as a dictionary, as MilvusDocumentStore.to_dict does."""
        result = super().to_dict()
        result["init_parameters"] |= {"strength": self.strength, "state_ttl": self.state_ttl}
        return result
