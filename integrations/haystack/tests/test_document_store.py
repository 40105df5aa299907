"""HubnessDocumentStore against MilvusDocumentStore on the uncorrected source, and against the
definition."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from haystack import Document, Pipeline
from haystack.document_stores.types import DuplicatePolicy
from milvus_haystack import MilvusDocumentStore, MilvusEmbeddingRetriever

from haystack_milvus_hubness import HubnessDocumentStore, HubnessEmbeddingRetriever
from milvus_hubness import NNN, MilvusStore, QueryBank, Recipe, connect, migrate, plan_correction

DIM, COUNT, K = 8, 80, 8
INDEX = {"index_type": "FLAT", "metric_type": "IP", "params": {}}
_numbers = itertools.count()


def vectors(rng, count):
    shared = rng.normal(size=DIM)
    return (rng.normal(size=(count, DIM)) + np.outer(rng.gamma(1.0, 0.6, count), shared)).astype(
        np.float32
    )


class World:
    def __init__(self, uri):
        rng = np.random.default_rng(0)
        self.items, self.bank, [self.query] = vectors(rng, COUNT), vectors(rng, 40), vectors(rng, 1)
        self.at = {
            "connection_args": {"uri": uri},
            "index_params": INDEX,
            "consistency_level": "Strong",
        }
        name = f"documents_{next(_numbers)}"
        self.plain = MilvusDocumentStore(name, **self.at)
        self.plain.write_documents([self.document(i) for i in range(COUNT)])
        self.plain.client.flush(name)
        store = MilvusStore(connect(uri))
        self.name = migrate(
            store, plan_correction(store, name, Recipe(QueryBank(self.bank), estimator=NNN(K)))
        ).target

    def document(self, i):
        meta = {"group": i % 4}
        return Document(
            id=f"d{i}", content=f"text {i}", embedding=self.items[i].tolist(), meta=meta
        )

    def store(self, **options):
        return HubnessDocumentStore(self.name, **self.at, state_ttl=0.0, **options)

    def order(self, strength=1.0, among=range(COUNT)):
        top = np.sort(self.bank @ self.items.T, axis=0)[-K:].mean(axis=0)
        scores = self.items @ self.query - strength * 0.75 * top
        return [f"d{i}" for i in np.argsort(-scores) if i in among]


@pytest.fixture
def world(uri):
    return World(uri)


def retrieved(retriever, world, **options):
    return [document.id for document in retriever.run(world.query.tolist(), **options)["documents"]]


def test_retrieval_is_ranked_by_the_corrected_score(world):
    retriever = HubnessEmbeddingRetriever(world.store())
    assert retrieved(retriever, world, top_k=15) == world.order()[:15]
    filters = {"field": "meta.group", "operator": "==", "value": 2}
    among = [i for i in range(COUNT) if i % 4 == 2]
    assert retrieved(retriever, world, top_k=7, filters=filters) == world.order(among=among)[:7]
    raw = retrieved(HubnessEmbeddingRetriever(world.store(strength=0)), world, top_k=15)
    assert (
        raw
        == retrieved(MilvusEmbeddingRetriever(world.plain), world, top_k=15)
        == world.order(0.0)[:15]
    )


def test_new_documents_get_a_bias_and_are_returned_unchanged(world):
    store = world.store()
    assert store.count_documents() == COUNT
    fresh = vectors(np.random.default_rng(5), 2)
    world.items = np.vstack([world.items, fresh[:1]])
    world.items[3] = fresh[1]
    store.write_documents([world.document(COUNT)])
    store.write_documents([world.document(3)], policy=DuplicatePolicy.OVERWRITE)
    order = world.order(among=range(COUNT + 1))
    assert retrieved(HubnessEmbeddingRetriever(store), world, top_k=20) == order[:20]
    filters = {"field": "meta.group", "operator": "==", "value": 3}
    [document] = [document for document in store.filter_documents(filters) if document.id == "d3"]
    assert document.embedding == pytest.approx(fresh[1].tolist())
    assert document.meta == {"group": 3}
    store.delete_documents(["d3"])
    assert store.count_documents() == COUNT


def test_a_pipeline_is_saved_and_loaded(world):
    pipeline = Pipeline()
    pipeline.add_component(
        "retriever", HubnessEmbeddingRetriever(world.store(strength=0.5), top_k=4)
    )
    modules = ["haystack_milvus_hubness.retriever", "haystack_milvus_hubness.document_store"]
    again = Pipeline.loads(pipeline.dumps(), allowed_modules=modules)
    answer = again.run({"retriever": {"query_embedding": world.query.tolist()}})
    assert [document.id for document in answer["retriever"]["documents"]] == world.order(0.5)[:4]
    assert again.get_component("retriever").document_store.strength == 0.5


HOSTILE = ["x'] or id not in ['y", 'x"] or id not in ["y', "\\", "it's", 'say "hi"', "a\nb"]


def test_ids_that_look_like_filters_select_only_their_documents(world):
    store = world.store()
    disguised = [replace(world.document(i), id=id) for i, id in enumerate(HOSTILE)]
    for id in HOSTILE:
        store.delete_documents([id])
    assert store.count_documents() == COUNT
    assert store.write_documents(disguised, policy=DuplicatePolicy.SKIP) == len(HOSTILE)
    assert store.write_documents(disguised, policy=DuplicatePolicy.SKIP) == 0
    assert store.write_documents(disguised[:2], policy=DuplicatePolicy.OVERWRITE) == 2
    store.delete_documents(HOSTILE[:1])
    assert store.count_documents() == COUNT + len(HOSTILE) - 1
    assert (
        store.delete_by_filter({"field": "id", "operator": "in", "value": HOSTILE})
        == len(HOSTILE) - 1
    )
    assert store.count_documents() == COUNT
