"""A corrected collection that grows by a new topic, and sampled queries for it."""

import time

import numpy as np

from milvus_hubness import (
    NNN,
    Beside,
    LeaseHeld,
    QueryBank,
    Recipe,
    enable,
    migrate,
    plan_correction,
    refresh,
)
from milvus_hubness.jobs.common.corrections import load_correction
from milvus_hubness.jobs.common.fits import Fit
from milvus_hubness.jobs.common.stored_biases import StoredBiases
from milvus_hubness.jobs.refresh.sampling import start_sampling
from milvus_hubness.jobs.store.ownership import LEDGER, samples_helper
from milvus_hubness.jobs.store.records import SAMPLINGS_PROPERTY, Sample, SamplesOf
from milvus_hubness.milvus.store.banks import put_samples
from tests.support.born import create_corrected
from tests.support.galleries import all_keys, plain_collection, vectors
from tests.support.recipes import as_recipe

DIM, ITEMS, BANK = 12, 240, 300
PATIENCE = 20.0
"""Seconds for a job of the service to end."""
SECONDS_LATER = 60
"""By how much samples are newer than any fit, within what the clock of a client may be ahead."""


class Growing:
    """A corrected collection, a topic that it grows by, and queries for that topic."""

    def __init__(self, database, *, is_created=False, is_beside=False):
        rng = np.random.default_rng(5)
        self.database = database
        self.items, self.bank = vectors(rng, ITEMS, DIM), vectors(rng, BANK, DIM)
        shift = 0.7 * rng.normal(size=DIM).astype(np.float32)
        self.topic, self.queries = vectors(rng, ITEMS, DIM) + shift, vectors(rng, 400, DIM) + shift
        real = np.concatenate([self.queries[300:], vectors(rng, 100, DIM)])
        self.real = QueryBank(real)
        self.rows = dict(enumerate(self.items))
        self.store = database.store()
        self.application = database.application()
        if is_beside:
            self.name = self._enabled()
        else:
            self.name = self._created() if is_created else self._migrated()
            # A refresh moves it to a copy.
            self.store.point_alias(f"{self.name}_live", self.name)
            self.name = f"{self.name}_live"

    def _migrated(self):
        keys = [self.database.key(number) for number in self.rows]
        source = self.database.fill(self.items, "IP", keys=keys)
        plan = plan_correction(self.store, source, Recipe(QueryBank(self.bank), estimator=NNN(8)))
        return migrate(self.store, plan).target

    def _enabled(self):
        name, client = self.database.name(), self.database.database.client
        self.database.made += [f"{name}__bias_a", f"{name}__bias_b"]
        plain_collection(client, name, self.items, "IP")
        plan = plan_correction(
            self.store,
            name,
            Recipe(QueryBank(self.bank), estimator=NNN(8), verdict="skip"),
            Beside(),
        )
        enable(self.store, plan, client_ttl=0)
        return name

    def _created(self):
        """Return the name of a collection that a client has created and filled, and that is noted as
        fitted: in less time than a migration takes."""
        name = self.name = self.database.name()
        create_corrected(self.application, name, self.items, self.bank, "IP")
        self.fit.write_now()
        return name

    @property
    def collection(self):
        """The real name, which changes with each copy."""
        return self.store.info(self.name, counted=False).name

    @property
    def profile(self):
        return self.store.info(self.name).state.profile

    def put(self, rows):
        """Write rows, by their numbers, as an application does."""
        self.rows |= rows
        self.application.upsert(
            self.name,
            [
                {"id": self.database.key(n), "vector": row, "group": 1, "note": ""}
                for n, row in rows.items()
            ],
        )

    def delete(self, numbers):
        for number in numbers:
            del self.rows[number]
        self.application.delete(self.name, [self.database.key(number) for number in numbers])

    def grow(self, count, first=0):
        new = range(first, first + count)
        self.put({ITEMS + n: self.topic[n] for n in new})

    def _start_sampling(self):
        """As an operator does, who waits for a job of the service to end."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                start_sampling(self.store, self.name, rate=1e-9)
                return
            except LeaseHeld:
                if time.monotonic() > until:
                    raise
            time.sleep(0.1)

    def sample(self, count, at=None, queries=None):
        """Have clients sample so many queries, half of them for the new topic, or these."""
        self._start_sampling()
        half = count // 2
        asked = np.concatenate([self.queries[:half], vectors(np.random.default_rng(9), half, DIM)])
        asked = asked if queries is None else queries
        helper = samples_helper(f"{self.collection}__query_samples_vector", SAMPLINGS_PROPERTY)
        where = SamplesOf(helper, self.store.info(self.name, counted=False).collection_id)
        at = int(time.time()) + SECONDS_LATER if at is None else at
        samples = [Sample(n, n, at, query) for n, query in enumerate(asked)]
        put_samples(self.store.client, where, samples, 10)

    def refresh(self, share=0.2, **options):
        """Refresh, with real queries of today for the evaluation."""
        options = {"queries": self.real, "refit": share, **options}
        return refresh(self.store, self.name, client_ttl=0, **as_recipe(**options))

    def share(self):
        return self.refresh(plan=True).unfitted_share

    def notes(self):
        """The groups of the ledger's notes of fits."""
        return len(self.store.records(LEDGER, self.fit.group))

    @property
    def fit(self):
        info = self.store.info(self.name)
        return Fit(self.store, info, info.state)

    def assert_stored(self, name=None):
        """All rows hold the bias of the bank in use."""
        info = self.store.info(name or self.name)
        keys = [self.database.key(number) for number in self.rows]
        rows = StoredBiases(self.store, info, info.state).read(keys, None)
        assert len(rows.batch) == len(keys) == info.rows
        correction = load_correction(self.store, info.state, info.state.profile)
        stored = rows.biases[:, info.state.profile.slot]
        np.testing.assert_allclose(stored, correction.centred(rows.vectors), atol=3e-5)

    def assert_biases(self):
        """All rows rank by the biases of the bank in use."""
        state = self.store.info(self.name).state
        queries = vectors(np.random.default_rng(1), 1, DIM)
        found = self.database.scores(self.name, queries[0], len(self.rows))
        numbers = list(self.rows)
        rows = np.array([self.rows[n] for n in numbers])
        biases = load_correction(self.store, state, state.profile).centred(rows)
        wanted = queries @ rows.T - biases
        assert len(found) == len(all_keys(self.store, self.name)) == len(numbers)
        scores = [found[self.database.key(n)] for n in numbers]
        np.testing.assert_allclose(scores, wanted[0], atol=3e-5)
