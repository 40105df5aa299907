"""The numbers of a prior: −λ·log p(r) in float64, centred, steady, and refused where values are none."""

from decimal import Decimal

import numpy as np
import pytest
from pydantic import ValidationError

from milvus_hubness import NNN, InvalidInput, Layout, QueryBank
from milvus_hubness.correction.fitted import Correction
from milvus_hubness.correction.items import Items
from milvus_hubness.correction.prior import SMOOTHING, Prior, checked_clicks, digest_of, problem_of

RNG = np.random.default_rng(3)
VALUES = RNG.zipf(1.5, 500).clip(max=1e9).astype(float) * (RNG.random(500) < 0.8)


def fitted(values=VALUES, weight=0.25, spread=0.4):
    prior = Prior(source="field", field="sales", weight=weight)
    return prior.of_gallery(values).with_factor(spread)


@pytest.mark.parametrize("scale", [1, 1e-6, 1e6])
def test_numbers_are_minus_lambda_log_p_whatever_the_unit_of_the_values(scale):
    prior = fitted(scale * VALUES)
    shares = VALUES + SMOOTHING * VALUES.mean()
    wanted = 0.25 * 0.4 * np.log(shares / shares.sum())
    numbers = prior.of(scale * VALUES)
    assert numbers.dtype == np.float32
    np.testing.assert_allclose(numbers, wanted.mean() - wanted, atol=1e-6)
    assert abs(numbers.mean()) < 1e-6


def test_a_correction_adds_them_to_the_biases_of_usable_rows_only():
    vectors = RNG.normal(size=(6, 8)).astype(np.float32)
    vectors[2] = 0
    bank = QueryBank(RNG.normal(size=(20, 8)).astype(np.float32))
    neutral = Correction.fit(Layout(8, "COSINE"), NNN(4), bank)
    prior = fitted()
    corrected = Correction(neutral.layout, neutral.fitted, prior=prior)
    rows = Items(range(6), [{"sales": v} if v else {} for v in (3, 0, 5, 900, 1, 2.5)])
    values = np.array([3, 0, 5, 900, 1, 2.5])
    wanted = neutral.centred(vectors) + prior.of(values)
    wanted[2] = 0
    np.testing.assert_allclose(corrected.centred(vectors, rows), wanted, atol=1e-6)
    np.testing.assert_allclose(corrected.of_rows(vectors, rows, are_new=True)[0], wanted, atol=1e-6)
    with pytest.raises(RuntimeError, match="needs the rows"):
        corrected.centred(vectors)


def test_an_unmeasured_prior_and_values_that_are_all_0_change_nothing():
    new = Prior(source="field", field="sales", weight=0.3)
    assert not new.of(VALUES).any()
    assert not fitted(np.zeros(9)).of(np.zeros(9)).any()


def test_small_changes_leave_the_parameters():
    prior = Prior(source="field", field="sales", weight=0.25).of_gallery(VALUES, "a")
    prior = prior.with_factor(0.4)
    nearly = VALUES.copy()
    nearly[7] += 1
    assert prior.of_gallery(nearly, "b").with_factor(0.41) == prior.model_copy(
        update={"digest": "b"}
    )
    twice = prior.of_gallery(2 * VALUES, "c").with_factor(0.6)
    assert twice.added == pytest.approx(2 * prior.added)
    assert twice.factor == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (-1e-9, "negative"),
        (-np.inf, "not finite"),
        (np.float32("nan"), "not finite"),
        (1e101, "too large"),
        (10**400, "too large"),
        (np.True_, "not a number"),
        (Decimal(1), "not a number"),
        (1j, "not a number"),
        ({"count": 1}, "not a number"),
        (b"1", "not a number"),
        (0, ""),
        (-0.0, ""),
        (np.int8(4), ""),
        (np.float16(0.5), ""),
        (10**80, ""),
    ],
)
def test_values_are_numbers_from_0(value, problem):
    assert problem_of(value) == problem
    items = Items(["a", "b"], [{"sales": None}, {"sales": value}])
    if problem:
        with pytest.raises(InvalidInput, match=f"^row 'b' has a 'sales' that is {problem}: a "):
            fitted().values_of(items, {})
    else:
        assert fitted().values_of(items, {}).tolist() == [0.0, float(value)]


def test_digests_follow_keys_and_values_and_no_order():
    keys = ["a", 1, "1", 2]
    values = np.array([1.0, 2.0, 3.0, 0.0])
    digest = digest_of(keys, values)
    assert digest == digest_of(keys[::-1], values[::-1])
    halves = digest_of(keys[:2], values[:2]) + digest_of(keys[2:], values[2:])
    assert digest == halves % 2**64
    assert digest == digest_of(keys[:3], values[:3]), "a row without a click changes nothing"
    assert digest != digest_of(["a", "1", 1, 2], values)
    assert digest != digest_of(keys, values + 1)


@pytest.mark.parametrize("counts", [{}, {None: 1}, {True: 1}, {"a": -1}, {"a": "many"}])
def test_clicks_are_numbers_by_key(counts):
    with pytest.raises(InvalidInput):
        checked_clicks(counts)


@pytest.mark.parametrize(
    "changed",
    [
        {"weight": -1},
        {"weight": float("nan")},
        {"added": 0},
        {"factor": float("inf")},
        {"source": "pairs"},
        {"field": ""},
        {"source": "rumours"},
    ],
)
def test_a_stored_prior_is_read_with_care(changed):
    with pytest.raises(ValidationError):
        Prior.model_validate({**fitted().model_dump(), **changed})
