"""The memory of linear maps: what it recalls against sums in float64, when it is filled, and that it helps."""

import numpy as np
import pytest
import torch

from milvus_hubness import LinearMaps
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.extras.quari.model import STRENGTHS, TEMPERATURES, Memory, Quari
from milvus_hubness.extras.quari.pairs import Pairs
from milvus_hubness.extras.quari.settings import QuariConfig, TrainingSettings
from milvus_hubness.extras.quari.train import train
from tests.extras.quari.conftest import DIM, small

SHORT = TrainingSettings.linear(
    epochs=2, batch=40, learning_rate=1e-2, least_rate=2e-4, neighbors=10, temperature=0.1, noise=0
)


def unit_rows(count, seed=0):
    rows = np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)
    return torch.from_numpy(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def subjects(seed, count=400):
    """Pairs of eight subjects: the items of each lie elsewhere than its queries, each in its own way."""
    fixed, rng = np.random.default_rng(7), np.random.default_rng(seed)
    centroids, turns = fixed.normal(size=(8, DIM)), fixed.normal(size=(8, DIM, DIM))
    subject = rng.integers(0, 8, count)
    free = rng.normal(size=(count, DIM))
    items = centroids[subject] + 0.3 * free
    queries = centroids[subject] + 0.1 * np.einsum("ndk,nk->nd", turns[subject], free)
    queries += 0.05 * rng.normal(size=queries.shape)
    moved = items + fixed.normal(size=(8, DIM))[subject]
    return Pairs(queries.astype(np.float32), moved.astype(np.float32))


def test_the_recalled_errors_are_the_weighted_sum():
    memory, queries = Memory(7, DIM), unit_rows(3, seed=1)
    remembered, errors = unit_rows(7, seed=2), unit_rows(7, seed=3)
    assert not memory(queries).any()
    memory.load_state_dict({**memory.state_dict(), "queries": remembered, "errors": errors})
    memory.tune(0.4, 0.3)
    shares = np.exp(queries.double().numpy() @ remembered.double().numpy().T / 0.3)
    wanted = 0.4 * shares / shares.sum(1, keepdims=True) @ errors.double().numpy()
    np.testing.assert_allclose(memory(queries), wanted, atol=1e-6)


def test_it_moves_the_query_by_the_errors_of_the_maps(disturbed):
    network, queries = disturbed(form="linear", memory=5), unit_rows(4)
    remembered, items = unit_rows(5, seed=2), unit_rows(5, seed=1)
    with torch.no_grad():
        W, S = network.query_map, network.item_map
        before = network(queries).query
        torch.testing.assert_close(before, queries @ W.T)
        network.remember(remembered, items)
        network.memory.tune(0.5, 0.1)
        mapped, targets = remembered @ W.T, items @ S.T
        errors = targets / targets.norm(dim=1, keepdim=True) - mapped / mapped.norm(
            dim=1, keepdim=True
        )
        recalled = 0.5 * (queries @ remembered.T / 0.1).softmax(1) @ errors
        moved = before + before.norm(dim=1, keepdim=True) * recalled
        torch.testing.assert_close(network(3 * queries).query, moved)
        torch.testing.assert_close(network.train()(queries).query, before)


def test_it_is_filled_after_the_last_epoch_and_helps():
    learned, held, config = subjects(1), subjects(2), QuariConfig(DIM, memory=300)
    trained = train(learned, config, SHORT, validation=held, device="cpu")
    without = train(learned, QuariConfig(DIM), SHORT, validation=held, device="cpu")
    assert trained.history[:-1] == without.history
    assert trained.history[-1].loss is None
    assert trained.history[-1].mrr > without.history[-1].mrr + 0.05
    network = trained.network()
    memory = network.memory
    assert float(memory.strength) in torch.tensor(STRENGTHS)
    assert float(memory.temperature) in torch.tensor(TEMPERATURES)
    which = [int(np.abs(learned.queries - row).sum(1).argmin()) for row in memory.queries.numpy()]
    assert len(set(which)) == 300
    np.testing.assert_array_equal(memory.queries, learned.queries[which])
    maps = Quari(config)
    maps.load_state_dict(
        {**maps.state_dict(), **{name: without.weights[name] for name in ("query_map", "item_map")}}
    )
    with torch.no_grad():
        maps.remember(
            *(torch.from_numpy(rows[which]) for rows in (learned.queries, learned.gallery))
        )
    torch.testing.assert_close(memory.errors, maps.memory.errors)


def test_it_holds_at_most_all_pairs():
    assert len(LinearMaps.fit(subjects(1, 60), SHORT).network.memory.queries) == 54


def test_networks_have_none():
    with pytest.raises(InvalidParameter, match="memory is for the form linear"):
        small(memory=5)
