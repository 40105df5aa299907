"""Biases by the database's own search over the bank are those that are computed beside it."""

import numpy as np
import pytest

from milvus_hubness import (
    CSLS,
    NNN,
    InvalidParameter,
    MilvusStore,
    QueryBank,
    Sinkhorn,
    migrate,
    plan_migration,
    refresh,
)
from milvus_hubness.correction.fitted import Correction
from tests.congruence.test_refresh import ITEMS, Corrected
from tests.support.databases import OnMilvus
from tests.support.galleries import METRICS, all_keys, plain_collection, vectors

BEYOND_CONTRACT = pytest.mark.beyond_contract


@pytest.mark.parametrize(
    "metric",
    [each if each == "COSINE" else pytest.param(each, marks=BEYOND_CONTRACT) for each in METRICS],
)
def test_the_server_tells_the_biases(backend, monkeypatch, metric):
    here = Corrected(OnMilvus.of(backend), metric)
    asked = []
    real = type(here.store).bank_scores

    def counted(self, reference, rows, k):
        asked.append((len(rows), k))
        return real(self, reference, rows, k)

    monkeypatch.setattr(type(here.store), "bank_scores", counted)
    done = refresh(
        here.store,
        here.name,
        bank=QueryBank(here.other),
        estimator=NNN(6),
        engine="server",
        force=True,
    )
    assert (done.action, done.scanned) == ("full", ITEMS)
    assert sum(rows for rows, _ in asked) == ITEMS
    here.assert_scores(here.other, 6)
    here.make_pending([3, 50])
    asked.clear()
    assert refresh(here.store, here.name, engine="server").written == 2
    assert asked[0] == (2, 6)
    here.assert_scores(here.other, 6)
    refresh(here.store, here.name, estimator=CSLS(4), engine="server", force=True)
    here.assert_scores(here.other, 4, alpha=0.5)


@pytest.mark.beyond_contract
def test_a_migration_has_its_rows_biases_from_the_server(backend, monkeypatch):
    """Those that are computed here, for every row; the copy is verified as any other."""
    rng, client, name = np.random.default_rng(3), backend.client(), backend.name()
    items, queries = vectors(rng, 300, 16), vectors(rng, 60, 16)
    plain_collection(client, name, items, "COSINE")
    store, asked = MilvusStore(client), []
    real = MilvusStore.bank_scores

    def counted(self, reference, rows, k):
        asked.append((len(rows), k))
        return real(self, reference, rows, k)

    monkeypatch.setattr(MilvusStore, "bank_scores", counted)
    bank = QueryBank.of(queries)
    plan = plan_migration(store, name, bank, estimator=NNN(6))
    done = migrate(store, plan, client_ttl=0.0, engine="server")
    assert done.rows == 300
    assert sum(rows for rows, _ in asked) >= 300
    assert {k for _, k in asked} == {6}
    state = store.info(done.target).state
    keys = all_keys(store, done.target)
    stored = store.get(done.target, keys, state.field)
    told = state.layout.biases(stored.vectors, state.profile.slot)
    kept = store.load_bank(state.profile.bank)
    here = Correction.restore(state.layout, NNN(6), kept, state.profile.mean_bias)
    np.testing.assert_allclose(told, here.centred(items[np.array(keys)]), rtol=0, atol=1e-5)


def test_a_migration_that_the_server_cannot_serve_writes_nothing(lite):
    client, name = lite.client(), lite.name()
    rng = np.random.default_rng(4)
    plain_collection(client, name, vectors(rng, 50, 16), "IP")
    store, before = MilvusStore(client), set(client.list_collections())
    plan = plan_migration(store, name, QueryBank.of(vectors(rng, 40, 16)), estimator=Sinkhorn())
    with pytest.raises(InvalidParameter, match="NNN and CSLS"):
        migrate(store, plan, client_ttl=0.0, engine="server")
    assert set(client.list_collections()) == before


def test_what_the_server_cannot_tell(lite):
    here = Corrected(OnMilvus.of(lite))
    with pytest.raises(InvalidParameter, match="NNN and CSLS"):
        refresh(here.store, here.name, estimator=Sinkhorn(), engine="server", force=True)
    with pytest.raises(InvalidParameter, match="engine is"):
        refresh(here.store, here.name, estimator=NNN(3), engine="cluster", force=True)
