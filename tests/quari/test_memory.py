"""The memory: what it recalls against loops in float64, when it is filled, and that it helps where it can."""

import dataclasses

import numpy as np
import pytest
import torch

from milvus_hubness.errors import InvalidParameter
from milvus_hubness.quari.model import STRENGTHS, TEMPERATURES, Memory, Quari
from milvus_hubness.quari.pairs import Pairs
from milvus_hubness.quari.settings import TrainingSettings
from milvus_hubness.quari.train import train
from tests.quari.conftest import DIM, small

SHORT = TrainingSettings(
    epochs=3,
    anchor_epochs=2,
    batch=40,
    learning_rate=1e-6,
    least_rate=0,
    anchor_rate=1e-2,
    neighbors=10,
    temperature=0.1,
    noise=0,
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


def test_what_is_recalled_is_the_sum_written_out():
    memory, queries = Memory(7, DIM), unit_rows(3, seed=1)
    kept, errors = unit_rows(7, seed=2), unit_rows(7, seed=3)
    assert not memory(queries).any()
    memory.fill(kept, errors)
    memory.tune(0.4, 0.3)
    hidden = torch.zeros(3, 7, dtype=torch.bool)
    hidden[0, 2] = hidden[1, :6] = hidden[2] = True
    for mask in (None, hidden):
        wanted = np.zeros((3, DIM))
        for i, query in enumerate(queries.double().numpy()):
            shares = np.exp(kept.double().numpy() @ query / 0.3)
            if mask is not None:
                shares[mask[i].numpy()] = 0
            if shares.any():
                wanted[i] = 0.4 * shares @ errors.double().numpy() / shares.sum()
        np.testing.assert_allclose(memory(queries, mask), wanted, atol=1e-6)
    assert not memory(queries, hidden)[2].any()


@pytest.mark.parametrize("form", ["residual", "anchored"])
def test_it_moves_the_query_and_nothing_else(disturbed, form):
    network, queries = disturbed(form=form, memory=5, dropout=0.0), unit_rows(4)
    items = unit_rows(5, seed=1)
    W, S = network.query_map, network.item_map
    asked, targets = (rows if by is None else rows @ by.T for rows, by in ((unit_rows(5, seed=2), W), (items, S)))
    wanted = targets / targets.norm(dim=1, keepdim=True) - asked / asked.norm(dim=1, keepdim=True)
    errors = network.errors(unit_rows(5, seed=2), items).detach()
    torch.testing.assert_close(errors, wanted.detach())
    before = network(queries)
    network.memory.fill(unit_rows(5, seed=2), errors)
    network.memory.tune(0.5, 0.1)
    after = network(3 * queries)
    mapped = network.anchored(queries).query
    moved = mapped.norm(dim=1, keepdim=True) * network.memory(queries)
    torch.testing.assert_close(after.query, before.query + moved)
    torch.testing.assert_close(network.remembering(queries).query, mapped + moved)
    for one, other in ((before.U, after.U), (before.V, after.V)):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("form", ["residual", "anchored"])
def test_it_is_filled_after_the_anchor_epochs_and_helps(form):
    learned, held = subjects(1), subjects(2)
    settings = SHORT if form == "anchored" else dataclasses.replace(SHORT, anchor_epochs=0, epochs=1)
    config = small(form=form, memory=300)
    trained = train(learned, config, settings, validation=held, device="cpu")
    without = train(learned, small(form=form), settings, validation=held, device="cpu")
    assert trained.history[: settings.anchor_epochs + 1] == without.history[: settings.anchor_epochs + 1]
    assert trained.history[-1].mrr > without.history[-1].mrr + 0.05
    memory = trained.network().memory
    assert float(memory.strength) in torch.tensor(STRENGTHS)
    assert float(memory.temperature) in torch.tensor(TEMPERATURES)
    which = [int(np.abs(learned.queries - row).sum(1).argmin()) for row in memory.queries.numpy()]
    assert len(set(which)) == 300
    np.testing.assert_array_equal(memory.queries, learned.queries[which])
    maps = Quari(config)
    maps.load_state_dict(dict(trained.weights))
    asked, items = (torch.from_numpy(rows[which]) for rows in (learned.queries, learned.gallery))
    torch.testing.assert_close(memory.errors, maps.errors(asked, items).detach())


def test_in_training_a_query_recalls_no_pair_of_its_own_answer(monkeypatch):
    pairs = subjects(1, 60)
    shared = Pairs(np.concatenate([pairs.queries, pairs.queries + 0.01]), pairs.gallery, np.r_[:60, :60])
    seen, recall = [], Memory.forward

    def watched(memory, queries, hidden=None):
        if memory.training:
            seen.append((queries, memory.queries.clone(), hidden))
        return recall(memory, queries, hidden)

    monkeypatch.setattr(Memory, "forward", watched)
    train(shared, small(memory=50), dataclasses.replace(SHORT, batch=50), validation=pairs, device="cpu")
    assert len(seen) == 2
    for queries, kept, hidden in seen:

        def answers(rows):
            return shared.answers[(rows.numpy() @ shared.queries.T).argmax(1)]

        np.testing.assert_array_equal(hidden, answers(queries)[:, None] == answers(kept))


@pytest.mark.parametrize(
    ("config", "settings", "said"),
    [
        ({"memory": 61}, {}, "61 pairs cannot be filled with 60"),
        ({"memory": 5}, {"epochs": 2}, "raise epochs"),
        ({"memory": 5}, {"anchor_epochs": 0}, "needs anchor_epochs"),
    ],
)
def test_a_memory_that_would_stay_empty_is_refused(config, settings, said):
    with pytest.raises(InvalidParameter, match=said):
        train(
            subjects(1, 60),
            small(**config),
            dataclasses.replace(SHORT, **settings),
            validation=subjects(2, 60),
            device="cpu",
        )
