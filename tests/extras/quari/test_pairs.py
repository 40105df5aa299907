import numpy as np
import pytest

from milvus_hubness.errors import BankTooSmall, DimensionMismatch, InvalidInput, NonFiniteVectors
from milvus_hubness.extras.quari.pairs import Pairs


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_they_are_kept_at_unit_length():
    pairs = Pairs(3 * normal(5, 4), normal(5, 4))
    np.testing.assert_allclose(np.linalg.norm(pairs.queries, axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(pairs.gallery, axis=1), 1, rtol=1e-6)
    assert pairs.answers.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("queries", "gallery", "answers", "error", "said"),
    [
        (normal(5, 4), normal(6, 4), None, InvalidInput, "5 queries have 6 answers"),
        (normal(5, 4), normal(5, 4), np.arange(4), InvalidInput, "5 queries have 4 answers"),
        (normal(5, 4), normal(5, 3), None, DimensionMismatch, "dimension 4, the gallery has 3"),
        (normal(2, 4), normal(5, 4), np.array([0, 5]), InvalidInput, "among the 5 gallery items"),
        (
            normal(2, 4),
            normal(5, 4),
            np.array([0.0, 1.0]),
            InvalidInput,
            "numbers of gallery items",
        ),
        (np.full((5, 4), np.nan), normal(5, 4), None, NonFiniteVectors, "0"),
        (np.zeros((5, 4)), normal(5, 4), None, InvalidInput, "no pair can be learned from"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(queries, gallery, answers, error, said):
    with pytest.raises(error, match=said):
        Pairs(queries, gallery, answers)


def test_pairs_without_a_direction_are_left_out_and_counted():
    queries, gallery = normal(6, 4), normal(6, 4)
    queries[1], gallery[4] = 0, 0
    pairs = Pairs(queries, gallery)
    assert pairs.left_out == 2
    assert pairs.answers.tolist() == [0, 2, 3, 5]
    assert len(pairs.gallery) == 6


def test_a_split_keeps_every_answer_on_one_side():
    gallery, answers = normal(22, 4), np.arange(60) % 20
    learned, held = Pairs(normal(60, 4), gallery, answers).split(0.25, seed=1)
    assert (len(learned), len(held)) == (45, 15)
    answered = [
        {tuple(row) for row in side.gallery[np.unique(side.answers)]} for side in (learned, held)
    ]
    assert answered[0].isdisjoint(answered[1])
    rest = {tuple(row) for row in Pairs(normal(60, 4), gallery, answers).gallery[20:]}
    for side in (learned, held):
        assert rest <= {tuple(row) for row in side.gallery}
    again = Pairs(normal(60, 4), gallery, answers).split(0.25, seed=1)[1]
    assert again.fingerprint == held.fingerprint != learned.fingerprint
    np.testing.assert_array_equal(again.queries, held.queries)


def test_a_split_needs_two_answers_on_each_side():
    with pytest.raises(BankTooSmall):
        Pairs(normal(6, 4), normal(6, 4)).split(0.1, seed=0)
