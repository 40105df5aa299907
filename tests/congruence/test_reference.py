"""Recall measured by searching Milvus, on real data, against figures computed apart from this package."""

import numpy as np
import pytest
from pymilvus import DataType

from milvus_hubness import NNN, QueryBank, Recipe, migrate, plan_correction
from tests.support.real_data import load_task, needs_real_data, reference

BATCH = 1_000
MANY = 10_000


TIE = 1e-6


def recall_at_1(client, collection, task, **options):
    """R@1 in percent. A tie for the first place counts for the query, as in the reference."""
    right = 0
    for start in range(0, len(task.query), BATCH):
        queries = list(task.query[start : start + BATCH])
        results = client.search(collection, data=queries, limit=3, output_fields=["id"], **options)
        for hits, positive in zip(results, task.positives[start : start + BATCH], strict=True):
            best = hits[0]["distance"]
            right += any(hit["id"] == positive for hit in hits if best - hit["distance"] <= TIE)
    return 100 * right / len(task.query)


@needs_real_data
@pytest.mark.parametrize(
    ("name", "metric"),
    [
        pytest.param("text_video_msrvtt t2v", "IP", marks=pytest.mark.lite_only),
        ("text_video_msrvtt v2t", "IP"),
        pytest.param("caption_translation", "COSINE", marks=pytest.mark.long),
    ],
)
def test_recall_through_milvus_is_the_references_on_real_data(backend, name, metric):
    task, cells = load_task(name), reference()[name]
    client, collection = backend.client(), backend.name()
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=task.gallery.shape[1])
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type=metric)
    client.create_collection(
        collection, schema=schema, index_params=index, consistency_level="Strong"
    )
    items = task.gallery
    rows = [{"id": i, "vector": vector} for i, vector in enumerate(items)]
    for start in range(0, len(rows), 2_000):
        client.insert(collection, rows[start : start + 2_000])
    client.flush(collection)
    store = backend.store()
    plan = plan_correction(
        store,
        collection,
        Recipe(QueryBank(task.bank, groups=np.arange(len(task.bank))), estimator=NNN(32, 0.75)),
    )
    target = migrate(store, plan).target
    corrected = backend.hubness_client(state_ttl=60)
    raw, nnn = cells["raw"][0], cells["nnn k=32 a=.75"][0]
    assert recall_at_1(client, collection, task) == pytest.approx(raw, abs=0.15)
    assert recall_at_1(corrected, target, task) == pytest.approx(nnn, abs=0.15)
    if len(task.query) < MANY:
        assert recall_at_1(corrected, target, task, strength=0) == pytest.approx(raw, abs=0.15)
