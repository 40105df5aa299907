"""Recall measured by searching Qdrant, on real data, against figures computed apart from this package."""

import numpy as np
import pytest
from qdrant_client import models

from milvus_hubness import NNN, Copy, QueryBank, Recipe, migrate, plan_correction
from tests.support.real_data import load_task, needs_real_data, reference

BATCH, TIE, MANY = 500, 1e-6, 10_000


def recall_at_1(client, collection, task, **options):
    """R@1 in percent. A tie for the first place counts for the query, as in the reference."""
    right = 0
    for start in range(0, len(task.query), BATCH):
        requests = [
            models.QueryRequest(query=query.tolist(), limit=3)
            for query in task.query[start : start + BATCH]
        ]
        answers = client.query_batch_points(collection, requests, **options)
        for answer, positive in zip(answers, task.positives[start : start + BATCH], strict=True):
            best = answer.points[0].score
            right += any(
                point.id == positive for point in answer.points if best - point.score <= TIE
            )
    return 100 * right / len(task.query)


@needs_real_data
@pytest.mark.parametrize(
    ("name", "distance"),
    [
        ("text_video_msrvtt v2t", "Dot"),
        pytest.param("caption_translation", "Cosine", marks=pytest.mark.long),
    ],
)
def test_recall_through_qdrant_is_the_references_on_real_data(backend, name, distance):
    task, cells = load_task(name), reference()[name]
    collection = backend.name()
    config = models.VectorParams(size=task.gallery.shape[1], distance=distance)
    backend.client.create_collection(collection, vectors_config=config)
    backend.client.upload_collection(
        collection, vectors=task.gallery, ids=range(len(task.gallery)), wait=True
    )
    store = backend.store()
    plan = plan_correction(
        store,
        collection,
        Recipe(QueryBank(task.bank, groups=np.arange(len(task.bank))), estimator=NNN(32, 0.75)),
        Copy(alias="live"),
    )
    assert migrate(store, plan).alias == "live"
    client = backend.hubness(state_ttl=60)
    raw, nnn = cells["raw"][0], cells["nnn k=32 a=.75"][0]
    assert recall_at_1(client, "live", task) == pytest.approx(nnn, abs=0.15)
    if len(task.query) < MANY:
        assert recall_at_1(client, "live", task, strength=0) == pytest.approx(raw, abs=0.15)
        assert recall_at_1(backend.client, collection, task) == pytest.approx(raw, abs=0.15)
