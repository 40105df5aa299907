"""A corrected collection of any database, and the scores that its searches must give."""

import numpy as np

from milvus_hubness import NNN, Copy, QueryBank, Recipe, migrate, plan_correction
from tests.support.born import create_corrected
from tests.support.databases import OnMilvus
from tests.support.galleries import all_keys, as_distance, nnn, similarity, vectors

DIM, ITEMS = 12, 100


class Corrected:
    """A collection of a database that is corrected: on Milvus by the client that created it, on Qdrant by a migration.

    Its name is an alias, which refreshes move. Its items are told by their numbers.
    """

    def __init__(self, database, metric="COSINE", *, is_migrated=False):
        rng = np.random.default_rng(2)
        self.database, self.metric = database, metric
        self.items, self.bank, self.other = (vectors(rng, n, DIM) for n in (ITEMS, 50, 70))
        self.query = vectors(rng, 1, DIM)
        self.numbers = {database.key(i): i for i in range(1_000)}
        self.store = database.store()
        if isinstance(database, OnMilvus) and not is_migrated:
            name = database.name()
            create_corrected(database.application(), name, self.items, self.bank, metric)
            self.name = f"{name}_live"
            self.store.point_alias(self.name, name)
            return
        self.source = database.fill(self.items, metric, keys=self.keys(range(ITEMS)))
        self.name = f"{self.source}_live"
        plan = plan_correction(
            self.store,
            self.source,
            Recipe(QueryBank(self.bank), estimator=NNN(8)),
            Copy(alias=self.name),
        )
        migrate(self.store, plan)

    @property
    def collection(self):
        """The real name, which changes with each copy."""
        return self.store.info(self.name, counted=False).name

    @property
    def state(self):
        return self.store.info(self.name).state

    def keys(self, numbers):
        return [self.database.key(i) for i in numbers]

    def row(self, number, item):
        return {
            "id": self.database.key(number),
            "vector": self.items[item],
            "group": item % 5,
            "note": "",
        }

    def there(self):
        """The numbers of the rows that are there."""
        return {self.numbers[key] for key in all_keys(self.store, self.name)}

    def scores(self, limit=ITEMS):
        found = self.database.scores(self.name, self.query[0], limit)
        return {self.numbers[key]: score for key, score in found.items()}

    def wanted(self, bank, k, alpha=0.75):
        biases = nnn(bank, self.items, self.metric, k, alpha) - self.state.profile.mean_bias
        return as_distance(similarity(self.query, self.items, self.metric) - biases, self.metric)[0]

    def assert_scores(self, bank, k, alpha=0.75):
        found, wanted = self.scores(), self.wanted(bank, k, alpha)
        np.testing.assert_allclose([found[i] for i in range(ITEMS)], wanted, atol=3e-5)

    def banked(self):
        """Queries in the bank collection, of whatever generation."""
        return self.store.count(self.state.profile.bank.collection)

    def add_to_bank(self, vector):
        """Add a query to the bank collection by hand."""
        bank = self.state.profile.bank
        key = self.store._bank_key("added by hand")
        row = {"id": key, "generation": bank.generation, "part": "queries", "number": bank.count}
        self.database.put(bank.collection, [{**row, "source": "", "added_at": 0, "vector": vector}])

    def make_pending(self, numbers):
        state, layout = self.state, self.state.layout
        batch = self.store.get(self.name, self.keys(numbers), state.field)
        batch.vectors[:, layout.slot_columns] = 0
        for row in batch.rows:
            row.update({state.codec.bias_field: 0.0, state.codec.epoch_field: 0})
        self.store.upsert(self.name, batch, state.field)
