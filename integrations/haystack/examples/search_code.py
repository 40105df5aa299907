"""Search functions of Python's standard library by their docstrings, before and after correction.

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
from milvus_hubness import Copy, MilvusStore, QueryBank, connect, migrate, plan_correction
from milvus_hubness.extending import DemoPair, demo_pairs

FUNCTIONS, QUESTIONS = 600, 100
COLLECTION, ALIAS = "stdlib_functions", "stdlib_functions_live"
INDEX = {"index_type": "FLAT", "metric_type": "COSINE", "params": {}}


def embedded(texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Return hashed word counts (n, 512), for prose and for code; nothing is trained or
    downloaded."""
    vectorizer = HashingVectorizer(
        n_features=512, tokenizer=DemoPair.words, token_pattern=None, lowercase=False
    )
    return vectorizer.transform(texts).toarray().astype(np.float32)


def answers(retriever: MilvusEmbeddingRetriever, questions: Sequence[DemoPair]) -> list[str]:
    """Return the name of the best function for each question."""
    vectors = embedded([pair.docstring for pair in questions]).tolist()
    return [retriever.run(vector, top_k=1)["documents"][0].meta["name"] for vector in vectors]


def run(uri: str) -> tuple[int, int]:
    """Return the numbers of right answers before and after correction."""
    pairs = list(demo_pairs())
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
    migrate(store, plan_correction(store, COLLECTION, past_questions, Copy(alias=ALIAS)))

    corrected = HubnessDocumentStore(ALIAS, **at)

    questions = functions[:QUESTIONS]
    right = [pair.name for pair in questions]
    before = answers(MilvusEmbeddingRetriever(plain), questions)
    after = answers(HubnessEmbeddingRetriever(corrected), questions)
    print(
        f"{FUNCTIONS} functions, {QUESTIONS} questions, {len(past_questions)} past questions in "
        "the bank"
    )
    counts = [sum(map(str.__eq__, names, right)) for names in (before, after)]
    print(f"right answers: {counts[0]} with Milvus, {counts[1]} with HubnessDocumentStore")
    return counts[0], counts[1]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run(sys.argv[1] if len(sys.argv) > 1 else str(Path(folder, "example.db")))
