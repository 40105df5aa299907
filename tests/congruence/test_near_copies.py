"""A log that repeats, on every database: its groups are stored with the bank, kept, and made again."""

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    MigrationOptions,
    QueryBank,
    WithDemand,
    enable,
    migrate,
    plan_enable,
    plan_migration,
    refresh,
)
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.fitted import Correction, grouped
from tests.support.galleries import hubby_gallery

ITEMS, QUERIES, _ = hubby_gallery()
ALONE = MigrationOptions(no_writers=True)
OTHERS = QUERIES[:300]
POPULAR = QUERIES[0]
LOG = np.concatenate([OTHERS, np.repeat(POPULAR[None], 700, axis=0)])
"""One query of 300 is sent 700 times more."""


def stored_bank(store, name):
    return store.load_bank(store.info(name).state.profile.bank)


@pytest.mark.parametrize("estimator", [NNN(8), None], ids=["nnn", "default"])
def test_a_popular_query_counts_once_in_what_is_stored(database, estimator):
    store = database.store()
    source = database.fill(ITEMS, "IP")
    plan = plan_migration(store, source, QueryBank(LOG), estimator=estimator)
    name = migrate(store, plan, ALONE).target

    bank = stored_bank(store, name).queries
    assert len(bank) == len(LOG)
    assert np.bincount(bank.groups).max() >= 701
    assert len(bank.condensed) <= len(OTHERS)

    # Searches give what the formula says of the groups.
    layout = Layout(ITEMS.shape[1], "IP")
    state = store.info(name).state
    expected = Correction.fit(
        layout, estimator or WithDemand(), grouped(layout, QueryBank(LOG), ITEMS), gallery=ITEMS
    ).centred(ITEMS)
    expected -= state.profile.mean_bias
    scores = database.scores(name, POPULAR, 100)
    assert len(scores) == 100
    wanted = ITEMS @ POPULAR - expected
    assert set(scores) == set(np.argsort(-wanted)[:100].tolist())
    for key, score in scores.items():
        assert score == pytest.approx(float(wanted[key]), abs=1e-4)


def test_a_refresh_keeps_the_groups_and_another_bank_gets_its_own(database):
    store = database.store()
    source = database.fill(ITEMS, "IP")
    plan = plan_migration(store, source, QueryBank(LOG), estimator=NNN(8))
    name = migrate(store, plan, ALONE).target
    before = stored_bank(store, name)

    assert refresh(store, name).action == "none"
    assert refresh(store, name, refit=True, force=True).action == "full"
    again = stored_bank(store, name)
    np.testing.assert_array_equal(again.queries.groups, before.queries.groups)

    other = np.concatenate([QUERIES[100:400], np.repeat(QUERIES[100:101], 50, axis=0)])
    assert refresh(store, name, bank=QueryBank(other), force=True).action == "full"
    groups = stored_bank(store, name).queries.groups
    assert len(groups) == len(other)
    assert len(set(groups[300:])) == 1
    assert groups[300] == groups[0]


def test_biases_beside_the_vectors_have_groups_too(database):
    store = database.store()
    source = database.fill(ITEMS, "IP")
    enable(store, plan_enable(store, source, QueryBank(LOG), estimator=NNN(8)))
    bank = stored_bank(store, source).queries
    assert np.bincount(bank.groups).max() >= 701
