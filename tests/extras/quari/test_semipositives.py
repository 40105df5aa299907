import numpy as np
import pytest

from milvus_hubness.errors import BankTooSmall, InvalidParameter
from milvus_hubness.extras.quari.pairs import mine, unit
from milvus_hubness.extras.quari.settings import TrainingSettings


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
    found = mine(
        gallery, TrainingSettings(neighbors=neighbors, semi_positives=keep, temperature=0.1)
    )
    items, weights = brute(gallery, min(neighbors, 79), keep, 0.1)
    np.testing.assert_array_equal(found[0], items)
    np.testing.assert_allclose(found[1], weights, rtol=1e-4)


def test_an_item_is_never_its_own_even_among_many_that_coincide():
    gallery = unit(np.ones((9, 4), np.float32))
    items, weights = mine(gallery, TrainingSettings(neighbors=3))
    assert items.shape == (9, 2)
    assert (items != np.arange(9)[:, None]).all()
    np.testing.assert_allclose(weights, 1 / 3, rtol=1e-5)


def test_what_cannot_be_found_is_refused():
    gallery = unit(np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32))
    assert mine(gallery, TrainingSettings())[0].shape == (3, 2)
    with pytest.raises(BankTooSmall):
        mine(gallery[:2], TrainingSettings())
    for wrong in ({"neighbors": 1}, {"temperature": 0}):
        with pytest.raises(InvalidParameter):
            TrainingSettings(**wrong)
