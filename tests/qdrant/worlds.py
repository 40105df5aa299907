"""Qdrants with collections in them, and what their answers must be."""

import itertools
import uuid
from dataclasses import dataclass, field

import numpy as np
from qdrant_client import QdrantClient, models

from milvus_hubness import NNN, QueryBank, Recipe, migrate, plan_correction
from qdrant_hubness import HubnessQdrantClient, QdrantStore
from tests.support.galleries import nnn, similarity, vectors
from tests.support.servers import own_name

METRICS = {"Cosine": "COSINE", "Dot": "IP", "Euclid": "L2"}
_numbers = itertools.count()


def key(i):
    """Numbers and UUIDs in turn."""
    return i if i % 2 else str(uuid.UUID(int=(i * 2**97 + 77) % 2**128))


@dataclass
class Backend:
    """kind: local; states, the local mode as if it kept no metadata of collections; strict; qdrant-server."""

    kind: str
    client: QdrantClient
    made: list[str] = field(default_factory=list)

    @property
    def is_local(self):
        return self.kind in ("local", "states")

    def store(self, cls=QdrantStore):
        made = cls(self.client)
        made.properties.in_metadata = self.kind != "states"
        return made

    def hubness(self, state_ttl=0.0, **options):
        made = HubnessQdrantClient(client=self.client, state_ttl=state_ttl, **options)
        made._operations._in_metadata = self.kind != "states"
        return made

    def name(self, stem="c"):
        name = own_name(f"{stem}_{next(_numbers)}")
        self.made += [name, f"{name}_hubness", f"{name}__bank"]
        return name

    def fill(self, items, distance="Cosine", *, keys=None, payload=None, **params):
        """A collection of one unnamed vector, and its name."""
        name = self.name()
        config = models.VectorParams(size=items.shape[1], distance=distance, **params)
        self.client.create_collection(name, vectors_config=config)
        made = payload or (lambda i: {"n": i, "group": i % 5, "deep": {"list": [i, None]}})
        points = [
            models.PointStruct(id=(keys or key)(i), vector=vector.tolist(), payload=made(i))
            for i, vector in enumerate(items)
        ]
        self.client.upsert(name, points, wait=True)
        return name

    def clean(self):
        for name in filter(self.client.collection_exists, self.made):
            self.client.delete_collection(name)
        self.made.clear()


class Corrected:
    """A migrated collection and what its scores must be."""

    DIM, ITEMS, K, ALPHA = 12, 200, 8, 0.75

    def __init__(self, backend, distance="Cosine", away=0.0, **options):
        rng, away = np.random.default_rng(2), np.float32(away)
        self.backend, self.distance, self.metric = backend, distance, METRICS[distance]
        self.items, self.bank, self.other = (
            away + vectors(rng, n, self.DIM) for n in (self.ITEMS, 50, 70)
        )
        self.query = away + vectors(rng, 1, self.DIM)[0]
        self.source = backend.fill(self.items, distance, **options)
        self.store = backend.store()
        bank, estimator = QueryBank(self.bank), NNN(self.K, self.ALPHA)
        plan = plan_correction(self.store, self.source, Recipe(bank, estimator=estimator))
        self.name = migrate(self.store, plan).target
        self.keys = [key(i) for i in range(self.ITEMS)]
        self.client = backend.hubness()

    @property
    def state(self):
        return self.store.info(self.name).state

    def scores(self, query=None, **options):
        """By the number of the item, through the client."""
        query = self.query if query is None else query
        found = self.client.query_points(
            self.name, query.tolist(), limit=self.ITEMS + 9, **options
        ).points
        numbers = {key: i for i, key in enumerate(self.keys)}
        return {numbers.get(point.id, point.id): point.score for point in found}

    def wanted(self, bank=None, k=K, alpha=ALPHA, strength=1.0, query=None):
        """(n,) from the definition, in float64."""
        bank = self.bank if bank is None else bank
        query = self.query if query is None else query
        biases = nnn(bank, self.items, self.metric, k, alpha) - self.state.profile.mean_bias
        scores = similarity(query[None], self.items, self.metric)[0] - strength * biases
        return np.sign(-scores) * np.sqrt(np.abs(2 * scores)) if self.metric == "L2" else scores

    def order(self, wanted, among=None):
        """Keys, best first."""
        best = np.argsort(wanted if self.metric == "L2" else -wanted, kind="stable")
        return [self.keys[i] for i in best if among is None or i in among]

    def assert_scores(self, **wanted):
        found, expected = self.scores(), self.wanted(**wanted)
        np.testing.assert_allclose([found[i] for i in range(self.ITEMS)], expected, atol=3e-5)
