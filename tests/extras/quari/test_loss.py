"""The loss, term by term in float64."""

import math

import numpy as np
import pytest
import torch

from milvus_hubness.extras.quari.train import contrastive_loss


def slow(cosines, items, weights, tau):
    """The formula of the docstring, one pair at a time."""
    count, own = items.shape
    columns = [(j, 0) for j in range(count)] + [(j, k) for j in range(count) for k in range(1, own)]
    omega = [1.0 if k == 0 else weights[j, k - 1] for j, k in columns]

    def counts(i, column):
        """Whether a column is one of i's own, or no right answer of i's."""
        j, k = columns[column]
        return j == i or items[j, k] not in items[i]

    forward = 0.0
    for i in range(count):
        whole = sum(math.exp(cosines[i, c] / tau) for c in range(len(columns)) if counts(i, c))
        mine = [c for c, (j, _) in enumerate(columns) if j == i]
        lost = sum(-omega[c] * math.log(math.exp(cosines[i, c] / tau) / whole) for c in mine)
        forward += lost / sum(omega[c] for c in mine) / count
    backward = 0.0
    for c, (j, _) in enumerate(columns):
        whole = sum(math.exp(cosines[i, c] / tau) for i in range(count) if counts(i, c))
        backward += -omega[c] * math.log(math.exp(cosines[j, c] / tau) / whole)
    return (forward + backward / sum(omega)) / 2


@pytest.mark.parametrize("semi", [0, 1, 2])
@pytest.mark.parametrize("repeated", [False, True])
def test_it_is_the_formula(semi, repeated):
    rng = np.random.default_rng(semi)
    count = 5
    items = rng.permutation(100)[: count * (1 + semi)].reshape(count, 1 + semi)
    if repeated:
        items[3, 0] = items[1, 0]
        if semi:
            items[4, 1] = items[0, 0]
    weights = rng.uniform(0, 0.6, (count, semi))
    cosines = rng.uniform(-1, 1, (count, count * (1 + semi)))
    found = contrastive_loss(*map(torch.from_numpy, (cosines, items, weights)), 0.2)
    assert found.item() == pytest.approx(slow(cosines, items, weights, 0.2), rel=1e-12)


def test_without_semi_positives_it_is_the_symmetric_cross_entropy():
    cosines = torch.from_numpy(np.random.default_rng(7).uniform(-1, 1, (6, 6)))
    items, none = torch.arange(6)[:, None], torch.zeros(6, 0, dtype=torch.float64)
    entropy = torch.nn.functional.cross_entropy
    wanted = (
        entropy(cosines / 0.07, torch.arange(6)) + entropy(cosines.T / 0.07, torch.arange(6))
    ) / 2
    torch.testing.assert_close(contrastive_loss(cosines, items, none, 0.07), wanted)


def test_it_has_finite_gradients_where_items_repeat():
    cosines = torch.zeros(3, 3, requires_grad=True)
    items = torch.tensor([[4], [4], [5]])
    contrastive_loss(cosines, items, torch.zeros(3, 0), 0.07).backward()
    assert torch.isfinite(cosines.grad).all()
    assert cosines.grad[0, 1] == 0
