"""HubnessMilvus over corrected collections against langchain-milvus's own Milvus over plain
ones."""

import asyncio
import itertools
import zlib
from dataclasses import dataclass, field

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_milvus import BM25BuiltInFunction, Milvus
from pymilvus import Function, FunctionType

from langchain_milvus_hubness import HubnessMilvus
from milvus_hubness import (
    NNN,
    AsyncHubnessClient,
    Beside,
    Copy,
    HubnessClient,
    MilvusStore,
    QueryBank,
    Recipe,
    connect,
    enable,
    migrate,
    plan_correction,
)

DIM, DOCUMENTS, BANK, K, ALPHA = 24, 60, 40, 8, 0.75
VOCABULARY = [f"word{i}" for i in range(30)]

_numbers = itertools.count()


class Words(Embeddings):
    """Embeds a word as a fixed random direction, and a text as the normalised sum of its words."""

    def embed_query(self, text):
        seeds = [zlib.crc32(word.encode()) for word in text.split()]
        total = sum(np.random.default_rng(seed).normal(size=DIM) for seed in seeds)
        return (total / np.linalg.norm(total)).tolist()

    def embed_documents(self, texts):
        return [self.embed_query(text) for text in texts]


def sentences(seed, count, longest=6):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, longest, count, endpoint=True)
    return [" ".join(rng.choice(VOCABULARY, length)) for length in lengths]


def documents(seed=1, count=DOCUMENTS):
    return [
        Document(text, metadata={"n": i, "author": "o'hara" if i % 3 else 'say "hi"'})
        for i, text in enumerate(sentences(seed, count, longest=40))
    ]


QUERIES = sentences(2, 4)
PAST_QUERIES = sentences(3, BANK)
QUERY = QUERIES[0]
VECTOR = Words().embed_query(QUERY)


@dataclass
class Pair:
    """The same documents in an uncorrected collection, `plain`, and in `corrected`."""

    uri: str
    options: dict
    plain: str = field(default_factory=lambda: f"documents_{next(_numbers)}")

    @property
    def corrected(self):
        return f"{self.plain}_corrected"

    def milvus(self, name=None):
        return Milvus(
            collection_name=name or self.plain, connection_args={"uri": self.uri}, **self.options
        )

    def hubness(self, name=None, **client):
        connection_args = {"uri": self.uri, **client}
        return HubnessMilvus(
            collection_name=name or self.corrected, connection_args=connection_args, **self.options
        )

    def fill(self, store):
        ids = None if self.options.get("auto_id") else [f"key {i}" for i in range(DOCUMENTS)]
        store.add_documents(documents(), ids=ids)

    def correct(self, how):
        store = MilvusStore(connect(self.uri))
        bank = QueryBank(np.array(Words().embed_documents(PAST_QUERIES), np.float32))
        recipe = Recipe(bank, estimator=NNN(K, ALPHA))
        if how == "enabled":
            self.fill(self.milvus(self.corrected))
            enable(store, plan_correction(store, self.corrected, recipe, Beside(), field="vector"))
        else:
            copy = Copy(**{"target" if how == "copied" else "alias": self.corrected})
            migrate(store, plan_correction(store, self.plain, recipe, copy, field="vector"))


def index(metric, index_type="FLAT"):
    return {"index_type": index_type, "metric_type": metric, "params": {}}


@pytest.fixture(scope="session")
def make_pair(uri):
    def make(how="copied", metric="COSINE", **options):
        defaults = {
            "embedding_function": Words(),
            "index_params": index(metric),
            "consistency_level": "Strong",
        }
        pair = Pair(uri, {**defaults, **options})
        pair.fill(pair.milvus())
        pair.correct(how)
        return pair

    return make


@pytest.fixture(scope="session")
def pair(make_pair):
    """For tests that only read."""
    return make_pair()


def call(method, *args, **options):
    return method, args, options


def outcomes(store, calls, how):
    """Return the results of the calls on the store; `how` is sync or async."""
    if how == "sync":
        return [getattr(store, method)(*args, **options) for method, args, options in calls]

    async def run():
        try:
            return [
                await getattr(store, f"a{method}")(*args, **options)
                for method, args, options in calls
            ]
        finally:
            await store.aclient.close()

    return asyncio.run(run())


def assert_same(expected, got):
    for before, after in zip(expected, got, strict=True):
        if isinstance(before, list) and isinstance(before[0], tuple):
            np.testing.assert_allclose(
                [score for _, score in after], [score for _, score in before], atol=1e-5
            )
            before, after = ([document for document, _ in hits] for hits in (before, after))
        assert after == before


