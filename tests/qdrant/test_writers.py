"""Nobody who writes or reads through HubnessQdrantClient notices that a migration goes on: the application of
the Milvus suite, asking Qdrant."""

import numpy as np
import pytest
from qdrant_client import models

from tests.crash.writers import DIM, RANGE, STEADY, there_and_back
from tests.galleries import vectors

SECONDS, ROWS_PER_SECOND = 10, 60


class AsMilvus:
    """What the application asks of a HubnessClient, asked of a HubnessQdrantClient."""

    def __init__(self, client):
        self.client = client

    def insert(self, name, rows):
        self.client.upsert(
            name,
            [
                models.PointStruct(
                    id=row["id"],
                    vector=np.asarray(row["vector"]).tolist(),
                    payload={"group": row["group"], "note": row["note"]},
                )
                for row in rows
            ],
        )

    upsert = insert

    def delete(self, name, ids=None, filter=None):
        keys = ids if ids is not None else [int(key) for key in filter.split("[")[1].rstrip("]").split(",")]
        by_ids, by_filter = models.PointIdsList, models.HasIdCondition
        selector = by_ids(points=keys) if ids else models.Filter(must=[by_filter(has_id=keys)])
        self.client.delete(name, selector)

    def search(self, name, data, limit):
        asked = [np.asarray(each).tolist() for each in data]
        return [self.client.query_points(name, each, limit=limit).points for each in asked]

    def get(self, name, ids, output_fields):
        return [{"id": record.id} for record in self.client.retrieve(name, ids)]

    def query(self, name, **_):
        records, rest = self.client.scroll(name, limit=16_384, with_vectors=True)
        assert rest is None
        return [{"id": r.id, "group": r.payload["group"], "vector": r.vector} for r in records]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nothing_is_lost_and_nothing_comes_back(backend):
    items = vectors(np.random.default_rng(5), STEADY + 2 * RANGE, DIM)
    payload = lambda i: {"group": i % 5, "note": f"n{i}"}  # noqa: E731
    name = backend.fill(items, "Dot", keys=lambda i: i, payload=payload)
    store, uses = backend.store(), f"{name}_live"
    store.point_alias(uses, name)
    application = there_and_back(
        store,
        lambda state_ttl: AsMilvus(backend.hubness(state_ttl=state_ttl)),
        items,
        name,
        uses,
        SECONDS,
        rows_per_second=ROWS_PER_SECOND,
    )
    assert application.reads
    assert all(application.written.values())
    assert backend.client.count(uses).count == len(application.reference), "no point is there twice"
