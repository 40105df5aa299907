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
from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.schema import TextNode
from sklearn.feature_extraction.text import HashingVectorizer

from llama_index_milvus_hubness import HubnessVectorStore
from milvus_hubness import CorrectionConfig, QueryBank
from milvus_hubness.extending import DemoPair, demo_pairs

FUNCTIONS, QUESTIONS = 600, 100
COLLECTION = "stdlib_functions"


def embedded(texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Return hashed word counts (n, 512), for prose and for code; nothing is trained or
    downloaded."""
    vectorizer = HashingVectorizer(
        n_features=512, tokenizer=DemoPair.words, token_pattern=None, lowercase=False
    )
    return vectorizer.transform(texts).toarray().astype(np.float32)


class HashedWords(BaseEmbedding):
    """`embedded` for LlamaIndex."""

    def _get_text_embedding(self, text: str) -> list[float]:
        return embedded([text])[0].tolist()

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


def answers(store: HubnessVectorStore, questions: Sequence[DemoPair]) -> list[str]:
    """Return the name of the best function for each question."""
    index = VectorStoreIndex.from_vector_store(store, embed_model=HashedWords())
    retriever = index.as_retriever(similarity_top_k=1)
    return [retriever.retrieve(pair.docstring)[0].metadata["name"] for pair in questions]


def run(uri: str) -> tuple[int, int]:
    """Return the numbers of right answers before and after correction."""
    pairs = list(demo_pairs())
    random.Random(0).shuffle(pairs)
    functions, others = pairs[:FUNCTIONS], pairs[FUNCTIONS : 3 * FUNCTIONS]

    past_questions = QueryBank(embedded([pair.docstring for pair in others]))
    at = {"uri": uri, "index_type": "FLAT"}
    corrected = HubnessVectorStore(COLLECTION, hubness=CorrectionConfig(past_questions), **at)
    bodies = embedded([pair.body for pair in functions]).tolist()
    corrected.add(
        [
            TextNode(text=pair.body, metadata={"name": pair.name}, embedding=vector)
            for pair, vector in zip(functions, bodies, strict=True)
        ]
    )
    uncorrected = HubnessVectorStore(COLLECTION, strength=0.0, **at)

    questions = functions[:QUESTIONS]
    right = [pair.name for pair in questions]
    print(
        f"{FUNCTIONS} functions, {QUESTIONS} questions, {len(past_questions)} past questions in "
        "the bank"
    )
    before, after = (
        sum(map(str.__eq__, answers(store, questions), right)) for store in (uncorrected, corrected)
    )
    print(f"right answers: {before} uncorrected, {after} with HubnessVectorStore")
    return before, after


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run(sys.argv[1] if len(sys.argv) > 1 else str(Path(folder, "example.db")))