READS = [
    *(call("similarity_search_with_score", query, k=7) for query in QUERIES),
    call("similarity_search", QUERY),
    call("similarity_search", QUERY, k=DOCUMENTS, expr='n >= 10 and author == "o\'hara"'),
    call("similarity_search_by_vector", VECTOR, k=3),
    call("similarity_search_with_score_by_vector", VECTOR, k=3, expr="n in [1, 2, 3]"),
    call("similarity_search_with_relevance_scores", QUERY, k=3),
    call("max_marginal_relevance_search", QUERY, k=5, fetch_k=30, lambda_mult=0.3),
    call("max_marginal_relevance_search_by_vector", VECTOR, k=3, fetch_k=9, expr="n < 40"),
    call("search_by_metadata", "n < 5", ["author", "n"]),
    call("get_pks", "n in [3, 5]"),
]


@pytest.mark.parametrize(
    ("corrected", "metric", "options"),
    [
        ("copied", "IP", {}),
        ("copied", "L2", {"auto_id": True}),
        ("behind an alias", "COSINE", {"enable_dynamic_field": True}),
        ("enabled", "COSINE", {"auto_id": True}),
    ],
    ids=str,
)
def test_strength_zero_finds_what_milvus_finds(make_pair, corrected, metric, options):
    pair = make_pair(corrected, metric, **options)
    assert pair.hubness().fields == pair.milvus().fields
    for how in ("sync", "async"):
        assert_same(
            outcomes(pair.milvus(), READS, how), outcomes(pair.hubness(strength=0.0), READS, how)
        )


WRITES = [
    call("add_texts", [QUERY, QUERIES[3]], [{"n": 100, "author": "x"}] * 2, ids=["new 0", "new 1"]),
    call("add_documents", documents(seed=4, count=3), ids=["more 0", "more 1", "more 2"]),
    call("similarity_search_with_score", QUERY, k=5),
    call(
        "upsert",
        ["key 7", "fresh"],
        [Document(text, metadata={"n": 200, "author": "y"}) for text in QUERIES[1:3]],
    ),
    call("similarity_search_with_score", QUERY, k=5),
    call("search_by_metadata", "n == 200", ["n"]),
    call("delete", ["key 7", "new 0"]),
    call("delete", expr="n > 150"),
    call("similarity_search_with_score", QUERY, k=5),
    call("get_pks", "n >= 0"),
]


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("corrected", ["copied", "enabled"])
def test_writes_do_what_they_do_in_milvus(make_pair, corrected, how):
    pair = make_pair(corrected, "L2" if corrected == "copied" else "IP")
    before, after = (
        outcomes(pair.milvus(), WRITES, how),
        outcomes(pair.hubness(strength=0.0), WRITES, how),
    )
    assert sorted(after.pop()) == sorted(before.pop())
    assert_same(before, after)


@pytest.fixture(scope="session")
def dense(make_pair):
    """Collections with a second vector field that is not corrected."""
    indexes = [index("COSINE"), index("IP")]
    return make_pair(
        embedding_function=[Words(), Words()],
        vector_field=["vector", "second"],
        index_params=indexes,
    )


@pytest.fixture(scope="session")
def full_text(make_pair):
    """Collections with BM25 and the corrected field; flushed, because Milvus Lite counts words
    differently before."""
    indexes = [index("COSINE"), index("BM25", "SPARSE_INVERTED_INDEX")]
    pair = make_pair(
        builtin_function=BM25BuiltInFunction(output_field_names="sparse"),
        vector_field=["vector", "sparse"],
        index_params=indexes,
        search_params=[{"metric_type": params["metric_type"], "params": {}} for params in indexes],
    )
    pair.milvus().client.flush(pair.plain)
    return pair


def rerank(**params):
    return {"reranker": Function("both", FunctionType.RERANK, [], params=params)}


RRF = {"ranker_type": "rrf", "ranker_params": {"k": 10}}
WEIGHTED = {"ranker_type": "weighted", "ranker_params": {"weights": [0.7, 0.3]}}


@pytest.mark.parametrize(
    ("which", "ranker"),
    [
        ("dense", RRF),
        ("dense", WEIGHTED),
        ("dense", rerank(reranker="rrf", k=10)),
        ("dense", rerank(reranker="weighted", weights=[0.7, 0.3])),
        ("full_text", RRF),
        ("full_text", WEIGHTED),
    ],
)
def test_hybrid_search_at_strength_zero_is_that_of_milvus(request, which, ranker):
    pair = request.getfixturevalue(which)
    reads = [
        call("similarity_search_with_score", query, fetch_k=30, expr="n < 50", **ranker)
        for query in QUERIES
    ]
    for how in ("sync", "async"):
        assert_same(
            outcomes(pair.milvus(), reads, how), outcomes(pair.hubness(strength=0.0), reads, how)
        )


