"""A collection with its biases beside its vectors, and what its searches find, for tests on any database."""

import numpy as np

from milvus_hubness import (
    NNN,
    Beside,
    MigrationOptions,
    QueryBank,
    Recipe,
    enable,
    plan_correction,
    refresh,
    rollback,
)
from tests.support.galleries import nnn, similarity, vectors
from tests.support.recipes import as_recipe

DIM, ITEMS, K, ALPHA = 8, 60, 4, 0.75
AN_HOUR = 3_600.0


class CorrectedBeside:
    """An enabled collection, whose next generation has another bank."""

    def __init__(self, database):
        self.rng = np.random.default_rng(73)
        self.database, self.store = database, database.store()
        self.items = vectors(self.rng, ITEMS, DIM)
        self.keys = [database.key(i) for i in range(ITEMS)]
        self.old, self.new = vectors(self.rng, 30, DIM), vectors(self.rng, 40, DIM)
        self.queries = vectors(self.rng, 3, DIM)
        self.name = database.fill(self.items, "IP", keys=self.keys)
        database.made += [f"{self.name}__bias_a", f"{self.name}__bias_b"]
        plan = plan_correction(
            self.store, self.name, Recipe(QueryBank(self.old), estimator=NNN(K, ALPHA)), Beside()
        )
        enable(self.store, plan, client_ttl=0.0)

    @property
    def state(self):
        return self.store.info(self.name).state

    def refreshed(self, bank=None, **options):
        bank = self.new if bank is None else bank
        return refresh(
            self.store,
            self.name,
            force=True,
            **as_recipe(QueryBank(bank), **{"client_ttl": 0.0, **options}),
        )

    def write(self, number, vector, client=None):
        """A row changes, or is added."""
        client = client or self.database.application()
        key = self.database.key(number)
        client.upsert(self.name, [{"id": key, "vector": vector.tolist(), "group": 1}])
        if number < len(self.items):
            self.items[number] = vector
        else:
            assert number == len(self.items)
            self.items, self.keys = np.vstack([self.items, vector]), [*self.keys, key]

    def assert_found(self, bank, client=None, without=()):
        """Searches have the biases of this bank. without: rows that have none yet."""
        biases = nnn(bank, self.items, "IP", K, ALPHA) - self.state.profile.mean_bias
        biases[list(without)] = 0
        for query in self.queries:
            wanted = similarity(query[None], self.items, "IP")[0] - biases
            found = self.database.scores(self.name, query, 10, client)
            best = np.argsort(-wanted)[:10]
            assert [self.keys[i] for i in best] == list(found)
            np.testing.assert_allclose(list(found.values()), wanted[best], atol=5e-5)


def take_back(beside, **more):
    return rollback(beside.store, beside.name, options=MigrationOptions(client_ttl=0.0), **more)
