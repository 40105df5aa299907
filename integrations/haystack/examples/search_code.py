"""Ask for functions of Python's standard library by what they do, before and after correction.

python search_code.py [FILE.db or http://HOST:PORT]
"""

import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from haystack import Document
from milvus_haystack import MilvusDocumentStore, MilvusEmbeddingRetriever
from sklearn.feature_extraction.text import HashingVectorizer

from haystack_milvus_hubness import HubnessDocumentStore, HubnessEmbeddingRetriever
from milvus_hubness import MilvusStore, QueryBank, connect, migrate, plan_migration
from milvus_hubness.demo.run import Pair, collect, words

FUNCTIONS, QUESTIONS = 600, 100
COLLECTION, ALIAS = "stdlib_functions", "stdlib_functions_live"
INDEX = {"index_type": "FLAT", "metric_type": "COSINE", "params": {}}


def embedded(texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """(n, 512) word counts hashed, of prose and of code alike. It learns and downloads nothing."""
    vectorizer = HashingVectorizer(n_features=512, tokenizer=words, token_pattern=None, lowercase=False)
    return vectorizer.transform(texts).toarray().astype(np.float32)


def answers(retriever: MilvusEmbeddingRetriever, asked: Sequence[Pair]) -> list[str]:
    """The name of the function found first for each question."""
    vectors = embedded([pair.docstring for pair in asked]).tolist()
    return [retriever.run(each, top_k=1)["documents"][0].meta["name"] for each in vectors]


def run(uri: str) -> tuple[int, int]:
    """How many of the questions are answered rightly before and after."""
    pairs = collect()
    random.Random(0).shuffle(pairs)
    functions, others = pairs[:FUNCTIONS], pairs[FUNCTIONS : 3 * FUNCTIONS]

    at = {"connection_args": {"uri": uri}, "index_params": INDEX}
    plain = MilvusDocumentStore(COLLECTION, **at)
    bodies = embedded([pair.body for pair in functions]).tolist()
    plain.write_documents(
        [
            Document(content=pair.body, embedding=vector, meta={"name": pair.name})
            for pair, vector in zip(functions, bodies, strict=True)
        ]
    )
    plain.client.flush(COLLECTION)

    past_questions = QueryBank(embedded([pair.docstring for pair in others]))
    store = MilvusStore(connect(uri))
    migrate(store, plan_migration(store, COLLECTION, past_questions, alias=ALIAS))

    corrected = HubnessDocumentStore(ALIAS, **at)

    asked = functions[:QUESTIONS]
    right = [pair.name for pair in asked]
    before = answers(MilvusEmbeddingRetriever(plain), asked)
    after = answers(HubnessEmbeddingRetriever(corrected), asked)
    print(f"{FUNCTIONS} functions, {QUESTIONS} questions, {len(past_questions)} past questions in the bank")
    rightly = [sum(map(str.__eq__, found, right)) for found in (before, after)]
    print(f"right answers: {rightly[0]} with Milvus, {rightly[1]} with HubnessDocumentStore")
    return rightly[0], rightly[1]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run(sys.argv[1] if len(sys.argv) > 1 else str(Path(folder, "example.db")))
