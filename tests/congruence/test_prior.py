"""A prior from a field of the rows or from clicks: stored numbers, renewals, refusals, the way back."""

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    InvalidInput,
    InvalidParameter,
    QueryBank,
    migrate,
    plan_migration,
    refresh,
    rollback,
    status,
)
from milvus_hubness.correction.estimators.base import score_spread
from milvus_hubness.correction.prior import SMOOTHING
from milvus_hubness.jobs.common.bias_backends import BiasBackend
from tests.support.galleries import all_keys, nnn, vectors

DIM, ITEMS, LAMBDA = 12, 100, 0.3

FIELD = "clicks"


class Shop:
    """A collection with clicks, every seventh row without any, and one bank."""

    def __init__(self, database):
        rng = np.random.default_rng(2)
        self.database = database
        self.items, self.bank = vectors(rng, ITEMS, DIM), vectors(rng, 50, DIM)
        self.clicks = rng.zipf(1.6, ITEMS).clip(max=1e6).astype(float)
        self.clicks[::7] = 0
        self.keys = [database.key(i) for i in range(ITEMS)]
        self.source = database.name()
        kind = "int" if all(isinstance(key, int) for key in self.keys) else "other"
        database.make(self.source, DIM, "IP", kind)
        database.put(self.source, [self.row(i) for i in range(ITEMS)])
        self.store = database.store()
        self.name = self.source

    def row(self, number, **changes):
        row = {"id": self.keys[number], "vector": self.items[number], "group": 1, "note": ""}
        # Rows without clicks lack the field.
        if self.clicks[number]:
            row[FIELD] = int(self.clicks[number])
        return {**row, **changes}

    def migrate(self, **options):
        options = {"prior": FIELD, "prior_weight": LAMBDA, **options}
        plan = plan_migration(
            self.store, self.source, QueryBank(self.bank), estimator=NNN(8), **options
        )
        self.name = migrate(self.store, plan).target
        return plan

    @property
    def state(self):
        return self.store.info(self.name).state

    def stored(self, keys=None):
        """The numbers that searches of these rows subtract, by key."""
        info = self.store.info(self.name)
        backend = BiasBackend(self.store, info, info.state)
        keys = all_keys(self.store, self.name) if keys is None else keys
        rows = backend.read(keys, info.partitions[0])
        return dict(zip(rows.batch.keys, rows.biases[:, info.state.profile.slot], strict=True))

    def wanted(self, values, factor=None, added=None):
        """b(r) − λ·log p(r) in float64, centred as the stored numbers are."""
        profile = self.state.profile
        if factor is None:
            factor = LAMBDA * score_spread(QueryBank(self.bank), self.items)
        added = SMOOTHING * values.mean() if added is None else added
        shares = (values + added) / (values + added).sum()
        prior = factor * np.log(shares)
        neutral = nnn(self.bank, self.items, "IP", 8, 0.75) - profile.mean_bias
        return neutral - (prior - prior.mean())

    def assert_stored(self, values, **parameters):
        stored = self.stored()
        wanted = self.wanted(values, **parameters)
        np.testing.assert_allclose([stored[key] for key in self.keys], wanted, atol=2e-5)


@pytest.fixture
def shop(database):
    return Shop(database)


def test_each_row_stores_its_bias_and_its_prior(shop):
    plan = shop.migrate()
    assert plan.to_dict()["prior"]["weight"] == LAMBDA
    shop.assert_stored(shop.clicks)
    prior = status(shop.store, shop.name).prior
    assert (prior["source"], prior["field"], prior["weight"]) == ("field", FIELD, LAMBDA)
    # The ranking is that of the corrected score and the prior.
    query = vectors(np.random.default_rng(9), 1, DIM)
    scores = query[0].astype(float) @ shop.items.T - shop.wanted(shop.clicks)
    found = shop.database.scores(shop.name, query[0], 10)
    assert [shop.keys[i] for i in np.argsort(-scores)[:10]] == list(found)
    np.testing.assert_allclose(list(found.values()), np.sort(scores)[::-1][:10], atol=3e-5)
