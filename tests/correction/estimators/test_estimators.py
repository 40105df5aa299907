"""What all estimators share: parameters, bad input, the fitted bias, and the way into JSON and back."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.estimators import (
    CSLS,
    NNN,
    Blend,
    DistributionNormalization,
    DualBankSinkhorn,
    DualInvertedSoftmax,
    Estimator,
    InvertedSoftmax,
    RelativeNNN,
    Sinkhorn,
    WithDemand,
    from_dict,
    to_dict,
)
from milvus_hubness.correction.estimators.base import (
    ESTIMATORS,
    Formula,
    TargetBank,
    is_same,
    with_parameters,
)
from milvus_hubness.correction.kernels.policy import kernel_on, resolve_device
from milvus_hubness.errors import (
    BankTooSmall,
    DimensionMismatch,
    InvalidInput,
    InvalidParameter,
    NonFiniteVectors,
)
from tests.support.real_data import load_task, needs_real_data, recall_at_1

RNG = np.random.default_rng(0)
BANK = QueryBank(RNG.standard_normal((50, 6)) / 3, counts=1 + 40 / np.arange(1, 51))
GALLERY = (RNG.standard_normal((20, 6)) / 3).astype(np.float32)
TARGETS = RNG.standard_normal((10, 6)) / 3

ALL = [
    NNN(5, 0.5),
    CSLS(3),
    InvertedSoftmax(0.1),
    DualInvertedSoftmax(0.1, 0.2),
    InvertedSoftmax(),
    DualInvertedSoftmax(0.1),
    DualBankSinkhorn(temperature=0.3),
    DistributionNormalization(0.3),
    Sinkhorn(0.1, 3, 1e-2),
    Sinkhorn(0.1, neighbors=4),
    WithDemand((NNN(5),)),
    WithDemand(),
    DualBankSinkhorn(0.1),
    Blend(),
    RelativeNNN(3),
    NNN(3, strength="agreement"),
    Blend(
        [Sinkhorn(0.1), NNN(2), Blend([DualBankSinkhorn(0.2), CSLS(1)], [0.1, 0.9])],
        [0.25, 0.25, 0.5],
    ),
]
# Estimators that are not listed are tried with their default parameters.
ALL += [
    kind().clamped(len(BANK))
    for kind in ESTIMATORS.values()
    if kind.__module__.startswith("milvus_hubness.") and kind not in map(type, ALL)
]
EVERY = pytest.mark.parametrize("estimator", ALL, ids=repr)


def fit(estimator, bank=BANK):
    return estimator.fit(bank, gallery=GALLERY, target_bank=TARGETS)


@EVERY
class TestEveryEstimator:
    def test_is_one(self, estimator):
        assert isinstance(estimator, Estimator)
        assert hash(estimator) == hash(from_dict(to_dict(estimator)))

    def test_says_what_it_needs(self, estimator):
        given = {}
        if estimator.needs_gallery:
            with pytest.raises(InvalidInput, match="gallery="):
                estimator.fit(BANK, target_bank=TARGETS)
            given["gallery"] = GALLERY
        if estimator.needs_target_bank:
            with pytest.raises(InvalidInput, match="target_bank="):
                estimator.fit(BANK, gallery=GALLERY)
            given["target_bank"] = QueryBank(TARGETS)
        np.testing.assert_array_equal(
            estimator.fit(BANK, **given).bias(GALLERY), fit(estimator).bias(GALLERY)
        )

    def test_bias_of_any_vectors(self, estimator):
        fitted = fit(estimator)
        bias = fitted.bias(GALLERY)
        assert bias.shape == (20,)
        assert bias.dtype == np.float32
        assert np.isfinite(bias).all()
        for same in (GALLERY.tolist(), torch.from_numpy(GALLERY), GALLERY.astype(np.float64)):
            np.testing.assert_allclose(fitted.bias(same), bias, atol=1e-6)
        np.testing.assert_allclose(
            np.concatenate([fitted.bias(row[None]) for row in GALLERY]), bias, atol=1e-6
        )
        assert fitted.bias(GALLERY[:0]).shape == (0,)
        assert np.isfinite(fitted.bias(np.zeros((2, 6)))).all()

    def test_a_bank_is_anything_like_an_array(self, estimator):
        bank = QueryBank(BANK.vectors)
        fitted = estimator.fit(bank, gallery=GALLERY, target_bank=TARGETS)
        for same in (
            BANK.vectors.tolist(),
            torch.from_numpy(BANK.vectors.copy()),
            BANK.vectors.astype(float),
        ):
            again = estimator.fit(same, gallery=GALLERY, target_bank=torch.from_numpy(TARGETS))
            np.testing.assert_allclose(again.bias(GALLERY), fitted.bias(GALLERY), atol=1e-6)
        again = fitted.estimator.restore(
            BANK.vectors, fitted.potentials, target_bank=TARGETS.tolist()
        )
        np.testing.assert_allclose(again.bias(GALLERY), fitted.bias(GALLERY), atol=1e-6)

    def test_bias_of_bad_vectors(self, estimator):
        fitted = fit(estimator)
        with pytest.raises(
            DimensionMismatch, match="a vector has dimension 5; the bank from array has 6"
        ):
            fitted.bias(GALLERY[:, :5])
        with pytest.raises(InvalidInput, match="2-D"):
            fitted.bias(GALLERY[0])
        with pytest.raises(NonFiniteVectors, match="row 1"):
            fitted.bias([[0.0] * 6, [np.nan] * 6])

    def test_restored_without_the_gallery(self, estimator):
        fitted = fit(estimator)
        assert fitted.potentials.shape == (50, estimator.potentials)
        again = fitted.estimator.restore(BANK, fitted.potentials, target_bank=TARGETS)
        np.testing.assert_allclose(again.bias(GALLERY), fitted.bias(GALLERY), atol=1e-6)

    def test_through_json(self, estimator):
        assert from_dict(json.loads(json.dumps(to_dict(estimator)))) == estimator

    def test_keeps_what_it_is(self, estimator):
        fitted = fit(estimator)
        assert is_same(estimator, to_dict(fitted.estimator))
        assert fitted.bank is BANK
        assert hasattr(fitted.diagnostics, "_asdict")


def test_to_dict_has_the_parameters_and_no_device():
    assert to_dict(NNN(5, 1, device="cpu")) == {
        "name": "NNN",
        "k": 5,
        "alpha": 1.0,
        "kernel": "dense",
    }
    assert to_dict(Sinkhorn(0.1)) == {
        "name": "Sinkhorn",
        "tau": 0.1,
        "iterations": 10,
        "tol": 1e-3,
        "neighbors": None,
    }
    assert to_dict(InvertedSoftmax(temperature=0.3)) == {
        "name": "InvertedSoftmax",
        "temperature": 0.3,
    }
    assert to_dict(Blend([CSLS(3)], [1])) == {
        "name": "Blend",
        "estimators": [{"name": "CSLS", "k": 3}],
        "weights": [1.0],
    }


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"name": "MMM"}, "no estimator is named 'MMM': use one of .*NNN"),
        ({}, "no estimator is named None"),
        ({"name": "NNN", "kk": 3}, "NNN has no parameter 'kk': use one of k, alpha, kernel"),
        ({"name": "NNN", "device": "cpu"}, "no parameter 'device'"),
        ({"name": "NNN", "k": "three"}, "k must be"),
        ({"name": "Blend", "estimators": [{"name": "MMM"}], "weights": [1]}, "'MMM'"),
        ({"name": "Blend", "estimators": ["NNN"], "weights": [1]}, "a dictionary, not by 'NNN'"),
        ({"name": "Blend", "estimators": "NNN", "weights": [1]}, "a list of dictionaries"),
        ({"name": "Blend", "weights": 3}, "weights"),
    ],
)
def test_from_dict_of_nonsense(values, complaint):
    with pytest.raises(InvalidParameter, match=complaint):
        from_dict(values)


DEFAULTS = [
    NNN(5), CSLS(3), InvertedSoftmax(), DualInvertedSoftmax(), DistributionNormalization(), Sinkhorn(),
    DualBankSinkhorn(), Blend(),
]  # fmt: skip


@pytest.mark.parametrize("metric", ["IP", "L2"])
@pytest.mark.parametrize("estimator", DEFAULTS, ids=lambda each: type(each).__name__)
def test_without_an_absolute_tau_biases_follow_the_scale_of_the_scores(estimator, metric):
    """Scores of vectors that are s times as long are s² times as large, under IP and under L2."""

    def biases(scale):
        layout = Layout(6, metric)
        items, targets = layout.reduce_items(scale * GALLERY), layout.reduce_items(scale * TARGETS)
        bank = QueryBank(layout.reduce_queries(scale * BANK.vectors))
        both = TargetBank(targets, asking=layout.reduce_queries(scale * TARGETS))
        return estimator.fit(bank, gallery=items, target_bank=both).bias(items)

    wanted = biases(1.0)
    for scale in (0.01, 0.1, 3.0, 30.0):
        np.testing.assert_allclose(
            biases(scale) / scale**2, wanted, atol=2e-4 * np.abs(wanted).max()
        )


@needs_real_data
def test_the_default_corrects_vectors_of_any_length_on_real_data():
    name = "clip_products t2i"
    task = load_task(name)
    found = []
    for scale in (0.1, 1.0, 10.0):
        fitted = Blend().fit(QueryBank(scale * task.bank), gallery=scale * task.gallery)
        unit = Sinkhorn(1.0).restore(QueryBank(task.bank[:1]), np.zeros((1, 1)))
        unscaled = replace(
            unit,
            formula=Formula(lambda items, by=fitted, s=scale: by.bias(s * items) / s**2),
        )
        found.append(recall_at_1(name, unscaled)[0])
    assert max(found) - min(found) < 0.1
    assert min(found) >= recall_at_1(name, None)[0]


def test_a_fit_finds_the_tau_of_a_temperature_and_a_refit_finds_it_anew():
    fitted = InvertedSoftmax(temperature=0.5).fit(BANK, gallery=GALLERY)
    spread = np.sqrt(((BANK.vectors @ GALLERY.T).std(1) ** 2).mean())
    assert fitted.estimator.temperature == 0.5
    assert fitted.estimator.tau == pytest.approx(0.5 * spread, rel=1e-4)
    by_tau = InvertedSoftmax(fitted.estimator.tau).fit(BANK)
    np.testing.assert_array_equal(fitted.bias(GALLERY), by_tau.bias(GALLERY))
    refitted = fitted.estimator.fit(BANK, gallery=2 * GALLERY)
    assert refitted.estimator.tau == pytest.approx(spread, rel=1e-4)
    assert is_same(InvertedSoftmax(), to_dict(fitted.estimator))
    assert not is_same(InvertedSoftmax(), to_dict(by_tau.estimator))
    with pytest.raises(InvalidParameter, match=r"temperature=0.5.* has no tau yet: fit it"):
        InvertedSoftmax().restore(BANK, fitted.potentials)


@pytest.mark.parametrize("gallery", [GALLERY[:1], np.ones((4, 6)), np.zeros((3, 6))])
def test_items_that_all_score_alike_get_one_bias(gallery):
    for estimator in (InvertedSoftmax(), Sinkhorn()):
        biases = estimator.fit(BANK, gallery=gallery).bias(gallery)
        assert np.isfinite(biases).all()
        assert np.ptp(biases) < 1e-5


def test_a_tau_takes_the_place_of_its_temperature():
    fitted = {"name": "Sinkhorn", "tau": 0.03, "temperature": 0.5, "iterations": 4}
    assert with_parameters(fitted, {"tau": 0.1}) == {
        "name": "Sinkhorn",
        "iterations": 4,
        "tau": 0.1,
    }
    assert with_parameters(fitted, {"temperature": 1}) == {
        "name": "Sinkhorn",
        "iterations": 4,
        "temperature": 1,
    }
    assert with_parameters(fitted, {"tol": 0.1}) == {**fitted, "tol": 0.1}
    with pytest.raises(InvalidParameter, match="both tau and temperature are given"):
        with_parameters(fitted, {"tau": 0.1, "temperature": 1})


def test_to_dict_of_a_stranger():
    class Mine(NNN):
        """Not in the registry."""

    with pytest.raises(InvalidParameter, match="Mine cannot be stored"):
        to_dict(Mine())


NAN = float("nan")


@pytest.mark.parametrize(
    "make",
    [
        *(lambda k=k: NNN(k) for k in (0, -1, 1.5, "8", None, True, NAN)),
        *(lambda alpha=alpha: NNN(8, alpha) for alpha in (NAN, float("inf"), "x", None, True)),
        lambda: NNN(8, kernel="fast"),
        lambda: CSLS(0),
        *(lambda tau=tau: InvertedSoftmax(tau) for tau in (0, -0.05, NAN, float("inf"), "hot")),
        *(lambda tau=tau: Sinkhorn(tau) for tau in (0, -0.05, NAN)),
        *(lambda t=t: InvertedSoftmax(temperature=t) for t in (0, NAN, "hot")),
        lambda: DualInvertedSoftmax(0, 0.05),
        lambda: DualInvertedSoftmax(0.05, -1),
        lambda: DualInvertedSoftmax(temperature_target=0),
        lambda: DistributionNormalization(NAN),
        lambda: Sinkhorn(iterations=0),
        lambda: Sinkhorn(tol=NAN),
        lambda: Sinkhorn(neighbors=0),
        lambda: DualBankSinkhorn(neighbors=2.5),
        lambda: Blend([], []),
        lambda: Blend([NNN()], [0.5, 0.5]),
        lambda: Blend([NNN(), CSLS()], [0.5, 0.6]),
        lambda: Blend([NNN(), CSLS()], [1.5, -0.5]),
        lambda: Blend([NNN(), CSLS()], [NAN, 1]),
        lambda: Blend(["NNN"], [1]),
    ],
)
def test_parameters_out_of_range(make):
    with pytest.raises(InvalidParameter):
        make()


def test_numbers_become_plain_python_numbers():
    estimator = NNN(np.int64(3), np.float32(0.5))
    assert (type(estimator.k), type(estimator.alpha)) == (int, float)
    assert type(Blend([NNN()], np.array([1.0])).weights[0]) is float


@pytest.mark.parametrize(
    "estimator", [NNN(51), NNN(51, kernel="approximate"), CSLS(51), Blend([NNN(51)], [1])]
)
def test_bank_too_small(estimator):
    with pytest.raises(BankTooSmall, match="has 50 queries; at least 51 are needed"):
        fit(estimator)


@pytest.mark.parametrize(
    "estimator", [NNN(1), CSLS(1), InvertedSoftmax(), DistributionNormalization(), Sinkhorn()]
)
def test_a_bank_of_one_query_and_one_of_zeros(estimator):
    for bank in (QueryBank(BANK.vectors[:1]), QueryBank(np.zeros((3, 6)))):
        assert np.isfinite(fit(estimator, bank).bias(GALLERY)).all()


def test_nnn_diagnostics():
    assert NNN(5).fit(BANK).diagnostics == (50, 6, kernel_on(resolve_device()), 0.0, 0.0, 0, None)
    on_bank = NNN(5, kernel="approximate").fit(BANK).diagnostics
    on_gallery = (
        NNN(5, kernel="approximate").fit(BANK, gallery=np.tile(GALLERY, (2, 1))).diagnostics
    )
    assert (on_bank.sampled, on_gallery.sampled) == (25, 20)


def test_blend_reports_its_parts_and_starts_them_warm():
    blend = Blend([Sinkhorn(0.05, 500), NNN(3), Sinkhorn(0.1, 500)], [0.4, 0.2, 0.4])
    cold = fit(blend)
    assert cold.potentials.shape == (50, 2)
    warm = blend.fit(BANK, gallery=GALLERY, start=cold.potentials)
    for part in (0, 2):
        assert (
            warm.diagnostics.by_estimator[part].iterations
            < cold.diagnostics.by_estimator[part].iterations
        )
    with pytest.raises(InvalidInput, match=r"\(50, 2\), not \(50, 1\)"):
        blend.restore(BANK, cold.potentials[:, :1])
