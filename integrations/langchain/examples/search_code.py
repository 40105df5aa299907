"""Search functions of Python's standard library by their docstrings, before and after correction.

python search_code.py [FILE.db or http://HOST:PORT]
"""

import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_milvus import Milvus
from sklearn.feature_extraction.text import HashingVectorizer

from langchain_milvus_hubness import HubnessMilvus
from milvus_hubness import Copy, MilvusStore, QueryBank, connect, migrate, plan_correction
from milvus_hubness.extending import DemoPair, demo_pairs

FUNCTIONS, QUESTIONS = 600, 200
COLLECTION, ALIAS = "stdlib_functions", "stdlib_functions_live"
INDEX = {"index_type": "FLAT", "metric_type": "COSINE", "params": {}}


class HashedWords(Embeddings):
    """Word counts hashed into 512 dimensions, for prose and for code; nothing is trained or
    downloaded."""

    def __init__(self) -> None:
        self._vectorizer = HashingVectorizer(
            n_features=512, tokenizer=DemoPair.words, token_pattern=None, lowercase=False
        )

    def embed_documents(self, texts: Sequence[str]) -> list[list[float]]:
        return self._vectorizer.transform(texts).toarray().tolist()

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def answers(store: Milvus, questions: Sequence[DemoPair]) -> list[str]:
    """Return the name of the best function for each question."""
    return [store.similarity_search(pair.docstring, k=1)[0].metadata["name"] for pair in questions]


def run(uri: str) -> tuple[int, int]:
    """Return the numbers of right answers before and after correction."""
    pairs, embeddings = list(demo_pairs()), HashedWords()
    random.Random(0).shuffle(pairs)
    functions, others = pairs[:FUNCTIONS], pairs[FUNCTIONS : 3 * FUNCTIONS]

    plain = Milvus(embeddings, COLLECTION, connection_args={"uri": uri}, index_params=INDEX)
    documents = [Document(pair.body, metadata={"name": pair.name}) for pair in functions]
    plain.add_documents(documents, ids=[str(i) for i in range(FUNCTIONS)])
    plain.client.flush(COLLECTION)

    past_questions = np.array(
        embeddings.embed_documents([pair.docstring for pair in others]), np.float32
    )
    store = MilvusStore(connect(uri))
    migrate(store, plan_correction(store, COLLECTION, QueryBank(past_questions), Copy(alias=ALIAS)))

    corrected = HubnessMilvus(embeddings, ALIAS, connection_args={"uri": uri})

    questions = functions[:QUESTIONS]
    right = [pair.name for pair in questions]
    before, after = answers(plain, questions), answers(corrected, questions)
    repaired = next(i for i, name in enumerate(right) if before[i] != name == after[i])
    print(
        f"{FUNCTIONS} functions, {QUESTIONS} questions, {len(past_questions)} past questions in "
        "the bank"
    )
    print(f"question       {questions[repaired].docstring.splitlines()[0]}")
    print(f"Milvus         {before[repaired]}")
    print(f"HubnessMilvus  {after[repaired]}")
    counts = [sum(map(str.__eq__, names, right)) for names in (before, after)]
    print(f"right answers: {counts[0]} with Milvus, {counts[1]} with HubnessMilvus")
    return counts[0], counts[1]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run(sys.argv[1] if len(sys.argv) > 1 else str(Path(folder, "example.db")))
