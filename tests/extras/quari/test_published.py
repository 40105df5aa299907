"""The authors' network, loss and noise, against formulas written here, and the files of their weights."""

import math
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from milvus_hubness import QuariReranker
from milvus_hubness.errors import InvalidParameter, UnreadableFile
from milvus_hubness.extras.quari.checkpoint import Checkpoint
from milvus_hubness.extras.quari.model import cosines
from milvus_hubness.extras.quari.pairs import Pairs
from milvus_hubness.extras.quari.settings import QuariConfig, TrainingSettings
from milvus_hubness.extras.quari.train import published_loss, train

DIM, RANK, WIDTH, STEPS, HEADS, LAYERS = 10, 3, 16, 3, 4, 2


class Reference(nn.Module):
    """A small network as the authors describe and name it, in plain torch; the whole W of each query is written out."""

    def __init__(self):
        super().__init__()
        self.query_encoder = nn.Sequential(
            nn.Linear(DIM, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )  # fmt: skip
        self.step_proj = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        pos = torch.zeros(2 * RANK + 1, WIDTH)
        for place in range(len(pos)):
            for i in range(0, WIDTH, 2):
                pos[place, i] = math.sin(place / 10_000 ** (i / WIDTH))
                pos[place, i + 1] = math.cos(place / 10_000 ** (i / WIDTH))
        self.register_buffer("pos_emb", pos)
        self.register_buffer("pos_scale", torch.tensor([1.0]))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.transformer = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        for name in ("query_decoder", "dec_u_img", "dec_v_img"):
            head = nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, DIM)
            )
            setattr(self, name, head)

    def scores(self, query, items):
        """(c,) for one query (d,) of length 1 and items (c, d)."""
        control = self.query_encoder(query[None])
        u_tokens, v_tokens = torch.zeros(RANK, WIDTH), torch.zeros(RANK, WIDTH)
        for t in range(STEPS):
            angles = torch.tensor([t / 10_000 ** (i / (WIDTH // 2)) for i in range(WIDTH // 2)])
            step = self.step_proj(torch.cat([angles.cos(), angles.sin()])[None])
            places = self.pos_scale * self.pos_emb[:RANK]
            row = torch.cat([control + step, u_tokens + places, v_tokens + places])
            out = self.transformer.train(mode=False)(row[None])[0]
            control = control + out[:1]
            u_tokens, v_tokens = u_tokens + out[1 : 1 + RANK], v_tokens + out[1 + RANK :]
        U, V = self.dec_u_img(u_tokens).T, self.dec_v_img(v_tokens).T
        W = torch.eye(DIM) + 0.8 * (U / torch.linalg.norm(U)) @ (V / torch.linalg.norm(V)).T
        refined = 0.5 * self.query_decoder(control)[0] + 0.5 * query
        return nn.functional.cosine_similarity(refined[None], items @ W)


@pytest.fixture(scope="module")
def reference():
    with torch.random.fork_rng():
        torch.manual_seed(4)
        network = Reference().eval()
        with torch.no_grad():
            for weight in network.parameters():
                weight += 0.2 * torch.randn(weight.shape)
            network.pos_scale.fill_(0.7)
    return network


def unit_rows(count, seed):
    rows = np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def with_prefix(state):
    return {f"hypernetwork.{name}": weight for name, weight in state.items()}


@pytest.mark.parametrize(
    "kind", ["safetensors", "torch", "torch, with the prefix and the encoder's weights"]
)
def test_weights_of_the_authors_give_their_scores(reference, tmp_path, kind):
    state, path = (
        reference.state_dict(),
        tmp_path / ("weights.safetensors" if kind == "safetensors" else "weights.pt"),
    )
    if kind == "safetensors":
        save_file(state, path)
    elif kind == "torch":
        torch.save({"state_dict": state}, path)
    else:
        torch.save(
            {"state_dict": {"backbone_extractor.x": torch.ones(2), **with_prefix(state)}}, path
        )
    queries, items = unit_rows(5, 1), unit_rows(9, 2)
    with torch.no_grad():
        wanted = [
            reference.scores(query, torch.from_numpy(items)).numpy()
            for query in torch.from_numpy(queries)
        ]
    raw = queries @ items.T
    assert np.abs(raw - wanted).max() > 0.1
    reranker = QuariReranker(Checkpoint.load_published(path, heads=HEADS, steps=STEPS).network())
    np.testing.assert_allclose(reranker.scores(queries, [items] * 5), wanted, atol=1e-5)
    Checkpoint.load_published(path, encoder="clip", heads=HEADS, steps=STEPS).save(
        tmp_path / "ours.safetensors"
    )
    saved = QuariReranker.load(tmp_path / "ours.safetensors", encoder="clip")
    np.testing.assert_allclose(saved.scores(queries, [items] * 5), wanted, atol=1e-5)


def test_files_that_are_not_their_weights_are_refused(reference, tmp_path):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was loaded",))

    path = tmp_path / "weights.pt"
    for write in (
        lambda file: pickle.dump(Trap(), file, protocol=2),
        lambda file: torch.save({"state_dict": Trap()}, file),
    ):
        with open(path, "wb") as file:
            write(file)
        with pytest.raises(UnreadableFile, match="safely"):
            Checkpoint.load_published(path)
    for wrong in ({"x": torch.ones(2)}, {**reference.state_dict(), "pos_emb": torch.zeros(7, 4)}):
        torch.save(wrong, path)
        with pytest.raises(UnreadableFile):
            Checkpoint.load_published(path, heads=HEADS)
    torch.save(reference.state_dict(), path)
    with pytest.raises(InvalidParameter, match="multiple of heads"):
        Checkpoint.load_published(path, heads=5)
    path.write_bytes(b"")
    with pytest.raises(UnreadableFile):
        Checkpoint.load_published(path)


def test_the_published_network_is_as_large_as_the_authors():
    config = QuariConfig.published(512)
    assert (config.rank, config.width, config.layers, config.steps, config.heads) == (
        64,
        512,
        4,
        4,
        8,
    )
    assert (config.map_scale, config.query_weight) == (0.8, 0.5)
    for wrong in ({"query_weight": 1.0}, {"map_scale": -1}):
        with pytest.raises(InvalidParameter):
            QuariConfig.published(512, **wrong)


def test_their_loss_is_the_formula_undivided():
    rng, count, semi, tau = np.random.default_rng(0), 4, 2, 0.2
    scores, weights = (
        rng.uniform(-1, 1, (count, count * (1 + semi))),
        rng.uniform(0, 0.6, (count, semi)),
    )
    forward = backward = 0.0
    for i in range(count):
        own = [count + i * semi + k for k in range(semi)]
        seen = [*range(count), *own]
        whole = sum(math.exp(scores[i, c] / tau) for c in seen)
        for column, weight in ((i, 1.0), *zip(own, weights[i], strict=True)):
            forward -= weight * math.log(math.exp(scores[i, column] / tau) / whole)
        backward -= math.log(
            math.exp(scores[i, i] / tau) / sum(math.exp(scores[j, i] / tau) for j in range(count))
        )
    wanted = (forward + backward) / count / 2
    assert published_loss(*map(torch.from_numpy, (scores, weights)), tau).item() == pytest.approx(
        wanted, rel=1e-12
    )


@pytest.mark.parametrize("form", ["linear", "published"])
def test_noise_is_per_query_or_per_coordinate(monkeypatch, form):
    """The queries that the network sees in training are as far from those given as the settings say."""
    from milvus_hubness.extras.quari.model import Quari

    lengths, forward = [], Quari.forward

    def watched(network, queries):
        if network.training:
            nearest = torch.cdist(queries, torch.from_numpy(pairs.queries)).min(1).values
            lengths.extend(nearest.tolist())
        return forward(network, queries)

    monkeypatch.setattr(Quari, "forward", watched)
    pairs = Pairs(unit_rows(40, 5), unit_rows(40, 6))
    settings = TrainingSettings(epochs=1, batch=20, noise=0.3, neighbors=5)
    config = QuariConfig(DIM, form=form, rank=1, width=8, layers=1, steps=1)
    train(pairs, config, settings, validation=pairs, device="cpu")
    expected = 0.3 * 0.5 * (math.sqrt(DIM) if form == "published" else 1.0)
    assert np.mean(lengths) == pytest.approx(expected, rel=0.35)


def test_a_published_network_learns():
    rng = np.random.default_rng(3)
    turn = np.linalg.qr(rng.normal(size=(DIM, DIM)))[0]
    learned, held = (
        Pairs(rows, rows @ turn + 0.1) for rows in (unit_rows(200, 7), unit_rows(80, 8))
    )
    config = QuariConfig.published(DIM, rank=2, width=16, layers=1, steps=2, heads=2)
    settings = TrainingSettings(epochs=6, batch=40, learning_rate=1e-2, least_rate=1e-3, noise=0.05)
    trained = train(learned, config, settings, validation=held, device="cpu")
    assert trained.history[trained.best_epoch].mrr > trained.history[0].mrr + 0.15
    queries = torch.from_numpy(held.queries[:2])
    first, second = (trained.network()(queries).U[i] for i in (0, 1))
    assert cosines(trained.network()(queries), queries).abs().max() <= 1 + 1e-5
    assert (first - second).abs().max() > 1e-4
