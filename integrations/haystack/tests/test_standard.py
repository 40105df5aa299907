"""Haystack's own suite for document stores, over HubnessDocumentStore on a corrected collection."""

import numpy as np
import pytest
from haystack import Document
from haystack.document_stores.types import DuplicatePolicy
from haystack.testing import document_store as suite
from milvus_haystack import MilvusDocumentStore

from haystack_milvus_hubness import HubnessDocumentStore
from milvus_hubness import NNN, MilvusStore, QueryBank, Recipe, connect, migrate, plan_correction

DIM = 768  # of the suite's documents
INDEX = {"index_type": "FLAT", "metric_type": "IP", "params": {}}


class TestHubnessDocumentStore(
    suite.DocumentStoreBaseExtendedTests, suite.CountDocumentsByFilterTest
):
    """Without the mixins for the names, extremes and unique values of metadata: they call methods
    that neither milvus-haystack nor the DocumentStore protocol has."""

    @pytest.fixture(scope="class")
    def corrected(self, uri):
        at = {"connection_args": {"uri": uri}, "index_params": INDEX, "consistency_level": "Strong"}
        rng = np.random.default_rng(0)
        plain = MilvusDocumentStore("standard", **at)
        plain.write_documents(
            [Document(id="first", content="first", embedding=rng.random(DIM).tolist())]
        )
        store = MilvusStore(connect(uri))
        bank = QueryBank(rng.random((40, DIM), dtype=np.float32))
        target = migrate(
            store, plan_correction(store, "standard", Recipe(bank, estimator=NNN(k=8)))
        ).target
        HubnessDocumentStore(target, **at).delete_documents(["first"])
        return {"collection_name": target, **at}

    @pytest.fixture
    def document_store(self, corrected):
        store = HubnessDocumentStore(**corrected)
        yield store
        store.delete_all_documents()

    @staticmethod
    def assert_documents_are_equal(received, expected):
        """Milvus returns rows in any order, as float32."""
        by_id = [
            sorted(documents, key=lambda document: document.id)
            for documents in (received, expected)
        ]
        for got, original in zip(*by_id, strict=True):
            assert (got.id, got.content, got.meta) == (original.id, original.content, original.meta)
            if original.embedding is not None:
                assert got.embedding == pytest.approx(original.embedding, abs=1e-6)

    def test_write_documents(self, document_store):
        """With NONE, Milvus inserts new documents."""
        documents = [Document(content=f"test doc {i}") for i in range(2)]
        assert document_store.write_documents(documents) == 2
        self.assert_documents_are_equal(document_store.filter_documents(), documents)

    def test_write_documents_twice_in_one_call(self, document_store):
        twice = [Document(id="1", content="one"), Document(id="1", content="two")]
        with pytest.raises(suite.DuplicateDocumentError, match="'1'"):
            document_store.write_documents(twice, policy=DuplicatePolicy.FAIL)
        assert document_store.count_documents() == 0
        assert document_store.write_documents(twice, policy=DuplicatePolicy.SKIP) == 1
        self.assert_documents_are_equal(document_store.filter_documents(), twice[:1])
