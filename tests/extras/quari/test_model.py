"""The network and its scores against T written out in float64."""

import numpy as np
import pytest
import torch

from milvus_hubness.errors import InvalidParameter
from milvus_hubness.extras.quari.hypernetwork import sinusoids
from milvus_hubness.extras.quari.model import Quari, cosines, transformed_queries
from tests.extras.quari import explicit
from tests.extras.quari.conftest import DIM, small

FORMS = ["published", "linear"]


def drawn(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@pytest.mark.parametrize("form", FORMS)
def test_shapes(disturbed, form):
    adaptation = disturbed(form=form)(drawn(5, DIM))
    assert adaptation.query.shape == (5, DIM)
    assert adaptation.U.shape == adaptation.V.shape == (5, 0 if form == "linear" else 3, DIM)


def test_untrained_maps_leave_the_cosine_as_it_is():
    network = Quari(small(form="linear")).eval()
    queries, items = drawn(6, DIM), drawn(20, DIM, seed=1)
    adaptation = network(queries)
    for which in range(6):
        np.testing.assert_allclose(
            explicit.transformation(adaptation, which), np.eye(DIM), atol=1e-12
        )
    wanted = torch.nn.functional.normalize(queries) @ torch.nn.functional.normalize(items).T
    torch.testing.assert_close(cosines(adaptation, items), wanted, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        transformed_queries(adaptation), torch.nn.functional.normalize(queries)
    )


def test_tokens_begin_at_zero_and_differ_by_their_positions_only():
    network = Quari(small(steps=1)).eval()
    network.hypernetwork.pos_emb.zero_()
    adaptation = network(drawn(2, DIM))
    for part in (adaptation.U, adaptation.V):
        torch.testing.assert_close(part, part[:, :1].expand_as(part))
    assert adaptation.U[0, 0].norm() > 0


def test_queries_see_the_gallery_each_in_its_own_way(disturbed):
    adaptation = disturbed()(drawn(2, DIM))
    first, second = (explicit.transformation(adaptation, which) for which in (0, 1))
    assert np.abs(first - second).max() > 1e-3


def test_only_the_direction_of_a_query_counts(disturbed):
    network, queries = disturbed(), drawn(3, DIM)
    for one, other in zip(network(queries)[:3], network(7 * queries)[:3], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("form", FORMS)
def test_cosines_are_those_of_t_written_out(disturbed, form):
    adaptation = disturbed(form=form)(drawn(4, DIM))
    items = drawn(30, DIM, seed=2)
    wanted = explicit.cosines(adaptation, items.double().numpy())
    np.testing.assert_allclose(cosines(adaptation, items).detach(), wanted, atol=3e-6)
    revert = [
        q @ explicit.transformation(adaptation, i)
        for i, q in enumerate(adaptation.query.detach().numpy())
    ]
    np.testing.assert_allclose(
        transformed_queries(adaptation).detach(), revert, rtol=1e-4, atol=1e-5
    )


def test_fewer_directions_give_lengths_nearly(disturbed):
    """The more, the nearer; none is off by a common factor."""
    items = drawn(200, DIM, seed=2)
    queries, off = drawn(4, DIM), []
    for directions in (1, 4, 8, DIM, 3 * DIM):
        network = disturbed(form="linear", directions=directions)
        exact = explicit.cosines(network(queries), items.double().numpy())
        found = cosines(network(queries), items).detach().numpy()
        off.append(np.abs(found - exact).mean())
        np.testing.assert_allclose(
            cosines(network.train()(queries), items).detach(), exact, atol=3e-6
        )
    assert off[0] > off[1] > off[2] > off[3]
    assert off[0] < 0.1
    assert max(off[3:]) < 3e-6


def test_directions_are_computed_again_when_the_map_has_changed(disturbed):
    network = disturbed(form="linear")
    network(drawn(1, DIM))
    with torch.no_grad():
        network.item_map.mul_(2)
    lengths = network(drawn(1, DIM)).static
    wanted = (network.item_map.T @ network.item_map).detach()
    found = lengths.directions.T @ torch.diag(
        lengths.weights
    ) @ lengths.directions + lengths.base * torch.eye(DIM)
    torch.testing.assert_close(found, wanted)


def test_items_and_queries_without_a_direction_are_no_nan(disturbed):
    network = disturbed()
    scores = cosines(network(torch.zeros(1, DIM)), torch.zeros(2, DIM))
    assert scores.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("form", FORMS)
def test_gradients_reach_every_part(disturbed, form):
    network = disturbed(form=form).train()
    cosines(network(drawn(4, DIM)), drawn(6, DIM, seed=1)).square().sum().backward()
    for name, each in network.named_parameters():
        assert each.grad is not None, name
        assert each.grad.abs().max() > 0, name


def test_positions_are_sines_and_cosines():
    table = sinusoids(5, 6)
    assert table[0].tolist() == [0, 1, 0, 1, 0, 1]
    assert table[3, 2].item() == pytest.approx(np.sin(3 / 10_000 ** (2 / 6)))
    assert table[4, 5].item() == pytest.approx(np.cos(4 / 10_000 ** (4 / 6)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"dim": 0},
        {"rank": 0},
        {"width": 9},
        {"heads": 3},
        {"dropout": 1.0},
        {"form": "other"},
        {"directions": 0},
    ],
)
def test_sizes_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InvalidParameter):
        small(**wrong)
