"""Biases kept right by themselves: one process at a time, nothing worse adopted, live queries taken in."""

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    LeaseHeld,
    LeaseLost,
    Recipe,
    migrate,
    plan_correction,
    refresh,
    status,
)
from milvus_hubness.jobs.common.judgements import Judgements
from milvus_hubness.jobs.common.lease import Lease, forget_leases, holder_of
from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.jobs.store.records import Record
from milvus_hubness.milvus.store.milvus_store import MilvusStore
from tests.support.aliases import aliased
from tests.support.galleries import nnn, plain_collection, single_queries
from tests.support.servers import aliases_of

DIM, ITEMS, K = 16, 220, 8


def unit(rows):
    return np.float32(rows / np.linalg.norm(rows, axis=1)[:, None])


class Kept:
    """A gallery that leans to one side and queries that lean to it, corrected for queries of all sides."""

    def __init__(self, backend):
        rng = np.random.default_rng(4)
        lean = unit(rng.normal(size=(1, DIM)))
        self.items = unit(
            unit(rng.normal(size=(ITEMS, DIM))) + rng.uniform(0, 1.5, (ITEMS, 1)) * lean
        )
        self.queries = unit(unit(rng.normal(size=(1_000, DIM))) + lean)
        self.others = unit(rng.normal(size=(600, DIM)))
        self.backend, self.store = backend, backend.store()
        source = backend.name("kept")
        plain_collection(backend.client(), source, self.items, "IP")
        plan = plan_correction(
            self.store, source, Recipe(single_queries(self.others), estimator=NNN(K))
        )
        self.collection = migrate(self.store, plan).target
        self.name = aliased(self.store, self.collection)

    @property
    def state(self):
        return self.store.info(self.name).state

    def biases(self):
        """As searches subtract them, and the whole of the vectors beside."""
        batch = self.store.get(self.name, list(range(ITEMS)), "vector")
        return self.state.layout.biases(batch.vectors, self.state.profile.slot), batch.vectors

    def assert_biases(self, bank):
        found, wanted = self.biases()[0], nnn(bank, self.items, "IP", K, 0.75)
        np.testing.assert_allclose(found, wanted - self.state.profile.mean_bias, atol=3e-5)


@pytest.fixture
def kept(backend):
    return Kept(backend)


@pytest.mark.beyond_contract
def test_a_better_bank_is_adopted_and_a_worse_one_is_not(kept):
    done = refresh(kept.store, kept.name, single_queries(kept.queries))
    assert (done.action, done.written, done.skipped, done.epoch) == ("full", ITEMS, 0, 2)
    kept.collection = done.collection
    assert done.excess_answers["new"] < min(done.excess_answers["old"], done.excess_answers["raw"])
    assert 0 < done.overlap < 1
    kept.assert_biases(kept.queries)

    state, (biases, stored) = kept.state, kept.biases()
    refused = refresh(kept.store, kept.name, Recipe(estimator=NNN(K, 20.0)))
    assert (refused.action, refused.written) == ("refused", 0)
    assert "the parameters changed from " in refused.reason
    assert ", but excess answers taken by hubs rise from" in refused.reason
    assert refused.bias_age_seconds > 0
    assert kept.state == state
    np.testing.assert_array_equal(kept.biases()[1], stored)

    judged = Judgements.of(kept.items * 3, list(range(ITEMS)))
    told = refresh(kept.store, kept.name, Recipe(estimator=NNN(K, 20.0)), judgements=judged)
    assert told.action == "refused"
    assert "R@1 falls from" in told.reason
    assert (
        refresh(kept.store, kept.name, Recipe(estimator=NNN(K, 20.0)), force=True).action == "full"
    )
    assert kept.state.profile.estimator["alpha"] == 20.0
    assert np.abs(kept.biases()[0] - biases).max() > 1


@pytest.mark.lite_only
def test_nothing_is_done_while_another_is_at_work(kept):
    kept.backend.hubness_client().insert(
        kept.name, {"id": 900, "vector": kept.items[0], "group": 0}, bias="pending"
    )
    state = kept.state
    with Lease(kept.backend.store(), kept.collection):
        with pytest.raises(LeaseHeld, match=kept.collection):
            refresh(kept.store, kept.name, single_queries(kept.queries))
        assert kept.state == state
        assert status(kept.store, kept.name).pending == 1
    assert refresh(kept.store, kept.name, force=True).written == ITEMS + 1


@pytest.mark.lite_only
def test_who_has_lost_the_lease_writes_nothing_more(kept):
    written = []

    class TakenOver(MilvusStore):
        """After its first rows another process takes the lease, and drops its alias."""

        def upsert(self, collection, *args, **kwargs):
            super().upsert(collection, *args, **kwargs)
            if collection == copy:
                written.append(len(args[0]))
                mine = holder_of(self, copy)
                theirs = mine.model_copy(update={"owner_id": "f" * 32, "token": mine.token + 1})
                group = f"leases/{copy}"
                self.put_records(LEDGER, [Record(theirs.key, group, theirs.model_dump_json())])
                for alias in aliases_of(self.client, copy):
                    self.unfence(alias)

        def chunk_rows(self, source):
            return 100

    copy = f"{kept.collection}_r2"
    biases = kept.biases()[0]
    with pytest.raises(LeaseLost, match="another job has taken over"):
        refresh(TakenOver(kept.backend.client()), kept.name, single_queries(kept.queries))
    assert written == [100]
    np.testing.assert_array_equal(kept.biases()[0], biases)
    with pytest.raises(LeaseHeld):
        refresh(kept.store, kept.name)
    forget_leases(kept.store, copy)
    assert refresh(kept.store, kept.name).action == "full"
    kept.assert_biases(kept.queries)
    assert kept.store.alias_target(kept.name) == copy
