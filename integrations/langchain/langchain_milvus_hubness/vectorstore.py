"""HubnessMilvus: langchain-milvus's vector store with a HubnessClient."""

from functools import cached_property
from typing import Any

from langchain_core.documents import Document
from langchain_milvus import Milvus
from pymilvus import DataType

from milvus_hubness import AsyncHubnessClient, HubnessClient, InvalidInput
from milvus_hubness.extending import RowForm

_VECTORS = tuple(item for item in DataType if item.name.endswith("VECTOR"))


class HubnessMilvus(Milvus):
    """A Milvus store that ranks documents of corrected collections by the corrected score.

    Raises InvalidInput for an existing collection whose rows are not documents, by these names of
    fields, and before it writes documents that the collection cannot hold.
    """

    _form: RowForm | None = None

    @cached_property
    def client(self) -> HubnessClient:
        return HubnessClient(**self._connection_args)

    @cached_property
    def aclient(self) -> AsyncHubnessClient:
        return AsyncHubnessClient(**self._connection_args)

    # -- the schema --------------------------------------------------------------------------------

    def _extract_fields(self) -> None:
        """Read the fields of the collection, before the store creates an index or loads."""
        self.fields = []
        self._form = None
        if not self.client.has_collection(self.collection_name):
            return

        self._form = RowForm.of(self.client.describe_collection(self.collection_name))
        types = {
            self._primary_field: (DataType.VARCHAR, DataType.INT64),
            self._text_field: (DataType.VARCHAR,),
            **dict.fromkeys(self.vector_fields, _VECTORS),
        }
        if self._metadata_field:
            types[self._metadata_field] = (DataType.JSON,)
        dynamic = (self._text_field,) if self.enable_dynamic_field else ()
        self._form.expect_fields(types, dynamic=dynamic)
        super()._extract_fields()

    def _load(self, *args: Any, **kwargs: Any) -> None:
        super()._load(*args, **kwargs)
        # Only a row shows whether texts are in a dynamic field.
        if self._form and (undeclared := self._form.undeclared([self._text_field])):
            first = self.client.query(self.collection_name, output_fields=undeclared, limit=1)
            for row in first:
                self._form.expect_in_row(row, undeclared)

    def _prepare_insert_list(
        self,
        texts: list[str],
        embeddings: list[Any],
        metadatas: list[dict[str, Any]] | None = None,
        ids: list[str] | None = None,
        force_ids: bool = False,
    ) -> list[dict[str, Any]]:
        """Return the rows of documents. Raises InvalidInput for those that cannot be held."""
        rows = super()._prepare_insert_list(texts, embeddings, metadatas, ids, force_ids)
        for i, (row, text) in enumerate(zip(rows, texts, strict=True)):
            if not self._metadata_field:
                self._expect_metadata(row, metadatas[i] if metadatas else {})
            # The metadata of a document that was read holds its key.
            key = ids[i] if ids else row.get(self._primary_field)
            if row[self._text_field] != text or row.get(self._primary_field, key) != key:
                raise InvalidInput(
                    f"the metadata of document {i} has {self._primary_field!r} or "
                    f"{self._text_field!r} of another value, which are fields of collection "
                    f"{self.collection_name!r}: rename it"
                )
        if self._form:
            self._form.expect_rows(rows, by_generated_key=force_ids)
        return rows

    def _expect_metadata(self, row: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Check that no metadata is left out, as langchain-milvus does without a word."""
        for name in metadata:
            if name not in row:
                raise InvalidInput(
                    f"collection {self.collection_name!r} has no field for the metadata {name!r}: "
                    "leave it out, or open a collection with dynamic fields by "
                    "enable_dynamic_field=True"
                )

    # -- reading -----------------------------------------------------------------------------------

    def search_by_metadata(
        self, expr: str, fields: list[str] | None = None, limit: int = 10
    ) -> list[Document]:
        """Return documents that match the expression. Raises MilvusException for a wrong one, for
        which langchain-milvus finds nothing.
        """
        if self.col is None:
            return []
        rows = self.client.query(
            self.collection_name, filter=expr, output_fields=self._shown(fields), limit=limit
        )
        return [self._document(row) for row in rows]

    async def asearch_by_metadata(
        self, expr: str, fields: list[str] | None = None, limit: int = 10
    ) -> list[Document]:
        """As `search_by_metadata`."""
        if self.col is None:
            return []
        rows = await self.aclient.query(
            self.collection_name, filter=expr, output_fields=self._shown(fields), limit=limit
        )
        return [self._document(row) for row in rows]

    def _shown(self, fields: list[str] | None) -> list[str]:
        return list(dict.fromkeys([*(self.fields if fields is None else fields), self._text_field]))

    def _document(self, row: dict[str, Any]) -> Document:
        return Document(page_content=row[self._text_field], metadata=row)
