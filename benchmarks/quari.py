"""What a QuARI network adds to the corrected search, where it learned from a few thousand pairs.

    python -m benchmarks.quari [--again] [--speed] [--ablations] [world …]

docstring_code: the networks learn from 6,000 of the bank's 7,000 pairs; the other 1,000, the validation
pairs, choose everything that is chosen: the epoch, the settings, and how the bias and the network are
composed. The 3,000 test pairs are looked at at the end only; an earlier run, of another form and other
settings, had looked at them once before, and nothing was chosen by what it found. The standard-library demo,
of this Python, is split alike: half of its test pairs to learn from, a tenth of them to validate. Rivals:

    raw, corrected      the cosine, without and with the bias of Sinkhorn(0.03) from the bank's queries
    one map, two maps   the fine-tuned linear map ("static task adaptation"): one W for both sides, or one for
                        each, with QuARI's own loss, semi-positives, noise, optimiser and early stop
    αQE                 the query and its nearest corrected items, weighted by the α-th power of their cosine
                        (Radenović et al., TPAMI 2019, section 3.3)
    QuARI               corrected candidates, re-ranked

Trained networks are kept in the cache folder of this user, so that the judgement can be repeated; --again
trains anew. --speed times re-ranking only. Results go to results/quari.json and .md, the curves to
results/quari_*.svg. Exits with 1 where re-ranking 1,000 candidates of 512-d at batch 16 takes more than 5 ms
a query, or where QuARI's R@1 on docstring_code is not above raw and both maps by intervals that exclude 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks.environment import RESULTS, environment, one_thread, save, table
from milvus_hubness.banks import QueryBank
from milvus_hubness.demo.corpus import collect
from milvus_hubness.demo.towers import build
from milvus_hubness.estimators import Sinkhorn
from milvus_hubness.quality import nearest, paired_difference, retrieval_summary
from milvus_hubness.quality.retrieval import hits
from milvus_hubness.quari import Checkpoint, Pairs, Quari, QuariConfig, QuariReranker, TrainingSettings, train
from milvus_hubness.quari.curves import learning_curves
from milvus_hubness.quari.evaluate import as_ranks
from milvus_hubness.quari.loss import contrastive_loss
from milvus_hubness.quari.scoring import cosines
from milvus_hubness.quari.semipositives import mine
from tests.real_data import load_task

CACHE = Path.home() / ".cache" / "milvus_hubness"
ESTIMATOR = Sinkhorn(0.03)
CANDIDATES = 1000
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
ADAPTED_BANK = 1000
QUARI = "QuARI"
MILLISECONDS = 5.0
SPEED_REPEATS = 60

COMMON = TrainingSettings(
    epochs=24,
    patience=3,
    batch=1000,
    learning_rate=1e-4,
    least_rate=2e-6,
    anchor_epochs=16,
    anchor_rate=3e-4,
    temperature=0.04,
    noise=0.5,
)
SIZES = {
    "rank": 8,
    "width": 64,
    "layers": 2,
    "steps": 1,
    "dropout": 0.2,
    "form": "anchored",
    "anchors": 128,
}
MAPS = tuple(
    dataclasses.replace(
        COMMON, epochs=16, patience=4, learning_rate=3e-4, least_rate=6e-6, anchor_epochs=0, batch=batch
    )
    for batch in (320, 1000)
)
ABLATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it is": ({}, {}),
    "static maps only": ({}, {"epochs": 16}),
    "residual: no static maps": ({"form": "residual"}, {"anchor_epochs": 0, "epochs": 10}),
    "published: T = Σ u vᵀ": ({"form": "published"}, {"anchor_epochs": 0, "epochs": 10}),
    "no semi-positives": ({}, {"semi_positives": 0}),
    "no noise": ({}, {"noise": 0.0}),
}


@dataclasses.dataclass(frozen=True)
class World:
    """Pairs to learn from, to validate on and to test on; bank: queries that biases are estimated from."""

    name: str
    learned: Pairs
    held: Pairs
    test: Pairs
    bank: np.ndarray


def docstring_code() -> World:
    task = load_task("docstring_code")
    learned, held = Pairs(task.bank, task.target_bank).split(1 / 7, 0)
    return World("docstring_code", learned, held, Pairs(task.query, task.gallery), task.bank)


def standard_library() -> World:
    """All pairs of this Python's standard library; the demo's own bank."""
    towers = build(collect())
    half = len(towers.queries) // 2
    learned, held = Pairs(towers.queries[:half], towers.gallery[:half]).split(0.1, 0)
    return World(
        "standard library", learned, held, Pairs(towers.queries[half:], towers.gallery[half:]), towers.bank
    )


WORLDS = {"docstring_code": docstring_code, "standard_library": standard_library}


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
    """The maps of the epoch with the best validation MRR, and that. As `train` does, step by step."""
    torch.manual_seed(settings.seed)
    pairs, model = world.learned, Maps(world.learned.dim, count)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    semi = mine(pairs.gallery, keep=max(1, settings.semi_positives), temperature=settings.temperature)
    near = torch.from_numpy(semi.items)[:, : settings.semi_positives]
    shares = torch.from_numpy(semi.weights)[:, : settings.semi_positives]
    queries, gallery, answers = map(torch.from_numpy, (pairs.queries, pairs.gallery, pairs.of))
    an_epoch = len(pairs) // settings.batch
    best, kept, since, step = -1.0, model.state_dict(), 0, 0
    for _ in range(settings.epochs):
        order = torch.randperm(len(pairs))
        for nth in range(an_epoch):
            which = order[nth * settings.batch : (nth + 1) * settings.batch]
            for group in optimizer.param_groups:
                group["lr"] = settings.rate(step, an_epoch * settings.epochs)
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
            (1 / places(map_scores(model, world.held.queries, world.held.gallery), world.held)).mean()
        )
        if mrr > best:
            best, kept, since = mrr, {name: each.clone() for name, each in model.state_dict().items()}, 0
        else:
            since += 1
        if since == settings.patience:
            break
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
    own = scores[np.arange(len(scores)), pairs.of]
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
    """Bank queries enough for a bias in the adapted space, where each has a T of its own."""
    return bank[np.random.default_rng(0).permutation(len(bank))[:ADAPTED_BANK]]


def expanded(pairs: Pairs, bias: np.ndarray, count: int, power: float) -> np.ndarray:
    """(n, g) corrected scores of the queries of αQE."""
    found = nearest(pairs.queries, pairs.gallery, count, bias)
    near = pairs.gallery[found]
    weights = np.clip(np.einsum("nd,nkd->nk", pairs.queries, near), 0, None) ** power
    asked = pairs.queries + np.einsum("nk,nkd->nd", weights, near)
    asked /= np.linalg.norm(asked, axis=1, keepdims=True)
    return asked @ pairs.gallery.T - bias


def mrr(scores: np.ndarray, pairs: Pairs) -> float:
    return float((1 / places(scores, pairs)).mean())


def trained(
    world: World, name: str, sizes: dict[str, Any], settings: TrainingSettings, anew: bool
) -> Checkpoint:
    """From the cache as far as its training came, else trained now."""
    CACHE.mkdir(parents=True, exist_ok=True)
    path = CACHE / f"quari {world.name} {name}.safetensors".replace(" ", "_")
    if path.exists() and not anew:
        return Checkpoint.load(path)
    started = time.monotonic()
    return train(
        world.learned,
        QuariConfig(world.learned.dim, **sizes),
        settings,
        validation=world.held,
        path=path,
        device="cpu",
        on_epoch=lambda now: print(world.name, name, now, f"{time.monotonic() - started:.0f} s", flush=True),
    )


class Rivals:
    """All that is chosen on the validation pairs, and the scores of any pairs under it."""

    def __init__(self, world: World, kept: Checkpoint) -> None:
        self.world, self.network, self.kept = world, kept.network(), kept
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
                SHARES, key=lambda one, model=model: mrr(map_corrected(model, held, known, one), held)
            )
            self.maps[name] = (model, share)
            self.chosen[name] = {
                "validation MRR": best,
                "share of the bias": share,
                "settings": settings.to_dict(),
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
        self.chosen |= {
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
        found["QuARI, all items"] = adapted
        found["QuARI, corrected candidates"] = among(adapted, corrected, CANDIDATES)
        found["QuARI, bias before"] = among(adapted - self.before * bias, corrected, CANDIDATES)
        found["QuARI, direct"] = direct @ pairs.gallery.T - bias
        found[QUARI] = among(adapted - self.share * composed, corrected, CANDIDATES)
        return found


def judged(world: World, kept: Checkpoint) -> dict[str, Any]:
    """Every rival on the test pairs, and QuARI against each by paired intervals."""
    rivals = Rivals(world, kept)
    print(world.name, rivals.chosen, flush=True)
    found = {name: places(scores, world.test) for name, scores in rivals.scores(world.test).items()}
    first = {name: hits(as_ranks(each), 1) for name, each in found.items()}
    rows = {}
    for name, each in found.items():
        rows[name] = {"measures": retrieval_summary(as_ranks(each))}
        if name != QUARI:
            rows[name]["QuARI over it, R@1"] = paired_difference(first[name], first[QUARI])._asdict()
            reciprocal = paired_difference(1 / each, 1 / found[QUARI])
            rows[name]["QuARI over it, MRR"] = reciprocal._asdict()
    return {
        "pairs": {"learned": len(world.learned), "validation": len(world.held), "test": len(world.test)},
        "gallery": len(world.test.gallery),
        "network": {name: each for name, each in kept.facts().items() if name != "format"},
        "chosen on the validation pairs": rivals.chosen,
        "rows": rows,
    }


def products(config: QuariConfig) -> int:
    """Multiplications of one query and its candidates, of the matrix products alone."""
    tokens, width, inside = 1 + 2 * config.rank, config.width, config.hidden * config.width
    a_layer = tokens * width * (4 + 2 * config.feedforward) * width + 2 * tokens**2 * width
    decoders = tokens * inside * (width + config.dim)
    a_candidate = (2 * config.rank + 1) * config.dim + config.rank**2
    of_query = 2 * config.rank**2 * config.dim
    if config.form == "anchored":
        of_query += (config.rank + 2) * config.dim**2
        a_candidate += min(config.anchors, config.dim) * config.dim
    network = config.layers * config.steps * a_layer + decoders + inside * (config.dim + width)
    return network + of_query + CANDIDATES * a_candidate


def speed() -> list[dict[str, Any]]:
    """Milliseconds a query for 1,000 candidates of 512-d in batches of 16, from arrays to scores, one thread;
    in turn with it, for what else the machine does, a plain product of two matrices."""
    rng, found = np.random.default_rng(0), []
    queries = rng.normal(size=(16, 512)).astype(np.float32)
    items = list(rng.normal(size=(16, CANDIDATES, 512)).astype(np.float32))
    left, right = torch.randn(1024, 512), torch.randn(512, 1024)
    for name, sizes in (("default", {}), ("as trained here", SIZES)):
        reranker = QuariReranker(Quari(QuariConfig(512, **sizes)), candidates=CANDIDATES)
        config = reranker.network.config

        def network(reranker: QuariReranker = reranker) -> None:
            with torch.inference_mode():
                reranker.network(torch.from_numpy(queries))

        whole, of_network, plain = [], [], []
        for _ in range(SPEED_REPEATS):
            whole.append(_seconds(lambda reranker=reranker: reranker.scores(queries, items)) / len(queries))
            of_network.append(_seconds(network) / len(queries))
            plain.append(_seconds(lambda: left @ right) / (1024 * 512 * 1024))
        found.append(
            {
                "sizes": name,
                "rank": config.rank,
                "median ms": 1000 * float(np.median(whole)),
                "least ms": 1000 * min(whole),
                "of that the network": 1000 * float(np.median(of_network)),
                "multiplications": products(config),
                "plain product, median ms": 1000 * products(config) * float(np.median(plain)),
                "plain product, least ms": 1000 * products(config) * min(plain),
                "times the plain product, median": float(np.median(np.array(whole) / np.array(plain)))
                / products(config),
            }
        )
    return found


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def markdown(results: dict[str, Any]) -> str:
    """The tables."""
    parts = []
    for name, world in results["worlds"].items():
        head = ["", "R@1", "mAP@10", "nDCG@10", "QuARI over it, R@1", "QuARI over it, MRR"]
        rows = []
        for rival, row in world["rows"].items():
            measures = [f"{100 * row['measures'][one]:.1f}" for one in ("R@1", "mAP@10", "nDCG@10")]
            gains = [_gain(row.get(f"QuARI over it, {one}")) for one in ("R@1", "MRR")]
            rows.append([rival, *measures, *gains])
        sizes = world["pairs"]
        parts.append(
            f"## {name}\n\n{sizes['learned']} pairs to learn from, {sizes['validation']} to validate on, "
            f"{sizes['test']} test queries over {world['gallery']} items; in %, with 95% intervals.\n\n"
            f"{table(head, rows)}"
        )
    head = ["sizes", "rank", "ms a query, median", "least", "of that the network, median"]
    head += ["as much in one plain product, median ms", "least", "times that, median"]
    rows = [
        [each["sizes"], str(each["rank"])]
        + [f"{each[one]:.2f}" for one in ("median ms", "least ms", "of that the network")]
        + [f"{each[f'plain product, {one} ms']:.2f}" for one in ("median", "least")]
        + [f"{each['times the plain product, median']:.1f}"]
        for each in results["speed"]
    ]
    told = f"1,000 candidates of 512-d, batches of 16, one thread, {SPEED_REPEATS} batches."
    parts.append(f"## Cost\n\n{told}\n\n{table(head, rows)}")
    if results.get("ablations"):
        head = ["on docstring_code's validation pairs", "kept epoch", "R@1", "MRR"]
        rows = [
            [name, str(each["epoch"]), f"{100 * each['r1']:.1f}", f"{100 * each['mrr']:.1f}"]
            for name, each in results["ablations"].items()
        ]
        parts.append(f"## Ablations\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def _gain(interval: dict[str, float] | None) -> str:
    if interval is None:
        return ""
    low, middle, high = (f"{100 * interval[one]:+.1f}" for one in ("low", "estimate", "high"))
    return f"{middle} ({low} … {high})"


def ablated(anew: bool) -> dict[str, Any]:
    """The best epoch on docstring_code's validation pairs with a piece turned off."""
    world, found = docstring_code(), {}
    for name, (sizes, changed) in ABLATIONS.items():
        settings = dataclasses.replace(COMMON, **changed)
        kept = trained(world, name.partition(":")[0], {**SIZES, **sizes}, settings, anew)
        found[name] = kept.history[kept.best_epoch]._asdict()
    return {"untrained": kept.history[0]._asdict(), **found}


