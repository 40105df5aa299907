"""Training: that it learns, that it can be taken up again to the bit, and what it refuses."""

import dataclasses

import numpy as np
import pytest
import torch

from milvus_hubness.errors import (
    DimensionMismatch,
    InvalidInput,
    InvalidParameter,
    NonFiniteVectors,
)
from milvus_hubness.extras.quari.checkpoint import Checkpoint
from milvus_hubness.extras.quari.curves import learning_curves
from milvus_hubness.extras.quari.pairs import Pairs, unit
from milvus_hubness.extras.quari.settings import TrainingSettings
from milvus_hubness.extras.quari.train import train, validate
from tests.extras.quari.conftest import DIM, small

QUICK = TrainingSettings(
    epochs=4,
    batch=24,
    learning_rate=1e-3,
    least_rate=1e-5,
    neighbors=10,
    temperature=0.1,
    noise=0.3,
)


def gallery_seen_otherwise_by_half_of_the_queries(seed, count=120):
    """Pairs that no one map of the gallery fits: of an item its first, or its second half is asked for, by
    queries that lie on one or the other side of the last axis. What is not asked for misleads."""
    rng = np.random.default_rng(seed)
    items = rng.normal(size=(count, DIM))
    side = rng.random(count) < 0.5
    half = DIM // 2
    queries = 0.3 * rng.normal(size=(count, DIM))
    queries[:, : half - 1] += np.where(side[:, None], items[:, : half - 1], items[:, half:-1])
    queries[:, -1] = np.where(side, 3, -3)
    return Pairs(queries.astype(np.float32), items.astype(np.float32))


def by_one_map(learned, held):
    """MRR of the held pairs under the ridge regression of answers on queries, and of queries on answers."""
    asked, answers = learned.queries, learned.gallery[learned.answers]
    to_items, to_queries = (
        np.linalg.solve(one.T @ one + 0.01 * np.eye(DIM), one.T @ other)
        for one, other in ((asked, answers), (answers, asked))
    )
    for queries, items in (
        (held.queries @ to_items, held.gallery),
        (held.queries, unit(held.gallery @ to_queries)),
    ):
        scores = queries @ items.T
        own = scores[np.arange(len(held)), held.answers]
        yield (1 / (scores >= own[:, None]).sum(1)).mean()


class Interrupted(Exception):
    pass


def interrupted_after(epoch):
    """A save of checkpoints after which a training of so many epochs ends."""
    save = Checkpoint.save

    def stop(checkpoint, path):
        save(checkpoint, path)
        if checkpoint.history[-1].epoch == epoch:
            raise Interrupted

    return stop


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def part_of(trained, prefix):
    """The tensors of a resumption whose names begin so."""
    return {
        name.removeprefix(prefix): each
        for name, each in trained.resumption.items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize(
    ("form", "memory", "epoch"), [("published", 0, 2), ("linear", 9, 2), ("linear", 9, 4)]
)
def test_an_interrupted_training_goes_on_to_the_same_bits(
    tmp_path, monkeypatch, form, memory, epoch
):
    pairs = gallery_seen_otherwise_by_half_of_the_queries(0)
    config = small(form=form, memory=memory)
    whole = train(pairs, config, QUICK, path=tmp_path / "whole", encoder="e", device="cpu")
    options = {"path": tmp_path / "parts", "encoder": "e", "device": "cpu"}
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "save", interrupted_after(epoch))
        with pytest.raises(Interrupted):
            train(pairs, config, QUICK, **options)
    torch.manual_seed(99)
    for _ in range(2):  # The second time, nothing is left to do.
        taken_up = train(pairs, config, QUICK, **options, resume=True)
        assert taken_up.history == whole.history
        assert [each.epoch for each in whole.history] == [0, 1, 2, 3, 4, *([5] if memory else [])]
        same(taken_up.weights, whole.weights)
        same(taken_up.resumption, whole.resumption)
        assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()


def test_the_seed_decides_and_nothing_outside_is_drawn():
    pairs = gallery_seen_otherwise_by_half_of_the_queries(0, 60)
    short = dataclasses.replace(QUICK, epochs=1)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = part_of(train(pairs, small(), short, device="cpu"), "last.")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    same(part_of(train(pairs, small(), short, device="cpu"), "last."), first)
    other = part_of(
        train(pairs, small(), dataclasses.replace(short, seed=1), device="cpu"), "last."
    )
    assert not torch.equal(
        other["hypernetwork.query_encoder.0.weight"], first["hypernetwork.query_encoder.0.weight"]
    )


ON_CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    ],
)
"""There the maps are computed in bfloat16."""


