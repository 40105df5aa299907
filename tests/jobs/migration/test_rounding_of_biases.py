"""Large similarities round, differently with each batch of rows: a bias that moves by as much is no other bias."""

from dataclasses import replace

import numpy as np
import pytest

from milvus_hubness import (
    CSLS,
    NNN,
    Beside,
    Blend,
    DistributionNormalization,
    DualInvertedSoftmax,
    InvertedSoftmax,
    QueryBank,
    Recipe,
    Sinkhorn,
    VerificationFailed,
    enable,
    migrate,
    plan_correction,
)
from milvus_hubness.correction.codec.index_hints import measured_on
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.fitted import BIAS_TOLERANCE, Correction
from milvus_hubness.jobs.migration.catch_up import verify
from tests.support.galleries import METRICS, plain_collection, vectors

ROWS, FEW, QUERIES = 200, 60, 80
ESTIMATORS = [NNN(4), NNN(4, alpha=30.0), CSLS(4), InvertedSoftmax(), DualInvertedSoftmax(),
              DistributionNormalization(), Sinkhorn(iterations=20), Blend()]  # fmt: skip


def world(case, dim=8):
    """(metric, items, bank): items far from the bank, or items and queries that are long."""
    rng = np.random.default_rng(7)
    items, bank = vectors(rng, ROWS, dim), vectors(rng, QUERIES, dim)
    if case == "far":
        return "L2", items + np.float32(50), bank
    return "IP", 1_000 * items, 1_000 * bank


def fitted(metric, items, bank, estimator):
    layout = measured_on(Layout(items.shape[1], metric), items, bank)
    correction = Correction.fit(
        layout, estimator, QueryBank(bank), gallery=items, target_bank=QueryBank(items)
    )
    return replace(correction, mean_bias=float(correction.centred(items).mean()))


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
@pytest.mark.parametrize("case", ["far", "long"])
def test_any_batch_of_rows_gives_biases_within_the_allowed_differences(case, estimator):
    metric, items, bank = world(case, dim=33)
    correction = fitted(metric, items, bank, estimator)
    biases = correction.centred(items)
    allowed = correction.allowed_differences(items, biases)
    for size in (1, 3, 50):
        others = np.concatenate(
            [correction.centred(items[at : at + size]) for at in range(0, ROWS, size)]
        )
        assert (np.abs(others - biases) <= allowed).all()
    # An error of the bank or of the formula is still seen.
    assert allowed.max() < 0.01 * biases.std()


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dim", [8, 768])
def test_rows_of_usual_size_are_allowed_no_more_than_before(metric, dim):
    rng = np.random.default_rng(3)
    items, bank = vectors(rng, ROWS, dim), vectors(rng, QUERIES, dim)
    items, bank = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (items, bank))
    correction = fitted(metric, items, bank, NNN(4))
    biases = correction.centred(items)
    usual = BIAS_TOLERANCE * np.maximum(1, np.abs(biases))
    np.testing.assert_array_equal(correction.allowed_differences(items, biases), usual)


def test_rows_without_a_bias_are_allowed_no_other_one():
    metric, items, bank = world("far")
    correction = fitted(metric, items, bank, NNN(4))
    items[3] = np.nan
    biases = correction.centred(items)
    assert biases[3] == 0
    assert correction.allowed_differences(items, biases)[3] == np.float32(BIAS_TOLERANCE)


@pytest.mark.parametrize("case", ["far", "long"])
def test_a_migration_and_an_enabling_of_such_rows_verify(lite, case):
    metric, items, bank = world(case, dim=33)
    items = items[:FEW]
    client, store, name = lite.client(), lite.store(), lite.name()
    plain_collection(client, name, items, metric)
    lite.made.append(f"{name}_hubness")
    plan = plan_correction(store, name, Recipe(QueryBank(bank), estimator=NNN(4), verdict="warn"))
    target = migrate(store, plan, no_writers=True).target
    for _ in range(3):
        assert verify(store, name).biases == FEW  # Each time in another order.

    state = store.info(target).state
    rows = client.query(target, filter="id >= 0", output_fields=["*"], consistency_level="Strong")
    [row] = [row for row in rows if row["id"] == 5]
    moved = row["hubness_bias"] + 0.05 * np.std([row["hubness_bias"] for row in rows])
    stored = np.array([row["vector"]], np.float32)
    [vector] = state.layout.with_biases(
        stored, {slot: [moved] for slot in range(state.layout.slots.count)}
    )
    client.upsert(target, {**row, "vector": vector, "hubness_bias": float(moved)})
    with pytest.raises(VerificationFailed, match="of its bank: rows 5"):
        verify(store, name)

    other = lite.name()
    plain_collection(client, other, items, metric)
    plan = plan_correction(
        store, other, Recipe(QueryBank(bank), estimator=NNN(4), verdict="warn"), Beside()
    )
    assert enable(store, plan, client_ttl=0.0).rows == FEW
