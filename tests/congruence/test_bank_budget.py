"""Banks that have no room in a client: what is refused, what is still written, and what helps."""

import numpy as np
import pytest

from milvus_hubness import NNN, BankTooLarge, QueryBank, Recipe, refresh, status
from milvus_hubness.milvus.store.milvus_store import MilvusStore
from tests.support.aliases import aliased
from tests.support.async_clients import opened
from tests.support.born import born
from tests.support.galleries import nnn, not_called, vectors

DIM, ITEMS, BANK = 8, 40, 60
ROOM = 4 * DIM * BANK
"""Bytes of the bank."""


class Large:
    """A collection whose bank has no room in a client, with less than ROOM for banks."""

    def __init__(self, backend, state_ttl=0.0):
        rng = np.random.default_rng(8)
        self.bank, self.new = vectors(rng, BANK, DIM), vectors(rng, 3, DIM)
        self.store, items = backend.store(), vectors(rng, ITEMS, DIM)
        self.name = aliased(self.store, born(backend, items, self.bank, estimator=NNN(4)))
        self.client = backend.hubness_client(bank_budget=ROOM - 1, state_ttl=state_ttl)

    def rows(self):
        return [
            {"id": ITEMS + i, "vector": vector, "group": 0} for i, vector in enumerate(self.new)
        ]

    def assert_biases(self, bank):
        found = self.client.query(self.name, f"id >= {ITEMS}", ["hubness_bias"])
        stored = {row["id"]: row["hubness_bias"] for row in found}
        mean_bias = self.store.info(self.name).state.profile.mean_bias
        wanted = nnn(bank, self.new, "IP", 4, 0.75) - mean_bias
        np.testing.assert_allclose([stored[row["id"]] for row in self.rows()], wanted, atol=2e-5)


@pytest.mark.parametrize("method", ["insert", "upsert"])
def test_a_write_is_refused_before_the_bank_is_read(lite, method, monkeypatch):
    here = Large(lite)
    monkeypatch.setattr(MilvusStore, "load_bank", not_called)
    said = (
        rf"the bank of '{here.name}' has {BANK} queries, {ROOM:,} bytes, and bank_budget is "
        rf'{ROOM - 1:,}: refresh with a sample of the bank, .* bias="pending"'
    )
    with pytest.raises(BankTooLarge, match=said):
        getattr(here.client, method)(here.name, here.rows())
    assert here.client.query(here.name, f"id >= {ITEMS}", ["id"]) == []


async def test_the_same_for_tasks(lite):
    here = Large(lite)
    async with opened(lite, bank_budget=ROOM - 1) as client:
        with pytest.raises(BankTooLarge, match="refresh with a sample of the bank"):
            await client.insert(here.name, here.rows())


def test_rows_can_wait_for_a_refresh(lite):
    here = Large(lite)
    here.client.insert(here.name, here.rows(), bias="pending")
    assert status(here.store, here.name).pending == len(here.new)
    assert refresh(here.store, here.name, force=True).written == ITEMS + len(here.new)
    here.assert_biases(here.bank)


def test_a_sample_of_the_bank_helps_at_once(lite):
    """Also a client that has cached the state with the large bank."""
    here = Large(lite, state_ttl=3_600.0)
    with pytest.raises(BankTooLarge):
        here.client.insert(here.name, here.rows())
    refresh(here.store, here.name, QueryBank(here.bank[::2]), client_ttl=0.0)
    here.client.insert(here.name, here.rows())
    here.assert_biases(here.bank[::2])


def test_the_banks_of_all_profiles_need_room_together(lite):
    here = Large(lite)
    client = lite.hubness_client(bank_budget=ROOM, state_ttl=0.0)
    client.insert(here.name, here.rows())
    refresh(
        here.store, here.name, Recipe(QueryBank(here.bank[:1]), estimator=NNN(1)), profile="image"
    )
    with pytest.raises(BankTooLarge, match=f"{BANK + 1} queries"):
        client.upsert(here.name, here.rows())
