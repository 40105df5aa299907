"""Ask for functions of Python's standard library by what they do, before and after correction.

python search_code.py [folder of the local mode, or http://HOST:PORT]
"""

import random
import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from qdrant_client import QdrantClient, models
from sklearn.feature_extraction.text import HashingVectorizer

from milvus_hubness import QueryBank, migrate, plan_migration
from milvus_hubness.demo.run import Pair, collect, words
from qdrant_hubness import HubnessQdrantClient, QdrantStore, connect

FUNCTIONS, QUESTIONS = 600, 200
COLLECTION, ALIAS = "stdlib_functions", "stdlib_functions_live"


def embedded(texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """(n, 512) word counts hashed, of prose and of code alike. It learns and downloads nothing."""
    vectorizer = HashingVectorizer(n_features=512, tokenizer=words, token_pattern=None, lowercase=False)
    return vectorizer.transform(texts).toarray().astype(np.float32)


def answers(client: QdrantClient, collection: str, asked: Sequence[Pair]) -> list[str]:
    """The name of the function found first for each question."""
    vectors = embedded([pair.docstring for pair in asked]).tolist()
    requests = [models.QueryRequest(query=each, limit=1, with_payload=True) for each in vectors]
    return [each.points[0].payload["name"] for each in client.query_batch_points(collection, requests)]


def run(uri: str) -> tuple[int, int]:
    """How many of the questions are answered rightly before and after."""
    pairs = collect()
    random.Random(0).shuffle(pairs)
    functions, others = pairs[:FUNCTIONS], pairs[FUNCTIONS : 3 * FUNCTIONS]

    plain = connect(uri)
    config = models.VectorParams(size=512, distance=models.Distance.COSINE)
    plain.create_collection(COLLECTION, vectors_config=config)
    bodies = embedded([pair.body for pair in functions])
    plain.upload_collection(COLLECTION, bodies, [{"name": pair.name} for pair in functions], wait=True)

    past_questions = QueryBank(embedded([pair.docstring for pair in others]))
    store = QdrantStore(plain)
    migrate(store, plan_migration(store, COLLECTION, past_questions, alias=ALIAS))

    corrected = HubnessQdrantClient(client=plain)

    asked = functions[:QUESTIONS]
    right = [pair.name for pair in asked]
    before, after = answers(plain, COLLECTION, asked), answers(corrected, ALIAS, asked)
    repaired = next(i for i, name in enumerate(right) if before[i] != name == after[i])
    print(f"{FUNCTIONS} functions, {QUESTIONS} questions, {len(past_questions)} past questions in the bank")
    print(f"asked                {asked[repaired].docstring.splitlines()[0]}")
    print(f"QdrantClient         {before[repaired]}")
    print(f"HubnessQdrantClient  {after[repaired]}")
    rightly = [sum(map(str.__eq__, found, right)) for found in (before, after)]
    print(f"right answers: {rightly[0]} with QdrantClient, {rightly[1]} with HubnessQdrantClient")
    return rightly[0], rightly[1]


if __name__ == "__main__":
    run(sys.argv[1] if len(sys.argv) > 1 else ":memory:")
