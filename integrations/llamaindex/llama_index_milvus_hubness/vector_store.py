"""HubnessVectorStore: a LlamaIndex vector store on Milvus with a HubnessClient."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores import MetadataFilters, VectorStoreQuery, VectorStoreQueryResult
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQueryMode
from pymilvus import DataType

from llama_index_milvus_hubness.filters import Keys, expression, literal, one_of
from llama_index_milvus_hubness.rows import (
    DOCUMENT,
    ID,
    MARKS,
    NODE_TYPE,
    OWN_OBJECTS,
    TEXT,
    VECTOR,
    OwnRows,
    Rows,
    rows_of,
)
from milvus_hubness import (
    AsyncHubnessClient,
    CorrectionConfig,
    DimensionMismatch,
    HubnessClient,
    InvalidInput,
)
from milvus_hubness.extending import STATE_TTL, RowForm

EVERYTHING = f'{ID} != ""'
PAGE = 500


class HubnessVectorStore(BasePydanticVectorStore):
    """A vector store in a Milvus collection; nodes of a corrected collection are ranked by the
    corrected score.

    collection_name: the first `add` creates a missing collection; one that LlamaIndex's
    MilvusVectorStore created is read and written in its form, and all methods raise InvalidInput for
    others. uri, token, db_name: see
    HubnessClient. hubness: the correction of a new collection. metric (COSINE, IP, L2), index_type,
    index_params: the index of a new collection. strength: w of every query, None for that of the
    collection. state_ttl: TTL of the cached collection state, in seconds. mmr_prefetch: MMR chooses
    among this many times as many candidates as it returns.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)
    stores_text: bool = True
    collection_name: str = "llama_index"
    uri: str = "http://localhost:19530"
    token: str = Field(default="", exclude=True, repr=False)
    db_name: str = ""
    hubness: CorrectionConfig | None = Field(default=None, exclude=True)
    metric: str = "COSINE"
    index_type: str = "AUTOINDEX"
    index_params: dict[str, Any] = Field(default_factory=dict)
    consistency_level: str = "Session"
    strength: float | None = None
    state_ttl: float = STATE_TTL
    mmr_prefetch: int = 4
    _client: HubnessClient = PrivateAttr()
    _aclient: AsyncHubnessClient | None = PrivateAttr(default=None)
    _rows: Rows | None = PrivateAttr(default=None)
    _sign: int | None = PrivateAttr(default=None)
    _loop: asyncio.AbstractEventLoop | None = PrivateAttr(default=None)

    def __init__(self, collection_name: str = "llama_index", **options: Any) -> None:
        super().__init__(collection_name=collection_name, **options)
        self._client = HubnessClient(**self._connection())

    def _connection(self) -> dict[str, Any]:
        names = ("uri", "token", "db_name", "strength", "state_ttl")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def class_name(cls) -> str:
        """Return the name by which LlamaIndex saves the store."""
        return "HubnessVectorStore"

    @property
    def client(self) -> HubnessClient:
        """Return the client of all requests."""
        return self._client

    @property
    def aclient(self) -> AsyncHubnessClient:
        """Return the client of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._aclient is None or self._loop is not loop:
            self._aclient = AsyncHubnessClient(**self._connection())
            self._loop = loop
        return self._aclient

    # -- writing -----------------------------------------------------------------------------------

    def add(self, nodes: Sequence[BaseNode], **_: Any) -> list[str]:
        """Insert nodes, or replace those with the same ids; return the ids.

        Before it writes, raises ValueError for a node without an embedding, InvalidInput for nodes
        that the collection cannot hold, and DimensionMismatch for an embedding of another dimension
        than the collection's.
        """
        if not nodes:
            return []
        rows = self._prepare(nodes)
        for page in _pages(nodes):
            self._client.upsert(self.collection_name, [rows.row(node) for node in page])
        return [node.node_id for node in nodes]

    async def async_add(self, nodes: Sequence[BaseNode], **_: Any) -> list[str]:
        """As `add`."""
        if not nodes:
            return []
        rows = await asyncio.to_thread(self._prepare, nodes)
        for page in _pages(nodes):
            await self.aclient.upsert(self.collection_name, [rows.row(node) for node in page])
        return [node.node_id for node in nodes]

    def _prepare(self, nodes: Sequence[BaseNode]) -> Rows:
        """Check the nodes, create a missing collection, and return the form of its rows."""
        bare = [node.node_id for node in nodes if node.embedding is None]
        if bare:
            raise ValueError(
                f"{len(bare)} nodes have no embedding, the first is {bare[0]!r}: compute "
                "embeddings first"
            )
        form = self._form()
        rows = self._rows_of(form) if form else OwnRows()
        width = form.fields[rows.vector]["params"]["dim"] if form else len(nodes[0].get_embedding())
        dim = int(width)
        for node in nodes:
            if len(node.get_embedding()) != dim:
                raise DimensionMismatch(
                    f"the embedding of node {node.node_id!r} has {len(node.get_embedding())} "
                    f"numbers, collection {self.collection_name!r} needs {dim}: use the same "
                    "embedding model"
                )
        if form is None:
            self._create(dim)
        else:
            form.expect_rows(map(rows.row, nodes))
        return rows

    def _form(self) -> RowForm | None:
        """Return the form of the collection; None if it does not exist."""
        if not self._client.has_collection(self.collection_name):
            return None
        return RowForm.of(self._client.describe_collection(self.collection_name))

    def _rows_of(self, form: RowForm) -> Rows:
        """Return how the collection holds nodes. Raises InvalidInput for one of other programs."""
        rows = rows_of(form)
        marks = () if isinstance(rows, OwnRows) else form.undeclared(MARKS)
        if marks:
            first = self._client.query(self.collection_name, output_fields=[*marks], limit=1)
            for row in first:
                form.expect_in_row(row, marks)
        return rows

    def _opened(self) -> Rows | None:
        """Return how the collection holds nodes, read once; None if it does not exist."""
        if self._rows is None and (form := self._form()) is not None:
            self._rows = self._rows_of(form)
        return self._rows

    async def _aopened(self) -> Rows | None:
        return self._rows or await asyncio.to_thread(self._opened)

    def _create(self, dim: int) -> None:
        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field(ID, DataType.VARCHAR, is_primary=True, max_length=512)
        schema.add_field(VECTOR, DataType.FLOAT_VECTOR, dim=dim)
        schema.add_field(TEXT, DataType.VARCHAR, max_length=65_535)
        schema.add_field(DOCUMENT, DataType.VARCHAR, max_length=512)
        schema.add_field(NODE_TYPE, DataType.VARCHAR, max_length=512)
        for name in OWN_OBJECTS:
            schema.add_field(name, DataType.JSON)
        index = self._client.prepare_index_params()
        index.add_index(
            VECTOR, index_type=self.index_type, metric_type=self.metric, params=self.index_params
        )
        self._client.create_collection(
            self.collection_name,
            schema=schema,
            index_params=index,
            hubness=self.hubness,
            consistency_level=self.consistency_level,
        )

    # -- deleting ----------------------------------------------------------------------------------

    def delete(self, ref_doc_id: str, **_: Any) -> None:
        """Delete the nodes of a document."""
        self._delete(lambda _: _of_document(ref_doc_id))

    async def adelete(self, ref_doc_id: str, **_: Any) -> None:
        """As `delete`."""
        await self._adelete(lambda _: _of_document(ref_doc_id))

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **_: Any
    ) -> None:
        """Delete the nodes that have one of the ids and match. Raises ValueError without both."""
        self._delete(lambda keys: _to_delete(keys, node_ids, filters))

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **_: Any
    ) -> None:
        """As `delete_nodes`."""
        await self._adelete(lambda keys: _to_delete(keys, node_ids, filters))

    def clear(self) -> None:
        """Delete every node; the collection and its correction stay."""
        self._delete(lambda _: EVERYTHING)

    async def aclear(self) -> None:
        """As `clear`."""
        await self._adelete(lambda _: EVERYTHING)

    def _delete(self, selection: Callable[[Keys], str]) -> None:
        if rows := self._opened():
            self._client.delete(self.collection_name, filter=selection(rows.keys))

    async def _adelete(self, selection: Callable[[Keys], str]) -> None:
        if rows := await self._aopened():
            await self.aclient.delete(self.collection_name, filter=selection(rows.keys))

    # -- queries -----------------------------------------------------------------------------------

    def get_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Return the nodes that have one of the ids and match, all without either; without their
        embeddings.
        """
        rows = self._opened()
        if rows is None:
            return []
        expr = _expression(rows.keys, filters, node_ids=node_ids) or EVERYTHING
        pages = self._client.query_iterator(
            self.collection_name, filter=expr, output_fields=[*rows.shown], batch_size=PAGE
        )
        nodes: list[BaseNode] = []
        try:
            while page := pages.next():
                nodes += map(rows.node, page)
        finally:
            pages.close()
        return nodes

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """As `get_nodes`, in a thread."""
        return await asyncio.to_thread(self.get_nodes, node_ids, filters)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Return the nodes with the highest corrected scores, as similarities.

        For L2 a similarity is the negated corrected squared distance. Empty node_ids and doc_ids
        select all nodes. The mode MMR chooses by t·(corrected score) − (1 − t)·(largest cosine to
        the nodes chosen before), with t the mmr_threshold, 0.5 by default. kwargs: of
        HubnessClient.search. Raises ValueError for other modes, and without an embedding.
        """
        _expect_query(query)
        rows = self._searchable()
        if rows is None:
            return VectorStoreQueryResult(nodes=[], similarities=[], ids=[])
        search = self._search(rows, query, kwargs)
        [hits] = self._client.search(self.collection_name, **search)
        return self._result(rows, query, hits)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """As `query`."""
        _expect_query(query)
        rows = self._rows if self._sign else await asyncio.to_thread(self._searchable)
        if rows is None:
            return VectorStoreQueryResult(nodes=[], similarities=[], ids=[])
        search = self._search(rows, query, kwargs)
        [hits] = await self.aclient.search(self.collection_name, **search)
        return self._result(rows, query, hits)

    def _searchable(self) -> Rows | None:
        """Return how the collection holds nodes; None if it does not exist. The first call also
        reads its metric.
        """
        rows = self._opened()
        if rows is not None and self._sign is None:
            names = self._client.list_indexes(self.collection_name, field_name=rows.vector)
            if not names:
                raise InvalidInput(
                    f"field {rows.vector!r} of collection {self.collection_name!r} has no index: "
                    "create one"
                )
            metric = self._client.describe_index(self.collection_name, names[0])["metric_type"]
            self._sign = -1 if metric == "L2" else 1
        return rows

    def _search(
        self, rows: Rows, query: VectorStoreQuery, options: dict[str, Any]
    ) -> dict[str, Any]:
        diverse = query.mode == VectorStoreQueryMode.MMR
        selected = (query.filters, query.node_ids or None, query.doc_ids or None)
        return {
            "data": [query.query_embedding],
            "anns_field": rows.vector,
            "limit": query.similarity_top_k * (self.mmr_prefetch if diverse else 1),
            "filter": _expression(rows.keys, *selected),
            "output_fields": [*rows.shown, rows.vector] if diverse else [*rows.shown],
            **options,
        }

    def _result(
        self, rows: Rows, query: VectorStoreQuery, hits: Sequence[Any]
    ) -> VectorStoreQueryResult:
        scores = [self._sign * float(hit["distance"]) for hit in hits]
        chosen: Iterable[int] = range(len(hits))
        if query.mode == VectorStoreQueryMode.MMR:
            vectors = np.array([hit["entity"][rows.vector] for hit in hits], np.float64)
            share = 0.5 if query.mmr_threshold is None else query.mmr_threshold
            chosen = _diverse(np.array(scores), vectors, query.similarity_top_k, share)
        nodes = [rows.node(hits[i]["entity"]) for i in chosen]
        return VectorStoreQueryResult(
            nodes=nodes,
            similarities=[scores[i] for i in chosen],
            ids=[node.node_id for node in nodes],
        )


def _diverse(scores: np.ndarray, vectors: np.ndarray, count: int, share: float) -> list[int]:
    """Return the indices of the vectors (n, d) that maximal marginal relevance chooses, in its
    order.
    """
    if not len(scores):
        return []
    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    chosen = [int(scores.argmax())]
    while len(chosen) < min(count, len(scores)):
        gain = share * scores - (1 - share) * (units @ units[chosen].T).max(axis=1)
        gain[chosen] = -np.inf
        chosen.append(int(gain.argmax()))
    return chosen


def _expect_query(query: VectorStoreQuery) -> None:
    if query.mode not in (VectorStoreQueryMode.DEFAULT, VectorStoreQueryMode.MMR):
        raise ValueError(
            f"query mode {query.mode.value!r} is not supported: use 'default' or 'mmr'"
        )
    if query.query_embedding is None:
        raise ValueError("the query has no embedding: set query_embedding")


def _to_delete(keys: Keys, node_ids: list[str] | None, filters: MetadataFilters | None) -> str:
    expr = _expression(keys, filters, node_ids=node_ids)
    if not expr:
        raise ValueError("nothing to delete: pass node_ids or filters; clear() deletes all nodes")
    return expr


def _of_document(ref_doc_id: str) -> str:
    return f"{DOCUMENT} == {literal(ref_doc_id)}"


def _expression(
    keys: Keys,
    filters: MetadataFilters | None,
    node_ids: list[str] | None = None,
    doc_ids: list[str] | None = None,
) -> str:
    parts = [expression(filters, keys)] if filters is not None else []
    parts += [one_of(ID, node_ids)] if node_ids is not None else []
    parts += [one_of(DOCUMENT, doc_ids)] if doc_ids is not None else []
    return " and ".join(f"({part})" for part in parts if part)


def _pages(nodes: Sequence[BaseNode]) -> Iterable[Sequence[BaseNode]]:
    return (nodes[i : i + PAGE] for i in range(0, len(nodes), PAGE))