def oracle(query, texts, metric):
    """Return corrected scores in the user's metric, in float64; the texts may be newer than the
    migration."""

    def similarity(queries, items):
        queries, items = (np.array(Words().embed_documents(texts)) for texts in (queries, items))
        if metric == "L2":
            return -0.5 * ((queries[:, None] - items[None]) ** 2).sum(-1)
        return queries @ items.T

    def bias(items):
        return ALPHA * np.sort(similarity(PAST_QUERIES, items), axis=0)[-K:].mean(axis=0)

    mean_bias = bias([document.page_content for document in documents()]).mean()
    scores = similarity([query], texts)[0] - (bias(texts) - mean_bias)
    return -2 * scores if metric == "L2" else scores


@pytest.mark.parametrize("metric", ["IP", "COSINE", "L2"])
def test_full_strength_is_the_corrected_score_also_of_new_documents(make_pair, metric):
    pair = make_pair(metric=metric)
    texts = [document.page_content for document in documents()]
    for how, fresh in (("sync", sentences(5, 10)), ("async", sentences(6, 10))):
        texts += fresh
        ids = [f"{how} {i}" for i in range(10)]
        added, hits = outcomes(
            pair.hubness(),
            [
                call("add_texts", fresh, [{"n": 0, "author": "x"}] * 10, ids=ids),
                call("similarity_search_with_score", QUERY, k=len(texts)),
            ],
            how,
        )
        assert added == ids
        assert sorted(document.page_content for document, _ in hits) == sorted(texts)
        expected = dict(zip(texts, oracle(QUERY, texts, metric), strict=True))
        scores = [score for _, score in hits]
        np.testing.assert_allclose(
            scores, [expected[document.page_content] for document, _ in hits], atol=1e-5
        )
        assert scores == sorted(scores, reverse=metric != "L2")


def test_strength_is_set_by_call_and_by_client(pair):
    [full, none] = outcomes(
        pair.hubness(),
        [call("similarity_search_with_score", QUERY, strength=w) for w in (1.0, 0.0)],
        "sync",
    )
    assert full != none
    assert pair.hubness().similarity_search_with_score(QUERY) == full
    assert pair.hubness(strength=0.0).similarity_search_with_score(QUERY) == none


@pytest.mark.parametrize("kind", ["similarity", "mmr"])
def test_a_retriever_retrieves_by_the_corrected_score(pair, kind):
    retrieve = {
        "search_type": kind,
        "search_kwargs": {"k": 4, "fetch_k": 12} if kind == "mmr" else {"k": 4},
    }
    corrected = pair.hubness().as_retriever(**retrieve)
    assert asyncio.run(corrected.ainvoke(QUERY)) == corrected.invoke(QUERY)
    plain, uncorrected = (
        store.as_retriever(**retrieve).batch(QUERIES)
        for store in (pair.milvus(), pair.hubness(strength=0.0))
    )
    assert uncorrected == plain
    assert corrected.batch(QUERIES) != plain


def test_a_store_opened_before_the_migration_is_corrected_after_it(pair):
    live = f"{pair.plain}_live"
    connect(pair.uri).create_alias(pair.plain, live)
    store = pair.hubness(live, state_ttl=0.0)
    plain = pair.milvus().similarity_search_with_score(QUERY)
    assert store.similarity_search_with_score(QUERY) == plain
    connect(pair.uri).alter_alias(pair.corrected, live)
    assert store.similarity_search_with_score(QUERY) == pair.hubness().similarity_search_with_score(
        QUERY
    )


def test_an_ordinary_collection_is_as_with_milvus(uri):
    def made(cls):
        name = f"ordinary_{next(_numbers)}"
        store = cls.from_documents(
            documents(),
            Words(),
            collection_name=name,
            connection_args={"uri": uri},
            consistency_level="Strong",
        )
        return outcomes(store, READS[:-1], "sync")

    assert made(HubnessMilvus) == made(Milvus)


def test_it_is_a_milvus_store_with_hubness_clients(pair):
    store = pair.hubness()
    assert isinstance(store, Milvus)
    assert type(store.client) is HubnessClient
    assert type(store.aclient) is AsyncHubnessClient
    assert store.client is store.client
