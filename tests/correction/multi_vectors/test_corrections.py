"""Corrections of collections with many vectors per row: what a job or a client stores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from milvus_hubness import Blend, MultiVectors, QueryBank
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.codec.multi_vectors import MultiVectorLayout
from milvus_hubness.correction.codec.parts import BiasSlots
from milvus_hubness.correction.estimators import DualBankSinkhorn
from milvus_hubness.correction.fitted import Correction, grouped
from milvus_hubness.errors import DimensionMismatch, InvalidParameter, ZeroVectors

DIM = 12


def texts(count, longest, seed):
    rng = np.random.default_rng(seed)
    return [
        rng.uniform(0.5, 3) * rng.standard_normal((length, DIM))
        for length in rng.integers(1, longest + 1, count)
    ]


BANK = texts(120, 6, 1)
GALLERY = texts(90, 20, 2)
NEW = texts(30, 20, 3)


def cosine_maxsim(queries, documents):
    """(m, n): for each query the sum over its tokens of the largest cosine with a document's token."""
    units = [[token / np.linalg.norm(token) for token in row.astype(float)] for row in queries]
    others = [[token / np.linalg.norm(token) for token in row.astype(float)] for row in documents]
    return np.array([[(np.array(q) @ np.array(d).T).max(1).sum() for d in others] for q in units])


def of(rows, what="the rows"):
    return MultiVectors.from_list(rows, what=what)


def fitted(metric="COSINE", **options):
    return Correction.fit(
        MultiVectorLayout(DIM, metric, BiasSlots(2)),
        Blend(),
        QueryBank.of(of(BANK)),
        gallery=of(GALLERY),
        **options,
    )


@pytest.mark.parametrize("metric", ["COSINE", "IP"])
def test_stored_numbers_are_the_biases_less_their_mean(metric):
    def seen(rows):
        return of(rows).normalised() if metric == "COSINE" else of(rows)

    expected = Blend().fit(seen(BANK), gallery=seen(GALLERY))
    correction = replace(fitted(metric), mean_bias=0.25)
    np.testing.assert_allclose(
        correction.centred(of(GALLERY)), expected.bias(seen(GALLERY)) - 0.25, atol=2e-6
    )
    for are_new, bias in ((False, expected.bias), (True, expected.new_bias)):
        numbers, hints = correction.of_rows(of(NEW), are_new=are_new)
        np.testing.assert_allclose(numbers, bias(seen(NEW)) - 0.25, atol=2e-6)
        assert hints.shape == (len(NEW), 0)


def test_a_restored_correction_stores_the_same():
    correction = fitted()
    bank = StoredBank(QueryBank.of(of(BANK)), correction.fitted.potentials, None)
    restored = Correction.restore(correction.layout, correction.fitted.estimator, bank)
    first = correction.centred(of(NEW))
    second = restored.centred(of(NEW))
    allowed = correction.allowed_differences(of(NEW), first)
    assert (np.abs(first - second) <= allowed).all()
    assert allowed.max() < 1e-4


def test_the_reach_is_the_share_of_queries_that_a_document_would_answer():
    correction = fitted()
    reaches = correction.reaches(of(NEW))
    best_of_gallery = np.sort(cosine_maxsim(BANK, GALLERY), axis=1)[:, -10:].mean(axis=1)
    expected = (cosine_maxsim(BANK, NEW) > best_of_gallery[:, None]).mean(axis=0)
    np.testing.assert_allclose(reaches, expected, atol=1.5 / len(BANK))
    assert 0 < reaches.max() < 1
    _, _, measures = correction.of_written(of(NEW), are_new=True, with_measures=True)
    np.testing.assert_allclose(measures.reaches, reaches, atol=1e-6)


def test_a_target_bank_holds_documents():
    targets = of(NEW)
    estimator = DualBankSinkhorn(0.05)
    correction = Correction.fit(
        MultiVectorLayout(DIM, "IP", BiasSlots(2)),
        estimator,
        of(BANK),
        gallery=of(GALLERY),
        target_bank=targets,
    )
    expected = estimator.fit(of(BANK), gallery=of(GALLERY), target_bank=targets)
    np.testing.assert_allclose(
        correction.centred(of(GALLERY)), expected.bias(of(GALLERY)), atol=2e-6
    )


def test_repeats_in_the_bank_are_grouped():
    log = QueryBank.of(of(BANK + [BANK[3]] * 20))
    groups = grouped(MultiVectorLayout(DIM, "COSINE", BiasSlots(2)), log, of(GALLERY)).groups
    assert len(set(groups[len(BANK) :].tolist()) | {int(groups[3])}) == 1


def test_squared_distances_have_no_maxsim():
    with pytest.raises(InvalidParameter, match="MaxSim over L2 adds up squared distances"):
        MultiVectorLayout(DIM, "L2")


@pytest.mark.parametrize(
    ("layout", "bank", "gallery", "error", "words"),
    [
        (
            MultiVectorLayout(7, "IP", BiasSlots(2)),
            BANK,
            GALLERY,
            DimensionMismatch,
            "embed both with one model",
        ),
        (
            MultiVectorLayout(DIM, "IP", BiasSlots(2)),
            BANK,
            [np.ones((2, 5))],
            DimensionMismatch,
            "of dimension 12 and the rows of 5",
        ),
        (
            MultiVectorLayout(DIM, "IP", BiasSlots(2)),
            [np.zeros((2, DIM))],
            GALLERY,
            ZeroVectors,
            "only zero vectors",
        ),
    ],
)
def test_faults_have_one_line(layout, bank, gallery, error, words):
    with pytest.raises(error, match=words) as raised:
        Correction.fit(layout, Blend(), of(bank), gallery=of(gallery))
    assert "\n" not in str(raised.value)
