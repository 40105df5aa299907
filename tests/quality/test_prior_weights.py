"""The weight of a prior: found where demand is uneven, 0 where it says nothing, blind to own clicks."""

import numpy as np
import pytest

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.prior import Prior
from milvus_hubness.quality.labelled import LabelledQueries
from milvus_hubness.quality.prior_weights import WEIGHTS, Preference
from milvus_hubness.quality.tuning import tune

ITEMS, DIM = 200, 16


@pytest.fixture(scope="module")
def shop():
    """Items, a bank of even demand, and queries of uneven demand with the items that they want."""
    rng = np.random.default_rng(5)
    drift = rng.standard_normal(DIM)
    items = rng.standard_normal((ITEMS, DIM)) + np.outer(rng.gamma(1, 0.3, ITEMS), drift)

    def asking(wanted):
        noise = 1.6 * rng.standard_normal((len(wanted), DIM))
        return (items[wanted] + noise + 0.5 * drift).astype(np.float32)

    demand = 1 / (1.0 + rng.permutation(ITEMS))
    demand /= demand.sum()
    wanted = rng.choice(ITEMS, 400, p=demand)
    bank = QueryBank(asking(rng.integers(0, ITEMS, 500)))
    return items.astype(np.float32), bank, asking(wanted), wanted, demand


def preference(values, **options):
    values = np.asarray(values, np.float64)
    return Preference(Prior(source="field", field="sales").of_gallery(values), values, **options)


def test_where_demand_is_uneven_a_weight_is_chosen_and_gains(shop):
    items, bank, queries, wanted, demand = shop
    labelled = LabelledQueries.of(queries, wanted)
    without = tune(bank, items, queries=labelled)
    tuned = tune(bank, items, queries=labelled, preference=preference(1e4 * demand))
    assert without.prior_weight is None
    assert tuned.verdict != "leave it alone"
    assert tuned.prior_weight * tuned.strength == pytest.approx(max(WEIGHTS), abs=0.21)
    assert tuned.prior_weight > 0
    assert tuned.interval.estimate > without.interval.estimate + 0.05
    assert "with field 'sales' as a prior of weight 0." in tuned.reason
    assert tuned.to_dict()["prior_weight"] == tuned.prior_weight


def test_values_that_say_nothing_get_no_weight(shop):
    items, bank, queries, wanted, demand = shop
    labelled = LabelledQueries.of(queries, wanted)
    shuffled = np.random.default_rng(2).permutation(demand)
    without = tune(bank, items, queries=labelled)
    tuned = tune(bank, items, queries=labelled, preference=preference(1e4 * shuffled))
    assert tuned.prior_weight == 0
    assert tuned.interval.estimate == pytest.approx(without.interval.estimate, abs=0.03)


def test_queries_do_not_decide_by_their_own_clicks(shop):
    """Each item is wanted once: a click says which query asks, and nothing of the next one."""
    items, bank, queries, wanted, _ = shop
    _, first = np.unique(wanted, return_index=True)
    labelled = LabelledQueries.of(queries[first], wanted[first])
    clicks = np.bincount(wanted[first], minlength=ITEMS)
    fooled = tune(bank, items, queries=labelled, preference=preference(clicks))
    tuned = tune(bank, items, queries=labelled, preference=preference(clicks, counts_pairs=True))
    assert (tuned.prior_weight or 0) < fooled.prior_weight
    assert tuned.interval.estimate < fooled.interval.estimate - 0.05


def test_clicks_of_a_repeated_query_are_left_out_as_often_as_it_was_sent(shop):
    items, bank, queries, wanted, _ = shop
    _, first = np.unique(wanted, return_index=True)
    labelled = LabelledQueries.of(queries[first], wanted[first])
    clicks = np.bincount(wanted[first], minlength=ITEMS)
    once = tune(bank, items, queries=labelled, preference=preference(clicks, counts_pairs=True))
    labelled = LabelledQueries.of(queries[first], wanted[first], weights=np.full(len(first), 3))
    thrice = tune(
        bank, items, queries=labelled, preference=preference(3 * clicks, counts_pairs=True)
    )
    assert thrice.interval.estimate == pytest.approx(once.interval.estimate)
    assert thrice.prior_weight == once.prior_weight


def test_without_labels_no_weight_is_chosen(shop):
    items, bank, _, _, demand = shop
    assert tune(bank, items, preference=preference(demand)).prior_weight is None
