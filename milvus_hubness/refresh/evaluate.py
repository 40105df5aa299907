"""The fit of new biases, and their evaluation against the old ones on held-out queries and sampled rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks.bank import QueryBank
from milvus_hubness.banks.generations import Key, StoredBank
from milvus_hubness.codec.arrays import Floats
from milvus_hubness.codec.layout import Layout
from milvus_hubness.correction import Correction
from milvus_hubness.distributed.ray_gallery import fit_on_ray
from milvus_hubness.estimators import Estimator, from_dict
from milvus_hubness.estimators.base import is_same
from milvus_hubness.operations.bias_backends import BiasBackend
from milvus_hubness.operations.progress import Progress, chunks
from milvus_hubness.quality.measures import Interval, Outcome, assess, k_occurrence, paired_difference, skewness
from milvus_hubness.refresh.plan import Labels, RefreshOptions, RefreshPlan
from milvus_hubness.state import CollectionState
from milvus_hubness.stores.protocols import Banks, Store
from milvus_hubness.stores.records import CollectionInfo

HELD_OUT = 0.2
FEWEST_HELD_OUT = 50
MOST_HELD_OUT = 2_000
FEWEST_ITEMS = 200
SLACK, LEAST = 0.1, 0.1
"""A skewness is worse if it exceeds the other by this share of it and by this absolute amount."""


class Standing(NamedTuple):
    """Biases to evaluate: their estimator and bank, and the strength of searches."""

    estimator: Estimator
    bank: StoredBank
    strength: float


class Labelled(NamedTuple):
    """Labelled queries (n, d), n ≥ 2, and for each the positions of its items in the sample."""

    queries: Floats
    positives: list[npt.NDArray[np.int64]]


@dataclass(frozen=True)
class RefreshEvaluation:
    """The result of a refresh evaluation.

    skewness: of N_10 under "raw", "old" and "new" biases, which are fitted without the held-out queries.
    overlap: mean share of the old ten best that are among the new ten best. r1: R@1 of the labelled queries
    under the same three biases. gains: the 95% intervals of "new" over "raw" and "old". r1 and gains are
    empty without labels. objection: the reason not to use the new biases; empty if there is none.
    """

    items: int
    queries: int
    skewness: dict[str, float]
    overlap: float
    r1: dict[str, float]
    gains: dict[str, Interval]
    objection: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, fit for JSON."""
        return asdict(self) | {"gains": {name: gain._asdict() for name, gain in self.gains.items()}}


def judge(
    layout: Layout, sample: Floats, old: Standing, new: Standing, labelled: Labelled | None = None, *, seed: int = 0
) -> RefreshEvaluation | None:
    """Evaluate old and new biases on a sample (n, d) of the gallery. Hold out a fifth of the new bank, fit
    both without it, and use it as queries. Labels decide if given, else the skewness decides.

    Return None if there is too little data: under 50 held-out queries, or under 200 items.
    """
    rng = np.random.default_rng(seed)
    queries = new.bank.queries.vectors
    query_vectors = queries[rng.permutation(len(queries))[: min(MOST_HELD_OUT, int(HELD_OUT * len(queries)))]]
    if len(query_vectors) < FEWEST_HELD_OUT or len(sample) < FEWEST_ITEMS:
        return None
    was, will_be = (_apart(layout, sample, each, query_vectors) for each in (old, new))
    if was is None or will_be is None:
        return None
    biases = [np.zeros(len(sample), np.float32), was, will_be]
    items = layout.reduce_items(sample)
    outcome = assess(layout.reduce_queries(query_vectors), items, biases)
    skews = {
        name: round(skewness(k_occurrence(items, len(sample))), 3)
        for name, items in zip(("raw", "old", "new"), outcome.retrieved, strict=True)
    }
    r1, gains = {}, {}
    if labelled is not None:
        result = assess(layout.reduce_queries(labelled.queries), items, biases, labelled.positives)
        r1 = dict(zip(("raw", "old", "new"), result.hits.mean(axis=1).round(4).tolist(), strict=True))
        gains = {name: paired_difference(result.hits[i], result.hits[2]) for i, name in ((0, "raw"), (1, "old"))}
    return RefreshEvaluation(
        items=len(sample),
        queries=len(query_vectors),
        skewness=skews,
        overlap=round(_overlap(outcome), 4),
        r1=r1,
        gains=gains,
        objection=_by_labels(r1, gains) if gains else _by_skewness(skews),
    )


def _apart(layout: Layout, sample: Floats, standing: Standing, query_vectors: Floats) -> Floats | None:
    """Return the biases (n,) of the sample times the strength, fitted without `query_vectors`; None if too
    few queries remain for the fit."""
    bank = standing.bank.queries
    known = {row.tobytes() for row in query_vectors}
    others = np.array([row.tobytes() not in known for row in bank.vectors])
    if others.sum() < FEWEST_HELD_OUT:
        return None
    correction = Correction.fit(
        layout,
        standing.estimator,
        QueryBank(bank.vectors[others], bank.source),
        gallery=sample if standing.estimator.needs_gallery else None,
        target_bank=standing.bank.targets,
    )
    return correction.centred(sample) * np.float32(standing.strength)


def _overlap(outcome: Outcome) -> float:
    old, new = outcome.retrieved[1], outcome.retrieved[2]
    return float(np.mean([len(np.intersect1d(a, b)) / len(a) for a, b in zip(old, new, strict=True)]))