def faults(results: dict[str, Any]) -> list[str]:
    """What does not hold."""
    found = []
    for rival in ("raw", "one map", "two maps") if "docstring_code" in results["worlds"] else ():
        gain = results["worlds"]["docstring_code"]["rows"][rival]["QuARI over it, R@1"]
        if gain["low"] <= 0:
            found.append(f"QuARI's R@1 over {rival} is {_gain(gain)}: the interval does not exclude 0")
    slowest = next(each for each in results["speed"] if each["sizes"] == "default")
    if slowest["median ms"] > MILLISECONDS:
        found.append(f"re-ranking takes {slowest['median ms']:.1f} ms a query")
    return found


def main() -> int:
    one_thread()
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="store_true", help="train anew")
    parser.add_argument("--speed", action="store_true", help="only time re-ranking")
    parser.add_argument("--ablations", action="store_true", help="train with pieces turned off, too")
    parser.add_argument(
        "worlds", nargs="*", metavar="world", help=f"of {', '.join(WORLDS)}; all unless given"
    )
    given = parser.parse_args()
    if given.speed:
        print(*speed(), sep="\n")
        return 0
    results: dict[str, Any] = {"environment": {}, "speed": speed(), "worlds": {}}
    for name in given.worlds or WORLDS:
        world = WORLDS[name]()
        kept = trained(world, "as it is", SIZES, COMMON, given.again)
        results["worlds"][world.name] = judged(world, kept)
        curves = RESULTS / f"quari_{world.name.replace(' ', '_')}.svg"
        curves.write_text(learning_curves(kept))
    results["environment"] = environment(started)
    save("quari", results, markdown(results))
    if given.ablations:
        results["ablations"] = ablated(given.again)
    results["environment"] = environment(started)
    text = markdown(results)
    print(text)
    missed = faults(results)
    results["bounds that do not hold"] = missed
    save("quari", results, text)
    print("\n".join(missed) or "all bounds hold")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
