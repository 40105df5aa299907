"""On a local Ray cluster of two workers: what a single machine gives, also where a worker is killed."""

from __future__ import annotations

import os
import signal
import sys

import numpy as np
import pytest

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import (
    NNN,
    Blend,
    DualBankSinkhorn,
    DualInvertedSoftmax,
    Sinkhorn,
    WithDemand,
)
from milvus_hubness.errors import DimensionMismatch, InvalidInput, MissingExtra
from milvus_hubness.extras.ray.ray_gallery import RayGallery

RNG = np.random.default_rng(0)
BANK = QueryBank.of(RNG.standard_normal((60, 8)).astype(np.float32) / 3)
ITEMS = RNG.standard_normal((90, 8)).astype(np.float32) / 3
TARGETS = RNG.standard_normal((20, 8)).astype(np.float32) / 3
SHARDS = [ITEMS[:20], ITEMS[20:55], ITEMS[55:]]


def together(estimator, target_bank=None):
    """Fitted on one machine, on all shards in one piece."""
    if not estimator.needs_gallery:
        return estimator.fit(BANK, target_bank=target_bank)
    return estimator.fit(BANK, gallery=ITEMS, target_bank=target_bank)


@pytest.mark.filterwarnings("ignore")
def test_every_estimator_is_as_on_one_machine(cluster):
    gallery = RayGallery(SHARDS)
    for estimator, targets in (
        (Sinkhorn(0.05), None),
        (DualBankSinkhorn(0.05, iterations=4), TARGETS),
        (NNN(5), None),
        (Blend(), None),
        (DualInvertedSoftmax(), QueryBank.of(TARGETS)),
        (Blend((NNN(5), Sinkhorn(0.05), Sinkhorn(0.1)), (0.5, 0.25, 0.25)), None),
    ):
        fitted, alone = (
            gallery.fit(estimator, BANK, target_bank=targets),
            together(estimator, targets),
        )
        np.testing.assert_allclose(fitted.potentials, alone.potentials, rtol=0, atol=1e-5)
        found = list(
            gallery.biases(fitted, target_bank=targets if estimator.needs_target_bank else None)
        )
        assert [len(each) for each in found] == [20, 35, 35]
        np.testing.assert_allclose(np.concatenate(found), alone.bias(ITEMS), rtol=0, atol=1e-5)
        if isinstance(estimator, Sinkhorn):
            told, expected = fitted.diagnostics, alone.diagnostics
            assert (told.items, told.iterations) == (expected.items, expected.iterations)
            assert told.marginal_error == pytest.approx(expected.marginal_error, rel=1e-2)
            mean_bias = fitted.estimator.mean_bias
            assert mean_bias == pytest.approx(alone.estimator.mean_bias, abs=1e-5)
    # A log of uneven demand, with near copies.
    log = QueryBank(
        BANK.vectors,
        counts=np.random.default_rng(1).pareto(1, 60) * 20 + 1,
        groups=np.arange(60) // 2,
    )
    for estimator in (WithDemand(), WithDemand((NNN(5),))):
        fitted, alone = gallery.fit(estimator, log), estimator.fit(log, gallery=ITEMS)
        assert alone.estimator.factor > 0
        np.testing.assert_allclose(fitted.potentials, alone.potentials, rtol=0, atol=1e-5)
        biases = np.concatenate(list(gallery.biases(fitted)))
        np.testing.assert_allclose(biases, alone.bias(ITEMS), rtol=0, atol=1e-5)
    again = gallery.fit(
        Sinkhorn(0.05, tol=1e-2), BANK, start=together(Sinkhorn(0.05, iterations=300)).potentials
    )
    assert again.diagnostics.converged
    assert again.diagnostics.iterations == 1
    with pytest.raises(DimensionMismatch):
        RayGallery([*SHARDS, ITEMS[:, :3]]).fit(Sinkhorn(0.05), BANK)


@pytest.mark.filterwarnings("ignore")
def test_shards_are_read_for_what_a_fit_needs_alone(cluster, monkeypatch):
    """Not for an agreement that no strength asks for, of an estimator or of a part of a blend."""
    gallery, sample, samples = RayGallery(SHARDS), RayGallery._sample, []
    monkeypatch.setattr(
        RayGallery, "_sample", lambda self, bank: samples.append(bank) or sample(self, bank)
    )
    for estimator in (
        Sinkhorn(0.05),
        NNN(5),
        Blend((NNN(5), Sinkhorn(0.05)), (0.5, 0.5), strength=1.0),
    ):
        gallery.fit(estimator, BANK)
    assert samples == []
    assert gallery.fit(NNN(5, strength="agreement"), BANK).estimator.agreement is not None
    assert len(samples) == 1


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_worker_killed_in_mid_run_is_replaced(cluster, tmp_path):
    """The second shard's worker kills itself in the third iteration, and once more when biases are told."""
    reads = tmp_path / "reads"

    def shard():
        with reads.open("a") as log:
            log.write(f"{os.getpid()}\n")
        if len(reads.read_text().splitlines()) in (3, 15):
            os.kill(os.getpid(), signal.SIGKILL)
        return ITEMS[20:55]

    gallery = RayGallery([ITEMS[:20], shard, ITEMS[55:]])
    estimator = Sinkhorn(0.05, iterations=12, tol=0)
    fitted = gallery.fit(estimator, BANK)
    np.testing.assert_allclose(fitted.potentials, together(estimator).potentials, rtol=0, atol=1e-5)
    found = np.concatenate(list(gallery.biases(fitted)))
    np.testing.assert_allclose(found, together(estimator).bias(ITEMS), rtol=0, atol=1e-5)
    pids = reads.read_text().split()
    assert len(pids) == 1 + 12 + 1 + 2
    assert len(set(pids)) >= 3


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"\[ray\]"):
        RayGallery(SHARDS)


def test_a_gallery_without_shards():
    pytest.importorskip("ray", reason="Ray is not installed")
    with pytest.raises(InvalidInput, match="at least one shard"):
        RayGallery([])
