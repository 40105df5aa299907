"""What benchmarks.quari compares: each rival's scores of any pairs, all choices made on validation pairs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import Sinkhorn
from milvus_hubness.extras.quari.checkpoint import Checkpoint
from milvus_hubness.extras.quari.model import Quari, cosines
from milvus_hubness.extras.quari.pairs import Pairs, mine
from milvus_hubness.extras.quari.reranker import QuariReranker
from milvus_hubness.extras.quari.settings import TrainingSettings
from milvus_hubness.extras.quari.train import contrastive_loss
from milvus_hubness.quality.measures import nearest

ESTIMATOR = Sinkhorn(0.03)
CANDIDATES = 1000
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
ADAPTED_BANK = 1000
LEARNED = "maps and memory"

COMMON = TrainingSettings.linear(patience=16, temperature=0.04, noise=0.5)
SIZES = {"directions": 128}
MAPS = tuple(
    dataclasses.replace(COMMON, learning_rate=rate, least_rate=rate / 50, batch=batch)
    for batch in (320, 1000)
    for rate in (COMMON.learning_rate, 2 * COMMON.learning_rate)
)


@dataclasses.dataclass(frozen=True)
class World:
    """Pairs to learn from, to validate on and to test on; bank: queries that biases are estimated from."""

    name: str
    learned: Pairs
    held: Pairs
    test: Pairs
    bank: np.ndarray


class Maps(torch.nn.Module):
    """One linear map for queries and items, or one for each, from the identity."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.maps = torch.nn.ParameterList(torch.nn.Parameter(torch.eye(dim)) for _ in range(count))

    def both(self, queries: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """(m, c) cosines."""
        asked, stored = queries @ self.maps[0].T, items @ self.maps[-1].T
        return functional.normalize(asked, dim=1) @ functional.normalize(stored, dim=1).T


def train_maps(world: World, count: int, settings: TrainingSettings) -> tuple[Maps, float]:
    """The maps of the epoch with the best validation MRR, and that. As `train` has them learn, step by
    step and on the same cosine; all epochs are made."""
    torch.manual_seed(settings.seed)
    pairs, model = world.learned, Maps(world.learned.dim, count)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    near, shares = map(torch.from_numpy, mine(pairs.gallery, settings))
    queries, gallery, answers = map(torch.from_numpy, (pairs.queries, pairs.gallery, pairs.answers))
    an_epoch = len(pairs) // settings.batch
    best, kept, step = -1.0, model.state_dict(), 0
    for _ in range(settings.epochs):
        order = torch.randperm(len(pairs))
        for nth in range(an_epoch):
            which = order[nth * settings.batch : (nth + 1) * settings.batch]
            for group in optimizer.param_groups:
                group["lr"] = settings.rate(step, an_epoch)
            step += 1
            spread = settings.noise / np.sqrt(pairs.dim) * torch.rand(len(which), 1)
            asked = queries[which] + spread * torch.randn(len(which), pairs.dim)
            items = torch.cat([answers[which, None], near[answers[which]]], 1)
            columns = torch.cat([items[:, 0], items[:, 1:].reshape(-1)])
            scores = model.both(asked, gallery[columns])
            loss = contrastive_loss(scores, items, shares[answers[which]], settings.temperature)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mrr = float(
            (
                1 / places(map_scores(model, world.held.queries, world.held.gallery), world.held)
            ).mean()
        )
        if mrr > best:
            best, kept = mrr, {name: each.clone() for name, each in model.state_dict().items()}
    model.load_state_dict(kept)
    return model, best


def map_scores(model: Maps, queries: np.ndarray, gallery: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return model.both(torch.from_numpy(queries), torch.from_numpy(gallery)).numpy()


def map_corrected(model: Maps, pairs: Pairs, bank: np.ndarray, share: float) -> np.ndarray:
    """Scores less a share of the bias among the mapped vectors."""
    bias = bias_of(map_scores(model, some(bank), pairs.gallery))
    return map_scores(model, pairs.queries, pairs.gallery) - share * bias


def adapted_scores(network: Quari, queries: np.ndarray, gallery: np.ndarray) -> np.ndarray:
    """(m, g) cos(q', T r)."""
    items = torch.from_numpy(gallery)
    with torch.inference_mode():
        parts = [cosines(network(part), items) for part in torch.from_numpy(queries).split(32)]
    return torch.cat(parts).numpy()


def places(scores: np.ndarray, pairs: Pairs) -> np.ndarray:
    """(n,) from 1, where each answer stands; ties count against it."""
    own = scores[np.arange(len(scores)), pairs.answers]
    return (scores >= own[:, None]).sum(1)


def among(scores: np.ndarray, first: np.ndarray, count: int) -> np.ndarray:
    """The scores, those of all but the `count` best by `first` put below them in the order of that."""
    if count >= scores.shape[1]:
        return scores
    bound = -np.partition(-first, count - 1, axis=1)[:, count - 1 : count]
    low = scores.min() - 1 - (first.max() - first)
    return np.where(first >= bound, scores, low)


def raw_bias(pairs: Pairs, bank: np.ndarray) -> np.ndarray:
    """(g,) the bias that the database holds."""
    return ESTIMATOR.fit(QueryBank(bank), gallery=pairs.gallery).bias(pairs.gallery)


def bias_of(scores: np.ndarray) -> np.ndarray:
    """(g,) the bias of items whose scores with bank queries are these (b, g)."""
    unit_vectors = np.eye(scores.shape[1], dtype=np.float32)
    return ESTIMATOR.fit(QueryBank(scores), gallery=unit_vectors).bias(unit_vectors)


def some(bank: np.ndarray) -> np.ndarray:
    """Bank queries enough for a bias in the adapted space."""
    return bank[np.random.default_rng(0).permutation(len(bank))[:ADAPTED_BANK]]


def expanded(pairs: Pairs, bias: np.ndarray, count: int, power: float) -> np.ndarray:
    """(n, g) corrected scores of the queries of αQE."""
    found = nearest(pairs.queries, pairs.gallery, count, bias)
    near = pairs.gallery[found]
    weights = np.clip(np.einsum("nd,nkd->nk", pairs.queries, near), 0, None) ** power
    query_vectors = pairs.queries + np.einsum("nk,nkd->nd", weights, near)
    query_vectors /= np.linalg.norm(query_vectors, axis=1, keepdims=True)
    return query_vectors @ pairs.gallery.T - bias


def mrr(scores: np.ndarray, pairs: Pairs) -> float:
    return float((1 / places(scores, pairs)).mean())


class Rivals:
    """All that is chosen on the validation pairs, and the scores of any pairs under it."""

    def __init__(self, world: World, kept: Checkpoint) -> None:
        self.world, self.network = world, kept.network()
        held = world.held
        self.chosen: dict[str, Any] = {}
        known = world.learned.queries  # the bank holds the validation queries too
        bias, cosine = raw_bias(held, known), held.queries @ held.gallery.T
        self.expansion = max(
            ((count, power) for count in (1, 2, 3, 5, 10) for power in (1.0, 3.0)),
            key=lambda how: mrr(expanded(held, bias, *how), held),
        )
        self.maps = {}
        for name, count in (("one map", 1), ("two maps", 2)):
            tried = [(*train_maps(world, count, settings), settings) for settings in MAPS]
            model, best, settings = max(tried, key=lambda one: one[1])
            share = max(
                SHARES,
                key=lambda one, model=model: mrr(map_corrected(model, held, known, one), held),
            )
            self.maps[name] = (model, share)
            self.chosen[name] = {
                "validation MRR": best,
                "share of the bias": share,
                "settings": dataclasses.asdict(settings),
            }
        scores = adapted_scores(self.network, held.queries, held.gallery)
        after = bias_of(adapted_scores(self.network, some(known), held.gallery))
        tried_shares = {
            (place, share): mrr(among(scores - share * each, cosine - bias, CANDIDATES), held)
            for place, each in (("before", bias), ("adapted", after))
            for share in SHARES
        }
        self.place, self.share = max(tried_shares, key=lambda one: tried_shares[one])
        self.before = max(SHARES, key=lambda share: tried_shares["before", share])
        memory = self.network.memory
        self.chosen |= {
            "memory": {
                "strength": float(memory.strength),
                "temperature": float(memory.temperature),
                "validation MRR": mrr(scores, held),
            },
            "αQE": {"nearest": self.expansion[0], "power": self.expansion[1]},
            "composition": {
                "where": self.place,
                "share": self.share,
                "validation MRR": {
                    f"{place} {share:g}": each for (place, share), each in tried_shares.items()
                },
            },
        }

    def scores(self, pairs: Pairs) -> dict[str, np.ndarray]:
        """(n, g) of each rival."""
        bank = self.world.bank
        bias, cosine = raw_bias(pairs, bank), pairs.queries @ pairs.gallery.T
        corrected = cosine - bias
        adapted = adapted_scores(self.network, pairs.queries, pairs.gallery)
        after = bias_of(adapted_scores(self.network, some(bank), pairs.gallery))
        direct = QuariReranker(self.network, direct=True).direct_queries(pairs.queries)
        composed = {"before": bias, "adapted": after}[self.place]
        found = {
            "raw": cosine,
            "corrected": corrected,
            "αQE": expanded(pairs, bias, *self.expansion),
            **{
                name: map_scores(model, pairs.queries, pairs.gallery)
                for name, (model, _) in self.maps.items()
            },
            **{
                f"{name}, corrected": map_corrected(model, pairs, bank, share)
                for name, (model, share) in self.maps.items()
            },
        }
        found[f"{LEARNED}, all items"] = adapted
        found[f"{LEARNED}, corrected candidates"] = among(adapted, corrected, CANDIDATES)
        found[f"{LEARNED}, bias before"] = among(
            adapted - self.before * bias, corrected, CANDIDATES
        )
        found[f"{LEARNED}, direct"] = direct @ pairs.gallery.T - bias
        found[LEARNED] = among(adapted - self.share * composed, corrected, CANDIDATES)
        return found
