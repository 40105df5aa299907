"""Search functions of Python's standard library by their docstrings, before and after correction.

python search_code.py [folder of the local mode, or http://HOST:PORT]
"""

import random
import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from qdrant_client import QdrantClient, models
from sklearn.feature_extraction.text import HashingVectorizer

from milvus_hubness import Copy, QueryBank, migrate, plan_correction
from milvus_hubness.extending import DemoPair, demo_pairs
from qdrant_hubness import HubnessQdrantClient, QdrantStore, connect

FUNCTIONS, QUESTIONS = 600, 200
COLLECTION, ALIAS = "stdlib_functions", "stdlib_functions_live"


def embedded(texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Return hashed word counts (n, 512), for prose and for code; nothing is trained or
    downloaded."""
    vectorizer = HashingVectorizer(
        n_features=512, tokenizer=DemoPair.words, token_pattern=None, lowercase=False
    )
    return vectorizer.transform(texts).toarray().astype(np.float32)


def answers(client: QdrantClient, collection: str, questions: Sequence[DemoPair]) -> list[str]:
    """Return the name of the best function for each question."""
    vectors = embedded([pair.docstring for pair in questions]).tolist()
    requests = [models.QueryRequest(query=vector, limit=1, with_payload=True) for vector in vectors]
    return [
        answer.points[0].payload["name"]
        for answer in client.query_batch_points(collection, requests)
    ]


def run(uri: str) -> tuple[int, int]:
    """Return the numbers of right answers before and after correction."""
    pairs = list(demo_pairs())
    random.Random(0).shuffle(pairs)
    functions, others = pairs[:FUNCTIONS], pairs[FUNCTIONS : 3 * FUNCTIONS]

    plain = connect(uri, create=True)
    config = models.VectorParams(size=512, distance=models.Distance.COSINE)
    plain.create_collection(COLLECTION, vectors_config=config)
    bodies = embedded([pair.body for pair in functions])
    plain.upload_collection(
        COLLECTION, bodies, [{"name": pair.name} for pair in functions], wait=True
    )

    past_questions = QueryBank(embedded([pair.docstring for pair in others]))
    store = QdrantStore(plain)
    migrate(store, plan_correction(store, COLLECTION, past_questions, Copy(alias=ALIAS)))

    corrected = HubnessQdrantClient(client=plain)

    questions = functions[:QUESTIONS]
    right = [pair.name for pair in questions]
    before, after = answers(plain, COLLECTION, questions), answers(corrected, ALIAS, questions)
    repaired = next(i for i, name in enumerate(right) if before[i] != name == after[i])
    print(
        f"{FUNCTIONS} functions, {QUESTIONS} questions, {len(past_questions)} past questions in "
        "the bank"
    )
    print(f"question             {questions[repaired].docstring.splitlines()[0]}")
    print(f"QdrantClient         {before[repaired]}")
    print(f"HubnessQdrantClient  {after[repaired]}")
    counts = [sum(map(str.__eq__, names, right)) for names in (before, after)]
    print(f"right answers: {counts[0]} with QdrantClient, {counts[1]} with HubnessQdrantClient")
    return counts[0], counts[1]


if __name__ == "__main__":
    run(sys.argv[1] if len(sys.argv) > 1 else ":memory:")