def _by_labels(r1: dict[str, float], gains: dict[str, Interval]) -> str:
    for name, other in (("old", "the biases in use"), ("raw", "no correction")):
        if gains[name].high < 0:
            return f"R@1 falls from {r1[name]:.3f} with {other} to {r1['new']:.3f}, and not by chance"
    return ""


def _by_skewness(skews: dict[str, float]) -> str:
    for name, other in (("old", "the biases in use"), ("raw", "no correction")):
        if skews["new"] > skews[name] + SLACK * abs(skews[name]) + LEAST:
            return f"the skewness of N_10 rises from {skews[name]:.2f} with {other} to {skews['new']:.2f}"
    return ""


MOST_ROWS = 20_000


class Sample(NamedTuple):
    """Sampled rows with a usable vector. vectors: (n, d), as users see them. biases: (n, slots)."""

    keys: list[Key]
    vectors: Floats
    biases: Floats


def sampled(
    store: Store,
    info: CollectionInfo,
    state: CollectionState,
    labels: Labels | None,
    progress: Progress,
    *,
    seed: int = 0,
) -> Sample:
    """Return 20,000 rows, or all if there are fewer, and the rows that labels name."""
    rng = np.random.default_rng(seed)
    bias_location = BiasBackend(store, info, state)
    named = {key for keys in labels.keys for key in keys} if labels else set()
    keys: list[Key] = []
    vectors: list[Floats] = [np.empty((0, state.layout.dim), np.float32)]
    biases: list[Floats] = []
    all_keys = {partition: store.keys(info.name, partition=partition) for partition in info.partitions}
    total = sum(map(len, all_keys.values()))
    for partition, of_one in all_keys.items():
        share = min(len(of_one), -(-MOST_ROWS * len(of_one) // max(1, total)))
        picked = {of_one[i] for i in rng.choice(len(of_one), share, replace=False)} if share else set()
        wanted = [key for key in of_one if key in picked or key in named]
        for part in chunks(wanted, store.chunk_rows(info), "reading a sample", progress):
            biased_rows = bias_location.read(part, partition)
            valid = ~state.layout.invalid(biased_rows.vectors)
            keys += [key for key, usable in zip(biased_rows.batch.keys, valid, strict=True) if usable]
            vectors.append(biased_rows.vectors[valid])
            biases.append(biased_rows.biases[valid])
    slots = np.concatenate(biases) if biases else np.empty((0, state.slots), np.float32)
    return Sample(keys, np.concatenate(vectors), slots)


def labelled_in(sample: Sample, labels: Labels) -> Labelled | None:
    """Return the labelled queries that have an answer in the sample; None if they are fewer than two."""
    where = {key: i for i, key in enumerate(sample.keys)}
    found = [np.array([where[key] for key in keys if key in where], np.int64) for keys in labels.keys]
    rows = [i for i, numbers in enumerate(found) if len(numbers)]
    if len(rows) < 2:
        return None
    return Labelled(np.asarray(labels.queries, np.float32)[rows], [found[i] for i in rows])


def evaluate(
    store: Banks, state: CollectionState, plan: RefreshPlan, sample: Sample, options: RefreshOptions
) -> RefreshEvaluation | None:
    """Evaluate the biases in use and those of the plan, as `judge` does."""
    profile = state.profile
    bank = store.load_bank(profile.bank, checked=False)
    old = Standing(from_dict(profile.estimator), bank, profile.strength)
    new = Standing(plan.estimator, plan.bank, plan.strength)
    labelled = labelled_in(sample, options.labels) if options.labels else None
    return judge(state.layout, sample.vectors, old, new, labelled)


def fit(
    store: Store, info: CollectionInfo, state: CollectionState, plan: RefreshPlan, options: RefreshOptions
) -> Correction:
    """Fit the estimator on the bank, and on the gallery if it needs that. Start from the stored potentials if
    the estimator is unchanged."""
    bias_location, parts = BiasBackend(store, info, state), []
    for partition in info.partitions if plan.estimator.needs_gallery else ():
        keys = store.keys(info.name, partition=partition)
        for part in chunks(keys, store.chunk_rows(info), "reading the gallery", options.progress):
            parts.append(bias_location.read(part, partition).vectors)
    is_unchanged = is_same(plan.estimator, state.profile.estimator)
    return Correction.fit(
        state.layout,
        plan.estimator,
        plan.bank.queries,
        gallery=np.concatenate(parts) if parts else None,
        target_bank=plan.bank.targets,
        start=plan.bank.potentials if is_unchanged else None,
        fit=fit_on_ray if options.engine == "ray" else None,
    )


def steady_mean(old: float, biases: Floats) -> float:
    """Return the old mean bias if it is within one standard deviation of the new mean, so that rows with an
    unchanged bias need no write; else return the new mean."""
    if not len(biases):
        return old
    mean, spread = float(biases.mean(dtype=np.float64)), float(biases.std(dtype=np.float64))
    return old if abs(mean - old) <= spread else mean


def changed_share(
    state: CollectionState,
    plan: RefreshPlan,
    sample: Sample,
    correction: Correction | None,
    mean_bias: float,
    tolerance: float,
) -> float:
    """Return the share of the sample whose standby slot does not hold the new bias. correction: None if the
    plan names a stored bank with its potentials."""
    if correction is None:
        correction = Correction.restore(state.layout, plan.estimator, plan.bank)
    wanted = correction.centred(sample.vectors) - np.float32(mean_bias)
    off = np.abs(wanted - sample.biases[:, state.profile.standby]) > tolerance
    return float(off.mean()) if len(off) else 0.0
