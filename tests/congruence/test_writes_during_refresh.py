"""Rows written while a refresh brings other biases beside the vectors get both: they are right before and after the
flip. A refresh by a copy is in test_refresh_by_copy."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from milvus_hubness import (
    CSLS,
    NNN,
    Beside,
    MilvusStore,
    QueryBank,
    Recipe,
    RefreshOptions,
    enable,
    plan_correction,
    refresh,
)
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.codec.beside import SIDE_FIELD
from milvus_hubness.correction.estimators import to_dict
from milvus_hubness.correction.state import OtherGeneration
from milvus_hubness.jobs.common.stored_biases import StoredBiases
from tests.support.aliases import aliased
from tests.support.born import born
from tests.support.databases import write_state
from tests.support.galleries import (
    all_keys,
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
        plan = plan_correction(
            self.store, self.name, Recipe(bank, estimator=NNN(K), verdict="warn"), Beside()
        )
        enable(self.store, plan)

    def rows(self, keys, items=None):
        items = vectors(self.rng, len(keys), DIM) if items is None else items
        return [{"id": key, "vector": v, "group": 1} for key, v in zip(keys, items, strict=True)]

    def announce(self):
        kept = StoredBank(QueryBank(self.new), np.empty((len(self.new), 0), np.float32))
        reference, _ = self.store.save_bank(self.state.profile.bank.collection, kept, self.metric)
        before = self.state.profile
        change = {
            "estimator": to_dict(CSLS(3)),
            "bank": reference,
            "mean_bias": CENTRE,
            "slot": 1 - before.slot,
            "epoch": before.epoch + 1,
        }
        self.coming = before.model_copy(update=change)
        other = OtherGeneration(use="filling", profile=self.coming)
        write_state(self.store, self.name, self.state.model_copy(update={"other": other}))
        return self

    def flip(self):
        other = OtherGeneration(use="former", profile=self.state.profile)
        done = self.state.model_copy(update={"other": other}).with_profile(self.coming)
        write_state(self.store, self.name, done)

    def withdraw(self):
        write_state(self.store, self.name, self.state)
        self.store.drop_bank_generations([self.coming.bank])

    def slots(self, keys):
        """(n, slots) the biases that the side collections hold."""
        held = np.full((len(keys), 2), np.nan)
        for slot, side in enumerate((f"{self.name}__bias_a", f"{self.name}__bias_b")):
            found = self.store.get(side, keys, SIDE_FIELD)
            held[[keys.index(key) for key in found.keys], slot] = found.vectors[:, 0]
        return held

    def biases(self):
        """By key, those of the rows that searches read."""
        info = self.store.info(self.name)
        keys = all_keys(self.store, self.name)
        rows = StoredBiases(self.store, info, info.state).read(keys, None)
        return dict(zip(keys, rows.biases[:, info.state.profile.slot].tolist(), strict=True))

    def refreshed_biases(self, rows, bank=None):
        """(n,) those of a refresh with this bank."""
        items = np.array([row["vector"] for row in rows])
        biases = nnn(self.new if bank is None else bank, items, self.metric, K, 0.75)
        return biases - self.store.info(self.name).state.profile.mean_bias

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
        slot = self.coming.slot
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
    here.store.drop_bank_generations([here.coming.bank])
    assert len(here.store.load_bank(here.coming.bank).queries) == len(here.new)
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
    options = RefreshOptions(recipe=QueryBank(new), force=True, client_ttl=1.0)
    refreshing = ThreadPoolExecutor(1)
    begun = []

    def begin():
        if not begun:
            begun.append(refreshing.submit(refresh, caching.store(), name, options=options))
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


@pytest.mark.parametrize("change", [{"group": 7}, {"note": "x"}], ids=["field", "dynamic field"])
def test_a_partial_update_that_arrives_late_leaves_the_bias_of_a_refresh_beside(
    caching, caching_server, monkeypatch, change
):
    """The same, and the whole refresh comes between: no row has its bias, so none brings a former one back."""
    here = Refreshed(caching, "IP")
    client = caching.hubness_client()
    done = []

    def refresh_between():
        if not done:
            done.append(refresh(here.store, here.name, QueryBank(here.new), force=True))

    monkeypatch.setattr(caching_server, "before_late_write", refresh_between)
    client.upsert(here.name, [{"id": 4, **change}], partial_update=True)
    assert [each.action for each in done] == ["full"]
    [row] = client.query(here.name, ids=[4], output_fields=["*"])
    assert row.items() >= change.items()
    assert here.biases()[4] == pytest.approx(here.refreshed_biases([row])[0], abs=2e-5)


def beside_writers(backend, refreshes):
    """So many refreshes, and beside them two HubnessClients and a plain client, with keys of their own."""
    here = Refreshed(backend, "IP")
    stop, failures, wanted = threading.Event(), [], {}
    stamps = itertools.count()

    def write(number):
        client = backend.client() if number == 2 else backend.hubness_client(state_ttl=0.2)
        rng = np.random.default_rng(number)
        mine = np.arange(number, ITEMS, 3)
        kinds = ["upsert", "delete", "filter"] + ["in part"] * backend.is_lite
        rows = {int(key): (here.items[key].tolist(), None) for key in mine}
        try:
            while not stop.is_set():
                keys = rng.choice(mine, 4, replace=False).tolist()
                kind, note = rng.choice(kinds), f"w{next(stamps)}"
                if kind == "upsert":
                    fresh = vectors(rng, len(keys), DIM).tolist()
                    brought = dict(zip(keys, fresh, strict=True))
                    client.upsert(
                        here.name,
                        [
                            {"id": key, "vector": vector, "group": 1, "note": note}
                            for key, vector in brought.items()
                        ],
                    )
                    rows |= {key: (vector, note) for key, vector in brought.items()}
                elif kind == "in part":
                    there = [key for key in keys if key in rows]
                    change = [{"id": key, "note": note} for key in there]
                    if there:
                        client.upsert(here.name, change, partial_update=True)
                    rows |= {key: (rows[key][0], note) for key in there}
                else:
                    how = {"ids": keys[:2]} if kind == "delete" else {"filter": f"id in {keys[:2]}"}
                    client.delete(here.name, **how)
                    for key in keys[:2]:
                        rows.pop(key, None)
        except BaseException as error:
            failures.append(error)
        wanted.update(rows)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for bank in itertools.islice(itertools.cycle([here.new, here.old]), refreshes):
        refresh(here.store, here.name, QueryBank(bank), force=True, client_ttl=0.4)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not failures, repr([str(each) for each in failures])
    assert next(stamps) > 20, "hardly anything was written"
    options = {"output_fields": ["*"], "limit": 1_000, "consistency_level": "Strong"}
    found = here.plain.query(here.name, filter="", **options)
    assert len(found) == len(wanted)
    held = {row["id"]: (row["vector"], row.get("note")) for row in found}
    assert {key: note for key, (_, note) in held.items()} == {
        key: note for key, (_, note) in wanted.items()
    }
    for key, (vector, _) in held.items():
        np.testing.assert_allclose(vector, wanted[key][0], rtol=1e-6)
    biases = here.biases()
    # A plain client gives its rows no biases: those of vectors that it wrote late are older.
    ours = [row for row in found if row["id"] % 3 != 2]
    expected = here.refreshed_biases(ours, bank)
    np.testing.assert_allclose([biases[row["id"]] for row in ours], expected, atol=3e-4)
    refresh(here.store, here.name, QueryBank(bank), force=True)
    biases = here.biases()
    np.testing.assert_allclose(
        [biases[row["id"]] for row in found], here.refreshed_biases(found, bank), atol=3e-4
    )


def test_writers_of_both_kinds_lose_nothing_beside_refreshes(lite):
    beside_writers(lite, 2)


@pytest.mark.long
def test_writers_of_both_kinds_lose_nothing_for_long(backend):
    beside_writers(backend, 6)