@pytest.mark.parametrize("device", ["cpu", ON_CUDA])
def test_it_learns_what_no_one_map_of_the_gallery_does(device):
    learned, held = (gallery_seen_otherwise_by_half_of_the_queries(seed, 600) for seed in (1, 2))
    settings = TrainingSettings(
        epochs=20,
        batch=100,
        learning_rate=1e-2,
        least_rate=1e-4,
        temperature=0.1,
        noise=0,
        semi_positives=0,
    )
    config = small(width=16, rank=8, layers=1, steps=1, dropout=0.0)
    told = []
    trained = train(
        learned,
        config,
        settings,
        validation=held,
        device=device,
        progress=lambda *each: told.append(each),
    )
    first, best = trained.history[0], trained.history[trained.best_epoch]
    assert best.mrr > 3 * first.mrr
    assert best.mrr > 1.3 * max(by_one_map(learned, held))
    ranks = validate(trained.network(), held)
    # The trained network is on the CPU.
    assert (1 / ranks).mean() == (
        best.mrr if device == "cpu" else pytest.approx(best.mrr, rel=0.01)
    )
    assert told[-1] == ("training", 120, 120)
    picture = learning_curves(trained.history, trained.best_epoch)
    assert picture.count("<polyline") == 3
    assert picture.count(f"best: {trained.best_epoch}<") == 3


def test_it_ends_early_and_keeps_the_best_weights():
    pairs = gallery_seen_otherwise_by_half_of_the_queries(0, 60)
    settings = dataclasses.replace(QUICK, epochs=50, patience=2, learning_rate=0.1, least_rate=0.1)
    trained = train(pairs, small(), settings, device="cpu")
    assert trained.history[-1].epoch == trained.best_epoch + 2 < 50
    _, held = pairs.split(0.1, settings.seed)
    assert (1 / validate(trained.network(), held)).mean() == trained.history[trained.best_epoch].mrr


def test_rates_follow_half_a_cosine():
    settings = TrainingSettings()
    rates = [settings.rate(step, 1) for step in range(100)]
    assert rates[0] == 1e-5
    assert rates[33] == pytest.approx(2e-7 + (1e-5 - 2e-7) * 0.75)
    assert rates[99] == pytest.approx(2e-7)
    assert (settings.weight_decay, settings.temperature, settings.batch) == (1e-2, 0.07, 320)
    assert (settings.neighbors, settings.semi_positives, settings.noise) == (100, 2, 1.0)


def test_a_training_is_taken_up_only_as_it_was_begun(tmp_path):
    pairs, path = gallery_seen_otherwise_by_half_of_the_queries(0, 60), tmp_path / "network"
    short = dataclasses.replace(QUICK, epochs=1)
    train(pairs, small(), short, path=path, device="cpu")
    others = gallery_seen_otherwise_by_half_of_the_queries(1, 60)
    for changed, said in (
        ((others, small(), short), "other pairs"),
        ((pairs, small(rank=2), short), "other rank"),
        ((pairs, small(), dataclasses.replace(short, noise=0.1, seed=0)), "other noise"),
    ):
        with pytest.raises(InvalidInput, match=said):
            train(*changed, path=path, resume=True, device="cpu")
    with pytest.raises(InvalidInput, match="other encoder"):
        train(pairs, small(), short, path=path, resume=True, encoder="new", device="cpu")
    finished = dataclasses.replace(Checkpoint.load(path), resumption=None)
    finished.save(path)
    with pytest.raises(InvalidInput, match="finished network"):
        train(pairs, small(), short, path=path, resume=True, device="cpu")
    with pytest.raises(InvalidInput, match="path"):
        train(pairs, small(), short, resume=True, device="cpu")


def test_a_network_of_another_dimension_is_refused():
    with pytest.raises(DimensionMismatch, match="the network is for 16"):
        train(
            gallery_seen_otherwise_by_half_of_the_queries(0, 60), small(dim=16), QUICK, device="cpu"
        )


def test_a_training_that_runs_away_says_so():
    pairs = gallery_seen_otherwise_by_half_of_the_queries(0, 60)
    settings = dataclasses.replace(QUICK, learning_rate=1e30, least_rate=1e30)
    with pytest.raises(NonFiniteVectors, match="learning_rate"):
        train(pairs, small(), settings, device="cpu")


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"batch": 1},
        {"learning_rate": 0},
        {"least_rate": 1.0},
        {"noise": -1},
        {"semi_positives": 101},
        {"temperature": float("nan")},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InvalidParameter):
        TrainingSettings(**wrong)
