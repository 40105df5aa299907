"""The gate and the re-ranker against plain transcriptions, and the gate against the reference table."""

import numpy as np
import pytest

from milvus_hubness import (
    DimensionMismatch,
    InvalidParameter,
    InvertedSoftmax,
    QueryBank,
)
from milvus_hubness.correction.rerank import DynamicGate, GloballyCorrected
from milvus_hubness.correction.rerank.rerankers import gate
from tests.support.real_data import TASKS, load_task, needs_real_data, reference

SLOW = {"caption_translation"}
TIE = 1e-6


@needs_real_data
@pytest.mark.parametrize("name", [name for name in TASKS if name not in SLOW])
def test_gated_inverted_softmax_is_the_references_dis_on_real_data(name):
    task = load_task(name)
    bias = InvertedSoftmax(0.05).fit(QueryBank(task.bank)).bias(task.gallery)
    raw = task.query @ task.gallery.T
    activated = DynamicGate(1).activated(task.bank, task.gallery)
    scores = np.where(activated[raw.argmax(1)][:, None], raw - bias, raw)
    own = np.take_along_axis(scores, task.positives[:, None], axis=1)[:, 0]
    recall = 100 * float((own >= scores.max(1) - TIE).mean())
    assert recall == pytest.approx(reference()[name]["dis k=1 tau=.05"][0], abs=0.15)


@pytest.mark.parametrize("k", [1, 3])
def test_activated_are_the_nearest_of_some_bank_query(k):
    rng = np.random.default_rng(0)
    bank, gallery = rng.normal(size=(20, 8)), rng.normal(size=(60, 8))
    wanted = set(np.argsort(-(bank @ gallery.T), axis=1)[:, :k].ravel().tolist())
    assert set(np.flatnonzero(DynamicGate(k).activated(bank, gallery)).tolist()) == wanted


def test_the_gate_needs_a_bank_of_the_gallerys_width():
    with pytest.raises(DimensionMismatch):
        DynamicGate(1).activated(np.eye(3), np.eye(4))


def test_the_gate_opens_for_activated_items_only():
    assert gate(["r0", "r1", "r2"], ["c0", "c1", "c2"], [7, 8, None], {7}) == ["c0", "r1", "r2"]


@pytest.mark.parametrize("scale", [1e-3, 1, 1e3])
def test_globally_corrected_breaks_ties_by_the_score_whatever_its_range(scale):
    """By Rank − cos, as in the paper, of unit vectors; longer items and queries change no rank."""
    rng = np.random.default_rng(1)
    query, items, bank = rng.normal(size=8), rng.normal(size=(200, 8)), rng.normal(size=(6, 8))
    items /= np.linalg.norm(items, axis=1, keepdims=True)
    query, bank = query / np.linalg.norm(query), bank / np.linalg.norm(bank, axis=1, keepdims=True)
    cosines = items @ query
    places = (items @ bank.T > cosines[:, None]).sum(1)
    wanted = np.argsort(places - cosines)
    assert len(np.unique(places)) > 3
    np.testing.assert_array_equal(
        GloballyCorrected().order(scale * cosines, scale * items, bank), wanted
    )


def test_globally_corrected_counts_no_query_of_the_bank_as_nearer_than_itself():
    rng = np.random.default_rng(1)
    bank, items = (
        rng.normal(size=(8, 384)).astype(np.float32),
        rng.normal(size=(100, 384)).astype(np.float32),
    )
    for query in bank:
        exact = items.astype(float) @ bank.T.astype(float)
        own = items.astype(float) @ query.astype(float)
        wanted = np.lexsort((-own, (exact > own[:, None] + 1e-9).sum(1)))
        np.testing.assert_array_equal(GloballyCorrected().order(items @ query, items, bank), wanted)


def test_parameters_are_checked():
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(InvalidParameter):
            DynamicGate(wrong)
        with pytest.raises(InvalidParameter):
            GloballyCorrected(wrong)
