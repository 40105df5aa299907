"""Biases are computed by an engine that there is, or nothing is written."""

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    InvalidParameter,
    MilvusStore,
    QueryBank,
    Recipe,
    migrate,
    plan_correction,
    refresh,
)
from tests.support.databases import OnMilvus
from tests.support.galleries import plain_collection, vectors
from tests.support.migrated import Corrected

NO_ENGINES = pytest.mark.parametrize("engine", ["server", "cluster", ""])


@NO_ENGINES
def test_a_migration_by_no_engine_writes_nothing(lite, engine):
    client, name = lite.client(), lite.name()
    rng = np.random.default_rng(4)
    plain_collection(client, name, vectors(rng, 50, 16), "IP")
    store, before = MilvusStore(client), set(client.list_collections())
    plan = plan_correction(
        store, name, Recipe(QueryBank.of(vectors(rng, 40, 16)), estimator=NNN(3))
    )
    with pytest.raises(InvalidParameter, match=f"engine is one of local, ray, not '{engine}'"):
        migrate(store, plan, client_ttl=0.0, engine=engine)
    assert set(client.list_collections()) == before


@NO_ENGINES
def test_a_refresh_by_no_engine_changes_nothing(lite, engine):
    here = Corrected(OnMilvus.of(lite))
    before = here.store.info(here.name).state
    with pytest.raises(InvalidParameter, match="engine is"):
        refresh(here.store, here.name, Recipe(estimator=NNN(3)), engine=engine, force=True)
    assert here.store.info(here.name).state == before
