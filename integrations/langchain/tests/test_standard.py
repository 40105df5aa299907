"""LangChain's own suite for vector stores, over HubnessMilvus on a corrected collection."""

import uuid

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_milvus import Milvus
from langchain_tests.integration_tests import VectorStoreIntegrationTests

from langchain_milvus_hubness import HubnessMilvus
from milvus_hubness import NNN, MilvusStore, QueryBank, Recipe, connect, migrate, plan_correction


class Conforming(HubnessMilvus):
    """HubnessMilvus with what the suite needs and langchain-milvus 0.4 lacks: documents with ids,
    `get_by_ids`, and an `add_documents` that creates ids and replaces documents of the same ids."""

    def _parse_document(self, data):
        document = super()._parse_document(data)
        return Document(
            document.page_content, id=document.metadata.pop("pk"), metadata=document.metadata
        )

    def add_documents(self, documents, ids=None):
        ids = ids or [document.id or str(uuid.uuid4()) for document in documents]
        self.upsert(ids, documents)
        return ids

    async def aadd_documents(self, documents, ids=None):
        ids = ids or [document.id or str(uuid.uuid4()) for document in documents]
        await self.aupsert(ids, documents)
        return ids

    def get_by_ids(self, ids):
        return [self._parse_document(row) for row in self.client.get(self.collection_name, ids)]

    async def aget_by_ids(self, ids):
        return [
            self._parse_document(row) for row in await self.aclient.get(self.collection_name, ids)
        ]


class TestHubnessMilvus(VectorStoreIntegrationTests):
    @pytest.fixture(scope="class")
    def corrected(self, uri):
        """Return the arguments that open an empty corrected collection."""
        embeddings = self.get_embeddings()
        options = {
            "embedding_function": embeddings,
            "connection_args": {"uri": uri},
            "index_params": {"index_type": "FLAT", "metric_type": "COSINE", "params": {}},
            "consistency_level": "Strong",
            "enable_dynamic_field": True,
        }
        plain = Milvus(collection_name="standard", **options)
        plain.add_texts(["first"], ids=["first"])
        queries = np.array(
            embeddings.embed_documents([f"query {i}" for i in range(40)]), np.float32
        )
        store = MilvusStore(connect(uri))
        plan = plan_correction(store, "standard", Recipe(QueryBank(queries), estimator=NNN(k=8)))
        migrate(store, plan)
        HubnessMilvus(collection_name=plan.body.target, **options).delete(["first"])
        return {"collection_name": plan.body.target, **options}

    @pytest.fixture
    async def vectorstore(self, corrected):
        store = Conforming(**corrected)
        yield store
        store.delete(expr="pk != ''")
        await store.aclient.close()
