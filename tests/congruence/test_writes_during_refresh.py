"""Rows written while a refresh brings other biases beside the vectors get both: they are right before and after the
flip. A refresh by a copy is in test_refresh_by_copy."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from milvus_hubness import (
    CSLS,
    NNN,
    MilvusStore,
    QueryBank,
    RefreshOptions,
    enable,
    plan_enable,
    refresh,
)
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.codec.beside import SIDE_FIELD
from milvus_hubness.correction.estimators import to_dict
from milvus_hubness.correction.state import Incoming
from tests.support.aliases import aliased
from tests.support.born import born
from tests.support.databases import write_state
from tests.support.galleries import (
    as_distance,
    nnn,
    plain_collection,
    similarity,
    vectors,
)

DIM, ITEMS, BANK, K, CENTRE, AN_HOUR = 10, 40, 30, 4, 0.25, 3_600.0


class Refreshed:
    """A corrected collection. `announce` tells of other biases, which `flip` has searches read."""

    def __init__(self, backend, metric="COSINE"):
        rng = np.random.default_rng(29)
        self.rng, self.backend, self.metric = rng, backend, metric
        self.items = vectors(rng, ITEMS, DIM)
        self.old, self.new = vectors(rng, BANK, DIM), vectors(rng, BANK + 7, DIM)
        self.plain, self.store = backend.client(), backend.store()
        self.name = backend.name("incoming")
        self._enable()
        self.state = self.store.info(self.name).state

    def _enable(self):
        self.backend.made += [f"{self.name}__bias_a", f"{self.name}__bias_b"]
        plain_collection(self.plain, self.name, self.items, self.metric)
        bank = QueryBank(self.old)
        plan = plan_enable(self.store, self.name, bank, estimator=NNN(K), verdict="warn")
        enable(self.store, plan)

    def rows(self, keys, items=None):
        items = vectors(self.rng, len(keys), DIM) if items is None else items
        return [{"id": key, "vector": v, "group": 1} for key, v in zip(keys, items, strict=True)]

    def announce(self, name="default"):
        kept = StoredBank(QueryBank(self.new), np.empty((len(self.new), 0), np.float32))
        reference, _ = self.store.save_bank(self.state.profile.bank.collection, kept, self.metric)
        before = self.state.profiles[name]
        change = {
            "estimator": to_dict(CSLS(3)),
            "bank": reference,
            "mean_bias": CENTRE,
            "slot": before.standby,
            "standby": before.slot,
            "epoch": before.epoch + 1,
        }
        self.incoming = Incoming(name=name, profile=before.model_copy(update=change))
        write_state(
            self.store, self.name, self.state.model_copy(update={"incoming": self.incoming})
        )
        return self

    def flip(self):
        done = self.state.with_profile(self.incoming.profile, self.incoming.name)
        write_state(self.store, self.name, done)

    def withdraw(self):
        write_state(self.store, self.name, self.state)
        self.store.drop_bank_generations([self.incoming.profile.bank])

    def slots(self, keys):
        """(n, slots) the biases that the side collections hold."""
        held = np.full((len(keys), 2), np.nan)
        for slot, side in enumerate((f"{self.name}__bias_a", f"{self.name}__bias_b")):
            found = self.store.get(side, keys, SIDE_FIELD)
            held[[keys.index(key) for key in found.keys], slot] = found.vectors[:, 0]
        return held

    def before(self, rows):
        """(n,) the biases that are in use."""
        items = np.array([row["vector"] for row in rows])
        return nnn(self.old, items, self.metric, K, 0.75) - self.state.profile.mean_bias

    def after(self, rows):
        """(n,) those that come."""
        return (
            nnn(self.new, np.array([row["vector"] for row in rows]), self.metric, 3, 0.5) - CENTRE
        )

    def assert_both(self, rows):
        held = self.slots([row["id"] for row in rows])
        slot = self.incoming.profile.slot
        np.testing.assert_allclose(held[:, slot], self.after(rows), atol=3e-4)
        np.testing.assert_allclose(held[:, 1 - slot], self.before(rows), atol=3e-4)


def test_new_rows_get_both_biases(lite):
    here = Refreshed(lite).announce()
    client = lite.hubness_client()
    rows = here.rows([100, 101, 3])
    client.insert(here.name, rows[:2])
    client.upsert(here.name, rows[2])
    here.assert_both(rows)
    change = here.rows([4])
    client.upsert(here.name, [{"id": 4, "vector": change[0]["vector"]}], partial_update=True)
    here.assert_both(change)


def test_whoever_has_not_heard_of_the_flip_writes_what_is_right_after_it(backend):
    here = Refreshed(backend).announce()
    client = backend.hubness_client(state_ttl=AN_HOUR)
    rows = here.rows(range(ITEMS))
    client.upsert(here.name, rows[:20])
    here.flip()
    client.upsert(here.name, rows[20:])
    here.assert_both(rows)
    queries, items = vectors(here.rng, 3, DIM), np.array([row["vector"] for row in rows])
    scores = similarity(queries, items, here.metric) - here.after(rows)
    found = backend.hubness_client().search(here.name, data=list(queries), limit=6)
    for hits, query_scores in zip(found, scores, strict=True):
        order = np.argsort(-query_scores)[:6]
        assert [hit["id"] for hit in hits] == order.tolist()
        np.testing.assert_allclose(
            hits.distances, as_distance(query_scores[order], here.metric), atol=3e-5
        )


def test_a_bank_that_was_read_before_the_flip_is_at_hand_after_it(lite, monkeypatch):
    here, loaded = Refreshed(lite).announce(), []
    load = MilvusStore.load_bank
    monkeypatch.setattr(MilvusStore, "load_bank", lambda *args: loaded.append(args) or load(*args))
    client = lite.hubness_client()
    client.insert(here.name, here.rows([100]))
    assert len(loaded) == 2
    client.insert(here.name, here.rows([101]))
    here.flip()
    client.insert(here.name, here.rows([102]))
    assert len(loaded) == 2


def test_two_banks_that_do_not_fit_together_are_not_read_at_every_write(lite, monkeypatch):
    here, loaded = Refreshed(lite).announce(), []
    load = MilvusStore.load_bank
    monkeypatch.setattr(MilvusStore, "load_bank", lambda *args: loaded.append(args) or load(*args))
    client = lite.hubness_client(bank_budget=4 * DIM * (len(here.new) + 1))
    for key in (100, 101, 102):
        rows = here.rows([key])
        client.insert(here.name, rows)
        here.assert_both(rows)
    assert len(loaded) == 2
    here.flip()
    client.insert(here.name, here.rows([103]))
    assert len(loaded) == 2


def test_a_bank_that_is_to_come_is_kept_and_one_that_was_withdrawn_is_not_missed(lite):
    here = Refreshed(lite).announce()
    here.store.drop_bank_generations([here.incoming.profile.bank])
    assert len(here.store.load_bank(here.incoming.profile.bank).queries) == len(here.new)
    late = lite.hubness_client(state_ttl=AN_HOUR)
    late.get(here.name, [1])
    here.withdraw()
    rows = here.rows([100])
    late.insert(here.name, rows)
    held = here.slots([100])
    np.testing.assert_allclose(held[0, 0], here.before(rows)[0], atol=2e-5)


@pytest.mark.parametrize("change", [{"group": 7}, {"note": "x"}], ids=["field", "dynamic field"])
def test_a_partial_update_that_arrives_late_comes_to_the_copy_of_a_refresh(
    caching, caching_server, monkeypatch, change
):
    """A partial upsert is a read and a write of the whole row by the server, and the refresh begins between."""
    rng = np.random.default_rng(31)
    items, old, new = (vectors(rng, count, DIM) for count in (ITEMS, BANK, BANK + 7))
    store, client = caching.store(), caching.hubness_client()
    collection = born(caching, items, old, "IP", estimator=NNN(K))
    name = aliased(store, collection)
    options = RefreshOptions(bank=QueryBank(new), force=True, client_ttl=1.0)
    refreshing = ThreadPoolExecutor(1)
    begun = []

    def begin():
        if not begun:
            begun.append(refreshing.submit(refresh, caching.store(), name, options))
            # The copy is made, and clients are told of it, which this one does not hear any more.
            while store.info(collection, counted=False).dual_write is None:
                begun[0].exception(0) if begun[0].done() else time.sleep(0.01)

    monkeypatch.setattr(caching_server, "before_late_write", begin)
    client.upsert(name, [{"id": 4, **change}], partial_update=True)
    [done] = begun
    assert done.result().action == "full"
    [row] = client.query(name, ids=[4], output_fields=["*", "hubness_bias"])
    assert row.items() >= change.items()
    state = store.info(name).state
    biases = nnn(new, items, "IP", K, 0.75) - state.profile.mean_bias
    assert row["hubness_bias"] == pytest.approx(biases[4], abs=2e-5)
