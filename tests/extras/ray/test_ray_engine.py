"""A collection's biases refreshed by Ray workers are those of this process."""

from __future__ import annotations

import numpy as np
import pytest

from milvus_hubness import NNN, Blend, DualInvertedSoftmax, QueryBank, Recipe, Sinkhorn, refresh
from milvus_hubness.extras.ray.ray_gallery import RayBiases, fit_on_ray
from tests.support.databases import OnMilvus
from tests.support.migrated import ITEMS, Corrected


def biases(corrected):
    """(n,) of all rows, by key, as searches read them."""
    state = corrected.store.info(corrected.name).state
    rows = corrected.store.get(corrected.name, range(ITEMS), state.field)
    order = np.argsort(rows.keys)
    return state.layout.biases(rows.vectors, state.profile.slot)[order] + state.profile.mean_bias


@pytest.mark.filterwarnings("ignore")
def test_a_collection_is_refreshed_by_workers(cluster, lite, monkeypatch):
    here, alone, told = Corrected(OnMilvus.of(lite)), Corrected(OnMilvus.of(lite)), []
    real = RayBiases.__call__

    def counted(self, items):
        told.append(len(items))
        return real(self, items)

    monkeypatch.setattr(RayBiases, "__call__", counted)
    estimator = Blend((NNN(6), Sinkhorn(0.05)), (0.5, 0.5))
    bank = QueryBank(here.other)
    done = refresh(
        here.store, here.name, Recipe(bank, estimator=estimator), engine="ray", force=True
    )
    assert (done.action, done.scanned) == ("full", ITEMS)
    assert sum(told) >= ITEMS
    told.clear()
    refresh(alone.store, alone.name, Recipe(bank, estimator=estimator), force=True)
    assert not told
    np.testing.assert_allclose(biases(here), biases(alone), rtol=0, atol=1e-5)
    assert np.ptp(biases(here)) > 0.01


@pytest.mark.filterwarnings("ignore")
def test_any_estimator_and_few_rows(cluster):
    rng = np.random.default_rng(0)
    bank, targets = (
        QueryBank.of(rng.standard_normal((60, 8)).astype(np.float32) / 3) for _ in range(2)
    )
    items = rng.standard_normal((31, 8)).astype(np.float32) / 3
    for estimator, others in (
        (NNN(5), None),
        (Sinkhorn(0.05), None),
        (DualInvertedSoftmax(), targets),
    ):
        gallery = items if estimator.needs_gallery else None
        alone = estimator.fit(bank, gallery=gallery, target_bank=others)
        fitted = fit_on_ray(estimator, bank, gallery=gallery, target_bank=others)
        workers = RayBiases(fitted, target_bank=others)
        for few in (items, items[:1]):
            np.testing.assert_allclose(workers(few), alone.bias(few), rtol=0, atol=1e-5)
