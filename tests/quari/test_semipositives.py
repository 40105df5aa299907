import numpy as np
import pytest

from milvus_hubness.errors import BankTooSmall, InvalidParameter
from milvus_hubness.quari.pairs import mine, unit


def brute(gallery, neighbors, keep, temperature):
    items, weights = [], []
    for i in range(len(gallery)):
        cosines = np.array([gallery[i].astype(float) @ other for other in gallery])
        cosines[i] = -np.inf
        near = np.argsort(-cosines, kind="stable")[:neighbors]
        shares = np.exp(cosines[near] / temperature)
        items.append(near[:keep])
        weights.append(shares[:keep] / shares.sum())
    return np.array(items), np.array(weights)


@pytest.mark.parametrize(("neighbors", "keep"), [(10, 2), (3, 3), (500, 1)])
def test_they_are_those_of_a_brute_force_search(neighbors, keep):
    gallery = unit(np.random.default_rng(0).normal(size=(80, 6)).astype(np.float32))
    found = mine(gallery, neighbors=neighbors, keep=keep, temperature=0.1)
    items, weights = brute(gallery, min(neighbors, 79), keep, 0.1)
    np.testing.assert_array_equal(found.items, items)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-4)


def test_an_item_is_never_its_own_even_among_many_that_coincide():
    gallery = unit(np.ones((9, 4), np.float32))
    found = mine(gallery, neighbors=3, keep=2)
    assert found.items.shape == (9, 2)
    assert (found.items != np.arange(9)[:, None]).all()
    np.testing.assert_allclose(found.weights, 1 / 3, rtol=1e-5)


def test_what_cannot_be_found_is_refused():
    gallery = unit(np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32))
    assert mine(gallery, keep=2).items.shape == (3, 2)
    with pytest.raises(BankTooSmall):
        mine(gallery[:2], keep=2)
    with pytest.raises(InvalidParameter):
        mine(gallery, neighbors=1, keep=2)
    with pytest.raises(InvalidParameter):
        mine(gallery, temperature=0)
