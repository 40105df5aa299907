"""A log that repeats, on every database: its groups are stored with the bank, kept, and made again."""

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    Beside,
    Copy,
    CorrectionConfig,
    InvalidInput,
    MigrationOptions,
    QueryBank,
    Recipe,
    WithDemand,
    enable,
    migrate,
    plan_correction,
    refresh,
)
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.fitted import Correction, grouped
from tests.support.aliases import aliased
from tests.support.galleries import hubby_gallery

ITEMS, QUERIES, _ = hubby_gallery(rows=160, queries=250, dim=24)
ALONE = MigrationOptions(no_writers=True)
OTHERS = QUERIES[:150]
POPULAR = QUERIES[0]
REPEATS = 250
LOG = np.concatenate([OTHERS, np.repeat(POPULAR[None], REPEATS, axis=0)])
"""One query of 150 is sent 250 times more."""


def stored_bank(store, name):
    return store.load_bank(store.info(name).state.profile.bank)


def test_a_popular_query_counts_once_in_what_is_stored(database):
    assert_counts_once(database, NNN(8))


def test_the_default_method_counts_it_once_too(database):
    assert_counts_once(database, None)


def assert_counts_once(database, estimator):
    store = database.store()
    source = database.fill(ITEMS, "IP")
    plan = plan_correction(store, source, Recipe(QueryBank(LOG), estimator=estimator))
    name = migrate(store, plan, ALONE).target

    bank = stored_bank(store, name).queries
    assert len(bank) == len(LOG)
    assert np.bincount(bank.groups).max() > REPEATS
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
    plan = plan_correction(store, source, Recipe(QueryBank(LOG), estimator=NNN(8)))
    name = aliased(store, migrate(store, plan, ALONE).target)
    before = stored_bank(store, name)

    assert refresh(store, name).action == "none"
    assert refresh(store, name, refit="always", force=True).action == "full"
    again = stored_bank(store, name)
    np.testing.assert_array_equal(again.queries.groups, before.queries.groups)

    other = np.concatenate([QUERIES[100:250], np.repeat(QUERIES[100:101], 50, axis=0)])
    assert refresh(store, name, QueryBank(other), force=True).action == "full"
    groups = stored_bank(store, name).queries.groups
    assert len(groups) == len(other)
    assert len(set(groups[150:])) == 1
    assert groups[150] == groups[0]


def test_biases_beside_the_vectors_have_groups_too(database):
    store = database.store()
    source = database.fill(ITEMS, "IP")
    enable(
        store, plan_correction(store, source, Recipe(QueryBank(LOG), estimator=NNN(8)), Beside())
    )
    bank = stored_bank(store, source).queries
    assert np.bincount(bank.groups).max() > REPEATS


def method_of(store, name):
    return store.info(name).state.profile.estimator


def test_the_demand_of_the_bank_is_a_prior_and_gives_way_to_another(database):
    store = database.store()
    source = database.fill(ITEMS, "IP")
    wanted = np.repeat(np.arange(150), np.r_[np.full(15, 30), np.ones(135, int)])
    plan = plan_correction(store, source, QueryBank(OTHERS[wanted]))
    name = aliased(store, migrate(store, plan, ALONE).target)
    by_default = method_of(store, name)
    assert by_default["name"] == "WithDemand"
    assert by_default["weight"] == 0.25
    # So many repeats of some queries are uneven demand.
    assert by_default["factor"] > 0

    # The numbers of a field take its place: popularity must not count twice.
    result = refresh(store, name, Recipe(prior="group", prior_weight=0.1), force=True)
    assert result.action == "full"
    assert method_of(store, name)["name"] == "Blend"
    assert store.info(name).state.profile.prior.field == "group"

    refresh(store, name, Recipe(prior="bank", prior_weight=0.5), force=True)
    profile = store.info(name).state.profile
    assert profile.prior is None
    assert profile.estimator["name"] == "WithDemand"
    assert profile.estimator["weight"] == 0.5
    assert refresh(store, name).action == "none"

    refresh(store, name, Recipe(no_prior=True), force=True)
    assert method_of(store, name)["name"] == "Blend"


def test_any_method_takes_the_demand_of_the_bank(database):
    store = database.store()
    source = database.fill(ITEMS, "IP")
    plan = plan_correction(store, source, Recipe(QueryBank(LOG), estimator=NNN(8), prior="bank"))
    assert plan.chosen.estimator == WithDemand((NNN(8),))
    name = migrate(store, plan, ALONE).target
    stored = method_of(store, name)
    assert [stored["name"], stored["estimators"][0]["name"]] == ["WithDemand", "NNN"]

    # The answer of the popular query gains against the same method without demand.
    scores = database.scores(name, POPULAR, len(ITEMS))
    plan = plan_correction(
        store, source, Recipe(QueryBank(LOG), estimator=NNN(8)), Copy(target="plain")
    )
    neutral = database.scores(migrate(store, plan, ALONE).target, POPULAR, len(ITEMS))
    gains = {key: scores[key] - neutral[key] for key in neutral}
    assert max(gains, key=gains.get) == max(neutral, key=neutral.get)


def test_a_new_collection_has_no_rows_to_share_a_bank_among(lite):
    with pytest.raises(InvalidInput, match="refresh with --prior bank once it has rows"):
        CorrectionConfig(Recipe(QueryBank(LOG), estimator=NNN(8), prior="bank"))
